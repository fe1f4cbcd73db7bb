"""Attention under interval masks as kernels for NVIDIA GPUs (Pallas, lowered through Triton).

What `dta_jax.attention` computes, by the same conventions: keys in a stack [L, K, N, d] that is read in
place at one layer, key `k` visible to the queries `q_start[k] <= i < q_end[k]`, cotangents of keys and values
added in place to float32 stacks. There are three kernels. In each, a program has one tile of the result in
registers and goes through the blocks on its list (`dta_jax.kernels.tiles`):

    forward   per query block and query head: out and log-sum-exp, over the key blocks that it sees
    dq        per query block and query head: over the same blocks
    dkv       per key block and key head: dk and dv, over the query blocks that see it, for all heads of the
              group

Blocks in which everything is visible come first and run without a mask; blocks in which nothing is visible
are on no list. A key block that nobody sees is neither read nor written. Sums are made in one order, so
results repeat to the bit.

Sources: FlashAttention-2 (arXiv 2307.08691) for the three loops, FlexAttention (arXiv 2412.05496) for lists
of whole and partial blocks.

Shapes: C queries, N keys, H query heads, K key-value heads, G = H / K, d head_dim.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from dta_jax.kernels.tiles import Tile, TilePlan, Tiles

MASKED = -1e30  # finite, so that no inf - inf appears
LOG2_E = math.log2(math.e)  # the hardware's exponential is exp2


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array | int,
    q_start: jax.Array,
    q_end: jax.Array,
    plan: TilePlan,
    *,
    tiles: Tiles,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`dta_jax.attention.forward`: arguments and results as there, but for these.

    Args:
      plan: from `plan_tiles` with the same intervals and tiles.
      tiles: from `choose_tiles`.
      interpret: whether to run in Pallas' interpreter, on any device; for tests.
    """
    (num_queries, heads, d), tile = q.shape, tiles.row
    q = _whole_blocks(q, tile)
    operands = _Operands(layer, plan.k_blocks, plan.k_counts, k, v, q_start, q_end)
    by_query, by_row = _query_specs(tile, d)
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, tile=tile, group=heads // k.shape[1], scale=scale),
        grid=(len(q) // tile.block_q, heads),
        in_specs=[*operands.specs(q_start.shape), by_query],
        out_specs=[by_query, by_row],
        out_shape=[_like(q), jax.ShapeDtypeStruct((heads, len(q)), jnp.float32)],
        compiler_params=_compiler_params(tile),
        interpret=interpret,
        name="tree_attention_forward",
    )(*operands.arrays, q)
    return out[:num_queries], lse[:, :num_queries].T


