"""Drawing tokens: temperature, top-k, top-p, and the log-probability under the distribution drawn from.

Token `i` of a completion is the argmax of `logits / T + g`, with Gumbel noise `g` that is a function of
(seed, i) and of nothing else: which row the request has, and what runs beside it, makes no difference.

    kept   = the `top_k` likeliest of softmax(logits / T); of those, renormalised, the smallest set of
             likeliest tokens whose probability is at least `top_p`
    logp   = log-softmax of logits / T over `kept`, float32
    T = 0  takes the likeliest token, whose log-probability is then 0
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dta_jax.errors import InputError

SEED_BITS = 64


def seed_words(seed: int) -> np.ndarray:
    """A seed as the program takes it, uint32[2].

    Raises:
      InputError: not within 0 .. 2^64 - 1.
    """
    if not 0 <= seed < 1 << SEED_BITS:
        raise InputError("generate", "seed", expected=f"0 to 2^{SEED_BITS} - 1", actual=repr(seed))
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def draw(
    logits: jax.Array,
    seed: jax.Array,
    index: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per row.

    Args:
      logits: float[R, V].
      seed: uint32[R, 2], see `seed_words`.
      index: int32[R], how many tokens the request has drawn before.
      temperature: float32[R], at least 0.
      top_k: int32[R], 0 for all tokens.
      top_p: float32[R], above 0; 1 for all tokens.

    Returns:
      Tokens int32[R], and their log-probabilities float32[R]; not a number where the logits are not.
    """
    wide = logits.dtype
    z = logits / jnp.where(temperature > 0, temperature, 1).astype(wide)[:, None]
    cut = (top_k > 0) | (top_p < 1)
    z = lax.cond(cut.any(), _truncate, lambda z, *_: z, z, top_k, top_p)
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, z.shape[1:], wide))(keys)
    token = jnp.argmax(jnp.where(temperature[:, None] > 0, z + noise, z), axis=-1).astype(jnp.int32)
    own = jnp.take_along_axis(z, token[:, None], axis=-1)[:, 0]
    against = jnp.where(temperature > 0, jax.nn.logsumexp(z, axis=-1), z.max(axis=-1))
    return token, (own - against).astype(jnp.float32)


def _truncate(z: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Scaled logits [R, V] with -inf for tokens that are not kept; of equal ones the lower id is likelier."""
    order = jnp.argsort(-z, axis=-1, stable=True)
    ranked = jnp.take_along_axis(z, order, axis=-1)
    rank = jnp.arange(z.shape[-1], dtype=jnp.int32)
    ranked = jnp.where((top_k[:, None] == 0) | (rank < top_k[:, None]), ranked, -jnp.inf)
    p = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    top_p = top_p.astype(z.dtype)[:, None]
    ranked = jnp.where((top_p >= 1) | (rank == 0) | (before < top_p), ranked, -jnp.inf)
    row = jnp.arange(len(z), dtype=jnp.int32)[:, None]
    return z.at[row, order].set(ranked, unique_indices=True)
