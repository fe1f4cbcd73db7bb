"""What a schedule amounts to: operations, padding, height of the stack, cost; and what no plan can beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dta_jax.planner import CostModel, work_bound
from dta_jax.types import BACK, NO_SLOT, PUSH, Schedule


@dataclass(frozen=True)
class ScheduleStats:
    """Figures of a backward schedule. Rows executed count padding.

    Attributes:
      tree_tokens: T.
      backs, pushes: operations.
      backward_tokens_executed, forward_tokens_executed: rows run by BACK and by PUSH.
      work: (3 BACK rows + PUSH rows) / 3T, all padding counted; with kept residuals a BACK row counts 2.
      work_bound: what no plan can beat, padding or not: `planner.work_bound`, 1 with kept residuals.
      backs_over_full: BACK operations / (T / C).
      peak_stack_rows: the most rows on the stack at a time.
    """

    tree_tokens: int
    backs: int
    pushes: int
    backward_tokens_executed: int
    forward_tokens_executed: int
    work: float
    work_bound: float
    backs_over_full: float
    peak_stack_rows: int


def schedule_stats(schedule: Schedule) -> ScheduleStats:
    """Counts a backward schedule's operations and rows."""
    T = schedule.trie.num_rows
    backward, forward = schedule.backward_tokens_executed, schedule.forward_tokens_executed
    backs = int((schedule.kind == BACK).sum())
    back_work = 2 if schedule.keep_residuals else 3
    return ScheduleStats(
        tree_tokens=T,
        backs=backs,
        pushes=schedule.num_ops - backs,
        backward_tokens_executed=backward,
        forward_tokens_executed=forward,
        work=(back_work * backward + forward) / (3 * T) if T else 1.0,
        work_bound=1.0 if schedule.keep_residuals else work_bound(schedule.trie, schedule.chunk_size),
        backs_over_full=backs / (T / schedule.chunk_size) if T else 1.0,
        peak_stack_rows=int(stack_heights(schedule).max(initial=0)),
    )


def stack_heights(schedule: Schedule) -> np.ndarray:
    """int64[O], rows on the stack of a backward schedule after each operation."""
    held = np.append(0, np.cumsum(schedule.slot != NO_SLOT))[schedule.offset]
    return np.cumsum(np.where(schedule.kind == PUSH, 1, -1) * np.diff(held))


def cost_terms(schedule: Schedule) -> np.ndarray:
    """float64[O, 4], per operation: 1, rows executed, visible query-key pairs, and entries evaluated.

    An operation's cost is linear in them (`CostModel`): measured seconds of operations, regressed on these
    terms, give the machine's model (`dta_jax.cost_fit`).
    """
    sees = np.append(0, np.cumsum(schedule.trie.depth[schedule.row] + 1.0))[schedule.offset]
    entries = np.diff(schedule.entry_offset)
    return np.stack([np.ones(schedule.num_ops), schedule.width, np.diff(sees), entries], axis=1)


def operation_costs(
    terms: np.ndarray, kind: np.ndarray, cost: CostModel, *, keep_residuals: bool = False
) -> np.ndarray:
    """float64[O], forward passes of one row, of operations with these `cost_terms` and kinds.

    With kept residuals, BACK is taken to save a PUSH.
    """
    backward = cost.backward - cost.push * keep_residuals
    weight = np.where(kind == BACK, backward, cost.push)
    return weight * (terms @ np.array([cost.launch, 1.0, cost.attention, cost.entry]))


def schedule_cost(schedule: Schedule, cost: CostModel) -> float:
    """The sum of all operations' costs, in forward passes of one row."""
    terms, keep = cost_terms(schedule), schedule.keep_residuals
    return float(operation_costs(terms, schedule.kind, cost, keep_residuals=keep).sum())
