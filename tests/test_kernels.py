"""The attention kernels in Pallas' interpreter, against the dense oracle and the plain JAX version."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax import attention, attention_backends
from dta_jax.attention_backends import Problem, bind
from dta_jax.errors import InputError
from dta_jax.kernels import tree_attention
from dta_jax.kernels.tiles import DTYPES, HEAD_DIMS, Tile, Tiles, choose_tiles, plan_tiles
from dta_jax.losses import NLL
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.schedule import compile_schedule
from dta_jax.tree_grad import tree_value_and_grad
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import BACK, PUSH
from tests.trees import SHAPE, make_samples

pytestmark = pytest.mark.optimized

TILES = Tiles(Tile(16, 16), Tile(16, 32))
LAYERS, LAYER, KEYS, QUERIES, SCALE = 3, 1, 64, 40, 0.2
SEES_NOTHING = -attention.MASKED


plan_of = jax.jit(functools.partial(plan_tiles, tiles=TILES), static_argnames="num_queries")


@jax.jit
def kernels_by(plan, do, q, k, v, dk, dv, layer, q_start, q_end):
    """Everything that the kernels compute of one layer, by given lists of blocks."""
    how = {"tiles": TILES, "scale": SCALE, "interpret": True}
    out, lse = tree_attention.forward(q, k, v, layer, q_start, q_end, plan, **how)
    dq, dk, dv = tree_attention.backward(do, q, out, lse, k, v, dk, dv, layer, q_start, q_end, plan, **how)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def kernels(*operands):
    """The same by the lists of the mask, as the engine does."""
    return kernels_by(plan_of(*operands[-2:], num_queries=QUERIES), *operands)


@jax.jit
def plain(do, q, k, v, dk, dv, layer, q_start, q_end):
    """The same in plain JAX."""
    plan = attention.plan_blocks(q_start, q_end, len(q), attention.block_size(len(q)), 16)
    how = {"block_k": 16, "scale": SCALE}
    out, lse = attention.forward(q, k, v, layer, q_start, q_end, plan, **how)
    dq, dk, dv = attention.backward(do, q, out, lse, k, v, dk, dv, layer, q_start, q_end, plan, **how)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def arrays(seed, *, group=2, d=32, dtype=jnp.float32, kv_heads=2):
    """do, q, k, v, dk, dv of a stack of several layers, with cotangents in it already."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    rows, stack = (QUERIES, kv_heads * group, d), (LAYERS, kv_heads, KEYS, d)
    half = [draw(*shape).astype(dtype) for shape in (rows, rows, stack, stack)]
    return [*half, draw(*stack), draw(*stack)]


def chunk_of_a_trie(seed):
    """The mask of a chunk whose context is a path: 24 slots, 16 of them live, then the chunk's own rows."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, rng.integers(1, 9)) for _ in range(30)]
    end = np.minimum(build_trie(sequences).subtree_end[:QUERIES], QUERIES)
    own = np.arange(len(end))
    context = rng.integers(0, len(end) + 1, 16)
    q_start, q_end = np.zeros(KEYS, np.int32), np.zeros(KEYS, np.int32)
    q_end[:16] = np.sort(context)[::-1]
    q_start[24 : 24 + len(own)], q_end[24 : 24 + len(own)] = own, end
    return jnp.asarray(q_start), jnp.asarray(q_end)


def random_intervals(seed):
    start, end = np.random.default_rng(seed).integers(0, QUERIES + 1, (2, KEYS))
    return jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32)


@jax.jit
def dense(do, q, k, v, q_start, q_end):
    """out, dq, dk, dv of one layer by differentiating the oracle."""
    swapped = [jnp.swapaxes(x, 0, 1) for x in (k, v)]
    out, pull = jax.vjp(lambda *x: attention.attend_dense(*x, q_start, q_end, SCALE), q, *swapped)
    dq, dk, dv = pull(do)
    return {"out": out, "dq": dq, "dk": jnp.swapaxes(dk, 0, 1), "dv": jnp.swapaxes(dv, 0, 1)}


def assert_close(got, want, tolerance):
    """Differences over the largest number of each array."""
    for name, b in want.items():
        a, b = np.asarray(got[name], np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()), err_msg=name)


@pytest.mark.parametrize(("group", "d"), [(1, 64), (2, 32), (4, 32)])
@pytest.mark.parametrize("mask", [chunk_of_a_trie, random_intervals])
def test_float32_equals_the_dense_oracle(group, d, mask):
    for seed in range(3):
        do, q, k, v, dk, dv = arrays(seed, group=group, d=d)
        interval = mask(seed)
        got = kernels(do, q, k, v, dk, dv, LAYER, *interval)
        got = got | {"dk": (got["dk"] - dk)[LAYER], "dv": (got["dv"] - dv)[LAYER]}
        assert_close(got, dense(do, q, k[LAYER], v[LAYER], *interval), 2e-5)


@given(seed=st.integers(0, 2**32 - 1), layer=st.integers(0, LAYERS - 1))
@settings(max_examples=15)
def test_kernels_equal_plain_jax(seed, layer):
    operands, interval = arrays(seed), chunk_of_a_trie(seed)
    assert_close(kernels(*operands, layer, *interval), plain(*operands, layer, *interval), 2e-5)


def test_bfloat16_is_as_accurate_as_plain_jax():
    """Both round products' operands to bfloat16 and add up in float32."""
    exact, interval = arrays(0), chunk_of_a_trie(0)
    half = [x.astype(jnp.bfloat16) for x in exact[:4]] + exact[4:]
    want = plain(*(x.astype(jnp.float32) for x in half), LAYER, *interval)
    error = {}
    for name, function in {"kernels": kernels, "plain": plain}.items():
        got = function(*half, LAYER, *interval)
        assert {k: x.dtype.name for k, x in got.items()} == {
            "out": "bfloat16",
            "lse": "float32",
            "dq": "bfloat16",
            "dk": "float32",
            "dv": "float32",
        }
        error[name] = {k: np.abs(np.asarray(x, np.float64) - want[k]).max() for k, x in got.items()}
    for name, largest in error["plain"].items():
        assert error["kernels"][name] <= 1.5 * largest + 1e-6, name


