"""Training on rollouts made on the way: the same run twice, taken up again, stopped, evaluated."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dta_jax.collect.evaluation import Evaluate
from dta_jax.collect.settings import Collect
from dta_jax.composite_losses import Sum
from dta_jax.config import load_config, operative_config
from dta_jax.envs.game import TreasureHunt
from dta_jax.envs.imported import ImportedEnvironment
from dta_jax.errors import InputError
from dta_jax.evaluate import main as evaluate
from dta_jax.generation.local import LocalSampler
from dta_jax.generation.protocol import Sampling
from dta_jax.loop import run_training
from dta_jax.losses import KLPenalty, PPOClip
from dta_jax.metrics import read_metrics, read_steps
from dta_jax.objective import GroupNormalized
from dta_jax.prepare import prepare
from dta_jax.qwen3 import Qwen3Config
from dta_jax.rollouts import load_rollouts
from dta_jax.settings import AdamW, Checkpoints, LiveRollouts, Planner, Train

ROOT = Path(__file__).parents[1]
SYNCHRONOUS = Train(
    rollouts=LiveRollouts(
        environment=TreasureHunt(size=3, turns=2, nearest=1, tasks=6),
        generator=LocalSampler(rows=8, max_context=64),
        collect=Collect(group_size=3, sampling=Sampling(max_new_tokens=1)),
    ),
    model=Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
    ),
    loss=PPOClip(),
    advantages=GroupNormalized(),
    optimizer=AdamW(1e-2),
    planner=Planner(chunk_size=64),
    checkpoints=Checkpoints(every=2, keep=5),
    batch_groups=2,
    steps=4,
)


def collecting(**changes: object) -> Train:
    rollouts = SYNCHRONOUS.rollouts
    collect = dataclasses.replace(rollouts.collect, **changes)
    return dataclasses.replace(SYNCHRONOUS, rollouts=dataclasses.replace(rollouts, collect=collect))


AHEAD = collecting(max_staleness=1, on_stale="wait")


def run(train: Train, out: Path) -> list[dict]:
    return read_steps(out, run_training(prepare(train), out, "Train.seed = 0\n"))


def learned(rows: list[dict]) -> list[tuple]:
    """What a step computed, without how long anything took."""
    return [tuple((k, v) for k, v in sorted(row.items()) if "seconds" not in k) for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[list[dict], Path]:
    out = tmp_path_factory.mktemp("whole")
    return run(SYNCHRONOUS, out), out


def test_the_trainer_sees_the_samplers_log_probabilities(whole):
    rows, _ = whole
    for row in rows:
        assert row["ratio_max"] == pytest.approx(1, abs=1e-4)
        assert row["kl_behaviour"] < 1e-8
        assert row["staleness_max"] == 0
    assert rows[0]["dedupe_ratio"] > 3
    assert {"reward_mean", "turns_mean", "wait_seconds", "info_found"} <= rows[0].keys()


def test_the_same_run_is_the_same_bit_for_bit(whole, tmp_path):
    assert learned(run(SYNCHRONOUS, tmp_path)) == learned(whole[0])


def test_an_environment_can_be_named_by_its_module(whole, tmp_path):
    game = SYNCHRONOUS.rollouts.environment
    named = ImportedEnvironment(
        "dta_jax.envs.game:TreasureHunt", json.dumps(dataclasses.asdict(game)), "tokens", vocab_size=32
    )
    rollouts = dataclasses.replace(SYNCHRONOUS.rollouts, environment=named)
    rows = run(dataclasses.replace(SYNCHRONOUS, rollouts=rollouts, steps=1), tmp_path)
    assert learned(rows) == learned(whole[0][:1])


def test_a_resumed_run_is_the_same_run(whole, tmp_path):
    run(dataclasses.replace(SYNCHRONOUS, steps=2), tmp_path)
    run(SYNCHRONOUS, tmp_path)
    assert learned(read_metrics(tmp_path / "metrics.jsonl")) == learned(whole[0])


def test_running_ahead_stays_within_the_bound_and_is_taken_up_again(tmp_path):
    rows = run(AHEAD, tmp_path)
    assert max(row["staleness_max"] for row in rows) <= 1
    assert any(row["staleness_max"] == 1 for row in rows)
    saved = json.loads((tmp_path / "checkpoints" / "4" / "run" / "metadata").read_text())
    assert saved["collector"]["step"] == 4
    more = run(dataclasses.replace(AHEAD, steps=6), tmp_path)
    assert [row["step"] for row in more] == [5, 6]
    assert max(row["staleness_max"] for row in more) <= 1


def test_accepted_rollouts_are_kept_for_the_resumed_run(tmp_path):
    """Steps are slowed down, so that groups wait when the checkpoint is made."""
    prepared = prepare(AHEAD)
    update = type(prepared.learner).update

    def slow(*args: object, **options: object) -> object:
        result = update(*args, **options)
        time.sleep(0.5)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(prepared.learner), "update", slow)
        run(AHEAD, tmp_path)
    saved = json.loads((tmp_path / "checkpoints" / "2" / "run" / "metadata").read_text())["collector"]
    assert saved["accepted"]
    kept = load_rollouts(tmp_path / "accepted" / "2.npz")
    assert len(np.unique(kept.episode)) == 3 * len(saved["accepted"])


def test_a_reference_is_scored_in_every_step(tmp_path):
    train = dataclasses.replace(SYNCHRONOUS, loss=Sum((PPOClip(), KLPenalty(0.1))), steps=3)
    rows = run(train, tmp_path)
    assert rows[0]["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert rows[2]["kl_reference"] > 1e-6


def test_evaluations_leave_the_training_alone(whole, tmp_path):
    how = Evaluate(trials=2, sampling=Sampling(max_new_tokens=1))
    rows = run(dataclasses.replace(SYNCHRONOUS, evaluate=how, evaluate_every=2), tmp_path)
    assert [any(name.startswith("eval_") for name in row) for row in rows] == [False, True, False, True]
    assert rows[1]["eval_episodes"] == 12
    bare = [{k: v for k, v in row.items() if not k.startswith("eval_")} for row in rows]
    assert learned(bare) == learned(whole[0])


def test_batches_can_be_kept(tmp_path):
    rollouts = dataclasses.replace(SYNCHRONOUS.rollouts, save_every=2)
    run(dataclasses.replace(SYNCHRONOUS, rollouts=rollouts, steps=2), tmp_path)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["2.npz"]
    assert load_rollouts(tmp_path / "rollouts" / "2.npz").num_rollouts == 6


def test_a_step_without_signal_changes_nothing_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("dta_jax.envs.game.Hunt._distance", lambda _: 1)  # no move changes it or pays
    rows = run(dataclasses.replace(SYNCHRONOUS, steps=2), tmp_path)
    assert [row["grad_norm"] for row in rows] == [0, 0]
    assert rows[0]["uniform_group_fraction"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.5}, r"Train: temperature: expected 1\.0, the Sampling\.temperature"),
        ({"max_groups": 3}, "Train: max_groups: expected None"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SYNCHRONOUS, **change)


def test_a_vocabulary_that_is_too_small_is_refused():
    small = dataclasses.replace(SYNCHRONOUS.model, vocab_size=16)
    with pytest.raises(InputError, match="vocab_size: expected at least 32, for TreasureHunt; got 16"):
        prepare(dataclasses.replace(SYNCHRONOUS, model=small))


QUICK = [
    "Train.batch_groups = 2", "Collect.group_size = 2", "LocalSampler.rows = 8",
    "Qwen3Config.hidden_size = 16",
    "Qwen3Config.num_hidden_layers = 1", "Qwen3Config.intermediate_size = 16", "Planner.chunk_size = 64",
]  # fmt: skip


def command(out: Path, *bindings: str) -> list[str]:
    gin = [word for binding in (*QUICK, *bindings) for word in ("--gin", binding)]
    return [sys.executable, "-m", "dta_jax.train", "configs/quickstart.gin", "--out", str(out), *gin]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_step_and_ends_the_run(tmp_path, number, status):
    process = subprocess.Popen(
        command(tmp_path / "out", "Train.steps = 100000"),
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    metrics = tmp_path / "out" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    last = err.strip().splitlines()[-1]
    steps = len(metrics.read_text().splitlines())
    assert process.returncode == status, err
    assert last.startswith(f"stopped by {number.name} after step {steps}, which is saved")
    assert (tmp_path / "out" / "checkpoints" / str(steps)).is_dir()
    assert "Traceback" not in err


def test_the_command_evaluates_a_run(tmp_path, capsys):
    train = load_config(
        ROOT / "configs/quickstart.gin", [*QUICK, "Train.steps = 2", "TreasureHunt.tasks = 3"]
    )
    run_training(prepare(train), tmp_path, operative_config())
    before = sorted(path.name for path in tmp_path.rglob("*"))
    evaluate([str(tmp_path), "--tasks", "2", "--trials", "2", "--json", str(tmp_path / "e.json")])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["step"], printed["episodes"]) == (2, 4)
    assert [task["trials"] for task in json.loads((tmp_path / "e.json").read_text())["per_task"]] == [2, 2]
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([*before, "e.json"])
    with pytest.raises(InputError, match="step: expected one of 2; got 7"):
        evaluate([str(tmp_path), "--step", "7"])
