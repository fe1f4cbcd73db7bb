"""Reward functions in processes of their own, for those that take long or run what a model wrote.

    rewards = RewardFunction("my_rewards:passes_tests", RewardProcesses(timeout=10))
    reward = await rewards.score(task, answer)       # in an environment's episode

A worker has a limit of time and of memory, an empty folder as its working directory, and of the environment
variables only what Python needs: no tokens and keys of the training run. It is killed, with its children,
when it takes too long, and replaced after some calls, so that nothing that ran in it stays.

Limits: this holds failures apart, it is no sandbox. Code that wants to can read files of the same user, use
the network, leave its process group, or write a reward itself: run what you don't trust in a container. The
limit of memory holds on Linux; Windows is not supported. Functions run on this machine, not on a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from dta_jax.errors import InputError

START_SECONDS: Final = 120.0
"""How long a worker may take to import the function's module."""

_KEPT_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
_LONGEST_REPLY: Final = 1 << 16


class RewardError(RuntimeError):
    """A reward function gave no reward: it raised, took too long, died, or returned no finite number."""


@dataclass(frozen=True)
class RewardProcesses:
    """How reward functions are run.

    Attributes:
      workers: processes.
      timeout: seconds for one call.
      memory_mb: address space of a worker, MiB.
      retries: how often a call that failed is made again, in a fresh process.
      calls_per_worker: a process is replaced after so many.
      keep_environment: variables that workers get besides those that Python needs.
    """

    workers: int = 4
    timeout: float = 30.0
    memory_mb: int = 2048
    retries: int = 1
    calls_per_worker: int = 64
    keep_environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("workers", self.workers >= 1, "at least 1"),
            ("timeout", 0 < self.timeout < math.inf, "seconds, above 0"),
            ("memory_mb", self.memory_mb >= 64, "at least 64"),
            ("retries", self.retries >= 0, "at least 0"),
            ("calls_per_worker", self.calls_per_worker >= 1, "at least 1"),
        ):
            if not good:
                raise InputError("RewardProcesses", name, expected=expected, actual=repr(getattr(self, name)))


class RewardFunction:
    """A function that is called in worker processes. All calls come from one event loop.

    Args:
      function: "module:name", or a function that is found under its module's name. Its arguments are what
        JSON can say; it returns a number.
      settings: workers and their limits.

    Raises:
      InputError: the function has no such name.
    """

    def __init__(self, function: str | Callable[..., float], settings: RewardProcesses):
        named = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        module, colon, name = named.partition(":")
        if not (module and colon and name) or "<" in name:
            raise InputError("RewardFunction", "function", expected="module:name", actual=named)
        self._named, self._settings = named, settings
        self._folder = tempfile.mkdtemp(prefix="rewards-")
        self._threads = ThreadPoolExecutor(settings.workers, thread_name_prefix="rewards")
        self._free = asyncio.Semaphore(settings.workers)
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._end = weakref.finalize(self, _end, self._alive, self._folder, self._threads)

    async def score(self, *arguments: Any) -> float:
        """The function's result.

        Raises:
          RewardError: it failed, and all retries did.
          InputError: the function cannot be imported, or an argument is nothing that JSON can say.
        """
        try:
            request = json.dumps({"arguments": arguments}).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise InputError(self._named, "arguments", expected="JSON", actual=error) from None
        for _ in range(self._settings.retries):
            try:
                return await self._once(request)
            except RewardError:
                continue
        return await self._once(request)

    def close(self) -> None:
        """Kills all workers. May be called again."""
        self._end()

    async def _once(self, request: bytes) -> float:
        async with self._free:
            worker = self._idle.pop() if self._idle else _Worker(self._named, self._settings, self._folder)
            self._alive.add(worker)
            call = asyncio.get_running_loop().run_in_executor(self._threads, worker.score, request)
            try:
                reward = await asyncio.shield(call)
            except BaseException:  # cancelled, too: the thread that waits for the process ends with it
                worker.abandon()
                self._alive.discard(worker)
                raise
            if worker.calls < self._settings.calls_per_worker:
                self._idle.append(worker)
            else:
                self._alive.discard(worker)
                worker.abandon()
            return reward


def _end(alive: set[_Worker], folder: str, threads: ThreadPoolExecutor) -> None:
    for worker in alive:
        worker.abandon()
    threads.shutdown(wait=False)
    shutil.rmtree(folder, ignore_errors=True)


class _Worker:
    """One process. `score` blocks; while it runs in a thread, others may only `abandon`."""

    def __init__(self, named: str, settings: RewardProcesses, folder: str):
        self._named, self._settings = named, settings
        self.calls = 0
        self._lock = threading.Lock()
        self._busy = self._abandoned = False
        kept = {
            name: os.environ[name]
            for name in _KEPT_VARIABLES + settings.keep_environment
            if name in os.environ
        }
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dta_jax.collect.reward_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=kept | {"PYTHONPATH": path, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)

    def score(self, request: bytes) -> float:
        """Sends one request, and reads the reward; where there is none, the process is ended."""
        with self._lock:
            if self._abandoned:
                raise RewardError(f"{self._named}: given up before it began")
            self._busy = True
        try:
            if not self.calls:
                self._begin()
            self.calls += 1
            return self._reward(self._exchange(request, self._settings.timeout))
        except BaseException:
            self.abandon()
            raise
        finally:
            with self._lock:
                self._busy = False
                if self._abandoned:
                    self._close_pipes()

    def abandon(self) -> None:
        """Ends the process and its children; the pipes are closed as soon as nobody reads them."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # another thread was first
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._lock:
            self._abandoned = True
            if not self._busy:
                self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _reward(self, reply: dict[str, Any]) -> float:
        reward = reply.get("reward")
        if isinstance(reward, float) and math.isfinite(reward):
            return reward
        raise RewardError(f"{self._named}: {reply.get('error', f'returned {reward!r}, no finite number')}")

    def _begin(self) -> None:
        first = {"function": self._named, "memory_bytes": self._settings.memory_mb << 20}
        reply = self._exchange(json.dumps(first).encode() + b"\n", START_SECONDS)
        if "error" in reply:
            raise InputError("RewardFunction", self._named, expected="a function", actual=reply["error"])

    def _exchange(self, request: bytes, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        reply = b""
        try:
            while request:
                self._wait(self._requests, select.POLLOUT, end, seconds)
                request = request[os.write(self._requests, request) :]
            while not reply.endswith(b"\n"):
                self._wait(self._replies, select.POLLIN, end, seconds)
                read = os.read(self._replies, _LONGEST_REPLY)
                reply += read
                if not read or len(reply) > _LONGEST_REPLY:
                    raise RewardError(f"{self._named}: the process ended, or replied at too great length")
            answer = json.loads(reply)
        except (OSError, ValueError) as error:
            raise RewardError(f"{self._named}: the process ended, or replied nonsense: {error}") from None
        if not isinstance(answer, dict):
            raise RewardError(f"{self._named}: the process replied {answer!r}")
        return answer

    def _wait(self, pipe: int, event: int, end: float, seconds: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise RewardError(f"{self._named}: not done after {seconds:g} s")
