"""The training loop: what it computes, what it writes, and that stopping and starting changes nothing."""

import dataclasses
import gc
import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dta_jax import tree_engine
from dta_jax.advantages import group_normalized
from dta_jax.composite_losses import Sum
from dta_jax.config import load_config, operative_config
from dta_jax.errors import InputError, run_command
from dta_jax.guards import GuardStop, Watch
from dta_jax.hf_weights import save_folder
from dta_jax.learner import TrainState
from dta_jax.loop import run_training
from dta_jax.losses import NLL, KLPenalty, PPOClip
from dta_jax.metrics import read_metrics, read_steps
from dta_jax.objective import Aggregate, GroupNormalized, credited
from dta_jax.optimizer import learning_rate, make_optimizer
from dta_jax.prepare import Run, prepare
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.recorded import BatchOrder, RecordedSource
from dta_jax.reference import dense_value_and_grad
from dta_jax.rollouts import save_rollouts
from dta_jax.sequence_losses import SequenceSum
from dta_jax.settings import (
    AdamW,
    HuggingFaceModel,
    Planner,
    RecordedRollouts,
    Train,
)
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.train import main
from dta_jax.zero import State

ROLLOUTS = SyntheticRollouts(
    vocab_size=48,
    tasks=4,
    trials=3,
    turns=2,
    system_tokens=12,
    user_tokens=4,
    completion_tokens=6,
    tool_tokens=4,
)
MODEL = Qwen3Config(
    vocab_size=48,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=16,
)
PPO = Train(
    rollouts=ROLLOUTS,
    model=MODEL,
    loss=PPOClip(),
    advantages=GroupNormalized(),
    aggregate=Aggregate(kind="sequence_mean", unit="rollout"),
    optimizer=AdamW(learning_rate=3e-3, warmup_steps=2, decay_steps=10),
    planner=Planner(chunk_size=64),
    batch_groups=2,
    steps=6,
)
SFT = dataclasses.replace(PPO, loss=NLL(), advantages=None, aggregate=Aggregate())

GIN = f"""
Train.rollouts = @RecordedRollouts()
Train.model = @Qwen3Config()
Train.loss = @PPOClip()
Train.advantages = @GroupNormalized()
Train.steps = 2
RecordedRollouts.path = '{{path}}'
Qwen3Config:
  vocab_size = 48
  hidden_size = 16
  num_hidden_layers = 1
  num_attention_heads = 2
  num_key_value_heads = 1
  head_dim = 8
  intermediate_size = 16
Planner.chunk_size = {PPO.planner.chunk_size}
"""


def run(train: Train, out: Path, **options: bool) -> list[dict]:
    return read_steps(out, run_training(prepare(train), out, "Train.seed = 0\n", **options))


def one_step(
    prepared: Run, state: TrainState, step: int, out: Path, values: dict | None = None
) -> tuple[TrainState, dict]:
    planned = prepared.learner.plan(prepared.source.batch(step, values))
    return prepared.learner.update(state, step, planned, None, Watch(prepared.train.guards, out))


def source_of(train: Train) -> RecordedSource:
    return prepare(train).source


def numbers(rows: list[dict]) -> list[tuple]:
    """What a step computed; not how long it took."""
    return [tuple((k, v) for k, v in sorted(row.items()) if "seconds" not in k) for row in rows]


def checkpoint_arrays(out: Path, step: int) -> dict:
    return json.loads((out / "checkpoints" / str(step) / "run" / "metadata").read_text())["arrays"]


def with_checkpoints(train: Train, every: int, **changes: object) -> Train:
    checkpoints = dataclasses.replace(train.checkpoints, every=every, keep=10)
    return dataclasses.replace(train, checkpoints=checkpoints, **changes)


