"""What a run says before it begins and when it is over, and that nothing is allocated for it."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from dta_jax.composite_losses import Sum
from dta_jax.losses import KLPenalty, PPOClip
from dta_jax.preflight import preflight
from dta_jax.prepare import prepare
from dta_jax.rollouts import save_rollouts
from dta_jax.settings import Checkpoints, Logging, Planner, RecordedRollouts
from dta_jax.synthetic import generate_rollouts
from dta_jax.train import main, summary
from tests.test_live import SYNCHRONOUS
from tests.test_train import PPO, ROLLOUTS, config  # noqa: F401, a fixture


def said(train: object, start: int = 0) -> dict[str, str]:
    run, before = prepare(train), len(jax.live_arrays())
    found = dict(preflight(run, Path("runs/x"), start))
    assert len(jax.live_arrays()) == before
    return found


def test_a_recorded_run_says_what_it_is_about_to_do():
    found = said(dataclasses.replace(PPO, minibatches=2, epochs=3), start=4)
    assert found["devices"] == f"1 of {len(jax.devices())} cpu"
    assert found["model"].startswith("Qwen3, 1 layers, ")
    assert " parameters in float32, random weights" in found["model"]
    assert found["data"].startswith("generated: 12 rollouts, ")
    assert " 2 a batch, sequences up to " in found["data"]
    flat, tree = (int(word.replace(",", "")) for word in found["sharing"].split() if word[0].isdecimal())
    assert flat > tree > 0
    assert found["sharing"].endswith(f" computed as {tree:,} (x{flat / tree:.1f})")
    assert found["loss"] == "PPOClip with GroupNormalized in 2 minibatches, 3 times"
    assert found["plan"] == "packed, chunks of 64 tokens"
    assert found["attention"] == "xla (auto)"
    assert found["memory"].endswith(" MiB a device predicted for training, room included")
    assert found["steps"] == "5 to 6, going on from a checkpoint"
    assert found["checkpoints"] == "every 100 steps and at the end; the newest 2 stay"
    assert found["output"] == "runs/x"


def test_which_checkpoints_stay_is_said():
    how = Checkpoints(every=5, every_minutes=2.5, keep=1, keep_best=3, best_metric="reward_mean")
    expected = "every 5 steps, 2.5 minutes and at the end; the newest 1 and the 3 best by reward_mean stay"
    assert said(dataclasses.replace(PPO, checkpoints=how))["checkpoints"] == expected


def test_a_live_run_says_who_plays_and_who_answers():
    train = dataclasses.replace(SYNCHRONOUS, loss=Sum((PPOClip(), KLPenalty(0.1))))
    found = said(train)
    assert found["data"].startswith(
        "TreasureHunt, answered by LocalSampler: 2 groups of 3 episodes a batch, "
    )
    assert found["data"].endswith("contexts up to 64 tokens, at most 0 updates old")
    assert found["model"].endswith("; reference the starting weights")
    assert found["loss"] == "Sum with GroupNormalized"
    assert found["steps"].startswith("1 to ")


def test_what_is_kept_is_said():
    found = said(dataclasses.replace(PPO, planner=Planner(chunk_size=64, strategy="packed+keep")))
    plan, kept = found["plan"].rsplit(", ", 1)
    assert plan == "packed+keep, chunks of 64 tokens"
    assert re.fullmatch(r"\d+ MiB of residuals kept a device", kept)


def test_groups_without_signal_are_named(tmp_path):
    rollouts = generate_rollouts(ROLLOUTS)
    reward = np.where(rollouts.task_id == 1, 1.0, rollouts.trial % 2).astype(np.float32)
    save_rollouts(tmp_path / "r.npz", dataclasses.replace(rollouts, reward=reward))
    train = dataclasses.replace(PPO, rollouts=RecordedRollouts(str(tmp_path / "r.npz")))
    assert said(train)["data"].endswith(
        "left out, since their rewards do not differ enough: 1 groups (task 1)"
    )


def test_what_is_not_predicted_is_said():
    found = said(dataclasses.replace(PPO, planner=Planner(chunk_size=64, strategy="branch")))
    assert found["memory"] == "not predicted for branch"


def test_the_attention_that_runs_is_named(monkeypatch):
    monkeypatch.setattr("dta_jax.preflight.kernels_can_run", lambda problem: problem.head_dim == 8)
    assert said(PPO)["attention"] == "pallas (auto)"
    named = dataclasses.replace(PPO, planner=Planner(chunk_size=64, attention="xla"))
    assert said(named)["attention"] == "xla"


@pytest.mark.parametrize(
    ("log", "installed", "metrics"),
    [
        (Logging(), True, "metrics.jsonl, tensorboard/"),
        (Logging(), False, "metrics.jsonl, no TensorBoard (pip install tensorboardX)"),
        (Logging(tensorboard=False), True, "metrics.jsonl"),
        (
            Logging(wandb_project="trees", wandb_mode="offline"),
            True,
            "metrics.jsonl, tensorboard/, Weights & Biases project trees, offline in wandb/",
        ),
    ],
)
def test_where_metrics_go(monkeypatch, log, installed, metrics):
    monkeypatch.setattr("dta_jax.preflight.has_tensorboard", lambda: installed)
    assert said(dataclasses.replace(PPO, log=log))["metrics"] == metrics


def test_the_command_shows_the_table_then_steps_then_what_came_of_it(config, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "out"
    capsys.readouterr()
    main([str(config), "--out", str(out)])
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    table = [line.split()[0] for line in lines if line.startswith("  ")]
    assert table[:4] == ["devices", "model", "data", "sharing"]
    assert lines[len(table) :][0] == "step 1/2: compiling ..."
    assert lines[-1].startswith("step 2/2: ")
    assert [line.split()[0] for line in shown.out.splitlines()][1:] == [
        "steps", "loss", "reward_mean", "tokens", "time", "last",
    ]  # fmt: skip
    main([str(config), "--out", str(out), "--gin", "Train.steps = 3", "--quiet"])
    assert capsys.readouterr() == ("", "")


def test_a_summary_needs_no_step_that_learned():
    row = {"step": 7, "seconds": 0.0, "flat_tokens": 0, "tree_tokens": 0, "compile_seconds": 0.0}
    assert dict(summary([row]))["steps"] == "7 to 7"
