"""A step under way: the batch in minibatches, what the loss reads of it, what its updates find, its row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dta_jax.diagnostics import (
    policy_diagnostics,
    reward_diagnostics,
    staleness_diagnostics,
    token_diagnostics,
)
from dta_jax.episode_rows import episode_returns
from dta_jax.guards import Watch
from dta_jax.losses import TokenLoss
from dta_jax.mesh_plan import MeshPlan
from dta_jax.minibatches import Part
from dta_jax.objective import Batch
from dta_jax.sequence_losses import SequenceLoss
from dta_jax.settings import Train
from dta_jax.types import Samples, Schedule


@dataclass(frozen=True, eq=False)
class Planned:
    """A batch that is ready for the device.

    Attributes:
      batch: the whole batch.
      parts: its minibatches.
      schedules: one per part.
      metrics: what its source says of it.
    """

    batch: Batch
    parts: list[Part]
    schedules: list[Schedule | MeshPlan]
    metrics: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Nothing:
    """A batch without any token with loss.

    Attributes:
      reason: why, for the user.
      metrics: what its source says of it.
    """

    reason: str
    metrics: Mapping[str, Any]

    def row(self, step: int) -> dict[str, Any]:
        """The numbers of a step that leaves it out."""
        none = dict.fromkeys(("updates", "flat_tokens", "tree_tokens", "executed_tokens", "loss_tokens"), 0)
        return {"step": step, "seconds": 0.0, "dedupe_ratio": 1.0} | none | dict(self.metrics)


@dataclass(eq=False)
class StepWork:
    """A step under way: what its updates share, and what they find.

    Attributes:
      train: the settings.
      step: from 1.
      planned: the batch.
      values: float32[E] by name, everything that the loss reads.
      loss: what is differentiated.
      first_pass: (logp, entropy) float32[E] under the weights before the step, if they were scored.
      watch: the run's guards.
      logp, entropy: float32[E], as each entry's last gradient saw them; NaN before.
      rows: numbers of each update.
      updates: how many were made.
    """

    train: Train
    step: int
    planned: Planned
    values: Mapping[str, np.ndarray]
    loss: TokenLoss | SequenceLoss
    first_pass: tuple[np.ndarray, np.ndarray] | None
    watch: Watch
    logp: np.ndarray = field(init=False)
    entropy: np.ndarray = field(init=False)
    rows: list[dict[str, float]] = field(default_factory=list)
    updates: int = 0

    def __post_init__(self) -> None:
        entries = len(self.planned.batch.token)
        self.logp, self.entropy = (np.full(entries, np.nan, np.float32) for _ in range(2))

    def is_skipped(self) -> bool:
        """Whether the guards want no update on this batch."""
        if "advantage" not in self.values:
            return False
        batch = self.planned.batch
        samples = replace(batch.samples, values=self.values)
        return self.watch.skips_equal_rewards(samples, episode_returns(batch.rollouts))

    def samples_of(self, part: Part) -> Samples:
        """A minibatch's samples with all values; its loss is scaled to be as large as the batch's."""
        own = {name: array[part.entry] for name, array in self.values.items()}
        scale = np.float32(len(self.planned.parts))
        return replace(part.samples, values=own | {"weight": own["weight"] * scale})

    def note(self, part: Part, logp: np.ndarray, entropy: np.ndarray) -> None:
        """Keeps what was found of a minibatch's entries."""
        self.logp[part.entry], self.entropy[part.entry] = logp, entropy

    def knows(self, part: Part) -> bool:
        """Whether something was found of a minibatch's entries."""
        return not np.isnan(self.logp[part.entry]).any()

    def row(self) -> dict[str, Any]:
        """The step's numbers for `metrics.jsonl`."""
        row: dict[str, Any] = _means(self.rows) | {"updates": self.updates}
        passes = self.train.epochs if self.rows else 0
        row |= _tokens(self.planned, passes) | self._diagnostics() | self.watch.row()
        if "guard_non_finite" not in row:
            return row
        return {name: x for name, x in row.items() if not isinstance(x, float) or math.isfinite(x)}

    def _diagnostics(self) -> dict[str, Any]:
        batch, values = self.planned.batch, dict(self.values)
        row: dict[str, Any] = {"rollouts": len(batch.group), "sequences": len(batch.samples.sequences)}
        if batch.rollouts.reward is not None:
            rewards = episode_returns(batch.rollouts)
            row["reward_mean"] = float(rewards.mean())
            if "advantage" in values:
                row |= reward_diagnostics(rewards, values["advantage"], batch.group)
        if "return" in values:
            spread = float(np.var(values["return"]))
            missed = float(np.var(values["return"] - values["old_value"]))
            row["explained_variance"] = 1 - missed / spread if spread > 0 else 0.0
        if batch.rollouts.versions is not None:
            row |= staleness_diagnostics(batch.rollouts.versions[batch.token], self.step - 1)
        logp, entropy = (self.logp, self.entropy) if self.rows else self.first_pass or (None, None)
        if logp is None or entropy is None:
            return row  # skipped before any model ran
        if "prox_logp" in self.train.loss.required:
            values.setdefault("prox_logp", logp)
        return row | policy_diagnostics(self.train.loss, logp, entropy, values, batch.unit)


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean over updates of what is finite. Losses of minibatches are as large as the batch's."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, x in row.items():
            if math.isfinite(x):
                found.setdefault(name, []).append(x)
    return {name: float(np.mean(values)) for name, values in found.items()}


def _tokens(planned: Planned, passes: int) -> dict[str, Any]:
    """Tokens of the batch, counted four ways; those executed are of all passes over it."""
    counts = [
        token_diagnostics(part.samples, schedule)
        | {
            "backward_tokens_executed": schedule.backward_tokens_executed,
            "forward_tokens_executed": schedule.forward_tokens_executed,
        }
        for part, schedule in zip(planned.parts, planned.schedules, strict=True)
    ]
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    total |= {name: total[name] * passes for name in total if "executed" in name}
    return total | {"dedupe_ratio": total["flat_tokens"] / total["tree_tokens"]}
