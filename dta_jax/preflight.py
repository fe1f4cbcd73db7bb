"""What a run is about to do, as a table: devices, model, data, plan, memory, and what it writes where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import jax

from dta_jax.attention_backends import Problem, kernels_can_run
from dta_jax.memory_plan import HEADROOM
from dta_jax.memory_predict import PREDICTED, predict_memory
from dta_jax.prepare import Run
from dta_jax.recorded import RecordedSource
from dta_jax.segment import num_keys
from dta_jax.settings import HuggingFaceModel, RecordedRollouts
from dta_jax.sinks import TENSORBOARD, WANDB, has_tensorboard

Rows = Sequence[tuple[str, str]]
_NAMED: Final = 10  # tasks that are left out


def preflight(run: Run, out: Path, start: int) -> Rows:
    """What and its value, for each line of the table. Allocates nothing and compiles nothing.

    Args:
      run: from `prepare`.
      out: its folder.
      start: the step that it goes on from.
    """
    return [
        ("devices", _devices(run)),
        ("model", _model(run)),
        ("data", _data(run)),
        ("sharing", _sharing(run)),
        ("loss", _loss(run)),
        ("plan", _plan(run)),
        ("attention", _attention(run)),
        ("memory", _memory(run)),
        ("steps", _steps(run, start)),
        ("checkpoints", _checkpoints(run)),
        ("metrics", _metrics(run, out)),
        ("output", str(out)),
    ]


def _devices(run: Run) -> str:
    shape, devices = run.train.mesh, jax.devices()
    used = shape.data * shape.tensor
    mesh = f", mesh data={shape.data} x tensor={shape.tensor}" if used > 1 else ""
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{used} of {len(devices)} {devices[0].device_kind}{mesh}{processes}"


def _model(run: Run) -> str:
    learner, source = run.learner, run.train.model
    config = learner.model.config
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(learner.optimizer.like.params))
    start = source.path if isinstance(source, HuggingFaceModel) else "random weights"
    kind = type(learner.model).__name__
    parts = [f"{kind}, {config.num_hidden_layers} layers, {weights:,} parameters in {config.dtype}, {start}"]
    if learner.critic is not None:
        parts.append("a critic as large")
    elif run.train.trains_values:
        parts.append("a value head")
    if "ref_logp" in run.train.reads:
        parts.append(
            f"reference {run.train.reference.path if run.train.reference else 'the starting weights'}"
        )
    return "; ".join(parts)


def _data(run: Run) -> str:
    source, train = run.source, run.train
    if isinstance(source, RecordedSource):
        where = train.rollouts.path if isinstance(train.rollouts, RecordedRollouts) else "generated"
        told = (
            f"{where}: {source.rollouts.num_rollouts:,} rollouts, {len(source.groups):,} groups, "
            f"{train.batch_groups} a batch, sequences up to {source.longest:,} tokens"
        )
        return told + _left_out(source.left_out)
    collect = source.collect
    return (
        f"{type(source.environment).__name__}, answered by {type(source.generator).__name__}: "
        f"{train.batch_groups} groups of {collect.group_size} episodes a batch, "
        f"contexts up to {run.learner.longest:,} tokens, at most {collect.max_staleness} updates old"
    )


def _left_out(tasks: Sequence[int]) -> str:
    if not tasks:
        return ""
    named = ", ".join(map(str, tasks[:_NAMED])) + (", ..." if len(tasks) > _NAMED else "")
    return f"; left out, since their rewards do not differ enough: {len(tasks):,} groups (task {named})"


def _sharing(run: Run) -> str:
    if run.sharing is None:
        return "told step by step"
    flat, tree = run.sharing
    return f"the first batch's {flat:,} tokens are computed as {tree:,} (x{flat / tree:.1f})"


def _loss(run: Run) -> str:
    train = run.train
    parts = [type(train.loss).__name__]
    if train.advantages is not None:
        parts.append(f"with {type(train.advantages).__name__}")
    if run.learner.updates_per_step > 1:
        parts.append(f"in {train.minibatches} minibatches, {train.epochs} times")
    return " ".join(parts)


def _plan(run: Run) -> str:
    learner, engine = run.learner, run.learner.engine
    plan = f"{engine.strategy}, chunks of {engine.chunk_size:,} tokens"
    if engine.strategy not in PREDICTED:
        return plan
    kept = predict_memory(learner.setup, engine.chunk_size, engine.strategy).parts.kept_residuals
    return f"{plan}, {_size(kept)} of residuals kept a device" if kept else plan


def _attention(run: Run) -> str:
    model, engine = run.learner.model, run.learner.engine
    if model.attention_backend != "auto":
        return model.attention_backend
    keys, config = num_keys(engine.stack_slots, engine.chunk_size), model.config
    widest = Problem(engine.chunk_size, keys, config.head_dim, config.dtype, model.attention_scale)
    return f"{'pallas' if kernels_can_run(widest) else 'xla'} (auto)"


def _memory(run: Run) -> str:
    learner = run.learner
    if learner.engine.strategy not in PREDICTED:
        return f"not predicted for {learner.engine.strategy}"
    found = predict_memory(learner.setup, learner.engine.chunk_size, learner.engine.strategy)
    return f"{_size(found.peak * HEADROOM)} a device predicted for training, room included"


def _steps(run: Run, start: int) -> str:
    of = f"{start + 1} to {run.train.steps}"
    return f"{of}, going on from a checkpoint" if start else of


def _checkpoints(run: Run) -> str:
    how = run.train.checkpoints
    minutes = f", {how.every_minutes:g} minutes" if how.every_minutes else ""
    best = f" and the {how.keep_best} best by {how.best_metric}" if how.keep_best else ""
    return f"every {how.every} steps{minutes} and at the end; the newest {how.keep}{best} stay"


def _metrics(run: Run, out: Path) -> str:
    log, sinks = run.train.log, ["metrics.jsonl"]
    if log.tensorboard:
        sinks.append(f"{TENSORBOARD}/" if has_tensorboard() else "no TensorBoard (pip install tensorboardX)")
    if log.wandb_project is not None:
        offline = f", offline in {WANDB}/" if log.wandb_mode == "offline" else ""
        sinks.append(f"Weights & Biases project {log.wandb_project}{offline}")
    return ", ".join(sinks)


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