def test_the_gradient_of_a_step_is_the_dense_one():
    short = dataclasses.replace(ROLLOUTS, trials=2, turns=1)  # the oracle compiles each length
    prepared = prepare(dataclasses.replace(PPO, rollouts=short, batch_groups=1))
    params = prepared.learner.starting_params()
    recorded = {"old_logp": np.full(prepared.source.rollouts.tokens.size, -3.0, np.float32)}
    batch = prepared.source.batch(1, recorded)
    batch = dataclasses.replace(
        batch,
        samples=dataclasses.replace(
            batch.samples, values=batch.samples.values | credited(batch, PPO.objective)
        ),
    )
    assert batch.samples.values["weight"].sum() == pytest.approx(1, rel=1e-6)
    found = prepared.learner.engine.value_and_grad(params, batch.samples, PPO.loss, batch.unit)
    dense = dense_value_and_grad(prepared.learner.model, params, batch.samples, PPO.loss)
    assert found.loss == pytest.approx(float(dense.loss), rel=2e-5)
    np.testing.assert_allclose(found.logp, dense.logp, rtol=2e-5, atol=1e-6)
    for tree, plain in zip(jax.tree.leaves(found.grads), jax.tree.leaves(dense.grads), strict=True):
        assert jnp.abs(tree - plain).max() <= 2e-5 * jnp.abs(plain).max()


def test_two_passes_give_the_gradient_of_one():
    prepared = prepare(dataclasses.replace(SFT, temperature=0.7))
    params, batch = prepared.learner.starting_params(), prepared.source.batch(1)
    one = prepared.learner.engine.value_and_grad(params, batch.samples, NLL(), batch.unit)
    two = prepared.learner.engine.value_and_grad(params, batch.samples, SequenceSum((NLL(),)), batch.unit)
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    for a, b in zip(jax.tree.leaves(one.grads), jax.tree.leaves(two.grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * float(jnp.abs(a).max()))


def test_supervised_loss_falls(tmp_path):
    rows = run(dataclasses.replace(SFT, steps=25, batch_groups=4, optimizer=AdamW(1e-2)), tmp_path)
    assert rows[0]["loss"] == pytest.approx(np.log(48), rel=0.02)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]


