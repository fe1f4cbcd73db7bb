"""What is done about steps that look wrong: limits, and whether the run stops, skips the update or warns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from dta_jax.losses import check

Action: TypeAlias = Literal["stop", "skip", "warn"]
ACTIONS: Final = ("stop", "skip", "warn")


@dataclass(frozen=True)
class Guards:
    """What is done about steps that look wrong: `dta_jax.guards`.

    "stop" ends the run before the weights change. "skip" leaves out the update: the step counts, weights and
    optimizer stay as they are, bit for bit. "warn" makes it nevertheless. Each kind is told once, with its
    numbers, and counted in `guard_KIND` of the metrics.

    Attributes:
      non_finite: the loss or a gradient is not finite: "stop" or "skip".
      max_grad_norm_factor: the largest gradient norm, over the median of the last 64 updates, once there are
        eight; None for any.
      grad_norm: what is done about larger ones.
      max_ratio: the largest ratio that the loss clips, in any entry; None for any.
      ratio: what is done about larger ones.
      max_kl_behaviour, max_kl_reference: the largest divergence from the sampler, from the reference, in nats
        per token (`kl_behaviour` and `kl_reference` of the metrics, per minibatch); None for any.
      kl: what is done about larger ones.
      equal_rewards: every advantage of the batch is 0, so that only what is beside the policy's loss has a
        gradient. "skip" saves the pass.
      empty: no token of the batch has loss: "stop" or "skip".
      full_queue_seconds: in one step, generation stood still so long since it was as far ahead as
        `Collect.max_staleness` allows; None for any time.
      full_queue: "warn" or "stop".
      max_skips: the most updates in a row that are skipped; the next one ends the run.
    """

    non_finite: Literal["stop", "skip"] = "stop"
    max_grad_norm_factor: float | None = None
    grad_norm: Action = "skip"
    max_ratio: float | None = None
    ratio: Action = "skip"
    max_kl_behaviour: float | None = None
    max_kl_reference: float | None = None
    kl: Action = "skip"
    equal_rewards: Action = "warn"
    empty: Literal["stop", "skip"] = "stop"
    full_queue_seconds: float | None = 600.0
    full_queue: Literal["warn", "stop"] = "warn"
    max_skips: int = 10

    def __post_init__(self) -> None:
        for name in ("grad_norm", "ratio", "kl", "equal_rewards"):
            check(self, name, getattr(self, name) in ACTIONS, f"one of {', '.join(ACTIONS)}")
        for name, allowed in (
            ("non_finite", ("stop", "skip")),
            ("empty", ("stop", "skip")),
            ("full_queue", ("warn", "stop")),
        ):
            check(self, name, getattr(self, name) in allowed, " or ".join(allowed))
        for name in ("max_grad_norm_factor", "max_ratio"):
            limit = getattr(self, name)
            check(self, name, limit is None or 1 < limit < math.inf, "None or a finite number above 1")
        for name in ("max_kl_behaviour", "max_kl_reference", "full_queue_seconds"):
            limit = getattr(self, name)
            check(self, name, limit is None or 0 < limit < math.inf, "None or a finite number above 0")
        check(self, "max_skips", self.max_skips >= 0, "at least 0")
