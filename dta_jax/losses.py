"""Losses of one entry: pure functions of its log-probability, its entropy and its recorded values.

A token loss is a frozen dataclass, so that it can be a static argument of a compiled step: equal
settings are equal objects. Calling it gives the loss of ONE entry, a scalar; the engine maps it (and its
gradient) over entries and adds up `sum_e weight[e] * loss(e)`. Means over tokens or sequences are
therefore not made here but on the host, once for the whole batch: see `aggregation`. Losses that are not
such a sum are in `sequence_losses`; losses made of losses, and corrections for samples of another policy,
in `composite_losses`. Which parts make which published algorithm: `docs/algorithms.md`.

    l   log-probability of the entry's token under the policy that is trained
    A   entry["advantage"], a constant
    r   exp(l - anchor), the ratio to the policy that the step starts from

Values that an entry may carry (each loss lists what it needs in `required`):

    advantage   A
    old_logp    log-probability under the policy that sampled the token
    prox_logp   log-probability under the weights before this batch's first update, recomputed
    ref_logp    log-probability under a frozen reference model
    return, old_value   of a critic: what it should say, and what it said when the batch began
    value       what the critic says now, differentiable: models with a value head put it there
    weight, temperature   reserved: used by the engine, never by a token loss

No finite input makes a NaN gradient: ratios are clipped as logarithms, and where a published loss has
an unbounded exponential, `safe_exp` follows it up to `e^20` and its tangent from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp

from dta_jax.errors import InputError

Entry: TypeAlias = Mapping[str, jax.Array]
Anchor: TypeAlias = Literal["old_logp", "prox_logp", "current"]
KLKind: TypeAlias = Literal["k1", "k2", "k3"]

ANCHORS: Final = ("old_logp", "prox_logp", "current")
KL_KINDS: Final = ("k1", "k2", "k3")
EXP_LIMIT: Final = 20.0  # `safe_exp` is exp up to here and linear above


class Requires(Protocol):
    """Anything that says which values of an entry it reads."""

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the entry values that the loss reads."""


@runtime_checkable
class TokenLoss(Requires, Protocol):
    """A loss that is a weighted sum over entries. Hashable: it is a static argument."""

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        """The loss of one entry: scalars in, a scalar of logp's dtype out."""


@dataclass(frozen=True)
class NLL:
    """Negative log-likelihood: `-l`. Supervised fine-tuning; weighted when the entries' weights are."""

    @property
    def required(self) -> tuple[str, ...]:
        return ()

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        return -logp


