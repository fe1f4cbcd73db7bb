"""Tree gradients against the dense oracle, on tries that try every corner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.losses import NLL, PPOClip
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.reference import dense_value_and_grad
from dta_jax.schedule import compile_schedule
from dta_jax.tree_grad import tree_value_and_grad
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples
from tests.naive import random_sequences

SHAPE = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}


def make_model(dtype="float32", **shape):
    model = Qwen3(Qwen3Config(**(SHAPE | shape), dtype=dtype))
    return model, model.init(jax.random.key(0))


def make_samples(rng, sequences):
    """Entries on about half of the tokens of each sequence, with values of their own."""
    pairs = [(i, p) for i, s in enumerate(sequences) for p in range(1, len(s)) if rng.random() < 0.5] or [
        (int(np.argmax([len(s) for s in sequences])), 1)
    ]
    sequence, position = np.array(pairs, np.int32).T
    draw = lambda low, high: rng.uniform(low, high, len(pairs))  # noqa: E731
    values = {
        "weight": draw(0.1, 1) / len(pairs),
        "advantage": draw(-2, 2),
        "old_logp": draw(-4, -1),
        "temperature": draw(0.6, 1.4),
    }
    return Samples(sequences, sequence, position, values)


def tree(model, params, samples, loss_fn, chunk_size, **options):
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    schedule = compile_schedule(trie, rows, chunk_size=chunk_size or trie.num_rows, **options)
    return tree_value_and_grad(model, params, schedule, samples.values, loss_fn)


def largest_error(got, want):
    """Largest over tensors of max |got - want| / max |want|."""
    errors = jax.tree.map(
        lambda a, b: float(jnp.abs(a.astype(b.dtype) - b).max() / jnp.abs(b).max()), got, want
    )
    return max(jax.tree.leaves(errors))


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 16, None])
@pytest.mark.parametrize("seed", range(3))
def test_float64_equals_dense(seed, chunk_size):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        model, params = make_model("float64", tie_word_embeddings=bool(seed % 2))
        samples = make_samples(rng, random_sequences(rng, 6, 12, vocab=4))
        loss_fn = (NLL(), PPOClip(eps_low=0.2, eps_high=0.3))[seed % 2]
        want = dense_value_and_grad(model, params, samples, loss_fn)
        got = tree(model, params, samples, loss_fn, chunk_size)
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-12)
        np.testing.assert_allclose(got.logp, want.logp, rtol=1e-11)
        np.testing.assert_allclose(got.entropy, want.entropy, rtol=1e-11)
        assert largest_error(got.grads, want.grads) < 1e-10