def test_ppo_starts_at_ratio_one_and_improves(tmp_path):
    rows = run(dataclasses.replace(PPO, batch_groups=3, optimizer=AdamW(1e-2), steps=8), tmp_path)
    assert rows[0]["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert rows[0]["loss"] == pytest.approx(0, abs=1e-6)  # advantages of a group add up to 0
    assert rows[-1]["loss"] < -0.05
    assert np.load(tmp_path / "starting_logp.npy").dtype == np.float32


def test_a_model_folder_is_trained_in_bfloat16_on_float32_master_weights(tmp_path):
    model = Qwen3(dataclasses.replace(MODEL, dtype="bfloat16"))
    params = model.init(jax.random.key(3))
    save_folder(tmp_path / "hf", model.config, params)
    folder = HuggingFaceModel(str(tmp_path / "hf"))
    prepared = prepare(dataclasses.replace(SFT, model=folder, optimizer=AdamW(1e-4)))
    state = prepared.learner.starting_state()
    master = state.policy.params
    assert {leaf.dtype for leaf in jax.tree.leaves(master)} == {jnp.dtype("float32")}
    for a, b in zip(jax.tree.leaves(master), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b.astype(jnp.float32))
    state, row = one_step(prepared, state, 1, tmp_path)
    assert row["loss"] == pytest.approx(np.log(48), rel=0.05)
    moved = state.policy.params["embed"] - params["embed"].astype(jnp.float32)
    assert 0 < float(jnp.abs(moved).max()) < 1e-3  # smaller than a bfloat16 could hold
    assert state.policy.params["embed"].dtype == jnp.float32


def test_recorded_logprobs_are_the_old_policy(tmp_path):
    rollouts = generate_rollouts(ROLLOUTS)
    given = dataclasses.replace(rollouts, logprobs=np.full(rollouts.tokens.size, -1.0, np.float32))
    save_rollouts(tmp_path / "r.npz", given)
    train = dataclasses.replace(PPO, rollouts=RecordedRollouts(str(tmp_path / "r.npz")), steps=1)
    row = run(train, tmp_path / "out")[0]
    assert row["ratio_mean"] == pytest.approx(np.exp(1) / 48, rel=0.1)
    assert not (tmp_path / "out" / "starting_logp.npy").exists()


def test_a_reference_and_a_proximal_policy_are_the_starting_and_the_current_weights(tmp_path):
    loss = Sum((PPOClip(anchor="prox_logp"), KLPenalty(0.1)))
    rows = run(dataclasses.replace(PPO, loss=loss, steps=3), tmp_path)
    assert [row["ratio_max"] for row in rows] == pytest.approx([1, 1, 1], abs=1e-5)
    assert rows[0]["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert rows[2]["kl_reference"] > 1e-7


def test_what_a_run_writes(tmp_path):
    rows = run(with_checkpoints(PPO, 4), tmp_path)
    assert read_metrics(tmp_path / "metrics.jsonl") == rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    names = (
        "loss seconds flat_tokens tree_tokens loss_tokens grad_norm reward_mean learning_rate dedupe_ratio"
    )
    assert set(names.split()) <= rows[0].keys()
    assert (tmp_path / "operative_config.gin").read_text() == "Train.seed = 0\n"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "6"]
    prepared = prepare(PPO)
    samples = prepared.source.batch(3).samples
    distinct = {s[: n + 1].tobytes() for s in samples.sequences for n in range(len(s))}
    assert rows[2]["flat_tokens"] == sum(map(len, samples.sequences))
    assert rows[2]["tree_tokens"] == len(distinct)
    assert rows[2]["loss_tokens"] == len(samples.sequence)
    assert rows[2]["executed_tokens"] >= rows[2]["tree_tokens"]


@pytest.mark.parametrize("train", [PPO, SFT], ids=["ppo", "sft"])
def test_a_resumed_run_is_the_same_run(tmp_path, train):
    """In one go; and stopped after steps 1 and 4, so that the second epoch begins in the third part."""
    train = with_checkpoints(train, 10)
    whole = run(train, tmp_path / "whole")
    parts = [run(dataclasses.replace(train, steps=n), tmp_path / "parts") for n in (1, 4, 6)]
    assert [len(part) for part in parts] == [1, 3, 2]
    assert numbers(parts[0] + parts[1] + parts[2]) == numbers(whole)
    assert numbers(read_metrics(tmp_path / "parts/metrics.jsonl")) == numbers(whole)
    assert checkpoint_arrays(tmp_path / "parts", 6) == checkpoint_arrays(tmp_path / "whole", 6)
    if train is PPO:
        logprobs = [np.load(tmp_path / name / "starting_logp.npy") for name in ("whole", "parts")]
        np.testing.assert_array_equal(*logprobs)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    """Killed after step 5's row and while step 6's was written; checkpoint 4 is the last whole one."""
    train = with_checkpoints(PPO, 2)
    whole = run(train, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints/6")
    (tmp_path / "checkpoints/6.orbax-checkpoint-tmp-1").mkdir()
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text[: text.rindex('"loss"') + 20])
    again = run(train, tmp_path)
    assert [row["step"] for row in again] == [5, 6]
    assert numbers(read_metrics(tmp_path / "metrics.jsonl")) == numbers(whole)


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path):
    whole = run(PPO, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    assert numbers(run(PPO, tmp_path)) == numbers(whole)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6


def test_a_finished_run_is_left_alone(tmp_path):
    run(PPO, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run(dataclasses.replace(PPO, steps=3), tmp_path) == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_settings_are_refused_unless_allowed(tmp_path):
    run_training(prepare(dataclasses.replace(PPO, steps=1)), tmp_path, "Train.seed = 0\nTrain.steps = 1\n")
    metrics = (tmp_path / "metrics.jsonl").read_text()
    prepared = prepare(dataclasses.replace(PPO, steps=2))
    text = "Train.seed = 1\nTrain.steps = 2\n"
    with pytest.raises(InputError, match=r"checkpoints/1: Train\.seed: .* 0, as the run began; got 1; "):
        run_training(prepared, tmp_path, text)
    assert (tmp_path / "metrics.jsonl").read_text() == metrics
    assert (tmp_path / "operative_config.gin").read_text() == "Train.seed = 0\nTrain.steps = 1\n"
    assert list(run_training(prepared, tmp_path, text, allow_changes=True)) == [2]


def test_other_rollouts_under_the_same_name_are_refused(config, tmp_path, capsys):
    out, more = tmp_path / "out", ["--gin", "Train.steps = 3"]
    assert command(capsys, config, "--out", out)[0] == 0
    rewrite(tmp_path / "r.npz", reward=np.arange(12.0))
    status, err = command(capsys, config, "--out", out, *more)
    assert status == 2
    assert err.startswith(
        f"error: {tmp_path / 'r.npz'}: contents: expected those that {out}/checkpoints/2 was"
    )
    assert command(capsys, config, "--out", out, *more, "--allow-changes")[0] == 0


def test_new_batches_compile_nothing():
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    more = dataclasses.replace(ROLLOUTS, tasks=8)
    prepared = prepare(dataclasses.replace(SFT, rollouts=more, planner=Planner(chunk_size=8)))

    def programs(step: int) -> set[tuple[int, int]]:
        schedule = prepared.learner.engine.plan(prepared.source.batch(step).samples)
        return set(zip(schedule.kind.tolist(), schedule.width.tolist(), strict=True))

    known = set().union(*(programs(step) for step in range(1, 5)))  # the first epoch
    later = [step for step in range(5, 30) if programs(step) <= known][:6]
    state, trees = prepared.learner.starting_state(), []
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for step in (1, 2, 3, 4, *later):
            if step == later[0]:
                compiled.clear()
            state, row = one_step(prepared, state, step, Path("unused"))
            trees.append(row["tree_tokens"])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert len(set(trees[4:]) - set(trees[:4])) >= 2


def test_a_step_that_is_not_finite_stops_before_the_optimizer(tmp_path):
    prepared = prepare(SFT)
    params = prepared.learner.starting_params()
    params["final"]["scale"] = params["final"]["scale"].at[0].set(jnp.inf)
    state = TrainState(State(params, prepared.learner.optimizer.init(params)), None)
    before = jax.tree.map(np.asarray, state)
    with pytest.raises(GuardStop, match=r"^step 3: not finite: loss, grad_norm"):
        one_step(prepared, state, 3, tmp_path)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [path.name for path in tmp_path.iterdir()] == ["non_finite_step_3.npz"]


def test_a_gradient_that_skipped_rows_is_refused(monkeypatch):
    prepared = prepare(SFT)
    params, batch = prepared.learner.starting_params(), prepared.source.batch(1)
    run_tree = tree_engine.tree_value_and_grad

    def one_row_less(*args: object, **options: object) -> object:
        result = run_tree(*args, **options)
        with jax.transfer_guard("allow"):
            outputs = result.outputs._replace(executed=result.outputs.executed - jnp.int32(1))
        return dataclasses.replace(result, outputs=outputs)

    monkeypatch.setattr(tree_engine, "tree_value_and_grad", one_row_less)
    with pytest.raises(RuntimeError, match=r"^rows of PUSH and BACK: planned \[\d+, \d+\], executed "):
        prepared.learner.engine.value_and_grad(params, batch.samples, SFT.loss, batch.unit)


def test_memory_stays_flat_over_many_steps(tmp_path):
    prepared = prepare(PPO)
    state, sizes = prepared.learner.starting_state(), []
    logprobs = {"old_logp": np.full(prepared.source.rollouts.tokens.size, -3.0, np.float32)}
    tracemalloc.start()
    try:
        for step in range(1, 81):
            state, _ = one_step(prepared, state, step, tmp_path, logprobs)
            if step in (40, 80):
                gc.collect()
                sizes.append((len(jax.live_arrays()), tracemalloc.get_traced_memory()[0]))
    finally:
        tracemalloc.stop()
    (arrays, before), (arrays_after, after) = sizes
    assert arrays_after == arrays
    assert after - before < 40 * 1024  # a batch that stayed would be several times that in each step


def test_an_epoch_takes_every_group_once_and_depends_on_seed_and_step_alone():
    order = BatchOrder(num_groups=7, batch_groups=3, seed=5)
    assert order.batches_per_epoch == 3
    epochs = [[order.groups(3 * epoch + b).tolist() for b in range(3)] for epoch in range(20)]
    assert [len(batch) for batch in epochs[0]] == [3, 3, 1]
    taken = [[group for batch in epoch for group in batch] for epoch in epochs]
    assert all(sorted(epoch) == list(range(7)) for epoch in taken)
    assert len({tuple(epoch) for epoch in taken}) == 20
    assert order.groups(4).tolist() == epochs[1][1]
    assert BatchOrder(7, 3, seed=6).groups(0).tolist() != epochs[0][0]


def test_entries_carry_their_own_rollouts_values():
    train = dataclasses.replace(PPO, temperature=0.5, aggregate=Aggregate("sequence_mean", "rollout"))
    source = source_of(train)
    tokens = np.arange(source.rollouts.tokens.size, dtype=np.float32)
    batch, rows = source.batch(2, {"old_logp": tokens}), source.rows(2)
    values, rollouts = batch.samples.values | credited(batch, train.objective), source.rollouts
    assert rows.tolist() == [row for g in source.order.groups(1) for row in source.groups[g]]
    expected = group_normalized(rollouts.reward[rows], rollouts.task_id[rows])
    for e in range(len(batch.samples.sequence)):
        i, token = rows[batch.unit[e]], int(values["old_logp"][e])
        assert rollouts.offsets[i] <= token < rollouts.offsets[i + 1]
        sequence = batch.samples.sequences[batch.samples.sequence[e]]
        assert rollouts.tokens[token] == sequence[batch.samples.position[e]]
        assert values["advantage"][e] == pytest.approx(expected[batch.unit[e]], rel=1e-6)
    assert set(values["temperature"].tolist()) == {0.5}
    per_rollout = np.bincount(batch.unit, values["weight"])
    np.testing.assert_allclose(per_rollout, 1 / len(rows), rtol=1e-6)


def test_groups_without_signal_are_left_out(tmp_path):
    rollouts = generate_rollouts(ROLLOUTS)
    reward = np.where(rollouts.task_id == 1, 1.0, rollouts.trial % 2).astype(np.float32)
    save_rollouts(tmp_path / "r.npz", dataclasses.replace(rollouts, reward=reward))
    train = dataclasses.replace(PPO, rollouts=RecordedRollouts(str(tmp_path / "r.npz")))
    assert [set(rollouts.task_id[g]) for g in source_of(train).groups] == [{0}, {2}, {3}]
    assert source_of(train).left_out == (1,)
    keep = dataclasses.replace(train, advantages=GroupNormalized(skip_equal=False))
    assert len(source_of(keep).groups) == 4
    save_rollouts(tmp_path / "r.npz", dataclasses.replace(rollouts, reward=np.ones_like(reward)))
    with pytest.raises(InputError, match=r"r\.npz: reward: expected a group whose rewards differ"):
        source_of(train)


def test_the_learning_rate_rises_and_falls():
    rate = learning_rate(AdamW(learning_rate=1.0, warmup_steps=3, decay_steps=9, final_fraction=0.1))
    expected = [0.25, 0.5, 0.75] + [0.1 + 0.45 * (1 + np.cos(np.pi * n / 6)) for n in range(7)] + [0.1]
    np.testing.assert_allclose([rate(n) for n in range(11)], expected, rtol=1e-6)
    constant = learning_rate(AdamW(learning_rate=0.5))
    assert [float(constant(n)) for n in (0, 10**6)] == [0.5, 0.5]


PARAMS = {
    "embed": jnp.ones((4, 2)),
    "layers": {
        "q_proj": {"kernel": jnp.ones((1, 2, 2)), "bias": jnp.ones((1, 2))},
        "norm": {"scale": jnp.ones((1, 2))},
    },
    "final": {"scale": jnp.ones(2)},
}


def test_only_matrices_decay():
    optimizer = make_optimizer(AdamW(learning_rate=0.1, weight_decay=0.5))
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, PARAMS), optimizer.init(PARAMS), PARAMS)
    decayed = pytest.approx(-0.05)
    assert jax.tree.map(lambda update: float(update.ravel()[0]), updates) == {
        "embed": decayed,
        "layers": {"q_proj": {"kernel": decayed, "bias": 0.0}, "norm": {"scale": 0.0}},
        "final": {"scale": 0.0},
    }


