"""Losses and log-probabilities of whole batches in one call: trie, schedule, one pass or two.

A `TreeEngine` fixes the model and the buckets (chunk size, stack slots, entry capacity) once for a run, so
that every batch that fits runs the programs that the first one compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from dta_jax.losses import TokenLoss, check_required
from dta_jax.model import DecoderModel, Params
from dta_jax.schedule import compile_schedule, round_slots
from dta_jax.sequence_losses import Injected, SequenceLoss, entry_cotangents
from dta_jax.tree_grad import TreeResult, tree_logprobs, tree_value_and_grad
from dta_jax.tree_inputs import entry_capacity
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import BACK, PUSH, Samples, Schedule


@dataclass(frozen=True)
class BatchGradient:
    """Loss and gradient of a batch.

    Attributes:
      loss: float.
      grads: float32, in the layout of the parameters, on the device.
      logp, entropy: float[E], in the order of the samples' entries, nats.
      schedule: what was run backward.
    """

    loss: float
    grads: Params
    logp: np.ndarray
    entropy: np.ndarray
    schedule: Schedule


@dataclass(frozen=True)
class TreeEngine:
    """Runs samples over their trie.

    Attributes:
      model: the model.
      chunk_size: C, the most tree tokens run together.
      strategy: the planner's strategy.
      stack_slots: S, enough for every batch.
      entry_capacity: room for every batch's entries.
    """

    model: DecoderModel
    chunk_size: int
    strategy: str
    stack_slots: int
    entry_capacity: int

    @classmethod
    def for_batches(
        cls, model: DecoderModel, *, chunk_size: int, strategy: str, longest: int, entries: int
    ) -> TreeEngine:
        """An engine for batches of at most `entries` entries in sequences of at most `longest` tokens."""
        slots, capacity = round_slots(longest + chunk_size), entry_capacity(entries)
        return cls(model, chunk_size, strategy, slots, capacity)

    def plan(self, samples: Samples) -> Schedule:
        """The samples' trie, and the schedule that runs it forward and backward."""
        trie = build_trie(samples.sequences)
        return compile_schedule(
            trie,
            entry_rows(trie, samples.sequence, samples.position),
            chunk_size=self.chunk_size,
            strategy=self.strategy,
            stack_slots=self.stack_slots,
        )

    def logprobs(
        self, params: Params, samples: Samples, schedule: Schedule | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability and entropy, float[E], of the samples' entries at their `temperature`.

        Runs the operations of the samples' gradient (of `schedule`, if the plan is already made), so that
        with the same weights the gradient sees these very numbers.
        """
        return tree_logprobs(
            self.model,
            params,
            self.plan(samples) if schedule is None else schedule,
            temperature=samples.values.get("temperature"),
            entry_capacity=self.entry_capacity,
        )

    def value_and_grad(
        self, params: Params, samples: Samples, loss: TokenLoss | SequenceLoss, unit: np.ndarray
    ) -> BatchGradient:
        """The loss of the samples and its exact gradient: one pass for token losses, two for sequence losses.

        Args:
          params: the weights, in the dtype that they are computed with.
          samples: with `weight` and everything that the loss reads.
          loss: what to differentiate.
          unit: int[E], what a sequence loss couples.

        Raises:
          InputError: a value that the loss reads is missing.
        """
        check_required(loss, samples.values)
        schedule = self.plan(samples)
        if isinstance(loss, TokenLoss):
            result = self._backward(params, schedule, samples.values, loss)
            return BatchGradient(
                float(jax.device_get(result.loss)), result.grads, result.logp, result.entropy, schedule
            )
        logp, entropy = self.logprobs(params, samples, schedule)
        total, by_logp, by_entropy = entry_cotangents(loss, logp, entropy, samples.values, unit)
        values = {"weight": np.ones_like(by_logp), "ct_logp": by_logp, "ct_entropy": by_entropy}
        if "temperature" in samples.values:
            values["temperature"] = samples.values["temperature"]
        result = self._backward(params, schedule, values, Injected())
        return BatchGradient(total, result.grads, logp, entropy, schedule)

    def _backward(
        self, params: Params, schedule: Schedule, values: Mapping[str, np.ndarray], loss: TokenLoss
    ) -> TreeResult:
        with jax.transfer_guard("disallow"):
            result = tree_value_and_grad(
                self.model, params, schedule, values, loss, entry_capacity=self.entry_capacity
            )
        executed = jax.device_get(result.outputs.executed)
        rows = np.diff(schedule.offset)
        planned = [int(rows[schedule.kind == kind].sum()) for kind in (PUSH, BACK)]
        if executed[[PUSH, BACK]].tolist() != planned or planned[1] != schedule.trie.num_rows:
            raise RuntimeError(f"rows of PUSH and BACK: planned {planned}, executed {executed.tolist()}")
        return result
