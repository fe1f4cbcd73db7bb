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

from dta_jax.checkpoint import CheckpointStore, DueCheckpoints
from dta_jax.collect.stream import Snapshot
from dta_jax.errors import InputError, Interrupted, RunError, writing
from dta_jax.guards import GuardStop, Watch
from dta_jax.learner import Learner, TrainState, source_of
from dta_jax.live import LiveFeed, sampling_params
from dta_jax.phases import Record, phase, recording
from dta_jax.preflight import preflight
from dta_jax.prepare import Run
from dta_jax.profiling import ProfiledSteps, Profiler
from dta_jax.recorded import RecordedFeed, RecordedSource, logprobs_of_the_start
from dta_jax.run_record import FrozenWeights, RunRecord
from dta_jax.settings import Checkpoints, LiveRollouts
from dta_jax.signals import Stopped, StopSignals
from dta_jax.sinks import Sink, check_sinks, open_sinks
from dta_jax.step_work import Nothing, Planned
from dta_jax.terminal import Progress, Terminal


def run_training(
    run: Run,
    out: Path,
    config_text: str,
    *,
    allow_changes: bool = False,
    quiet: bool = False,
    profile: ProfiledSteps | None = None,
) -> range:
    """Trains from the newest checkpoint in `out`, or from the start, up to the last step.

    Args:
      run: from `prepare`.
      out: DIR of the module docstring.
      config_text: the operative config, to be stored.
      allow_changes: go on from a checkpoint that was made with other settings.
      quiet: show nothing but warnings and what is asked for.
      profile: steps to profile, if any (`dta_jax.profiling`).

    Returns:
      The steps that were run; `dta_jax.metrics.read_steps` has their rows. They are not kept in memory.

    Raises:
      InputError: the folder holds another run, or cannot be used; steps to profile that are not made; a sink
        whose package is missing.
      RunError: no batch can be had, a step is not finite, or the disk is full.
      Interrupted: a signal came; everything is saved.
    """
    train, learner = run.train, run.learner
    check_sinks(train.log)
    record = RunRecord.of(learner, config_text, run.source)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(out, "--out", expected="a folder", actual=error.strerror) from None
    writes = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_open_store(out, train.checkpoints))
        start, state, resumed = _beginning(learner, store, out, None if allow_changes else record)
        if writes:
            _write(out / "operative_config.gin", config_text)
        if start >= train.steps:
            return range(start + 1, start + 1)
        if profile is not None:
            profile.check(start=start, steps=train.steps)
        terminal = Terminal(quiet=quiet or not writes)
        signals = stack.enter_context(StopSignals())
        folder = out / "checkpoints" / str(start)
        frozen = FrozenWeights(folder, resumed.get("frozen"), allow_changes=allow_changes)
        try:
            with signals.interrupting(), terminal.waiting("preparing the first batch"):
                feed = _open_feed(run, state, out, start, resumed.get("collector"), frozen)
        except Stopped:
            raise _interrupted(signals, start) from None
        stack.enter_context(feed)
        reference = None
        if isinstance(run.source, LiveRollouts) and "ref_logp" in train.reads:
            reference = learner.reference_params()
            name = "starting" if train.reference is None else "reference"
            frozen.check(name, source_of(train.reference or train.model), reference)
        sinks: list[Sink] = []
        if writes:
            sinks = stack.enter_context(open_sinks(train, out, keep_through=start))
        terminal.table(preflight(run, out, start))
        progress = stack.enter_context(terminal.progress(start=start, steps=train.steps))
        times = stack.enter_context(recording(progress.phase))
        profiler = stack.enter_context(Profiler(profile if writes else None, out, times))
        shown = _Shown(terminal, progress, sinks, times, profiler)
        watch = Watch(train.guards, out, resumed.get("guards"), tell=_tell)
        loop = _Loop(run, record, frozen, store, signals, feed, watch, shown)
        try:
            return loop.run(state, start, reference)
        finally:
            loop.tell_summary()


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
        record: RunRecord,
        frozen: FrozenWeights,
        store: CheckpointStore,
        signals: StopSignals,
        feed: RecordedFeed | LiveFeed,
        watch: Watch,
        shown: _Shown,
    ):
        self._train, self._learner = run.train, run.learner
        self._record, self._frozen, self._store = record, frozen, store
        self._signals, self._feed, self._watch, self._shown = signals, feed, watch, shown
        self._due = DueCheckpoints(run.train.checkpoints)
        self._snapshot: Snapshot | None = None
        self._beside: dict[str, Any] = {}  # what a checkpoint of the last step says beside its arrays
        self._failed: RunError | InputError | None = None

    def run(self, state: TrainState, start: int, reference: Any) -> range:
        """Trains from step `start` + 1 to the last one; returns the steps that were run."""
        train, done = self._train, start
        for step in range(start + 1, train.steps + 1):
            with self._shown.profiler.step(step):
                began = time.perf_counter()
                planned = self._next(step)
                if planned is None:
                    break
                warm_up = train.planner.warm_up and step == start + 1
                try:
                    state, row = self._step(state, step, planned, reference, warm_up=warm_up)
                except GuardStop as error:
                    self._failed = error
                    break
                done = step
                # Whatever happens now, the step is logged and saved; its row may lack the evaluation.
                self._publish(state, step, row, began)
                self._report(row)
                if self._due.at(step, row) or step == train.steps or self._ends:
                    self._save(step, state)
            self._shown.end_profile(step)
            if self._ends:
                break
        if self._ends:
            # Updates that a step made before it was stopped have taken its arrays.
            whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.as_tree()))
            if done > start and whole and done not in self._store.steps():
                self._save(done, state)
            raise self._failed or _interrupted(self._signals, done)
        return range(start + 1, done + 1)

    def tell_summary(self) -> None:
        """Says in a line each which checkpoint is best and what the guards met."""
        checkpoints, best = self._train.checkpoints, self._store.best()
        if checkpoints.keep_best and best is not None:
            _tell(f"best {checkpoints.best_metric}: checkpoint {best}")
        if (summary := self._watch.summary()) is not None:
            _tell(summary)

    def _step(
        self, state: TrainState, step: int, planned: Planned | Nothing, reference: Any, *, warm_up: bool
    ) -> tuple[TrainState, dict[str, Any]]:
        """The update on a batch, if there is something in it."""
        if isinstance(planned, Planned):
            return self._learner.update(state, step, planned, reference, self._watch, warm_up=warm_up)
        self._watch.begin(step)
        self._watch.skips_empty(planned.reason)
        return state, planned.row(step) | self._watch.row()

    @property
    def _ends(self) -> bool:
        return self._failed is not None or self._signals.received is not None

    def _next(self, step: int) -> Planned | Nothing | None:
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
            self._watch.look_at_queue(row)
        except (RunError, InputError) as error:
            self._failed = error
        row |= self._watch.row()

    def _report(self, row: dict[str, Any]) -> None:
        row |= self._shown.times.take()
        self._shown.report(row)
        # Taken now: the next batch, even one that stops the run, changes what there is to go on from.
        self._snapshot = self._feed.snapshot()
        self._beside = {
            "collector": None if self._snapshot is None else self._snapshot.state,
            "guards": self._watch.state(),
            "frozen": self._frozen.known,
            "metrics": {name: x for name, x in row.items() if type(x) in (int, float)},
        }

    def _save(self, step: int, state: TrainState) -> None:
        with phase("save"):
            if self._snapshot is not None:
                assert isinstance(self._feed, LiveFeed)
                self._feed.keep(step, self._snapshot, self._store.steps(), self._train.checkpoints.keep)
            self._store.save(step, state.as_tree(), self._record.at(step, **self._beside))
            self._due.note_saved()


