"""Splits a batch's sequences over data-parallel ranks so that the most loaded rank has as little as possible.

    balance          trie, number of ranks, cost, method  ->  Assignment
    compare_methods  the figures of several methods and numbers of ranks, timed

A rank runs each distinct prefix of its sequences once. So two sequences that share a prefix are cheaper on
one rank than on two, and a rank's load is the size of a subtree, not a sum over its sequences. The files:

    balance_cost       what is balanced: cost of rows, or of a rank's compiled schedule
    balance_tree       the trie's segments, with sums over subtrees and paths
    balance_baselines  the published methods
    balance_search     ours
    balance_report     figures of a distribution as text, JSON and picture

Source: AReaL-DTA (arXiv 2602.00482), for the problem and the baselines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dta_jax.balance_baselines import dfs_contiguous, ffd_tokens, ffd_tree
from dta_jax.balance_cost import RowCost, ScheduleCost, rank_trie
from dta_jax.balance_report import BalanceReport
from dta_jax.balance_search import Effort, refine, search
from dta_jax.balance_tree import CostTree, cost_tree, leaf_of_sequences
from dta_jax.errors import InputError
from dta_jax.types import Trie

__all__ = [
    "AUTO",
    "METHODS",
    "Assignment",
    "RowCost",
    "ScheduleCost",
    "balance",
    "compare_methods",
    "rank_trie",
]

METHODS: Final[dict[str, Callable[[CostTree, int], np.ndarray]]] = {
    "search": search,
    "ffd_tokens": ffd_tokens,
    "ffd_tree": ffd_tree,
    "dfs_contiguous": dfs_contiguous,
}
AUTO: Final = "auto"
_COMPILED: Final = 16  # times the trie's rows that the search by compiled costs compiles at most
_PLAUSIBLE: Final = 1.1  # a candidate is compiled if its estimate is at most this times the best one's


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which rank trains on which sequence.

    Attributes:
      rank: int32[N], the rank of every sequence. Duplicates are together, and a prefix of another sequence is
        with one that continues it.
      report: what that costs.
    """

    rank: np.ndarray
    report: BalanceReport

    def sequences(self) -> list[np.ndarray]:
        """K arrays int64[n_k]: the sequences of every rank, ascending."""
        return [np.flatnonzero(self.rank == k) for k in range(self.report.num_ranks)]


def balance(
    trie: Trie, num_ranks: int, cost: RowCost | ScheduleCost | None = None, method: str = AUTO
) -> Assignment:
    """Assigns every sequence to one of K ranks.

    Minimises `max over ranks of cost(union of the paths of the rank's sequences)`: scheduling on identical
    machines with shared setups that form a tree, which is NP-hard. Results come near the lower bound
    `(T + (K - 1) x tokens common to all) / K`; they need not be optimal. They are deterministic and do not
    depend on the order of the sequences.

    Args:
      trie: T rows, N sequences.
      num_ranks: K, at least 1. Ranks may stay empty; some must if K exceeds N.
      cost: what to balance; by default `RowCost()`, tree tokens.
      method: a key of `METHODS`, or `auto` for the best result of all of them. Under a `ScheduleCost`, `auto`
        goes on from there and moves subtrees by compiled costs.

    Returns:
      The assignment and its report.

    Raises:
      InputError: K below 1, an unknown method, or a negative or non-finite cost.
    """
    if num_ranks < 1:
        raise InputError("balance", "num_ranks", expected="at least 1", actual=num_ranks)
    if method != AUTO and method not in METHODS:
        raise InputError("balance", "method", expected=f"one of {[AUTO, *METHODS]}", actual=repr(method))
    cost = cost or RowCost()
    row_cost = (cost.row if isinstance(cost, ScheduleCost) else cost).of(trie)
    tree = cost_tree(trie, row_cost)
    leaf_of = leaf_of_sequences(trie)
    names = list(METHODS) if method == AUTO else [method]
    owners = [METHODS[name](tree, num_ranks) for name in names]
    loads = [tree.loads(owner, num_ranks) for owner in owners]
    if isinstance(cost, ScheduleCost):
        compiled = _Compiled(trie, cost, row_cost, leaf_of)
        estimate = min(load.max() for load in loads)
        plausible = [i for i, load in enumerate(loads) if load.max() <= _PLAUSIBLE * estimate]
        names, owners = [names[i] for i in plausible], [owners[i] for i in plausible]
        loads = [compiled.loads(owner, num_ranks) for owner in owners]
    best = min(range(len(loads)), key=lambda i: (loads[i].max(), loads[i].sum()))
    owner, load = owners[best], loads[best]
    if isinstance(cost, ScheduleCost):
        total = compiled(np.ones(len(tree.leaf), bool))
        if method == AUTO:
            compiled.effort = Effort(_COMPILED * trie.num_rows)
            owner, load = refine(tree, owner, load, compiled, compiled.effort)
    else:
        total = float(tree.cost.sum())
    rank = owner[leaf_of].astype(np.int32)
    return Assignment(rank, _report(trie, rank, method, names[best], load, total))


