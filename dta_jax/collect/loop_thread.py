"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_POLL_SECONDS: Final = 0.2


class LoopThread:
    """Runs coroutines on one event loop in a background thread, which begins with the first of them.

    The thread is a daemon: code that blocks the loop can delay `close`, but not the end of the process.

    Args:
      name: the thread's.
    """

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._closed = False

    def run(self, coroutine: Coroutine[Any, Any, T], watch: Callable[[], None] = lambda: None) -> T:
        """The result of a coroutine; what it raises is raised here.

        Args:
          coroutine: cancelled if waiting for it ends with an exception, Ctrl-C included.
          watch: called a few times a second while it runs; may raise to give up.
        """
        if self._closed:
            coroutine.close()
            raise RuntimeError("the event loop is closed")
        if not self._thread.is_alive():
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=_POLL_SECONDS).done:
                watch()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def close(self, seconds: float) -> bool:
        """Cancels all that runs and joins the thread.

        Args:
          seconds: how long to wait for it.

        Returns:
          Whether the thread ended in time.
        """
        self._closed = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(seconds)
            return not self._thread.is_alive()
        if not self._loop.is_closed():
            self._loop.close()
        return True

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_all_others())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _cancel_all_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
