"""Prefix tries: all sequences of a batch as static arrays, every shared token once.

Sorted lexicographically, sequence `i` shares with the tries of all sequences before it exactly the
longest common prefix `lcp[i]` with its predecessor. So its new rows are the contiguous run of depths
`lcp[i] .. len(i) - 1`, the runs one after the other are the trie in depth-first preorder, and what is
left is where each run hangs (`parent`) and where each subtree ends: one pass over the runs with a stack
of the runs on the current path. Children are in ascending order of their token, so the trie does not
depend on the order of the sequences; only `tail` does.

The order of execution is not decided here: see `dta_jax.planner`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dta_jax.errors import InputError
from dta_jax.types import NO_PARENT, Samples, Trie

MAX_TOKEN = np.iinfo(np.int32).max


def build_trie(sequences: Sequence[np.ndarray | Sequence[int]]) -> Trie:
    """The trie of all sequences.

    Duplicates, prefixes of other sequences and forests without a common first token are all fine.
    Sorting costs O(N log N) comparisons of bytes, everything else is linear in the number of tokens.

    Args:
      sequences: N integer arrays of shape [n_i], n_i >= 1: token ids, not negative.

    Returns:
      The `Trie`; row `tail[i]` is the last token of `sequences[i]`.

    Raises:
      InputError: a sequence is empty, not a vector of integers, or holds a negative id.
    """
    arrays = [_checked(i, s) for i, s in enumerate(sequences)]
    keys = [a.astype(">i4").tobytes() for a in arrays]  # big-endian bytes order as the ids do
    order = sorted(range(len(arrays)), key=keys.__getitem__)
    ordered = [arrays[i] for i in order]

    lcp = np.zeros(len(ordered), np.int64)
    for i in range(1, len(ordered)):
        lcp[i] = _common_prefix(ordered[i - 1], ordered[i])
    size = np.array([len(a) for a in ordered], np.int64)
    stop = np.cumsum(size - lcp)
    start = stop - (size - lcp)
    num_rows = int(stop[-1]) if len(ordered) else 0

    row = np.arange(num_rows, dtype=np.int32)
    token = np.empty(num_rows, np.int32)
    for a, shared, first, last in zip(ordered, lcp.tolist(), start.tolist(), stop.tolist(), strict=True):
        token[first:last] = a[shared:]
    depth = row - np.repeat(start - lcp, size - lcp).astype(np.int32)
    parent = row - 1
    subtree_end = _hang_runs(lcp, start, stop, parent)
    tail = np.empty(len(ordered), np.int32)
    tail[order] = stop - 1  # of a duplicate: its twin's
    return Trie(token=token, parent=parent, depth=depth, subtree_end=subtree_end, tail=tail)


def _hang_runs(lcp: np.ndarray, start: np.ndarray, stop: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Writes the parent of each run's first row into `parent`; returns `subtree_end`.

    The stack holds the runs on the current path as (first depth, first row, depth below which rows are
    still open). A new run closes every open row at its own depth and below.
    """
    subtree_end = np.full(len(parent), len(parent), np.int32)
    path: list[tuple[int, int, int]] = []
    for low, first, last in zip(lcp.tolist(), start.tolist(), stop.tolist(), strict=True):
        if first == last:  # a duplicate
            continue
        while path:
            run_low, run_first, run_top = path.pop()
            keep = max(run_low, low)
            subtree_end[run_first + keep - run_low : run_first + run_top - run_low] = first
            if run_low < low:
                path.append((run_low, run_first, low))
                break
        parent[first] = path[-1][1] + low - 1 - path[-1][0] if path else NO_PARENT
        path.append((low, first, low + last - first))
    return subtree_end


def entry_rows(trie: Trie, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The trie row of each (sequence, position).

    The ancestor of row `q` at depth `d` is the last row at or before `q` whose depth is `d`. Most
    entries lie on the run of rows that ends in their sequence's tail, where it is plain subtraction.

    Args:
      trie: the trie of the sequences.
      sequence: int[E], which sequence.
      position: int[E], 0-based position in that sequence.

    Returns:
      int32[E], trie rows.

    Raises:
      InputError: a position outside its sequence.
    """
    tail = trie.tail[sequence].astype(np.int64)
    up = trie.depth[tail] - np.asarray(position, np.int64)
    outside = np.flatnonzero((up < 0) | (np.asarray(position) < 0))
    if outside.size:
        e = int(outside[0])
        raise InputError(
            "entries",
            f"position of entry {e}",
            expected=f"0 <= position <= {trie.depth[tail[e]]}",
            actual=int(position[e]),
        )
    rows = tail - up
    index = np.arange(trie.num_rows)
    run_start = np.maximum.accumulate(np.where(trie.parent == index - 1, 0, index))
    far = np.flatnonzero(rows < run_start[tail])
    if far.size:
        by_depth = np.argsort(trie.depth, kind="stable")
        key = trie.depth[by_depth].astype(np.int64) * trie.num_rows + by_depth
        wanted = np.asarray(position, np.int64)[far] * trie.num_rows + tail[far]
        rows[far] = by_depth[np.searchsorted(key, wanted, side="right") - 1]
    return rows.astype(np.int32)


def leafize(trie: Trie, samples: Samples) -> Samples:
    """Drops every sequence that is a prefix of another; its entries go to a sequence that continues it.

    Loss and gradients stay the same, entry by entry and in the same order: a causal model gives a token
    the same log-probability whatever follows it.

    Args:
      trie: the trie of `samples.sequences`.
      samples: N sequences, E entries.

    Returns:
      Samples with one sequence per leaf of the trie.
    """
    is_leaf = trie.subtree_end[trie.tail] == trie.tail + 1
    leaf_rows, kept = np.unique(trie.tail[is_leaf], return_index=True)
    kept = np.flatnonzero(is_leaf)[kept]
    rows = entry_rows(trie, samples.sequence, samples.position)
    sequence = np.searchsorted(leaf_rows, rows)  # the first leaf at or after a row is below it
    return Samples(
        [samples.sequences[i] for i in kept], sequence.astype(np.int32), samples.position, samples.values
    )


def _checked(index: int, sequence: np.ndarray | Sequence[int]) -> np.ndarray:
    array = np.asarray(sequence)
    where = f"sequence {index}"
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InputError(
            "sequences", where, expected="a vector of integer ids", actual=f"{array.dtype}{list(array.shape)}"
        )
    if not array.size:
        raise InputError("sequences", where, expected="at least one token", actual="an empty sequence")
    if array.min() < 0 or array.max() > MAX_TOKEN:
        bad = int(array.min()) if array.min() < 0 else int(array.max())
        raise InputError("sequences", where, expected=f"ids in 0 .. {MAX_TOKEN}", actual=bad)
    return array.astype(np.int32, copy=False)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
