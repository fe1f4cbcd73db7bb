"""A PPO loss on plain logits, written twice: here in JAX, in `tests.hf.peer` in torch."""

import jax
import jax.numpy as jnp

from dta_jax.model import DecoderModel, Params
from dta_jax.reference import dense_logits

CLIP = 0.2


def ppo_loss(
    model: DecoderModel, params: Params, tokens: jax.Array, advantage: jax.Array, old_logp: jax.Array
) -> jax.Array:
    """Mean of -min(r A, clip(r, 1 - eps, 1 + eps) A) over tokens[1:]; advantage, old_logp [n - 1]."""
    log_probs = jax.nn.log_softmax(dense_logits(model, params, tokens)[:-1])
    logp = jnp.take_along_axis(log_probs, tokens[1:, None], axis=1)[:, 0]
    ratio = jnp.exp(logp - old_logp)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    return -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
