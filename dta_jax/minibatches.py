"""A batch in parts that are trained on one after the other: cut along its trie, so that prefixes stay shared.

Units (what the loss couples) are put in the order in which the trie's preorder meets them: neighbours share
the longest prefixes. The order is cut near the places where the parts would have equal numbers of entries,
where neighbours share least, so few tokens fall into two parts. Weights are the batch's: a split changes no
denominator.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np

from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import NO_PARENT, Samples, Trie

TOLERANCE: Final = 0.25  # a cut may be so far from where parts are equal, in parts


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
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    entries = np.bincount(ids)
    met = np.full(len(entries), trie.num_rows)
    np.minimum.at(met, ids, rows)
    order = np.argsort(met, kind="stable")
    cuts = _cuts(np.cumsum(entries[order]), _shared_before(trie, met[order]), parts)
    part_of_unit = np.empty(len(entries), np.int64)
    part_of_unit[order] = np.searchsorted(cuts, np.arange(len(order)), side="right")
    return [_part(samples, unit, np.flatnonzero(part_of_unit[ids] == p)) for p in np.unique(part_of_unit)]


def _cuts(end: np.ndarray, shared: np.ndarray, parts: int) -> list[int]:
    """The units, int[U] in order, at which a new part begins.

    Args:
      end: entries up to and with each unit.
      shared: tokens that each unit shares with the one before.
      parts: how many are wanted.
    """
    cuts, before = [], np.append(0, end[:-1])
    for target in np.arange(1, parts) * (end[-1] / parts):
        away = np.abs(before - target)
        near = np.flatnonzero(away <= TOLERANCE * end[-1] / parts)
        if not near.size:
            near = np.array([np.argmin(away)])
        cuts.append(int(near[np.lexsort((away[near], shared[near]))[0]]))
    return sorted({cut for cut in cuts if cut > 0})


def _shared_before(trie: Trie, row: np.ndarray) -> np.ndarray:
    """int64[U], how many tokens the path of each row shares with that of the row before; rows ascend."""
    shared = np.zeros(len(row), np.int64)
    for i, (previous, this) in enumerate(itertools.pairwise(row.tolist()), start=1):
        ancestor = previous
        while ancestor != NO_PARENT and trie.subtree_end[ancestor] <= this:
            ancestor = trie.parent[ancestor]
        shared[i] = 0 if ancestor == NO_PARENT else trie.depth[ancestor] + 1
    return shared


def _part(samples: Samples, unit: np.ndarray, entry: np.ndarray) -> Part:
    return Part(samples.take(entry), entry, unit[entry])
