"""The trie as the balancer sees it: segments, what each costs, and which of them a rank must run.

A rank runs every row on the paths of its sequences once. A sequence that is a prefix of another adds nothing
to that one's rank, so what is distributed are *leaves*, and prefixes and duplicates follow them. With
segments in preorder, whatever lies under segment `m` is one range of segments `[m, end[m])` and one range of
leaves. Sums over subtrees are differences of prefix sums; sums over paths are, too, once the segments that
have ended are taken off.

Letters: M segments, J leaves, N sequences, K ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dta_jax.planner import segments_of
from dta_jax.types import NO_PARENT, Trie


def running_sum(values: np.ndarray) -> np.ndarray:
    """[..., n] -> [..., n+1]: entry `i` is the sum of the first `i` values."""
    total = np.zeros((*values.shape[:-1], values.shape[-1] + 1), values.dtype)
    np.cumsum(values, axis=-1, out=total[..., 1:])
    return total


@dataclass(frozen=True, eq=False)
class CostTree:
    """Segments in preorder, each with an additive cost.

    Attributes:
      cost: float64[M], cost of running a segment.
      parent: int64[M], the segment above, or `NO_PARENT`.
      end: int64[M], one past the last segment of the subtree.
    """

    cost: np.ndarray
    parent: np.ndarray
    end: np.ndarray

    @cached_property
    def leaf(self) -> np.ndarray:
        """int64[J], the segments without children, ascending."""
        return np.flatnonzero(self.end == np.arange(len(self.end)) + 1)

    @cached_property
    def leaves(self) -> tuple[np.ndarray, np.ndarray]:
        """int64[M] twice: the leaves under segment `m` are `first[m] <= j < stop[m]`."""
        return np.searchsorted(self.leaf, np.arange(len(self.end))), np.searchsorted(self.leaf, self.end)

    @cached_property
    def path_cost(self) -> np.ndarray:
        """float64[M], cost of all segments from the root to each segment, itself included."""
        ended = np.argsort(self.end, kind="stable")
        before = np.searchsorted(self.end[ended], np.arange(len(self.end)), side="right")
        return running_sum(self.cost)[1:] - running_sum(self.cost[ended])[before]

    @cached_property
    def subtree_cost(self) -> np.ndarray:
        """float64[M], cost of all segments under each segment, itself included."""
        return running_sum(self.cost)[self.end] - running_sum(self.cost)[:-1]

    def ancestors(self, segment: int) -> np.ndarray:
        """Segments from the root to `segment`'s parent."""
        return np.flatnonzero(self.end[:segment] > segment)

    def leaf_counts(self, chosen: np.ndarray) -> np.ndarray:
        """bool[..., J] -> int32[..., M]: chosen leaves under each segment; it must be run where not 0."""
        total = running_sum(chosen.astype(np.int32))
        first, stop = self.leaves
        return total[..., stop] - total[..., first]

    def loads(self, owner: np.ndarray, num_ranks: int) -> np.ndarray:
        """float64[K], cost of what each rank must run; `owner` int64[J] is the rank of each leaf."""
        present = self.leaf_counts(owner == np.arange(num_ranks)[:, None]) > 0
        return present @ self.cost

    def restricted(self, leaves: np.ndarray) -> CostTree:
        """The tree of some leaves: bool[J]. Its leaves are those, in the same order."""
        kept = np.flatnonzero(self.leaf_counts(leaves))
        parent = np.searchsorted(kept, self.parent[kept])
        parent[self.parent[kept] == NO_PARENT] = NO_PARENT
        return CostTree(self.cost[kept], parent, np.searchsorted(kept, self.end[kept]))

    def lower_bound(self, num_ranks: int) -> float:
        """No distribution's largest load is smaller: every rank in use runs the common root, and somebody
        the most expensive path."""
        if not len(self.cost):
            return 0.0
        common = self.cost[0] if self.end[0] == len(self.end) else 0.0
        mean = (self.cost.sum() + (num_ranks - 1) * common) / num_ranks
        return float(max(mean, self.path_cost.max()))


def cost_tree(trie: Trie, row_cost: np.ndarray) -> CostTree:
    """The trie's segments with the summed costs of their rows, float64[T]."""
    segments = segments_of(trie)
    if not trie.num_rows:
        return CostTree(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
    return CostTree(
        np.add.reduceat(row_cost, segments.start),
        segments.parent.astype(np.int64),
        np.searchsorted(segments.start, segments.subtree_end),
    )


def leaf_of_sequences(trie: Trie) -> np.ndarray:
    """int64[N], for each sequence the first leaf at or under its last row."""
    leaf_rows = np.flatnonzero(trie.subtree_end == np.arange(trie.num_rows) + 1)
    return np.searchsorted(leaf_rows, trie.tail)
