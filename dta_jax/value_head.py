"""Value heads: what a critic says of a state, `V = w . h`, alone or beside the LM head.

The value of an entry is that of the state before its token: it is read off the hidden state of the parent
row, where the LM head reads the token's log-probability. One vector w [D], no bias; products and sums are in
float32 at least, whatever the dtype of h is. Temperatures do not touch it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dta_jax.lm_head import HeadBlock, LMHead
from dta_jax.model import Numbers, Params
from dta_jax.types import accumulator_dtype


@dataclass(frozen=True)
class ValueHead:
    """`dta_jax.model.Head` of a critic with weights of its own: log-probability and entropy are 0."""

    @property
    def gives_logp(self) -> bool:
        return False

    @property
    def gives_value(self) -> bool:
        return True

    def weights(self, params: Params) -> Params:
        """{"value": [D]}."""
        return {"value": params["value"]}

    def evaluate(
        self,
        weights: Params,
        h: jax.Array,
        token: jax.Array,
        temperature: jax.Array,
        axis: str | None = None,
    ) -> tuple[Numbers, None]:
        """See `Head.evaluate`. Every device of the axis computes the same."""
        acc = accumulator_dtype(h.dtype)
        value = h.astype(acc) @ weights["value"].astype(acc)
        nothing = jnp.zeros_like(value)
        return Numbers(nothing, nothing, value), None

    def pull(
        self,
        weights: Params,
        h: jax.Array,
        token: jax.Array,
        temperature: jax.Array,
        found: None,
        cotangents: Numbers,
        axis: str | None = None,
    ) -> tuple[jax.Array, Params]:
        """See `Head.pull`."""
        acc = accumulator_dtype(h.dtype)
        dh = jnp.outer(cotangents.value, weights["value"].astype(acc))
        return dh, {"value": cotangents.value @ h.astype(acc)}


@dataclass(frozen=True)
class PolicyValueHead:
    """`dta_jax.model.Head` of a policy with a critic on the same trunk: an LM head and a value head."""

    @property
    def gives_logp(self) -> bool:
        return True

    @property
    def gives_value(self) -> bool:
        return True

    def weights(self, params: Params) -> Params:
        """The LM head's and {"value": [D]}."""
        return LMHead().weights(params) | ValueHead().weights(params)

    def evaluate(
        self,
        weights: Params,
        h: jax.Array,
        token: jax.Array,
        temperature: jax.Array,
        axis: str | None = None,
    ) -> tuple[Numbers, HeadBlock]:
        """See `Head.evaluate`."""
        policy, block = LMHead().evaluate(_matrix(weights), h, token, temperature, axis)
        critic, _ = ValueHead().evaluate(weights, h, token, temperature, axis)
        return policy._replace(value=critic.value), block

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
        """See `Head.pull`: the sum of what the two heads owe to h."""
        dh, d_policy = LMHead().pull(_matrix(weights), h, token, temperature, found, cotangents, axis)
        dh_value, d_value = ValueHead().pull(weights, h, token, temperature, None, cotangents, axis)
        return dh + dh_value, d_policy | d_value


def _matrix(weights: Params) -> Params:
    return LMHead().weights(weights)
