"""Trains a model on rollouts: `python -m dta_jax.train CONFIG.gin [--gin "Binding = value"]... [--out DIR]`.

    DIR/metrics.jsonl          one JSON object per step
    DIR/operative_config.gin   every binding that the run used
    DIR/checkpoints/           the newest states; the same command goes on from the last one
    DIR/starting_logp.npy      log-probabilities under the starting weights, where the loss reads them

Every random choice is a function of seed and step, and so is the data position: parameters, optimizer
state and step are the whole state, and a resumed run repeats the uninterrupted one bit for bit (on another
mesh: up to rounding).

`Train.mesh` says on how many devices. With several processes (`dta_jax.hosts`), every one runs this command
on the same, shared DIR; process 0 writes the log.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import optax
from absl import logging as absl_logging

from dta_jax.batches import Batch, BatchOrder, Dataset, load_dataset, make_batch
from dta_jax.checkpoint import CheckpointStore
from dta_jax.config import changed_bindings, load_config, operative_config
from dta_jax.diagnostics import policy_diagnostics, reward_diagnostics, stop_if_not_finite, token_diagnostics
from dta_jax.errors import InputError, run_command
from dta_jax.hf_config import config_to_hf, read_config
from dta_jax.hf_weights import load_params
from dta_jax.hosts import Hosts, connect, guarded
from dta_jax.metrics import MetricsLog, Progress
from dta_jax.model import Params
from dta_jax.optimizer import learning_rate, make_optimizer
from dta_jax.qwen3 import Qwen3
from dta_jax.settings import HuggingFaceModel, Train
from dta_jax.tree_engine import BatchGradient, TreeEngine
from dta_jax.zero import ShardedOptimizer, State

# What may differ when a run is taken up again: nothing here changes what a step computes, but for rounding.
FREE_ON_RESUME: Final = (
    "Train.steps",
    "Checkpoints.every",
    "Checkpoints.keep",
    "Train.mesh",
    "MeshShape.data",
    "MeshShape.tensor",
)


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that stays the same from step to step.

    Attributes:
      train: the settings.
      model: the model.
      dataset: all rollouts.
      order: which groups each step takes.
      engine: with buckets that hold every batch.
      optimizer: of the float32 master weights, which it keeps on the mesh.
    """

    train: Train
    model: Qwen3
    dataset: Dataset
    order: BatchOrder
    engine: TreeEngine
    optimizer: ShardedOptimizer

    def batch(self, step: int, logprobs: Mapping[str, np.ndarray]) -> Batch:
        """The batch of a step, from 1."""
        return make_batch(self.dataset, self.train, self.order.groups(step - 1), logprobs)

    def starting_params(self) -> Params:
        """The master weights before the first step."""
        source = self.train.model
        places = jax.tree.map(lambda leaf: leaf.sharding, self.optimizer.like.params)
        if isinstance(source, HuggingFaceModel):
            params = load_params(source.path, self.model.config, sharding=places)
        else:
            params = jax.jit(self.model.init, out_shardings=places)(jax.random.key(self.train.seed))
        return cast(params, "float32")


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
    if dataset.longest > config.max_position_embeddings:
        raise InputError(
            "model config",
            "max_position_embeddings",
            expected=f"at least {dataset.longest}, the longest sequence",
            actual=config.max_position_embeddings,
            hint="lower Train.max_length to find the sequence, or use a model for longer contexts",
        )
    mesh = train.mesh.make()
    engine = TreeEngine.for_batches(
        Qwen3(config),
        chunk_size=train.planner.chunk_size,
        strategy=train.planner.strategy,
        longest=dataset.longest,
        entries=int(np.sort(dataset.group_entries)[-train.batch_groups :].sum()),
        mesh=mesh if mesh.size > 1 else None,
    )
    order = BatchOrder(len(dataset.groups), train.batch_groups, train.seed)
    optimizer = ShardedOptimizer.on(mesh, Qwen3(config), make_optimizer(train.optimizer))
    run = Run(train, Qwen3(config), dataset, order, engine, optimizer)
    engine.plan(run.batch(1, {}).samples)
    return run


def cast(params: Params, dtype: str) -> Params:
    """The weights in the dtype that they are computed with; what has it already is not copied."""
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), params)


