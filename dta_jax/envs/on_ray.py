"""Another environment's episodes on a Ray cluster: each lives in one of several actors there.

    LiveRollouts.environment = @OnRay()
    OnRay.environment = @Tau2()
    OnRay.address = "auto"

What an episode raises on its node is raised here as it is. Timeouts and retries are those of `Collect`:
`close` cancels what still runs. An actor that dies is started again by Ray; its episodes fail, and are tried
again as others are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final

from dta_jax.envs.bandit import Bandit
from dta_jax.envs.game import TreasureHunt
from dta_jax.envs.imported import ImportedEnvironment
from dta_jax.envs.protocol import Answer, Environment, Episode, Step
from dta_jax.envs.ray_cluster import START_SECONDS, connected, ray_package
from dta_jax.envs.reasoning import ReasoningGym
from dta_jax.envs.tau2 import Tau2
from dta_jax.errors import InputError

_AT_A_TIME: Final = 10_000  # calls per actor: it is `Collect.max_concurrent` that limits episodes


@dataclass(frozen=True)
class OnRay:
    """An environment on a Ray cluster.

    Attributes:
      environment: whose episodes; also made in this process, for its number of tasks.
      address: of the cluster: "HOST:PORT" of its head node, "auto" for the one that this machine belongs to,
        or "local" for a new one on this machine alone.
      actors: processes on the cluster that episodes are dealt out to.
      cpus_per_actor: that Ray sets aside for each.
    """

    environment: Bandit | TreasureHunt | ReasoningGym | Tau2 | ImportedEnvironment
    address: str = "auto"
    actors: int = 4
    cpus_per_actor: float = 1.0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("address", bool(self.address), "the address of a Ray cluster"),
            ("actors", self.actors >= 1, "at least 1"),
            ("cpus_per_actor", self.cpus_per_actor >= 0, "at least 0"),
        ):
            if not good:
                raise InputError("OnRay", name, expected=expected, actual=repr(getattr(self, name)))
        ray_package("OnRay")

    @property
    def num_tasks(self) -> int:
        """The environment's."""
        return self.environment.num_tasks

    def episode(self, task: int, seed: int) -> Episode:
        """An episode on one of the actors; the first one connects to the cluster and starts them.

        Raises:
          InputError: there is no such cluster, or it has no room for the actors.
        """
        return _RemoteEpisode(next(self._dealt), task, seed)

    @functools.cached_property
    def _dealt(self) -> Iterator[Any]:
        ray = connected("OnRay", "address", self.address)
        fields = {
            f.name: getattr(self.environment, f.name) for f in dataclasses.fields(self.environment) if f.init
        }
        host = ray.remote(
            num_cpus=self.cpus_per_actor,
            max_concurrency=_AT_A_TIME,
            max_restarts=-1,
            max_task_retries=1,  # for calls that come while the actor is started again
        )(EpisodeHost)
        actors = [host.remote(type(self.environment), fields) for _ in range(self.actors)]
        try:
            ray.get([actor.ready.remote() for actor in actors], timeout=START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise InputError(
                "OnRay",
                "actors",
                expected=f"a cluster that starts them within {START_SECONDS:g} s",
                actual=f"{self.actors} of {self.cpus_per_actor:g} CPUs each",
                hint="take fewer, or give each less",
            ) from None
        except ray.exceptions.RayActorError as error:
            expected = "one that can be made on the cluster's nodes"
            raise InputError("OnRay", "environment", expected=expected, actual=error) from error
        return itertools.cycle(actors)


class _RemoteEpisode:
    """The end of an episode that is here."""

    _names: Final = itertools.count()

    def __init__(self, host: Any, task: int, seed: int):
        self._host, self._task, self._seed = host, task, seed
        self._name = next(self._names)

    async def start(self) -> Step:
        return await _result(self._host.start.remote(self._name, self._task, self._seed))

    async def step(self, answer: Answer) -> Step:
        return await _result(self._host.step.remote(self._name, answer))

    async def close(self) -> None:
        await _result(self._host.close.remote(self._name))


async def _result(reference: Any) -> Any:
    """What a call returned, or raised on its node."""
    task_error = ray_package("OnRay").exceptions.RayTaskError
    try:
        return await reference
    except task_error as error:
        raise error.cause from None


class EpisodeHost:
    """An actor: one environment, and the episodes of it that go on.

    Args:
      kind: the environment's class.
      fields: its arguments.
    """

    def __init__(self, kind: type[Environment], fields: dict[str, Any]):
        self._environment = kind(**fields)
        self._episodes: dict[int, Episode] = {}
        self._running: dict[int, asyncio.Task[Step]] = {}

    async def ready(self) -> None:
        """Returns once the environment is made."""

    async def start(self, name: int, task: int, seed: int) -> Step:
        """Begins the episode `name`."""
        self._episodes[name] = episode = self._environment.episode(task, seed)
        return await self._cancellable(name, episode.start())

    async def step(self, name: int, answer: Answer) -> Step:
        """Goes on with it."""
        episode = self._episodes.get(name)
        if episode is None:
            raise RuntimeError("its actor was started again, and the episode is lost")
        return await self._cancellable(name, episode.step(answer))

    async def close(self, name: int) -> None:
        """Cancels what it does, and ends it."""
        if running := self._running.get(name):
            running.cancel()
            await asyncio.wait([running])
        if episode := self._episodes.pop(name, None):
            await episode.close()

    async def _cancellable(self, name: int, turn: Coroutine[Any, Any, Step]) -> Step:
        self._running[name] = running = asyncio.ensure_future(turn)
        try:
            return await running
        finally:
            del self._running[name]
