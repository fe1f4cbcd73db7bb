"""Reward functions in processes of their own, for those that take long or run what a model wrote.

    rewards = RewardFunction("my_rewards:passes_tests", RewardProcesses(timeout=10))
    reward = await rewards.score(task, answer)       # in an environment's episode

A worker has a limit of time and of memory, an empty folder as its working directory, and of the environment
variables only what Python needs: no tokens and keys of the training run. It is killed, with its children,
when it takes too long, and replaced after some calls, so that nothing that ran in it stays. With
`ray_address` it is a process on a node of a Ray cluster, with the same limits and the node's variables.

Limits: this holds failures apart, it is no sandbox. Code that wants to can read files of the same user, use
the network, leave its process group, or write a reward itself: run what you don't trust in a container. The
limit of memory holds on Linux; Windows is not supported.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from dta_jax.collect.reward_process import RewardError, RewardProcess, RewardProcesses
from dta_jax.collect.reward_ray import RewardProcessOnRay
from dta_jax.envs.ray_cluster import connected
from dta_jax.errors import InputError

_Worker: TypeAlias = RewardProcess | RewardProcessOnRay


class RewardFunction:
    """A function that is called in worker processes. All calls come from one event loop.

    Args:
      function: "module:name", or a function that is found under its module's name. Its arguments are what
        JSON can say; it returns a number.
      settings: workers and their limits.

    Raises:
      InputError: the function has no such name; or `settings.ray_address` is given, and `ray` is missing or
        there is no such cluster.
    """

    def __init__(self, function: str | Callable[..., float], settings: RewardProcesses):
        named = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        module, colon, name = named.partition(":")
        if not (module and colon and name) or "<" in name:
            raise InputError("RewardFunction", "function", expected="module:name", actual=named)
        if settings.ray_address is not None:
            connected("RewardProcesses", "ray_address", settings.ray_address)
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
            worker = self._idle.pop() if self._idle else self._fresh()
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

    def _fresh(self) -> _Worker:
        if self._settings.ray_address is not None:
            return RewardProcessOnRay(self._named, self._settings)
        return RewardProcess(self._named, self._settings, self._folder)


def _end(alive: set[_Worker], folder: str, threads: ThreadPoolExecutor) -> None:
    for worker in alive:
        worker.abandon()
    threads.shutdown(wait=False)
    shutil.rmtree(folder, ignore_errors=True)
