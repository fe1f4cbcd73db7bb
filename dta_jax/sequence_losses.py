"""Losses that are not a sum over entries: functions of a whole batch's log-probabilities, in two passes.

    pass 1, forward:   logp[E], entropy[E]
    on the host:       entry_cotangents: the loss, and its derivatives by every logp and entropy
    pass 2, backward:  the token loss `Injected` = ct_logp * l + ct_entropy * entropy, one per entry

By the chain rule the second pass's gradient is the loss's own. The value that it sums up is not: the loss is
what `entry_cotangents` returns. Where the first pass recomputes prox_logp anyway, and the batch is one
minibatch, two passes cost nothing extra.

A `unit` is what the loss couples: a sequence, a rollout of several sequences, or a pair of sequences. All
entries of a unit must be in the same call. Entries of weight 0 take no part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from dta_jax.composite_losses import OffPolicy
from dta_jax.losses import (
    NLL,
    SAPO,
    EntropyBonus,
    Entry,
    KLPenalty,
    PolicyLoss,
    PPOClip,
    Requires,
    TokenLoss,
    anchor_fields,
    anchor_logp,
    check,
    check_required,
)

SMALLEST_BUCKET = 256  # entries; arrays are padded to powers of two, each compiled once


@runtime_checkable
class SequenceLoss(Requires, Protocol):
    """A loss of a whole batch. Hashable: it is a static argument."""

    def batch_loss(self, logp: jax.Array, entropy: jax.Array, entry: Entry, unit: jax.Array) -> jax.Array:
        """The batch's loss, a scalar.

        Args:
          logp: [E] log-probabilities.
          entropy: [E] entropies.
          entry: arrays [E], among them "weight", the entry's share of the loss (see `aggregation`).
          unit: int32[E], 0 <= unit < E, what the loss couples.
        """


@dataclass(frozen=True)
class SequenceRatio:
    """A ratio loss with one importance ratio per sequence: `sum_e weight_e loss(s_u(e), A_e)`.

        s_u = exp(mean over u of (l - anchor)), or of their sum

    With PPO's clip and weights of "sequence_mean" this is GSPO.

    Attributes:
      loss: what becomes of ratio and advantage; its `anchor` is the ratio's denominator.
      reduce: "mean" (the geometric mean of the token ratios) or "sum" (the ratio of sequence probabilities).
      credit: "sequence": s_u is differentiated as it stands. "token": each entry's ratio has the value s_u
        and the gradient of its own l, so that advantages may differ within a sequence (GSPO-token). Where
        they do not, and weights and `reduce` are means over the sequence, the gradients are the same.

    Source: Zheng et al. 2025, GSPO (arXiv 2507.18071).
    """

    loss: PPOClip | SAPO
    reduce: Literal["mean", "sum"] = "mean"
    credit: Literal["sequence", "token"] = "sequence"

    def __post_init__(self) -> None:
        check(self, "loss", isinstance(self.loss, PPOClip | SAPO), "a loss of ratio and advantage")
        check(self, "reduce", self.reduce in ("mean", "sum"), "'mean' or 'sum'")
        check(self, "credit", self.credit in ("sequence", "token"), "'sequence' or 'token'")

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight", "advantage", *anchor_fields(self.loss.anchor))

    def batch_loss(self, logp: jax.Array, entropy: jax.Array, entry: Entry, unit: jax.Array) -> jax.Array:
        live = entry["weight"] > 0
        token_ratio = jnp.where(live, logp - anchor_logp(self.loss.anchor, logp, entry), 0.0)
        log_ratio = _per_unit(token_ratio, unit)
        if self.reduce == "mean":
            log_ratio /= jnp.maximum(_per_unit(live.astype(logp.dtype), unit), 1)
        log_ratio = log_ratio[unit]
        if self.credit == "token":
            log_ratio = jax.lax.stop_gradient(log_ratio) + logp - jax.lax.stop_gradient(logp)
        losses = self.loss.surrogate(log_ratio, entry["advantage"])
        return jnp.sum(jnp.where(live, entry["weight"] * losses, 0.0))


@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation: `sum_u w_u softplus(-beta z_u)`, u a pair of sequences.

        z_u = sum over the chosen of (l - ref_logp) - sum over the rejected,    w_u = sum over u of weight

    Entries carry "preference", +1 in the chosen sequence and -1 in the rejected one. Weights of
    "sequence_mean" with the pair as unit make the mean over pairs.

    Attributes:
      beta: strength of the pull towards the reference.

    Source: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        check(self, "beta", 0 < self.beta < np.inf, "a positive number")

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight", "ref_logp", "preference")

    def batch_loss(self, logp: jax.Array, entropy: jax.Array, entry: Entry, unit: jax.Array) -> jax.Array:
        live = entry["weight"] > 0
        margin = _per_unit(jnp.where(live, entry["preference"] * (logp - entry["ref_logp"]), 0.0), unit)
        return jnp.sum(_per_unit(entry["weight"], unit) * jax.nn.softplus(-self.beta * margin))


@dataclass(frozen=True)
class SequenceSum:
    """The sum of sequence losses and token losses, such as GSPO's with a KL penalty.

    Attributes:
      terms: what is added up, each with its own weight (`coef`), if it has one.
    """

    terms: tuple[SequenceRatio | DPO | PolicyLoss | OffPolicy | KLPenalty | EntropyBonus | NLL, ...]

    def __post_init__(self) -> None:
        good = isinstance(self.terms, tuple) and bool(self.terms)
        check(
            self, "terms", good and all(isinstance(t, SequenceLoss | TokenLoss) for t in self.terms), "losses"
        )

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("weight", *(name for term in self.terms for name in term.required))))

    def batch_loss(self, logp: jax.Array, entropy: jax.Array, entry: Entry, unit: jax.Array) -> jax.Array:
        total = jnp.zeros((), logp.dtype)
        for term in self.terms:
            if isinstance(term, SequenceLoss):
                total += term.batch_loss(logp, entropy, entry, unit)
            else:
                losses = jax.vmap(term)(logp, entropy, entry)
                total += jnp.sum(jnp.where(entry["weight"] > 0, entry["weight"] * losses, 0.0))
        return total


@dataclass(frozen=True)
class Injected:
    """The second pass: `ct_logp * l + ct_entropy * entropy`, whose derivatives are the two cotangents.

    Entries that carry `EntryCotangents` have weight 1, as the cotangents contain it.
    """

    @property
    def required(self) -> tuple[str, ...]:
        return ("ct_logp", "ct_entropy")

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        return entry["ct_logp"] * logp + entry["ct_entropy"] * entropy


class EntryCotangents(NamedTuple):
    """A batch's loss and its derivatives: float, [E], [E]."""

    loss: float
    ct_logp: np.ndarray
    ct_entropy: np.ndarray