global_norm = jax.jit(optax.tree.norm)


def train_step(
    run: Run, state: State, step: int, logprobs: Mapping[str, np.ndarray], out: Path
) -> tuple[State, dict[str, Any]]:
    """Update `step` (from 1): gradient over the batch's tree, then the optimizer.

    Args:
      run: the run.
      state: its arrays are donated.
      step: which batch.
      logprobs: float32[sum] by name, log-probabilities that do not change.
      out: where a batch that breaks the run is written.

    Returns:
      The new state and the step's row of metrics.

    Raises:
      NonFiniteError: before the optimizer is applied.
    """
    began = time.perf_counter()
    train = run.train
    batch = run.batch(step, logprobs)
    params = run.optimizer.gather(state.params, run.model.config.dtype)
    if "prox_logp" in train.loss.required:
        prox, _ = run.engine.logprobs(params, batch.samples)
        batch = batch.with_values(prox_logp=prox)
    found = run.engine.value_and_grad(params, batch.samples, train.loss, batch.unit)
    norm = float(jax.device_get(global_norm(found.grads)))
    stop_if_not_finite(
        step,
        batch.samples,
        scalars={"loss": found.loss, "grad_norm": norm},
        entries={"logp": found.logp, "entropy": found.entropy},
        grads=found.grads,
        replay_dir=out,
    )
    with jax.transfer_guard("disallow"):
        state = jax.block_until_ready(run.optimizer.update(state, found.grads))
    row = {
        "step": step,
        "loss": found.loss,
        "seconds": time.perf_counter() - began,
        "grad_norm": norm,
        "learning_rate": float(learning_rate(train.optimizer)(step - 1)),
        "epoch": (step - 1) // run.order.batches_per_epoch,
    }
    return state, row | _batch_metrics(run, batch, found)


def _batch_metrics(run: Run, batch: Batch, found: BatchGradient) -> dict[str, Any]:
    """Tokens, logical, in the tree and executed; rewards; and how the policy looks on the batch."""
    schedule, samples = found.schedule, batch.samples
    row: dict[str, Any] = token_diagnostics(samples, schedule)
    row |= {
        "rollouts": len(batch.members),
        "sequences": len(samples.sequences),
        "dedupe_ratio": row["flat_tokens"] / row["tree_tokens"],
        "backward_tokens_executed": schedule.backward_tokens_executed,
        "forward_tokens_executed": schedule.forward_tokens_executed,
    }
    rewards, advantages = run.dataset.rollouts.reward, run.dataset.advantage
    if rewards is not None and advantages is not None:
        groups = run.dataset.rollouts.require("task_id")[batch.members]
        row |= reward_diagnostics(rewards[batch.members], advantages[batch.members], groups)
    elif rewards is not None:
        row["reward_mean"] = float(rewards[batch.members].mean())
    return row | policy_diagnostics(run.train.loss, found.logp, found.entropy, samples.values, batch.unit)


def fixed_logprobs(run: Run, out: Path, start: int) -> dict[str, np.ndarray]:
    """Those log-probabilities that the loss reads and no step changes, float32[sum] by name.

    `old_logp` is the rollouts' own, or, where they bring none, that of the starting weights. `ref_logp` is
    that of the starting weights.

    A group is always scored together with the other groups of its batch in the first epoch, so what it
    gets does not depend on how often the run was interrupted or made longer.

    At `start` 0 everything is scored anew: what lies in `out` may be of other weights.
    """
    recorded = run.dataset.rollouts.logprobs
    needed = [name for name in ("old_logp", "ref_logp") if name in run.train.loss.required]
    own = {"old_logp": recorded} if "old_logp" in needed and recorded is not None else {}
    if len(own) == len(needed):
        return own
    file, size = out / "starting_logp.npy", run.dataset.rollouts.tokens.size
    known = _load_logprobs(file, size) if start and file.exists() else np.full(size, np.nan, np.float32)
    params = None
    for step in range(1, min(run.train.steps, run.order.batches_per_epoch) + 1):
        batch = run.batch(step, {})
        if np.isnan(known[batch.token_index]).any():
            if params is None:
                params = run.optimizer.gather(run.starting_params(), run.model.config.dtype)
            known[batch.token_index], _ = run.engine.logprobs(params, batch.samples)
    if params is not None and jax.process_index() == 0:
        partial = out / ".starting_logp.partial.npy"
        np.save(partial, known)
        os.replace(partial, file)
    return {name: own.get(name, known) for name in needed}


