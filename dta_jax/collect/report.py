"""What is told of a batch of rollouts: numbers for `metrics.jsonl`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dta_jax.collect.records import Ending, Group
from dta_jax.episode_rows import episode_returns, episodes_of
from dta_jax.rollouts import Rollouts


@dataclass
class Tally:
    """What happened since the last batch, besides what is in the batch.

    Attributes:
      retried: episodes that failed and were tried again, by reason.
      rejected: episodes that failed for good, by reason; each took its group with it.
      rejected_groups, stale_groups, resampled_groups: groups that were lost, and why.
      queue_full_seconds: nothing ran for so long, as staleness allowed no further group.
      environment_seconds: what the environment took for its steps and rewards, summed over episodes.
    """

    retried: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    rejected_groups: int = 0
    stale_groups: int = 0
    resampled_groups: int = 0
    queue_full_seconds: float = 0.0
    environment_seconds: float = 0.0


def batch_metrics(
    groups: Sequence[Group], rollouts: Rollouts, tally: Tally, *, step: int, waited: float
) -> dict[str, float]:
    """The numbers of a batch.

    Args:
      groups: the batch's.
      rollouts: all their rows.
      tally: what else happened.
      step: the step that trains on the batch, from 1; staleness is counted from version step - 1.
      waited: seconds that the trainer waited for the batch.
    """
    endings = [ending for group in groups for ending in group.endings]
    equal = sum(np.ptp(group.returns) == 0 for group in groups)
    row: dict[str, float] = {
        "episodes": len(endings),
        "episodes_retried": sum(tally.retried.values()),
        "episodes_rejected": sum(tally.rejected.values()),
        "groups_rejected": tally.rejected_groups,
        "groups_stale_dropped": tally.stale_groups,
        "groups_resampled": tally.resampled_groups,
        "groups_equal": int(equal),
        "wait_seconds": waited,
        "queue_full_seconds": tally.queue_full_seconds,
        "environment_seconds": tally.environment_seconds,
    }
    row |= {f"retried_{reason}": count for reason, count in sorted(tally.retried.items())}
    row |= {f"rejected_{reason}": count for reason, count in sorted(tally.rejected.items())}
    return row | episode_metrics(rollouts, endings) | staleness_metrics(rollouts, step)


def episode_metrics(rollouts: Rollouts, endings: Sequence[Ending]) -> dict[str, float]:
    """Rewards, turns, lengths and the environment's own numbers, over episodes.

    An episode's reward is the final one plus all that its completions earned.

    Args:
      rollouts: rows with all optional arrays of at least one episode.
      endings: one per episode.
    """
    rewards, spans = episode_returns(rollouts), rollouts.completion_spans
    episode = episodes_of(rollouts)[1]
    turns = np.bincount(episode[spans[:, 0]], minlength=len(rewards))
    row = {
        "reward_mean": float(rewards.mean()),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "turns_mean": float(turns.mean()),
        "turns_max": int(turns.max()),
        "completion_tokens": int((spans[:, 2] - spans[:, 1]).sum()),
    }
    unfinished = Counter(ending.stop_reason for ending in endings if ending.unfinished)
    row |= {f"unfinished_{limit}": count for limit, count in sorted(unfinished.items())}
    return row | info_means(endings)


def info_means(endings: Iterable[Ending]) -> dict[str, float]:
    """Means of the environment's numbers, each over the episodes that have it: `info_NAME`."""
    values: dict[str, list[float]] = {}
    for ending in endings:
        for name, value in ending.info.items():
            values.setdefault(name, []).append(value)
    return {f"info_{name}": float(np.mean(found)) for name, found in sorted(values.items())}


def staleness_metrics(rollouts: Rollouts, step: int) -> dict[str, float]:
    """How many versions behind the trainer's weights the tokens were drawn: mean, maximum, and a histogram.

    `staleness_N` is the number of tokens that version step - 1 - N drew.
    """
    staleness = step - 1 - rollouts.require("versions")[rollouts.chosen()].astype(np.int64)
    if not staleness.size:
        return {"staleness_mean": 0.0, "staleness_max": 0}
    row: dict[str, float] = {"staleness_mean": float(staleness.mean()), "staleness_max": int(staleness.max())}
    found, counts = np.unique(staleness, return_counts=True)
    return row | {f"staleness_{n}": c for n, c in zip(found.tolist(), counts.tolist(), strict=True)}
