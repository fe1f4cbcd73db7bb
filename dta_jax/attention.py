"""Attention under interval masks: every key is visible to one contiguous range of queries.

In a chunk of trie rows in preorder, the rows that may see a given key are those in the key's subtree,
and a subtree is contiguous. So two int vectors describe the whole mask, key `k` being visible to queries
`q_start[k] <= i < q_end[k]`. For the trie with tokens A, B, C on one path and D beside C, run as one chunk:

               key  A  B  C  D
     query A        x  .  .  .         q_start = [0, 1, 2, 3]
     query B        x  x  .  .         q_end   = [4, 4, 3, 4]
     query C        x  x  x  .
     query D        x  x  .  x

Keys and values live in a stack that all layers share, [L, K, N, head_dim]: context of earlier operations
and the chunk's own rows, in any order. Nothing of size queries x keys is ever stored: `BlockPlan` lists
the pairs of blocks in which something is visible, and the loops below visit only those (the online
softmax of FlashAttention, arXiv 2205.14135, over a dynamic list of blocks). A query that sees no key gives 0.

`forward` and `backward` are what the tree engine runs: in place on the stack, the cotangents of context
added where they accumulate. `attend` is the same as one differentiable function, `attend_dense` its
obvious oracle.

Shapes: C queries, N keys, H query heads, K key-value heads, G = H / K, d head_dim.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dta_jax.types import accumulator_dtype

MAX_BLOCK = 512
MASKED = -1e30  # finite, so that no inf - inf appears; exp of it is 0 in every dtype used


class BlockPlan(NamedTuple):
    """Which blocks hold something visible.

    Attributes:
      pair: int32[nq * nk], `q_block * nk + k_block` of the active pairs first, q-major.
      num_active: int32[], how many are active.
    """

    pair: jax.Array
    num_active: jax.Array


def block_size(size: int) -> int:
    """The block length for an axis of `size`: all of it up to 512, else the largest fitting power of 2."""
    return size if size <= MAX_BLOCK else math.gcd(size, MAX_BLOCK)


def key_block(keys: int) -> int:
    """Keys per attention block, for about `keys` of them: a power of two, 8 to 256.

    Blocks are visited whole: smaller ones waste less on what is invisible in them, and from 256 on the
    products are as fast as with larger ones.
    """
    return min(256, max(8, 1 << (keys - 1).bit_length()))


def plan_blocks(
    q_start: jax.Array, q_end: jax.Array, num_queries: int, block_q: int, block_k: int
) -> BlockPlan:
    """Lists the active block pairs; made once per chunk, used by every layer in both directions.

    Args:
      q_start, q_end: int32[N], each key's interval of queries.
      num_queries: C, a multiple of `block_q`; N is a multiple of `block_k`.
    """
    seen = q_start < q_end
    low = jnp.where(seen, q_start, num_queries).reshape(-1, block_k).min(axis=1)
    high = jnp.where(seen, q_end, 0).reshape(-1, block_k).max(axis=1)
    first = jnp.arange(num_queries // block_q, dtype=jnp.int32)[:, None] * block_q
    active = ((low < first + block_q) & (high > first)).reshape(-1)
    pair = jnp.argsort(~active, stable=True).astype(jnp.int32)
    return BlockPlan(pair, active.sum(dtype=jnp.int32))


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array | int,
    q_start: jax.Array,
    q_end: jax.Array,
    plan: BlockPlan,
    *,
    block_k: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Attention of C queries over one layer of the stack.

    Args:
      q: [C, H, d].
      k, v: [L, K, N, d], read at `layer` only, in place.
      layer: int[], which layer.
      q_start, q_end: int32[N].
      plan: from `plan_blocks` with the same intervals.
      block_k: keys per block; divides N.
      scale: factor on q . k.

    Returns:
      out [C, H, d] in q's dtype, and the log-sum-exp of each query's scores, float [C, H], for `backward`. A
      query that sees nothing has out 0 and a huge log-sum-exp.
    """
    geometry = _Geometry.of(q, k, block_k)
    queries, acc = geometry.fold(q), accumulator_dtype(q.dtype)
    shape = queries.shape[:-1]

    def body(state: tuple) -> tuple:
        t, out, top, total = state
        i, j = geometry.unpair(plan.pair[t])
        mask = geometry.mask(i, j, q_start, q_end)
        scores = _dot("hqd,hkd->hqk", queries[i], geometry.keys(k, layer, j), acc)
        scores = jnp.where(mask, scores * scale, MASKED)
        new_top = jnp.maximum(top[i], scores.max(axis=-1))
        p = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0)
        fade = jnp.exp(top[i] - new_top)
        pv = _dot("hqk,hkd->hqd", p.astype(v.dtype), geometry.keys(v, layer, j), acc)
        return (
            t + 1,
            out.at[i].set(out[i] * fade[..., None] + pv),
            top.at[i].set(new_top),
            total.at[i].set(total[i] * fade + p.sum(axis=-1)),
        )

    start = (
        jnp.int32(0),
        jnp.zeros(queries.shape, acc),
        jnp.full(shape, MASKED, acc),
        jnp.zeros(shape, acc),
    )
    _, out, top, total = lax.while_loop(lambda state: state[0] < plan.num_active, body, start)
    seen = total > 0
    divisor = jnp.where(seen, total, 1)
    lse = jnp.where(seen, top + jnp.log(divisor), -MASKED)
    return geometry.unfold(out / divisor[..., None]).astype(q.dtype), geometry.unfold(lse[..., None])[..., 0]


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
    plan: BlockPlan,
    *,
    block_k: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The vjp of `forward`, with the cotangents of keys and values added up in place.

    Args:
      do: [C, H, d], cotangent of `out`.
      q, k, v, layer, q_start, q_end, plan, block_k, scale: as given to `forward`; out, lse: its results.
      dk, dv: float [L, K, N, d], running sums of cotangents; changed at `layer` only.

    Returns:
      dq [C, H, d] in q's dtype, dk, dv.
    """
    geometry = _Geometry.of(q, k, block_k)
    acc = accumulator_dtype(q.dtype)
    queries, cotangents = geometry.fold(q), geometry.fold(do.astype(q.dtype))
    delta = (geometry.fold(out).astype(acc) * cotangents.astype(acc)).sum(axis=-1)
    lse = geometry.fold(lse[..., None])[..., 0]

    # Scores lie keys first here: then dv and dk, and not just one of them, read their big operand in order.
    def body(state: tuple) -> tuple:
        t, dq, dk, dv = state
        i, j = geometry.unpair(plan.pair[t])
        qb, dob, kb, vb = queries[i], cotangents[i], geometry.keys(k, layer, j), geometry.keys(v, layer, j)
        mask = geometry.mask(i, j, q_start, q_end).T
        scores = _dot("hkd,hqd->hkq", kb, qb, acc) * scale
        p = jnp.where(mask, jnp.exp(scores - lse[i][:, None]), 0)
        dp = _dot("hkd,hqd->hkq", vb, dob, acc)
        ds = (p * (dp - delta[i][:, None]) * scale).astype(q.dtype)
        dq = dq.at[i].add(_dot("hkd,hkq->hdq", kb, ds, acc))
        dk = geometry.add(dk, layer, j, _dot("hkq,hqd->hkd", ds, qb, acc))
        dv = geometry.add(dv, layer, j, _dot("hkq,hqd->hkd", p.astype(q.dtype), dob, acc))
        return t + 1, dq, dk, dv

    start = (jnp.int32(0), jnp.zeros_like(jnp.swapaxes(queries, 2, 3), dtype=acc), dk, dv)
    _, dq, dk, dv = lax.while_loop(lambda state: state[0] < plan.num_active, body, start)
    return geometry.unfold(jnp.swapaxes(dq, 2, 3)).astype(q.dtype), dk, dv


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, q_start: jax.Array, q_end: jax.Array, scale: float
) -> jax.Array:
    """Blockwise attention as one differentiable function: q [C, H, d], k, v [N, K, d] -> [C, H, d].

    C and N are at most 512 or multiples of 128.
    """
    return _attend_fwd(q, k, v, q_start, q_end, scale)[0]


def _attend_fwd(
    q: jax.Array, k: jax.Array, v: jax.Array, q_start: jax.Array, q_end: jax.Array, scale: float
) -> tuple[jax.Array, tuple]:
    stack = jnp.swapaxes(k, 0, 1)[None], jnp.swapaxes(v, 0, 1)[None]
    block_k = block_size(k.shape[0])
    plan = plan_blocks(q_start, q_end, len(q), block_size(len(q)), block_k)
    out, lse = forward(q, *stack, 0, q_start, q_end, plan, block_k=block_k, scale=scale)
    return out, (q, *stack, q_start, q_end, plan, out, lse)


def _attend_bwd(scale: float, residuals: tuple, do: jax.Array) -> tuple:
    q, k, v, q_start, q_end, plan, out, lse = residuals
    zeros = jnp.zeros(k.shape, accumulator_dtype(q.dtype))
    block_k = block_size(k.shape[2])
    dq, dk, dv = backward(
        do, q, out, lse, k, v, zeros, zeros, 0, q_start, q_end, plan, block_k=block_k, scale=scale
    )
    return dq, *(jnp.swapaxes(d[0], 0, 1).astype(k.dtype) for d in (dk, dv)), None, None


attend.defvjp(_attend_fwd, _attend_bwd)


def attend_dense(
    q: jax.Array, k: jax.Array, v: jax.Array, q_start: jax.Array, q_end: jax.Array, scale: float
) -> jax.Array:
    """What `attend` computes, written down plainly; stores every score."""
    (num_queries, heads, d), kv_heads = q.shape, k.shape[1]
    acc = accumulator_dtype(q.dtype)
    scores = _dot("qhgd,khd->hgqk", q.reshape(num_queries, kv_heads, heads // kv_heads, d), k, acc) * scale
    mask = interval_mask(q_start, q_end, num_queries)
    p = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1), 0)
    return _dot("hgqk,khd->qhgd", p.astype(v.dtype), v, acc).reshape(q.shape).astype(q.dtype)


def interval_mask(q_start: jax.Array, q_end: jax.Array, num_queries: int) -> jax.Array:
    """The mask as a matrix, bool[C, N]; for tests and pictures."""
    i = jnp.arange(num_queries, dtype=q_start.dtype)[:, None]
    return (q_start <= i) & (i < q_end)


def _dot(spec: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


class _Geometry(NamedTuple):
    """Block arithmetic. Query groups are folded into the query axis: each product is one matmul per head."""

    num_queries: int
    kv_heads: int
    group: int
    head_dim: int
    block_q: int
    block_k: int
    num_k_blocks: int

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, block_k: int) -> _Geometry:
        (num_queries, heads, head_dim), (_, kv_heads, num_keys, _) = q.shape, k.shape
        return cls(
            num_queries,
            kv_heads,
            heads // kv_heads,
            head_dim,
            block_size(num_queries),
            block_k,
            num_keys // block_k,
        )

    def fold(self, x: jax.Array) -> jax.Array:
        """[C, H, d] -> [nq, K, block_q * G, d]."""
        width = x.shape[-1]
        x = x.reshape(-1, self.block_q, self.kv_heads, self.group, width).transpose(0, 2, 1, 3, 4)
        return x.reshape(-1, self.kv_heads, self.block_q * self.group, width)

    def unfold(self, x: jax.Array) -> jax.Array:
        """[nq, K, block_q * G, d] -> [C, H, d]."""
        width = x.shape[-1]
        x = x.reshape(-1, self.kv_heads, self.block_q, self.group, width).transpose(0, 2, 1, 3, 4)
        return x.reshape(self.num_queries, -1, width)

    def unpair(self, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.div(pair, jnp.int32(self.num_k_blocks)), lax.rem(pair, jnp.int32(self.num_k_blocks))

    def mask(self, i: jax.Array, j: jax.Array, q_start: jax.Array, q_end: jax.Array) -> jax.Array:
        """bool[block_q * G, block_k]."""
        start = lax.dynamic_slice_in_dim(q_start, j * self.block_k, self.block_k)
        end = lax.dynamic_slice_in_dim(q_end, j * self.block_k, self.block_k)
        row = lax.iota(jnp.int32, self.block_q * self.group)
        query = (i * self.block_q + lax.div(row, jnp.int32(self.group)))[:, None]
        return (start <= query) & (query < end)

    def keys(self, stack: jax.Array, layer: jax.Array | int, j: jax.Array) -> jax.Array:
        """Block j of one layer, [K, block_k, d]."""
        sizes = (1, self.kv_heads, self.block_k, self.head_dim)
        return lax.dynamic_slice(stack, self._at(layer, j), sizes)[0]

    def add(self, stack: jax.Array, layer: jax.Array | int, j: jax.Array, block: jax.Array) -> jax.Array:
        """Adds [K, block_k, d] to block j of one layer."""
        block = self.keys(stack, layer, j) + block
        return lax.dynamic_update_slice(stack, block[None], self._at(layer, j))

    def _at(self, layer: jax.Array | int, j: jax.Array) -> tuple:
        return jnp.asarray(layer, jnp.int32), jnp.int32(0), j * self.block_k, jnp.int32(0)