@pytest.mark.parametrize(("clip", "norm"), [(1.0, 1.0), (1e6, None), (None, None)])
def test_large_gradients_are_clipped(clip, norm):
    """Adam's first moment after one update is (1 - b1) times the clipped gradient."""
    gradient = jax.tree.map(lambda p: 100 * p, PARAMS)
    optimizer = make_optimizer(AdamW(clip_norm=clip))
    _, state = optimizer.update(gradient, optimizer.init(PARAMS), PARAMS)
    adam = optax.tree.get(state, "mu")
    norm = norm or float(optax.tree.norm(gradient))
    assert float(optax.tree.norm(adam)) == pytest.approx(0.1 * norm, rel=1e-5)


@pytest.fixture
def config(tmp_path) -> Path:
    rollouts = generate_rollouts(ROLLOUTS)
    save_rollouts(tmp_path / "r.npz", rollouts)
    (tmp_path / "c.gin").write_text(GIN.format(path=tmp_path / "r.npz"))
    return tmp_path / "c.gin"


def command(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str]:
    """Exit status and stderr of the command, run here."""
    capsys.readouterr()
    try:
        run_command(lambda: main([str(a) for a in arguments]))
    except SystemExit as stopped:
        return int(stopped.code or 0), capsys.readouterr().err
    return 0, capsys.readouterr().err