def _open_store(out: Path, kept: Checkpoints) -> CheckpointStore:
    return CheckpointStore(
        out / "checkpoints",
        keep=kept.keep,
        keep_best=kept.keep_best,
        best_metric=kept.best_metric,
        best_mode=kept.best_mode,
    )


def _beginning(
    learner: Learner, store: CheckpointStore, out: Path, record: RunRecord | None
) -> tuple[int, TrainState, dict[str, Any]]:
    """Where to begin: the newest checkpoint, with what it says beside its arrays; or step 0.

    A checkpoint must be of the run that `record` describes; None allows any.
    """
    resumed: dict[str, Any] = {}

    def check(step: int, saved: Mapping[str, Any]) -> None:
        if record is not None:
            record.check(out / "checkpoints" / str(step), saved)
        resumed.clear()
        resumed.update(saved)

    found = store.newest(learner.like, check)
    if found is None:
        return 0, learner.starting_state(), {}
    return found[0], TrainState.from_tree(found[1]), resumed


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
    run: Run,
    state: TrainState,
    out: Path,
    start: int,
    collector: Mapping[str, Any] | None,
    frozen: FrozenWeights,
) -> RecordedFeed | LiveFeed:
    learner, source = run.learner, run.source
    if isinstance(source, RecordedSource):
        return RecordedFeed(learner, source, logprobs_of_the_start(learner, source, out, start, frozen.check))
    params = sampling_params(learner, state)
    return LiveFeed(learner, source, params, start=start, out=out, saved=collector)
