"""From rollouts to what a loss reads: rewards, advantages or preferences, and weights of one batch.

    final and step rewards   shaped (`Rewards`)
      -> credit per entry    `GroupNormalized`, `Returns`, `GAE` or `PreferencePairs`
    entries                  weighted so that their sum is a mean over the batch (`Aggregate`)

Everything is computed from explicit ids (task, episode, completion) over the whole batch, before anything is
packed: chunks, minibatches and ranks cannot change a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from dta_jax.advantages import (
    SCOPES,
    Scope,
    discounted_returns,
    entry_rewards,
    gae,
    group_normalized,
    informative,
    kl_rewards,
    overlong_penalty,
    shaped_rewards,
    whitened,
)
from dta_jax.aggregation import AGGREGATIONS, Aggregation, aggregation_weights
from dta_jax.episode_rows import completion_rewards, episodes_of, rewards_on_the_way
from dta_jax.errors import InputError
from dta_jax.losses import KL_KINDS, KLKind, check
from dta_jax.rollouts import Rollouts, samples_from_rollouts
from dta_jax.types import Samples

Unit: TypeAlias = Literal["completion", "rollout"]


@dataclass(frozen=True)
class Rewards:
    """How recorded rewards are shaped before they become advantages.

    Attributes:
      scale, bias, clip: final rewards r become `clip(scale * (r + bias), -clip, clip)`; None does not clip.
      overlong_max: generated tokens of an episode at which the penalty for length is whole; None for none.
      overlong_buffer: it grows over so many tokens before.
      overlong_factor: the whole penalty.
      kl_coef: weight of the KL divergence from the reference as a reward of every token; 0 for none.
      kl_kind: the estimate.
    """

    scale: float = 1.0
    bias: float = 0.0
    clip: float | None = None
    overlong_max: int | None = None
    overlong_buffer: int = 1
    overlong_factor: float = 1.0
    kl_coef: float = 0.0
    kl_kind: KLKind = "k1"

    def __post_init__(self) -> None:
        check(self, "scale", math.isfinite(self.scale), "a finite number")
        check(self, "bias", math.isfinite(self.bias), "a finite number")
        check(self, "clip", self.clip is None or self.clip > 0, "None or a positive number")
        longest = self.overlong_max
        check(self, "overlong_max", longest is None or longest >= 1, "None or at least 1")
        inside = self.overlong_buffer >= 1 and (longest is None or self.overlong_buffer <= longest)
        check(self, "overlong_buffer", inside, "at least 1, at most overlong_max")
        check(self, "overlong_factor", self.overlong_factor >= 0, "at least 0")
        check(self, "kl_coef", 0 <= self.kl_coef < math.inf, "a finite number, at least 0")
        check(self, "kl_kind", self.kl_kind in KL_KINDS, f"one of {', '.join(KL_KINDS)}")


@dataclass(frozen=True)
class GroupNormalized:
    """One advantage per episode, from its whole reward (`advantages.group_normalized`); groups are tasks.

    An episode's reward is its final one, its steps' and, with `Rewards.kl_coef`, its tokens' KL rewards.

    Attributes:
      mean: whose mean is subtracted: "group", "batch", or "none" for no one's.
      std: whose standard deviation is divided by, in the same words.
      leave_one_out: an episode does not count in the mean that it is compared with.
      unbiased: the variance's divisor is n - 1 instead of n.
      eps: added to the deviation, in units of reward.
      skip_equal: leave out groups whose rewards are all equal, where `mean` is the group's: they have no
        gradient.
    """

    mean: Scope = "group"
    std: Scope = "group"
    leave_one_out: bool = False
    unbiased: bool = False
    eps: float = 1e-6
    skip_equal: bool = True

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            check(self, name, getattr(self, name) in SCOPES, f"one of {', '.join(SCOPES)}")
        check(self, "eps", self.eps >= 0, "at least 0")

    @property
    def drops_equal(self) -> bool:
        """Whether groups of equal rewards are left out."""
        return self.skip_equal and self.mean == "group"


@dataclass(frozen=True)
class Returns:
    """The reward to go of every token, whitened over the batch: REINFORCE, and REINFORCE++ with KL rewards.

    Attributes:
      gamma: discount from token to token.
      turn_gamma: from a turn's last token to the next turn; None for `gamma`.
      whiten: subtract the batch's mean and divide by its deviation.
    """

    gamma: float = 1.0
    turn_gamma: float | None = None
    whiten: bool = True

    def __post_init__(self) -> None:
        _check_discounts(self, ("gamma", "turn_gamma"))


@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimates from a critic's values: `dta_jax.advantages.gae`.

    Attributes:
      gamma, lam: discount and decay from step to step.
      turn_gamma, turn_lam: the same from a turn's last step to the next turn; None for `gamma`, `lam`.
      level: what a step is, a token or a whole turn.
      whiten: subtract the batch's mean and divide by its deviation; returns stay as they are.
    """

    gamma: float = 1.0
    lam: float = 0.95
    turn_gamma: float | None = None
    turn_lam: float | None = None
    level: Literal["token", "turn"] = "token"
    whiten: bool = True

    def __post_init__(self) -> None:
        _check_discounts(self, ("gamma", "lam", "turn_gamma", "turn_lam"))
        check(self, "level", self.level in ("token", "turn"), "'token' or 'turn'")