def test_a_query_that_sees_nothing_gives_zero():
    """Of 40 queries, the last 9; and then all."""
    for first_blind in (31, 0):
        q_start = jnp.arange(KEYS, dtype=jnp.int32)
        q_end = jnp.minimum(jnp.full(KEYS, first_blind, jnp.int32), QUERIES)
        do, q, k, v, dk, dv = arrays(1)
        got = kernels(do, q, k, v, dk, dv, LAYER, q_start, q_end)
        assert all(np.isfinite(np.asarray(x)).all() for x in got.values())
        for name in ("out", "dq"):
            assert (np.asarray(got[name][first_blind:]) == 0).all()
        assert (np.asarray(got["lse"][first_blind:]) == np.float32(SEES_NOTHING)).all()
        np.testing.assert_array_equal(got["dk"][:, :, first_blind:], dk[:, :, first_blind:])


def test_only_the_layer_and_the_keys_that_are_seen_change():
    """Keys of block 1 (of 4, 16 each) are dead. To the bit, nothing else changes."""
    q_end = jnp.where((jnp.arange(KEYS) >= 16) & (jnp.arange(KEYS) < 32), 0, QUERIES).astype(jnp.int32)
    operands = arrays(2)
    got = kernels(*operands, LAYER, jnp.zeros(KEYS, jnp.int32), q_end)
    for name, old in zip(("dk", "dv"), operands[4:], strict=True):
        changed = np.asarray(got[name] != old).any(axis=(1, 3))
        want = np.zeros((LAYERS, KEYS), bool)
        want[LAYER] = np.asarray(q_end) > 0
        np.testing.assert_array_equal(changed, want)


def test_what_nobody_sees_is_never_read():
    """Dead blocks hold NaN, in K, V and in other layers."""
    q_end = jnp.where(jnp.arange(KEYS) < 32, QUERIES, 0).astype(jnp.int32)
    do, q, k, v, dk, dv = arrays(3)
    dirty = [x.at[:, :, 32:].set(jnp.nan).at[0].set(jnp.nan) for x in (k, v)]
    interval = jnp.zeros(KEYS, jnp.int32), q_end
    clean = kernels(do, q, k, v, dk, dv, LAYER, *interval)
    for name, got in kernels(do, q, *dirty, dk, dv, LAYER, *interval).items():
        np.testing.assert_array_equal(got, clean[name], err_msg=name)


def test_lists_of_blocks_drawn_by_hand():
    """40 queries in blocks of 16 (the last half empty); W whole, p partly, . not visible.

    keys      0-15  16-31  32-47  48-63
    q  0-15     W     p      .      .
    q 16-31     W     p      .      p
    q 32-39     p     p      .      W
    """
    q_start, q_end = np.zeros(64, np.int32), np.zeros(64, np.int32)
    q_end[:16] = 39
    q_end[16:32] = np.arange(25, 41)
    q_start[16] = 3
    q_start[48:], q_end[48:] = 24, 40
    square = Tiles(Tile(16, 16), Tile(16, 16))
    plan = jax.jit(plan_tiles, static_argnums=(2, 3))(q_start, q_end, 40, square)
    visited = [row[:count].tolist() for row, (_, count) in zip(plan.k_blocks, plan.k_counts, strict=True)]
    assert visited == [[0, 1], [0, 1, 3], [3, 0, 1]]
    assert plan.k_counts[:, 0].tolist() == [1, 1, 1]
    visited = [row[:count].tolist() for row, (_, count) in zip(plan.q_blocks, plan.q_counts, strict=True)]
    assert visited == [[0, 1, 2], [0, 1, 2], [], [2, 1]]
    assert plan.q_counts[:, 0].tolist() == [2, 0, 0, 1]