def test_the_command_trains_and_goes_on(config, tmp_path, capsys):
    out = tmp_path / "out"
    assert command(capsys, config, "--out", out)[0] == 0
    assert command(capsys, config, "--out", out, "--gin", "Train.steps = 3")[0] == 0
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [1, 2, 3]
    assert load_config(out / "operative_config.gin").steps == 3
    assert (out / "operative_config.gin").read_text() == operative_config()
    main([str(config), "--out", str(out)])
    assert capsys.readouterr().out == f"{out}: nothing to do, step 2 is reached; raise Train.steps to go on\n"


def test_without_out_every_run_has_its_own_folder(config, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    main([str(config), "--gin", "Train.steps = 1"])
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("c-")
    assert (folder / "metrics.jsonl").exists()


def test_out_must_be_a_folder(config, tmp_path, capsys):
    status, err = command(capsys, config, "--out", tmp_path / "r.npz")
    assert (status, err) == (2, f"error: {tmp_path / 'r.npz'}: --out: expected a folder; got File exists\n")


def rewrite(path: Path, **changes: np.ndarray) -> None:
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, **changes})


def rewrite_without(path: Path, name: str) -> None:
    with np.load(path) as file:
        arrays = {key: file[key] for key in file if key != name}
    np.savez(path, **arrays)


