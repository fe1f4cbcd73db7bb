"""From rewards to what the loss reads: shaping, episodes, groups, credit, pairs, weights."""

import dataclasses

import numpy as np
import pytest

from dta_jax.advantages import group_normalized
from dta_jax.errors import InputError
from dta_jax.objective import (
    GAE,
    Aggregate,
    GroupNormalized,
    Objective,
    PreferencePairs,
    Returns,
    Rewards,
    credited,
    has_differences,
    make_batch,
    preference_pairs,
)
from dta_jax.rollouts import Rollouts
from dta_jax.types import Samples

PLAIN = Objective(Rewards(), GroupNormalized(), Aggregate())


def rollouts(**changes: object) -> Rollouts:
    """Four rollouts of two tasks, seven tokens each: two shown, two said, one shown, two said."""
    arrays = {
        "tokens": np.arange(28, dtype=np.int32),
        "offsets": np.arange(0, 29, 7, dtype=np.int64),
        "completion_spans": np.array([(r, *s) for r in range(4) for s in ((2, 4), (5, 7))], np.int32),
        "task_id": np.array([5, 9, 5, 9], np.int32),
        "reward": np.array([1.0, 0.0, 0.0, 3.0], np.float32),
        "logprobs": -np.arange(28, dtype=np.float32) / 10,
    }
    return Rollouts(**(arrays | changes))


def credit_of(how: Objective, value: np.ndarray | None = None, **changes: object) -> dict[str, np.ndarray]:
    batch = make_batch(rollouts(**changes), how, {"ref_logp": np.full(28, -1.0, np.float32)})
    return credited(batch, how, value)


def per_rollout(entries: np.ndarray) -> np.ndarray:
    """The one value that all four entries of each rollout share."""
    assert (entries.reshape(4, 4) == entries.reshape(4, 4)[:, :1]).all()
    return entries.reshape(4, 4)[:, 0]


def test_groups_are_tasks_wherever_their_rollouts_stand():
    advantage = per_rollout(credit_of(PLAIN)["advantage"])
    np.testing.assert_allclose(advantage, group_normalized(np.array([1, 0, 0, 3.0]), np.array([0, 1, 0, 1])))
    np.testing.assert_allclose(advantage, [1, -1, -1, 1], rtol=1e-5)


def test_a_batch_is_the_scope_called_batch():
    how = dataclasses.replace(PLAIN, credit=GroupNormalized(mean="batch", std="none"))
    np.testing.assert_allclose(per_rollout(credit_of(how)["advantage"]), [0, -1, -1, 2])


def test_rewards_are_shaped_first():
    how = dataclasses.replace(
        PLAIN, rewards=Rewards(scale=2, bias=-1, clip=3), credit=GroupNormalized(mean="none", std="none")
    )
    np.testing.assert_allclose(per_rollout(credit_of(how)["advantage"]), [0, -2, -2, 3])


def test_long_episodes_are_punished_by_what_they_generated():
    how = dataclasses.replace(
        PLAIN,
        rewards=Rewards(overlong_max=5, overlong_buffer=4, overlong_factor=2),
        credit=GroupNormalized(mean="none", std="none"),
    )
    penalty = -2 * (4 - 1) / 4  # four tokens; the penalty begins after one
    np.testing.assert_allclose(per_rollout(credit_of(how)["advantage"]), np.array([1, 0, 0, 3]) + penalty)


def test_step_rewards_count_in_an_episodes_reward_and_where_they_were_earned():
    steps = np.array([1, 2, 0, 0, 0, 0, 0, 4], np.float32)
    how = dataclasses.replace(PLAIN, credit=GroupNormalized(mean="none", std="none"))
    np.testing.assert_allclose(per_rollout(credit_of(how, step_reward=steps)["advantage"]), [4, 0, 0, 7])
    how = dataclasses.replace(PLAIN, credit=Returns(whiten=False))
    found = credit_of(how, step_reward=steps)["advantage"].reshape(4, 4)
    np.testing.assert_allclose(found, [[4, 4, 3, 3], [0] * 4, [0] * 4, [7, 7, 7, 7]])


