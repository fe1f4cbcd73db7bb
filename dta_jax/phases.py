"""Where the time of a run goes: wall seconds by phase.

    with recording() as record:                      # a run, in one thread
        with phase("plan"):
            ...
        with phase("gradient"):                      # what is inside another phase counts there only
            carry = dispatch("back", back_step, carry)
        row |= record.take()                         # {"seconds_plan": 0.1, "seconds_gradient": 1.2, ...}

Phases are recorded in the thread that opened the record, and nowhere without one; work that other threads do
meanwhile is not counted twice. Traces of `jax.profiler` show phases of all threads, by name.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec, TypeVar

import jax

PREFIX: Final = "seconds_"
COMPILE: Final = "compile"
_COMPILATION: Final = "/jax/core/compile/backend_compile_duration"

P = ParamSpec("P")
T = TypeVar("T")
_here = threading.local()


class Record:
    """What was recorded so far.

    Args:
      watch: is told the name of each phase that begins inside no other.

    Attributes:
      seconds: by phase, of the whole record.
      within: seconds of what goes on within phases, in whatever thread: `compile`, and what `note` was told.
      waits: whether `dispatch` waits for the device.
    """

    def __init__(self, watch: Callable[[str], None] | None = None):
        self.seconds: dict[str, float] = {}
        self.within = {COMPILE: 0.0}
        self.waits = False
        self._watch = watch
        self._open: list[str] = []
        self._since = time.perf_counter()
        self._taken: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """What was added since the last call: `seconds_PHASE` and `compile_seconds`, for a row of metrics."""
        now = {PREFIX + name: seconds for name, seconds in self.seconds.items()}
        now["compile_seconds"] = self.within[COMPILE]
        before, self._taken = self._taken, now
        added = {name: total - before.get(name, 0.0) for name, total in now.items()}
        return {name: seconds for name, seconds in added.items() if seconds or not name.startswith(PREFIX)}

    def enter(self, name: str) -> None:
        """A phase begins."""
        if not self._open and self._watch is not None:
            self._watch(name)
        self._count()
        self._open.append(name)
        self.seconds.setdefault(name, 0.0)

    def leave(self) -> None:
        """The phase that began last ends."""
        self._count()
        self._open.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def note_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        """A listener of `jax.monitoring`."""
        if event == _COMPILATION:
            self.within[COMPILE] += duration_secs


@contextlib.contextmanager
def recording(watch: Callable[[str], None] | None = None) -> Iterator[Record]:
    """Inside, the phases of this thread are recorded; `watch` as in `Record`."""
    record, before = Record(watch), current()
    jax.monitoring.register_event_duration_secs_listener(record.note_event)
    _here.record = record
    try:
        yield record
    finally:
        _here.record = before
        jax.monitoring.unregister_event_duration_listener(record.note_event)


def current() -> Record | None:
    """This thread's record."""
    return getattr(_here, "record", None)


def note(name: str, seconds: float) -> None:
    """Adds seconds of something that goes on within phases, maybe several times at once."""
    record = current()
    if record is not None:
        record.within[name] = record.within.get(name, 0.0) + seconds


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, time is that of phase `name`."""
    record = current()
    with jax.profiler.TraceAnnotation(name):
        if record is None:
            yield
            return
        record.enter(name)
        try:
            yield
        finally:
            record.leave()


def dispatch(name: str, step: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Calls a compiled step.

    Where the record waits, this is a phase and ends when the device is done, so that steps can be told apart.
    Otherwise nothing is waited for, and the phase around it goes on.

    Args:
      name: of the phase.
      step: what is called, with the arguments that follow.
    """
    record = current()
    if record is None or not record.waits:
        return step(*args, **options)
    with phase(name):
        return jax.block_until_ready(step(*args, **options))
