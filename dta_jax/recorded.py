"""Recorded rollouts as a source of batches: which groups each step takes, and frozen log-probabilities.

Batches are made of whole groups (tasks). The order of an epoch is a permutation drawn from (seed,
epoch), so batch `step` is a function of the step alone: whoever knows the step knows the data position.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np

from dta_jax.collect.evaluation import Evaluate
from dta_jax.errors import InputError, writing
from dta_jax.learner import Learner, TrainState, source_of
from dta_jax.model import Params
from dta_jax.objective import Batch, GroupNormalized, Objective, PreferencePairs, has_differences, make_batch
from dta_jax.phases import phase
from dta_jax.plan_ahead import PlanAhead
from dta_jax.rollouts import Rollouts, load_rollouts, samples_from_rollouts
from dta_jax.settings import LiveRollouts, RecordedRollouts, Train
from dta_jax.step_work import Planned
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts

Score: TypeAlias = Callable[[Batch], np.ndarray]  # log-probabilities float[E] under frozen weights


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
        """The groups of the batch of `step` (from 0)."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_groups)
        return order[batch * self.batch_groups : (batch + 1) * self.batch_groups]


@dataclass(frozen=True, eq=False)
class RecordedSource:
    """All rollouts of a run, in groups, checked against the model.

    Attributes:
      rollouts: R rows; their token ids are below the vocabulary.
      groups: int[] per group, its rows.
      order: which groups each step takes.
      objective: how they become what the loss reads.
      entries: the most tokens with loss in a batch, counted per sequence.
      longest: tokens of the longest sequence.
      left_out: tasks whose rewards do not differ enough, from which nothing can be learnt.
    """

    rollouts: Rollouts
    groups: tuple[np.ndarray, ...]
    order: BatchOrder
    objective: Objective
    entries: int
    longest: int
    left_out: tuple[int, ...] = ()

    def batch(self, step: int, values: Mapping[str, np.ndarray] | None = None) -> Batch:
        """The batch of a step, from 1.

        Args:
          step: from 1.
          values: float32[sum] by name, log-probabilities of all rollouts' tokens.
        """
        rows = self.rows(step)
        index = self.tokens(rows)
        own = {name: array[index] for name, array in (values or {}).items()}
        return make_batch(self.rollouts.take(rows.tolist()), self.objective, own)

    def rows(self, step: int) -> np.ndarray:
        """int64[], the rows of the batch of a step, from 1."""
        return np.concatenate([self.groups[g] for g in self.order.groups(step - 1)])

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """int64[], where the tokens of some rows are in `rollouts.tokens`."""
        starts, ends = self.rollouts.offsets[rows], self.rollouts.offsets[rows + 1]
        return np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])


def load_source(train: Train, vocab_size: int) -> RecordedSource:
    """Reads or generates a run's rollouts, and checks all that could go wrong in a later step.

    Groups that have no gradient are left out: those without loss, those whose rewards are all equal
    (`GroupNormalized.skip_equal`), those without a pair (`PreferencePairs`).

    Args:
      train: the settings of a run on recorded or synthetic rollouts.
      vocab_size: of the model.

    Raises:
      InputError: see `load_rollouts` and `samples_from_rollouts`; rewards or groups are needed and missing;
        nothing is left to train on, or there are fewer groups than a batch takes.
    """
    assert not isinstance(train.rollouts, LiveRollouts), "recorded rollouts only"
    objective, batch_groups = train.objective, train.batch_groups
    rollouts = _load(train.rollouts)
    # Checks ids and lengths of everything; the result is made again, batch by batch.
    samples = samples_from_rollouts(rollouts, vocab_size=vocab_size, max_length=train.max_length)
    if not len(samples.sequence):
        raise InputError(rollouts.source, "completion_spans", expected="tokens with loss", actual="none")
    group_of = rollouts.task_id if rollouts.task_id is not None else np.arange(rollouts.num_rollouts)
    entries = np.bincount(samples.values["rollout"], minlength=rollouts.num_rollouts)
    groups = [np.flatnonzero((group_of == g) & (entries > 0)) for g in np.unique(group_of[entries > 0])]
    credit = objective.credit
    if credit is not None:
        rollouts.require("reward")
    if isinstance(credit, PreferencePairs | GroupNormalized):
        rollouts.require("task_id")
    differs = [has_differences(rollouts.take(group.tolist()), objective) for group in groups]
    if not any(differs):
        expected = credit.needs if isinstance(credit, PreferencePairs) else "a group whose rewards differ"
        raise InputError(
            rollouts.source, "reward", expected=expected, actual="none", hint="there is nothing to learn from"
        )
    left_out = tuple(int(group_of[g[0]]) for g, use in zip(groups, differs, strict=True) if not use)
    groups = [group for group, use in zip(groups, differs, strict=True) if use]
    groups = groups[: train.max_groups]
    if len(groups) < batch_groups:
        raise InputError(
            "Train",
            "batch_groups",
            expected=f"at most {len(groups)}, the groups in {rollouts.source}",
            actual=batch_groups,
        )
    longest = np.zeros(rollouts.num_rollouts, np.int64)
    np.maximum.at(longest, samples.values["rollout"], samples.position + 1)  # sequences end with a loss
    largest = np.sort([entries[group].sum() for group in groups])[-batch_groups:]
    return RecordedSource(
        rollouts=rollouts,
        groups=tuple(groups),
        order=BatchOrder(len(groups), batch_groups, train.seed),
        objective=objective,
        entries=int(largest.sum()),
        longest=max(int(longest[group].max()) for group in groups),
        left_out=left_out,
    )


