"""Groups of episodes, one after the other: started as `admission` allows, handed out in whole batches.

Everything here runs on one event loop. `loop` puts it into a thread for a trainer that blocks.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dta_jax.chat import Chat
from dta_jax.collect.admission import Admission
from dta_jax.collect.episodes import EpisodeFailure, EpisodeRunner, first_cause
from dta_jax.collect.lockstep import Lockstep, Party
from dta_jax.collect.order import Place, TaskOrder
from dta_jax.collect.records import SOURCE, Group, group_of_episodes, groups_from_json
from dta_jax.collect.report import Tally
from dta_jax.collect.settings import Collect
from dta_jax.envs.protocol import Environment
from dta_jax.errors import InputError, RunError
from dta_jax.generation.protocol import Generator
from dta_jax.model import Params
from dta_jax.rollouts import Rollouts, concatenate_rollouts

_log = logging.getLogger(__name__)


class CollectError(RunError):
    """Collecting rollouts failed: nothing moves, everything is rejected, or a group is too stale."""


class Snapshot(NamedTuple):
    """What a checkpoint keeps.

    Attributes:
      state: JSON.
      accepted: the rollouts of groups that are whole and were not trained on yet; None if there are none.
    """

    state: dict[str, Any]
    accepted: Rollouts | None


class GroupStream:
    """The groups of a run.

    Args:
      environment, generator, settings, chat: see `dta_jax.collect.loop.Collector`.
      order: of the tasks.

    Attributes:
      last_progress: when a model call or a step of an environment was last completed, `time.monotonic`.
    """

    def __init__(
        self,
        environment: Environment,
        generator: Generator,
        settings: Collect,
        order: TaskOrder,
        chat: Chat | None,
    ):
        self.last_progress = time.monotonic()
        self._generator, self._settings, self._order = generator, settings, order
        self._admission = self._fresh_admission(step=0)
        self._newest_version = generator.version
        self._lockstep = Lockstep(on=settings.lockstep)
        self._runner = EpisodeRunner(
            environment,
            generator,
            settings,
            chat=chat,
            lockstep=self._lockstep,
            newest_version=lambda: self._newest_version,
            oldest_version=self._oldest_useful_version,
            progress=self.note_progress,
            retried=self._note_retry,
            judged=self._note_environment,
        )
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._fatal: BaseException | None = None
        self._tally = Tally()
        self._full_since: float | None = None
        self._rejected_in_row = 0
        self._last_failure = "none"
        self._began = False
        self._restored = False

    async def take(self, step: int) -> tuple[list[Group], Tally]:
        """The groups that a step trains on, and what happened since the step before."""
        self._begin(step)
        groups = await self._when_whole(step, self._admission.take)
        self._note_queue()
        tally, self._tally = self._tally, Tally()
        return groups, tally

    async def choose(self, step: int) -> list[Group]:
        """The groups that `take` will give; the weights of step - 1 need not be there yet.

        Without staleness the groups only start with them, so it would wait for `take`.
        """
        self._begin(step, beforehand=True)
        return await self._when_whole(step, self._admission.choose)

    async def update(self, params: Params, version: int) -> None:
        """New weights for the engine. More groups start then; synchronous ones wait for `take`."""
        if self._fatal is not None:
            raise self._fatal
        if self._began and version <= self._admission.version:
            expected = f"above {self._admission.version}"
            raise InputError("Collector", "version", expected=expected, actual=version)
        self._newest_version = version
        await self._generator.update_weights(params, version)
        if self._began:
            self._admission.version = version
            if self._settings.max_staleness > 0:
                self._start_groups()

    async def snapshot(self) -> Snapshot:
        """What a resumed run needs."""
        state = self._identity() | self._admission.state()
        groups = [self._admission.ready[Place(*place)] for place in state["accepted"]]
        rollouts = [group.rollouts for group in groups]
        state["groups"] = [group.to_json() for group in groups]
        return Snapshot(state, concatenate_rollouts(rollouts, source=SOURCE) if rollouts else None)

    async def restore(self, state: Mapping[str, Any], accepted: Rollouts | None) -> None:
        """Goes on from a snapshot."""
        if self._began:
            raise InputError("Collector", "restore", expected="a call before the first batch", actual="later")
        for name, value in self._identity().items():
            if state[name] != value:
                hint = "a run keeps its tasks, groups and seed; choose another --out"
                expected = f"{state[name]}, as the run began"
                raise InputError("collector state", name, expected=expected, actual=value, hint=hint)
        groups = [] if accepted is None else groups_from_json(state["groups"], accepted)
        self._admission.restore(state, groups)
        self._restored = True

    async def shut_down(self) -> None:
        """Cancels all episodes and closes the engine."""
        self._fatal = CollectError("the collector is closed")
        self._changed.set()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._generator.close()

    def note_progress(self) -> None:
        """Something was completed."""
        self.last_progress = time.monotonic()

    def describe(self) -> str:
        """How things stand, in numbers."""
        now, tally = self._admission, self._tally
        return (
            f"{len(now.ready)} of {now.batch_groups} groups accepted, {len(now.running)} running, room for "
            f"{now.capacity} more; {tally.retried.total()} episodes retried, {tally.rejected.total()} "
            f"rejected; last failure: {self._last_failure}"
        )

    async def _when_whole(self, step: int, pick: Callable[..., list[Group] | None]) -> list[Group]:
        """What `pick` gives, as soon as it gives something."""
        self._start_groups()
        while True:
            if self._fatal is not None:
                raise self._fatal
            self._drop_stale(step)
            groups = pick(step, wait=self._settings.on_stale == "wait")
            if groups is not None:
                return groups
            self._changed.clear()
            await self._changed.wait()

    def _begin(self, step: int, *, beforehand: bool = False) -> None:
        if step < 1:
            raise InputError("Collector", "step", expected="at least 1", actual=step)
        if not self._began:
            if not self._restored:
                self._admission = self._fresh_admission(step=step - 1)
            self._admission.version = self._newest_version = self._generator.version
        if step != self._admission.step + 1:
            raise InputError("Collector", "step", expected=self._admission.step + 1, actual=step)
        if self._admission.version != step - 1 and not beforehand:
            raise InputError(
                "Collector",
                f"weights for step {step}",
                expected=f"version {step - 1}",
                actual=f"version {self._admission.version}",
                hint="publish the weights of every step before the next batch",
            )
        self._began = True

    def _start_groups(self) -> None:
        while self._fatal is None and self._admission.capacity > 0:
            place = self._admission.start()
            party = self._lockstep.party(self._settings.group_size)
            task = asyncio.get_running_loop().create_task(self._run_group(place, party))
            self._tasks[place] = task
            task.add_done_callback(functools.partial(self._ended, place, party))
        self._note_queue()

    def _note_queue(self) -> None:
        """Counts the time in which nothing runs since staleness allows no further group.

        Synchronous runs stand still whenever the trainer works: that says nothing.
        """
        now, since = time.monotonic(), self._full_since
        if since is not None:
            self._tally.queue_full_seconds += now - since
        full = self._settings.max_staleness > 0 and not self._tasks and self._admission.capacity <= 0
        self._full_since = now if full else None

    async def _run_group(self, place: Place, party: Party) -> None:
        task, order = self._order.task(place), self._order
        try:
            async with asyncio.TaskGroup() as episodes:
                running = [
                    episodes.create_task(self._runner.run(task, trial, order.episode_seed(place, trial)))
                    for trial in range(self._settings.group_size)
                ]
                for episode in running:
                    episode.add_done_callback(lambda episode: party.left())
        except* EpisodeFailure as failures:
            failure = failures.exceptions[0]
            assert isinstance(failure, EpisodeFailure)  # a flat group: every episode is one task
            self._reject(place, failure)
        else:
            self._finish(group_of_episodes(place, [episode.result() for episode in running]))

    def _finish(self, group: Group) -> None:
        self._rejected_in_row = 0
        if self._settings.skip_equal and np.ptp(group.returns) == 0:
            self._tally.resampled_groups += self._admission.set_equal(group)
        else:
            self._admission.accept(group)

    def _reject(self, place: Place, failure: EpisodeFailure) -> None:
        self._admission.reject(place)
        if failure.reason == "stale":
            self._tally.stale_groups += 1
            return
        self._tally.rejected[failure.reason] += 1
        self._tally.rejected_groups += 1
        self._rejected_in_row += 1
        self._last_failure = str(failure)
        _log.warning("task %d rejected: %s", self._order.task(place), failure)
        if self._rejected_in_row >= self._settings.max_rejected and self._fatal is None:
            self._fatal = CollectError(
                f"{self._rejected_in_row} groups rejected in a row, none accepted; the last one: {failure}"
            )

    def _ended(self, place: Place, party: Party, task: asyncio.Task[None]) -> None:
        """A group's task is over, in whatever way."""
        del self._tasks[place]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and self._fatal is None:
            self._fatal = first_cause(error)
        self._start_groups()
        party.over()
        self._changed.set()

    def _drop_stale(self, step: int) -> None:
        if self._settings.on_stale == "keep":
            return
        for place in self._admission.stale(step):
            if self._settings.on_stale == "fail":
                oldest = self._admission.ready[place].oldest_version
                raise CollectError(
                    f"group {place.number} of step {place.step}: a token of version {oldest} is more than "
                    f"max_staleness = {self._settings.max_staleness} behind version {step - 1}"
                )
            self._admission.drop(place)
            self._tally.stale_groups += 1
        self._start_groups()

    def _fresh_admission(self, *, step: int) -> Admission:
        return Admission(
            self._order.batch_groups,
            max_staleness=self._settings.max_staleness,
            max_resampled=self._settings.max_resampled,
            step=step,
        )

    def _identity(self) -> dict[str, Any]:
        """What must be the same when a run is taken up again."""
        return {
            "num_tasks": self._order.num_tasks,
            "batch_groups": self._order.batch_groups,
            "group_size": self._settings.group_size,
            "seed": self._order.seed,
        }

    def _oldest_useful_version(self) -> int:
        if self._settings.on_stale in ("keep", "fail"):
            return 0
        return self._admission.version - self._settings.max_staleness

    def _note_environment(self, seconds: float) -> None:
        self._tally.environment_seconds += seconds

    def _note_retry(self, failure: EpisodeFailure) -> None:
        self._tally.retried[failure.reason] += 1
        self._last_failure = str(failure)
