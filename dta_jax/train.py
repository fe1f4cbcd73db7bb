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
from absl import logging as absl_logging

from dta_jax.checkpoint import CheckpointStore
from dta_jax.config import changed_bindings, load_config, operative_config
from dta_jax.errors import InputError, Interrupted, RunError, run_command, writing
from dta_jax.hf_config import config_to_hf
from dta_jax.hosts import Hosts, connect, guarded
from dta_jax.learner import Learner, TrainState, model_config
from dta_jax.live import LiveFeed, check_fits, sampling_params
from dta_jax.metrics import MetricsLog, Progress
from dta_jax.qwen3 import Qwen3
from dta_jax.recorded import RecordedFeed, RecordedSource, load_source, logprobs_of_the_start
from dta_jax.settings import HuggingFaceModel, LiveRollouts, Train
from dta_jax.signals import Stopped, StopSignals

# What may differ when a run is taken up again: nothing here changes what a step computes, but for rounding.
FREE_ON_RESUME: Final = (
    "Train.steps",
    "Checkpoints.every",
    "Checkpoints.keep",
    "Train.mesh",
    "MeshShape.data",
    "MeshShape.tensor",
)


SAMPLED_TOKENS: Final = 256  # per episode, for a first guess at how many entries a batch has


@dataclass(frozen=True, eq=False)
class Run:
    """A run that is ready to begin.

    Attributes:
      learner: what a step does to the weights.
      source: where its batches come from.
    """

    learner: Learner
    source: RecordedSource | LiveRollouts

    @property
    def train(self) -> Train:
        """The settings."""
        return self.learner.train


def prepare(train: Train) -> Run:
    """Reads and checks everything but the weights.

    Raises:
      InputError: data or model folder that cannot be used, a planner that cannot plan the first batch.
    """
    config = model_config(train)
    if isinstance(train.rollouts, LiveRollouts):
        longest = check_fits(train.rollouts, config, train.max_length)
        entries = train.batch_groups * train.rollouts.collect.group_size * SAMPLED_TOKENS
        return Run(Learner.build(train, Qwen3(config), longest=longest, entries=entries), train.rollouts)
    source = load_source(train, config.vocab_size)
    if source.longest > config.max_position_embeddings:
        raise InputError(
            "model config",
            "max_position_embeddings",
            expected=f"at least {source.longest}, the longest sequence",
            actual=config.max_position_embeddings,
            hint="lower Train.max_length to find the sequence, or use a model for longer contexts",
        )
    first = source.batch(1)
    learner = Learner.build(
        train, Qwen3(config), longest=source.longest, entries=source.entries, example=first.samples
    )
    learner.plan(first)
    return Run(learner, source)


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
    learner: Learner, store: CheckpointStore, check: Callable[[int, Mapping[str, Any]], None]
) -> tuple[int, TrainState]:
    """Where to go on: the newest checkpoint; or step 0, the starting weights and fresh optimizers."""
    found = store.newest(learner.like, check)
    return (0, learner.starting_state()) if found is None else (found[0], TrainState.from_tree(found[1]))


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

    recorded = run.source.rollouts if isinstance(run.source, RecordedSource) else None
    digest = None if recorded is None else recorded.digest()
    resumed_from: dict[str, Any] = {}

    def check(step: int, saved: Mapping[str, Any]) -> None:
        if not allow_changes:
            folder = out / "checkpoints" / str(step)
            check_unchanged(folder, saved["config"], config_text)
            if saved["rollouts"] != digest:
                source = "Train.rollouts" if recorded is None else recorded.source
                expected = f"those that {folder} was trained on"
                raise InputError(source, "contents", expected=expected, actual="others")
        resumed_from.clear()
        resumed_from.update(saved)

    def save(step: int, state: TrainState, feed: RecordedFeed | LiveFeed, store: CheckpointStore) -> None:
        # Step, seed and rollouts, or the collector's state: all that the next batch depends on.
        saved = {"step": step, "seed": train.seed, "rollouts": digest, "config": config_text}
        collector = {"collector": feed.saved(step, train.checkpoints.keep)}
        store.save(step, state.as_tree(), saved | collector | _describe_model(learner))

    train, learner = run.train, run.learner
    rows: list[dict[str, Any]] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(out, "--out", expected="a folder", actual=error.strerror) from None
    writes = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(CheckpointStore(out / "checkpoints", keep=train.checkpoints.keep))
        start, state = first_state(learner, store, check)
        if writes:
            _write(out / "operative_config.gin", config_text)
        if start >= train.steps:
            return rows
        signals = stack.enter_context(StopSignals())
        try:
            with signals.interrupting():
                feed = _open_feed(run, state, out, start, resumed_from.get("collector"))
        except Stopped:
            raise _interrupted(signals, start) from None
        stack.enter_context(feed)
        reference = None
        if isinstance(run.source, LiveRollouts) and "ref_logp" in train.reads:
            reference = learner.reference_params()
        if writes:
            log = stack.enter_context(MetricsLog(out / "metrics.jsonl", keep_through=start))
            progress = stack.enter_context(Progress(start=start, steps=train.steps))
        failed: RunError | InputError | None = None
        for step in range(start + 1, train.steps + 1):
            began = time.perf_counter()
            try:
                with signals.interrupting():
                    planned = feed.get(step)
            except Stopped:
                break
            except (RunError, InputError) as error:
                failed = error
                break
            warm_up = train.planner.warm_up and step == start + 1
            state, row = learner.update(state, step, planned, reference, out, warm_up=warm_up)
            # Whatever happens from here on, the step is logged and saved; its row may lack the evaluation.
            try:
                with contextlib.suppress(Stopped), signals.interrupting():
                    feed.publish(state, step)
                    row["seconds"] = time.perf_counter() - began
                    if train.evaluate is not None and (
                        step % train.evaluate_every == 0 or step == train.steps
                    ):
                        row |= feed.evaluate(train.evaluate, step)
            except (RunError, InputError) as error:
                failed = error
            last = step == train.steps or signals.received is not None or failed is not None
            if writes:
                log.write(row)
                progress.update(row)
            rows.append(row)
            if step % train.checkpoints.every == 0 or last:
                save(step, state, feed, store)
            if failed is not None:
                break
        done = rows[-1]["step"] if rows else start
        if failed is not None or signals.received is not None:
            if done not in store.steps() and rows:
                save(done, state, feed, store)
            raise failed or _interrupted(signals, done)
    return rows


