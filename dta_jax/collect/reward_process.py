"""One process that runs a reward function, seen from the one that started it: limits, requests, its end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
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
      ray_address: of a Ray cluster (see `dta_jax.envs.ray_cluster`); the processes run on its nodes, with the
        same limits, each beside an actor that takes one CPU. None for this machine.
    """

    workers: int = 4
    timeout: float = 30.0
    memory_mb: int = 2048
    retries: int = 1
    calls_per_worker: int = 64
    keep_environment: tuple[str, ...] = ()
    ray_address: str | None = None

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("workers", self.workers >= 1, "at least 1"),
            ("timeout", 0 < self.timeout < math.inf, "seconds, above 0"),
            ("memory_mb", self.memory_mb >= 64, "at least 64"),
            ("retries", self.retries >= 0, "at least 0"),
            ("calls_per_worker", self.calls_per_worker >= 1, "at least 1"),
            ("ray_address", self.ray_address != "", "None or the address of a Ray cluster"),
        ):
            if not good:
                raise InputError("RewardProcesses", name, expected=expected, actual=repr(getattr(self, name)))


class RewardProcess:
    """One process. `score` blocks; while it runs in a thread, others may only `abandon`.

    Args:
      named: the function, "module:name".
      settings: its limits.
      folder: its working directory, and where it finds its home and its temporary files.
    """

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
        """Sends one request, and reads the reward; where there is none, the process is ended.

        Args:
          request: a line of JSON, see `dta_jax.collect.reward_worker`.

        Raises:
          RewardError: there is none.
          InputError: the function cannot be imported.
        """
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
