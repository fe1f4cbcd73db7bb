"""Who shares what in a trie: runs of rows that the same sequences pass, and what sharing them saves.

A *run* is a maximal stretch of rows in which nothing branches and no sequence ends, so that every one of its
rows is passed by the same sequences. Runs are in preorder, as rows are.

Letters: T rows, N sequences, U runs, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dta_jax.types import NO_PARENT, Trie


@dataclass(frozen=True, eq=False)
class Runs:
    """A trie's runs.

    Attributes:
      start: int64[U], first row.
      length: int64[U], rows.
      depth: int64[U], position of the first row in its sequences.
      parent: int64[U], the run above, or `NO_PARENT`.
      end: int64[U], one past the last run of the subtree.
      sequences: int64[U], sequences that pass, those that end in it included.
    """

    start: np.ndarray
    length: np.ndarray
    depth: np.ndarray
    parent: np.ndarray
    end: np.ndarray
    sequences: np.ndarray

    def of_rows(self, row: np.ndarray) -> np.ndarray:
        """The run of each row."""
        return np.searchsorted(self.start, row, side="right") - 1


def runs_of(trie: Trie) -> Runs:
    """Draws rows together that the same sequences pass, in O(T)."""
    T = trie.num_rows
    is_child = trie.parent != NO_PARENT
    children = np.bincount(trie.parent[is_child], minlength=T + 1)
    tails = np.bincount(trie.tail, minlength=T + 1)
    goes_on = is_child & (children[trie.parent] == 1) & (tails[trie.parent] == 0)
    start = np.flatnonzero(~goes_on)
    above = trie.parent[start]
    passing = np.concatenate([[0], np.cumsum(tails[:T])])
    return Runs(
        start=start,
        length=np.diff(start, append=T),
        depth=trie.depth[start].astype(np.int64),
        parent=np.where(above == NO_PARENT, NO_PARENT, np.searchsorted(start, above, side="right") - 1),
        end=np.searchsorted(start, trie.subtree_end[start]),
        sequences=passing[trie.subtree_end[start]] - passing[start],
    )


def distinct_passing(runs: Runs, tail_run: np.ndarray, label: np.ndarray) -> np.ndarray:
    """int64[U], how many different labels the sequences that pass each run have.

    Takes as many steps as the result adds up to: each label climbs from its sequences' ends up to where it
    has been before.

    Args:
      runs: U runs.
      tail_run: int[N], the run in which each sequence ends.
      label: int[N], for instance the rollout that each sequence is of.
    """
    parent = runs.parent.tolist()
    count = [0] * len(parent)
    seen = [-1] * len(parent)
    order = np.argsort(label, kind="stable")
    for run, own in zip(tail_run[order].tolist(), label[order].tolist(), strict=True):
        while run != NO_PARENT and seen[run] != own:
            seen[run] = own
            count[run] += 1
            run = parent[run]
    return np.array(count, np.int64)


def mean_passing(trie: Trie, runs: Runs, value: np.ndarray) -> np.ndarray:
    """float64[U], mean over the sequences that pass each run of a number that each has; `value` float[N]."""
    total = np.concatenate([[0.0], np.cumsum(np.bincount(trie.tail, value, minlength=trie.num_rows))])
    stop = trie.subtree_end[runs.start]
    return (total[stop] - total[runs.start]) / runs.sequences


def saved_tokens(runs: Runs, rollouts: np.ndarray, tasks: np.ndarray | None) -> dict[str, int]:
    """Tokens that need not be computed again, by what their sequences have in common.

    A row that n sequences of r rollouts of t tasks pass saves n - 1 computations: n - r because turns of
    a rollout repeat the turns before them, r - t because rollouts of a task begin alike, t - 1 because
    tasks do.

    Args:
      runs: U runs.
      rollouts, tasks: int64[U], how many of each pass; tasks None where they are not known.

    Returns:
      {"turns", "rollouts", "tasks"} -> tokens; without tasks, what rollouts have in common is in "rollouts".
    """
    length = runs.length
    turns = int(length @ (runs.sequences - rollouts))
    if tasks is None:
        return {"turns": turns, "rollouts": int(length @ (rollouts - 1))}
    return {
        "turns": turns,
        "rollouts": int(length @ (rollouts - tasks)),
        "tasks": int(length @ (tasks - 1)),
    }


def tokens_by_depth(trie: Trie, lengths: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of all sequences and of the trie by position.

    Args:
      trie: T rows, N sequences.
      lengths: int[N], tokens of each sequence.
      bins: at most so many ranges of positions, all equally wide.

    Returns:
      edges int64[B+1] of the ranges; flat tokens int64[B]; tree tokens int64[B].
    """
    longest = trie.longest_path
    width = max(1, -(-longest // bins))
    edges = np.arange(0, longest + width, width)
    longer = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(longest), side="right")
    tree = np.bincount(trie.depth, minlength=longest)
    return edges, np.add.reduceat(longer, edges[:-1]), np.add.reduceat(tree, edges[:-1])