def _write(file: Path, text: str) -> None:
    """Writes a file, whole or not at all: an older one stays when the disk is full."""
    partial = file.with_name(f".{file.name}.partial")
    with writing(file):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)


def _interrupted(signals: StopSignals, step: int) -> Interrupted:
    assert signals.received is not None
    return Interrupted(signals.received, step)


def _open_feed(
    run: Run, state: TrainState, out: Path, start: int, collector: Mapping[str, Any] | None
) -> RecordedFeed | LiveFeed:
    learner, source = run.learner, run.source
    if isinstance(source, RecordedSource):
        return RecordedFeed(learner, source, logprobs_of_the_start(learner, source, out, start))
    params = sampling_params(learner, state)
    return LiveFeed(learner, source, params, start=start, out=out, saved=collector)


def _describe_model(learner: Learner) -> dict[str, Any]:
    """What an export needs to know: the model's `config.json`, and the folder that it came from."""
    config, source = learner.model.config, learner.train.model
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
    absl_logging.set_verbosity(absl_logging.FATAL)  # errors are raised, too
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
    names = ("loss", "reward_mean") if "reward_mean" in last else ("loss",)
    changes = ", ".join(f"{name} {first[name]:z.4f} to {last[name]:z.4f}" for name in names)
    print(
        f"{out}: steps {first['step']} to {last['step']}, {changes}; "
        f"{last['flat_tokens']:,} tokens in {last['tree_tokens']:,} (x{last['dedupe_ratio']:.1f}), "
        f"{last['flat_tokens'] / last['seconds']:,.0f} flat tokens/s in the last step"
    )


if __name__ == "__main__":
    run_command(functools.partial(guarded, main))
