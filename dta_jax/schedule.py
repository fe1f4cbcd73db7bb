"""Compiles a trie into the table of operations that the engine runs, and the table into device operands.

    compile_schedule          every row's gradient once, in the order of `packing` or `branches`
    compile_forward_schedule  forward only: every row once
    operands                  one operation's arrays, as the device program takes them
    check_schedule            (schedule_check) runs a table in plain Python and checks every rule

A row that is pushed keeps its slot (`slots`) until its own BACK has run, for the slot holds its cotangents
until then. At most one path and one chunk of leftovers are alive at a time: `stack_slots` is the longest
path plus C, rounded up to a short list.

Source: AReaL-DTA (arXiv 2602.00482) keeps one path and runs one branch at a time; chunks here hold whatever
is ready, from any number of branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from dta_jax.branches import plan_branches
from dta_jax.errors import InputError
from dta_jax.packing import pack
from dta_jax.planner import CostModel, Step, next_rows, widths
from dta_jax.schedule_check import ScheduleError, check_schedule
from dta_jax.slots import assign_slots
from dta_jax.types import BACK, NO_PARENT, NO_SLOT, PUSH, Schedule, Trie

__all__ = [
    "LARGE_CHUNK",
    "STRATEGIES",
    "OpOperands",
    "ScheduleError",
    "check_schedule",
    "compile_forward_schedule",
    "compile_schedule",
    "operands",
    "round_slots",
]

STRATEGIES: Final = (
    "packed",
    "packed+keep",
    "branch",
    "branch+cut_tail",
    "branch+cut_tail+order",
    "branch+cut_tail+order+large_chunk",
)
LARGE_CHUNK: Final = 4  # chunks of `...+large_chunk` over those of the other strategies


def compile_schedule(
    trie: Trie,
    entry_row: np.ndarray,
    *,
    chunk_size: int,
    strategy: str = "packed",
    stack_slots: int = 0,
    cost: CostModel | None = None,
) -> Schedule:
    """Plans the operations that run every trie row backward exactly once, descendants first.

    Args:
      trie: T rows.
      entry_row: int[E], the row of each entry's token.
      chunk_size: C, rows per operation at most; `...+large_chunk` takes `LARGE_CHUNK * C`.
      strategy: one of `STRATEGIES`. `packed+keep` pushes every row (`Schedule.keep_residuals`).
      stack_slots: S, to keep a compiled shape; 0 takes what the strategy needs at most, rounded up.
      cost: what `packed` weighs; `CostModel()` if None.

    Returns:
      The table. `check_schedule` accepts it.

    Raises:
      InputError: a chunk size below 1, an unknown strategy, or a stack too small.
    """
    _check_chunk_size(chunk_size)
    if strategy not in STRATEGIES:
        raise InputError(
            "schedule", "strategy", expected=f"one of {', '.join(STRATEGIES)}", actual=repr(strategy)
        )
    options = strategy.split("+")
    if "large_chunk" in options:
        chunk_size *= LARGE_CHUNK
    if "packed" in options:
        steps = pack(trie, chunk_size, cost or CostModel(), push_all="keep" in options)
        needed = trie.longest_path + chunk_size
    else:
        steps = plan_branches(trie, chunk_size, cut_tail="cut_tail" in options, order="order" in options)
        needed = trie.longest_path
    return _assemble(trie, entry_row, steps, chunk_size, _stack_slots(needed, stack_slots), strategy)


def compile_forward_schedule(
    trie: Trie, entry_row: np.ndarray, *, chunk_size: int, stack_slots: int = 0
) -> Schedule:
    """Runs every row forward exactly once, in preorder, and evaluates every entry.

    Chunks are full; only the last ones are padded. The stack holds the path above the next chunk,
    `slot = depth`; a row that nothing later needs is not kept. Its slots are at most the longest path.

    Args, Raises: as `compile_schedule`.
    """
    _check_chunk_size(chunk_size)
    T = trie.num_rows
    row = np.arange(T, dtype=np.int32)
    bounds = [0]
    while bounds[-1] < T:
        bounds.append(bounds[-1] + next_rows(T - bounds[-1], chunk_size, CostModel().launch))
    offset = np.array(bounds)
    chunk_stop = np.repeat(offset[1:], np.diff(offset))
    slot = np.where(trie.subtree_end > chunk_stop, trie.depth, NO_SLOT)
    kind = np.full(len(offset) - 1, PUSH)
    slots = _stack_slots(trie.longest_path, stack_slots)
    return _table(trie, entry_row, kind, offset, row, slot, chunk_size, slots, "forward")


def round_slots(slots: int) -> int:
    """The smallest m * 2^k with 8 <= m <= 16 that holds `slots`: few shapes, at most 1/8 too large."""
    step = 1 << max(0, (slots - 1).bit_length() - 4)
    return -(-slots // step) * step


def _check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise InputError("schedule", "chunk_size", expected="at least 1", actual=chunk_size)


def _stack_slots(needed: int, given: int) -> int:
    if given and given < needed:
        raise InputError("schedule", "stack_slots", expected=f"at least {needed}", actual=given)
    return given or max(1, round_slots(needed))


def _assemble(
    trie: Trie, entry_row: np.ndarray, steps: list[Step], chunk_size: int, slots: int, strategy: str
) -> Schedule:
    """Writes the steps down as a table and gives out slots."""
    spans = np.array([span for step in steps for span in step.spans], np.int64).reshape(-1, 2)
    length = spans[:, 1] - spans[:, 0]
    ends = np.cumsum(length)
    row = np.repeat(spans[:, 1] - ends, length) + np.arange(length.sum())
    kind = np.array([step.kind for step in steps], np.int64)
    offset = np.concatenate([[0], np.cumsum([step.rows for step in steps])]).astype(np.int64)
    slot = assign_slots(trie, kind, offset, row, slots)
    return _table(trie, entry_row, kind, offset, row, slot, chunk_size, slots, strategy)


def _table(
    trie: Trie,
    entry_row: np.ndarray,
    kind: np.ndarray,
    offset: np.ndarray,
    row: np.ndarray,
    slot: np.ndarray,
    chunk_size: int,
    slots: int,
    strategy: str,
) -> Schedule:
    """Pads to widths and hands every entry to the operation that evaluates its row."""
    allowed = np.array(widths(chunk_size)[::-1])
    width = allowed[np.searchsorted(allowed, np.diff(offset))]
    evaluates = kind == BACK if (kind == BACK).any() else kind == PUSH
    op_of_row = np.full(trie.num_rows, len(kind), np.int64)
    op = np.repeat(np.arange(len(kind)), np.diff(offset))
    counted = evaluates[op]
    op_of_row[row[counted]] = op[counted]
    entry_op = op_of_row[entry_row]
    entry = np.argsort(entry_op * trie.num_rows + entry_row, kind="stable")
    entry_offset = np.searchsorted(entry_op[entry], np.arange(len(kind) + 1))
    return Schedule(
        trie=trie,
        kind=kind.astype(np.int32),
        width=width.astype(np.int32),
        offset=offset.astype(np.int64),
        row=row.astype(np.int32),
        slot=slot.astype(np.int32),
        entry_offset=entry_offset.astype(np.int64),
        entry=entry.astype(np.int64),
        entry_row=np.asarray(entry_row, np.int32),
        chunk_size=chunk_size,
        stack_slots=slots,
        strategy=strategy,
        keep_residuals="keep" in strategy.split("+"),
    )


@dataclass(frozen=True)
class OpOperands:
    """One operation as the device program takes it: W rows, S + W keys (S slots, then the own rows).

    Key `k` is visible to the own queries `[q_start[k], q_end[k])`. Rows `[1, 2, 3]` (2 is 1's child, 3 is
    1's sibling, 0 above them all) on a stack of three slots that holds row 0 in its middle, padded to
    W = 4, see what is marked (queries run down, keys across):

                 stack  own
        row 1    .x.    x...
        row 2    .x.    xx..
        row 3    .x.    ..x.
        padding  ...    ...x

    Attributes:
      kind: PUSH or BACK.
      width: W, rows executed.
      count: rows that are not padding; they come first.
      token: int32[W], 0 in padding.
      position: int32[W], depths, 0 in padding.
      slot: int32[W], `NO_SLOT` in padding and for rows without a slot.
      q_start, q_end: int32[S+W]; (0, 0) for a slot that no own row sees. A row of padding sees itself only.
      entry_start, entry_stop: its entries, a range of `Schedule.entry`.
      entry_source: int32[entry_stop - entry_start], the key (slot, or S + own row) whose hidden state
        gives each entry's log-probability: that of its parent.
    """

    kind: int
    width: int
    count: int
    token: np.ndarray
    position: np.ndarray
    slot: np.ndarray
    q_start: np.ndarray
    q_end: np.ndarray
    entry_start: int
    entry_stop: int
    entry_source: np.ndarray


def operands(schedule: Schedule) -> Iterator[OpOperands]:
    """Each operation's arrays, in order; O(S + W) per operation."""
    trie, S = schedule.trie, schedule.stack_slots
    owner = np.full(S, NO_PARENT, np.int64)  # row whose state each slot holds
    slot_of_row = np.full(trie.num_rows, NO_SLOT, np.int32)
    for o in range(schedule.num_ops):
        own = slice(schedule.offset[o], schedule.offset[o + 1])
        row, slot = schedule.row[own], schedule.slot[own]
        kept = slot != NO_SLOT
        if schedule.kind[o] == BACK:
            owner[slot[kept]] = NO_PARENT
        W = int(schedule.width[o])
        q_start, q_end = _visible(trie, row, owner, W)
        start, stop = int(schedule.entry_offset[o]), int(schedule.entry_offset[o + 1])
        parent = trie.parent[schedule.entry_row[schedule.entry[start:stop]]]
        inside = np.searchsorted(row, parent)
        is_own = row[np.minimum(inside, len(row) - 1)] == parent
        yield OpOperands(
            kind=int(schedule.kind[o]),
            width=W,
            count=len(row),
            token=_padded(trie.token[row], W, 0),
            position=_padded(trie.depth[row], W, 0),
            slot=_padded(slot, W, NO_SLOT),
            q_start=q_start,
            q_end=q_end,
            entry_start=start,
            entry_stop=stop,
            entry_source=np.where(is_own, S + inside, slot_of_row[parent]).astype(np.int32),
        )
        if schedule.kind[o] == PUSH:
            owner[slot[kept]] = row[kept]
            slot_of_row[row[kept]] = slot[kept]


def _padded(values: np.ndarray, width: int, fill: int) -> np.ndarray:
    out = np.full(width, fill, np.int32)
    out[: len(values)] = values
    return out


def _visible(trie: Trie, row: np.ndarray, owner: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Query intervals of the stack's and the own keys: the own rows in `[k, subtree_end[k])`.

    Neighbouring slots that hold neighbouring rows of one segment see the same queries, so the search is
    done once per such piece.
    """
    S, count = len(owner), len(row)
    interval = np.zeros((2, S + width), np.int32)
    live = np.flatnonzero(owner != NO_PARENT)
    if len(live):
        held = owner[live]
        last = trie.subtree_end[held]
        fresh = np.flatnonzero((np.diff(held, prepend=-2) != 1) | (np.diff(last, prepend=-1) != 0))
        low, high = np.searchsorted(row, held[fresh]), np.searchsorted(row, last[fresh])
        bounds = np.where(low < high, np.stack([low, high]), 0)
        interval[:, live] = np.repeat(bounds, np.diff(fresh, append=len(live)), axis=1)
    interval[:, S:] = np.arange(width) + np.array([[0], [1]])
    interval[1, S : S + count] = np.searchsorted(row, trie.subtree_end[row])
    return interval[0], interval[1]
