"""Losses made of losses: sums, and corrections for samples that another policy drew.

    d   prox_logp - old_logp: log-probability under the weights before the update, less that under the
        sampler (older weights, another inference engine, other numerics)
    w   exp(d), the importance weight: capped, or set to 0 outside bounds, and detached

A loss whose ratio is anchored at prox_logp, times w, is decoupled PPO. The same formula serves stale samples
and a sampler whose numerics differ from the trainer's. Every policy loss is proportional to A as long as A's
sign stays, so weighting the loss and weighting the advantage are the same: `sequence_weights` uses that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dta_jax.losses import (
    KL_KINDS,
    NLL,
    EntropyBonus,
    Entry,
    KLKind,
    KLPenalty,
    PolicyLoss,
    TokenLoss,
    ValueClip,
    anchor_fields,
    anchor_logp,
    check,
    kl_estimate,
    log,
    safe_exp,
)

Target: TypeAlias = Literal["prox_logp", "current"]
Reduction: TypeAlias = Literal["mean", "sum"]

METRICS: Final = ("ratio", *KL_KINDS)


@dataclass(frozen=True)
class BehaviourWeight:
    """An importance weight exp(d), bounded.

        cap    clip(exp(d), low, high)
        mask   exp(d) where low <= metric <= high, else 0

    Attributes:
      high: upper bound, None for none.
      low: lower bound, None for none.
      mode: "cap" or "mask". Masked entries keep their place in every mean's denominator.
      metric: what "mask" compares: the weight itself ("ratio"), or the estimate k1, k2 or k3 of
        KL(sampler || target), at the sampler's own samples: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.

    Source: cap: Espeholt et al. 2018 (arXiv 1802.01561), section 4.1, and Fu et al. 2025, AReaL (arXiv
    2505.24298); mask with two bounds: Ling Team 2025, IcePop (arXiv 2510.18855).
    """

    high: float | None = 2.0
    low: float | None = None
    mode: Literal["cap", "mask"] = "cap"
    metric: Literal["ratio"] | KLKind = "ratio"

    def __post_init__(self) -> None:
        check(self, "mode", self.mode in ("cap", "mask"), "'cap' or 'mask'")
        check(self, "metric", self.metric in METRICS, f"one of {', '.join(METRICS)}")
        check(self, "metric", self.mode == "mask" or self.metric == "ratio", "'ratio', because mode is 'cap'")
        if self.metric == "ratio":
            check(self, "high", self.high is None or self.high > 0, "None or a positive number")
            check(self, "low", self.low is None or self.low >= 0, "None or a number of at least 0")
        if self.low is not None and self.high is not None:
            check(self, "low", self.low <= self.high, f"at most high = {self.high}")

    def __call__(self, log_ratio: jax.Array) -> jax.Array:
        """Weights of entries: d in, w out, elementwise."""
        return self._bounded(log_ratio, self._metric(log_ratio))

    def sequence_weights(
        self, log_ratio: np.ndarray, unit: np.ndarray, *, reduce: Reduction = "mean"
    ) -> np.ndarray:
        """Weights that are bounded per sequence; multiply the advantages by them.

        With metric "ratio", all entries of a unit share one weight, exp of their reduced d: the unit's
        importance weight ("sum") or its geometric mean per token ("mean"). With a KL metric, a unit is kept
        or masked by its reduced estimate, and the entries that are kept have weights of their own.

        Args:
          log_ratio: float[E], d of each entry.
          unit: int[E], the sequence (or rollout) of each entry.
          reduce: over the entries of a unit.

        Returns:
          float64[E].
        """
        ids = np.unique(unit, return_inverse=True)[1]
        d = np.asarray(log_ratio, np.float64)
        with jax.enable_x64(True):
            metric = np.asarray(self._metric(jnp.asarray(d)))
            total = np.bincount(ids, metric)
            reduced = (total / np.bincount(ids) if reduce == "mean" else total)[ids]
            weight = reduced if self.metric == "ratio" else d
            return np.asarray(self._bounded(jnp.asarray(weight), jnp.asarray(reduced)))

    def _metric(self, log_ratio: jax.Array) -> jax.Array:
        """What the bounds apply to; for "ratio" its logarithm."""
        return log_ratio if self.metric == "ratio" else kl_estimate(-log_ratio, self.metric)

    def _bounded(self, log_weight: jax.Array, metric: jax.Array) -> jax.Array:
        bound = log if self.metric == "ratio" else float
        low = -math.inf if self.low is None else bound(self.low)
        high = math.inf if self.high is None else bound(self.high)
        if self.mode == "cap":
            return safe_exp(jnp.clip(log_weight, low, high))
        return jnp.where((metric >= low) & (metric <= high), safe_exp(log_weight), 0.0)


@dataclass(frozen=True)
class OffPolicy:
    """`sg(w) * loss`: a token loss corrected entry by entry for having been sampled by another policy.

    Attributes:
      loss: a policy loss; for decoupled PPO its anchor is `target`.
      weight: how exp(d) is bounded.
      target: "prox_logp", or "current" for the policy itself, detached: right for a batch's first update,
        where it equals prox_logp, and saves the forward pass that recomputes it.

    Source: Hilton et al. 2022 (arXiv 2110.00641); Fu et al. 2025, AReaL (arXiv 2505.24298), section 5.2; as
    truncated importance sampling for an inference engine's numerics: Yao et al. 2025, Your efficient RL
    framework secretly brings you off-policy RL training.
    """

    loss: PolicyLoss
    weight: BehaviourWeight = field(default_factory=BehaviourWeight)
    target: Target = "prox_logp"

    def __post_init__(self) -> None:
        check(self, "target", self.target in ("prox_logp", "current"), "'prox_logp' or 'current'")

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.loss.required, *anchor_fields(self.target), "old_logp")))

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        weight = self.weight(anchor_logp(self.target, logp, entry) - entry["old_logp"])
        return jnp.where(weight > 0, weight * self.loss(logp, entropy, entry), 0.0)


@dataclass(frozen=True)
class AtProximal:
    """A token loss at a batch's first update, where prox_logp is the policy's own log-probability, detached:
    nobody has to recompute it.

    Attributes:
      loss: reads prox_logp.
    """

    loss: TokenLoss

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(name for name in self.loss.required if name != "prox_logp")

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        return self.loss(logp, entropy, {**entry, "prox_logp": jax.lax.stop_gradient(logp)})


@dataclass(frozen=True)
class Sum:
    """The sum of token losses, such as a policy loss, a KL penalty and an entropy bonus.

    Attributes:
      terms: what is added up, each with its own weight (`coef`), if it has one.
    """

    terms: tuple[PolicyLoss | OffPolicy | KLPenalty | EntropyBonus | NLL | ValueClip, ...]

    def __post_init__(self) -> None:
        good = isinstance(self.terms, tuple) and bool(self.terms)
        check(self, "terms", good and all(isinstance(t, TokenLoss) for t in self.terms), "token losses")

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for term in self.terms for name in term.required))

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        total = jnp.zeros_like(logp)
        for term in self.terms:
            total += term(logp, entropy, entry)
        return total
