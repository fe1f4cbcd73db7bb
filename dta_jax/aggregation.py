"""How losses of entries become one number: weights, made on the host from the whole batch.

Every mean of a loss over tokens or sequences is `sum_e weight[e] * loss(e)`. The denominators are counted
here once, over all entries of the optimizer's batch, so no later split into chunks, minibatches or
ranks can change them.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np

from dta_jax.errors import InputError
from dta_jax.types import Samples

Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "sequence_sum_token_mean", "constant"]
AGGREGATIONS: Final = ("token_mean", "sequence_mean", "sequence_sum_token_mean", "constant")


def aggregation_weights(
    samples: Samples,
    kind: Aggregation,
    *,
    divisor: float | None = None,
    unit: np.ndarray | None = None,
    token_weight: np.ndarray | None = None,
    dtype: type = np.float32,
) -> np.ndarray:
    """Weights that turn a sum over entries into the batch's loss.

    With U units (sequences, unless `unit` groups them) that have weight, n_u the entries of unit u, n all
    entries (each counted with its token weight w):

        token_mean               w / n          every token counts the same
        sequence_mean            w / (n_u U)    every unit counts the same
        sequence_sum_token_mean  w / n_u        sum over units of their token means
        constant                 w / (divisor U)  sum over tokens, mean over units, over a fixed length

    Args:
      samples: the whole batch.
      kind: one of the above.
      divisor: tokens, for "constant" only; 1 makes a unit's loss its token sum.
      unit: int[N], the unit of each sequence (such as the rollout whose turns they are); None makes
        every sequence a unit of its own.
      token_weight: float[E], at least 0, relative weights of entries; None for 1.
      dtype: of the result; computed in float64.

    Returns:
      [E] weights; all 0 where nothing has weight.

    Raises:
      InputError: an unknown kind, a divisor that is missing, superfluous or not positive, arrays of the
        wrong length, a negative weight.
    """
    _check(samples, kind, divisor, unit, token_weight)
    sequence = samples.sequence
    weight = np.ones(len(sequence)) if token_weight is None else token_weight.astype(np.float64)
    if not weight.any():
        return np.zeros(len(sequence), dtype)
    if kind == "token_mean":
        return (weight / weight.sum()).astype(dtype)
    of_entry = np.unique((sequence if unit is None else unit[sequence]), return_inverse=True)[1]
    total = np.bincount(of_entry, weight)
    units = np.count_nonzero(total)
    if kind == "constant":
        assert divisor is not None
        return (weight / (divisor * units)).astype(dtype)
    share = weight / np.where(total > 0, total, 1)[of_entry]
    return (share / units if kind == "sequence_mean" else share).astype(dtype)


def _check(
    samples: Samples,
    kind: str,
    divisor: float | None,
    unit: np.ndarray | None,
    token_weight: np.ndarray | None,
) -> None:
    def fail(field: str, expected: object, actual: object) -> None:
        raise InputError("aggregation", field, expected=expected, actual=actual)

    if kind not in AGGREGATIONS:
        fail("kind", f"one of {', '.join(AGGREGATIONS)}", repr(kind))
    if kind == "constant" and (divisor is None or not 0 < divisor < np.inf):
        fail("divisor", "a positive number of tokens, because kind is 'constant'", divisor)
    if kind != "constant" and divisor is not None:
        fail("divisor", f"none, because kind is {kind!r}", divisor)
    if unit is not None and len(unit) != len(samples.sequences):
        fail("unit", f"{len(samples.sequences)} numbers, one per sequence", len(unit))
    if token_weight is not None:
        if len(token_weight) != len(samples.sequence):
            fail("token_weight", f"{len(samples.sequence)} numbers, one per entry", len(token_weight))
        if not ((token_weight >= 0) & (token_weight < np.inf)).all():
            fail("token_weight", "finite numbers of at least 0", token_weight.min())
