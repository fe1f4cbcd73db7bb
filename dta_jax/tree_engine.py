"""Losses and log-probabilities of whole batches in one call: trie, schedule, one pass or two.

A `TreeEngine` fixes the model and the buckets (chunk size, stack slots, entry capacity) once for a run, so
that every batch that fits runs the programs that the first one compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dta_jax.losses import TokenLoss, check_required
from dta_jax.mesh_grad import MeshResult, mesh_logprobs, mesh_value_and_grad
from dta_jax.mesh_plan import MeshPlan, plan_ranks
from dta_jax.model import DecoderModel, Params
from dta_jax.schedule import compile_schedule, round_slots
from dta_jax.sequence_losses import Injected, SequenceLoss, entry_cotangents
from dta_jax.sharding import DATA
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
    schedule: Schedule | MeshPlan


@dataclass(frozen=True)
class TreeEngine:
    """Runs samples over their trie, on one device or on a mesh.

    Attributes:
      model: the model.
      chunk_size: C, the most tree tokens run together.
      strategy: the planner's strategy.
      stack_slots: S, enough for every batch.
      entry_capacity: room for every batch's entries.
      mesh: where to run; None for one device. Parameters must lie there (`dta_jax.sharding.place_params`).
    """

    model: DecoderModel
    chunk_size: int
    strategy: str
    stack_slots: int
    entry_capacity: int
    mesh: Mesh | None = None

    @classmethod
    def for_batches(
        cls,
        model: DecoderModel,
        *,
        chunk_size: int,
        strategy: str,
        longest: int,
        entries: int,
        mesh: Mesh | None = None,
    ) -> TreeEngine:
        """An engine for batches of at most `entries` entries in sequences of at most `longest` tokens."""
        slots, capacity = round_slots(longest + chunk_size), entry_capacity(entries)
        return cls(model, chunk_size, strategy, slots, capacity, mesh)

    def plan(self, samples: Samples) -> Schedule | MeshPlan:
        """The samples' trie, and the schedule, or one per `data` rank, that runs it forward and backward."""
        trie = build_trie(samples.sequences)
        rows = entry_rows(trie, samples.sequence, samples.position)
        buckets: Any = {
            "chunk_size": self.chunk_size,
            "strategy": self.strategy,
            "stack_slots": self.stack_slots,
        }
        if self.mesh is None:
            return compile_schedule(trie, rows, **buckets)
        return plan_ranks(trie, samples.sequence, rows, self.mesh.shape[DATA], **buckets)

    def logprobs(
        self, params: Params, samples: Samples, schedule: Schedule | MeshPlan | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability and entropy, float[E], of the samples' entries at their `temperature`.

        Runs the operations of the samples' gradient (of `schedule`, if the plan is already made), so that
        with the same weights the gradient sees these very numbers.
        """
        plan = self.plan(samples) if schedule is None else schedule
        options: Any = {
            "temperature": samples.values.get("temperature"),
            "entry_capacity": self.entry_capacity,
        }
        if isinstance(plan, Schedule):
            return tree_logprobs(self.model, params, plan, **options)
        assert self.mesh is not None, "a plan for a mesh needs an engine with one"
        return mesh_logprobs(self.mesh, self.model, params, plan, **options)

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
            total = float(jax.device_get(result.loss))
            return BatchGradient(total, result.grads, result.logp, result.entropy, schedule)
        logp, entropy = self.logprobs(params, samples, schedule)
        total, by_logp, by_entropy = entry_cotangents(loss, logp, entropy, samples.values, unit)
        values = {"weight": np.ones_like(by_logp), "ct_logp": by_logp, "ct_entropy": by_entropy}
        if "temperature" in samples.values:
            values["temperature"] = samples.values["temperature"]
        result = self._backward(params, schedule, values, Injected())
        return BatchGradient(total, result.grads, logp, entropy, schedule)

    def _backward(
        self,
        params: Params,
        plan: Schedule | MeshPlan,
        values: Mapping[str, np.ndarray],
        loss: TokenLoss,
    ) -> TreeResult | MeshResult:
        result: TreeResult | MeshResult
        capacity = self.entry_capacity
        with jax.transfer_guard("disallow"):
            if isinstance(plan, Schedule):
                result = tree_value_and_grad(self.model, params, plan, values, loss, entry_capacity=capacity)
            else:
                assert self.mesh is not None, "a plan for a mesh needs an engine with one"
                result = mesh_value_and_grad(
                    self.mesh, self.model, params, plan, values, loss, entry_capacity=capacity
                )
        executed = jax.device_get(result.executed)[[PUSH, BACK]].tolist()
        schedules = (plan,) if isinstance(plan, Schedule) else plan.schedules
        planned = [sum(_rows(schedule, kind) for schedule in schedules) for kind in (PUSH, BACK)]
        if executed != planned or planned[1] != sum(schedule.trie.num_rows for schedule in schedules):
            raise RuntimeError(f"rows of PUSH and BACK: planned {planned}, executed {executed}")
        return result


def _rows(schedule: Schedule, kind: int) -> int:
    return int(np.diff(schedule.offset)[schedule.kind == kind].sum())