@dataclass(frozen=True)
class PPOClip:
    """Clipped surrogate of PPO: `max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))`.

    With `dual_clip = c > 1` the loss of a negative advantage is at most `-A c`. Both together say that r
    is clipped to `[0, 1 + eps_high]` where A >= 0 and to `[1 - eps_low, c]` where A < 0, and the loss is
    `-A` times the clipped ratio; this is how it is computed. The gradient on a bound is the inner one.

    Attributes:
      eps_low: how far a ratio may fall while that lowers the loss; 1 removes the bound.
      eps_high: how far it may rise while that lowers the loss; `inf` removes the bound.
      dual_clip: the largest ratio that a negative advantage pushes down, or None.
      anchor: the ratio's denominator: an entry value, or "current" for the policy itself, detached (r is
        then 1 and the gradient is the policy gradient: exact for the first update of a batch).

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; separate bounds: Yu et al. 2025, DAPO (arXiv
    2503.14476), eq. 10; dual clip: Ye et al. 2020 (arXiv 1912.09729); an anchor apart from the sampling
    policy: Hilton et al. 2022 (arXiv 2110.00641).
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    anchor: Anchor = "old_logp"

    def __post_init__(self) -> None:
        check(self, "eps_low", 0 <= self.eps_low <= 1, "a number in [0, 1]")
        check(self, "eps_high", self.eps_high >= 0, "a number of at least 0")
        check(self, "dual_clip", self.dual_clip is None or self.dual_clip > 1, "None or a number above 1")
        check(self, "anchor", self.anchor in ANCHORS, f"one of {', '.join(ANCHORS)}")

    @property
    def required(self) -> tuple[str, ...]:
        return ("advantage", *anchor_fields(self.anchor))

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        return self.surrogate(logp - anchor_logp(self.anchor, logp, entry), entry["advantage"])

    def surrogate(self, log_ratio: jax.Array, advantage: jax.Array) -> jax.Array:
        """The loss as a function of log r and A."""
        down = advantage < 0
        low = jnp.where(down, log(1 - self.eps_low), -jnp.inf)
        high = jnp.where(
            down, math.inf if self.dual_clip is None else log(self.dual_clip), log(1 + self.eps_high)
        )
        return -advantage * safe_exp(_clip(log_ratio, low, high))


@dataclass(frozen=True)
class PolicyGradient:
    """REINFORCE: `-A l`, whose gradient is that of the expected reward when the policy itself sampled.

    Source: Williams 1992, Simple statistical gradient-following algorithms for connectionist
    reinforcement learning.
    """

    @property
    def required(self) -> tuple[str, ...]:
        return ("advantage",)

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        return -entry["advantage"] * logp


@dataclass(frozen=True)
class CISPO:
    """REINFORCE with clipped, detached importance weights: `-sg(clip(r, 1 - eps_low, 1 + eps_high)) A l`.

    Unlike PPO's clip, no token loses its gradient; only its weight is bounded.

    Attributes:
      eps_low: 1 removes the lower bound, as the paper does.
      eps_high: 4 bounds the weight at 5.
      anchor: the ratio's denominator, see `PPOClip`.

    Source: MiniMax 2025, MiniMax-M1 (arXiv 2506.13585); a bound of 5: Khatri et al. 2025 (arXiv
    2510.13786).
    """

    eps_low: float = 1.0
    eps_high: float = 4.0
    anchor: Anchor = "old_logp"

    def __post_init__(self) -> None:
        check(self, "eps_low", 0 <= self.eps_low <= 1, "a number in [0, 1]")
        check(self, "eps_high", self.eps_high >= 0, "a number of at least 0")
        check(self, "anchor", self.anchor in ANCHORS, f"one of {', '.join(ANCHORS)}")

    @property
    def required(self) -> tuple[str, ...]:
        return ("advantage", *anchor_fields(self.anchor))

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        log_ratio = logp - anchor_logp(self.anchor, logp, entry)
        weight = safe_exp(_clip(log_ratio, log(1 - self.eps_low), log(1 + self.eps_high)))
        return -jax.lax.stop_gradient(weight) * entry["advantage"] * logp


@dataclass(frozen=True)
class SAPO:
    """A smooth gate in place of PPO's clip: `-A (4 / tau) sigmoid(tau (r - 1))`, tau by the sign of A.

    With p the sigmoid, the gradient is `-A r grad l` times `4 p (1 - p)`: 1 at r = 1, falling to 0 on both
    sides.

    Attributes:
      tau_positive: sharpness where A > 0.
      tau_negative: sharpness elsewhere; larger, so that gradients that push down fade sooner.
      anchor: the ratio's denominator, see `PPOClip`.

    Source: Gao et al. 2025, Soft Adaptive Policy Optimization (arXiv 2511.20347).
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    anchor: Anchor = "old_logp"

    def __post_init__(self) -> None:
        check(self, "tau_positive", 0 < self.tau_positive < math.inf, "a positive number")
        check(self, "tau_negative", 0 < self.tau_negative < math.inf, "a positive number")
        check(self, "anchor", self.anchor in ANCHORS, f"one of {', '.join(ANCHORS)}")

    @property
    def required(self) -> tuple[str, ...]:
        return ("advantage", *anchor_fields(self.anchor))

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        return self.surrogate(logp - anchor_logp(self.anchor, logp, entry), entry["advantage"])

    def surrogate(self, log_ratio: jax.Array, advantage: jax.Array) -> jax.Array:
        """The loss as a function of log r and A."""
        tau = jnp.where(advantage > 0, self.tau_positive, self.tau_negative)
        return -advantage * (4 / tau) * jax.nn.sigmoid(tau * (safe_exp(log_ratio) - 1))


@dataclass(frozen=True)
class KLPenalty:
    """Estimated KL divergence from the reference model, as a loss: `coef * k(l - ref)`.

        k1 = d    k2 = d^2 / 2    k3 = exp(-d) - 1 + d,    d = l - ref

    All three estimate KL(policy || reference) from the policy's own samples. As losses they differ: k1's
    gradient is 0 on average whatever the divergence, k2's is right on average, k3's is the gradient of
    KL(reference || policy).

    Attributes:
      coef: weight of the penalty.
      kind: "k1", "k2" or "k3".

    Source: Schulman 2020, Approximating KL divergence; k3 in the loss: Shao et al. 2024, GRPO (arXiv
    2402.03300), eq. 4; gradients: Tang and Munos 2025 (arXiv 2506.09477).
    """

    coef: float
    kind: KLKind = "k3"

    def __post_init__(self) -> None:
        check(self, "coef", 0 <= self.coef < math.inf, "a number of at least 0")
        check(self, "kind", self.kind in KL_KINDS, f"one of {', '.join(KL_KINDS)}")

    @property
    def required(self) -> tuple[str, ...]:
        return ("ref_logp",)

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        return self.coef * kl_estimate(logp - entry["ref_logp"], self.kind)