@dataclass(frozen=True)
class PreferencePairs:
    """Pairs of a better and a worse episode of one group, for DPO: best with worst, second best with second
    worst, and so on, as long as their rewards differ by more than `margin`. An episode without a partner
    takes no part. Rewards are those of `GroupNormalized`, without KL rewards.

    Attributes:
      margin: the least difference of rewards, exclusive.
    """

    margin: float = 0.0

    def __post_init__(self) -> None:
        check(self, "margin", 0 <= self.margin < math.inf, "a finite number, at least 0")

    @property
    def needs(self) -> str:
        """What a batch must have, in words."""
        by = f" by more than {self.margin:g}" if self.margin else ""
        return f"two episodes of one group whose rewards differ{by}"


Credit: TypeAlias = GroupNormalized | Returns | GAE | PreferencePairs


@dataclass(frozen=True)
class Aggregate:
    """How the entries' losses become one number: `dta_jax.aggregation.aggregation_weights`.

    Attributes:
      kind: which mean.
      unit: what counts as one sequence in it, a completion or a whole rollout (an episode); with
        `PreferencePairs` it is the pair.
      divisor: tokens, for kind "constant" only.
    """

    kind: Aggregation = "token_mean"
    unit: Unit = "completion"
    divisor: float | None = None

    def __post_init__(self) -> None:
        check(self, "kind", self.kind in AGGREGATIONS, f"one of {', '.join(AGGREGATIONS)}")
        check(self, "unit", self.unit in ("completion", "rollout"), "completion or rollout")
        constant = self.kind == "constant"
        right = self.divisor is not None and self.divisor > 0 if constant else self.divisor is None
        check(self, "divisor", right, "a positive number of tokens" if constant else f"None for {self.kind}")