SPOILED = {
    "missing file": (lambda p: p.unlink(), "file: expected an .npz file; got no such file"),
    "truncated file": (lambda p: p.write_bytes(p.read_bytes()[:-40]), "file: expected a whole .npz archive"),
    "span outside": (
        lambda p: rewrite(p, completion_spans=np.array([[0, 1, 9999]])),
        "completion_spans[0]: expected 0 <= start <= end <= ",
    ),
    "NaN reward": (
        lambda p: rewrite(p, reward=np.full(12, np.nan)),
        "reward of rollout 0: expected a finite",
    ),
    "no rewards": (lambda p: rewrite_without(p, "reward"), "reward: expected an array named 'reward'"),
    "NaN log-probabilities": (
        lambda p: rewrite(p, logprobs=np.full(len(np.load(p)["tokens"]), np.nan)),
        "expected a finite number inside a completion; got nan",
    ),
}
BOUND = {
    "path beyond the model": (
        ["Qwen3Config.max_position_embeddings = 16"],
        "model config: max_position_embeddings: expected at least ",
    ),
    "id beyond the vocabulary": (["Qwen3Config.vocab_size = 40"], "an id below the vocabulary's 40; got "),
    "too long": (["Train.max_length = 20"], "expected a sequence of at most 20 tokens; got"),
    "too few groups": (["Train.batch_groups = 9"], "Train: batch_groups: expected at most"),
    "unknown task": (["RecordedRollouts.tasks = [77]"], "r.npz: task_id: expected rollouts of task 77"),
    "unknown name": (["Train.step = 1"], "did you mean steps?"),
    "wrong type": (["Train.steps = 1.5"], "Train.steps: expected int; got 1.5 (float)"),
    "chunk size": (
        ["Planner.chunk_size = 1000"],
        "expected 'auto', 1 to 512, or a multiple of 128; got 1000",
    ),
    "reward too high": (
        ["RecordedRollouts.min_reward = 7.0"],
        "r.npz: reward: expected some of at least 7.0",
    ),
    "strategy": (["Planner.strategy = 'best'"], "strategy: expected"),
    "no model folder": (["Train.model = @HuggingFaceModel()", "HuggingFaceModel.path = '/none'"], "/none"),
}


