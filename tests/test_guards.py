"""Guards: each kind of trouble, met in a run: its weights, metrics, messages and exit status."""

import dataclasses
import json
import re
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.composite_losses import Sum
from dta_jax.diagnostics import load_replay
from dta_jax.errors import InputError
from dta_jax.guard_settings import Guards
from dta_jax.guards import FEWEST_NORMS, MAX_REPLAYS, GuardStop, Watch
from dta_jax.loop import run_training
from dta_jax.losses import KLPenalty, PolicyGradient, PPOClip
from dta_jax.metrics import read_metrics, read_steps
from dta_jax.objective import GAE, GroupNormalized
from dta_jax.prepare import prepare
from dta_jax.report import read_run, summary
from dta_jax.rollouts import save_rollouts
from dta_jax.settings import AdamW, Checkpoints, Critic, RecordedRollouts, Train
from dta_jax.synthetic import generate_rollouts
from dta_jax.tree_engine import BatchGradient
from dta_jax.types import Samples
from tests.test_live import AHEAD, SYNCHRONOUS
from tests.test_train import GIN, PPO, ROLLOUTS, checkpoint_arrays, command

EVERY_STEP = Checkpoints(every=1, keep=99)
UNSCALED = GroupNormalized(std="none")
GROUPS = dataclasses.replace(PPO, batch_groups=1, checkpoints=EVERY_STEP, steps=4)


def recorded(path: Path, logprob: float = -3.9, reward: np.ndarray | None = None) -> RecordedRollouts:
    """Rollouts; those of task 1 were sampled with another log-probability than the others' -3.9."""
    rollouts = generate_rollouts(ROLLOUTS)
    odd = np.repeat(rollouts.task_id == 1, np.diff(rollouts.offsets))
    logprobs = np.where(odd, logprob, -3.9).astype(np.float32)
    reward = (rollouts.trial % 2).astype(np.float32) if reward is None else reward
    save_rollouts(path, dataclasses.replace(rollouts, logprobs=logprobs, reward=reward))
    return RecordedRollouts(str(path))


def overflowing(path: Path) -> RecordedRollouts:
    """Rollouts whose task 1 has a loss beyond float32: ratio and advantage are both huge."""
    rollouts = generate_rollouts(ROLLOUTS)
    reward = np.where(rollouts.task_id == 1, 1e30, 1) * (rollouts.trial % 2)
    return recorded(path, -500.0, reward.astype(np.float32))


def run(train: Train, out: Path) -> list[dict]:
    return read_steps(out, run_training(prepare(train), out, "Train.seed = 0\n"))


def odd_steps(train: Train) -> list[int]:
    """The steps, from 1, that train on task 1."""
    source = prepare(train).source
    return [n for n in range(1, train.steps + 1) if source.rollouts.task_id[source.rows(n)][0] == 1]


def test_a_step_that_is_not_finite_is_skipped_bit_for_bit(tmp_path, capsys):
    data, guards = overflowing(tmp_path / "r.npz"), Guards(non_finite="skip")
    train = dataclasses.replace(GROUPS, rollouts=data, advantages=UNSCALED, guards=guards, steps=8)
    odd = odd_steps(train)
    assert len(odd) == 2
    assert odd[0] > 1
    rows = run(train, tmp_path / "out")
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:
        skipped = row["step"] in odd
        assert row.get("guard_non_finite") == row.get("updates_skipped") == (1 if skipped else None)
        assert (row["updates"], "loss" in row) == ((0, False) if skipped else (1, True))
        if row["step"] > 1:
            before, after = (checkpoint_arrays(tmp_path / "out", row["step"] - n) for n in (1, 0))
            assert (before == after) == skipped
    assert read_metrics(tmp_path / "out" / "metrics.jsonl") == rows
    replay = tmp_path / "out" / f"non_finite_step_{odd[0]}.npz"
    assert len(load_replay(replay).sequence) == rows[odd[0] - 1]["loss_tokens"]
    err = capsys.readouterr().err
    assert err.count(f"warning: step {odd[0]}: not finite: loss") == err.count("warning:") == 1
    assert f"guards: non_finite 2 x in steps {odd[0]} .. {odd[1]}" in err
    assert summary([read_run(tmp_path / "out")])[0]["guards"] == "non_finite 2"