def test_returns_are_discounted_and_whitened():
    how = dataclasses.replace(PLAIN, credit=Returns(gamma=0.5, turn_gamma=0.1, whiten=False))
    found = credit_of(how)["advantage"].reshape(4, 4)
    np.testing.assert_allclose(found[0], [0.025, 0.05, 0.5, 1], rtol=1e-6)
    how = dataclasses.replace(PLAIN, credit=Returns(gamma=0.5, turn_gamma=0.1))
    white = credit_of(how)["advantage"]
    np.testing.assert_allclose([white.mean(), white.std()], [0, 1], atol=1e-6)
    np.testing.assert_allclose(np.corrcoef(white, found.ravel())[0, 1], 1)


def test_kl_rewards_are_paid_token_by_token():
    how = dataclasses.replace(PLAIN, rewards=Rewards(kl_coef=0.5), credit=Returns(whiten=False))
    logp = (-np.arange(28) / 10).reshape(4, 7)[:, [2, 3, 5, 6]]
    paid = -0.5 * (logp - -1.0)
    paid[:, -1] += [1, 0, 0, 3]
    expected = np.cumsum(paid[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(credit_of(how)["advantage"].reshape(4, 4), expected, rtol=1e-5)
    how = dataclasses.replace(how, credit=GroupNormalized(mean="none", std="none"))
    np.testing.assert_allclose(per_rollout(credit_of(how)["advantage"]), expected[:, 0], rtol=1e-5)


def test_gae_reads_the_critic():
    value = np.linspace(-1, 1, 16)
    how = dataclasses.replace(PLAIN, credit=GAE(gamma=0.9, lam=0.8, whiten=False))
    found = credit_of(how, value)
    expected = np.zeros((4, 4))
    for r in range(4):
        v, ahead = [*value[4 * r : 4 * r + 4], 0.0], 0.0
        for t in (3, 2, 1, 0):
            reward = (1, 0, 0, 3)[r] if t == 3 else 0
            ahead = reward + 0.9 * v[t + 1] - v[t] + 0.9 * 0.8 * ahead
            expected[r, t] = ahead
    np.testing.assert_allclose(found["advantage"].reshape(4, 4), expected, rtol=1e-5)
    np.testing.assert_allclose(found["return"], expected.ravel() + value, rtol=1e-5)
    np.testing.assert_allclose(found["old_value"], value, rtol=1e-6)
    white = credit_of(dataclasses.replace(how, credit=GAE(gamma=0.9, lam=0.8)), value)
    np.testing.assert_allclose(white["return"], found["return"])
    assert white["advantage"].mean() == pytest.approx(0, abs=1e-6)


def test_rows_of_one_episode_are_one_rollout():
    """Rollout 0 and 2 as two rows of one episode: one reward, one share of the mean, tokens added up."""
    joined = {
        "episode": np.array([7, 3, 7, 4], np.int32),
        "reward": np.array([1.0, 0.0, 1.0, 3.0], np.float32),
        "trial": np.zeros(4, np.int32),
        "task_id": np.array([5, 5, 5, 5], np.int32),
    }
    how = Objective(
        Rewards(overlong_max=8, overlong_buffer=8, overlong_factor=8),
        GroupNormalized(mean="group", std="none"),
        Aggregate("sequence_mean", "rollout"),
    )
    batch = make_batch(rollouts(**joined), how)
    weight, advantage = batch.samples.values["weight"].reshape(4, 4), credited(batch, how)["advantage"]
    np.testing.assert_allclose(weight.sum(axis=1), [1 / 6, 1 / 3, 1 / 6, 1 / 3], rtol=1e-6)
    total = np.array([1 - 8, 0 - 4, 3 - 4.0])
    np.testing.assert_allclose(per_rollout(advantage), (total - total.mean())[[0, 1, 0, 2]], rtol=1e-6)


def test_pairs_are_best_with_worst():
    reward = np.array([0.5, 2, 1, 0, 1, 9, 9])
    group = np.array([0, 0, 0, 0, 0, 1, 1])
    pair, preference = preference_pairs(reward, group)
    assert pair.tolist() == [1, 0, 1, 0, -1, -1, -1]
    assert preference.tolist() == [-1, 1, 1, -1, 0, 0, 0]
    pair, _ = preference_pairs(reward, group, margin=0.5)
    assert pair.tolist() == [-1, 0, -1, 0, -1, -1, -1]


def test_only_pairs_are_trained_on():
    how = Objective(Rewards(), PreferencePairs(), Aggregate("sequence_mean"))
    batch = make_batch(rollouts(reward=np.array([1, 2, 0, 2], np.float32)), how)
    assert batch.samples.values["preference"].tolist() == [1] * 4 + [-1] * 4
    assert set(batch.unit.tolist()) == {0}
    assert batch.episode.tolist() == [0] * 4 + [2] * 4
    assert len(batch.samples.sequences) == 4
    np.testing.assert_allclose(batch.samples.values["weight"], 1 / 8)
    assert credited(batch, how) == {}
    with pytest.raises(InputError, match="reward: expected two episodes of one group whose rewards differ"):
        make_batch(rollouts(reward=np.zeros(4, np.float32)), how)


STEPS = np.array([0, 0, 0, 0, 0.5, 0, 0, 0], np.float32)  # the third rollout's first answer earned something
EQUAL = np.ones(4, np.float32)


def test_pairs_count_what_steps_earned():
    how = Objective(Rewards(), PreferencePairs(), Aggregate("sequence_mean"))
    batch = make_batch(rollouts(reward=EQUAL, step_reward=STEPS), how)
    assert batch.samples.values["preference"].tolist() == [-1] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("credit", "rewards", "changes", "expected"),
    [
        (PreferencePairs(), Rewards(), {}, True),
        (PreferencePairs(margin=2.5), Rewards(), {}, True),
        (PreferencePairs(margin=3), Rewards(), {}, False),
        (PreferencePairs(), Rewards(clip=0.5, bias=1), {}, False),  # all are cut to 0.5
        (PreferencePairs(), Rewards(), {"reward": EQUAL}, False),
        (PreferencePairs(), Rewards(), {"reward": EQUAL, "step_reward": STEPS}, True),
        (GroupNormalized(), Rewards(), {}, True),
        (GroupNormalized(), Rewards(clip=0.5, bias=1), {}, False),
        (GroupNormalized(), Rewards(), {"reward": EQUAL}, False),
        (GroupNormalized(), Rewards(), {"reward": EQUAL, "step_reward": STEPS}, True),
        (GroupNormalized(skip_equal=False), Rewards(), {"reward": EQUAL}, True),
        (GroupNormalized(mean="batch"), Rewards(), {"reward": EQUAL}, True),
        (Returns(), Rewards(), {"reward": EQUAL}, True),
        (None, Rewards(), {"reward": None}, True),
    ],
)
def test_groups_have_differences_after_shaping_with_steps_and_margin(credit, rewards, changes, expected):
    assert has_differences(rollouts(**changes), Objective(rewards, credit, Aggregate())) is expected


def test_samples_taken_are_the_entries_that_were_asked_for():
    samples = Samples(
        [np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)],
        np.array([0, 1, 0], np.int32),
        np.array([1, 1, 2], np.int32),
        {"weight": np.array([1.0, 2, 3], np.float32)},
    )
    some = samples.take(np.array([2, 0]))
    assert [s.tolist() for s in some.sequences] == [[1, 2, 3]]
    assert (some.sequence.tolist(), some.position.tolist()) == ([0, 0], [2, 1])
    assert some.values["weight"].tolist() == [3, 1]


def test_rewards_that_are_needed_and_missing_are_named():
    bare = rollouts(reward=None)
    batch = make_batch(bare, PLAIN)
    with pytest.raises(InputError, match="rollouts: reward: expected an array"):
        credited(batch, PLAIN)
    assert credited(batch, Objective(Rewards(), None, Aggregate())) == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rewards(clip=0.0), "Rewards: clip: expected None or a positive number"),
        (lambda: Rewards(overlong_max=4, overlong_buffer=5), "overlong_buffer: expected at least 1, at most"),
        (lambda: Rewards(kl_coef=-1.0), "kl_coef"),
        (lambda: Returns(gamma=1.5), "Returns: gamma: expected within 0"),
        (lambda: GAE(level="word"), "GAE: level"),
        (lambda: PreferencePairs(margin=-1.0), "margin"),
        (lambda: Aggregate("constant"), "Aggregate: divisor: expected a positive number of tokens"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
