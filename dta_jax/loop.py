"""The loop of a run in its folder: batch, update, weights to the engine, a row of metrics, a checkpoint.

    DIR/metrics.jsonl          one JSON object per step
    DIR/tensorboard/           the same numbers as event files (`dta_jax.sinks`)
    DIR/profile/               a trace of the profiled steps, if any (`dta_jax.profiling`)
    DIR/operative_config.gin   every binding that the run used
    DIR/checkpoints/           the newest states; the same run goes on from the last one
    DIR/starting_logp.npy      log-probabilities under the starting weights, where the loss reads them

Whatever ends a run early (a signal, a batch that cannot be had), its last step is logged and saved first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dta_jax.checkpoint import CheckpointStore
from dta_jax.errors import InputError, Interrupted, RunError, writing
from dta_jax.guards import Watch
from dta_jax.learner import TrainState
from dta_jax.live import LiveFeed, sampling_params
from dta_jax.phases import Record, phase, recording
from dta_jax.preflight import preflight
from dta_jax.prepare import Run
from dta_jax.profiling import ProfiledSteps, Profiler
from dta_jax.recorded import RecordedFeed, RecordedSource, logprobs_of_the_start
from dta_jax.run_record import RunRecord
from dta_jax.settings import LiveRollouts
from dta_jax.signals import Stopped, StopSignals
from dta_jax.sinks import Sink, check_sinks, open_sinks
from dta_jax.step_work import Planned
from dta_jax.terminal import Progress, Terminal


def run_training(
    run: Run,
    out: Path,
    config_text: str,
    *,
    allow_changes: bool = False,
    quiet: bool = False,
    profile: ProfiledSteps | None = None,
) -> list[dict[str, Any]]:
    """Trains from the newest checkpoint in `out`, or from the start, up to the last step.

    Args:
      run: from `prepare`.
      out: DIR of the module docstring.
      config_text: the operative config, to be stored.
      allow_changes: go on from a checkpoint that was made with other settings.
      quiet: show nothing but warnings and what is asked for.
      profile: steps to profile, if any (`dta_jax.profiling`).

    Returns:
      The rows of metrics of the steps that were run.

    Raises:
      InputError: the folder holds another run, or cannot be used; steps to profile that are not made; a sink
        whose package is missing.
      RunError: no batch can be had, a step is not finite, or the disk is full.
      Interrupted: a signal came; everything is saved.
    """
    train, learner = run.train, run.learner
    check_sinks(train.log)
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
        if profile is not None:
            profile.check(start=start, steps=train.steps)
        terminal = Terminal(quiet=quiet or not writes)
        signals = stack.enter_context(StopSignals())
        try:
            with signals.interrupting(), terminal.waiting("preparing the first batch"):
                feed = _open_feed(run, state, out, start, resumed.get("collector"))
        except Stopped:
            raise _interrupted(signals, start) from None
        stack.enter_context(feed)
        reference = None
        if isinstance(run.source, LiveRollouts) and "ref_logp" in train.reads:
            reference = learner.reference_params()
        sinks: list[Sink] = []
        if writes:
            sinks = stack.enter_context(open_sinks(train, out, keep_through=start))
        terminal.table(preflight(run, out, start))
        progress = stack.enter_context(terminal.progress(start=start, steps=train.steps))
        times = stack.enter_context(recording(progress.phase))
        profiler = stack.enter_context(Profiler(profile if writes else None, out, times))
        shown = _Shown(terminal, progress, sinks, times, profiler)
        loop = _Loop(run, out, record, store, signals, feed, shown)
        return loop.run(state, start, reference)


@dataclass(frozen=True, eq=False)
class _Shown:
    """Where a run tells how it goes, and what times it."""

    terminal: Terminal
    progress: Progress
    sinks: list[Sink]
    times: Record
    profiler: Profiler

    def report(self, row: dict[str, Any]) -> None:
        """A step is done."""
        for sink in self.sinks:
            sink.write(row)
        self.progress.update(row)

    def end_profile(self, step: int) -> None:
        """Shows the profile, if it ends with this step."""
        found = self.profiler.finished(step)
        if found is not None:
            title = f"profile of steps {found.steps}, seconds a step ({found.folder}):"
            self.terminal.table(found.rows(), title, always=True)


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
        shown: _Shown,
    ):
        self._train, self._learner, self._out = run.train, run.learner, out
        self._record, self._store, self._signals, self._feed = record, store, signals, feed
        self._shown = shown
        self._watch = Watch(run.train.guards, out, tell=_tell)
        self._failed: RunError | InputError | None = None
        self._rows: list[dict[str, Any]] = []

    def run(self, state: TrainState, start: int, reference: Any) -> list[dict[str, Any]]:
        """Trains from step `start` + 1 to the last one; returns the rows of metrics."""
        train, done = self._train, start
        for step in range(start + 1, train.steps + 1):
            with self._shown.profiler.step(step):
                began = time.perf_counter()
                planned = self._next(step)
                if planned is None:
                    break
                warm_up = train.planner.warm_up and step == start + 1
                state, row = self._learner.update(
                    state, step, planned, reference, self._watch, warm_up=warm_up
                )
                done = step
                # Whatever happens now, the step is logged and saved; its row may lack the evaluation.
                self._publish(state, step, row, began)
                self._report(row)
                if step % train.checkpoints.every == 0 or step == train.steps or self._ends:
                    self._save(step, state)
            self._shown.end_profile(step)
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
                with phase("publish"):
                    self._feed.publish(state, step)
                row["seconds"] = time.perf_counter() - began
                due = step % train.evaluate_every == 0 or step == train.steps
                if train.evaluate is not None and due:
                    with phase("evaluate"):
                        row |= self._feed.evaluate(train.evaluate, step)
        except (RunError, InputError) as error:
            self._failed = error

    def _report(self, row: dict[str, Any]) -> None:
        row |= self._shown.times.take()
        self._rows.append(row)
        self._shown.report(row)

    def _save(self, step: int, state: TrainState) -> None:
        with phase("save"):
            collector = self._feed.saved(step, self._train.checkpoints.keep)
            self._store.save(step, state.as_tree(), self._record.at(step, collector))


def _tell(line: str) -> None:
    """Says something on stderr, once for all processes."""
    if jax.process_index() == 0:
        print(line, file=sys.stderr)


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
