"""Watches a run's steps for numbers that mean trouble, and does about them what `Guards` says.

    kind                          what is looked at                               when
    empty                         tokens with loss in the batch                   before anything is computed
    equal_rewards                 advantages that are all 0                       before the gradient
    non_finite                    the loss and the gradient, policy's or critic's before the optimizer
    grad_norm, ratio,             one update's numbers against their limits       before the optimizer
    kl_behaviour, kl_reference
    full_queue                    seconds that generation stood still             after the step

The first trouble of a kind is told with its numbers; all of them are counted, step by step in `guard_KIND` of
the metrics, and at the end in one line. Batches of stopped and skipped updates are written for replay, the
first few of each kind. An environment that gets stuck is the collector's business (`Collect.stuck_after`).

On a mesh every process decides on the same numbers: losses, norms, log-probabilities of the whole batch.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from dta_jax.diagnostics import NonFinite, find_non_finite, policy_diagnostics, save_replay
from dta_jax.errors import InputError, RunError
from dta_jax.guard_settings import Action, Guards
from dta_jax.losses import TokenLoss
from dta_jax.sequence_losses import SequenceLoss
from dta_jax.tree_engine import BatchGradient
from dta_jax.types import Samples

REMEMBERED_NORMS: Final = 64
FEWEST_NORMS: Final = 8  # a median of fewer says little
MAX_REPLAYS: Final = 3  # per kind


class GuardStop(RunError):
    """A step that was not made, since its numbers mean trouble.

    Args:
      kind: see the module.
      step: which.
      numbers: what was found, for the message.
      replay: where the batch is (`dta_jax.diagnostics.load_replay`); None if it was not written.
    """

    def __init__(self, kind: str, step: int, numbers: str, replay: Path | None):
        self.kind, self.step, self.replay = kind, step, replay
        where = "" if replay is None else f"; the batch is in {replay}"
        undone = "" if kind == "full_queue" else "; the update was not made"
        super().__init__(f"step {step}: {numbers}{where}{undone}")


class Watch:
    """The guards of one run. `begin` each step; ask before each update; `row` and `state` after the step.

    Args:
      settings: limits and actions.
      out: the run's folder, for replay files.
      saved: what `state` gave at the step that the run goes on from; None at the start.
      tell: is given one line when a kind of trouble is first met.
    """

    def __init__(
        self,
        settings: Guards,
        out: Path,
        saved: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ):
        saved = saved or {}
        self._settings, self._out, self._tell = settings, out, tell
        self._norms = deque[float](saved.get("norms", ()), maxlen=REMEMBERED_NORMS)
        self._in_a_row = int(saved.get("in_a_row", 0))
        self._replays = Counter[str](saved.get("replays", {}))
        self._first: dict[str, int] = {}  # steps, by kind, in this process
        self._last: dict[str, int] = {}
        self._total = Counter[str]()
        self._step = 0
        self._here = Counter[str]()
        self._skipped = 0

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step, self._here, self._skipped = step, Counter(), 0

    def skips_empty(self, reason: str) -> None:
        """A batch has no token with loss: the step is skipped.

        Raises:
          GuardStop: if the settings say so.
        """
        self._met("empty", self._settings.empty, reason)

    def skips_equal_rewards(self, samples: Samples, rewards: np.ndarray) -> bool:
        """Whether to skip a step since every advantage is 0.

        Args:
          samples: of the batch, with what the loss reads.
          rewards: float[N], of its episodes.

        Raises:
          GuardStop: if the settings say so.
        """
        advantage = samples.values.get("advantage")
        if advantage is None or np.any(advantage[samples.values["weight"] > 0]):
            return False
        numbers = (
            f"every advantage is 0, with rewards {rewards.min():g} .. {rewards.max():g} "
            f"in {len(rewards)} episodes"
        )
        return self._met("equal_rewards", self._settings.equal_rewards, numbers, samples)

    def allows(
        self,
        found: BatchGradient,
        norm: float,
        samples: Samples,
        unit: np.ndarray,
        loss: TokenLoss | SequenceLoss,
    ) -> bool:
        """Whether the policy's update may be made.

        Args:
          found: loss and gradient.
          norm: of the gradient.
          samples: what they are of.
          unit: int[E], what a sequence loss couples.
          loss: the run's.

        Raises:
          GuardStop: if the settings say so.
          InputError: there is a limit to a number that the run does not have.
        """
        if not self.is_finite(found, norm, samples):
            return False
        settings, skips = self._settings, False
        limits = {
            "ratio": ("ratio_max", settings.max_ratio, settings.ratio),
            "kl_behaviour": ("kl_behaviour", settings.max_kl_behaviour, settings.kl),
            "kl_reference": ("kl_reference", settings.max_kl_reference, settings.kl),
        }
        if any(limit is not None for _, limit, _ in limits.values()):
            # In a single update the weights before the step are those of the gradient.
            values = {"prox_logp": found.logp, **samples.values}
            numbers = policy_diagnostics(loss, found.logp, found.entropy, values, unit)
            for kind, (name, limit, action) in limits.items():
                if limit is None or not numbers:
                    continue
                if name not in numbers:
                    expected = f"None: the loss has no {name}"
                    raise InputError("Guards", f"max_{kind}", expected=expected, actual=limit)
                if numbers[name] > limit:
                    above = f"{name} {numbers[name]:.4g} is above {limit:g}"
                    skips |= self._met(kind, action, above, samples)
        if not skips and self._exceeds_median(norm):
            numbers_of = (
                f"grad_norm {norm:.4g} is above {settings.max_grad_norm_factor:g} times "
                f"{statistics.median(self._norms):.4g}, the median of the last {len(self._norms)} updates"
            )
            skips = self._met("grad_norm", settings.grad_norm, numbers_of, samples)
        if not skips:
            self._norms.append(norm)
            self._in_a_row = 0
        return not skips

    def is_finite(self, found: BatchGradient, norm: float, samples: Samples, of: str = "") -> bool:
        """Whether loss and gradient are finite, so that an update may be made.

        Args:
          found, norm, samples: see `allows`.
          of: whose they are, for the message.

        Raises:
          GuardStop: if the settings say so.
        """
        trouble: NonFinite | None = find_non_finite(
            samples,
            scalars={f"{of}loss": found.loss, f"{of}grad_norm": norm},
            entries={"logp": found.logp, "entropy": found.entropy},
            grads=found.grads,
        )
        if trouble is None:
            return True
        return not self._met("non_finite", self._settings.non_finite, str(trouble), samples)

    def look_at_queue(self, row: Mapping[str, Any]) -> None:
        """Looks at how long generation stood still in a step.

        Raises:
          GuardStop: if the settings say so.
        """
        limit, seconds = self._settings.full_queue_seconds, row.get("queue_full_seconds", 0.0)
        if limit is not None and seconds > limit:
            numbers = (
                f"generation stood still for {seconds:.0f} s (full_queue_seconds = {limit:g}), "
                "as far ahead as Collect.max_staleness allows"
            )
            self._met("full_queue", self._settings.full_queue, numbers)

    def row(self) -> dict[str, int]:
        """The step's numbers for `metrics.jsonl`: what was met, and updates that were not made."""
        skipped = {"updates_skipped": self._skipped} if self._skipped else {}
        return {f"guard_{kind}": count for kind, count in self._here.items()} | skipped

    def state(self) -> dict[str, Any]:
        """What the next step depends on, as JSON."""
        return {"norms": list(self._norms), "in_a_row": self._in_a_row, "replays": dict(self._replays)}

    def summary(self) -> str | None:
        """What was met since the process began, in one line; None for nothing."""
        if not self._total:
            return None
        met = ", ".join(
            f"{kind} {count} x in steps {self._first[kind]} .. {self._last[kind]}"
            for kind, count in self._total.items()
        )
        return f"guards: {met}"

    def _exceeds_median(self, norm: float) -> bool:
        factor = self._settings.max_grad_norm_factor
        if factor is None or len(self._norms) < FEWEST_NORMS:
            return False
        return norm > factor * statistics.median(self._norms)

    def _met(self, kind: str, action: Action, numbers: str, samples: Samples | None = None) -> bool:
        """Trouble: raises, or returns whether the update is skipped."""
        self._here[kind] += 1
        if action == "stop":
            raise GuardStop(kind, self._step, numbers, self._replay(kind, samples))
        skips = action == "skip"
        if skips:
            self._skipped += 1
            self._in_a_row += 1
            if self._in_a_row > self._settings.max_skips:
                many = f"{self._in_a_row} updates in a row would be skipped"
                numbers = f"{many} (max_skips = {self._settings.max_skips}), the last one: {numbers}"
                raise GuardStop(kind, self._step, numbers, self._replay(kind, samples))
        few = skips and self._replays[kind] < MAX_REPLAYS
        replay = self._replay(kind, samples) if few else None
        self._total[kind] += 1
        self._last[kind] = self._step
        if kind not in self._first:
            self._first[kind] = self._step
            done = "the update is skipped" if skips else "the run goes on"
            where = "" if replay is None else f"; the batch is in {replay}"
            self._tell(
                f"warning: step {self._step}: {numbers}; {done}{where}; more is counted in guard_{kind}"
            )
        return skips

    def _replay(self, kind: str, samples: Samples | None) -> Path | None:
        if samples is None:
            return None
        self._replays[kind] += 1
        path = self._out / f"{kind}_step_{self._step}.npz"
        if jax.process_index() == 0:
            try:
                save_replay(path, samples)
            except RunError as error:  # what is to be said of the step is said nevertheless
                self._tell(f"warning: {error}")
                return None
        return path
