"""One operation's rows through all layers, forward and in reverse, around an explicit stack.

The stack is the state of everything that later rows may attend to: K and V of every layer and the final
hidden state, by slot. The rows of the operation that runs put theirs behind the S slots, at
`[S, S + W)`, so that context and own rows are one array of keys and nothing is concatenated.

`run` is a scan over layers. `pull` is its vjp, written as the reverse scan: per layer, `jax.vjp` of the two
halves of the model's layer around `Attention.backward`. That keeps two things in place that a
`jax.vjp` of the whole scan could not: cotangents of the context are added up in float32 where they
belong (a vjp's cotangents would have the keys' dtype, and a stack-sized temporary per layer), and each
layer's weight gradient goes straight into the accumulator.

Shapes: W rows, S stack slots, N >= S + W keys, L layers, H / K heads, d head width, D model width.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dta_jax.attention import key_block
from dta_jax.attention_backends import Attention, Problem, bind
from dta_jax.model import DecoderModel, LayerParams, Params
from dta_jax.tensor_axis import local_index, lookup
from dta_jax.types import accumulator_dtype


class Stack(NamedTuple):
    """State by slot: k, v [L, K, N, d], h [N, D]. Cotangents of it have the same form, in float32."""

    k: jax.Array
    v: jax.Array
    h: jax.Array


class Rows(NamedTuple):
    """The rows of one operation; see `dta_jax.schedule.OpOperands`.

    token, position, slot: int32[W] (slots out of range are dropped); q_start, q_end: int32[N].
    """

    token: jax.Array
    position: jax.Array
    slot: jax.Array
    q_start: jax.Array
    q_end: jax.Array


class Residuals(NamedTuple):
    """What `pull` needs of `run`, per row: inputs x [L, W, D] of the layers, attention outputs [L, W, H, d]
    and log-sum-exps [L, W, H], and the last layer's output [W, D]. Kept by slot, W is N."""

    x: jax.Array
    out: jax.Array
    lse: jax.Array
    last: jax.Array


