"""What the device programs read: a schedule's operations and a batch's entries, checked and placed.

Entries lie in the order in which they are evaluated, so each operation's are one range. Everything is
padded to buckets; lengths are data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from dta_jax.errors import InputError
from dta_jax.model import DecoderModel, Params
from dta_jax.schedule import OpOperands, operands, round_slots
from dta_jax.segment import Rows, num_keys
from dta_jax.types import NO_SLOT, Schedule, accumulator_dtype

HEAD_BLOCK: Final = 256  # entries that go through the head together
MAX_ODD_CHUNK: Final = 512  # larger chunks must be multiples of CHUNK_MULTIPLE
CHUNK_MULTIPLE: Final = 128


class Entries(NamedTuple):
    """All entries of a batch on the device, in the order of evaluation, padded to the capacity.

    token, source: int32[E']: the entry's token, the key whose hidden state predicts it.
    values: float[E'] each; holds at least `weight` and `temperature`.
    """

    token: jax.Array
    source: jax.Array
    values: dict[str, jax.Array]


class Op(NamedTuple):
    """One operation on the device: its rows, how many are real, and its range of entries, all int32."""

    rows: Rows
    num_rows: jax.Array
    start: jax.Array
    stop: jax.Array


def prepare(
    model: DecoderModel, params: Params, schedule: Schedule, values: Mapping[str, np.ndarray], capacity: int
) -> tuple[Entries, Iterator[tuple[int, Op]]]:
    """Checks the input, and puts entries and operations on the device (operations as they are asked for)."""
    entries, ops = host_inputs(model, params, schedule, values, capacity)
    return jax.device_put(entries), ((kind, jax.device_put(op)) for kind, op in ops)


def host_inputs(
    model: DecoderModel, params: Params, schedule: Schedule, values: Mapping[str, np.ndarray], capacity: int
) -> tuple[Entries, Iterator[tuple[int, Op]]]:
    """What `prepare` gives, as numpy arrays.

    Raises:
      InputError: a chunk size that does not fit, tokens outside the vocabulary, values that are missing, of
        another length, or a value head's to give, a capacity that is too small.
    """
    _check(model, schedule, values)
    E = len(schedule.entry)
    capacity = capacity or entry_capacity(E)
    if capacity < E + HEAD_BLOCK:
        raise InputError("entries", "entry_capacity", expected=f"at least {E + HEAD_BLOCK}", actual=capacity)
    all_ops = list(operands(schedule))
    source = np.concatenate([op.entry_source for op in all_ops] or [np.zeros(0, np.int32)])
    token = schedule.trie.token[schedule.entry_row[schedule.entry]]
    full = {"temperature": np.ones(E)} | dict(values)
    acc = accumulator_dtype(params["embed"].dtype)

    def padded(array: np.ndarray) -> Any:
        wide = acc if np.issubdtype(array.dtype, np.floating) else array.dtype
        return np.concatenate([array, np.ones(capacity - E)]).astype(wide)

    entries = Entries(
        padded(token), padded(source), {name: padded(v[schedule.entry]) for name, v in full.items()}
    )
    keys = num_keys(schedule.stack_slots, schedule.chunk_size)
    return entries, ((op.kind, _host_op(op, keys)) for op in all_ops)


def entry_capacity(entries: int) -> int:
    """E', room for so many entries: one block more than they are, rounded up."""
    return round_slots(entries + HEAD_BLOCK)


def _check(model: DecoderModel, schedule: Schedule, values: Mapping[str, np.ndarray]) -> None:
    C, E = schedule.chunk_size, len(schedule.entry)
    if C > MAX_ODD_CHUNK and C % CHUNK_MULTIPLE:
        raise InputError(
            "schedule",
            "chunk_size",
            expected=f"at most {MAX_ODD_CHUNK}, or a multiple of {CHUNK_MULTIPLE}",
            actual=C,
            hint=f"set chunk_size = {-(-C // CHUNK_MULTIPLE) * CHUNK_MULTIPLE}",
        )
    if schedule.trie.num_rows and int(schedule.trie.token.max()) >= model.vocab_size:
        raise InputError(
            "tokens", "id", expected=f"below vocab_size={model.vocab_size}", actual=schedule.trie.token.max()
        )
    if "weight" not in values:
        raise InputError("entries", "weight", expected="one number per entry", actual=sorted(values))
    if "value" in values:
        raise InputError(
            "entries", "value", expected="no such values: value heads give them", actual="an array"
        )
    for name, value in values.items():
        if len(value) != E:
            raise InputError("entries", name, expected=f"{E} values, one per entry", actual=len(value))


def _host_op(op: OpOperands, keys: int) -> Op:
    """Pads the mask to all keys; slots that do not exist point behind them, where writes are dropped."""
    pad = (0, keys - len(op.q_start))
    slot = np.where(op.slot == NO_SLOT, keys + np.arange(op.width, dtype=np.int32), op.slot)
    rows: Any = (op.token, op.position, slot, np.pad(op.q_start, pad), np.pad(op.q_end, pad))
    numbers: Any = map(np.int32, (op.count, op.entry_start, op.entry_stop))
    return Op(Rows(*rows), *numbers)
