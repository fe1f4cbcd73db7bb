"""Collects rollouts in the background while the trainer works, as far ahead as staleness allows.

    with Collector(environment, generator, settings, seed=0, chat=None, batch_groups=8) as collector:
        for step in range(1, steps + 1):
            batch = collector.batch(step)          # blocks until it is whole
            ...                                    # one update of the weights
            collector.publish(params, step)        # version = step

All episodes and the engine live on one event loop in one background thread; `admission` decides what may
start. With `max_staleness = 0` nothing runs while the trainer works, and a batch is a function of seed, step
and weights: its tasks, seeds and order do not depend on who finishes first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from dta_jax.chat import Chat
from dta_jax.collect.admission import Admission
from dta_jax.collect.episodes import CLOSE_SECONDS, EpisodeFailure, EpisodeRunner
from dta_jax.collect.loop_thread import LoopThread
from dta_jax.collect.order import Place, TaskOrder
from dta_jax.collect.records import SOURCE, Group, group_of_episodes
from dta_jax.collect.report import Tally, batch_metrics
from dta_jax.collect.settings import Collect
from dta_jax.envs.protocol import Environment
from dta_jax.errors import InputError
from dta_jax.generation.protocol import Generator
from dta_jax.model import Params
from dta_jax.rollouts import Rollouts, concatenate_rollouts

_SHUTDOWN_SECONDS: Final = 2 * CLOSE_SECONDS
_log = logging.getLogger(__name__)


class CollectError(RuntimeError):
    """Collecting rollouts failed: nothing moves, everything is rejected, or a group is too stale."""


@dataclass(frozen=True, eq=False)
class Collected:
    """A batch of rollouts.

    Attributes:
      rollouts: R rows with all optional arrays, ordered by group, then by trial.
      group: int32[R], the group of each row, 0 ... batch_groups - 1. A batch that reaches into the next epoch
        may have one task in two groups.
      metrics: numbers for the log.
    """

    rollouts: Rollouts
    group: np.ndarray
    metrics: dict[str, float]


class Collector:
    """Runs episodes and hands out batches of whole groups. A context manager.

    Args:
      environment: whose tasks.
      generator: who answers; it belongs to the collector from now on, which closes it.
      settings: how rollouts are collected.
      seed: of the order of tasks and of every episode, at least 0.
      chat: for environments that speak messages.
      batch_groups: groups per batch.
    """

    def __init__(
        self,
        environment: Environment,
        generator: Generator,
        settings: Collect,
        *,
        seed: int,
        chat: Chat | None,
        batch_groups: int,
    ):
        for name, value, least in (
            ("seed", seed, 0),
            ("batch_groups", batch_groups, 1),
            ("environment.num_tasks", environment.num_tasks, 1),
        ):
            if value < least:
                raise InputError("Collector", name, expected=f"at least {least}", actual=value)
        self._environment, self._generator, self._settings, self._chat = (
            environment,
            generator,
            settings,
            chat,
        )
        self._order = TaskOrder(environment.num_tasks, batch_groups, seed)
        self._admission = self._fresh_admission(step=0)
        self._newest_version = generator.version
        self._runner = EpisodeRunner(
            environment,
            generator,
            settings,
            chat=chat,
            newest_version=lambda: self._newest_version,
            progress=self._note_progress,
            retried=self._note_retry,
        )
        self._thread = LoopThread("collector")
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._fatal: BaseException | None = None
        self._tally = Tally()
        self._rejected_in_row = 0
        self._last_failure = "none"
        self._last_progress = time.monotonic()
        self._began = False
        self._closed = False

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def batch(self, step: int) -> Collected:
        """The rollouts that a step trains on. Blocks until they are there.

        Args:
          step: from 1, one after the other; the first one may be any. Weights of version step - 1 must have
            been published (or be the engine's first).

        Raises:
          InputError: it is not this step's turn; or bad input somewhere in environment, chat or engine.
          CollectError: nothing was completed for `stuck_after` seconds; or too many groups were rejected in a
            row; or a group is too stale, and `on_stale` is "fail".
        """
        began = time.monotonic()
        self._last_progress = began
        groups, tally = self._thread.run(self._take(step), lambda: self._stop_if_stuck(f"batch {step}"))
        rollouts = concatenate_rollouts([group.rollouts for group in groups], source=SOURCE)
        rows = [group.rollouts.num_rollouts for group in groups]
        metrics = batch_metrics(groups, rollouts, tally, step=step, waited=time.monotonic() - began)
        return Collected(rollouts, np.repeat(np.arange(len(rows), dtype=np.int32), rows), metrics)

    def publish(self, params: Params, version: int) -> None:
        """Hands new weights to the engine, and returns when it draws with them.

        Args:
          params: see `Generator.update_weights`.
          version: the step that made them.

        Raises:
          InputError: the version is not newer than the one before.
          CollectError: the engine does not take them, see `batch`.
        """
        if version <= self._admission.version and self._began:
            raise InputError(
                "Collector", "version", expected=f"above {self._admission.version}", actual=version
            )
        self._last_progress = time.monotonic()
        self._thread.run(self._update(params, version), lambda: self._stop_if_stuck(f"weights {version}"))

    def close(self) -> None:
        """Cancels all episodes, closes the engine and ends the thread. May be called again."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _SHUTDOWN_SECONDS

        def give_up() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError

        try:
            self._thread.run(self._shut_down(), give_up)
        except TimeoutError:
            _log.warning("episodes or engine did not end in %g s; they are abandoned", _SHUTDOWN_SECONDS)
        if not self._thread.close(_SHUTDOWN_SECONDS):
            _log.warning("the collector's event loop is blocked; its thread is abandoned")

    # On the event loop.

    async def _take(self, step: int) -> tuple[list[Group], Tally]:
        self._begin(step)
        self._start_groups()
        while True:
            if self._fatal is not None:
                raise self._fatal
            self._drop_stale(step)
            groups = self._admission.take(step)
            if groups is not None:
                tally, self._tally = self._tally, Tally()
                return groups, tally
            self._changed.clear()
            await self._changed.wait()

    def _begin(self, step: int) -> None:
        if not self._began:
            if step < 1:
                raise InputError("Collector", "step", expected="at least 1", actual=step)
            if step != self._admission.step + 1:
                self._admission = self._fresh_admission(step=step - 1)
            self._admission.version = self._newest_version = self._generator.version
        if step != self._admission.step + 1:
            raise InputError("Collector", "step", expected=self._admission.step + 1, actual=step)
        if self._admission.version != step - 1:
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
            task = asyncio.get_running_loop().create_task(self._run_group(place))
            self._tasks[place] = task
            task.add_done_callback(lambda task, place=place: self._ended(place, task))  # type: ignore[misc]

    async def _run_group(self, place: Place) -> None:
        task = self._order.task(place)
        try:
            async with asyncio.TaskGroup() as episodes:
                running = [
                    episodes.create_task(
                        self._runner.run(task, trial, self._order.episode_seed(place, trial))
                    )
                    for trial in range(self._settings.group_size)
                ]
        except* EpisodeFailure as failures:
            self._reject(place, failures.exceptions[0])
        else:
            self._finish(group_of_episodes(place, [episode.result() for episode in running]))

    def _finish(self, group: Group) -> None:
        self._rejected_in_row = 0
        if self._settings.skip_equal and np.ptp(group.returns) == 0:
            self._tally.resampled_groups += self._admission.set_equal(group)
        else:
            self._admission.accept(group)

    def _reject(self, place: Place, failure: BaseException) -> None:
        assert isinstance(failure, EpisodeFailure)
        self._admission.reject(place)
        self._tally.rejected[failure.reason] += 1
        self._tally.rejected_groups += 1
        self._rejected_in_row += 1
        self._last_failure = str(failure)
        _log.warning("task %d rejected: %s", self._order.task(place), failure)
        if self._rejected_in_row >= self._settings.max_rejected:
            self._fatal = CollectError(
                f"{self._rejected_in_row} groups rejected in a row, none accepted; the last one: {failure}"
            )

    def _ended(self, place: Place, task: asyncio.Task[None]) -> None:
        """A group's task is over, in whatever way."""
        del self._tasks[place]
        if task.cancelled():
            return
        error = task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None and self._fatal is None:
            self._fatal = error
        self._start_groups()
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

    async def _update(self, params: Params, version: int) -> None:
        if self._fatal is not None:
            raise self._fatal
        self._newest_version = version
        await self._generator.update_weights(params, version)
        if self._began:
            self._admission.version = version
            self._start_groups()

    async def _shut_down(self) -> None:
        self._fatal = CollectError("the collector is closed")
        self._changed.set()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._generator.close()

    # Anywhere.

    def _fresh_admission(self, *, step: int) -> Admission:
        return Admission(
            self._order.batch_groups,
            max_staleness=self._settings.max_staleness,
            max_resampled=self._settings.max_resampled,
            step=step,
        )

    def _note_progress(self) -> None:
        self._last_progress = time.monotonic()

    def _note_retry(self, failure: EpisodeFailure) -> None:
        self._tally.retried[failure.reason] += 1
        self._last_failure = str(failure)

    def _stop_if_stuck(self, awaited: str) -> None:
        idle = time.monotonic() - self._last_progress
        if idle <= self._settings.stuck_after:
            return
        now, tally = self._admission, self._tally
        raise CollectError(
            f"{awaited}: no model call and no step of an environment was completed for {idle:.1f} s "
            f"(stuck_after = {self._settings.stuck_after:g}); {len(now.ready)} of {now.batch_groups} groups "
            f"accepted, {len(now.running)} running, room for {now.capacity} more; {tally.retried.total()} "
            f"episodes retried, {tally.rejected.total()} rejected; last failure: {self._last_failure}"
        )
