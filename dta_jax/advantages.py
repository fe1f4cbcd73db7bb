"""Rewards and advantages: numpy, float64, before anything is packed.

Everything here works on the whole batch, and says what belongs together by explicit ids: no result
depends on the order of rollouts, on how many a group still has, nor on how they are later chunked, batched or
sharded. Per-token quantities are per entry (a token with loss); tool results and prompts between them have no
entries and are stepped over.

    rewards    shaped_rewards, overlong_penalty, kl_rewards; rollout_rewards and entry_rewards put step and
               final rewards together, per rollout and per entry
    groups     group_normalized, informative (GRPO and its relatives: one advantage per rollout)
    critics    gae, discounted_returns, whitened (PPO: one advantage per entry)
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np

from dta_jax.errors import InputError
from dta_jax.losses import EXP_LIMIT, KL_KINDS, KLKind

Scope: TypeAlias = Literal["batch", "group", "none"]
SCOPES: Final = ("batch", "group", "none")


def shaped_rewards(
    rewards: np.ndarray, *, scale: float = 1.0, bias: float = 0.0, clip: float | None = None
) -> np.ndarray:
    """`clip(scale * (r + bias), -clip, clip)`, float64 of the same shape."""
    if clip is not None and not clip > 0:
        raise InputError("rewards", "clip", expected="None or a positive number", actual=clip)
    shaped = scale * (np.asarray(rewards, np.float64) + bias)
    return shaped if clip is None else np.clip(shaped, -clip, clip)


def overlong_penalty(
    lengths: np.ndarray, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> np.ndarray:
    """Soft punishment of long rollouts: `-factor * clip((n - (max - buffer)) / buffer, 0, 1)`.

    Args:
      lengths: int[R], generated tokens n of each rollout.
      max_tokens: length at which the whole penalty is due.
      buffer_tokens: the penalty grows linearly over so many tokens before it.
      factor: the whole penalty, in units of reward.

    Returns:
      float64[R], at most 0; to be added to rewards.

    Source: Yu et al. 2025, DAPO (arXiv 2503.14476), eq. 13.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise InputError(
            "rewards", "buffer_tokens", expected=f"1 .. max_tokens = {max_tokens}", actual=buffer_tokens
        )
    over = np.asarray(lengths, np.float64) - (max_tokens - buffer_tokens)
    return -factor * np.clip(over / buffer_tokens, 0, 1)


def kl_rewards(logp: np.ndarray, ref_logp: np.ndarray, *, coef: float, kind: KLKind = "k1") -> np.ndarray:
    """KL divergence from the reference as a per-entry reward: `-coef * k(logp - ref_logp)`.

    k1, k2 and k3 are those of `losses.KLPenalty`. In a reward each of them only weights log-probabilities, so
    k1, unbiased, is the usual choice. k3's exponential is capped at e^20.

    Args:
      logp: float[E], log-probabilities under the policy that sampled (or its recomputed ones).
      ref_logp: float[E], under the reference model.
      coef: weight of the penalty, at least 0.
      kind: the estimate.

    Returns:
      float64[E].

    Source: Ziegler et al. 2019 (arXiv 1909.08593); estimates: Schulman 2020, Approximating KL divergence.
    """
    if kind not in KL_KINDS:
        raise InputError("rewards", "kind", expected=f"one of {', '.join(KL_KINDS)}", actual=repr(kind))
    d = np.asarray(logp, np.float64) - np.asarray(ref_logp, np.float64)
    if kind == "k2":
        return -coef * d**2 / 2
    return -coef * (d if kind == "k1" else np.exp(np.minimum(-d, EXP_LIMIT)) - 1 + d)


def rollout_rewards(
    final_rewards: np.ndarray, step_rewards: np.ndarray, rollout_of_step: np.ndarray
) -> np.ndarray:
    """Each rollout's final reward plus its step rewards: `R_i + sum of step rewards of i`.

    Args:
      final_rewards: float[R].
      step_rewards: float[M], such as one per turn or per entry.
      rollout_of_step: int[M], 0 <= index < R.

    Returns:
      float64[R].
    """
    total = np.bincount(rollout_of_step, step_rewards, minlength=len(final_rewards))
    return np.asarray(final_rewards, np.float64) + total