def backward(
    do: jax.Array,
    q: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dk: jax.Array,
    dv: jax.Array,
    layer: jax.Array | int,
    q_start: jax.Array,
    q_end: jax.Array,
    plan: TilePlan,
    *,
    tiles: Tiles,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`dta_jax.attention.backward`: arguments and results as there, but for those of `forward`."""
    do = do.astype(q.dtype)
    delta = jnp.einsum("chd,chd->hc", out, do, preferred_element_type=jnp.float32)
    rows = _Rows(q, do, lse.T, delta)
    settings = {"group": q.shape[1] // k.shape[1], "scale": scale}
    operands = _Operands(layer, plan.k_blocks, plan.k_counts, k, v, q_start, q_end)
    dq = _pull_queries(rows, operands, tiles.row, interpret, **settings)
    operands = _Operands(layer, plan.q_blocks, plan.q_counts, k, v, q_start, q_end)
    dk, dv = _pull_keys(rows, operands, dk, dv, tiles.column, interpret, **settings)
    return dq, dk, dv


class _Operands(NamedTuple):
    """What all kernels read first: the layer, the programs' lists, the stack and the mask."""

    layer: jax.Array | int
    blocks: jax.Array
    counts: jax.Array
    k: jax.Array
    v: jax.Array
    q_start: jax.Array
    q_end: jax.Array

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return (jnp.asarray(self.layer, jnp.int32).reshape(1), *self[1:])

    def specs(self, keys: tuple[int, ...]) -> list[pl.BlockSpec]:
        """Programs read their own list; the stack is indexed in the kernels, so nothing of it is copied.

        Args:
          keys: shape of a program's part of the intervals: [N], or [block_k] for its own keys.
        """
        own = pl.BlockSpec(keys, lambda i, h: (i,) if keys != self.q_start.shape else (0,))
        return [
            pl.BlockSpec((1,), lambda i, h: (0,)),
            pl.BlockSpec((None, self.blocks.shape[1]), lambda i, h: (i, 0)),
            pl.BlockSpec((None, 2), lambda i, h: (i, 0)),
            _whole(self.k),
            _whole(self.v),
            own,
            own,
        ]


class _Rows(NamedTuple):
    """What the reverse kernels know of queries: q, do [C, H, d], and log-sum-exp and delta [H, C]."""

    q: jax.Array
    do: jax.Array
    lse: jax.Array
    delta: jax.Array

    def padded(self, tile: Tile) -> _Rows:
        """Whole blocks of queries. Padding has cotangents of zero, so it adds nothing."""
        return _Rows(*(_whole_blocks(x, tile, axis) for x, axis in zip(self, (0, 0, 1, 1), strict=True)))


def _pull_queries(
    rows: _Rows, operands: _Operands, tile: Tile, interpret: bool, **settings: Any
) -> jax.Array:
    num_queries, rows = len(rows.q), rows.padded(tile)
    padded, heads, d = rows.q.shape
    by_query, by_row = _query_specs(tile, d)
    dq = pl.pallas_call(
        functools.partial(_dq_kernel, tile=tile, **settings),
        grid=(padded // tile.block_q, heads),
        in_specs=[*operands.specs(operands.q_start.shape), by_query, by_query, by_row, by_row],
        out_specs=by_query,
        out_shape=_like(rows.q),
        compiler_params=_compiler_params(tile),
        interpret=interpret,
        name="tree_attention_dq",
    )(*operands.arrays, *rows)
    return dq[:num_queries]


def _pull_keys(
    rows: _Rows,
    operands: _Operands,
    dk: jax.Array,
    dv: jax.Array,
    tile: Tile,
    interpret: bool,
    **settings: Any,
) -> tuple[jax.Array, jax.Array]:
    rows = rows.padded(tile)
    _, kv_heads, num_keys, _ = dk.shape
    arguments = *operands.arrays, *rows
    return pl.pallas_call(
        functools.partial(_dkv_kernel, tile=tile, **settings),
        grid=(num_keys // tile.block_k, kv_heads),
        in_specs=[*operands.specs((tile.block_k,)), *map(_whole, rows), _whole(dk), _whole(dv)],
        out_specs=[_whole(dk), _whole(dv)],
        out_shape=[_like(dk), _like(dv)],
        input_output_aliases={len(arguments): 0, len(arguments) + 1: 1},
        compiler_params=_compiler_params(tile),
        interpret=interpret,
        name="tree_attention_dkv",
    )(*arguments, dk, dv)


def _forward_kernel(
    layer_ref: Any,
    blocks_ref: Any,
    counts_ref: Any,
    k_ref: Any,
    v_ref: Any,
    start_ref: Any,
    end_ref: Any,
    q_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    tile: Tile,
    group: int,
    scale: float,
) -> None:
    layer, kv_head = layer_ref[0], _kv_head(group)
    query = _queries(pl.program_id(0), tile)
    q = q_ref[...]

    def visit(t: jax.Array, state: tuple, *, masked: bool) -> tuple:
        out, top, total = state
        keys = pl.ds(blocks_ref[t] * tile.block_k, tile.block_k)
        scores = _dot(q, k_ref[layer, kv_head, keys, :].T)
        if masked:
            visible = (start_ref[keys][None] <= query[:, None]) & (query[:, None] < end_ref[keys][None])
            scores = jnp.where(visible, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        p = jnp.exp2((scores - new_top[:, None]) * (scale * LOG2_E))
        if masked:
            p = jnp.where(visible, p, 0.0)  # a row that has seen nothing yet has top == MASKED
        fade = jnp.exp2((top - new_top) * (scale * LOG2_E))
        v = v_ref[layer, kv_head, keys, :]
        return out * fade[:, None] + _dot(p.astype(v.dtype), v), new_top, total * fade + p.sum(axis=1)

    rows = (tile.block_q,)
    state = jnp.zeros(q.shape, jnp.float32), jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)
    out, top, total = _visit_all(visit, counts_ref, state)
    seen = total > 0
    divisor = jnp.where(seen, total, 1.0)
    out_ref[...] = (out / divisor[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(seen, top * scale + jnp.log(divisor), -MASKED)


def _dq_kernel(
    layer_ref: Any,
    blocks_ref: Any,
    counts_ref: Any,
    k_ref: Any,
    v_ref: Any,
    start_ref: Any,
    end_ref: Any,
    q_ref: Any,
    do_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    dq_ref: Any,
    *,
    tile: Tile,
    group: int,
    scale: float,
) -> None:
    layer, kv_head = layer_ref[0], _kv_head(group)
    query = _queries(pl.program_id(0), tile)
    q, do, delta = q_ref[...], do_ref[...], delta_ref[...]
    lse = lse_ref[...] * LOG2_E

    def visit(t: jax.Array, dq: jax.Array, *, masked: bool) -> jax.Array:
        keys = pl.ds(blocks_ref[t] * tile.block_k, tile.block_k)
        k = k_ref[layer, kv_head, keys, :]
        p = jnp.exp2(_dot(q, k.T) * (scale * LOG2_E) - lse[:, None])
        if masked:
            visible = (start_ref[keys][None] <= query[:, None]) & (query[:, None] < end_ref[keys][None])
            p = jnp.where(visible, p, 0.0)
        ds = p * (_dot(do, v_ref[layer, kv_head, keys, :].T) - delta[:, None])
        return dq + _dot(ds.astype(k.dtype), k)

    dq = _visit_all(visit, counts_ref, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * scale).astype(dq_ref.dtype)


def _dkv_kernel(
    layer_ref: Any,
    blocks_ref: Any,
    counts_ref: Any,
    k_ref: Any,
    v_ref: Any,
    start_ref: Any,
    end_ref: Any,
    q_ref: Any,
    do_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    old_dk_ref: Any,
    old_dv_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    tile: Tile,
    group: int,
    scale: float,
) -> None:
    del old_dk_ref, old_dv_ref  # the same memory as dk and dv
    layer, kv_head = layer_ref[0], pl.program_id(1)
    keys = pl.ds(pl.program_id(0) * tile.block_k, tile.block_k)

    # Scores lie keys first here, so that both products into dk and dv have them as their left operand.
    @pl.when(counts_ref[1] > 0)
    def _add() -> None:
        k, v = k_ref[layer, kv_head, keys, :], v_ref[layer, kv_head, keys, :]
        start, end = start_ref[...], end_ref[...]

        def visit(t: jax.Array, state: tuple, *, masked: bool) -> tuple:
            dk, dv = state
            i, head = blocks_ref[lax.div(t, group)], kv_head * group + lax.rem(t, group)
            rows = pl.ds(i * tile.block_q, tile.block_q)
            q, do = q_ref[rows, head, :], do_ref[rows, head, :]
            lse = lse_ref[head, rows] * LOG2_E
            p = jnp.exp2(_dot(k, q.T) * (scale * LOG2_E) - lse[None])
            if masked:
                query = _queries(i, tile)
                visible = (start[:, None] <= query[None]) & (query[None] < end[:, None])
                p = jnp.where(visible, p, 0.0)
            ds = p * (_dot(v, do.T) - delta_ref[head, rows][None])
            dk = dk + _dot(ds.astype(q.dtype), q)
            return dk, dv + _dot(p.astype(do.dtype), do)

        zeros = jnp.zeros(k.shape, jnp.float32)
        dk, dv = _visit_all(visit, counts_ref, (zeros, zeros), times=group)
        dk_ref[layer, kv_head, keys, :] += dk * scale
        dv_ref[layer, kv_head, keys, :] += dv


def _visit_all(visit: Any, counts_ref: Any, state: Any, times: int = 1) -> Any:
    """Folds over a program's list, each block `times` over: first what needs no mask, then the rest."""
    whole, seen = counts_ref[0] * times, counts_ref[1] * times
    state = lax.fori_loop(0, whole, functools.partial(visit, masked=False), state)
    return lax.fori_loop(whole, seen, functools.partial(visit, masked=True), state)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _kv_head(group: int) -> jax.Array:
    return lax.div(pl.program_id(1), group)


def _queries(block: jax.Array, tile: Tile) -> jax.Array:
    """int32[block_q], the queries of a block."""
    return block * tile.block_q + lax.iota(jnp.int32, tile.block_q)


def _whole_blocks(x: jax.Array, tile: Tile, axis: int = 0) -> jax.Array:
    """Zeros appended to whole blocks of queries."""
    missing = -x.shape[axis] % tile.block_q
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x


def _query_specs(tile: Tile, d: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """A program's query block and head of [C, H, d], and of [H, C]."""
    return (
        pl.BlockSpec((tile.block_q, None, d), lambda i, h: (i, h, 0)),
        pl.BlockSpec((None, tile.block_q), lambda i, h: (h, i)),
    )


def _whole(x: jax.Array) -> pl.BlockSpec:
    """All of an array, for a kernel that indexes it itself."""
    return pl.BlockSpec(x.shape, lambda i, h: (0,) * x.ndim)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _compiler_params(tile: Tile) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages)
