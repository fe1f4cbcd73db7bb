"""The strategy `packed`: chunks are bins, filled from any number of branches.

Rows whose subtree is larger than a chunk are the *trunk*: every plan must push them (`trunk_rows`). Below
the trunk hang *twigs*, whole subtrees of at most C rows, which run without a push. `#` is trunk, C = 4:

    # # # # o o o o        a leaf segment longer than C: its last C rows are a twig
        ` o o o            a short branch is a twig
        ` # o o            trunk goes on as long as more than C rows follow
            ` o o o

A chunk is filled like a bin. The largest twig that fits goes in, again and again; the gap that is left is
closed with *filler*, trunk rows below which nothing is left to run, which can be cut anywhere. Leftovers
of several branches so share chunks: chunks are full, and nothing but the trunk is pushed.

Trunk is pushed in depth-first preorder, large subtrees first, a full PUSH at a time, when no full chunk is
to be had. The stack has room for the longest path plus C. Without room for a full PUSH a chunk runs all the
same: its gap is closed by splitting the smallest twig that is larger than it, whose top is pushed first and
whose rest is as large as the gap. That is done where it costs less than padding. (If there are not even C
rows to choose from, a narrower PUSH comes first. When there is no room for that either, nearly C finished
rows are on the stack beside the path, so there is always something to run.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

import numpy as np

from dta_jax.planner import (
    CostModel,
    Segments,
    Span,
    Step,
    fit_width,
    next_rows,
    segments_of,
    trunk_rows,
    widths,
)
from dta_jax.types import BACK, NO_PARENT, PUSH, Trie


@dataclass(slots=True, eq=False)
class _Piece:
    """Pushed rows `[first, first + left)` that no chunk holds yet; chunks take them from the bottom.

    `waiting` counts what is below and in no chunk yet, and 1 until all of the piece is on the stack.
    `twigs` hang from its last row.
    """

    first: int
    left: int
    above: _Piece | None
    waiting: int
    twigs: list[_Twig] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Twig:
    """A subtree `[first, stop)` that no chunk holds yet; its top is in `segment`."""

    segment: int
    first: int
    stop: int
    above: _Piece | None

    @property
    def size(self) -> int:
        return self.stop - self.first


class _Shelf:
    """Twigs whose context is on the stack, by size."""

    def __init__(self) -> None:
        self._twigs: dict[int, list[_Twig]] = {}
        self._sizes: list[int] = []  # those that are there, ascending
        self.rows = 0

    def add(self, twig: _Twig) -> None:
        same = self._twigs.setdefault(twig.size, [])
        if not same:
            insort(self._sizes, twig.size)
        same.append(twig)
        self.rows += twig.size

    def take(self, size: int) -> _Twig:
        same = self._twigs[size]
        twig = same.pop()
        self.rows -= size
        if not same:
            del self._sizes[bisect_left(self._sizes, size)]
        return twig

    def largest_within(self, gap: int) -> int:
        """Size of the largest twig that fits, 0 if there is none."""
        i = bisect_right(self._sizes, gap)
        return self._sizes[i - 1] if i else 0

    def smallest_above(self, gap: int) -> _Twig | None:
        """The smallest twig larger than `gap`, left where it is."""
        i = bisect_right(self._sizes, gap)
        return self._twigs[self._sizes[i]][-1] if i < len(self._sizes) else None

    def gap_left(self, gap: int) -> int:
        """What is left of `gap` when the largest twig that fits is put in, again and again."""
        i = len(self._sizes)
        while gap and (i := bisect_right(self._sizes, gap, 0, i)):
            i -= 1
            size = self._sizes[i]
            gap -= size * min(gap // size, len(self._twigs[size]))
        return gap


def pack(trie: Trie, chunk_size: int, cost: CostModel, *, push_all: bool = False) -> list[Step]:
    """Plans full chunks; see the module's docstring.

    Args:
      trie: T rows.
      chunk_size: C.
      cost: weighs padding against pushes and launches.
      push_all: all rows are trunk, so that no BACK has to run a row forward whose residuals are kept.

    Returns:
      Steps whose rows on the stack are at most the longest path plus C at any time.
    """
    return _Packer(trie, chunk_size, cost, push_all).plan()


class _Packer:
    """The state between two steps: what is on the stack, on the shelf, in filler, and still to be pushed."""

    def __init__(self, trie: Trie, chunk_size: int, cost: CostModel, push_all: bool):
        self.chunk_size, self.cost, self.depth = chunk_size, cost, trie.depth
        self.segments = segments_of(trie)
        self.steps: list[Step] = []
        self.shelf = _Shelf()
        self.filler: list[_Piece] = []  # pieces that wait for nothing; the last one is used first
        self.filler_rows = 0
        self.height = 0  # rows on the stack
        self.limit = trie.longest_path + chunk_size
        self.unrun = trie.num_rows  # rows in no BACK yet
        self.trunk, twigs = _hang(self.segments, 0 if push_all else chunk_size)
        self.unpushed = sum(piece.left for piece in self.trunk)
        self.next, self.next_done = 0, 0  # the piece to be pushed next, and how much of it has been
        for twig in twigs:
            self.shelf.add(twig)

    def plan(self) -> list[Step]:
        narrowest = widths(self.chunk_size)[-1]
        while self.unrun:
            wanted = min(self.chunk_size, self.unpushed)
            rows = min(wanted, self.limit - self.height)
            may_push = rows == wanted or (rows >= narrowest and self._within_reach() < self.chunk_size)
            if wanted and may_push and not self._fills():
                if rows < wanted:
                    rows = max(width for width in widths(self.chunk_size) if width <= rows)
                rows = next_rows(rows, self.chunk_size, self.cost.launch)
                self.steps.append(Step(PUSH, sorted(self._next_trunk(rows))))
            else:
                self._run_chunk(next_rows(self.unrun, self.chunk_size, self.cost.launch))
        return self.steps

    def _fills(self) -> bool:
        """Whether a full chunk is to be had from the shelf and the filler as they are."""
        return self.filler_rows >= self.shelf.gap_left(self.chunk_size)

    def _within_reach(self) -> int:
        """Rows that could run without any more trunk: the shelf, and what is on the stack beside the path."""
        piece = self.trunk[self.next]
        path = int(self.depth[piece.first]) + self.next_done
        return self.shelf.rows + self.height - path

    def _next_trunk(self, rows: int) -> list[Span]:
        """Puts the next trunk rows on the stack, and on the shelf what hangs from the pieces completed."""
        self.unpushed -= rows
        self.height += rows
        spans = []
        while rows:
            piece = self.trunk[self.next]
            start, size = piece.first + self.next_done, min(rows, piece.left - self.next_done)
            spans.append((start, start + size))
            rows -= size
            self.next_done += size
            if self.next_done == piece.left:
                self.next, self.next_done = self.next + 1, 0
                for twig in piece.twigs:
                    self.shelf.add(twig)
                self._release(piece)
        return spans

    def _release(self, piece: _Piece | None) -> None:
        """One thing less for the piece to wait for."""
        if piece is None:
            return
        piece.waiting -= 1
        if not piece.waiting:
            self.filler.append(piece)
            self.filler_rows += piece.left

    def _run_chunk(self, rows: int) -> None:
        """One BACK of `rows` rows; before it the PUSH of the tops of twigs that had to be split for it."""
        gap, freed = rows, 0
        spans: list[Span] = []
        tops: list[Span] = []
        while gap:
            if size := self.shelf.largest_within(gap):
                twig = self.shelf.take(size)
                spans.append((twig.first, twig.stop))
                self._release(twig.above)
                gap -= size
            elif self.filler:
                span = self._take_filler(gap)
                spans.append(span)
                gap -= span[1] - span[0]
                freed += span[1] - span[0]
            elif not self._split(gap, tops):
                break
        self.unrun -= rows - gap
        if tops:
            pushed = sum(stop - start for start, stop in tops)
            spare = fit_width(pushed, self.chunk_size) - pushed
            more = min(spare, self.unpushed, self.limit - self.height)
            self.steps.append(Step(PUSH, sorted(tops + self._next_trunk(more))))
        self.steps.append(Step(BACK, sorted(spans)))
        self.height -= freed

    def _take_filler(self, gap: int) -> Span:
        """At most `gap` rows from the bottom of the piece that became filler last."""
        piece = self.filler[-1]
        size = min(gap, piece.left)
        piece.left -= size
        self.filler_rows -= size
        if not piece.left:
            self.filler.pop()
            self._release(piece.above)
        return piece.first + piece.left, piece.first + piece.left + size

    def _split(self, gap: int, tops: list[Span]) -> bool:
        """Pushes the top of a twig so that what is below it fits, if there is room and padding costs more."""
        twig = self.shelf.smallest_above(gap)
        if twig is None:
            return False
        own = int(self.segments.stop[twig.segment]) - twig.first
        top = min(own, twig.size - gap)
        room = min(self.chunk_size - sum(b - a for a, b in tops), self.limit - self.height)
        context = self.cost.attention * int(self.depth[twig.first])
        push_cost = self.cost.push * (self.cost.launch + top * (1 + context))
        padding_cost = self.cost.backward * gap * (1 + self.cost.launch / self.chunk_size)
        if top > room or push_cost > padding_cost:
            return False
        self.shelf.take(twig.size)
        piece = _Piece(twig.first, top, twig.above, 0)
        below = [twig.segment] if top < own else self._children(twig.segment)
        for segment in below:
            first = twig.first + top if top < own else int(self.segments.start[segment])
            piece.waiting += 1
            self.shelf.add(_Twig(segment, first, int(self.segments.subtree_end[segment]), piece))
        tops.append((twig.first, twig.first + top))
        self.height += top
        return True

    def _children(self, segment: int) -> list[int]:
        """The segments right below: each one starts where the subtree of the one before ends."""
        start, end = self.segments.start, self.segments.subtree_end
        children = []
        child = segment + 1
        while child < len(start) and start[child] < end[segment]:
            children.append(child)
            child = int(np.searchsorted(start, end[child]))
        return children


def _hang(segments: Segments, twig_size: int) -> tuple[list[_Piece], list[_Twig]]:
    """The trunk's pieces in the order of their pushes, with their twigs; the twigs that hang from nothing."""
    trunk = trunk_rows(segments, twig_size)
    whole = trunk == segments.stop - segments.start
    has_parent = segments.parent != NO_PARENT
    is_twig = ~whole & ((trunk > 0) | ~has_parent | whole[segments.parent])
    pieces: dict[int, _Piece] = {}
    for g in _largest_first(segments, np.flatnonzero(trunk)):
        above = pieces.get(int(segments.parent[g]))
        pieces[g] = _Piece(int(segments.start[g]), int(trunk[g]), above, waiting=1)
        if above is not None:
            above.waiting += 1
    loose = []
    for g in np.flatnonzero(is_twig).tolist():
        above = pieces.get(g if trunk[g] else int(segments.parent[g]))
        twig = _Twig(g, int(segments.start[g] + trunk[g]), int(segments.subtree_end[g]), above)
        if above is None:
            loose.append(twig)
        else:
            above.waiting += 1
            above.twigs.append(twig)
    return list(pieces.values()), loose


def _largest_first(segments: Segments, chosen: np.ndarray) -> list[int]:
    """The chosen segments (with all above them) in depth-first preorder, larger subtrees before smaller ones.

    Side branches then come when the long ones beside them are gone, so the stack holds fewer things at a time
    and a path lies in fewer runs of slots.
    """
    size = segments.subtree_end - segments.start
    below: dict[int, list[int]] = {}
    for g in chosen[np.argsort(size[chosen], kind="stable")].tolist():
        below.setdefault(int(segments.parent[g]), []).append(g)
    order = []
    todo = below.get(NO_PARENT, [])
    while todo:
        order.append(todo.pop())
        todo += below.get(order[-1], [])
    return order
