"""Log-probability and entropy of tokens under an LM head, in row blocks, with a vjp written by hand.

For hidden state h, head W, temperature T and token y, with z = W h / T and p = softmax(z):

    logp    = z_y - logsumexp(z)
    entropy = logsumexp(z) - sum_v p_v z_v
    d logp / dz    = onehot(y) - p
    d entropy / dz = -p (log p + entropy)

`evaluate_block` gives both and keeps the log-probabilities of one block, [B, V]; `pull_block` takes the
cotangents back to h and W. The tree engine runs the two with the loss between them, block by block, so
nothing of size E x V exists. `LMHead` is the two behind the protocol of `dta_jax.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dta_jax.model import Numbers, Params, head_weights
from dta_jax.tensor_axis import local_index, logsumexp, total
from dta_jax.types import accumulator_dtype


class HeadBlock(NamedTuple):
    """What `evaluate_block` found: logp [B], entropy [B], and log p [B, V] of every token."""

    logp: jax.Array
    entropy: jax.Array
    log_p: jax.Array


def evaluate_block(
    h: jax.Array, head: jax.Array, token: jax.Array, temperature: jax.Array, axis: str | None = None
) -> HeadBlock:
    """Log-probability and entropy of B rows.

    Args:
      h: [B, D] hidden states; products run in their dtype and are summed in float32 at least.
      head: [V, D].
      token: int32[B], below V.
      temperature: float[B], above 0; logits are divided by it.
      axis: the mesh axis over which the rows of `head` are cut; `log_p` is cut like them.
    """
    acc = accumulator_dtype(h.dtype)
    logits = jnp.einsum("bd,vd->bv", h, head.astype(h.dtype), preferred_element_type=acc)
    logits = logits / temperature.astype(acc)[:, None]
    log_p = logits - logsumexp(logits, axis)[:, None]
    own = local_index(token, len(head), axis)[:, None]
    logp = jnp.take_along_axis(log_p, own, axis=-1, mode="fill", fill_value=0)[:, 0]
    return HeadBlock(total(logp, axis), -total((jnp.exp(log_p) * log_p).sum(axis=-1), axis), log_p)


def pull_block(
    block: HeadBlock,
    h: jax.Array,
    head: jax.Array,
    token: jax.Array,
    temperature: jax.Array,
    d_logp: jax.Array,
    d_entropy: jax.Array,
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The vjp of `evaluate_block`: cotangents of its logp [B] and entropy [B] -> dh [B, D], d_head [V, D].

    Both results are in the accumulator's dtype; rows with zero cotangents add exactly nothing.
    """
    p = jnp.exp(block.log_p)
    hit = jnp.arange(len(head), dtype=token.dtype) == local_index(token, len(head), axis)[:, None]
    dz = d_logp[:, None] * (hit.astype(p.dtype) - p)
    dz = dz - d_entropy[:, None] * p * (block.log_p + block.entropy[:, None])
    dz = (dz / temperature.astype(p.dtype)[:, None]).astype(h.dtype)
    dh = jnp.einsum("bv,vd->bd", dz, head.astype(h.dtype), preferred_element_type=p.dtype)
    return total(dh, axis), jnp.einsum("bv,bd->vd", dz, h, preferred_element_type=p.dtype)


@dataclass(frozen=True)
class LMHead:
    """`dta_jax.model.Head` of a policy: log-probability and entropy, no value."""

    @property
    def gives_logp(self) -> bool:
        return True

    @property
    def gives_value(self) -> bool:
        return False

    def weights(self, params: Params) -> Params:
        """The matrix, under the name that it has: "head", or "embed" when they are tied."""
        name = "head" if "head" in params else "embed"
        return {name: params[name]}

    def evaluate(
        self,
        weights: Params,
        h: jax.Array,
        token: jax.Array,
        temperature: jax.Array,
        axis: str | None = None,
    ) -> tuple[Numbers, HeadBlock]:
        """See `Head.evaluate`."""
        block = evaluate_block(h, head_weights(weights), token, temperature, axis)
        return Numbers(block.logp, block.entropy), block

    def pull(
        self,
        weights: Params,
        h: jax.Array,
        token: jax.Array,
        temperature: jax.Array,
        found: HeadBlock,
        cotangents: Numbers,
        axis: str | None = None,
    ) -> tuple[jax.Array, Params]:
        """See `Head.pull`."""
        ((name, matrix),) = weights.items()
        d_logp, d_entropy = cotangents.logp, cotangents.entropy
        dh, d_matrix = pull_block(found, h, matrix, token, temperature, d_logp, d_entropy, axis)
        return dh, {name: d_matrix}