@dataclass(frozen=True)
class Objective:
    """How rollouts become what the loss reads.

    Attributes:
      rewards, credit, aggregate: see there; no credit for a loss that reads none.
      temperature: at which the policy sampled.
    """

    rewards: Rewards
    credit: Credit | None
    aggregate: Aggregate
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step trains on.

    Attributes:
      samples: with `weight` float32[E] (the sum of weight * loss is the batch's loss), and whatever the
        loss reads as it becomes known: log-probabilities, `advantage`, ..., float32[E].
      rollouts: the R rows that the samples are made of.
      token: int64[E], each entry's token, an index into `rollouts.tokens`.
      completion: int64[E], each entry's completion, a row of `rollouts.completion_spans`.
      episode: int64[E], each entry's episode, 0 ... N-1.
      unit: int64[E], what counts as one sequence: the completion, the episode, or the pair.
      reward: float64[N], the episodes' final rewards, shaped; None where there are none.
      group: int64[N], the task of each episode.
    """

    samples: Samples
    rollouts: Rollouts
    token: np.ndarray
    completion: np.ndarray
    episode: np.ndarray
    unit: np.ndarray
    reward: np.ndarray | None
    group: np.ndarray


def make_batch(
    rollouts: Rollouts, objective: Objective, values: Mapping[str, np.ndarray] | None = None
) -> Batch:
    """The entries of some rollouts, with weights and everything that is known before any model runs.

    Args:
      rollouts: whole groups.
      objective: of the run.
      values: float32[sum] by name, log-probabilities of the rollouts' tokens; they win over recorded ones.

    Raises:
      InputError: rewards are needed and missing; no pair of different rewards.
    """
    credit, how = objective.credit, objective.aggregate
    plain = samples_from_rollouts(rollouts)
    row, completion = (plain.values[name].astype(np.int64) for name in ("rollout", "completion"))
    token = rollouts.offsets[row] + plain.position
    episode = episodes_of(rollouts)[1][row]
    group = _groups(rollouts)
    reward = None if rollouts.reward is None else _shaped(rollouts, rollouts.reward, objective.rewards)
    known: dict[str, np.ndarray] = {}
    unit, taken = episode if how.unit == "rollout" else completion, np.arange(len(row))
    if isinstance(credit, PreferencePairs):
        earned = _need(rollouts, reward) + rewards_on_the_way(rollouts)
        pair, preference = preference_pairs(earned, group, credit.margin)
        known["preference"] = preference[episode].astype(np.float32)
        unit, taken = pair[episode], np.flatnonzero(pair[episode] >= 0)
        if not taken.size:
            raise InputError(rollouts.source, "reward", expected=credit.needs, actual="none")
    if rollouts.logprobs is not None:
        known["old_logp"] = plain.values["old_logp"]
    if objective.temperature != 1:
        known["temperature"] = np.full(len(row), objective.temperature, np.float32)
    samples = Samples(plain.sequences, plain.sequence, plain.position, known).take(taken)
    token, completion, episode, unit = (ids[taken] for ids in (token, completion, episode, unit))
    given = {name: array[token] for name, array in (values or {}).items()}
    of_sequence = unit[np.searchsorted(samples.sequence, np.arange(len(samples.sequences)))]
    weight = aggregation_weights(samples, how.kind, divisor=how.divisor, unit=of_sequence)
    samples = replace(samples, values={"weight": weight, **samples.values, **given})
    return Batch(samples, rollouts, token, completion, episode, unit, reward, group)


def credited(
    batch: Batch, objective: Objective, critic_value: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """What each entry earned: `advantage` float32[E] and, with a critic, `return` and `old_value`.

    Args:
      batch: with `old_logp` and `ref_logp` where KL rewards are asked for.
      objective: of the run.
      critic_value: float[E], the critic's value before each entry's token; for `GAE`.

    Raises:
      InputError: rewards are missing.
    """
    credit, shape = objective.credit, objective.rewards
    if credit is None or isinstance(credit, PreferencePairs):
        return {}
    final = _need(batch.rollouts, batch.reward)
    values, count = batch.samples.values, len(batch.episode)
    per_token = np.zeros(count)
    if shape.kl_coef:
        per_token = kl_rewards(values["old_logp"], values["ref_logp"], coef=shape.kl_coef, kind=shape.kl_kind)
    if isinstance(credit, GroupNormalized):
        total = final + rewards_on_the_way(batch.rollouts)
        total += np.bincount(batch.episode, per_token, minlength=len(final))
        advantage = group_normalized(
            total,
            batch.group,
            mean=credit.mean,
            std=credit.std,
            leave_one_out=credit.leave_one_out,
            unbiased=credit.unbiased,
            eps=credit.eps,
        )
        return {"advantage": advantage[batch.episode].astype(np.float32)}
    rewards = per_token + entry_rewards(
        final,
        completion_rewards(batch.rollouts),
        sequence=batch.completion,
        rollout_of_sequence=episodes_of(batch.rollouts)[1][batch.rollouts.completion_spans[:, 0]],
    )
    if isinstance(credit, Returns):
        advantage = discounted_returns(
            rewards, batch.episode, batch.completion, gamma=credit.gamma, turn_gamma=credit.turn_gamma
        )
        earned = {}
    else:
        assert critic_value is not None, "settings ask for a critic with GAE"
        advantage, returns = gae(
            rewards,
            critic_value,
            batch.episode,
            batch.completion,
            gamma=credit.gamma,
            lam=credit.lam,
            turn_gamma=credit.turn_gamma,
            turn_lam=credit.turn_lam,
            level=credit.level,
        )
        earned = {"return": returns, "old_value": critic_value}
    if credit.whiten:
        advantage = whitened(advantage, batch.samples.values["weight"] > 0)
    return {name: x.astype(np.float32) for name, x in (earned | {"advantage": advantage}).items()}


def preference_pairs(
    reward: np.ndarray, group: np.ndarray, margin: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Best with worst, second best with second worst, ..., inside each group.

    Args:
      reward: float[N].
      group: int[N].
      margin: rewards of a pair differ by more than that.

    Returns:
      int64[N], the pair of each episode, -1 for none; and +1 for the better, -1 for the worse, 0 for none.
      Of equal rewards, earlier episodes count as the better ones.
    """
    pair, preference, pairs = np.full(len(reward), -1), np.zeros(len(reward)), 0
    for g in np.unique(group):
        members = np.flatnonzero(group == g)
        order = members[np.argsort(-reward[members], kind="stable")]
        for better, worse in zip(order[: len(order) // 2], order[::-1], strict=False):
            if reward[better] - reward[worse] > margin:
                pair[[better, worse]], preference[[better, worse]] = pairs, (1, -1)
                pairs += 1
    return pair, preference


def has_differences(rollouts: Rollouts, objective: Objective) -> bool:
    """Whether any group has rewards from which there is something to learn.

    For `PreferencePairs` those are a pair's, for `GroupNormalized` that leaves out equal groups two that
    differ; any others do for other kinds of credit.

    Raises:
      InputError: rewards are needed and missing.
    """
    credit = objective.credit
    drops_equal = isinstance(credit, GroupNormalized) and credit.drops_equal
    if not drops_equal and not isinstance(credit, PreferencePairs):
        return True
    earned = _shaped(rollouts, rollouts.require("reward"), objective.rewards) + rewards_on_the_way(rollouts)
    if isinstance(credit, PreferencePairs):
        return bool((preference_pairs(earned, _groups(rollouts), credit.margin)[0] >= 0).any())
    return bool(informative(earned, _groups(rollouts)).any())


def _groups(rollouts: Rollouts) -> np.ndarray:
    """int64[N], the task of each episode; without tasks each is a group of its own."""
    first = episodes_of(rollouts)[0]
    return first if rollouts.task_id is None else rollouts.task_id[first].astype(np.int64)


def _shaped(rollouts: Rollouts, reward: np.ndarray, how: Rewards) -> np.ndarray:
    """The episodes' final rewards, float64[N], from the rows', float[R]."""
    first, episode_of_row = episodes_of(rollouts)
    shaped = shaped_rewards(reward[first], scale=how.scale, bias=how.bias, clip=how.clip)
    if how.overlong_max is None:
        return shaped
    row, start, end = rollouts.completion_spans.T
    generated = np.bincount(episode_of_row[row], end - start, minlength=len(first))
    return shaped + overlong_penalty(
        generated,
        max_tokens=how.overlong_max,
        buffer_tokens=how.overlong_buffer,
        factor=how.overlong_factor,
    )


def _need(rollouts: Rollouts, reward: np.ndarray | None) -> np.ndarray:
    if reward is None:
        raise InputError(rollouts.source, "reward", expected="an array, because the loss learns from rewards",
                         actual="none")  # fmt: skip
    return reward


def _check_discounts(settings: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(settings, name)
        check(settings, name, value is None or 0 <= value <= 1, "within 0 .. 1")
