"""Rewards and advantages: numpy, float64, before anything is packed.

Everything here works on whole rollouts (or turns) of the whole batch, and groups are named by explicit
ids: no result depends on the order of rollouts, nor on how they are later chunked, batched or sharded.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np

from dta_jax.errors import InputError

Scope: TypeAlias = Literal["batch", "group", "none"]
SCOPES: Final = ("batch", "group", "none")


def group_normalized(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    *,
    mean: Scope = "group",
    std: Scope = "group",
    leave_one_out: bool = False,
    unbiased: bool = False,
    eps: float = 1e-6,
) -> np.ndarray:
    """Rewards less a mean, over a standard deviation: `(r - m) / (s + eps)`.

    Args:
      rewards: float[R], one per rollout.
      group_ids: int[R], the group (prompt, task) of each rollout, any numbers in any order.
      mean: the rollouts whose mean is m; "none" for m = 0.
      std: the rollouts whose standard deviation is s; "none" for no division.
      leave_one_out: m leaves the rollout itself out; alone in its scope, its m is its own reward, so
        that it gets 0.
      unbiased: the variance's divisor is n - 1 instead of n.
      eps: added to s, in units of reward.

    Returns:
      float64[R]. Where all rewards of the mean's scope are equal, exactly 0.

    Raises:
      InputError: lengths that differ, an unknown scope, a reward that is not finite.

    Source: group mean and std: Shao et al. 2024, GRPO (arXiv 2402.03300), section 4.1.2; without std: Liu et
    al. 2025, Dr. GRPO (arXiv 2503.20783), section 3.2; leave-one-out: Ahmadian et al. 2024, RLOO (arXiv
    2402.14740), eq. 9; group mean with batch std: Hu et al. 2025, REINFORCE++ (arXiv 2501.03262).
    """
    rewards, group = _grouped(rewards, group_ids)
    for name, scope in (("mean", mean), ("std", std)):
        if scope not in SCOPES:
            raise InputError("advantages", name, expected=f"one of {', '.join(SCOPES)}", actual=repr(scope))
    centred = rewards.copy()
    if mean != "none":
        ids = group if mean == "group" else np.zeros_like(group)
        count = np.bincount(ids)[ids]
        centred = rewards - _mean(rewards, ids)
        if leave_one_out:
            centred *= count / np.maximum(count - 1, 1)
    if std == "none":
        return centred
    ids = group if std == "group" else np.zeros_like(group)
    count = np.bincount(ids)[ids]
    squares = np.bincount(ids, (rewards - _mean(rewards, ids)) ** 2)[ids]
    deviation = np.sqrt(squares / (np.maximum(count - 1, 1) if unbiased else count))
    return centred / np.where(deviation + eps > 0, deviation + eps, 1)


def _grouped(rewards: np.ndarray, group_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rewards as float64[R] and groups as 0 .. G-1."""
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 1 or np.shape(group_ids) != rewards.shape:
        raise InputError(
            "advantages", "rewards, group_ids", expected="two arrays of shape [R]",
            actual=f"{rewards.shape}, {np.shape(group_ids)}",
        )  # fmt: skip
    if not np.isfinite(rewards).all():
        index = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise InputError("advantages", f"rewards[{index}]", expected="a finite number", actual=rewards[index])
    return rewards, np.unique(group_ids, return_inverse=True)[1].reshape(rewards.shape)


def _mean(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Each element's mean over its id, exact where all of an id are equal."""
    first = x[np.unique(ids, return_index=True)[1]][ids]
    return first + (np.bincount(ids, x - first) / np.bincount(ids))[ids]