def test_wholly_visible_blocks_skip_the_mask():
    """A mask that lies about them changes no bit; counted as partly visible, nothing is left of them."""
    operands, zeros = arrays(4), jnp.zeros(KEYS, jnp.int32)
    everything = jnp.full(KEYS, QUERIES, jnp.int32)
    plan = plan_of(zeros, everything, num_queries=QUERIES)
    truth = kernels_by(plan, *operands, LAYER, zeros, everything)
    for name, lied in kernels_by(plan, *operands, LAYER, zeros, zeros).items():
        np.testing.assert_array_equal(lied, truth[name], err_msg=name)
    partly = plan._replace(k_counts=plan.k_counts.at[:, 0].set(0), q_counts=plan.q_counts.at[:, 0].set(0))
    masked = kernels_by(partly, *operands, LAYER, zeros, zeros)
    for name, nothing in {"out": 0, "dq": 0, "dk": operands[4], "dv": operands[5]}.items():
        np.testing.assert_array_equal(
            masked[name], np.broadcast_to(nothing, masked[name].shape), err_msg=name
        )


def test_the_engine_computes_the_same_gradients_with_kernels():
    """A whole tree, all layers: a trunk is pushed, and chunks of 7 and 8 rows (half a tile) run backward."""
    config = Qwen3Config(**SHAPE | {"head_dim": 16})
    params = jax.jit(Qwen3(config).init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 11, 6)
    sequences = [
        np.append(trunk, [i, *rng.integers(0, 11, n)]).astype(np.int32) for i, n in enumerate((8, 7))
    ]
    samples = make_samples(rng, sequences)
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    schedule = compile_schedule(trie, rows, chunk_size=8, stack_slots=24)
    assert schedule.kind.tolist() == [PUSH, BACK, BACK, BACK]
    want, got = (
        tree_value_and_grad(Qwen3(config, attention_backend=name), params, schedule, samples.values, NLL())
        for name in ("xla", "interpret")
    )
    np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=2e-5)
    for a, b in zip(jax.tree.leaves(got.grads), jax.tree.leaves(want.grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


PROBLEM = Problem(num_queries=128, num_keys=512, head_dim=64, dtype="bfloat16", scale=0.1)
MASK = jnp.zeros(512, jnp.int32), jnp.zeros(512, jnp.int32)


def test_auto_takes_the_kernels_where_they_can_run(monkeypatch):
    for capability, can in ((None, False), (7.5, False), (8.0, True), (9.0, True)):
        monkeypatch.setattr(attention_backends, "compute_capability", lambda found=capability: found)
        assert attention_backends.kernels_can_run(PROBLEM) == can
        monkeypatch.setattr(attention_backends, "BACKENDS", {n: lambda *_, n=n: n for n in ("xla", "pallas")})
        assert bind("auto", PROBLEM, *MASK) == ("pallas" if can else "xla")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "float64"}, "dtype .*float64"),
        ({"head_dim": 48}, "head_dim .*48"),
        ({"num_keys": 96}, "keys.*96"),
    ],
)
def test_what_kernels_do_not_support(monkeypatch, change, named):
    problem = Problem(**(vars(PROBLEM) | change))
    monkeypatch.setattr(attention_backends, "compute_capability", lambda: 9.0)
    assert not attention_backends.kernels_can_run(problem)
    with pytest.raises(InputError, match=named):
        bind("pallas", problem, *MASK)


def test_kernels_asked_for_where_there_is_no_gpu():
    with pytest.raises(InputError, match="NVIDIA GPU"):
        attention_backends.require_backend("pallas")
    with pytest.raises(InputError, match="auto, xla, pallas; got 'cuda'"):
        attention_backends.require_backend("cuda")
    attention_backends.require_backend("auto")


def test_without_a_triton_lowering_auto_takes_plain_jax(monkeypatch):
    monkeypatch.setattr(attention_backends, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(attention_backends.importlib.util, "find_spec", lambda name: None)
    assert not attention_backends.kernels_can_run(PROBLEM)
    with pytest.raises(InputError, match="no Triton lowering"):
        attention_backends.require_backend("pallas")


@pytest.mark.parametrize("capability", [8.0, 8.6, 9.0, 10.0, 12.0])
def test_tiles_are_powers_of_two_that_fit_the_engines_keys(capability):
    """The engine's keys come in multiples of 256, if they are not very few."""
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            tiles = choose_tiles(head_dim, dtype, capability)
            for tile in (tiles.row, tiles.column):
                for size in (tile.block_q, tile.block_k):
                    assert size in (16, 32, 64, 128, 256)
                assert 256 % tile.block_k == 0
