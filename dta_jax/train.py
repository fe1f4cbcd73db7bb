"""Trains a model on rollouts: `python -m dta_jax.train CONFIG.gin [--gin "Binding = value"]... [--out DIR]`.

    DIR/metrics.jsonl          one JSON object per step
    DIR/operative_config.gin   every binding that the run used
    DIR/checkpoints/           the newest states; the same command goes on from the last one
    DIR/old_logp.npy           log-probabilities under the starting weights, where rollouts bring none

Every random choice is a function of seed and step, and so is the data position: parameters, optimizer
state and step are the whole state, and a resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging as absl_logging

from dta_jax.batches import Batch, BatchOrder, Dataset, load_dataset, make_batch
from dta_jax.checkpoint import CheckpointStore
from dta_jax.config import changed_bindings, load_config, operative_config
from dta_jax.errors import InputError, run_command
from dta_jax.hf_config import read_config
from dta_jax.hf_weights import load_params
from dta_jax.metrics import MetricsLog, Progress, policy_metrics
from dta_jax.model import Params
from dta_jax.optimizer import learning_rate, make_optimizer
from dta_jax.qwen3 import Qwen3
from dta_jax.schedule import compile_forward_schedule, compile_schedule, round_slots
from dta_jax.settings import HuggingFaceModel, Train
from dta_jax.tree_grad import HEAD_BLOCK, TreeResult, tree_logprobs, tree_value_and_grad
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import BACK, PUSH, Schedule

# What may differ when a run is taken up again: nothing here changes what a step computes.
FREE_ON_RESUME: Final = ("Train.steps", "Checkpoints.every", "Checkpoints.keep")


class State(NamedTuple):
    """What a step changes: float32 master weights and the optimizer's state."""

    params: Params
    opt_state: optax.OptState


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that stays the same from step to step.

    Attributes:
      train: the settings.
      model: the model.
      dataset: all rollouts.
      order: which groups each step takes.
      optimizer: of the float32 master weights.
      stack_slots, entry_capacity: buckets that hold every batch, so that no batch compiles anything.
    """

    train: Train
    model: Qwen3
    dataset: Dataset
    order: BatchOrder
    optimizer: optax.GradientTransformation
    stack_slots: int
    entry_capacity: int

    @property
    def needs_old_logp(self) -> bool:
        """Whether the loss compares with the policy that sampled."""
        return "old_logp" in self.train.loss.required

    def starting_params(self) -> Params:
        """The weights before the first step, float32."""
        source = self.train.model
        if isinstance(source, HuggingFaceModel):
            params = load_params(source.path, self.model.config)
        else:
            params = jax.jit(self.model.init)(jax.random.key(self.train.seed))
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


class NonFinite(ArithmeticError):
    """A loss or gradient that is not finite; the weights are those of the step before."""


def prepare(train: Train) -> Run:
    """Reads and checks everything but the weights.

    Raises:
      InputError: data or model folder that cannot be used, a planner that cannot plan the first batch.
    """
    if isinstance(train.model, HuggingFaceModel):
        config = read_config(train.model.path, dtype=train.model.dtype, param_dtype="float32")
    else:
        config = train.model
    dataset = load_dataset(train, config.vocab_size)
    chunk = train.planner.chunk_size
    largest = np.sort(dataset.group_entries)[-train.batch_groups :].sum()
    run = Run(
        train=train,
        model=Qwen3(config),
        dataset=dataset,
        order=BatchOrder(len(dataset.groups), train.batch_groups, train.seed),
        optimizer=make_optimizer(train.optimizer),
        stack_slots=round_slots(dataset.longest + chunk),
        entry_capacity=round_slots(int(largest) + HEAD_BLOCK),
    )
    plan(run, make_batch(dataset, train, run.order.groups(0), None))
    return run


def plan(run: Run, batch: Batch) -> Schedule:
    """The batch's trie, and the schedule that runs it."""
    samples, planner = batch.samples, run.train.planner
    trie = build_trie(samples.sequences)
    return compile_schedule(
        trie,
        entry_rows(trie, samples.sequence, samples.position),
        chunk_size=planner.chunk_size,
        strategy=planner.strategy,
        stack_slots=run.stack_slots,
    )


@functools.partial(jax.jit, static_argnames="dtype")
def cast(params: Params, dtype: str) -> Params:
    """The weights in the dtype that they are computed with."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames="state")
def update(optimizer: optax.GradientTransformation, state: State, grads: Params) -> State:
    """One optimizer update, in place."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state)


global_norm = jax.jit(optax.global_norm)


