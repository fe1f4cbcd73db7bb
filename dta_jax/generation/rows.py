"""What every row of the sampler's cache holds, and whom it serves. Plain numpy; no device.

A row serves one call at a time. When the call ends, the row *rests*: its context stays in the cache, and
lends its beginning to later calls, until the row is needed for another call. The longest rested goes first.

    context[r, :known[r]]    tokens that the row's call knows of
    context[r, :cached[r]]   tokens whose keys lie in the cache; a row that decodes has all but the last

`place` gives a call a row. `share` then finds the row with which the call has the longest beginning in
common, to copy it. If that row is still being filled itself, as for a group of calls with one prompt, the
call waits for it, so that a shared beginning is run once.

Keys belong to the weights that made them. A row lends only what the present weights have made, unless
`lend_stale`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """Tokens `start` .. `start + length` of a row's context, to be prefilled."""

    row: int
    start: int
    length: int


class RowTable:
    """The rows' state.

    Args:
      rows: R.
      max_context: most tokens of a context.
      version: the version of the present weights.
      lend_stale: rows lend what older weights have made, too.

    Attributes:
      context: int32[R, max_context].
      known, cached: int64[R]; see the module.
      reused, prefilled: tokens taken over from the cache, and tokens run, since the beginning.
    """

    def __init__(self, rows: int, max_context: int, version: int, lend_stale: bool) -> None:
        self.context = np.zeros((rows, max_context), np.int32)
        self.known, self.cached = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.reused = self.prefilled = 0
        self._version, self._lend_stale = version, lend_stale
        self._made_by = np.full(rows, version, np.int64)  # the oldest weights that made keys of the row
        self._serves, self._matched = np.zeros(rows, bool), np.zeros(rows, bool)
        self._placed, self._rested = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._clock = 0

    @property
    def resting(self) -> bool:
        """Whether a row is free."""
        return not self._serves.all()

    @property
    def to_fill(self) -> list[int]:
        """Rows whose call can't decode yet, in the order in which the calls came."""
        rows = np.flatnonzero(self._serves & (self.cached < self.known - 1))
        return rows[np.argsort(self._placed[rows])].tolist()

    def place(self, prompt: np.ndarray) -> int:
        """Gives a call with this prompt, int32[p], a row; some row must rest.

        A resting row is continued if its whole context begins the prompt. Else the row that is lost
        least by: one that may not lend, then the longest rested.
        """
        free = np.flatnonzero(~self._serves)
        common = np.where(self._lends(), np.minimum(self._common(prompt), self.cached), 0)
        whole = free[(common[free] == self.cached[free]) & (common[free] > 0)]
        if len(whole):
            row = int(whole[np.argmax(common[whole])])
        else:
            useful = self._lends()[free] & (self.cached[free] > 0)
            row = int(free[np.lexsort((self._rested[free], useful))[0]])
        self.cached[row] = common[row]
        self.reused += int(common[row])
        self.known[row] = len(prompt)
        self.context[row, : len(prompt)] = prompt
        self._made_by[row] = self._version
        self._clock += 1
        self._placed[row] = self._clock
        self._serves[row], self._matched[row] = True, len(whole) > 0
        return row

    def share(self, row: int) -> list[tuple[int, int, int]]:
        """Looks for the row's source, once. Gives the keys to be copied, (source, target, length), or none.

        The row has the keys from now on, so copies must run in the order in which they were given, before
        anything is prefilled. A row that waits is to be asked again.
        """
        if self._matched[row]:
            return []
        common = np.where(self._lends(), self._common(self.context[row, : self.known[row]]), 0)
        common[row] = self.cached[row]
        earlier = self._serves & (self._placed < self._placed[row])
        promised = np.where(earlier, np.minimum(common, self.known - 1), 0)
        there = np.minimum(common, self.cached)
        if promised.max() > there.max():
            return []
        self._matched[row] = True
        source = int(there.argmax())
        length, gained = int(there[source]), int(there[source] - self.cached[row])
        if not gained:
            return []
        self.cached[row] = length
        self.reused += gained
        return [(source, row, length)]

    def fill(self, widths: tuple[int, ...]) -> tuple[int, list[Piece]]:
        """What to prefill next: a width, and pieces of at most this width, as many as there are.

        The first row that is not filled chooses the width, the smallest of `widths` (ascending) that
        holds what it lacks. Rows have the pieces from now on. No pieces: nothing can be prefilled.
        """
        rows = [row for row in self.to_fill if self._matched[row]]
        lacks = [int(self.known[row] - 1 - self.cached[row]) for row in rows]
        chosen = [next((width for width in widths if width >= lack), widths[-1]) for lack in lacks]
        pieces = [
            Piece(row, int(self.cached[row]), min(lack, width))
            for row, lack, width in zip(rows, lacks, chosen, strict=True)
            if width == chosen[0]
        ]
        for piece in pieces:
            self.cached[piece.row] += piece.length
            self.prefilled += piece.length
        return (chosen[0] if chosen else 0), pieces

    def extend(self, row: int, tokens: np.ndarray) -> None:
        """Adds tokens that the row has decoded, at least one; the keys of all but the last are cached."""
        self.context[row, self.known[row] : self.known[row] + len(tokens)] = tokens
        self.known[row] += len(tokens)
        self.cached[row] = self.known[row] - 1

    def rest(self, row: int) -> None:
        """The row's call has ended."""
        self._clock += 1
        self._rested[row] = self._clock
        self._serves[row] = False

    def renew(self, version: int, unbegun: list[int]) -> None:
        """New weights. Rows in `unbegun` serve calls that have drawn nothing: they are filled anew."""
        self._version = version
        if not self._lend_stale:
            self.cached[unbegun], self._made_by[unbegun], self._matched[unbegun] = 0, version, False

    def _lends(self) -> np.ndarray:
        return np.full(len(self.known), True) if self._lend_stale else self._made_by == self._version

    def _common(self, prompt: np.ndarray) -> np.ndarray:
        """How many tokens of the prompt but its last each row's context begins with, int64[R]."""
        head = prompt[:-1]
        differs = self.context[:, : len(head)] != head
        first = differs.argmax(axis=1) if len(head) else 0
        return np.where(differs.any(axis=1), first, len(head)).astype(np.int64)
