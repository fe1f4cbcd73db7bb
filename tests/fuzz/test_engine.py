"""Tries, schedules and gradients on thousands of drawn batches: more than the suite has time for."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.losses import PPOClip
from dta_jax.planner import CostModel
from dta_jax.schedule import STRATEGIES, compile_forward_schedule, compile_schedule
from dta_jax.schedule_check import check_schedule
from dta_jax.trie import build_trie, entry_rows
from tests.naive import naive_trie, random_sequences
from tests.trees import largest_error, make_model, make_samples, random_samples, run_dense, run_tree

LOSS = PPOClip(eps_low=0.2, eps_high=0.3)
FIELDS = ("token", "parent", "depth", "subtree_end", "tail")

sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=12)
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=1000)
@given(sequences)
def test_tries(drawn):
    got, want = build_trie([np.array(s, np.int32) for s in drawn]), naive_trie(drawn)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


@settings(max_examples=1000)
@given(
    seeds,
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(STRATEGIES),
    st.floats(0, 4),
    st.integers(0, 1000),
)
def test_schedules(seed, count, longest, chunk_size, strategy, push, launch):
    rng = np.random.default_rng(seed)
    drawn = random_sequences(rng, count, longest, vocab=int(rng.integers(1, 6)))
    samples = make_samples(rng, [*drawn, np.arange(2, dtype=np.int32)])
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    cost = CostModel(push=push, launch=launch)
    check_schedule(compile_schedule(trie, rows, chunk_size=chunk_size, strategy=strategy, cost=cost))
    check_schedule(compile_forward_schedule(trie, rows, chunk_size=chunk_size))


@pytest.mark.parametrize("tied", [True, False])
@settings(max_examples=150)
@given(seed=seeds, chunk_size=st.sampled_from([1, 2, 5, 16, 64]), strategy=st.sampled_from(STRATEGIES))
def test_gradients(tied, seed, chunk_size, strategy):
    with jax.enable_x64(True):
        model, params = make_model("float64", tie_word_embeddings=tied)
        samples = random_samples(seed)
        got = run_tree(model, params, samples, LOSS, chunk_size, strategy=strategy)
        want = run_dense(model, params, samples, LOSS)
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(got.logp, want.logp, rtol=1e-11)
        assert largest_error(got.grads, want.grads) < 1e-10