def frozen_logprobs(
    source: RecordedSource,
    names: Sequence[str],
    score: Callable[[], Score],
    file: Path,
    *,
    steps: int,
    start: int,
) -> dict[str, np.ndarray]:
    """Log-probabilities of all rollouts under weights that never change, float32[sum], under each of `names`.

    A group is always scored together with the other groups of its batch in the first epoch, so what it
    gets does not depend on how often the run was interrupted or made longer.

    Args:
      source: the rollouts.
      names: what the loss calls them; nothing is done for none.
      score: loads the weights; called only if something is left to score.
      file: where they are kept; at `start` 0 everything is scored anew: what lies there may be of others.
      steps: the run's last step.
      start: the step that it goes on from.
    """
    if not names:
        return {}
    size = source.rollouts.tokens.size
    known = _load_logprobs(file, size) if start and file.exists() else np.full(size, np.nan, np.float32)
    scorer: Score | None = None
    for step in range(1, min(steps, source.order.batches_per_epoch) + 1):
        batch = source.batch(step)
        index = source.tokens(source.rows(step))[batch.token]
        if np.isnan(known[index]).any():
            scorer = scorer or score()
            known[index] = scorer(batch)
    if scorer is not None and jax.process_index() == 0:
        partial = file.with_name(f".{file.stem}.partial.npy")
        with writing(file):
            np.save(partial, known)
            os.replace(partial, file)
    return dict.fromkeys(names, known)


def _load_logprobs(file: Path, size: int) -> np.ndarray:
    try:
        known = np.load(file, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(file, "file", expected="a whole .npy file", actual=error) from None
    if known.shape != (size,) or known.dtype != np.float32:
        actual = f"{known.dtype}{list(known.shape)}"
        raise InputError(file, "array", expected=f"float32[{size}], one per token", actual=actual)
    return known


def _load(source: SyntheticRollouts | RecordedRollouts) -> Rollouts:
    if isinstance(source, SyntheticRollouts):
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


class RecordedFeed:
    """The batches of a run on recorded rollouts, planned one step ahead. A context manager.

    Args:
      learner: of the run.
      source: the rollouts.
      values: float32[sum] by name, log-probabilities of all rollouts' tokens.
    """

    def __init__(self, learner: Learner, source: RecordedSource, values: Mapping[str, np.ndarray]):
        self._learner, self._source, self._values = learner, source, values
        self._plans = PlanAhead(self._plan, last=learner.train.steps)

    def __enter__(self) -> RecordedFeed:
        return self

    def __exit__(self, *error: object) -> None:
        self._plans.close()

    def get(self, step: int) -> Planned:
        """The batch of a step."""
        with phase("plan"):
            return self._plans.get(step)

    def publish(self, state: TrainState, step: int) -> None:
        """Recorded rollouts wait for no weights."""

    def evaluate(self, how: Evaluate, step: int) -> dict[str, float]:
        """Recorded rollouts have no tasks to evaluate."""
        raise AssertionError("settings refuse it")

    def snapshot(self) -> None:
        """Seed and step say everything."""

    def _plan(self, step: int) -> Planned:
        epoch = (step - 1) // self._source.order.batches_per_epoch
        return self._learner.plan(self._source.batch(step, self._values), {"epoch": epoch})


def logprobs_of_the_start(
    learner: Learner,
    source: RecordedSource,
    out: Path,
    start: int,
    check: Callable[[str, str, Params], None] = lambda name, source, params: None,
) -> dict[str, np.ndarray]:
    """Log-probabilities that the loss reads and no step changes, float32[sum] by name.

    `old_logp` is the rollouts' own, or, where they bring none, that of the starting weights. `ref_logp` is
    that of the reference, or, without one, that of the starting weights. See `frozen_logprobs`.

    Args:
      learner: of the run.
      source: the rollouts.
      out: the run's folder.
      start: the step that the run goes on from.
      check: is given the name, the source and the values of weights that are read, and may refuse them.
    """
    train = learner.train
    missing = {"old_logp"} & train.reads if source.rollouts.logprobs is None else set()
    by_reference = {"ref_logp"} & train.reads if train.reference is not None else set()
    by_start = missing | ({"ref_logp"} & train.reads) - by_reference

    def starting() -> Score:
        params = learner.optimizer.gather(learner.starting_params(), learner.model.config.dtype)
        check("starting", source_of(train.model), params)
        return functools.partial(learner.score, params)

    def reference() -> Score:
        params = learner.reference_params()
        check("reference", source_of(train.reference), params)
        return functools.partial(learner.score, params)

    frozen = functools.partial(frozen_logprobs, source, steps=train.steps, start=start)
    return frozen(sorted(by_start), starting, out / "starting_logp.npy") | frozen(
        sorted(by_reference), reference, out / "reference_logp.npy"
    )