@pytest.mark.parametrize("case", [*SPOILED, *BOUND])
def test_bad_input_is_one_line_and_touches_nothing(config, tmp_path, capsys, case):
    out, flags = tmp_path / "out", []
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    if case in SPOILED:
        spoil, message = SPOILED[case]
        spoil(tmp_path / "r.npz")
    else:
        bindings, message = BOUND[case]
        flags = [part for binding in bindings for part in ("--gin", binding)]
    status, err = command(capsys, config, "--out", out, *flags)
    assert status == 2
    assert err.startswith(f"error: {tmp_path / 'r.npz'}: " if case in SPOILED else "error: ")
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]
    assert (out / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_damaged_log_is_refused_and_kept(config, tmp_path, capsys):
    out = tmp_path / "out"
    assert command(capsys, config, "--out", out)[0] == 0
    for text, message in (
        ('{"step": 1}\nnonsense\n', "line 2: expected a JSON object; got"),
        ('{"loss": 1}\n', "line 1: expected a JSON object with a step; got"),
        ("[1]\n", "line 1: expected a JSON object with a step; got [1]"),
    ):
        (out / "metrics.jsonl").write_text(text)
        status, err = command(capsys, config, "--out", out, "--gin", "Train.steps = 3")
        assert (status, err.count("\n")) == (2, 1)
        assert f"metrics.jsonl: {message}" in err
        assert (out / "metrics.jsonl").read_text() == text


def test_log_probabilities_of_a_run_that_never_saved_are_not_taken_over(tmp_path):
    """Weights of another seed under the same name, killed before the first checkpoint."""
    one_step = dataclasses.replace(PPO, steps=1)
    run(dataclasses.replace(one_step, seed=1), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    row = run(one_step, tmp_path)[0]
    assert (row["ratio_max"], row["ratio_mean"]) == (1, 1)


def test_ctrl_c_is_one_line(capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        run_command(interrupted)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_damaged_logprobs_are_refused(config, tmp_path, capsys):
    out = tmp_path / "out"
    assert command(capsys, config, "--out", out)[0] == 0
    (out / "starting_logp.npy").write_bytes(b"half")
    status, err = command(capsys, config, "--out", out, "--gin", "Train.steps = 3")
    assert (status, err.count("\n")) == (2, 1)
    assert "starting_logp.npy: file: expected a whole .npy file" in err
    np.save(out / "starting_logp.npy", np.zeros(3, np.float32))
    status, err = command(capsys, config, "--out", out, "--gin", "Train.steps = 3")
    assert status == 2
    assert "starting_logp.npy: array: expected float32[" in err


def test_bad_input_in_a_process_of_its_own(tmp_path):
    (tmp_path / "c.gin").write_text(GIN.format(path="none.npz"))
    done = subprocess.run(
        [sys.executable, "-m", "dta_jax.train", "c.gin", "--out", "out"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: none.npz: file: expected an .npz file; got no such file\n"
    assert not (tmp_path / "out").exists()
