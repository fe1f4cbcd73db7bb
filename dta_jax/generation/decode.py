"""The sampler's device programs over a cache of keys and values: prefill, copy, decode.

The cache has R rows of S keys; row `r` holds the keys of one context from position 0 on. What lies beyond a
row's length is never seen, so nothing is ever cleared. All three programs take the cache as their own
(donated) and change it in place.

    prefill   runs tokens of contexts that are already known, W of each row, G rows at a time
    copy      gives a row the beginning of another row's context
    decode    runs the last token of every row, draws the next, and so on, for a few steps

Attention visits key blocks up to the longest context among the rows that run together (the online softmax
of FlashAttention, arXiv 2205.14135). A block that a row sees nothing of changes none of its bits, so a row's
result does not depend on its neighbours' lengths.

Shapes: R rows, S keys per row, L layers, H / K heads, d head width, D model width, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dta_jax.attention import MASKED
from dta_jax.generation.sampling import draw
from dta_jax.model import DecoderModel, LayerParams, Params, head_weights
from dta_jax.types import accumulator_dtype

MIN_KEY_BLOCK, MAX_KEY_BLOCK = 64, 2048
LEAVE_EARLY = 4  # decoding stops when one in so many of the rows that ran has finished


class Cache(NamedTuple):
    """Keys and values, each [L, R, K, S, d], positions applied."""

    k: jax.Array
    v: jax.Array


class Prefill(NamedTuple):
    """Rows to prefill, [n, G] of them in groups that run together.

    token: int32[n, G, W]; row: int32[n, G]; start: int32[n, G], the first token's position; length:
    int32[n, G], how many of the W tokens are real, 0 for a place without a row; groups: int32[], how many
    groups are real.
    """

    token: Any
    row: Any
    start: Any
    length: Any
    groups: Any


class Copies(NamedTuple):
    """The first `length` keys of row `source` go to row `target`, in this order.

    source, target, length: int32[n], of which `number`, int32[], are real.
    """

    source: Any
    target: Any
    length: Any
    number: Any


class Decoding(NamedTuple):
    """What every row decodes.

    token: int32[R], the last of its context, not in the cache yet; length: int32[R], keys in the cache;
    drawn: int32[R], how many tokens its request has drawn; limit: int32[R], how many more it may, 0 for a
    row that rests; seed, temperature, top_k, top_p: see `dta_jax.generation.sampling.draw`; stop:
    int32[R, M], tokens that end it, filled up with -1.
    """

    token: Any
    length: Any
    drawn: Any
    limit: Any
    seed: Any
    temperature: Any
    top_k: Any
    top_p: Any
    stop: Any


class Drawn(NamedTuple):
    """token int32[steps, R] and logp float32[steps, R], of which the first `length`, int32[R], are real."""

    token: Any
    logp: Any
    length: Any


def key_block(context: int) -> int:
    """Keys per attention block: about an eighth of the context, a power of two, 64 to 2048."""
    return min(MAX_KEY_BLOCK, max(MIN_KEY_BLOCK, 1 << (context // 8).bit_length()))


@functools.partial(jax.jit, static_argnames=("model", "rows", "context"))
def empty_cache(model: DecoderModel, params: Params, rows: int, context: int) -> Cache:
    """A cache of zeros for contexts of at most `context` tokens; S is that rounded up to whole blocks."""
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
    x = jax.ShapeDtypeStruct((1, model.hidden_size), params["embed"].dtype)
    _, k, v = jax.eval_shape(model.qkv, layer, x, jax.ShapeDtypeStruct((1,), jnp.int32))
    keys = -(-context // key_block(context)) * key_block(context)
    shape = (model.num_layers, rows, model.num_kv_heads, keys, model.head_dim)
    return Cache(jnp.zeros(shape, k.dtype), jnp.zeros(shape, v.dtype))


@functools.partial(jax.jit, static_argnames=("model", "block"), donate_argnames="cache")
def prefill(model: DecoderModel, params: Params, cache: Cache, work: Prefill, *, block: int) -> Cache:
    """Writes the keys and values of known tokens to the cache.

    Args:
      model, params: the model.
      cache: donated.
      work: what to run; every row's earlier keys are in the cache.
      block: keys per attention block; divides S.
    """
    offset = jnp.arange(work.token.shape[-1], dtype=jnp.int32)

    def group(g: jax.Array, cache: Cache) -> Cache:
        real = offset < work.length[g][:, None]
        position = jnp.where(real, work.start[g][:, None] + offset, 0)
        _, cache = _forward(model, params, cache, work.token[g], work.row[g], position, real, block)
        return cache

    return lax.fori_loop(jnp.int32(0), work.groups, group, cache)


@functools.partial(jax.jit, static_argnames="block", donate_argnames="cache")
def copy(cache: Cache, work: Copies, *, block: int) -> Cache:
    """Copies beginnings of rows, block by block; what lies behind `length` in the last block goes along."""
    layers, _, kv_heads, _, head_dim = cache.k.shape
    zero = jnp.int32(0)

    def one(i: jax.Array, cache: Cache) -> Cache:
        def move(j: jax.Array, cache: Cache) -> Cache:
            source, target = ((zero, row[i], zero, j * block, zero) for row in (work.source, work.target))
            sizes = (layers, 1, kv_heads, block, head_dim)
            return Cache(
                *(lax.dynamic_update_slice(a, lax.dynamic_slice(a, source, sizes), target) for a in cache)
            )

        return lax.fori_loop(zero, lax.div(work.length[i] + (block - 1), jnp.int32(block)), move, cache)

    return lax.fori_loop(zero, work.number, one, cache)


@functools.partial(jax.jit, static_argnames=("model", "steps", "block"), donate_argnames="cache")
def decode(
    model: DecoderModel, params: Params, cache: Cache, rows: Decoding, *, steps: int, block: int
) -> tuple[Cache, Drawn]:
    """Draws up to `steps` tokens in every row that does not rest.

    It returns before that when a quarter of those rows has finished, so that others can take their places.

    Args:
      model, params: the model.
      cache: donated.
      rows: what to decode.
      steps: tokens per row, at most.
      block: keys per attention block; divides S.
    """
    started = rows.limit > 0
    head = head_weights(params)

    class State(NamedTuple):
        step: jax.Array
        cache: Cache
        token: jax.Array
        active: jax.Array
        drawn: Drawn

    def goes_on(state: State) -> jax.Array:
        finished = (started & ~state.active).sum(dtype=jnp.int32)
        return (state.step < steps) & (finished * LEAVE_EARLY < started.sum(dtype=jnp.int32))

    def step(state: State) -> State:
        count = state.drawn.length
        position = jnp.where(state.active, rows.length + count, 0)
        h, cache = _forward(
            model,
            params,
            state.cache,
            state.token[:, None],
            None,
            position[:, None],
            state.active[:, None],
            block,
        )
        acc = accumulator_dtype(h.dtype)
        logits = jnp.einsum("rd,vd->rv", h, head.astype(h.dtype), preferred_element_type=acc)
        token, logp = draw(logits, rows.seed, rows.drawn + count, rows.temperature, rows.top_k, rows.top_p)
        count = count + state.active.astype(jnp.int32)
        ended = (token[:, None] == rows.stop).any(axis=-1) | (count >= rows.limit)
        drawn = Drawn(
            state.drawn.token.at[state.step].set(token), state.drawn.logp.at[state.step].set(logp), count
        )
        return State(state.step + 1, cache, token, state.active & ~ended, drawn)

    shape = (steps, len(rows.token))
    empty = Drawn(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros_like(rows.limit))
    end = lax.while_loop(goes_on, step, State(jnp.int32(0), cache, rows.token, started, empty))
    return end.cache, end.drawn


def _forward(
    model: DecoderModel,
    params: Params,
    cache: Cache,
    token: jax.Array,
    row: jax.Array | None,
    position: jax.Array,
    real: jax.Array,
    block: int,
) -> tuple[jax.Array, Cache]:
    """Runs P x W tokens, each over its own row's keys.

    Args:
      token, position: int32[P, W].
      row: int32[P], the rows of the cache; None for all of them in order.
      real: bool[P, W]; other tokens write nothing.

    Returns:
      Final hidden states [P * W, D], and the cache with the tokens' keys and values.
    """
    places, width = token.shape
    own = jnp.arange(places, dtype=jnp.int32) if row is None else row
    keys = cache.k.shape[3]
    slot = jnp.where(real, position, keys)  # out of range: dropped
    flat = position.reshape(-1)
    blocks = lax.div(jnp.where(real, position, 0).max(), jnp.int32(block)) + 1

    def write(stack: jax.Array, layer: jax.Array, new: jax.Array) -> jax.Array:
        new = new.reshape(places, width, *new.shape[1:])
        return stack.at[layer, own[:, None], :, slot].set(new, mode="drop", unique_indices=True)

    def body(carry: tuple, xs: tuple[LayerParams, jax.Array]) -> tuple[tuple, None]:
        x, k_cache, v_cache = carry
        layer, l = xs
        q, k, v = model.qkv(layer, x, flat)
        k_cache, v_cache = write(k_cache, l, k), write(v_cache, l, v)
        q = q.reshape(places, width, *q.shape[1:])
        o = _attend(q, k_cache, v_cache, l, row, position, blocks, block, model.attention_scale)
        return (model.mix(layer, x, o.reshape(places * width, *o.shape[2:])), k_cache, v_cache), None

    index = jnp.arange(model.num_layers, dtype=jnp.int32)
    start = (params["embed"][token.reshape(-1)], cache.k, cache.v)
    (x, k, v), _ = lax.scan(body, start, (params["layers"], index))
    return model.final(params["final"], x), Cache(k, v)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    row: jax.Array | None,
    position: jax.Array,
    blocks: jax.Array,
    block: int,
    scale: float,
) -> jax.Array:
    """Causal attention: q [P, W, H, d] at `position` [P, W] over the first `blocks` blocks of one layer."""
    places, width, heads, head_dim = q.shape
    kv_heads, acc = k.shape[2], accumulator_dtype(q.dtype)
    group = heads // kv_heads
    q = q.reshape(places, width, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(places, kv_heads, width * group, head_dim)
    last = jnp.repeat(position, group, axis=1)[:, None, :, None]

    def read(stack: jax.Array, j: jax.Array) -> jax.Array:
        """[P, K, block, d]."""
        zero = jnp.int32(0)
        sizes = (1, stack.shape[1] if row is None else 1, kv_heads, block, head_dim)

        def at(r: jax.Array) -> jax.Array:
            return lax.dynamic_slice(stack, (layer, r, zero, j * block, zero), sizes)[0]

        return at(zero) if row is None else jax.vmap(at)(row)[:, 0]

    def body(j: jax.Array, state: tuple) -> tuple:
        out, top, total = state
        seen = j * block + jnp.arange(block, dtype=jnp.int32) <= last
        scores = jnp.einsum("pkqd,pksd->pkqs", q, read(k, j), preferred_element_type=acc) * scale
        scores = jnp.where(seen, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        p = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
        fade = jnp.exp(top - new_top)
        pv = jnp.einsum("pkqs,pksd->pkqd", p.astype(v.dtype), read(v, j), preferred_element_type=acc)
        return out * fade[..., None] + pv, new_top, total * fade + p.sum(axis=-1)

    shape = q.shape[:-1]
    start = (jnp.zeros(q.shape, acc), jnp.full(shape, MASKED, acc), jnp.zeros(shape, acc))
    out, _, total = lax.fori_loop(jnp.int32(0), blocks, body, start)
    out = (out / total[..., None]).astype(q.dtype).reshape(places, kv_heads, width, group, head_dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(places, width, heads, head_dim)
