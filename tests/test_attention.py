import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax import attention
from dta_jax.attention import attend, attend_dense, interval_mask
from dta_jax.trie import build_trie

pytestmark = pytest.mark.optimized


def tree_mask(trie):
    """Intervals of a whole trie run as one chunk."""
    return jnp.arange(trie.num_rows, dtype=jnp.int32), jnp.asarray(trie.subtree_end)


def random_intervals(rng, num_keys, num_queries):
    start = rng.integers(0, num_queries + 1, num_keys)
    end = rng.integers(0, num_queries + 1, num_keys)
    return jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32)


def random_qkv(rng, num_queries, num_keys, dtype=np.float32, heads=4, kv_heads=2, d=8):
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return draw(num_queries, heads, d), draw(num_keys, kv_heads, d), draw(num_keys, kv_heads, d)


def test_the_mask_drawn_in_the_docstring():
    q_start, q_end = tree_mask(build_trie([[0, 1, 2], [0, 1, 3]]))
    assert (q_start.tolist(), q_end.tolist()) == ([0, 1, 2, 3], [4, 4, 3, 4])
    drawn = ["x...", "xx..", "xxx.", "xx.x"]
    assert interval_mask(q_start, q_end, 4).tolist() == [[c == "x" for c in row] for row in drawn]


def test_keys_seen_in_a_two_level_tree():
    p, a, b = [0, 1], [2, 3], [4, 5]
    leaves = [[*p, *a, 6, 7], [*p, *a, 8, 9], [*p, *b, 6, 7], [*p, *b, 8, 9]]
    trie = build_trie(leaves)
    seen = interval_mask(*tree_mask(trie), trie.num_rows).sum(axis=1)
    second_token_of_a = int(np.flatnonzero(trie.token == 3)[0])
    first_token_of_r0 = int(np.flatnonzero(trie.token == 6)[0])
    assert (int(seen[second_token_of_a]), int(seen[first_token_of_r0])) == (4, 5)


@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1, 1), (5, 12), (16, 48), (129, 140), (640, 1024), (1024, 640)]
)
def test_blockwise_equals_dense(rng, num_queries, num_keys):
    q, k, v = random_qkv(rng, num_queries, num_keys)
    q_start, q_end = random_intervals(rng, num_keys, num_queries)
    do = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    want, want_vjp = jax.vjp(lambda *x: attend_dense(*x, q_start, q_end, 0.3), q, k, v)
    got, got_vjp = jax.vjp(lambda *x: attend(*x, q_start, q_end, 0.3), q, k, v)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)
    for name, a, b in zip("qkv", got_vjp(do), want_vjp(do), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max(), err_msg=name)


def test_float64_is_computed_in_float64(rng):
    with jax.enable_x64(True):
        q, k, v = random_qkv(rng, 7, 20, np.float64)
        q_start, q_end = random_intervals(rng, 20, 7)
        got = attend(q, k, v, q_start, q_end, 0.3)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, attend_dense(q, k, v, q_start, q_end, 0.3), rtol=0, atol=1e-14)


def test_bfloat16_accumulates_in_float32(rng):
    q, k, v = random_qkv(rng, 64, 512)
    q_start, q_end = jnp.zeros(512, jnp.int32), jnp.full(512, 64, jnp.int32)
    want = attend_dense(q, k, v, q_start, q_end, 0.3)
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    block, dense = attend(*half, q_start, q_end, 0.3), attend_dense(*half, q_start, q_end, 0.3)
    error = [float(jnp.abs(x.astype(jnp.float32) - want).max()) for x in (block, dense)]
    assert error[0] <= 1.1 * error[1]


def test_queries_that_see_nothing_give_zero_and_no_nan(rng):
    """A tree of 129 tokens in a chunk of 256."""
    q, k, v = random_qkv(rng, 256, 256)
    index = jnp.arange(256, dtype=jnp.int32)
    q_start, q_end = index, jnp.where(index < 129, 129, index)
    for function in (attend, attend_dense):
        out, vjp = jax.vjp(lambda *x, f=function: f(*x, q_start, q_end, 0.3), q, k, v)
        grads = vjp(jnp.ones_like(out))
        assert (np.asarray(out[129:]) == 0).all()
        assert all(np.isfinite(g).all() for g in grads)
        assert all((np.asarray(g[129:]) == 0).all() for g in grads)


def test_invisible_keys_change_no_bit(rng):
    q, k, v = random_qkv(rng, 16, 64)
    q_start = jnp.zeros(64, jnp.int32)
    q_end = jnp.where(jnp.arange(64) % 3 == 0, 0, 16).astype(jnp.int32)
    noise = jnp.where((jnp.arange(64) % 3 == 0)[:, None, None], 1e3, 0.0)
    for function in (attend, attend_dense):
        clean = function(q, k, v, q_start, q_end, 0.3)
        dirty = function(q, k + noise, v + noise, q_start, q_end, 0.3)
        np.testing.assert_array_equal(clean, dirty)


def test_dead_blocks_are_never_visited():
    """512 queries over 8 blocks of keys, of which the third and the last are visible to some query."""
    q_end = np.zeros(8 * 512, np.int32)
    q_end[2 * 512 + 7], q_end[-1] = 512, 1
    plan = attention.plan_blocks(
        jnp.zeros(len(q_end), jnp.int32), jnp.asarray(q_end), 1024, block_q=512, block_k=512
    )
    assert int(plan.num_active) == 2
    assert plan.pair[:2].tolist() == [2, 7]


@pytest.mark.parametrize(("size", "block"), [(1, 1), (129, 129), (512, 512), (640, 128), (2048, 512)])
def test_block_sizes_divide(size, block):
    assert attention.block_size(size) == block
    assert size % block == 0