def test_a_run_that_was_stopped_goes_on_with_other_guards(tmp_path, capsys):
    """It stops without losing the step before, and is then the run that skips."""
    data = overflowing(tmp_path / "r.npz")
    bindings = "Train.batch_groups = 1\nCheckpoints.every = 50\nGroupNormalized.std = 'none'\n"
    (tmp_path / "c.gin").write_text(GIN.format(path=tmp_path / "r.npz") + bindings)
    odd = odd_steps(dataclasses.replace(GROUPS, rollouts=data, advantages=UNSCALED))[0]
    assert odd > 1, "the stop must have something to lose"
    status, err = command(capsys, tmp_path / "c.gin", "--out", tmp_path / "a", "--gin", "Train.steps = 4")
    assert status == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith(f"error: step {odd}: not finite: loss, grad_norm")
    assert last.endswith(f"a/non_finite_step_{odd}.npz; the update was not made")
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == [str(odd - 1)]
    more = ("--gin", "Train.steps = 4", "--gin", "Guards.non_finite = 'skip'")
    for out in ("a", "b"):
        assert command(capsys, tmp_path / "c.gin", "--out", tmp_path / out, *more)[0] == 0
    assert checkpoint_arrays(tmp_path / "a", 4) == checkpoint_arrays(tmp_path / "b", 4)


def test_exploding_numbers_are_told_or_skipped(tmp_path, capsys):
    loss = Sum((PPOClip(), KLPenalty(0.01)))
    warned = Guards(
        max_ratio=100.0,
        ratio="warn",
        max_kl_behaviour=5.0,
        max_kl_reference=1e-12,
        kl="warn",
        max_grad_norm_factor=3.0,
    )
    data = recorded(tmp_path / "r.npz", -12.0)
    train = dataclasses.replace(GROUPS, loss=loss, rollouts=data, guards=warned, steps=12)
    odd = odd_steps(train)
    rows = run(train, tmp_path / "warn")
    for kind in ("ratio", "kl_behaviour"):
        assert [row["step"] for row in rows if f"guard_{kind}" in row] == odd
    assert {row["step"] for row in rows if "guard_kl_reference" in row} >= set(range(3, 13))
    # Too few norms are known before.
    late = [step for step in odd if step > FEWEST_NORMS]
    for name in ("guard_grad_norm", "updates_skipped"):
        assert [row["step"] for row in rows if name in row] == late
    arrays = [checkpoint_arrays(tmp_path / "warn", late[0] - n) for n in (0, 1)]
    assert arrays[0] == arrays[1]
    err = capsys.readouterr().err
    assert re.search(rf"step {odd[0]}: ratio_max [\d.]+ is above 100; the run goes on", err)
    assert re.search(rf"step {late[0]}: grad_norm [\d.]+ is above 3 times [\d.]+, the median of the", err)
    short = dataclasses.replace(train, steps=odd[0])
    skips = dataclasses.replace(short, guards=dataclasses.replace(warned, ratio="skip"))
    assert run(skips, tmp_path / "skip")[-1]["updates_skipped"] == 1
    stops = dataclasses.replace(short, guards=dataclasses.replace(warned, ratio="stop"))
    with pytest.raises(
        GuardStop, match=rf"step {odd[0]}: ratio_max .* is above 100; the batch is in .*/ratio_"
    ):
        run(stops, tmp_path / "stop")


