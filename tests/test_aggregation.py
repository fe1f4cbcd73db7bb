"""Whole-batch weights: each mean as a loop would take it, and no split of the batch changes it."""

from collections.abc import Callable

import numpy as np
import pytest

from dta_jax.aggregation import AGGREGATIONS, aggregation_weights
from dta_jax.errors import InputError
from dta_jax.types import Samples


def samples_with(entries: list[int]) -> Samples:
    """Sequence i has `entries[i]` tokens with loss."""
    return Samples(
        [np.zeros(n + 1, np.int32) for n in entries],
        np.repeat(np.arange(len(entries)), entries),
        np.concatenate([np.arange(1, n + 1) for n in entries]),
    )


def mean_of_means(losses: list[np.ndarray]) -> float:
    return float(np.mean([x.mean() for x in losses if len(x)]))


NAIVE: dict[str, Callable[[list[np.ndarray]], float]] = {
    "token_mean": lambda losses: float(np.concatenate(losses).mean()),
    "sequence_mean": mean_of_means,
    "sequence_sum_token_mean": lambda losses: sum(x.mean() for x in losses if len(x)),
    "constant": lambda losses: float(np.mean([x.sum() / 50 for x in losses if len(x)])),
}


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_weights_make_the_mean_that_they_are_named_after(kind: str, rng: np.random.Generator) -> None:
    samples = samples_with([3, 0, 1, 8, 5])  # a sequence without loss counts nowhere
    losses = rng.normal(size=17)
    weight = aggregation_weights(samples, kind, divisor=50 if kind == "constant" else None, dtype=np.float64)
    per_sequence = [losses[samples.sequence == i] for i in range(5)]
    np.testing.assert_allclose(weight @ losses, NAIVE[kind](per_sequence), rtol=1e-14)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_units_of_several_sequences(kind: str, rng: np.random.Generator) -> None:
    """Completions of one rollout count as one sequence; the rollouts' ids may be any numbers."""
    samples, losses = samples_with([3, 4, 1, 8, 5]), rng.normal(size=21)
    unit = np.array([70, -2, 70, 9, -2])
    divisor = 50 if kind == "constant" else None
    weight = aggregation_weights(samples, kind, divisor=divisor, unit=unit, dtype=np.float64)
    per_unit = [losses[unit[samples.sequence] == u] for u in (70, -2, 9)]
    np.testing.assert_allclose(weight @ losses, NAIVE[kind](per_unit), rtol=1e-14)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_token_weights_count_in_numerator_and_denominator(kind: str, rng: np.random.Generator) -> None:
    """A weight of 2 is the token twice, a weight of 0 is the token left out."""
    divisor = 50 if kind == "constant" else None
    weighted = aggregation_weights(
        samples_with([3, 2]), kind, divisor=divisor, token_weight=np.array([1, 2, 0, 0, 0])
    )
    repeated = aggregation_weights(samples_with([3]), kind, divisor=divisor)
    np.testing.assert_allclose(weighted, [repeated[0], 2 * repeated[0], 0, 0, 0], rtol=1e-7)
    assert not aggregation_weights(samples_with([2]), kind, divisor=divisor, token_weight=np.zeros(2)).any()


def test_token_mean_is_0_65_however_the_batch_is_split(rng: np.random.Generator) -> None:
    """100 tokens of loss 2 and 900 of loss 0.5; the mean of the parts' means would be 1.25."""
    samples = samples_with([100, 900])
    losses = np.repeat([2.0, 0.5], [100, 900])
    weight = aggregation_weights(samples, "token_mean").astype(np.float64)
    splits = [
        [np.arange(1000)],
        [np.arange(100), np.arange(100, 1000)],
        np.array_split(rng.permutation(1000), 7),
    ]
    for parts in splits:
        np.testing.assert_allclose(sum(weight[part] @ losses[part] for part in parts), 0.65, rtol=1e-7)


def test_weights_follow_their_sequences_when_these_are_permuted(rng: np.random.Generator) -> None:
    lengths = np.array([3, 1, 8, 5])
    order = rng.permutation(4)
    straight = aggregation_weights(samples_with(lengths.tolist()), "sequence_mean")
    moved = aggregation_weights(samples_with(lengths[order].tolist()), "sequence_mean")
    pieces = np.split(straight, np.cumsum(lengths)[:-1])
    np.testing.assert_array_equal(moved, np.concatenate([pieces[i] for i in order]))


def test_weights_are_float32_unless_asked() -> None:
    assert aggregation_weights(samples_with([3]), "token_mean").dtype == np.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "mean"}, "aggregation: kind: expected one of token_mean, .* got 'mean'"),
        ({"kind": "constant"}, "aggregation: divisor: expected a positive number of tokens"),
        ({"kind": "constant", "divisor": 0}, "aggregation: divisor: .* got 0"),
        ({"kind": "token_mean", "divisor": 2}, "aggregation: divisor: expected none"),
        ({"kind": "token_mean", "unit": np.zeros(3)}, "aggregation: unit: expected 2 numbers"),
        ({"kind": "token_mean", "token_weight": np.ones(2)}, "token_weight: expected 5 numbers"),
        ({"kind": "token_mean", "token_weight": np.array([1, 1, 1, 1, -1])}, "token_weight: .* got -1"),
        ({"kind": "token_mean", "token_weight": np.array([1, 1, 1, 1, np.nan])}, "token_weight: .* got nan"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        aggregation_weights(samples_with([3, 2]), **settings)
