"""A plain causal forward pass and PPO loss, to compare models with; everything materialised."""

import jax
import jax.numpy as jnp

from dta_jax.model import DecoderModel, Params, head_weights
from dta_jax.rope import wide_dtype

PPO_CLIP = 0.2


def logits(model: DecoderModel, params: Params, tokens: jax.Array) -> jax.Array:
    """tokens int32[n] -> [n, V], float32 at least; softmax as wide, products in the model's dtype."""
    n, group = len(tokens), model.num_heads // model.num_kv_heads
    causal = jnp.tril(jnp.ones((n, n), bool))

    def layer(x, weights):
        q, k, v = model.qkv(weights, x, jnp.arange(n))
        k, v = (jnp.repeat(a, group, axis=1) for a in (k, v))
        wide = wide_dtype(q.dtype)
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=wide) * model.attention_scale
        weight = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(v.dtype)
        return model.mix(weights, x, jnp.einsum("hqk,khd->qhd", weight, v)), None

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    hidden = model.final(params["final"], x)
    head = head_weights(params).astype(hidden.dtype)
    return jnp.einsum("nd,vd->nv", hidden, head, preferred_element_type=wide_dtype(hidden.dtype))


def ppo_loss(
    model: DecoderModel, params: Params, tokens: jax.Array, advantage: jax.Array, old_logp: jax.Array
) -> jax.Array:
    """Mean of -min(r A, clip(r, 1 - eps, 1 + eps) A) over tokens[1:]; advantage, old_logp [n - 1]."""
    log_probs = jax.nn.log_softmax(logits(model, params, tokens)[:-1])
    logp = jnp.take_along_axis(log_probs, tokens[1:, None], axis=1)[:, 0]
    ratio = jnp.exp(logp - old_logp)
    clipped = jnp.clip(ratio, 1 - PPO_CLIP, 1 + PPO_CLIP)
    return -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