@dataclass(frozen=True)
class EntropyBonus:
    """`-coef * entropy`: rewards a policy for staying undecided at the entry.

    Attributes:
      coef: weight of the bonus.

    Source: Williams and Peng 1991; Mnih et al. 2016 (arXiv 1602.01783).
    """

    coef: float

    def __post_init__(self) -> None:
        check(self, "coef", math.isfinite(self.coef), "a finite number")

    @property
    def required(self) -> tuple[str, ...]:
        return ()

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        return -self.coef * entropy


@dataclass(frozen=True)
class ValueClip:
    """A critic's loss: `coef * max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2) / 2`.

    v is entry["value"], which models with a value head give (`dta_jax.value_model`), R is entry["return"] and
    v_old entry["old_value"]. Without eps it is the squared error alone. Log-probability and entropy are not
    read, so in a `Sum` it trains a value head beside the policy.

    Attributes:
      eps: how far v may move from v_old before the loss stops rewarding it; None for no bound.
      coef: weight of the loss.

    Source: the implementation that came with PPO, described in Engstrom et al. 2020 (arXiv 2005.12729).
    """

    eps: float | None = 0.2
    coef: float = 1.0

    def __post_init__(self) -> None:
        check(self, "eps", self.eps is None or 0 <= self.eps < math.inf, "None or a number of at least 0")
        check(self, "coef", 0 <= self.coef < math.inf, "a number of at least 0")

    @property
    def required(self) -> tuple[str, ...]:
        return ("return",) if self.eps is None else ("return", "old_value")

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        if "value" not in entry:
            hint = "train dta_jax.value_model.ValueModel"
            raise InputError(
                "ValueClip", "value", expected="a model with a value head", actual="none", hint=hint
            )
        value = entry["value"]
        error = value - entry["return"]
        if self.eps is not None:
            old = entry["old_value"]
            clipped = _clip(value, old - self.eps, old + self.eps) - entry["return"]
            error = jnp.where(jnp.abs(clipped) > jnp.abs(error), clipped, error)
        return self.coef * error**2 / 2


PolicyLoss: TypeAlias = PolicyGradient | PPOClip | CISPO | SAPO


def kl_estimate(log_ratio: jax.Array, kind: KLKind) -> jax.Array:
    """Elementwise estimate of KL(p || q), `log_ratio` = log p - log q at p's samples; see `KLPenalty`."""
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    return safe_exp(-log_ratio) - 1 + log_ratio


def check_required(loss: Requires, available: Mapping[str, Any], *, source: str = "samples") -> None:
    """Refuses entries that lack a value which `loss` reads.

    Raises:
      InputError: names the first missing value.
    """
    for name in loss.required:
        if name not in available:
            raise InputError(
                source,
                f"values[{name!r}]",
                expected=f"one number per entry, because {type(loss).__name__} reads it",
                actual=f"only {', '.join(sorted(available)) or 'no values'}",
            )


def check(settings: object, field: str, good: bool, expected: str) -> None:
    """Raises `InputError` about a field of a settings object unless `good`."""
    if not good:
        raise InputError(type(settings).__name__, field, expected=expected, actual=getattr(settings, field))


def anchor_fields(anchor: Anchor) -> tuple[str, ...]:
    """The entry values that `anchor_logp` reads."""
    return () if anchor == "current" else (anchor,)


def anchor_logp(anchor: Anchor, logp: jax.Array, entry: Entry) -> jax.Array:
    """Log-probability of the policy that `anchor` names; "current" is the policy itself, detached."""
    return jax.lax.stop_gradient(logp) if anchor == "current" else entry[anchor]


def safe_exp(x: jax.Array) -> jax.Array:
    """exp(x) up to `EXP_LIMIT`, its tangent above: finite, increasing, with a continuous derivative."""
    limit = math.exp(EXP_LIMIT)
    above = x > EXP_LIMIT
    return jnp.where(above, limit * (1 + x - EXP_LIMIT), jnp.exp(jnp.where(above, EXP_LIMIT, x)))


def log(x: float) -> float:
    """log(x), -inf for 0."""
    return math.log(x) if x > 0 else -math.inf


def _clip(x: jax.Array, low: jax.Array | float, high: jax.Array | float) -> jax.Array:
    """`x` within [low, high], with slope 1 on the bounds (jnp.clip halves it there)."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))
