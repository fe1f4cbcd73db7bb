"""Gives every pushed row its stack slot.

A slot is its row's from its PUSH to its BACK. Attention skips blocks of keys that hold nothing visible, so
a path should lie in few runs of slots: rows go right behind their parent's slot if there is room, else
into the lowest free run that holds them all, else into the longest free runs.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dta_jax.types import NO_PARENT, NO_SLOT, PUSH, Trie


def assign_slots(trie: Trie, kind: np.ndarray, offset: np.ndarray, row: np.ndarray, slots: int) -> np.ndarray:
    """Slots of all operations' rows.

    Args:
      trie: T rows.
      kind: int[O], PUSH or BACK.
      offset: int64[O+1], where each operation's rows start.
      row: int64[R], their rows, ascending within an operation.
      slots: S; what is on the stack at any time must fit.

    Returns:
      int64[R], the slot of each row; `NO_SLOT` for rows of a BACK that were never pushed.
    """
    slot_of_row = np.full(trie.num_rows, NO_SLOT)
    free = np.ones(slots, bool)
    breaks = np.flatnonzero(np.diff(row) != 1) + 1
    bounds = offset.tolist()
    for o, op_kind in enumerate(kind.tolist()):
        start, stop = bounds[o], bounds[o + 1]
        if op_kind == PUSH:
            inside = breaks[np.searchsorted(breaks, start, "right") : np.searchsorted(breaks, stop)]
            ends = [start, *inside.tolist(), stop]
            for first, last in pairwise(ends):
                parent = int(trie.parent[row[first]])
                behind = 0 if parent == NO_PARENT else int(slot_of_row[parent]) + 1
                taken = _find(free, last - first, behind)
                slot_of_row[row[first:last]] = taken
                free[taken] = False
        else:
            held = slot_of_row[row[start:stop]]
            free[held[held != NO_SLOT]] = True
    return slot_of_row[row]


def _find(free: np.ndarray, count: int, behind: int) -> np.ndarray:
    """`count` free slots, ascending."""
    if free[behind : behind + count].sum() == count:
        return np.arange(behind, behind + count)
    candidates = np.flatnonzero(free)
    run_start = np.flatnonzero(np.diff(candidates, prepend=-2) != 1)
    run_length = np.diff(run_start, append=len(candidates))
    fits = np.flatnonzero(run_length >= count)
    if len(fits):
        return candidates[run_start[fits[0]] :][:count]
    if len(candidates) < count:
        raise AssertionError(f"the plan needs more than {len(free)} stack slots")
    longest_first = np.argsort(-run_length, kind="stable")
    rank = np.empty(len(longest_first), np.int64)
    rank[longest_first] = np.arange(len(longest_first))
    by_run = np.argsort(np.repeat(rank, run_length), kind="stable")
    return np.sort(candidates[by_run[:count]])
