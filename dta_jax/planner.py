"""Decides what a schedule runs and in which order: child order, cuts, what is pushed when.

A plan is a list of steps over *spans* `[start, stop)` of trie rows. Only segments (maximal runs of rows
without a branch) are looked at one by one, never rows, so a plan costs as much as the tree has branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dta_jax.types import BACK, NO_PARENT, PUSH, Trie

Span = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """One operation before slots are given out: PUSH or BACK of disjoint, ascending spans of trie rows."""

    kind: int
    spans: list[Span]

    @property
    def rows(self) -> int:
        """Rows that the step runs, padding not counted."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class Segments:
    """The trie with every run of single children drawn together; segments are in preorder.

    Attributes:
      start: int64[G], first row of each segment.
      stop: int64[G], one past its last row.
      parent: int64[G], the segment above, or `NO_PARENT`.
      subtree_end: int64[G], one past the last row of the subtree.
    """

    start: np.ndarray
    stop: np.ndarray
    parent: np.ndarray
    subtree_end: np.ndarray


def segments_of(trie: Trie) -> Segments:
    """Draws the trie's unbranched runs together, in O(T)."""
    T = trie.num_rows
    is_child = trie.parent != NO_PARENT
    children = np.bincount(trie.parent[is_child], minlength=T + 1)
    only_child = is_child & (children[trie.parent] == 1)
    start = np.flatnonzero(~only_child)
    above = trie.parent[start]
    parent = np.where(above == NO_PARENT, NO_PARENT, np.searchsorted(start, above, side="right") - 1)
    return Segments(
        start, np.append(start[1:], T)[: len(start)], parent, trie.subtree_end[start].astype(np.int64)
    )


def widths(chunk_size: int) -> tuple[int, ...]:
    """Row counts to which operations are padded: C, C/2, C/4 and C/8, rounded up, largest first."""
    return tuple(sorted({-(-chunk_size // 2**k) for k in range(4)}, reverse=True))


def plan_contiguous(trie: Trie, cuts: np.ndarray) -> list[Step]:
    """Reverse preorder: chunks `[cuts[i], cuts[i+1])`, the last one first.

    A suffix of a preorder is closed under descendants, so each chunk's cotangents are complete when it
    runs. All that it needs from outside are the ancestors of its first row: those not on the stack yet
    are pushed before it.

    Args:
      cuts: ascending, from 0 to T; neighbours at most C apart.
    """
    segments = segments_of(trie)
    chunk_size = int(np.diff(cuts).max(initial=1))
    pushed = segments.start.copy()  # one past each segment's last row that is on the stack or has been
    home = np.searchsorted(segments.start, cuts, side="right") - 1
    steps: list[Step] = []
    for i in range(len(cuts) - 2, -1, -1):
        first, segment = int(cuts[i]), int(home[i])
        missing: list[Span] = []
        need = first
        if need == segments.start[segment]:
            segment = int(segments.parent[segment])
            need = int(segments.stop[segment])
        while segment != NO_PARENT and pushed[segment] < need:
            missing.append((int(pushed[segment]), need))
            pushed[segment] = need
            segment = int(segments.parent[segment])
            need = int(segments.stop[segment])
        steps += _push_steps(missing[::-1], chunk_size)
        steps.append(Step(BACK, [(first, int(cuts[i + 1]))]))
    return steps


def _push_steps(spans: list[Span], chunk_size: int) -> list[Step]:
    """Cuts a run of spans into PUSH steps of at most `chunk_size` rows."""
    steps: list[Step] = []
    room = 0
    for start, stop in spans:
        while start < stop:
            if room == 0:
                steps.append(Step(PUSH, []))
                room = chunk_size
            end = min(stop, start + room)
            steps[-1].spans.append((start, end))
            room -= end - start
            start = end
    return steps
