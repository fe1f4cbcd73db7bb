"""Profiles of some steps: a trace that xprof and TensorBoard open, and a table of phases for the terminal.

    OUT/profile/plugins/profile/TIME/HOST.xplane.pb       for `xprof OUT/profile`
    OUT/profile/plugins/profile/TIME/HOST.trace.json.gz   for Perfetto

In profiled steps the host waits after every operation, so that PUSH and BACK are told apart: these steps are
slower than others where the host would otherwise run ahead of the device.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jax

from dta_jax.errors import InputError, writing
from dta_jax.phases import Record

FOLDER: Final = "profile"


@dataclass(frozen=True)
class ProfiledSteps:
    """Steps to profile, `first` to `last`, both of them too."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> ProfiledSteps:
        """`steps=FIRST:LAST` or `steps=STEP`.

        Raises:
          InputError: anything else.
        """
        found = re.fullmatch(r"steps=(\d+)(?::(\d+))?", text)
        steps = cls(int(found[1]), int(found[2] or found[1])) if found else None
        if steps is None or not 1 <= steps.first <= steps.last:
            raise InputError("--profile", "value", expected="steps=FIRST:LAST, from 1", actual=repr(text))
        return steps

    def __str__(self) -> str:
        return f"{self.first} to {self.last}" if self.first < self.last else f"{self.first}"

    def check(self, *, start: int, steps: int) -> None:
        """Refuses steps that a run will not make.

        Args:
          start: the step that the run goes on from.
          steps: its last one.

        Raises:
          InputError: some are outside.
        """
        if not start < self.first <= self.last <= steps:
            expected = f"steps from {start + 1} to {steps}, which the run makes"
            raise InputError("--profile", "steps", expected=expected, actual=f"{self.first}:{self.last}")


@dataclass(frozen=True)
class Profile:
    """What the profiled steps took.

    Attributes:
      steps: which.
      folder: the trace's.
      wall: seconds of all of them.
      seconds: by phase, of all of them.
      within: seconds of what went on within the phases.
    """

    steps: ProfiledSteps
    folder: Path
    wall: float
    seconds: Mapping[str, float]
    within: Mapping[str, float]

    def rows(self) -> list[tuple[str, str, str]]:
        """Phase, seconds per step, share; the longest first, and the rest: other, all, within."""
        count = self.steps.last - self.steps.first + 1
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts.append(("other", max(0.0, self.wall - sum(self.seconds.values()))))
        parts.append(("step", self.wall))
        parts += [(f"{name} (within)", seconds) for name, seconds in self.within.items()]
        return [(name, f"{seconds / count:.4f}", f"{seconds / self.wall:.1%}") for name, seconds in parts]


class Profiler:
    """Traces the profiled steps of a run. A context manager: leaving it ends a trace that was begun.

    Args:
      steps: which; None for none.
      out: the run's folder.
      record: the run's.
    """

    def __init__(self, steps: ProfiledSteps | None, out: Path, record: Record):
        self._steps, self._folder, self._record = steps, out / FOLDER, record
        self._began: tuple[float, dict[str, float], dict[str, float]] | None = None

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around everything that belongs to a step.

        Raises:
          RunError: the folder cannot be written to.
        """
        if self._steps is None or not self._steps.first <= step <= self._steps.last:
            yield
            return
        if self._began is None:
            self._start()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def finished(self, step: int) -> Profile | None:
        """The profile, if `step` was the last profiled one; the trace is written then.

        Raises:
          RunError: it cannot be written.
        """
        return self._stop() if self._steps is not None and step == self._steps.last else None

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call would be an event
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._folder, profiler_options=options)
        self._record.waits = True
        self._began = time.perf_counter(), dict(self._record.seconds), dict(self._record.within)

    def _stop(self) -> Profile | None:
        if self._began is None or self._steps is None:
            return None
        (began, seconds, within), self._began = self._began, None
        wall = time.perf_counter() - began
        self._record.waits = False
        with writing(self._folder):
            jax.profiler.stop_trace()
        spent = _added(seconds, self._record.seconds), _added(within, self._record.within)
        return Profile(self._steps, self._folder, wall, *spent)


def _added(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """What is more than before."""
    more = {name: total - before.get(name, 0.0) for name, total in now.items()}
    return {name: seconds for name, seconds in more.items() if seconds > 0}
