"""Rotary position embedding, with the frequency scalings that Hugging Face configs name.

A head's coordinates `i` and `i + head_dim / 2` are one pair, turned by `position * frequency[i]` with
`frequency[i] = theta^(-2 i / head_dim)`, stretched by the scaling. Frequencies are computed on the
host in float64 and rounded once. Scalings that depend on the length of the sequence at hand ("dynamic",
"longrope") are not offered: a token's keys would change with what follows it, and could not be shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from dta_jax.errors import InputError
from dta_jax.types import accumulator_dtype

ROPE_FIELDS: Final = {  # rope_type -> the fields that it reads
    "linear": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
ROPE_TYPES: Final = tuple(ROPE_FIELDS)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched. Names are those of `rope_scaling` in a `config.json`.

    Attributes:
      rope_type: "linear", "yarn" or "llama3".
      factor: context growth, at least 1.
      original_max_position_embeddings: context length before growth (yarn, llama3; linear ignores it).
      beta_fast, beta_slow: yarn: turns over the original context beyond which a frequency is kept, and
        below which it is divided by `factor`.
      attention_factor: yarn: factor on cosine and sine; None for the paper's 0.1 log(factor) + 1, or
        for the quotient of two such terms if `mscale` and `mscale_all_dim` are given.
      mscale, mscale_all_dim: yarn: see `attention_factor`.
      truncate: yarn: round the bounds of the ramp to whole pairs.
      low_freq_factor, high_freq_factor: llama3: turns below which a frequency is divided by `factor`,
        and beyond which it is kept.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise _bad("rope_type", f"one of default, {', '.join(ROPE_TYPES)}", repr(self.rope_type))
        for name in ("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise _bad(name, "a number", repr(value))
        if self.factor < 1:
            raise _bad("factor", "at least 1", self.factor)
        original = self.original_max_position_embeddings
        if self.rope_type != "linear" and not (isinstance(original, int) and original > 0):
            raise _bad("original_max_position_embeddings", "a positive integer", repr(original))
        if self.rope_type == "yarn" and self.beta_fast < self.beta_slow:
            raise _bad("beta_fast", f"at least beta_slow={self.beta_slow}", self.beta_fast)
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise _bad(
                "high_freq_factor", f"above low_freq_factor={self.low_freq_factor}", self.high_freq_factor
            )


def _bad(field: str, expected: object, actual: object) -> InputError:
    return InputError("rope scaling", field, expected=expected, actual=actual)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """Angle per position of every pair of a head's coordinates.

    Args:
      head_dim: width of a head, even.
      theta: base of the geometric series.
      scaling: how it is stretched, if at all.

    Returns:
      float64[head_dim / 2], in radians per position, and the factor on cosine and sine.

    Source: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071), section 3.
    """
    base = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return base, 1.0
    slow = base / scaling.factor
    if scaling.rope_type == "linear":
        return slow, 1.0
    if scaling.rope_type == "yarn":
        keep = _yarn_keep(head_dim, theta, scaling)
        return slow * (1 - keep) + base * keep, _yarn_attention_factor(scaling)
    turns = scaling.original_max_position_embeddings * base / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return slow * (1 - keep) + base * keep, 1.0


def _yarn_keep(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Weight of the unscaled frequency, per pair: a ramp between the pairs that turn fast and slow."""

    def pair(turns: float) -> float:  # the pair that makes so many turns over the original context
        ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return 1 - np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0  # 1 for factor = 1

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    return grown(1.0)


def rotate(x: jax.Array, position: jax.Array, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Turns every pair of coordinates by its angle, in float32 at least.

    Args:
      x: [C, heads, head_dim].
      position: int32[C].
      theta, scaling: see `frequencies`.

    Returns:
      [C, heads, head_dim] in x's dtype.
    """
    wide = accumulator_dtype(x.dtype)
    frequency, factor = frequencies(x.shape[-1], theta, scaling)
    angle = position.astype(wide)[:, None, None] * jnp.asarray(frequency, wide)
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    left, right = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
