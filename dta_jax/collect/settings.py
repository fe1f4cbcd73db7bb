"""How rollouts are collected: groups, staleness, limits of episodes, and what happens when they fail."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from dta_jax.errors import InputError
from dta_jax.generation.protocol import Sampling

OnStale: TypeAlias = Literal["drop", "wait", "keep", "fail"]
ON_STALE: Final = ("drop", "wait", "keep", "fail")


@dataclass(frozen=True)
class Collect:
    """How a run collects its rollouts.

    Attributes:
      group_size: episodes per task; they are trained on together or not at all.
      max_staleness: how many versions older than the trainer's weights a token may be. 0 is the synchronous
        mode: the episodes of a step start when its weights are there, and the batch is deterministic.
      on_stale: what is done about groups that have a token beyond `max_staleness` when they are used.
        "drop": they are dropped and replaced; long episodes are trained on less than short ones by that.
        "wait": it does not come to that, since every batch waits for the groups that were meant for it.
        "keep": they are used; the loss has to correct for it. "fail": the run ends.
      sampling: how tokens are drawn.
      max_turns: the most model calls of one episode.
      max_context: the most tokens of a prompt and its completion; None if only the engine limits them. Set it
        to no more than the engine's longest context, which otherwise refuses a prompt that leaves no room.
      unfinished_reward: final reward of an episode that ran into `max_turns` or `max_context`, where no
        environment judged it; None: such an episode is rejected.
      episode_timeout: seconds for one try at an episode.
      retries: how often an episode that failed is tried again, from the start and with the same seed.
      retry_delay: seconds before the first retry; doubled for every further one.
      max_rejected: so many groups rejected in a row, without one accepted, end the run.
      stuck_after: seconds without a model call or a step of an environment completed that end the run.
      max_concurrent: the most episodes that run at a time.
      lockstep: calls are held until every episode waits for the engine, and start together. A synchronous
        run on the local sampler then repeats itself bit for bit, however long the environment's steps take;
        without it, to rounding. Every turn waits for the slowest episode.
      skip_equal: groups whose episodes all earned the same are replaced by other tasks (DAPO's dynamic
        sampling): they have no gradient under group-relative advantages.
      max_resampled: the most groups replaced in that way per batch; after that, equal ones fill it.
    """

    group_size: int = 8
    max_staleness: int = 0
    on_stale: OnStale = "drop"
    sampling: Sampling = field(default_factory=Sampling)
    max_turns: int = 32
    max_context: int | None = None
    unfinished_reward: float | None = 0.0
    episode_timeout: float = 600.0
    retries: int = 2
    retry_delay: float = 1.0
    max_rejected: int = 64
    stuck_after: float = 900.0
    max_concurrent: int = 256
    lockstep: bool = False
    skip_equal: bool = False
    max_resampled: int = 64

    def __post_init__(self) -> None:
        for name in ("group_size", "max_turns", "max_rejected", "max_concurrent"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_staleness", "retries", "max_resampled"):
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in ("episode_timeout", "stuck_after"):
            self._check(name, 0 < getattr(self, name) < math.inf, "seconds, above 0")
        self._check("retry_delay", 0 <= self.retry_delay < math.inf, "seconds, at least 0")
        self._check("on_stale", self.on_stale in ON_STALE, f"one of {', '.join(ON_STALE)}")
        self._check("max_context", self.max_context is None or self.max_context >= 2, "None or at least 2")
        finite = self.unfinished_reward is None or math.isfinite(self.unfinished_reward)
        self._check("unfinished_reward", finite, "None or a finite number")
        repeats = not self.lockstep or self.max_staleness == 0
        self._check("lockstep", repeats, "False with max_staleness above 0, where weights come at any time")
        differs = not self.skip_equal or self.group_size > 1
        self._check("skip_equal", differs, "False for groups of 1, whose rewards never differ")

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise InputError("Collect", name, expected=expected, actual=repr(getattr(self, name)))