def _load_logprobs(file: Path, size: int) -> np.ndarray:
    try:
        known = np.load(file, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(file, "file", expected="a whole .npy file", actual=error) from None
    if known.shape != (size,) or known.dtype != np.float32:
        actual = f"{known.dtype}{list(known.shape)}"
        raise InputError(file, "array", expected=f"float32[{size}], one per token", actual=actual)
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


def first_state(
    run: Run, store: CheckpointStore, check: Callable[[int, Mapping[str, Any]], None]
) -> tuple[int, State]:
    """Where to go on: the newest checkpoint; or step 0, the starting weights and a fresh optimizer."""
    found = store.newest(run.optimizer.like._asdict(), check)
    if found is not None:
        return found[0], State(**found[1])
    fresh = run.starting_params()
    return 0, State(fresh, run.optimizer.init(fresh))


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

    digest = run.dataset.rollouts.digest()

    def check(step: int, saved: Mapping[str, Any]) -> None:
        if not allow_changes:
            folder = out / "checkpoints" / str(step)
            check_unchanged(folder, saved["config"], config_text)
            if saved["rollouts"] != digest:
                source = run.dataset.rollouts.source
                raise InputError(
                    source, "contents", expected=f"those that {folder} was trained on", actual="others"
                )

    train, rows = run.train, []
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(out, "--out", expected="a folder", actual=error.strerror) from None
    with CheckpointStore(out / "checkpoints", keep=train.checkpoints.keep) as store:
        start, state = first_state(run, store, check)
        writes = jax.process_index() == 0
        if writes:
            (out / "operative_config.gin").write_text(config_text, encoding="utf-8")
        logprobs = fixed_logprobs(run, out, start)
        with contextlib.ExitStack() as stack:
            if writes:
                log = stack.enter_context(MetricsLog(out / "metrics.jsonl", keep_through=start))
                progress = stack.enter_context(Progress(start=start, steps=train.steps))
            for step in range(start + 1, train.steps + 1):
                state, row = train_step(run, state, step, logprobs, out)
                if writes:
                    log.write(row)
                    progress.update(row)
                rows.append(row)
                if step % train.checkpoints.every == 0 or step == train.steps:
                    # Step, seed and rollouts: all that the next batch depends on.
                    saved = {"step": step, "seed": train.seed, "rollouts": digest, "config": config_text}
                    store.save(step, state._asdict(), saved | _describe_model(run))
    return rows


def _describe_model(run: Run) -> dict[str, Any]:
    """What an export needs to know: the model's `config.json`, and the folder that it came from."""
    config, source = run.model.config, run.train.model
    folder = str(Path(source.path).absolute()) if isinstance(source, HuggingFaceModel) else None
    return {"model": config_to_hf(config, dtype=config.dtype), "hf_folder": folder}


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
    connect(Hosts.from_environment())
    absl_logging.set_verbosity(absl_logging.ERROR)
    train = load_config(args.config, args.gin)
    text = operative_config()
    if args.out is None and jax.process_count() > 1:
        raise InputError("--out", "value", expected="one folder for all processes", actual="none")
    out = args.out or Path("runs", f"{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    rows = run_training(prepare(train), out, text, allow_changes=args.allow_changes)
    if jax.process_index() > 0:
        return
    if not rows:
        print(f"{out}: nothing to do, step {train.steps} is reached; raise Train.steps to go on")
        return
    first, last = rows[0], rows[-1]
    print(
        f"{out}: steps {first['step']} to {last['step']}, loss {first['loss']:z.4f} to {last['loss']:z.4f}; "
        f"{last['flat_tokens']:,} tokens in {last['tree_tokens']:,} (x{last['dedupe_ratio']:.1f}), "
        f"{last['flat_tokens'] / last['seconds']:,.0f} flat tokens/s in the last step"
    )


if __name__ == "__main__":
    run_command(functools.partial(guarded, main))
