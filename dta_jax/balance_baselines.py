"""The published ways to distribute a tree's leaves over ranks, to compare with.

All return int64[J], the rank of each leaf. Ties go to the lowest rank and the first leaf.

Source: AReaL-DTA (arXiv 2602.00482). Its code distributes leaves, too, except by `ffd_tokens`, which it runs
on every sequence; on leaves that is the stronger opponent, for no prefix leaves its continuation.
"""

from __future__ import annotations

import numpy as np

from dta_jax.balance_tree import CostTree, running_sum
from dta_jax.types import NO_PARENT

_PRECISION = 1e-9  # of the binary search, relative to the whole tree's cost


def ffd_tokens(tree: CostTree, num_ranks: int) -> np.ndarray:
    """Longest path first, to the rank with the least so far; sharing is ignored."""
    length = tree.path_cost[tree.leaf]
    owner = np.zeros(len(length), np.int64)
    load = np.zeros(num_ranks)
    for j in np.argsort(-length, kind="stable"):
        owner[j] = load.argmin()
        load[owner[j]] += length[j]
    return owner


def ffd_tree(tree: CostTree, num_ranks: int) -> np.ndarray:
    """In depth-first order, to the rank whose own tree costs the least so far."""
    owner = np.zeros(len(tree.leaf), np.int64)
    load = np.zeros(num_ranks)
    present = np.zeros((num_ranks, len(tree.cost)), bool)
    for j, leaf in enumerate(tree.leaf.tolist()):
        rank = int(load.argmin())
        path = np.append(tree.ancestors(leaf), leaf)
        load[rank] += tree.cost[path] @ ~present[rank, path]
        present[rank, path] = True
        owner[j] = rank
    return owner


def dfs_contiguous(tree: CostTree, num_ranks: int) -> np.ndarray:
    """Contiguous parts of the depth-first order, with the smallest largest cost that such parts can have.

    Leaf `j` adds to a part what its path does not share with leaf `j - 1`, and the part's first leaf
    adds its whole path. Whether a limit is feasible, a greedy pass says; the limit is found by bisection.
    """
    if not len(tree.leaf):
        return np.zeros(0, np.int64)
    parent = tree.parent[np.append(0, tree.leaf[:-1] + 1)]  # of the first segment not shared with leaf j-1
    shared = np.where(parent == NO_PARENT, 0.0, tree.path_cost[parent])
    total = running_sum(tree.path_cost[tree.leaf] - shared)

    def parts(limit: float) -> list[int]:
        cuts = [0]
        while cuts[-1] < len(shared) and len(cuts) <= num_ranks:
            j = cuts[-1]
            stop = int(np.searchsorted(total, total[j] + limit - shared[j], side="right")) - 1
            cuts.append(max(stop, j + 1))
        return cuts

    low, high = float(tree.path_cost.max()), float(tree.cost.sum()) * (1 + _PRECISION)
    while high - low > _PRECISION * high:
        limit = (low + high) / 2
        low, high = (low, limit) if parts(limit)[-1] == len(shared) else (limit, high)
    return np.repeat(np.arange(len(parts(high)) - 1), np.diff(parts(high)))
