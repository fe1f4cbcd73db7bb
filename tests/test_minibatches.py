"""Minibatches: every entry once, units whole, prefixes shared, denominators untouched."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.aggregation import aggregation_weights
from dta_jax.minibatches import split_along_trie
from dta_jax.rollouts import samples_from_rollouts
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.trie import build_trie
from dta_jax.types import Samples

SHAPE = SyntheticRollouts(vocab_size=50, tasks=6, trials=4, turns=3, system_tokens=20)


def samples_and_rollouts() -> tuple[Samples, np.ndarray]:
    samples = samples_from_rollouts(generate_rollouts(SHAPE))
    return samples, samples.values["rollout"]


@settings(max_examples=40, deadline=None)
@given(parts=st.integers(1, 40), by_rollout=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_every_entry_is_in_one_part_and_units_stay_whole(parts, by_rollout, seed):
    samples, rollout = samples_and_rollouts()
    order = np.random.default_rng(seed).permutation(len(rollout))
    samples, unit = samples.take(order), (rollout if by_rollout else samples.sequence)[order]
    found = split_along_trie(samples, unit, parts)
    assert 1 <= len(found) <= parts
    entries = np.concatenate([part.entry for part in found])
    assert sorted(entries.tolist()) == list(range(len(unit)))
    units = [set(part.unit.tolist()) for part in found]
    assert sum(map(len, units)) == len(set().union(*units))
    for part in found:
        own = part.samples
        for e in range(len(part.entry)):
            mine = own.sequences[own.sequence[e]][: own.position[e] + 1]
            whole = samples.sequences[samples.sequence[part.entry[e]]]
            assert mine.tolist() == whole[: samples.position[part.entry[e]] + 1].tolist()


def test_parts_have_about_as_many_entries_each():
    samples, rollout = samples_and_rollouts()
    sizes = [len(part.entry) for part in split_along_trie(samples, rollout, 4)]
    largest = np.bincount(rollout).max()
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 2 * largest


def test_a_cut_along_the_trie_computes_few_tokens_twice():
    """Against parts made by length, as trainers that know no tree make them."""
    samples, rollout = samples_and_rollouts()

    def rows(some: Samples) -> int:
        return build_trie(some.sequences).num_rows

    along = sum(rows(part.samples) for part in split_along_trie(samples, rollout, 4))
    lengths = np.array([len(s) for s in samples.sequences])[samples.sequence]
    longest = np.array([lengths[rollout == r].max() for r in range(rollout.max() + 1)])
    by_length = np.argsort(np.argsort(-longest, kind="stable"), kind="stable") % 4
    other = sum(rows(samples.take(np.flatnonzero(by_length[rollout] == p))) for p in range(4))
    whole = rows(samples)
    assert along - whole <= 0.4 * (other - whole)


def test_a_unit_larger_than_a_part_stays_whole():
    samples, rollout = samples_and_rollouts()
    unit = np.where(rollout < 20, 0, rollout)
    found = split_along_trie(samples, unit, 8)
    assert [0 in part.unit for part in found].count(True) == 1
    assert len(split_along_trie(samples, np.zeros_like(unit), 8)) == 1


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_a_token_mean_has_the_batchs_denominator(parts):
    """100 tokens of loss 2.0 and 900 of 0.5 have the mean 0.65 however they are split."""
    sequences = [np.full(n + 1, i, np.int32) for i, n in enumerate((100, 300, 600))]
    sequence = np.repeat(np.arange(3, dtype=np.int32), (100, 300, 600))
    position = np.concatenate([np.arange(1, n + 1) for n in (100, 300, 600)]).astype(np.int32)
    samples = Samples(sequences, sequence, position)
    loss = np.where(sequence == 0, 2.0, 0.5)
    weight = aggregation_weights(samples, "token_mean")
    found = split_along_trie(
        Samples(sequences, sequence, position, {"weight": weight}), np.arange(1000), parts
    )
    means = [np.sum(part.samples.values["weight"] * loss[part.entry]) * len(found) for part in found]
    assert np.mean(means) == pytest.approx(0.65, rel=1e-5)