def test_equal_rewards_save_the_gradient_until_there_are_too_many(tmp_path, capsys):
    rollouts = recorded(tmp_path / "r.npz", reward=np.ones(12, np.float32))
    train = dataclasses.replace(
        GROUPS,
        rollouts=rollouts,
        advantages=GroupNormalized(skip_equal=False),
        guards=Guards(equal_rewards="skip", max_skips=2),
    )
    with pytest.raises(GuardStop, match=r"step 3: 3 updates in a row would be skipped \(max_skips = 2\)"):
        run(train, tmp_path / "out")
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [(row["guard_equal_rewards"], row["executed_tokens"], row["updates"]) for row in rows] == [
        (1, 0, 0)
    ] * 2
    assert checkpoint_arrays(tmp_path / "out", 1) == checkpoint_arrays(tmp_path / "out", 2)
    assert "every advantage is 0, with rewards 1 .. 1 in 3 episodes" in capsys.readouterr().err
    warned = run(dataclasses.replace(train, guards=Guards(), steps=1), tmp_path / "warn")
    assert (warned[0]["guard_equal_rewards"], warned[0]["grad_norm"]) == (1, 0)
    assert warned[0]["executed_tokens"] > 0


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_a_critic_that_is_not_finite_leaves_the_policy_alone(tmp_path, capsys):
    reward = np.linspace(0, 1e30, 12).astype(np.float32)
    train = dataclasses.replace(
        GROUPS,
        rollouts=recorded(tmp_path / "r.npz", reward=reward),
        advantages=GAE(),
        critic=Critic(AdamW(1e-3)),
        guards=Guards(non_finite="skip"),
        steps=2,
    )
    rows = run(train, tmp_path / "out")
    assert [(row["guard_non_finite"], row["updates"]) for row in rows] == [(1, 1)] * 2
    assert "critic_loss" in capsys.readouterr().err
    first, second = (checkpoint_arrays(tmp_path / "out", step) for step in (1, 2))
    changed = {name.split("']")[0].strip("['") for name in first if first[name] != second[name]}
    assert changed == {"params", "opt_state"}


def test_a_batch_without_answers_can_be_skipped(tmp_path, capsys):
    train = dataclasses.replace(SYNCHRONOUS, max_length=3, steps=2, guards=Guards(empty="skip"))
    rows = run(train, tmp_path)
    assert [(row["guard_empty"], row["loss_tokens"], row["updates"]) for row in rows] == [(1, 0, 0)] * 2
    assert checkpoint_arrays(tmp_path, 2)
    err = capsys.readouterr().err
    assert err.count("warning: step 1: no episode has an answer") == 1
    assert "guards: empty 2 x in steps 1 .. 2" in err


def test_a_full_queue_is_told_and_may_stop_the_run(tmp_path, monkeypatch, capsys):
    prepared = prepare(dataclasses.replace(AHEAD, guards=Guards(full_queue_seconds=0.2), steps=3))
    update = type(prepared.learner).update

    def slow(*args: object, **options: object) -> object:
        result = update(*args, **options)
        time.sleep(1.0)
        return result

    monkeypatch.setattr(type(prepared.learner), "update", slow)
    out = tmp_path / "warn"
    rows = read_steps(out, run_training(prepared, out, "Train.seed = 0\n"))
    full = [row for row in rows if "guard_full_queue" in row]
    assert full
    assert all(row["queue_full_seconds"] > 0.2 for row in full)
    assert capsys.readouterr().err.count("generation stood still for") == 1
    stops = dataclasses.replace(prepared.train, guards=Guards(full_queue_seconds=0.2, full_queue="stop"))
    message = r"generation stood still for .* Collect\.max_staleness allows$"
    with pytest.raises(GuardStop, match=message) as stopped:
        run(stops, tmp_path / "stop")
    assert (tmp_path / "stop" / "checkpoints" / str(stopped.value.step)).is_dir()


