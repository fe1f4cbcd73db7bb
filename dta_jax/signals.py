"""Ctrl-C and SIGTERM: the step that runs is finished and saved; a second signal ends the process at once.

    with StopSignals() as signals:
        for step in ...:
            with signals.interrupting():    # waiting: nothing is lost by giving up at once
                batch = feed.get(step)
            ...                             # an update: it is finished first
            if signals.received: break

Only in the main thread of a single process; elsewhere signals do what they always do. Several processes
that stop at different steps would wait for each other.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

import jax

from dta_jax.errors import Terminated

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A signal came while nothing had to be finished."""


class StopSignals:
    """Takes over the signals while it is entered.

    Attributes:
      received: the first signal, None before one came.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interrupting = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, the first signal raises `Stopped`."""
        self._interrupting = True
        try:
            if self.received is not None:
                raise Stopped
            yield
        finally:
            self._interrupting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        self.received = signal.Signals(number)
        if self._interrupting:
            raise Stopped
