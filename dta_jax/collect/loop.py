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

import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from dta_jax.chat import Chat
from dta_jax.collect.episodes import CLOSE_SECONDS
from dta_jax.collect.evaluation import Evaluate, evaluate_episodes
from dta_jax.collect.loop_thread import LoopThread
from dta_jax.collect.order import TaskOrder
from dta_jax.collect.records import SOURCE, Group
from dta_jax.collect.report import batch_metrics
from dta_jax.collect.settings import Collect
from dta_jax.collect.stream import CollectError, GroupStream, Snapshot
from dta_jax.envs.protocol import Environment
from dta_jax.errors import InputError
from dta_jax.generation.protocol import Generator
from dta_jax.model import Params
from dta_jax.rollouts import Rollouts, concatenate_rollouts

T = TypeVar("T")

_SHUTDOWN_SECONDS: Final = 2 * CLOSE_SECONDS
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Collected:
    """A batch of rollouts.

    Attributes:
      rollouts: R rows with all optional arrays, ordered by group, then by trial.
      group: int32[R], the group of each row, 0 ... batch_groups - 1. A batch that reaches into the next epoch
        may have one task in two groups.
      metrics: numbers for the log, see `dta_jax.collect.report`.
    """

    rollouts: Rollouts
    group: np.ndarray
    metrics: dict[str, float]


class Collector:
    """Runs episodes and hands out batches of whole groups. A context manager; not for several threads.

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
        order = TaskOrder(environment.num_tasks, batch_groups, seed)
        self._environment, self._generator, self._settings, self._chat = (
            environment,
            generator,
            settings,
            chat,
        )
        self._stream = GroupStream(environment, generator, settings, order, chat)
        self._thread = LoopThread("collector")
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
        groups, tally = self._wait(f"batch {step}", self._stream.take(step))
        rollouts, group = _joined(groups)
        metrics = batch_metrics(groups, rollouts, tally, step=step, waited=time.monotonic() - began)
        return Collected(rollouts, group, metrics)

    def ahead(self, step: int) -> tuple[Rollouts, np.ndarray]:
        """The rollouts and groups that `batch` will give for the next step, to be worked on beforehand.

        Unlike all else it may be called in another thread, while the trainer still works on the step before;
        with `max_staleness` of at least 1. The groups still count as accepted and not trained on.

        Raises:
          InputError, CollectError: see `batch`.
        """
        return _joined(self._wait(f"batch {step}", self._stream.choose(step)))

    def publish(self, params: Params, version: int) -> None:
        """Hands new weights to the engine, and returns when it draws with them.

        Args:
          params: see `Generator.update_weights`.
          version: the step that made them.

        Raises:
          InputError: the version is not newer than the one before.
          CollectError: the engine takes longer than `stuck_after`.
        """
        self._wait(f"weights {version}", self._stream.update(params, version))

    def evaluate(self, how: Evaluate, *, seed: int, environment: Environment | None = None) -> dict[str, Any]:
        """Runs episodes that are not trained on, with the engine's weights.

        Neither tasks nor seeds of the training change by that. Episodes that run ahead go on meanwhile.

        Args:
          how: which tasks, how often, how tokens are drawn.
          seed: of its episodes.
          environment: whose tasks; None for those that are trained on.

        Returns:
          See `dta_jax.collect.evaluation.evaluate_episodes`.
        """
        return self._wait(
            "evaluation",
            evaluate_episodes(
                environment or self._environment,
                self._generator,
                how,
                self._settings,
                seed=seed,
                chat=self._chat,
                progress=self._stream.note_progress,
            ),
        )

    def state(self) -> Snapshot:
        """What a resumed run needs, so that no accepted rollout is lost and none is trained on twice.

        Take it between `publish` and the next `batch`. A batch that was handed out counts as trained on.
        Episodes that run are started again by the resumed run, with the same tasks and seeds.
        """
        return self._wait("state", self._stream.snapshot())

    def restore(self, state: Mapping[str, Any], accepted: Rollouts | None) -> None:
        """Goes on from a snapshot. Call it before the first batch, and `publish` that step's weights.

        Args:
          state: of the snapshot.
          accepted: of the snapshot; with None, those groups are made again.

        Raises:
          InputError: the state is of a run with other tasks, groups or seeds; or the rollouts are not its.
        """
        self._wait("restore", self._stream.restore(state, accepted))

    def close(self) -> None:
        """Cancels all episodes, closes the engine and ends the thread. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            self._thread.run(self._stream.shut_down(), _deadline(_SHUTDOWN_SECONDS))
        except TimeoutError:
            _log.warning("episodes or engine did not end in %g s; they are abandoned", _SHUTDOWN_SECONDS)
        if not self._thread.close(_SHUTDOWN_SECONDS):
            _log.warning("the collector's event loop is blocked; its thread is abandoned")

    def _wait(self, awaited: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs something on the event loop; gives up when nothing moves."""
        self._stream.note_progress()

        def stop_if_stuck() -> None:
            idle = time.monotonic() - self._stream.last_progress
            if idle > self._settings.stuck_after:
                raise CollectError(
                    f"{awaited}: no model call and no step of an environment was completed for {idle:.1f} s "
                    f"(stuck_after = {self._settings.stuck_after:g}); {self._stream.describe()}"
                )

        return self._thread.run(coroutine, stop_if_stuck)


def _joined(groups: Sequence[Group]) -> tuple[Rollouts, np.ndarray]:
    """The rows of groups, and the number of each row's group."""
    rollouts = concatenate_rollouts([group.rollouts for group in groups], source=SOURCE)
    rows = [group.rollouts.num_rollouts for group in groups]
    return rollouts, np.repeat(np.arange(len(rows), dtype=np.int32), rows)


def _deadline(seconds: float) -> Callable[[], None]:
    """Raises TimeoutError when it is called later than that."""
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end:
            raise TimeoutError

    return check
