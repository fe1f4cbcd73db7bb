"""Small models, samples and tree runs that the engine's tests share.

Shapes are fixed (`SLOTS`, `CAPACITY`, padded dense lengths), so that hundreds of random tries run a handful
of compiled programs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dta_jax.entry_blocks import LossFn
from dta_jax.model import DecoderModel, Params
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.reference import DenseResult, dense_value_and_grad
from dta_jax.schedule import compile_schedule
from dta_jax.tree_grad import TreeResult, tree_value_and_grad
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples, Schedule
from tests.naive import random_sequences

SLOTS, CAPACITY, WHOLE, LONGEST = 96, 512, 64, 12
CHUNKS = (1, 2, 5, 16, WHOLE)
SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}


def make_model(dtype: str = "float32", **shape: Any) -> tuple[Qwen3, Params]:
    model = Qwen3(Qwen3Config(**(SHAPE | shape), dtype=dtype))
    return model, model.init(jax.random.key(0))


def make_samples(rng: np.random.Generator, sequences: list[np.ndarray], share: float = 0.5) -> Samples:
    """Entries on a `share` of each sequence's tokens (at least one), each with values of its own."""
    pairs = [(i, p) for i, s in enumerate(sequences) for p in range(1, len(s)) if rng.random() < share]
    longest = int(np.argmax([len(s) for s in sequences]))
    sequence, position = np.array(pairs or [(longest, len(sequences[longest]) - 1)], np.int32).T
    count = len(sequence)
    values = {
        "weight": rng.uniform(0.1, 1, count) / count,
        "advantage": rng.uniform(-2, 2, count),
        "old_logp": rng.uniform(-4, -1, count),
        "temperature": rng.uniform(0.6, 1.4, count),
    }
    return Samples(sequences, sequence, position, values)


def random_samples(seed: int) -> Samples:
    """A batch of up to 7 sequences that share prefixes, some tokens supervised.

    The last token of the last sequence always has a loss that no clipping stops, so that no tensor's
    gradient is all rounding.
    """
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, int(rng.integers(1, 7)), LONGEST, vocab=int(rng.integers(2, 10)))
    sequences.append(rng.integers(0, 10, LONGEST).astype(np.int32)[: rng.integers(5, LONGEST + 1)])
    samples = make_samples(rng, sequences)
    extra = {"weight": 0.5, "advantage": 1.0, "old_logp": 0.0, "temperature": 1.0}
    return Samples(
        sequences,
        np.append(samples.sequence, np.int32(len(sequences) - 1)),
        np.append(samples.position, np.int32(len(sequences[-1]) - 1)),
        {name: np.append(value, extra[name]) for name, value in samples.values.items()},
    )


def schedule_for(samples: Samples, chunk_size: int, **options: Any) -> Schedule:
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    return compile_schedule(trie, rows, chunk_size=chunk_size, stack_slots=SLOTS, **options)


def run_tree(
    model: DecoderModel, params: Params, samples: Samples, loss_fn: LossFn, chunk_size: int, **options: Any
) -> TreeResult:
    schedule = schedule_for(samples, chunk_size, **options)
    return tree_value_and_grad(model, params, schedule, samples.values, loss_fn, entry_capacity=CAPACITY)


def run_dense(model: DecoderModel, params: Params, samples: Samples, loss_fn: LossFn) -> DenseResult:
    return dense_value_and_grad(model, params, samples, loss_fn, pad_to=16)


def largest_error(got: Params, want: Params) -> float:
    """Largest over tensors of max |got - want| / max |want|."""

    def error(a: jax.Array, b: jax.Array) -> float:
        return float(jnp.abs(a.astype(b.dtype) - b).max() / jnp.abs(b).max())

    return max(jax.tree.leaves(jax.tree.map(error, got, want)))
