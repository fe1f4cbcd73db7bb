"""Slow, obvious versions of what the package does cleverly; the oracles of the property tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dta_jax.types import NO_PARENT, NO_SLOT, PUSH, Schedule, Trie


def naive_trie(sequences: Sequence[Sequence[int]]) -> Trie:
    """A dictionary per node, walked depth first with children in token order."""
    root: dict[int, dict] = {}
    for sequence in sequences:
        node = root
        for token in sequence:
            node = node.setdefault(int(token), {})
    token: list[int] = []
    parent: list[int] = []
    depth: list[int] = []
    end: list[int] = []
    row_of: dict[tuple[int, ...], int] = {}
    stack = [((t,), NO_PARENT, child) for t, child in sorted(root.items(), reverse=True)]
    while stack:
        prefix, above, children = stack.pop()
        row = row_of[prefix] = len(token)
        token.append(prefix[-1])
        parent.append(above)
        depth.append(len(prefix) - 1)
        stack += [((*prefix, t), row, child) for t, child in sorted(children.items(), reverse=True)]
    for row, d in enumerate(depth):
        end.append(next((later for later in range(row + 1, len(depth)) if depth[later] <= d), len(depth)))
    tail = [row_of[tuple(int(t) for t in s)] for s in sequences]
    return Trie(*(np.array(a, np.int32) for a in (token, parent, depth, end, tail)))


def path_rows(trie: Trie, row: int) -> list[int]:
    """Rows from the root to `row`, by walking up."""
    path = []
    while row != NO_PARENT:
        path.append(int(row))
        row = int(trie.parent[row])
    return path[::-1]


def naive_slots(schedule: Schedule, slots: int) -> list[int]:
    """Every row's slot, by sets: behind its parent, else where its piece fits, else in the longest runs."""
    free, slot_of, given = set(range(slots)), {}, []
    for o in range(schedule.num_ops):
        rows = schedule.row[schedule.offset[o] : schedule.offset[o + 1]].tolist()
        if schedule.kind[o] != PUSH:
            free |= {slot_of[row] for row in rows if row in slot_of}
        else:
            for piece in _runs(rows):
                parent = int(schedule.trie.parent[piece[0]])
                first = 0 if parent == NO_PARENT else slot_of[parent] + 1
                taken = list(range(first, first + len(piece)))
                if not free.issuperset(taken):
                    runs = _runs(sorted(free))
                    fitting = [run for run in runs if len(run) >= len(piece)]
                    long_ones = [slot for run in sorted(runs, key=len, reverse=True) for slot in run]
                    taken = sorted((fitting[0] if fitting else long_ones)[: len(piece)])
                free -= set(taken)
                slot_of |= dict(zip(piece, taken, strict=True))
        given += [slot_of.get(row, NO_SLOT) for row in rows]
    return given


def _runs(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers, cut wherever one is left out."""
    runs: list[list[int]] = []
    for number in numbers:
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    return runs


def random_sequences(
    rng: np.random.Generator, num_sequences: int, max_length: int, vocab: int = 3, fork: float = 0.8
) -> list[np.ndarray]:
    """Sequences that fork off earlier ones at random places: long shared prefixes, duplicates, prefixes."""
    sequences: list[np.ndarray] = []
    for _ in range(num_sequences):
        fresh = rng.integers(0, vocab, rng.integers(1, max_length + 1)).astype(np.int32)
        if sequences and rng.random() < fork:
            base = sequences[rng.integers(len(sequences))]
            fresh = np.concatenate([base[: rng.integers(0, len(base) + 1)], fresh])[:max_length]
        sequences.append(fresh)
    return sequences