def num_keys(stack_slots: int, chunk_size: int) -> int:
    """N, the keys that hold a stack and a chunk: S + C rounded up to whole attention blocks."""
    block = key_block(stack_slots + chunk_size)
    return -(-(stack_slots + chunk_size) // block) * block


def empty_stack(model: DecoderModel, params: Params, keys: int) -> Stack:
    """A stack of zeros, in the dtypes that the model's keys and hidden states have."""
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
    x = jax.ShapeDtypeStruct((1, model.hidden_size), params["embed"].dtype)
    _, k, _ = jax.eval_shape(model.qkv, layer, x, jax.ShapeDtypeStruct((1,), jnp.int32))
    h = jax.eval_shape(model.final, params["final"], x)
    kv = jnp.zeros((model.num_layers, model.num_kv_heads, keys, model.head_dim), k.dtype)
    return Stack(kv, kv, jnp.zeros((keys, model.hidden_size), h.dtype))


def run(
    model: DecoderModel, params: Params, stack: Stack, rows: Rows, first: int
) -> tuple[jax.Array, Stack, Residuals]:
    """The forward pass of W rows.

    Args:
      model: the model.
      params: its parameters.
      stack: state of the context; keys from `first` on are overwritten.
      rows: tokens, positions and the mask.
      first: S, where the rows' own keys go.

    Returns:
      h [W, D], the final hidden states; the stack with the rows' K, V and h at `[S, S + W)`; residuals.
    """
    attention = _attention(model, stack, rows)

    def body(carry: tuple, xs: tuple[LayerParams, jax.Array]) -> tuple[tuple, tuple]:
        x, k_stack, v_stack = carry
        layer, l = xs
        q, k, v = model.qkv(layer, x, rows.position)
        k_stack, v_stack = _put(k_stack, k, l, first), _put(v_stack, v, l, first)
        out, lse = attention.forward(q, k_stack, v_stack, l)
        return (model.mix(layer, x, out), k_stack, v_stack), (x, out, lse)

    index = jnp.arange(model.num_layers, dtype=jnp.int32)
    start = (lookup(params["embed"], rows.token, model.tensor_axis), stack.k, stack.v)
    (last, k, v), (xs, outs, lses) = lax.scan(body, start, (params["layers"], index))
    h = model.final(params["final"], last)
    stack = Stack(k, v, lax.dynamic_update_slice_in_dim(stack.h, h, first, 0))
    return h, stack, Residuals(xs, outs, lses, last)


def empty_residuals(model: DecoderModel, params: Params, stack: Stack) -> Residuals:
    """Residuals of zeros, by slot of `stack`."""
    (layers, _, keys, head_dim), x = stack.k.shape, params["embed"].dtype
    wide = jnp.zeros((layers, keys, model.num_heads, head_dim), stack.k.dtype)
    return Residuals(
        x=jnp.zeros((layers, keys, model.hidden_size), x),
        out=wide,
        lse=jnp.zeros(wide.shape[:-1], accumulator_dtype(stack.k.dtype)),
        last=jnp.zeros((keys, model.hidden_size), x),
    )


def keep(kept: Residuals, residuals: Residuals, slot: jax.Array) -> Residuals:
    """Writes the rows' residuals to their slots."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[:, slot].set(new, mode="drop", unique_indices=True)

    return Residuals(
        x=put(kept.x, residuals.x),
        out=put(kept.out, residuals.out),
        lse=put(kept.lse, residuals.lse),
        last=kept.last.at[slot].set(residuals.last, mode="drop", unique_indices=True),
    )


def recall(stack: Stack, kept: Residuals, rows: Rows, first: int) -> tuple[Stack, Residuals]:
    """What `run` would give for rows that are on the stack, read from their slots instead."""

    def read(leaf: jax.Array, axis: int) -> jax.Array:
        return jnp.take(leaf, rows.slot, axis=axis, mode="fill", fill_value=0)

    stack = Stack(
        lax.dynamic_update_slice_in_dim(stack.k, read(stack.k, 2), first, 2),
        lax.dynamic_update_slice_in_dim(stack.v, read(stack.v, 2), first, 2),
        lax.dynamic_update_slice_in_dim(stack.h, read(stack.h, 0), first, 0),
    )
    return stack, Residuals(
        x=read(kept.x, 1), out=read(kept.out, 1), lse=read(kept.lse, 1), last=read(kept.last, 0)
    )


def pull(
    model: DecoderModel,
    params: Params,
    grads: Params,
    stack: Stack,
    cotangents: Stack,
    own: Stack,
    rows: Rows,
    residuals: Residuals,
    first: int,
) -> tuple[Params, Stack]:
    """The vjp of `run`, accumulating.

    Args:
      model, params, rows, first: as given to `run`; stack, residuals: its results.
      grads: sums of parameter gradients so far, float32, in the layout of `params`.
      cotangents: sums of stack cotangents so far; zero at `[S, S + W)` in k and v.
      own: k, v [L, K, W, d] and h [W, D], the whole cotangents that others left for these rows' state.

    Returns:
      grads and cotangents with this operation's added. What the own keys got at `[S, S + W)` is left there.
    """
    attention = _attention(model, stack, rows)
    width = len(rows.token)
    final, pull_final = jax.vjp(model.final, params["final"], residuals.last)
    d_final, dx = pull_final(own.h.astype(final.dtype))

    def body(carry: tuple, xs: tuple) -> tuple:
        dx, dk_stack, dv_stack, sums = carry
        layer, x, out, lse, dk, dv, l = xs
        _, pull_mix = jax.vjp(model.mix, layer, x, out)
        d_layer, dx, d_out = pull_mix(dx)
        (q, k, v), pull_qkv = jax.vjp(functools.partial(model.qkv, position=rows.position), layer, x)
        dq, dk_stack, dv_stack = attention.backward(
            d_out, q, out, lse, stack.k, stack.v, dk_stack, dv_stack, l
        )
        dk = dk + _get(dk_stack, l, first, width)
        dv = dv + _get(dv_stack, l, first, width)
        d_layer_qkv, dx_qkv = pull_qkv(
            (dq, jnp.swapaxes(dk, 0, 1).astype(k.dtype), jnp.swapaxes(dv, 0, 1).astype(v.dtype))
        )
        sums = jax.tree.map(functools.partial(_add_at, l), sums, d_layer, d_layer_qkv)
        return (dx + dx_qkv, dk_stack, dv_stack, sums), None

    index = jnp.arange(model.num_layers, dtype=jnp.int32)
    xs = (params["layers"], residuals.x, residuals.out, residuals.lse, own.k, own.v, index)
    start = (dx, cotangents.k, cotangents.v, grads["layers"])
    (dx, dk, dv, layers), _ = lax.scan(body, start, xs, reverse=True)
    token = local_index(rows.token, len(grads["embed"]), model.tensor_axis)
    grads = grads | {
        "layers": layers,
        "final": jax.tree.map(lambda total, d: total + d.astype(total.dtype), grads["final"], d_final),
        "embed": grads["embed"].at[token].add(dx.astype(grads["embed"].dtype), mode="drop"),
    }
    return grads, Stack(dk, dv, cotangents.h)


def _attention(model: DecoderModel, stack: Stack, rows: Rows) -> Attention:
    _, _, keys, head_dim = stack.k.shape
    problem = Problem(len(rows.token), keys, head_dim, stack.k.dtype.name, model.attention_scale)
    return bind(model.attention_backend, problem, rows.q_start, rows.q_end)


def _put(stack: jax.Array, own: jax.Array, layer: jax.Array, first: int) -> jax.Array:
    """Writes own [W, K, d] behind the slots of one layer."""
    zero = jnp.int32(0)
    return lax.dynamic_update_slice(
        stack, jnp.swapaxes(own, 0, 1)[None], (layer, zero, jnp.int32(first), zero)
    )


def _get(stack: jax.Array, layer: jax.Array, first: int, width: int) -> jax.Array:
    """Reads [K, W, d] from behind the slots of one layer."""
    zero, (_, kv_heads, _, head_dim) = jnp.int32(0), stack.shape
    return lax.dynamic_slice(stack, (layer, zero, jnp.int32(first), zero), (1, kv_heads, width, head_dim))[0]


def _add_at(layer: jax.Array, total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Adds two halves' gradients to one layer of the accumulator, in place."""
    old = lax.dynamic_index_in_dim(total, layer, 0, keepdims=False)
    new = old + a.astype(total.dtype) + b.astype(total.dtype)
    return lax.dynamic_update_index_in_dim(total, new, layer, 0)


def zero_gradients(params: Params) -> Params:
    """An accumulator for gradients of `params`: zeros, float32 at least."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, accumulator_dtype(leaf.dtype)), params)


def zero_cotangents(stack: Stack) -> Stack:
    """Cotangents of a stack: zeros, float32 at least."""
    return Stack(*(jnp.zeros(leaf.shape, accumulator_dtype(leaf.dtype)) for leaf in stack))