def train_step(
    run: Run, state: State, step: int, logprobs: np.ndarray | None
) -> tuple[State, dict[str, Any]]:
    """Update `step` (from 1): gradient over the batch's tree, then the optimizer.

    Returns:
      The new state (the old one is donated) and the step's row of metrics.

    Raises:
      NonFinite: before the optimizer is applied.
    """
    began = time.perf_counter()
    train = run.train
    batch = make_batch(run.dataset, train, run.order.groups(step - 1), logprobs)
    schedule = plan(run, batch)
    planned = time.perf_counter()
    with jax.transfer_guard("disallow"):
        result = tree_value_and_grad(
            run.model,
            cast(state.params, run.model.config.dtype),
            schedule,
            batch.samples.values,
            train.loss,
            entry_capacity=run.entry_capacity,
        )
        norm = global_norm(result.grads)
    loss, norm, executed = jax.device_get((result.loss, norm, result.outputs.executed))
    if not (np.isfinite(loss) and np.isfinite(norm)):
        raise NonFinite(f"step {step}: loss {loss}, grad_norm {norm}; the optimizer was not applied")
    _check_executed(schedule, executed)
    with jax.transfer_guard("disallow"):
        state = jax.block_until_ready(update(run.optimizer, state, result.grads))
    seconds = time.perf_counter() - began
    rate = learning_rate(train.optimizer)(step - 1)
    row = {
        "step": step,
        "loss": float(loss),
        "seconds": seconds,
        "plan_seconds": planned - began,
        "grad_norm": float(norm),
        "learning_rate": float(rate),
        "epoch": (step - 1) // run.order.batches_per_epoch,
    }
    return state, row | _batch_metrics(run, batch, result)


def _check_executed(schedule: Schedule, executed: np.ndarray) -> None:
    """The device ran the rows that the schedule says, each once."""
    rows = np.diff(schedule.offset)
    planned = [int(rows[schedule.kind == kind].sum()) for kind in (PUSH, BACK)]
    if executed[[PUSH, BACK]].tolist() != planned or planned[1] != schedule.trie.num_rows:
        raise RuntimeError(f"rows executed by PUSH, BACK: planned {planned}, run {executed.tolist()}")


def _batch_metrics(run: Run, batch: Batch, result: TreeResult) -> dict[str, Any]:
    """Counts of tokens, logical, in the tree and executed; and how the policy looks on them."""
    schedule, samples = result.schedule, batch.samples
    flat = sum(len(sequence) for sequence in samples.sequences)
    row: dict[str, Any] = {
        "rollouts": len(batch.members),
        "sequences": len(samples.sequences),
        "flat_tokens": flat,
        "tree_tokens": schedule.trie.num_rows,
        "loss_tokens": len(samples.sequence),
        "dedupe_ratio": flat / schedule.trie.num_rows,
        "backward_tokens_executed": schedule.backward_tokens_executed,
        "forward_tokens_executed": schedule.forward_tokens_executed,
        "backs": int((schedule.kind == BACK).sum()),
        "pushes": int((schedule.kind == PUSH).sum()),
    }
    if run.dataset.rollouts.reward is not None:
        row["reward_mean"] = float(run.dataset.rollouts.reward[batch.members].mean())
    return row | policy_metrics(run.train.loss, result.logp, result.entropy, samples.values)


def score(run: Run, params: Params, steps: Iterable[int], logprobs: np.ndarray) -> np.ndarray:
    """Fills in log-probabilities of the tokens with loss in the batches of some steps.

    Args:
      run: the run.
      params: the policy's weights, float32.
      steps: steps, from 1.
      logprobs: float32[sum]; not changed.
    """
    logprobs, train = logprobs.copy(), run.train
    params = cast(params, run.model.config.dtype)
    for step in steps:
        batch = make_batch(run.dataset, train, run.order.groups(step - 1), None)
        samples = batch.samples
        trie = build_trie(samples.sequences)
        schedule = compile_forward_schedule(
            trie,
            entry_rows(trie, samples.sequence, samples.position),
            chunk_size=train.planner.chunk_size,
            stack_slots=run.stack_slots,
        )
        logprobs[batch.token_index], _ = tree_logprobs(
            run.model,
            params,
            schedule,
            temperature=samples.values.get("temperature"),
            entry_capacity=run.entry_capacity,
        )
    return logprobs


