"""A process that runs a reward function on a Ray cluster: an actor there starts it, limits it and ends it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from typing import Final

from dta_jax.collect.reward_process import START_SECONDS, RewardError, RewardProcess, RewardProcesses
from dta_jax.envs.ray_cluster import START_SECONDS as PLACING_SECONDS
from dta_jax.envs.ray_cluster import ray_package

_END_SECONDS: Final = (
    5.0  # for an actor to end its process; the process ends with the actor, its children don't
)


class RewardProcessOnRay:
    """`RewardProcess` on a node of the cluster that this process is connected to.

    Args:
      named: the function, "module:name".
      settings: its limits.
    """

    def __init__(self, named: str, settings: RewardProcesses):
        self._ray = ray_package("RewardProcesses")
        self._named, self._settings = named, settings
        self.calls = 0
        # two calls at a time: `abandon` while `score` runs
        self._host = self._ray.remote(num_cpus=1, max_concurrency=2)(RewardProcessHost).remote(
            named, settings
        )

    def score(self, request: bytes) -> float:
        """As `RewardProcess.score`; an actor that dies, or is not started in time, is a RewardError."""
        errors = self._ray.exceptions
        waited = self._settings.timeout + PLACING_SECONDS + START_SECONDS
        try:
            reward: float = self._ray.get(self._host.score.remote(request), timeout=waited)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            raise RewardError(f"{self._named}: no reward from the cluster: {error}") from None
        self.calls += 1
        return reward

    def abandon(self) -> None:
        """Ends the process, its children and the actor."""
        if not self._ray.is_initialized():  # at the end of this program: they have ended with the connection
            return
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._host.abandon.remote(), timeout=_END_SECONDS)
        self._ray.kill(self._host)


class RewardProcessHost:
    """The actor: one process, and a folder for it.

    Args:
      named: the function, "module:name".
      settings: its limits.
    """

    def __init__(self, named: str, settings: RewardProcesses):
        self._folder = tempfile.mkdtemp(prefix="rewards-")
        self._process = RewardProcess(named, settings, self._folder)

    def score(self, request: bytes) -> float:
        """As `RewardProcess.score`."""
        return self._process.score(request)

    def abandon(self) -> None:
        """Ends the process, and removes its folder."""
        self._process.abandon()
        shutil.rmtree(self._folder, ignore_errors=True)
