"""What the balancer balances: additive costs of rows, or the cost of a rank's compiled schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dta_jax.balance_tree import running_sum
from dta_jax.errors import InputError
from dta_jax.planner import DEFAULT_COST, CostModel
from dta_jax.schedule import compile_schedule
from dta_jax.types import BACK, NO_PARENT, Trie


@dataclass(frozen=True, eq=False)
class RowCost:
    """Additive cost: `sum over a rank's rows of (token + pair * (depth + 1) + rows[row])`.

    Attributes:
      token: cost of a row. With FLOPs as the unit: 6 x parameters.
      pair: cost of a visible query-key pair; a row sees `depth + 1`. FLOPs: 12 x layers x heads x head_dim.
      rows: float64[T], further cost of each row, such as its entries' share of the LM head.
    """

    token: float = 1.0
    pair: float = 0.0
    rows: np.ndarray | None = None

    @classmethod
    def forward(cls, cost: CostModel, trie: Trie, entry_row: np.ndarray) -> RowCost:
        """What the rows cost forward by the planner's model; `entry_row` int[E] is each entry's row."""
        entries = np.bincount(entry_row, minlength=trie.num_rows)
        return cls(pair=cost.attention, rows=cost.entry * entries)

    def of(self, trie: Trie) -> np.ndarray:
        """float64[T], the cost of every row.

        Raises:
          InputError: a cost is negative or not finite, or `rows` is not of shape [T].
        """
        cost = self.token + self.pair * (trie.depth + 1.0)
        if self.rows is not None:
            if self.rows.shape != cost.shape:
                raise InputError("RowCost", "rows", expected=f"shape {cost.shape}", actual=self.rows.shape)
            cost = cost + self.rows
        bad = np.flatnonzero(~(np.isfinite(cost) & (cost >= 0)))
        if bad.size:
            k = int(bad[0])
            raise InputError("RowCost", f"cost of row {k}", expected="finite, not negative", actual=cost[k])
        return cost


@dataclass(frozen=True, eq=False)
class ScheduleCost:
    """Cost of all that a rank's schedule runs, pushes and padding included.

    `sum over operations of w * (launch + sum over their rows of cost + token * padding)`, with w, the weight
    of BACK or PUSH, and launch from the planner's model; the rest of that model is in `row`.

    Attributes:
      chunk_size: C of the schedules.
      strategy: the planner's strategy.
      row: forward cost of a row (`RowCost.forward`). It is also what the search goes by between compilations.
      cost: the planner's model; it also plans by it.
    """

    chunk_size: int
    strategy: str = "packed"
    row: RowCost = field(default_factory=RowCost)
    cost: CostModel = DEFAULT_COST

    def of(self, trie: Trie, row_cost: np.ndarray) -> float:
        """The cost of running `trie`, whose rows cost `row_cost` float64[T], on one rank."""
        no_entries, cost = np.zeros(0, np.int32), self.cost
        table = compile_schedule(
            trie, no_entries, chunk_size=self.chunk_size, strategy=self.strategy, cost=cost
        )
        backward = cost.backward - cost.push * table.keep_residuals
        weight = np.where(table.kind == BACK, backward, cost.push)
        rows = np.diff(running_sum(row_cost[table.row])[table.offset])
        padding = table.width - np.diff(table.offset)
        return float(weight @ (cost.launch + rows + self.row.token * padding))


def rank_trie(trie: Trie, sequences: np.ndarray) -> tuple[Trie, np.ndarray]:
    """The trie of some of the sequences, in O(T).

    Args:
      trie: T rows, N sequences.
      sequences: int[n], which of them.

    Returns:
      Their trie, with `tail` in the given order, and int64[T'], the row of `trie` behind each of its rows.
    """
    ends = running_sum(np.bincount(trie.tail[sequences], minlength=trie.num_rows))
    kept = ends[trie.subtree_end] > ends[:-1]
    row = np.flatnonzero(kept)
    new = running_sum(kept.astype(np.int32))
    parent = np.where(trie.parent[row] == NO_PARENT, NO_PARENT, new[trie.parent[row]])
    return (
        Trie(
            token=trie.token[row],
            parent=parent.astype(np.int32),
            depth=trie.depth[row],
            subtree_end=new[trie.subtree_end[row]],
            tail=new[trie.tail[sequences]],
        ),
        row,
    )