def entry_cotangents(
    loss: SequenceLoss,
    logp: np.ndarray,
    entropy: np.ndarray,
    values: Mapping[str, np.ndarray],
    unit: np.ndarray,
) -> EntryCotangents:
    """The loss of a batch, and its derivative by every entry's log-probability and entropy.

    Computed in float64: a sum over a long sequence, less another, cancels in float32. A batch of a new size
    compiles at most once per power of two.

    Args:
      loss: what to differentiate.
      logp: float[E], from the first pass.
      entropy: float[E], from the first pass.
      values: arrays [E], everything in `loss.required`; the same "weight" as a one-pass loss would have.
      unit: int[E], any ids of what the loss couples.

    Returns:
      the loss, and the cotangents in logp's dtype.

    Raises:
      InputError: a value that the loss needs is missing.
    """
    check_required(loss, values)
    size = max(SMALLEST_BUCKET, 1 << max(len(logp) - 1, 0).bit_length())

    def padded(x: np.ndarray, dtype: type) -> jax.Array:
        return jnp.asarray(np.pad(np.asarray(x, dtype), (0, size - len(x))))

    with jax.enable_x64(True):
        entry = {name: padded(values[name], np.float64) for name in loss.required}
        ids = padded(np.unique(unit, return_inverse=True)[1], np.int32)
        value, (by_logp, by_entropy) = _value_and_cotangents(
            loss, padded(logp, np.float64), padded(entropy, np.float64), entry, ids
        )
        to_host = partial(np.asarray, dtype=logp.dtype)
        return EntryCotangents(float(value), to_host(by_logp)[: len(logp)], to_host(by_entropy)[: len(logp)])


@partial(jax.jit, static_argnums=0)
def _value_and_cotangents(
    loss: SequenceLoss, logp: jax.Array, entropy: jax.Array, entry: Entry, unit: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jax.value_and_grad(loss.batch_loss, argnums=(0, 1))(logp, entropy, entry, unit)


def _per_unit(x: jax.Array, unit: jax.Array) -> jax.Array:
    """Sums over units: [E] in, [E] out, of which the first entries are used (there are at most E units)."""
    return jax.ops.segment_sum(x, unit, num_segments=x.shape[0])
