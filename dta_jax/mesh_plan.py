"""A batch split over the `data` ranks of a mesh: who runs which sequences, and every rank's own schedule.

    plan_ranks       trie -> balance -> one trie and one schedule per rank
    stack_operations those schedules as one table that the mesh program reads, a row per rank

Planning is deterministic, so every process of a run plans the same. Weights of entries are made from the
whole batch before it is split: losses and gradients of the ranks add up to the batch's, for every K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from dta_jax.balance import AUTO, Assignment, RowCost, ScheduleCost, balance, rank_trie
from dta_jax.errors import InputError
from dta_jax.model import DecoderModel, Params
from dta_jax.planner import DEFAULT_COST, CostModel, widths
from dta_jax.schedule import compile_schedule
from dta_jax.segment import Rows, num_keys
from dta_jax.tree_inputs import Entries, Op, entry_capacity, host_inputs
from dta_jax.types import BACK, PUSH, Schedule, Trie

FEWEST_OPERATIONS: Final = 64  # rows of the smallest table: a few MB, and one program for most batches


@dataclass(frozen=True, eq=False)
class MeshPlan:
    """What every `data` rank is to run.

    Attributes:
      trie: of all sequences.
      assignment: which rank has which sequence, with the balancer's report.
      schedules: K schedules with the same chunk size and stack slots; without sequences, without operations.
      entries: K arrays int64[E_k]: the caller's entries that each rank evaluates.
    """

    trie: Trie
    assignment: Assignment
    schedules: tuple[Schedule, ...]
    entries: tuple[np.ndarray, ...]

    @property
    def chunk_size(self) -> int:
        """C of every rank."""
        return self.schedules[0].chunk_size

    @property
    def stack_slots(self) -> int:
        """S of every rank."""
        return self.schedules[0].stack_slots

    @property
    def keep_residuals(self) -> bool:
        """Whether every rank pushes all its rows and keeps what their BACK needs."""
        return self.schedules[0].keep_residuals

    @property
    def num_entries(self) -> int:
        """E, entries of the whole batch."""
        return sum(map(len, self.entries))

    @property
    def backward_tokens_executed(self) -> int:
        """Rows run by BACK on all ranks, padding counted."""
        return sum(schedule.backward_tokens_executed for schedule in self.schedules)

    @property
    def forward_tokens_executed(self) -> int:
        """Rows run by PUSH on all ranks, padding counted."""
        return sum(schedule.forward_tokens_executed for schedule in self.schedules)


def plan_ranks(
    trie: Trie,
    entry_sequence: np.ndarray,
    entry_row: np.ndarray,
    num_ranks: int,
    *,
    chunk_size: int,
    strategy: str = "packed",
    stack_slots: int = 0,
    cost: CostModel | None = None,
    method: str = AUTO,
) -> MeshPlan:
    """Balances the sequences over K ranks, and plans every rank.

    Args:
      trie: T rows, N sequences.
      entry_sequence: int[E], the sequence of each entry.
      entry_row: int[E], the row of each entry's token.
      num_ranks: K.
      chunk_size, strategy: as in `compile_schedule`.
      stack_slots: S, to keep a compiled shape; 0 takes what the longest of the ranks needs.
      cost: what the planner weighs, and the balancer, as `ScheduleCost`; `CostModel()` if None.
      method: the balancer's.

    Raises:
      InputError: see `balance` and `compile_schedule`.
    """
    cost = cost or DEFAULT_COST
    rows_cost = RowCost.forward(cost, trie, entry_row)
    assignment = balance(trie, num_ranks, ScheduleCost(chunk_size, strategy, rows_cost, cost), method)
    entry_rank = assignment.rank[entry_sequence]
    entries = tuple(np.flatnonzero(entry_rank == k) for k in range(num_ranks))
    parts = []
    for sequences, mine in zip(assignment.sequences(), entries, strict=True):
        part, row = rank_trie(trie, sequences)
        parts.append((part, np.searchsorted(row, entry_row[mine]).astype(np.int32)))

    def compiled(slots: int) -> list[Schedule]:
        options: dict[str, Any] = {"chunk_size": chunk_size, "strategy": strategy, "stack_slots": slots}
        options["cost"] = cost
        return [compile_schedule(part, rows, **options) for part, rows in parts]

    schedules = compiled(stack_slots)
    if not stack_slots:
        schedules = compiled(max(schedule.stack_slots for schedule in schedules))
    return MeshPlan(trie, assignment, tuple(schedules), entries)


class Operations(NamedTuple):
    """The ranks' tables on the host, padded to O operations and C rows: what `mesh_grad` reads.

    branch: int32[K, O], index into `branches(C)`. op: `Op` with leading axes [K, O]. count: int32[K],
    operations that are real.
    """

    branch: Any
    op: Op
    count: Any


def table_length(plan: MeshPlan) -> int:
    """O: the power of two, at least `FEWEST_OPERATIONS`, that holds every rank's operations."""
    longest = max(schedule.num_ops for schedule in plan.schedules)
    return max(FEWEST_OPERATIONS, 1 << max(longest - 1, 0).bit_length())


