"""The loop of a run in its folder: batch, update, weights to the engine, a row of metrics, a checkpoint.

    DIR/metrics.jsonl          one JSON object per step
    DIR/operative_config.gin   every binding that the run used
    DIR/checkpoints/           the newest states; the same run goes on from the last one
    DIR/starting_logp.npy      log-probabilities under the starting weights, where the loss reads them

Whatever ends a run early (a signal, a batch that cannot be had), its last step is logged and saved first.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from dta_jax.checkpoint import CheckpointStore
from dta_jax.errors import InputError, Interrupted, RunError, writing
from dta_jax.learner import Planned, TrainState
from dta_jax.live import LiveFeed, sampling_params
from dta_jax.metrics import MetricsLog, Progress
from dta_jax.prepare import Run
from dta_jax.recorded import RecordedFeed, RecordedSource, logprobs_of_the_start
from dta_jax.run_record import RunRecord
from dta_jax.settings import LiveRollouts
from dta_jax.signals import Stopped, StopSignals


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

    Raises:
      InputError: the folder holds another run, or cannot be used.
      RunError: no batch can be had, a step is not finite, or the disk is full.
      Interrupted: a signal came; everything is saved.
    """
    train, learner = run.train, run.learner
    record = RunRecord.of(train, config_text, run.source, learner.model.config)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(out, "--out", expected="a folder", actual=error.strerror) from None
    writes = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(CheckpointStore(out / "checkpoints", keep=train.checkpoints.keep))
        resumed: dict[str, Any] = {}

        def check(step: int, saved: Mapping[str, Any]) -> None:
            if not allow_changes:
                record.check(out / "checkpoints" / str(step), saved)
            resumed.clear()
            resumed.update(saved)

        found = store.newest(learner.like, check)
        if found is None:
            start, state = 0, learner.starting_state()
        else:
            start, state = found[0], TrainState.from_tree(found[1])
        if writes:
            _write(out / "operative_config.gin", config_text)
        if start >= train.steps:
            return []
        signals = stack.enter_context(StopSignals())
        try:
            with signals.interrupting():
                feed = _open_feed(run, state, out, start, resumed.get("collector"))
        except Stopped:
            raise _interrupted(signals, start) from None
        stack.enter_context(feed)
        reference = None
        if isinstance(run.source, LiveRollouts) and "ref_logp" in train.reads:
            reference = learner.reference_params()
        log = progress = None
        if writes:
            log = stack.enter_context(MetricsLog(out / "metrics.jsonl", keep_through=start))
            progress = stack.enter_context(Progress(start=start, steps=train.steps))
        loop = _Loop(run, out, record, store, signals, feed, log, progress)
        return loop.run(state, start, reference)


class _Loop:
    """Step after step; what a step needs beside the state."""

    def __init__(
        self,
        run: Run,
        out: Path,
        record: RunRecord,
        store: CheckpointStore,
        signals: StopSignals,
        feed: RecordedFeed | LiveFeed,
        log: MetricsLog | None,
        progress: Progress | None,
    ):
        self._train, self._learner, self._out = run.train, run.learner, out
        self._record, self._store, self._signals, self._feed = record, store, signals, feed
        self._log, self._progress = log, progress
        self._failed: RunError | InputError | None = None
        self._rows: list[dict[str, Any]] = []

    def run(self, state: TrainState, start: int, reference: Any) -> list[dict[str, Any]]:
        """Trains from step `start` + 1 to the last one; returns the rows of metrics."""
        train, done = self._train, start
        for step in range(start + 1, train.steps + 1):
            began = time.perf_counter()
            planned = self._next(step)
            if planned is None:
                break
            warm_up = train.planner.warm_up and step == start + 1
            state, row = self._learner.update(state, step, planned, reference, self._out, warm_up=warm_up)
            done = step
            # Whatever happens from here on, the step is logged and saved; its row may lack the evaluation.
            self._publish(state, step, row, began)
            self._report(row)
            if step % train.checkpoints.every == 0 or step == train.steps or self._ends:
                self._save(step, state)
            if self._ends:
                break
        if self._ends:
            if self._rows and done not in self._store.steps():
                self._save(done, state)
            raise self._failed or _interrupted(self._signals, done)
        return self._rows

    @property
    def _ends(self) -> bool:
        return self._failed is not None or self._signals.received is not None

    def _next(self, step: int) -> Planned | None:
        """The batch of a step; None if the run ends instead."""
        try:
            with self._signals.interrupting():
                return self._feed.get(step)
        except Stopped:
            pass
        except (RunError, InputError) as error:
            self._failed = error
        return None

    def _publish(self, state: TrainState, step: int, row: dict[str, Any], began: float) -> None:
        """The new weights to the engine, and evaluation where it is due."""
        train = self._train
        try:
            with contextlib.suppress(Stopped), self._signals.interrupting():
                self._feed.publish(state, step)
                row["seconds"] = time.perf_counter() - began
                due = step % train.evaluate_every == 0 or step == train.steps
                if train.evaluate is not None and due:
                    row |= self._feed.evaluate(train.evaluate, step)
        except (RunError, InputError) as error:
            self._failed = error

    def _report(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if self._log is not None and self._progress is not None:
            self._log.write(row)
            self._progress.update(row)

    def _save(self, step: int, state: TrainState) -> None:
        collector = self._feed.saved(step, self._train.checkpoints.keep)
        self._store.save(step, state.as_tree(), self._record.at(step, collector))


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
