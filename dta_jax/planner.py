"""What every strategy of the planner is made of: segments, steps, widths, the cost model, the bound.

A plan is a list of steps over *spans* `[start, stop)` of trie rows, in the order of execution. Strategies
look at segments (maximal runs of rows without a branch) one by one, never at rows, so planning costs as
much as the tree has branches. `schedule` turns a plan into a table.

    packing    `packed`: full chunks from any number of branches
    branches   `branch` and its refinements: one branch at a time, as AReaL-DTA does
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from dta_jax.errors import InputError
from dta_jax.types import NO_PARENT, PUSH, Trie

Span = tuple[int, int]


@dataclass(frozen=True)
class CostModel:
    """What an operation costs, in forward passes of one row; the planner weighs its choices by it.

    An operation of W rows (padding included) that see p keys in all, and of e entries, costs

        weight * (launch + W + attention * p + entry * e),   weight = `backward` for BACK, `push` for PUSH

    `dta_jax.cost_fit` measures the machine's own.

    Attributes:
      backward: BACK runs forward, and two products for every one of the forward pass.
      push: forward only.
      attention: a visible query-key pair over a row; 0 leaves context length out of account.
      launch: what every operation costs, in rows. BACK touches every gradient, PUSH every weight: on a GPU
        that takes as long as the arithmetic of a few hundred rows.
      entry: an entry's way through the head over a row. Plans do not differ in it; predicted times and
        loads of ranks do.
    """

    backward: float = 3.0
    push: float = 1.0
    attention: float = 0.0
    launch: float = 256.0
    entry: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < np.inf:
                raise InputError("CostModel", name, expected="finite, at least 0", actual=value)


DEFAULT_COST: Final = CostModel()


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


def trunk_rows(segments: Segments, chunk_size: int) -> np.ndarray:
    """int64[G], rows at the top of each segment whose subtree is larger than a chunk.

    A row cannot run backward in one chunk with all its descendants if they are more than C rows. So some
    descendant runs before it, with the row as context: it must be pushed, whatever the plan.
    """
    return np.clip(segments.subtree_end - chunk_size - segments.start, 0, segments.stop - segments.start)


def work_bound(trie: Trie, chunk_size: int) -> float:
    """Least work of any plan without kept residuals, over 3T: `1 + trunk rows / 3T` (no padding at all)."""
    trunk = int(trunk_rows(segments_of(trie), chunk_size).sum())
    return 1 + trunk / (3 * trie.num_rows) if trie.num_rows else 1.0


def widths(chunk_size: int) -> tuple[int, ...]:
    """Row counts to which operations are padded: C, C/2, C/4 and C/8, rounded up, largest first."""
    return tuple(sorted({-(-chunk_size // 2**k) for k in range(4)}, reverse=True))


def fit_width(rows: int, chunk_size: int) -> int:
    """The smallest width that holds `rows`, at most C."""
    return min(width for width in widths(chunk_size) if width >= rows)


def next_rows(rows: int, chunk_size: int, launch: float) -> int:
    """Rows of the next operation when `rows` are left: C, or all, or a full width if padding costs more."""
    if rows >= chunk_size:
        return chunk_size
    below = max((width for width in widths(chunk_size) if width < rows), default=0)
    cheaper = below + launch + fit_width(rows - below, chunk_size) < fit_width(rows, chunk_size)
    return below if below and cheaper else rows


def push_steps(spans: list[Span], chunk_size: int) -> list[Step]:
    """Cuts spans, ancestors first, into PUSH steps of at most C rows."""
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