def entry_rewards(
    final_rewards: np.ndarray,
    step_rewards: np.ndarray,
    *,
    sequence: np.ndarray,
    rollout_of_sequence: np.ndarray,
) -> np.ndarray:
    """Rewards where they are earned: a step's at its sequence's last entry, a final one at its rollout's.

    Args:
      final_rewards: float[R].
      step_rewards: float[N], one per sequence (a completion, that is, a turn).
      sequence: int[E], the sequence of each entry, entries of a rollout in the order of time.
      rollout_of_sequence: int[N], the rollout of each sequence.

    Returns:
      float64[E].

    Raises:
      InputError: a reward other than 0 has no entry to stand at.
    """
    rewards = np.zeros(len(sequence))
    for ids, amounts, what in (
        (np.asarray(sequence), step_rewards, "step_rewards"),
        (np.asarray(rollout_of_sequence)[sequence], final_rewards, "final_rewards"),
    ):
        amounts = np.asarray(amounts, np.float64)
        last = np.full(len(amounts), -1)
        last[ids] = np.arange(len(ids))
        lost = np.flatnonzero((last < 0) & (amounts != 0))
        if lost.size:
            raise InputError(
                "rewards",
                f"{what}[{lost[0]}]",
                expected="0, because it has no entries",
                actual=amounts[lost[0]],
            )
        rewards[last[last >= 0]] += amounts[last >= 0]
    return rewards


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
    al. 2025, Dr. GRPO (arXiv 2503.20783); leave-one-out: Ahmadian et al. 2024, RLOO (arXiv 2402.14740); group
    mean with batch std: Hu et al. 2025, REINFORCE++ (arXiv 2501.03262).
    """
    rewards, group = _grouped(rewards, group_ids)
    for name, scope in (("mean", mean), ("std", std)):
        if scope not in SCOPES:
            raise InputError("advantages", name, expected=f"one of {', '.join(SCOPES)}", actual=repr(scope))
    whole = np.zeros_like(group)
    centred = rewards
    if mean != "none":
        ids = group if mean == "group" else whole
        centred = rewards - _mean(rewards, ids)
        if leave_one_out:
            count = np.bincount(ids)[ids]
            centred *= count / np.maximum(count - 1, 1)
    if std == "none":
        return centred
    ids = group if std == "group" else whole
    count = np.bincount(ids)[ids]
    squares = np.bincount(ids, (rewards - _mean(rewards, ids)) ** 2)[ids]
    scale = np.sqrt(squares / (np.maximum(count - 1, 1) if unbiased else count)) + eps
    return centred / np.where(scale > 0, scale, 1)


def informative(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Whether a rollout's group has rewards that differ: bool[R]. Where not, its advantages are 0.

    DAPO's dynamic sampling keeps only such groups, and samples more in place of the others.

    Source: Yu et al. 2025, DAPO (arXiv 2503.14476), eq. 11.
    """
    rewards, group = _grouped(rewards, group_ids)
    first = np.unique(group, return_index=True)[1]
    return np.bincount(group, rewards != rewards[first][group])[group] > 0


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    trajectory: np.ndarray,
    turn: np.ndarray,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    turn_gamma: float | None = None,
    turn_lam: float | None = None,
    level: Literal["token", "turn"] = "token",
    bootstrap: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimates, and the returns that a critic should learn.

        delta_t = r_t + g_t V_{t+1} - V_t,    A_t = delta_t + g_t l_t A_{t+1},    R_t = A_t + V_t

    g_t, l_t are `gamma`, `lam` inside a turn and `turn_gamma`, `turn_lam` from a turn's last step to the next
    turn. At level "token" a step is an entry. At level "turn" it is a whole turn: its reward is the sum, its
    value that of its first entry, and all its entries share its advantage and its return.

    Args:
      rewards: float[E].
      values: float[E], the critic's value before each entry's token.
      trajectory: int[E], the rollout of each entry; its entries are in the order of time.
      turn: int[E], the turn of each entry; a turn's entries follow each other.
      gamma, lam: discount and decay, within 0 .. 1.
      turn_gamma, turn_lam: the same between turns; None for `gamma`, `lam`.
      level: what a step is.
      bootstrap: float[E], the value of what follows; read at a trajectory's last entry only, where it stands
        for V_{t+1} of a rollout that was cut off (as if another turn followed). None for 0: all ended.

    Returns:
      advantages float64[E], returns float64[E].

    Raises:
      InputError: arrays of other lengths, a discount outside 0 .. 1, a turn in pieces.

    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 16; turns as steps: Turn-PPO, 2025 (arXiv
    2512.17008).
    """
    discounts = {"gamma": gamma, "lam": lam, "turn_gamma": turn_gamma, "turn_lam": turn_lam}
    bootstrap = np.zeros(len(rewards)) if bootstrap is None else bootstrap
    _check_steps((rewards, values, trajectory, turn, bootstrap), discounts)
    turn_gamma = gamma if turn_gamma is None else turn_gamma
    turn_lam = lam if turn_lam is None else turn_lam
    order = np.argsort(trajectory, kind="stable")
    if not len(order):
        return np.zeros(0), np.zeros(0)
    reward, value, tail = (np.asarray(x, np.float64)[order] for x in (rewards, values, bootstrap))
    rollout = np.asarray(trajectory)[order]
    start = _turn_starts(rollout, np.asarray(turn)[order])
    step_of_entry = np.cumsum(start) - 1
    if level == "turn":
        ends = np.append(start[1:], True)
        reward, value = np.add.reduceat(reward, np.flatnonzero(start)), value[start]
        tail, rollout, start = tail[ends], rollout[start], np.ones(len(value), bool)
    new_turn = np.append(start[1:], True)
    end = np.append(rollout[1:] != rollout[:-1], True)
    g = np.where(new_turn, turn_gamma, gamma)
    following = np.where(end, tail, np.append(value[1:], 0))
    delta = reward + g * following - value
    advantage = _backward_sum(delta, np.where(end, 0, g * np.where(new_turn, turn_lam, lam)))
    returns = advantage + value
    if level == "turn":
        advantage, returns = advantage[step_of_entry], returns[step_of_entry]
    inverse = np.argsort(order)
    return advantage[inverse], returns[inverse]


def discounted_returns(
    rewards: np.ndarray,
    trajectory: np.ndarray,
    turn: np.ndarray,
    *,
    gamma: float = 1.0,
    turn_gamma: float | None = None,
) -> np.ndarray:
    """Reward to go: `G_t = r_t + g_t G_{t+1}`, float64[E]; arguments as for `gae`."""
    return gae(rewards, np.zeros(len(rewards)), trajectory, turn, gamma=gamma, turn_gamma=turn_gamma)[0]


def whitened(
    x: np.ndarray,
    mask: np.ndarray | None = None,
    *,
    shift_mean: bool = True,
    unbiased: bool = False,
    eps: float = 1e-8,
) -> np.ndarray:
    """`(x - m) / (s + eps)` with mean and standard deviation over the whole batch's entries.

    Args:
      x: float[E].
      mask: bool[E], entries that count; others get 0. None for all.
      shift_mean: False keeps the mean (adds m again).
      unbiased: the variance's divisor is n - 1 instead of n.
      eps: added to s.

    Returns:
      float64[E].
    """
    counted = np.ones(len(x), bool) if mask is None else np.asarray(mask, bool)
    chosen = np.asarray(x, np.float64)[counted]
    out = np.zeros(len(x))
    if len(chosen):
        one_group = np.zeros(len(chosen), np.int64)
        out[counted] = group_normalized(chosen, one_group, unbiased=unbiased, eps=eps)
        out[counted] += 0 if shift_mean else chosen.mean()
    return out


def _grouped(rewards: np.ndarray, group_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rewards as float64[R] and groups as 0 .. G-1."""
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 1 or np.shape(group_ids) != rewards.shape:
        raise InputError(
            "advantages",
            "rewards, group_ids",
            expected="two arrays of shape [R]",
            actual=f"{rewards.shape}, {np.shape(group_ids)}",
        )
    if not np.isfinite(rewards).all():
        index = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise InputError("advantages", f"rewards[{index}]", expected="a finite number", actual=rewards[index])
    return rewards, np.unique(group_ids, return_inverse=True)[1].reshape(rewards.shape)


