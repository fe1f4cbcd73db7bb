"""What devices exchange that share one model: the collectives over the mesh's `tensor` axis.

A matrix that takes or gives heads, MLP features or vocabulary is cut over the axis; the residual stream is
whole everywhere. In a model's differentiated code only these two appear, each the other's transpose:

    enter    whole -> cut part   forward: nothing         backward: sum over the axis
    leave    cut part -> whole   forward: sum over axis   backward: nothing

A plain `psum` must not be differentiated here (its transpose would sum equal cotangents once more). The other
functions are for code with a vjp written by hand. Every function takes `axis=None` for a model that is not
cut, and then does nothing.

Source: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053), section 3, operators f and g.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x: jax.Array, axis: str | None) -> jax.Array:
    """A whole array, where a computation of its own begins on every device of the axis."""
    return x


def _enter_fwd(x: jax.Array, axis: str | None) -> tuple[jax.Array, None]:
    return x, None


def _enter_bwd(axis: str | None, _: None, dx: jax.Array) -> tuple[jax.Array]:
    return (total(dx, axis),)


enter.defvjp(_enter_fwd, _enter_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(x: jax.Array, axis: str | None) -> jax.Array:
    """The sum of what the devices of the axis have computed, whole on all of them."""
    return total(x, axis)


def _leave_fwd(x: jax.Array, axis: str | None) -> tuple[jax.Array, None]:
    return total(x, axis), None


def _leave_bwd(axis: str | None, _: None, dx: jax.Array) -> tuple[jax.Array]:
    return (dx,)


leave.defvjp(_leave_fwd, _leave_bwd)


def total(x: jax.Array, axis: str | None) -> jax.Array:
    """Sum over the axis; not to be differentiated."""
    return x if axis is None else lax.psum(x, axis)


def logsumexp(x: jax.Array, axis: str | None) -> jax.Array:
    """`log sum exp` over the last dimension, which is cut over the axis; not to be differentiated."""
    own = jax.nn.logsumexp(x, axis=-1)
    return own if axis is None else jax.nn.logsumexp(lax.all_gather(own, axis), axis=0)


def local_index(index: jax.Array, size: int, axis: str | None) -> jax.Array:
    """Indices into a dimension that is cut over the axis, as indices into this device's part of `size`.

    Those that lie on another device become `size`, one past the end.
    """
    if axis is None:
        return index
    local = index - lax.axis_index(axis).astype(index.dtype) * size
    return jnp.where((local >= 0) & (local < size), local, size)


def lookup(table: jax.Array, index: jax.Array, axis: str | None) -> jax.Array:
    """`table[index]` for a table whose rows are cut over the axis; not to be differentiated.

    Args:
      table: [n, ...], this device's rows.
      index: int[B], rows of the whole table.

    Returns:
      [B, ...], whole on every device.
    """
    if axis is None:
        return table[index]
    own = table.at[local_index(index, len(table), axis)].get(mode="fill", fill_value=0)
    return total(own, axis)
