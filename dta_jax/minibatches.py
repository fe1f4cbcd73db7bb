"""A batch in parts that are trained on one after the other: cut along its trie, so that prefixes stay shared.

Units (what the loss couples, and whole episodes where their tokens are one unit) are put in the order in
which the trie's preorder meets them, and the order is cut where the parts have equal numbers of entries.
Neighbours in preorder share the longest prefixes, so few tokens fall into two parts. Weights are the
batch's: a split changes no denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples


@dataclass(frozen=True, eq=False)
class Part:
    """Some of a batch's samples.

    Attributes:
      samples: of the part; `values` are the batch's at `entry`.
      entry: int64[e], the batch's entries that it has.
      unit: int64[e], their units.
    """

    samples: Samples
    entry: np.ndarray
    unit: np.ndarray


def split_along_trie(samples: Samples, unit: np.ndarray, parts: int) -> list[Part]:
    """Cuts samples into at most `parts` parts with about as many entries each; none is empty.

    Args:
      samples: the batch.
      unit: int[E], ids of what must stay together. All entries of a sequence should have one unit.
      parts: at least 1.

    Returns:
      Parts that together have every entry once. A unit with more than its share of entries makes a part of
      its own, so there may be fewer than `parts`.
    """
    ids = np.unique(unit, return_inverse=True)[1]
    if parts == 1 or ids.max(initial=0) == 0:
        return [_part(samples, unit, np.arange(len(unit)))]
    rows = entry_rows(build_trie(samples.sequences), samples.sequence, samples.position)
    entries = np.bincount(ids)
    met = np.full(len(entries), np.iinfo(np.int64).max)
    np.minimum.at(met, ids, rows)
    order = np.argsort(met, kind="stable")
    before = np.cumsum(entries[order]) - entries[order] / 2
    part_of_unit = np.empty(len(entries), np.int64)
    part_of_unit[order] = np.minimum((before * parts / len(unit)).astype(np.int64), parts - 1)
    return [_part(samples, unit, np.flatnonzero(part_of_unit[ids] == p)) for p in np.unique(part_of_unit)]


def _part(samples: Samples, unit: np.ndarray, entry: np.ndarray) -> Part:
    return Part(samples.take(entry), entry, unit[entry])
