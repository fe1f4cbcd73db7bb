"""Which rollouts a step trains on, and what the loss needs to know of each of their tokens.

Batches are made of whole groups (tasks). The order of an epoch is a permutation drawn from (seed,
epoch), so batch `step` is a function of the step alone: whoever knows the step knows the data position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dta_jax.advantages import group_normalized
from dta_jax.aggregation import aggregation_weights
from dta_jax.errors import InputError
from dta_jax.rollouts import Rollouts, load_rollouts, samples_from_rollouts
from dta_jax.settings import RecordedRollouts, Train
from dta_jax.synthetic import generate_rollouts
from dta_jax.types import Samples


@dataclass(frozen=True, eq=False)
class Dataset:
    """All rollouts of a run, in groups, checked against the model.

    Attributes:
      rollouts: R rollouts; their token ids are below the vocabulary.
      groups: int[R_g] per group, its rollouts.
      advantage: float32[R], or None.
      group_entries: int64[G], tokens with loss in each group, counted per sequence.
      longest: tokens of their longest sequence.
    """

    rollouts: Rollouts
    groups: tuple[np.ndarray, ...]
    advantage: np.ndarray | None
    group_entries: np.ndarray
    longest: int


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step trains on.

    Attributes:
      samples: with `weight` float32[E] (the sum of weight * loss is the batch's loss) and, as the loss
        needs them, `advantage`, log-probabilities and `temperature`, float32[E] too.
      members: int64[], its rollouts, indices into the dataset's.
      token_index: int64[E], each entry's token, an index into the dataset's `rollouts.tokens`.
      unit: int64[E], what counts as one sequence: the completion or the rollout.
    """

    samples: Samples
    members: np.ndarray
    token_index: np.ndarray
    unit: np.ndarray

    def with_values(self, **values: np.ndarray) -> Batch:
        """The batch with more values, [E] each."""
        return replace(self, samples=replace(self.samples, values={**self.samples.values, **values}))


@dataclass(frozen=True)
class BatchOrder:
    """The order in which groups are trained on.

    Attributes:
      num_groups: G.
      batch_groups: groups per batch; the last batch of an epoch may have fewer.
      seed: of the permutations.
    """

    num_groups: int
    batch_groups: int
    seed: int

    @property
    def batches_per_epoch(self) -> int:
        """Batches that go once through all groups."""
        return -(-self.num_groups // self.batch_groups)

    def groups(self, step: int) -> np.ndarray:
        """The groups of the batch with which update `step` (from 0) is made."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_groups)
        return order[batch * self.batch_groups : (batch + 1) * self.batch_groups]


def load_dataset(train: Train, vocab_size: int) -> Dataset:
    """Reads or generates a run's rollouts, and checks all that could go wrong in a later step.

    Advantages are computed here, from all rollouts of the run at once: they do not depend on batches.
    Groups whose advantages are all 0 are left out if the settings say so.

    Raises:
      InputError: see `load_rollouts`, `samples_from_rollouts` and `group_normalized`; or nothing is left to
        train on, or there are fewer groups than a batch takes.
    """
    rollouts = _load(train)
    # Checks ids and lengths of everything; the result is made again, batch by batch.
    samples = samples_from_rollouts(rollouts, vocab_size=vocab_size, max_length=train.max_length)
    if not len(samples.sequence):
        raise InputError(rollouts.source, "completion_spans", expected="tokens with loss", actual="none")
    advantage = None
    if train.advantages is None:
        group_of = rollouts.task_id if rollouts.task_id is not None else np.arange(rollouts.num_rollouts)
    else:
        group_of = rollouts.require("task_id")
        how = train.advantages
        advantage = group_normalized(
            rollouts.require("reward"),
            group_of,
            mean=how.mean,
            std=how.std,
            leave_one_out=how.leave_one_out,
            unbiased=how.unbiased,
            eps=how.eps,
        ).astype(np.float32)
    with_loss = np.zeros(rollouts.num_rollouts, bool)
    with_loss[samples.values["rollout"]] = True
    groups = [np.flatnonzero((group_of == g) & with_loss) for g in np.unique(group_of[with_loss])]
    if advantage is not None and train.advantages is not None and train.advantages.skip_equal:
        groups = [g for g in groups if advantage[g].any()]
        if not groups:
            raise InputError(
                rollouts.source,
                "reward",
                expected="a group whose rewards differ",
                actual="equal rewards in every group",
                hint="there is nothing to learn from them",
            )
    groups = groups[: train.max_groups]
    if len(groups) < train.batch_groups:
        raise InputError(
            "Train",
            "batch_groups",
            expected=f"at most {len(groups)}, the groups in {rollouts.source}",
            actual=train.batch_groups,
        )
    rollout = samples.values["rollout"]
    entries = np.bincount(rollout, minlength=rollouts.num_rollouts)
    longest = np.zeros(rollouts.num_rollouts, np.int64)
    np.maximum.at(longest, rollout, samples.position + 1)  # a sequence ends with a token that has loss
    return Dataset(
        rollouts=rollouts,
        groups=tuple(groups),
        advantage=advantage,
        group_entries=np.array([entries[g].sum() for g in groups]),
        longest=max(int(longest[g].max()) for g in groups),
    )


def make_batch(
    dataset: Dataset, train: Train, groups: np.ndarray, logprobs: Mapping[str, np.ndarray]
) -> Batch:
    """The samples of some groups.

    Args:
      dataset: all rollouts.
      train: the run's settings.
      groups: indices into `dataset.groups`.
      logprobs: float32[sum] by name (`old_logp`, ...), log-probabilities of all rollouts' tokens.
    """
    members = np.concatenate([dataset.groups[g] for g in groups])
    plain = samples_from_rollouts(dataset.rollouts.take(members.tolist()))
    rollout = members[plain.values["rollout"]]
    token_index = dataset.rollouts.offsets[rollout] + plain.position
    how = train.aggregate
    unit = rollout if how.unit == "rollout" else plain.sequence
    of_sequence = unit[np.searchsorted(plain.sequence, np.arange(len(plain.sequences)))]
    values = {"weight": aggregation_weights(plain, how.kind, divisor=how.divisor, unit=of_sequence)}
    values |= {name: array[token_index] for name, array in logprobs.items()}
    if dataset.advantage is not None:
        values["advantage"] = dataset.advantage[rollout]
    if train.temperature != 1:
        values["temperature"] = np.full(len(rollout), train.temperature, np.float32)
    samples = Samples(plain.sequences, plain.sequence, plain.position, values)
    return Batch(samples, members, token_index, unit)


def _load(train: Train) -> Rollouts:
    source = train.rollouts
    if not isinstance(source, RecordedRollouts):
        return generate_rollouts(source)
    rollouts = load_rollouts(source.path)
    if source.tasks is not None:
        rollouts = rollouts.select(source.tasks)
    if source.min_reward is not None:
        reward = rollouts.require("reward")
        kept = np.flatnonzero(reward >= source.min_reward)
        if not kept.size:
            highest = f"at most {reward.max()}" if reward.size else "no rollouts"
            raise InputError(
                rollouts.source, "reward", expected=f"some of at least {source.min_reward}", actual=highest
            )
        rollouts = rollouts.take(kept.tolist())
    if source.vocab_mod is not None:
        rollouts = rollouts.modulo(source.vocab_mod)
    return rollouts