def branches(chunk_size: int) -> tuple[tuple[int, int], ...]:
    """The kinds of operation with each width that they come in."""
    return tuple((kind, width) for kind in (PUSH, BACK) for width in widths(chunk_size))


def stack_operations(
    model: DecoderModel,
    params: Params,
    plan: MeshPlan,
    values: Mapping[str, np.ndarray],
    *,
    capacity: int = 0,
    max_operations: int = 0,
) -> tuple[Operations, Entries]:
    """All ranks' operations and entries as numpy arrays with a leading axis of K.

    Args:
      model, params: as in `tree_value_and_grad`.
      plan: of the batch.
      values: float[E] by name, in the caller's order.
      capacity: E', the same on all ranks; 0 takes what the rank with most entries needs.
      max_operations: O, to keep a compiled shape; 0 takes `table_length`.

    Raises:
      InputError: see `host_inputs`; a table that has more operations than O.
    """
    capacity = capacity or entry_capacity(max(map(len, plan.entries)))
    ranks = [
        host_inputs(model, params, schedule, {n: np.asarray(v)[mine] for n, v in values.items()}, capacity)
        for schedule, mine in zip(plan.schedules, plan.entries, strict=True)
    ]
    index = {branch: i for i, branch in enumerate(branches(plan.chunk_size))}
    tables = [[(index[kind, len(op.rows.token)], op) for kind, op in ops] for _, ops in ranks]
    count = np.array([len(table) for table in tables], np.int32)
    longest = max_operations or table_length(plan)
    if longest < count.max():
        raise InputError("plan", "max_operations", expected=f"at least {count.max()}", actual=longest)
    keys = num_keys(plan.stack_slots, plan.chunk_size)
    ops = _empty_operations((len(tables), longest), plan.chunk_size, keys)
    branch = np.zeros((len(tables), longest), np.int32)
    for k, table in enumerate(tables):
        for o, (which, op) in enumerate(table):
            branch[k, o] = which
            for into, leaf in zip(jax.tree.leaves(ops), jax.tree.leaves(op), strict=True):
                into[(k, o, *map(slice, np.shape(leaf)))] = leaf
    entries = jax.tree.map(lambda *leaves: np.stack(leaves), *(entries for entries, _ in ranks))
    return Operations(branch, ops, count), entries


def _empty_operations(table: tuple[int, int], chunk_size: int, keys: int) -> Op:
    def zeros(*shape: int) -> Any:
        return np.zeros((*table, *shape), np.int32)

    rows = Rows(*(zeros(chunk_size) for _ in range(3)), *(zeros(keys) for _ in range(2)))
    return Op(rows, zeros(), zeros(), zeros())
