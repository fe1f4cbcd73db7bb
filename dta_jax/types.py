"""The arrays that travel between the modules: sequences and entries in, trie, schedule, results out.

    Samples  --build_trie-->  Trie  --compile_schedule-->  Schedule  --tree_value_and_grad-->  result

Letters used in shapes, here and everywhere: N sequences, T tree tokens (trie rows), E entries (tokens
with loss, counted per sequence), O operations of a schedule, C chunk size, S stack slots, L layers,
D model width, H / K query / key-value heads, V vocabulary. All arrays in this module live on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dta_jax.errors import InputError

NO_PARENT: Final = -1  # Trie.parent of a first token
NO_SLOT: Final = -1  # Schedule.slot of a row that is not kept (PUSH) or was never pushed (BACK)

PUSH: Final = 0  # operation: forward pass; the rows with a slot are written to the stack
BACK: Final = 1  # operation: forward pass and vjp of a chunk; its rows leave the stack


def accumulator_dtype(dtype: np.typing.DTypeLike) -> np.dtype:
    """What sums, softmax statistics and losses are kept in: float32, or float64 for float64 models."""
    return np.dtype(np.float64) if np.dtype(dtype) == np.float64 else np.dtype(np.float32)


@dataclass(frozen=True)
class Samples:
    """Token sequences with loss on some of their tokens, before any sharing.

    Attributes:
      sequences: N arrays, int32[n_i], token ids. Views into one big array are welcome.
      sequence: int32[E], the sequence of each entry.
      position: int32[E], the position of each entry's token in that sequence, at least 1: a token's
        log-probability comes from the token before it.
      values: what a loss needs to know of each entry, by name; arrays [E, ...] (weight, advantage,
        old_logp, ...).
    """

    sequences: Sequence[np.ndarray]
    sequence: np.ndarray
    position: np.ndarray
    values: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sequence.shape != self.position.shape or self.sequence.ndim != 1:
            raise InputError(
                "samples",
                "sequence, position",
                expected="two arrays of shape [E]",
                actual=f"{self.sequence.shape}, {self.position.shape}",
            )
        lengths = np.array([len(s) for s in self.sequences], np.int64)
        if self.sequence.size:
            low, high = int(self.sequence.min()), int(self.sequence.max())
            if low < 0 or high >= len(lengths):
                raise InputError(
                    "samples", "sequence", expected=f"0 <= index < {len(lengths)}", actual=f"{low} .. {high}"
                )
            bad = np.flatnonzero((self.position < 1) | (self.position >= lengths[self.sequence]))
            if bad.size:
                e = int(bad[0])
                raise InputError(
                    "samples",
                    f"position of entry {e}",
                    expected=f"1 <= position < {lengths[self.sequence[e]]}, the length of "
                    f"sequence {self.sequence[e]} (a first token has no "
                    "log-probability)",
                    actual=int(self.position[e]),
                )
        for name, value in self.values.items():
            if len(value) != len(self.sequence):
                raise InputError(
                    "samples", f"values[{name!r}]", expected=f"{len(self.sequence)} rows", actual=len(value)
                )
            if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
                e = int(np.flatnonzero(~np.isfinite(value.reshape(len(value), -1)).all(1))[0])
                raise InputError(
                    "samples",
                    f"values[{name!r}]",
                    expected="finite numbers",
                    actual=f"{value[e]} at entry {e}",
                )

    def take(self, entry: np.ndarray) -> Samples:
        """Some entries, int[e], in the given order, with the sequences that they are in and no others."""
        kept, sequence = np.unique(self.sequence[entry], return_inverse=True)
        values = {name: array[entry] for name, array in self.values.items()}
        sequences = [self.sequences[i] for i in kept]
        return Samples(sequences, sequence.astype(np.int32), self.position[entry], values)


@dataclass(frozen=True)
class Trie:
    """All sequences of a batch, one row per distinct prefix, in depth-first preorder.

    Row `k` is an ancestor of row `q`, or `q` itself, iff `k <= q < subtree_end[k]`.

    Attributes:
      token: int32[T], token ids.
      parent: int32[T], the row of the token before, `NO_PARENT` for a first token.
      depth: int32[T], the token's position in its sequences (the position RoPE sees).
      subtree_end: int32[T], one past the last row of the subtree.
      tail: int32[N], each sequence's last row.
    """

    token: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    subtree_end: np.ndarray
    tail: np.ndarray

    @property
    def num_rows(self) -> int:
        """T, the number of tree tokens."""
        return len(self.token)

    @property
    def longest_path(self) -> int:
        """Tokens on the longest root-to-leaf path."""
        return int(self.depth.max()) + 1 if self.num_rows else 0


@dataclass(frozen=True)
class Schedule:
    """What to run, in order: a table of PUSH and BACK operations over trie rows. Pure data.

    Operation `o` runs rows `row[offset[o]:offset[o+1]]`, ascending (so in preorder), padded to `width[o]`.
    Whatever those rows attend to is either among them or on the stack: the stack's K, V and hidden
    states at the slots of their ancestors. A PUSH writes its rows' K, V and hidden state to `slot`. A
    BACK takes over the cotangents that later operations left at `slot` and frees those slots.
    `dta_jax.schedule.check_schedule` states and checks every rule.

    Attributes:
      trie: the trie that the rows belong to.
      kind: int32[O], PUSH or BACK.
      width: int32[O], rows executed, padding included; one of a few values, each compiled once.
      offset: int64[O+1], where each operation's rows start in `row` and `slot`.
      row: int32[R], trie rows.
      slot: int32[R], stack slot of each row, or `NO_SLOT`.
      entry_offset: int64[O+1], where each operation's entries start in `entry`. Entries are evaluated
        by the operation that runs their own row (not their parent's).
      entry: int64[E], indices of the caller's entries, in the order in which they are evaluated.
      entry_row: int32[E], trie row of each of the caller's entries, in the caller's order.
      chunk_size: C, the largest `width`.
      stack_slots: S, slots of the stack; every `slot` is below it.
      strategy: the name of the planner strategy that made the table.
      keep_residuals: whether every row is pushed before its BACK, so that what PUSH computed can be kept
        by slot and BACK needs no second forward pass.
    """

    trie: Trie
    kind: np.ndarray
    width: np.ndarray
    offset: np.ndarray
    row: np.ndarray
    slot: np.ndarray
    entry_offset: np.ndarray
    entry: np.ndarray
    entry_row: np.ndarray
    chunk_size: int
    stack_slots: int
    strategy: str
    keep_residuals: bool = False

    @property
    def num_ops(self) -> int:
        """O, the number of operations."""
        return len(self.kind)

    @property
    def backward_tokens_executed(self) -> int:
        """Rows run by BACK, padding counted."""
        return int(self.width[self.kind == BACK].sum())

    @property
    def forward_tokens_executed(self) -> int:
        """Rows run by PUSH, padding counted."""
        return int(self.width[self.kind == PUSH].sum())