class _Compiled:
    """Costs of sets of leaves by compiling their schedules."""

    def __init__(self, trie: Trie, cost: ScheduleCost, row_cost: np.ndarray, leaf_of: np.ndarray):
        self._trie, self._cost, self._row_cost, self._leaf_of = trie, cost, row_cost, leaf_of
        self.effort = Effort()

    def __call__(self, leaves: np.ndarray) -> float:
        """Cost of one rank that has these leaves, bool[J]."""
        part, row = rank_trie(self._trie, np.flatnonzero(leaves[self._leaf_of]))
        self.effort.spend(part.num_rows, calls=0)
        return self._cost.of(part, self._row_cost[row]) if part.num_rows else 0.0

    def loads(self, owner: np.ndarray, num_ranks: int) -> np.ndarray:
        """float64[K], cost of each rank."""
        return np.array([self(owner == k) for k in range(num_ranks)])


def compare_methods(
    trie: Trie,
    ranks: Iterable[int],
    methods: Iterable[str] = (AUTO, *METHODS),
    cost: RowCost | ScheduleCost | None = None,
) -> Iterator[dict[str, Any]]:
    """Balances with every method for every number of ranks.

    Yields:
      `BalanceReport.to_json()` of each, with `seconds`, the time that `balance` took.
    """
    methods = list(methods)
    for num_ranks in ranks:
        for method in methods:
            start = time.perf_counter()
            assignment = balance(trie, num_ranks, cost, method)
            seconds = time.perf_counter() - start
            yield {**assignment.report.to_json(), "seconds": seconds}


def _report(
    trie: Trie, rank: np.ndarray, method: str, winner: str, load: np.ndarray, total: float
) -> BalanceReport:
    num_ranks = len(load)
    tokens = cost_tree(trie, np.ones(trie.num_rows))
    owner = np.zeros(len(tokens.leaf), np.int64)
    owner[leaf_of_sequences(trie)] = rank
    # Rows that all sequences run through: the first rows, down to a branch or the end of a sequence.
    to_the_end = trie.subtree_end == trie.num_rows
    common = np.logical_and.accumulate(to_the_end)[: trie.tail.min(initial=trie.num_rows) + 1].sum()
    length = trie.depth[trie.tail] + 1.0
    return BalanceReport(
        method=method,
        winner=winner,
        sequences=np.bincount(rank, minlength=num_ranks),
        flat_tokens=np.bincount(rank, length, minlength=num_ranks).astype(np.int64),
        tree_tokens=tokens.loads(owner, num_ranks).astype(np.int64),
        cost=load,
        total_tree_tokens=trie.num_rows,
        common_tokens=int(common),
        total_cost=total,
    )
