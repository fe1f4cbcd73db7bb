"""A run that is ready to begin: data read, settings and model checked against it, nothing on a device yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dta_jax.attention_backends import require_backend
from dta_jax.errors import InputError
from dta_jax.learner import Learner, model_config
from dta_jax.live import check_fits
from dta_jax.qwen3 import Qwen3
from dta_jax.recorded import RecordedSource, load_source
from dta_jax.settings import LiveRollouts, Train

SAMPLED_TOKENS: Final = 256  # per episode, for a first guess at how many entries a batch has


@dataclass(frozen=True, eq=False)
class Run:
    """A run that is ready to begin.

    Attributes:
      learner: what a step does to the weights.
      source: where its batches come from.
      sharing: tokens of the first batch, flat and as a tree, where it is known.
    """

    learner: Learner
    source: RecordedSource | LiveRollouts
    sharing: tuple[int, int] | None = None

    @property
    def train(self) -> Train:
        """The settings."""
        return self.learner.train


def prepare(train: Train) -> Run:
    """Reads and checks everything but the weights.

    Raises:
      InputError: data or model folder that cannot be used, a planner that cannot plan the first batch,
        attention kernels asked for by name where they can't run.
    """
    require_backend(train.planner.attention)
    config = model_config(train)
    model = Qwen3(config, attention_backend=train.planner.attention)
    if isinstance(train.rollouts, LiveRollouts):
        longest = check_fits(train.rollouts, config, train.max_length)
        entries = train.batch_groups * train.rollouts.collect.group_size * SAMPLED_TOKENS
        return Run(Learner.build(train, model, longest=longest, entries=entries), train.rollouts)
    source = load_source(train, config.vocab_size)
    if source.longest > config.max_position_embeddings:
        raise InputError(
            "model config",
            "max_position_embeddings",
            expected=f"at least {source.longest}, the longest sequence",
            actual=config.max_position_embeddings,
            hint="lower Train.max_length to find the sequence, or use a model for longer contexts",
        )
    first = source.batch(1)
    learner = Learner.build(
        train, model, longest=source.longest, entries=source.entries, example=first.samples
    )
    tree = sum(schedule.trie.num_rows for schedule in learner.plan(first).schedules)
    return Run(learner, source, (sum(map(len, first.samples.sequences)), tree))
