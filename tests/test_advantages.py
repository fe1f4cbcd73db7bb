"""Rewards and advantages against loops, with groups that are partial, shuffled and named by any number."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_jax.advantages import (
    SCOPES,
    discounted_returns,
    entry_rewards,
    gae,
    group_normalized,
    informative,
    kl_rewards,
    overlong_penalty,
    rollout_rewards,
    shaped_rewards,
    whitened,
)
from dta_jax.errors import InputError

REWARDS = np.array([1.0, 0.0, 1.0, 0.5, 0.5, 3.0, 0.0, 2.0])
GROUPS = np.array([40, -1, 40, 7, 7, 40, 99, -1])  # sizes 3, 2, 2 and 1


def scoped(i: int, scope: str) -> list[int]:
    return [j for j in range(len(REWARDS)) if scope == "batch" or GROUPS[j] == GROUPS[i]]


def naive_advantage(i: int, mean: str, std: str, leave_one_out: bool, unbiased: bool, eps: float) -> float:
    centre, scale = 0.0, 1.0
    if mean != "none":
        others = [j for j in scoped(i, mean) if not (leave_one_out and j == i)] or [i]
        centre = sum(REWARDS[j] for j in others) / len(others)
    if std != "none":
        members = [REWARDS[j] for j in scoped(i, std)]
        m = sum(members) / len(members)
        divisor = max(len(members) - 1, 1) if unbiased else len(members)
        scale = math.sqrt(sum((r - m) ** 2 for r in members) / divisor) + eps
    return (REWARDS[i] - centre) / scale


@pytest.mark.parametrize("mean", SCOPES)
@pytest.mark.parametrize("std", SCOPES)
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("unbiased", [False, True])
def test_every_normalisation_is_the_loop(mean: str, std: str, leave_one_out: bool, unbiased: bool) -> None:
    settings: dict[str, Any] = {
        "mean": mean,
        "std": std,
        "leave_one_out": leave_one_out,
        "unbiased": unbiased,
    }
    got = group_normalized(REWARDS, GROUPS, **settings, eps=0.1)
    expected = [naive_advantage(i, **settings, eps=0.1) for i in range(8)]
    np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-15)


@given(st.permutations(range(8)))
def test_advantages_follow_their_rollouts(order: list[int]) -> None:
    """Groups that are interleaved and of unequal size: no stride gives these numbers."""
    moved = group_normalized(REWARDS[order], GROUPS[order])
    np.testing.assert_allclose(moved, group_normalized(REWARDS, GROUPS)[order], rtol=1e-13, atol=1e-15)


def test_a_lost_rollout_changes_its_own_group_only() -> None:
    full = group_normalized(REWARDS, GROUPS)
    rest = group_normalized(REWARDS[1:], GROUPS[1:])
    others = GROUPS[1:] != GROUPS[0]
    np.testing.assert_array_equal(rest[others], full[1:][others])
    np.testing.assert_allclose(rest[~others], [-1, 1], rtol=1e-5)


def test_equal_rewards_are_exactly_no_signal() -> None:
    """The mean of three 0.1 is rounded; its error, divided by a tiny deviation, would be a signal."""
    rewards, groups = np.array([0.1, 0.1, 0.1, 0.7]), np.array([0, 0, 0, 1])
    for leave_one_out in (False, True):
        got = group_normalized(rewards, groups, eps=0.0, leave_one_out=leave_one_out)
        np.testing.assert_array_equal(got, 0)


def test_leave_one_out_is_group_mean_times_n_over_n_minus_1() -> None:
    got = group_normalized(np.array([1.0, 0, 0, 1]), np.zeros(4), std="none", leave_one_out=True)
    np.testing.assert_allclose(got, np.array([0.5, -0.5, -0.5, 0.5]) * 4 / 3, rtol=1e-15)


def test_normalisation_is_in_float64() -> None:
    rewards = np.array([1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3], np.float32)
    got = group_normalized(rewards, np.zeros(4, int), eps=0)
    np.testing.assert_allclose(got, np.array([-3, -1, 1, 3]) / math.sqrt(5), rtol=1e-12)


def test_informative_groups_are_those_with_a_spread() -> None:
    np.testing.assert_array_equal(informative(REWARDS, GROUPS), [1, 1, 1, 0, 0, 1, 0, 1])


def test_shaping_adds_then_scales_then_clips() -> None:
    got = shaped_rewards(np.array([-5.0, 0, 0.25, 5]), scale=2, bias=0.5, clip=3)
    np.testing.assert_array_equal(got, [-3, 1, 1.5, 3])


def test_overlong_penalty_grows_over_its_buffer() -> None:
    got = overlong_penalty(np.array([0, 80, 85, 90, 100, 250]), max_tokens=100, buffer_tokens=20, factor=0.5)
    np.testing.assert_allclose(got, [0, 0, -0.125, -0.25, -0.5, -0.5], rtol=1e-15)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", [0.6, -0.4]), ("k2", [0.18, 0.08]), ("k3", [math.exp(-0.6) - 0.4, math.exp(0.4) - 1.4])],
)
def test_kl_rewards(kind: str, expected: list[float]) -> None:
    got = kl_rewards(np.array([-1.0, -2]), np.array([-1.6, -1.6]), coef=0.5, kind=kind)
    np.testing.assert_allclose(got, -0.5 * np.array(expected), rtol=1e-13)
    assert np.isfinite(kl_rewards(np.array([-1e5]), np.array([0.0]), coef=1, kind=kind)).all()


def test_rollout_rewards_keep_step_and_final_rewards() -> None:
    got = rollout_rewards(np.array([1.0, 0, 5]), np.array([0.5, 0.25, 2]), np.array([0, 1, 0]))
    np.testing.assert_array_equal(got, [3.5, 0.25, 5])


def test_entry_rewards_stand_where_they_are_earned() -> None:
    sequence = np.array([0, 0, 2, 2, 2, 1])  # rollout 0: sequences 0 and 1; rollout 1: sequence 2
    got = entry_rewards(
        np.array([10.0, 20]),
        np.array([1.0, 2, 3]),
        sequence=sequence,
        rollout_of_sequence=np.array([0, 0, 1]),
    )
    np.testing.assert_array_equal(got, [0, 1, 0, 0, 23, 12])


@pytest.mark.parametrize(("final", "steps"), [([0.0, 4], [0.0, 0]), ([1.0, 0], [0.0, 5])])
def test_a_reward_without_an_entry_is_refused(final: list[float], steps: list[float]) -> None:
    with pytest.raises(InputError, match=r"rewards: (final|step)_rewards\[1\]: expected 0"):
        entry_rewards(
            np.array(final), np.array(steps), sequence=np.array([0]), rollout_of_sequence=np.array([0, 1])
        )


def naive_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    turn: np.ndarray,
    g: float,
    l: float,
    tg: float,
    tl: float,
    tail: float,
) -> list[float]:
    """The double sum of the definition, one trajectory."""
    n = len(rewards)
    across = [t == n - 1 or turn[t] != turn[t + 1] for t in range(n)]
    discount = [tg if x else g for x in across]
    decay = [tl if x else l for x in across]
    following = [*values[1:], tail]
    delta = [rewards[t] + discount[t] * following[t] - values[t] for t in range(n)]
    return [
        sum(delta[k] * math.prod(discount[j] * decay[j] for j in range(t, k)) for k in range(t, n))
        for t in range(n)
    ]


TRAJECTORY = np.array([8, 8, 3, 8, 3, 3, 8, 8, 3])
TURN = np.array([0, 0, 5, 1, 5, 6, 1, 2, 6])


@pytest.mark.parametrize("bootstrapped", [False, True])
def test_gae_is_the_double_sum(bootstrapped: bool, rng: np.random.Generator) -> None:
    rewards, values, tail = rng.normal(size=(3, 9))
    advantages, returns = gae(
        rewards,
        values,
        TRAJECTORY,
        TURN,
        gamma=0.9,
        lam=0.8,
        turn_gamma=0.7,
        turn_lam=0.6,
        bootstrap=tail if bootstrapped else None,
    )
    for trajectory, last in ((8, 7), (3, 8)):
        here = trajectory == TRAJECTORY
        end = tail[last] if bootstrapped else 0.0
        expected = naive_gae(rewards[here], values[here], TURN[here], 0.9, 0.8, 0.7, 0.6, end)
        np.testing.assert_allclose(advantages[here], expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(returns, advantages + values, rtol=1e-15)


def test_gae_of_turns_takes_each_turn_as_one_step(rng: np.random.Generator) -> None:
    rewards, values, tail = rng.normal(size=(3, 9))
    advantages, returns = gae(
        rewards, values, TRAJECTORY, TURN, gamma=0.9, lam=0.8, turn_gamma=0.7, level="turn", bootstrap=tail
    )
    for turns, entries, end in (([0, 1, 2], [[0, 1], [3, 6], [7]], 7), ([5, 6], [[2, 4], [5, 8]], 8)):
        summed = np.array([rewards[e].sum() for e in entries])
        first = np.array([values[e[0]] for e in entries])
        expected = naive_gae(summed, first, np.array(turns), 0.9, 0.8, 0.7, 0.8, tail[end])
        for e, a, v in zip(entries, expected, first, strict=True):
            np.testing.assert_allclose(advantages[e], a, rtol=1e-12)
            np.testing.assert_allclose(returns[e], a + v, rtol=1e-12)


def test_lambda_1_is_return_less_value_and_lambda_0_the_temporal_difference() -> None:
    rewards, values = np.array([1.0, 2, 4]), np.array([0.5, 0.25, 0.125])
    ids = np.zeros(3, int)
    advantages, returns = gae(rewards, values, ids, ids, gamma=0.5)
    np.testing.assert_allclose(returns, [3, 4, 4], rtol=1e-15)
    np.testing.assert_allclose(advantages, [2.5, 3.75, 3.875], rtol=1e-15)
    np.testing.assert_array_equal(discounted_returns(rewards, ids, ids, gamma=0.5), [3, 4, 4])
    np.testing.assert_allclose(
        gae(rewards, values, ids, ids, gamma=0.5, lam=0)[0], [0.625, 1.8125, 3.875], rtol=1e-15
    )


def test_a_turn_discount_alone_leaves_tokens_undiscounted() -> None:
    got = discounted_returns(
        np.array([0.0, 0, 0, 0, 1]), np.zeros(5), np.array([0, 0, 1, 1, 2]), turn_gamma=0.5
    )
    np.testing.assert_array_equal(got, [0.25, 0.25, 0.5, 0.5, 1])


def test_no_entries_have_no_advantages() -> None:
    for level in ("token", "turn"):
        advantages, returns = gae(*(np.zeros(0),) * 4, level=level)
        assert advantages.shape == returns.shape == (0,)


def test_whitening_over_the_masked_batch() -> None:
    x, mask = np.array([1.0, 100, 3, 5, -100]), np.array([1, 0, 1, 1, 0], bool)
    s = math.sqrt(8 / 3)
    np.testing.assert_allclose(whitened(x, mask, eps=0), [-2 / s, 0, 0, 2 / s, 0], rtol=1e-15)
    np.testing.assert_allclose(
        whitened(x, mask, shift_mean=False, eps=0), [3 - 2 / s, 0, 3, 3 + 2 / s, 0], rtol=1e-15
    )
    np.testing.assert_allclose(whitened(x, mask, unbiased=True, eps=0), [-1, 0, 0, 1, 0], rtol=1e-15)
    np.testing.assert_allclose(whitened(x[mask]), whitened(x, mask)[mask], rtol=1e-15)
    np.testing.assert_array_equal(whitened(x, np.zeros(5, bool)), 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_normalized(REWARDS, GROUPS[1:]), r"two arrays of shape \[R\]; got \(8,\), \(7,\)"),
        (
            lambda: group_normalized(REWARDS, GROUPS, mean="prompt"),
            "advantages: mean: expected one of batch, group",
        ),
        (
            lambda: group_normalized(np.array([0, np.nan]), GROUPS[:2]),
            r"rewards\[1\]: expected a finite number; got nan",
        ),
        (lambda: shaped_rewards(REWARDS, clip=0), "rewards: clip"),
        (
            lambda: overlong_penalty(REWARDS, max_tokens=5, buffer_tokens=6),
            r"buffer_tokens: expected 1 .. max_tokens = 5",
        ),
        (
            lambda: kl_rewards(REWARDS, REWARDS, coef=1, kind="k0"),
            "rewards: kind: expected one of k1, k2, k3",
        ),
        (
            lambda: gae(REWARDS, REWARDS, GROUPS, GROUPS, gamma=1.5),
            "advantages: gamma: .* within 0 .. 1; got 1.5",
        ),
        (lambda: gae(REWARDS, REWARDS, GROUPS, GROUPS[1:]), r"arrays: expected all of shape \[E\]"),
        (
            lambda: gae(*(np.ones(3),) * 3, np.array([0, 1, 0])),
            "turn 0.0 of trajectory 1.0: expected entries that follow",
        ),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
