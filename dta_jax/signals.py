"""Ctrl-C and SIGTERM: the step that runs is finished and saved; a second signal ends the process at once.

    with StopSignals() as signals:
        for step in ...:
            with signals.interrupting():    # waiting: nothing is lost by giving up at once
                batch = feed.get(step)
            ...                             # an update: it is finished first
            if signals.received: break

Only in the main thread; elsewhere signals do what they always do.

Several processes stop together, whichever of them a signal reaches. A thread in each hears signals even while
its main thread waits for the others; it tells process 0 of the first, and ends its own process at the second.
When they enter `interrupting`, all go by what process 0 knows. Inside, it alone gives up, and only what it
waits for alone (`waiting`, in `dta_jax.first_process`); then it tells the others.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, NoReturn

import jax

from dta_jax.errors import Terminated
from dta_jax.hosts import number_of_process_0, tell_process_0, told_process_0

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_KEY: Final = "dta_jax/signal"
_POLL_SECONDS: Final = 0.25


class Stopped(Exception):
    """A signal came while nothing had to be finished."""


class StopSignals:
    """Takes over the signals while it is entered."""

    def __init__(self) -> None:
        self._noticed: signal.Signals | None = None
        self._agreed: signal.Signals | None = None
        self._several = jax.process_count() > 1
        self._interrupting = False
        self._before: dict[signal.Signals, Any] = {}
        self._listening = contextlib.ExitStack()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            if self._several:
                self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def received(self) -> signal.Signals | None:
        """The first signal, None before one came; of several processes, the one that they agreed on."""
        return self._agreed if self._several else self._noticed

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, the first signal raises `Stopped`. Several processes have to enter it together."""
        self._agree()
        if self.received is not None:
            raise Stopped
        entered = _ENTERED.set(self)
        try:
            with contextlib.nullcontext() if self._several else waiting():
                yield
        except Stopped:
            self._agree()
            raise
        finally:
            _ENTERED.reset(entered)

    def _agree(self) -> None:
        if self._several and self._agreed is None:
            number = number_of_process_0(self._noticed or 0)
            self._agreed = signal.Signals(number) if number else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._noticed is not None:
            if self._several:
                return  # `_hear` ends the process
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        self._noticed = signal.Signals(number)
        if self._interrupting:
            raise Stopped

    def _listen(self) -> None:
        """Starts the thread that hears signals, until `_listening` is closed."""
        hears, written = os.pipe()
        os.set_blocking(written, False)
        thread = threading.Thread(target=self._hear, args=(hears,), name="signals", daemon=True)
        self._listening.callback(os.close, hears)
        self._listening.callback(thread.join)
        self._listening.callback(os.close, written)
        self._listening.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(written))
        thread.start()

    def _hear(self, hears: int) -> None:
        first, heard, echoes = jax.process_index() == 0, 0, 0
        main = threading.main_thread().ident
        assert main is not None
        while True:
            if not select.select([hears], [], [], _POLL_SECONDS)[0]:
                if first and self._noticed is None and (told := told_process_0(_KEY)) is not None:
                    echoes += 1
                    # A real signal, which wakes a wait for a lock: `_handle` is called, and it is heard here.
                    signal.pthread_kill(main, told)
                continue
            numbers = os.read(hears, 64)
            if not numbers:
                return
            for number in (number for number in numbers if number in SIGNALS):
                if echoes:
                    echoes -= 1
                    continue
                heard += 1
                if heard > 1:
                    _end(number)
                if not first:
                    tell_process_0(_KEY, number)


_ENTERED: Final[ContextVar[StopSignals | None]] = ContextVar("entered", default=None)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Inside, the first signal raises `Stopped`, if `StopSignals.interrupting` is around it."""
    signals = _ENTERED.get()
    if signals is None:
        yield
        return
    signals._interrupting = True
    try:
        if signals._noticed is not None:
            raise Stopped
        yield
    finally:
        signals._interrupting = False


def _end(number: int) -> NoReturn:
    print("terminated" if number == signal.SIGTERM else "interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)