def _mean(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Each element's mean over its id, exact where all of an id are equal."""
    first = x[np.unique(ids, return_index=True)[1]][ids]
    return first + (np.bincount(ids, x - first) / np.bincount(ids))[ids]


def _check_steps(arrays: tuple[np.ndarray, ...], discounts: dict[str, float | None]) -> None:
    shapes = [np.shape(a) for a in arrays]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise InputError("advantages", "arrays", expected="all of shape [E]", actual=shapes)
    for name, value in discounts.items():
        if value is not None and not 0 <= value <= 1:
            raise InputError("advantages", name, expected="a number within 0 .. 1", actual=value)


def _turn_starts(rollout: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """bool[E], whether an entry is its turn's first; entries are sorted by rollout."""
    start = np.ones(len(turn), bool)
    start[1:] = (rollout[1:] != rollout[:-1]) | (turn[1:] != turn[:-1])
    pairs = np.stack([rollout[start], turn[start]], 1)
    _, first, times = np.unique(pairs, axis=0, return_index=True, return_counts=True)
    if (times > 1).any():
        again = pairs[first[times > 1][0]]
        raise InputError(
            "advantages",
            f"turn {again[1]} of trajectory {again[0]}",
            expected="entries that follow each other",
            actual="other turns between them",
        )
    return start


def _backward_sum(x: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """`y_t = x_t + decay_t * y_{t+1}`."""
    backward, total = [], 0.0
    for own, keep in zip(reversed(x.tolist()), reversed(decay.tolist()), strict=True):
        total = own + keep * total
        backward.append(total)
    return np.array(backward[::-1], np.float64)
