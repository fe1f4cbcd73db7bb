"""How good a policy is: some tasks, each tried k times, nothing trained on.

With c successes in n trials of a task, unbiased estimates for k trials, means over tasks:

    pass@k = 1 - C(n-c, k) / C(n, k)     at least one of k succeeds
    pass^k =     C(c, k)   / C(n, k)     all k succeed

Source: pass@k: Chen et al. 2021 (arXiv 2107.03374), section 2.1; pass^k: Yao et al. 2024, tau-bench (arXiv
2406.12045), section 5.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from dta_jax.chat import Chat
from dta_jax.collect.episodes import EpisodeFailure, EpisodeRunner, first_cause
from dta_jax.collect.lockstep import Lockstep
from dta_jax.collect.order import derived_seed
from dta_jax.collect.records import EpisodeRecord, rollouts_from_episodes
from dta_jax.collect.report import episode_metrics
from dta_jax.collect.settings import Collect
from dta_jax.envs.protocol import Environment
from dta_jax.errors import InputError
from dta_jax.generation.protocol import Generator, Sampling

_ROUNDING: Final = 1e-6  # rewards of single completions may add up to a little less than they should
_EVALUATION: Final = 1_000_003  # keeps its seeds apart from those of training


@dataclass(frozen=True)
class Evaluate:
    """What is evaluated.

    Attributes:
      tasks: the first so many tasks; None for all.
      trials: tries per task.
      sampling: how tokens are drawn.
      success: an episode that earned at least this, final reward and all, succeeded.
    """

    tasks: int | None = None
    trials: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    success: float = 1.0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("tasks", self.tasks is None or self.tasks >= 1, "None or at least 1"),
            ("trials", self.trials >= 1, "at least 1"),
            ("success", math.isfinite(self.success), "a finite number"),
        ):
            if not good:
                raise InputError("Evaluate", name, expected=expected, actual=repr(getattr(self, name)))


async def evaluate_episodes(
    environment: Environment,
    generator: Generator,
    how: Evaluate,
    limits: Collect,
    *,
    seed: int,
    chat: Chat | None,
    progress: Callable[[], None],
) -> dict[str, Any]:
    """Runs all trials of all tasks.

    Args:
      environment: whose tasks.
      generator: who answers.
      how: tasks, trials, sampling.
      limits: turns, context, timeouts, retries and concurrency, as in training.
      seed: of the episodes, at least 0; training with the same seed has other ones.
      chat: for environments that speak messages.
      progress: called after every model call and every step of an environment that was completed.

    Returns:
      `episodes`, `episodes_rejected` and `rejected_REASON` (they failed for good, and are in no mean), the
      numbers of `episode_metrics`, `pass@k` and `pass^k` for k = 1 ... trials (over the tasks with at least k
      trials that were not rejected), and `per_task`: a list of {task, trials, successes, reward_mean}.

    Raises:
      InputError: the environment has fewer tasks; or bad input somewhere in environment, chat or engine.
    """
    tasks = environment.num_tasks if how.tasks is None else how.tasks
    if tasks > environment.num_tasks:
        raise InputError("Evaluate", "tasks", expected=f"at most {environment.num_tasks}", actual=tasks)
    lockstep = Lockstep(on=limits.lockstep)
    runner = EpisodeRunner(
        environment,
        generator,
        dataclasses.replace(limits, sampling=how.sampling),
        chat=chat,
        lockstep=lockstep,
        newest_version=lambda: generator.version,
        oldest_version=lambda: 0,
        progress=progress,
        retried=lambda failure: None,
    )

    async def one(task: int, trial: int) -> EpisodeRecord | EpisodeFailure:
        try:
            return await runner.run(task, trial, derived_seed(seed, _EVALUATION, task, trial))
        except EpisodeFailure as failure:
            return failure

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(t, k)) for t in range(tasks) for k in range(how.trials)]
            party = lockstep.party(len(running))
            for episode in running:
                episode.add_done_callback(lambda episode: party.left())
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from None
    results = [task.result() for task in running]
    records = [result for result in results if isinstance(result, EpisodeRecord)]
    rejected = Counter(result.reason for result in results if isinstance(result, EpisodeFailure))
    row: dict[str, Any] = {"episodes": len(records), "episodes_rejected": rejected.total()}
    row |= {f"rejected_{reason}": count for reason, count in sorted(rejected.items())}
    if records:
        row |= episode_metrics(rollouts_from_episodes(records), [record.ending for record in records])
    per_task = [_of_task(task, records, how.success) for task in range(tasks)]
    return row | pass_rates([(t["trials"], t["successes"]) for t in per_task]) | {"per_task": per_task}


def pass_rates(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """pass@k and pass^k for every k that some task has trials for.

    Args:
      counts: (trials n, successes c) of each task.
    """
    row = {}
    for k in range(1, max((n for n, _ in counts), default=0) + 1):
        enough = [(n, c) for n, c in counts if n >= k]
        row[f"pass@{k}"] = float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for n, c in enough]))
        row[f"pass^{k}"] = float(np.mean([math.comb(c, k) / math.comb(n, k) for n, c in enough]))
    return row


def _of_task(task: int, records: Sequence[EpisodeRecord], success: float) -> dict[str, Any]:
    rewards = [record.earned for record in records if record.task == task]
    return {
        "task": task,
        "trials": len(rewards),
        "successes": sum(reward >= success - _ROUNDING for reward in rewards),
        "reward_mean": float(np.mean(rewards)) if rewards else None,
    }
