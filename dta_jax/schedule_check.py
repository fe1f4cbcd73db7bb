"""Runs a schedule in plain Python and checks every rule that the engine relies on.

Backward schedules (those with a BACK):
  - every row is run by exactly one BACK, after all its children or together with them;
  - a row is pushed at most once, before it is needed, and always kept;
  - when an operation runs, every ancestor of every row is among its rows or on the stack;
  - a slot belongs to the row that was pushed into it until that row's own BACK, which names it;
  - rows on the stack never number more than the longest path plus C;
  - with `keep_residuals`, every row was pushed.
Forward schedules (PUSH only):
  - every row is run exactly once, with every ancestor among the operation's rows or on the stack;
  - a slot is written again only when all descendants of the row in it have run;
  - slots are at most the longest path.
Both: rows ascend; widths come from the list; every entry is evaluated once, by the operation that computes
its row (BACK where there is one), in the order of rows, with its parent's hidden state at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dta_jax.planner import widths
from dta_jax.types import BACK, NO_PARENT, NO_SLOT, PUSH, Schedule


class ScheduleError(AssertionError):
    """A schedule that breaks a rule: a fault of the planner, not of its input."""


def _require(holds: bool, o: int, message: str) -> None:
    if not holds:
        raise ScheduleError(f"operation {o}: {message}")


def check_schedule(schedule: Schedule) -> None:
    """Interprets the table row by row; returns if every rule in the module's docstring holds.

    Raises:
      ScheduleError: names the operation, the row and the rule.
    """
    _check_shapes(schedule)
    _Interpreter(schedule).run()
    _check_entries(schedule)


def _check_shapes(s: Schedule) -> None:
    """The table itself: lengths, bounds, widths, ascending rows."""
    for name, offset, total in (
        ("offset", s.offset, len(s.row)),
        ("entry_offset", s.entry_offset, len(s.entry)),
    ):
        ends = (int(offset[0]), int(offset[-1])) if len(offset) == s.num_ops + 1 else None
        if ends != (0, total) or (np.diff(offset) < 0).any():
            raise ScheduleError(f"{name} must ascend from 0 to {total} in {s.num_ops + 1} steps")
    if not (len(s.width) == s.num_ops and len(s.slot) == len(s.row)):
        raise ScheduleError("one width per operation and one slot per row")
    allowed = widths(s.chunk_size)
    for o in range(s.num_ops):
        rows = s.row[s.offset[o] : s.offset[o + 1]].tolist()
        _require(int(s.kind[o]) in (PUSH, BACK), o, f"unknown kind {s.kind[o]}")
        _require(int(s.width[o]) in allowed, o, f"width {s.width[o]} is not one of {allowed}")
        _require(1 <= len(rows) <= s.width[o], o, f"{len(rows)} rows in a width of {s.width[o]}")
        _require(all(a < b for a, b in pairwise(rows)), o, "rows do not ascend")
        _require(rows[0] >= 0 and rows[-1] < s.trie.num_rows, o, "a row outside the trie")
        slots = s.slot[s.offset[o] : s.offset[o + 1]]
        _require(bool(((slots >= NO_SLOT) & (slots < s.stack_slots)).all()), o, "a slot outside the stack")


class _Interpreter:
    """The stack and what has run, operation by operation."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        trie = schedule.trie
        self.parent: list[int] = trie.parent.tolist()
        self.children_left = np.bincount(trie.parent[trie.parent >= 0], minlength=trie.num_rows).tolist()
        self.forward_only = not (schedule.kind == BACK).any()
        self.owner: dict[int, int] = {}  # slot -> row
        self.slot_of: dict[int, int] = {}  # row -> slot, while it is on the stack
        self.pushed = [False] * trie.num_rows
        self.finished = [False] * trie.num_rows  # has had its BACK; forward only: it and all below have run

    def run(self) -> None:
        s = self.schedule
        bound = s.trie.longest_path + (0 if self.forward_only else s.chunk_size)
        for o in range(s.num_ops):
            span = slice(s.offset[o], s.offset[o + 1])
            rows, slots = s.row[span].tolist(), s.slot[span].tolist()
            self._check_context(o, rows)
            if s.kind[o] == BACK:
                self._back(o, rows, slots)
            else:
                self._push(o, rows, slots)
            _require(
                len(self.owner) <= bound, o, f"{len(self.owner)} rows on the stack, at most {bound} allowed"
            )
        missing = [row for row, done in enumerate(self.finished) if not done]
        if missing:
            raise ScheduleError(f"row {missing[0]} was never run{'' if self.forward_only else ' backward'}")

    def _check_context(self, o: int, rows: Sequence[int]) -> None:
        """Every ancestor of every row is among the rows or on the stack."""
        seen = set(rows)
        for row in rows:
            above = self.parent[row]
            while above != NO_PARENT and above not in seen:
                _require(above in self.slot_of, o, f"row {row} needs its ancestor {above}, not on the stack")
                seen.add(above)
                above = self.parent[above]

    def _push(self, o: int, rows: Sequence[int], slots: Sequence[int]) -> None:
        for row in rows:
            _require(not self.pushed[row], o, f"row {row} is pushed twice")
            _require(not self.finished[row], o, f"row {row} is pushed after its BACK")
            self.pushed[row] = True
        if self.forward_only:
            for row in reversed(rows):
                self._finish_upward(row)
        for row, slot in zip(rows, slots, strict=True):
            if slot == NO_SLOT:
                _require(self.forward_only, o, f"row {row} is pushed but not kept")
                continue
            old = self.owner.get(slot)
            if old is not None:
                _require(
                    self.forward_only and self.finished[old], o, f"slot {slot} still belongs to row {old}"
                )
                del self.slot_of[old]
            self.owner[slot], self.slot_of[row] = row, slot

    def _finish_upward(self, row: int) -> None:
        """Forward only: marks rows whose whole subtree has run."""
        while (
            row != NO_PARENT and self.pushed[row] and self.children_left[row] == 0 and not self.finished[row]
        ):
            self.finished[row] = True
            row = self.parent[row]
            if row != NO_PARENT:
                self.children_left[row] -= 1

    def _back(self, o: int, rows: Sequence[int], slots: Sequence[int]) -> None:
        for row, slot in zip(reversed(rows), reversed(slots), strict=True):
            _require(not self.finished[row], o, f"row {row} is run backward twice")
            _require(self.children_left[row] == 0, o, f"row {row} is run backward before its descendants")
            self.finished[row] = True
            if self.parent[row] != NO_PARENT:
                self.children_left[self.parent[row]] -= 1
            held = self.slot_of.pop(row, NO_SLOT)
            _require(slot == held, o, f"row {row} is said to be in slot {slot}, but is in {held}")
            if held != NO_SLOT:
                del self.owner[held]
            else:
                _require(
                    not self.schedule.keep_residuals, o, f"row {row} was not pushed, so has no residuals"
                )


def _check_entries(s: Schedule) -> None:
    """Every entry once, by the operation that computes its row, ordered by row, with a parent to read."""
    if sorted(s.entry.tolist()) != list(range(len(s.entry_row))):
        raise ScheduleError("every entry must be evaluated exactly once")
    forward_only = not (s.kind == BACK).any()
    for o in range(s.num_ops):
        entry_rows = s.entry_row[s.entry[s.entry_offset[o] : s.entry_offset[o + 1]]].tolist()
        _require(forward_only or s.kind[o] == BACK or not entry_rows, o, "a PUSH evaluates entries")
        own = set(s.row[s.offset[o] : s.offset[o + 1]].tolist())
        for row in entry_rows:
            _require(row in own, o, f"an entry of row {row}, which it does not run")
            _require(s.trie.parent[row] != NO_PARENT, o, f"an entry of row {row}, which has no parent")
        _require(entry_rows == sorted(entry_rows), o, "entries are not in the order of their rows")