def old_logprobs(run: Run, out: Path) -> np.ndarray | None:
    """Log-probabilities of the policy that sampled: the rollouts' own, else the starting weights'.

    A group is always scored together with the other groups of its batch in the first epoch, so what it
    gets does not depend on how often the run was interrupted or made longer.
    """
    if not run.needs_old_logp:
        return None
    rollouts = run.dataset.rollouts
    if rollouts.logprobs is not None:
        return rollouts.logprobs
    file = out / "old_logp.npy"
    known = np.full(rollouts.tokens.size, np.nan, np.float32)
    if file.exists():
        known = np.load(file, allow_pickle=False)
        if known.shape != rollouts.tokens.shape or known.dtype != np.float32:
            expected = f"float32[{rollouts.tokens.size}], one per token of {rollouts.source}"
            actual = f"{known.dtype}{list(known.shape)}"
            raise InputError(file, "array", expected=expected, actual=actual)
    missing = []
    for step in range(1, min(run.train.steps, run.order.batches_per_epoch) + 1):
        batch = make_batch(run.dataset, run.train, run.order.groups(step - 1), None)
        if np.isnan(known[batch.token_index]).any():
            missing.append(step)
    if missing:
        known = score(run, run.starting_params(), missing, known)
        partial = out / ".old_logp.partial.npy"
        np.save(partial, known)
        os.replace(partial, file)
    return known


def check_unchanged(folder: Path, saved: str, now: str) -> None:
    """Refuses to go on from a checkpoint with settings that compute something else.

    Raises:
      InputError: names the first binding that differs.
    """
    for name, (old, new) in changed_bindings(saved, now).items():
        if name not in FREE_ON_RESUME:
            hint = "choose another --out, or allow it with --allow-changes"
            raise InputError(folder, name, expected=f"{old}, as the run began", actual=new, hint=hint)


def run_training(
    run: Run, out: Path, config_text: str, *, allow_changes: bool = False
) -> list[dict[str, Any]]:
    """Trains from the newest checkpoint in `out`, or from the start, up to the last step.

    Args:
      run: from `prepare`.
      out: DIR of the module docstring.
      config_text: the operative config, to be stored.
      allow_changes: go on from a checkpoint that was made with other settings.

    Returns:
      The rows of metrics of the steps that were run.
    """
    train = run.train
    out.mkdir(parents=True, exist_ok=True)
    with CheckpointStore(out / "checkpoints", keep=train.checkpoints.keep) as store:
        start = max(store.steps(), default=0)
        if start and not allow_changes:
            check_unchanged(out / "checkpoints" / str(start), store.run(start)["config"], config_text)
        state = _first_state(run, store, start)
        (out / "operative_config.gin").write_text(config_text, encoding="utf-8")
        logprobs = old_logprobs(run, out)
        log, progress = MetricsLog(out / "metrics.jsonl", keep_through=start), None
        rows = []
        try:
            progress = Progress(start=min(start, train.steps), steps=train.steps)
            for step in range(start + 1, train.steps + 1):
                state, row = train_step(run, state, step, logprobs)
                log.write(row)
                progress.update(row)
                rows.append(row)
                if step % train.checkpoints.every == 0 or step == train.steps:
                    # The whole position: the next batch follows from seed and step.
                    store.save(
                        step, state._asdict(), {"step": step, "seed": train.seed, "config": config_text}
                    )
        finally:
            log.close()
            if progress is not None:
                progress.close()
    return rows


def _first_state(run: Run, store: CheckpointStore, start: int) -> State:
    """The state of a checkpoint, or, for step 0, the starting weights and a fresh optimizer."""

    def fresh() -> State:
        params = run.starting_params()
        return State(params, run.optimizer.init(params))

    if not start:
        return fresh()
    params = jax.eval_shape(run.model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    like = State(params, jax.eval_shape(run.optimizer.init, params))
    return State(**store.state(start, like._asdict()))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m dta_jax.train", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a .gin file")
    parser.add_argument("--gin", action="append", default=[], metavar="BINDING", help="overrides a binding")
    parser.add_argument("--out", type=Path, help="default: runs/CONFIG-TIME")
    parser.add_argument(
        "--allow-changes", action="store_true", help="resume although bindings differ from the checkpoint's"
    )
    args = parser.parse_args(arguments)
    absl_logging.set_verbosity(absl_logging.ERROR)
    train = load_config(args.config, args.gin)
    text = operative_config()
    out = args.out or Path("runs", f"{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    rows = run_training(prepare(train), out, text, allow_changes=args.allow_changes)
    if not rows:
        print(f"{out}: nothing to do, step {train.steps} is reached; raise Train.steps to go on")
        return
    first, last = rows[0], rows[-1]
    print(
        f"{out}: steps {first['step']} to {last['step']}, loss {first['loss']:.4f} to {last['loss']:.4f}; "
        f"{last['flat_tokens']:,} tokens in {last['tree_tokens']:,} (x{last['dedupe_ratio']:.1f}), "
        f"{last['flat_tokens'] / last['seconds']:,.0f} flat tokens/s in the last step"
    )


if __name__ == "__main__":
    run_command(main)
