"""Losses of one entry: pure functions of its log-probability, its entropy and its recorded values.

A token loss is a frozen dataclass, so that it can be a static argument of a compiled step: equal
settings are equal objects. Calling it gives the loss of ONE entry, a scalar; the engine maps it (and its
gradient) over entries and adds up `sum_e weight[e] * loss(e)`. Means over tokens or sequences are
therefore not made here but on the host, once for the whole batch: see `aggregation`.

    l   log-probability of the entry's token under the policy that is trained
    A   entry["advantage"]
    r   exp(l - anchor), the ratio to the policy that the step starts from

Values that an entry may carry (each loss lists what it needs in `required`):

    advantage   A
    old_logp    log-probability under the policy that sampled the token
    prox_logp   log-probability under the weights before this batch's first update, recomputed
    ref_logp    log-probability under a frozen reference model
    weight, temperature   reserved: used by the engine, never by a loss

No finite input makes a NaN gradient: ratios are clipped as logarithms, and where a published loss has
an unbounded exponential, `_exp` follows it up to `e^20` and its tangent from there.
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

ANCHORS: Final = ("old_logp", "prox_logp", "current")
EXP_LIMIT: Final = 20.0  # `_exp` is exp up to here and linear above


@runtime_checkable
class TokenLoss(Protocol):
    """A loss that is a weighted sum over entries. Hashable: it is a static argument."""

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the entry values that the loss reads."""

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        """The loss of one entry: scalars in, a scalar of logp's dtype out."""


def check_required(loss: TokenLoss, available: Mapping[str, Any], *, source: str = "samples") -> None:
    """Refuses entries that lack a value which `loss` reads.

    Raises:
      InputError: names the loss and the first missing value.
    """
    for name in loss.required:
        if name not in available:
            raise InputError(
                source,
                f"values[{name!r}]",
                expected=f"one number per entry, because {type(loss).__name__} reads it",
                actual=f"only {sorted(available)}",
            )


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
    2503.14476), eq. 10; dual clip: Ye et al. 2020 (arXiv 1912.09729), eq. 5; anchor apart from the
    sampling policy: Hilton et al. 2022 (arXiv 2110.00641), eq. 2.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    anchor: Anchor = "old_logp"

    def __post_init__(self) -> None:
        _check(self, "eps_low", 0 <= self.eps_low <= 1, "a number in [0, 1]")
        _check(self, "eps_high", self.eps_high >= 0, "a number of at least 0")
        _check(self, "dual_clip", self.dual_clip is None or self.dual_clip > 1, "None or a number above 1")
        _check(self, "anchor", self.anchor in ANCHORS, f"one of {', '.join(ANCHORS)}")

    @property
    def required(self) -> tuple[str, ...]:
        return ("advantage", *_anchor_fields(self.anchor))

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        advantage = entry["advantage"]
        log_ratio = logp - _anchor_logp(self.anchor, logp, entry)
        down = advantage < 0
        low = jnp.where(down, _log(1 - self.eps_low), -jnp.inf)
        high = jnp.where(
            down, math.inf if self.dual_clip is None else _log(self.dual_clip), _log(1 + self.eps_high)
        )
        return -advantage * _exp(_clip(log_ratio, low, high))


def _check(settings: object, field: str, good: bool, expected: str) -> None:
    if not good:
        raise InputError(type(settings).__name__, field, expected=expected, actual=getattr(settings, field))


def _anchor_fields(anchor: Anchor) -> tuple[str, ...]:
    return () if anchor == "current" else (anchor,)


def _anchor_logp(anchor: Anchor, logp: jax.Array, entry: Entry) -> jax.Array:
    return jax.lax.stop_gradient(logp) if anchor == "current" else entry[anchor]


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _clip(x: jax.Array, low: jax.Array | float, high: jax.Array | float) -> jax.Array:
    """`x` within [low, high], with slope 1 on the bounds (jnp.clip halves it there)."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def _exp(x: jax.Array) -> jax.Array:
    """exp(x) up to `EXP_LIMIT`, its tangent above: finite, increasing, with a continuous derivative."""
    limit = math.exp(EXP_LIMIT)
    return jnp.where(x > EXP_LIMIT, limit * (1 + x - EXP_LIMIT), jnp.exp(jnp.minimum(x, EXP_LIMIT)))
