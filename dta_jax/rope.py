"""Rotary position embedding, with the frequency scalings that Hugging Face configs name.

A head's coordinates `i` and `i + head_dim / 2` are one pair, turned by `position * frequency[i]` with
`frequency[i] = theta^(-2 i / head_dim)`, stretched by the scaling. Frequencies are computed on the
host in float64 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    Attributes:
      rope_type: "linear": every frequency divided by `factor`.
      factor: context growth, at least 1.
    """

    rope_type: str
    factor: float


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """Rotary frequencies float64[head_dim / 2] and the factor on cosine and sine."""
    base = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return (base, 1.0) if scaling is None else (base / scaling.factor, 1.0)


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype for what must not be rounded: float64 for float64, float32 for all others."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def rotate(x: jax.Array, position: jax.Array, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Turns x [C, heads, head_dim] by position [C]; float32 at least inside, x's dtype outside."""
    wide = wide_dtype(x.dtype)
    frequency, factor = frequencies(x.shape[-1], theta, scaling)
    angle = position.astype(wide)[:, None, None] * jnp.asarray(frequency, wide)
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    left, right = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