def test_a_live_run_that_stops_goes_on_with_the_batch_that_stopped_it(tmp_path, monkeypatch):
    """What the collector had handed out for the stopped step is handed out again."""
    whole = run(SYNCHRONOUS, tmp_path / "whole")
    allows = Watch.allows

    def stop_at_3(self: Watch, *args: object) -> bool:
        if self._step == 3:
            raise GuardStop("ratio", 3, "too much", None)
        return allows(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "allows", stop_at_3)
        train = dataclasses.replace(SYNCHRONOUS, checkpoints=Checkpoints(every=50))
        with pytest.raises(GuardStop):
            run(train, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["2"]
    rows = run(SYNCHRONOUS, tmp_path / "out")
    assert [row["reward_mean"] for row in rows] == [row["reward_mean"] for row in whole[2:]]
    assert checkpoint_arrays(tmp_path / "out", 4) == checkpoint_arrays(tmp_path / "whole", 4)


SAMPLES = Samples(
    [np.arange(4, dtype=np.int32)],
    np.zeros(2, np.int64),
    np.array([2, 3]),
    {name: np.ones(2, np.float32) for name in ("weight", "advantage", "old_logp")},
)
UNIT = np.zeros(2, np.int64)


def found(loss: float = 1.0, logp: float = -1.0) -> BatchGradient:
    entries = np.full(2, logp, np.float32)
    return BatchGradient(loss, {"w": jnp.float32(loss)}, entries, np.ones(2, np.float32), None)  # type: ignore[arg-type]


def allowed(watch: Watch, step: int, norm: float = 1.0, loss: float = 1.0) -> bool:
    watch.begin(step)
    return watch.allows(found(loss), norm, SAMPLES, UNIT, PPOClip())


def test_replay_files_are_few_and_a_stop_ends_a_row_of_skips(tmp_path):
    told: list[str] = []
    watch = Watch(Guards(non_finite="skip", max_skips=5), tmp_path, tell=told.append)
    assert [allowed(watch, step, loss=np.nan) for step in range(1, 6)] == [False] * 5
    assert len(list(tmp_path.iterdir())) == MAX_REPLAYS
    assert allowed(watch, 6)
    assert watch.row() == {}
    again = Watch(Guards(non_finite="skip", max_skips=1), tmp_path, json.loads(json.dumps(watch.state())))
    assert not allowed(again, 7, loss=np.inf)
    with pytest.raises(GuardStop, match="step 8: 2 updates in a row") as stopped:
        allowed(Watch(Guards(non_finite="skip", max_skips=1), tmp_path, again.state()), 8, loss=np.inf)
    assert stopped.value.replay == tmp_path / "non_finite_step_8.npz"
    assert len(told) == 1


def test_the_median_is_of_updates_that_were_made_and_survives_a_resume(tmp_path):
    limits = Guards(max_grad_norm_factor=2.0, max_skips=99)
    watch = Watch(limits, tmp_path)
    assert all(allowed(watch, step, norm=100.0 if step == 1 else 1.0) for step in range(1, FEWEST_NORMS + 1))
    assert not allowed(watch, 20, norm=2.1)
    again = Watch(limits, tmp_path, json.loads(json.dumps(watch.state())))
    assert [allowed(again, 21, norm=norm) for norm in (2.1, 2.0)] == [False, True]


def test_a_limit_to_a_number_that_is_not_there_is_refused(tmp_path):
    watch = Watch(Guards(max_ratio=2.0), tmp_path)
    watch.begin(1)
    with pytest.raises(
        InputError, match="Guards: max_ratio: expected None: the loss has no ratio_max; got 2"
    ):
        watch.allows(found(), 1.0, SAMPLES, UNIT, PolicyGradient())


def test_a_full_disk_does_not_hide_what_is_wrong(tmp_path):
    told: list[str] = []
    (tmp_path / "file").write_text("")
    watch = Watch(Guards(), tmp_path / "file", tell=told.append)
    with pytest.raises(GuardStop, match="step 1: not finite: loss"):
        allowed(watch, 1, loss=np.nan)
    assert "non_finite_step_1.npz: cannot be written: " in told[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"non_finite": "warn"}, "Guards: non_finite: expected stop or skip"),
        ({"ratio": "ignore"}, "Guards: ratio: expected one of stop, skip, warn"),
        ({"full_queue": "skip"}, "Guards: full_queue: expected warn or stop"),
        ({"max_ratio": 1.0}, "Guards: max_ratio: expected None or a finite number above 1"),
        ({"max_kl_behaviour": 0.0}, "Guards: max_kl_behaviour: expected None or a finite number above 0"),
        ({"max_skips": -1}, "Guards: max_skips: expected at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        Guards(**change)


def test_a_limit_to_the_reference_needs_one():
    with pytest.raises(InputError, match="Guards: max_kl_reference: expected None: neither the loss"):
        dataclasses.replace(PPO, guards=Guards(max_kl_reference=1.0))
