"""Losses and log-probabilities of whole batches in one call: trie, schedule, one pass or two.

A `TreeEngine` fixes the model and the buckets (chunk size, stack slots, entry capacity) once for a run, so
that every batch that fits runs the programs that the first one compiled. `warm_up` compiles them all before
the first step; otherwise each is compiled when its width first comes up.

A plan touches the host only. It can be made ahead (`dta_jax.plan_ahead`), and one plan serves a batch's
log-probabilities and its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dta_jax.errors import InputError
from dta_jax.losses import TokenLoss, check_required
from dta_jax.mesh_grad import MeshResult, mesh_forward, mesh_value_and_grad
from dta_jax.mesh_plan import FEWEST_OPERATIONS, MeshPlan, plan_ranks, table_length
from dta_jax.model import DecoderModel, Numbers, Params, require_policy
from dta_jax.planner import DEFAULT_COST, CostModel, widths
from dta_jax.schedule import compile_schedule, round_slots
from dta_jax.sequence_losses import SMALLEST_BUCKET, Injected, SequenceLoss, entry_cotangents
from dta_jax.sharding import DATA
from dta_jax.tree_grad import TreeResult, tree_forward, tree_value_and_grad
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
      entry_capacity: room for every batch's entries; a batch with more runs in a program of its own.
      mesh: where to run; None for one device. Parameters must lie there (`dta_jax.sharding.place_params`).
      cost: what planner and balancer weigh; the machine's own comes from `dta_jax.cost_fit`.
      operations: operations that a mesh's table has room for at least. Batches within it share one program; a
        longer table is rounded up to a power of two, which is compiled when it first comes up.
    """

    model: DecoderModel
    chunk_size: int
    strategy: str
    stack_slots: int
    entry_capacity: int
    mesh: Mesh | None = None
    cost: CostModel = DEFAULT_COST
    operations: int = FEWEST_OPERATIONS

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
        cost: CostModel = DEFAULT_COST,
        operations: int = FEWEST_OPERATIONS,
    ) -> TreeEngine:
        """An engine for batches of at most `entries` entries in sequences of at most `longest` tokens."""
        slots, capacity = round_slots(longest + chunk_size), entry_capacity(entries)
        return cls(model, chunk_size, strategy, slots, capacity, mesh, cost, operations)

    def plan(self, samples: Samples) -> Schedule | MeshPlan:
        """The samples' trie, and the schedule, or one per `data` rank, that runs it forward and backward."""
        trie = build_trie(samples.sequences)
        rows = entry_rows(trie, samples.sequence, samples.position)
        buckets: Any = {
            "chunk_size": self.chunk_size,
            "strategy": self.strategy,
            "stack_slots": self.stack_slots,
            "cost": self.cost,
        }
        if self.mesh is None:
            return compile_schedule(trie, rows, **buckets)
        return plan_ranks(trie, samples.sequence, rows, self.mesh.shape[DATA], **buckets)

    def forward(
        self, params: Params, samples: Samples, schedule: Schedule | MeshPlan | None = None
    ) -> Numbers:
        """What the model's head says of the samples' entries, float[E] each, at their `temperature`.

        Runs the operations of the samples' gradient (of `schedule`, if the plan is already made), so that
        with the same weights the gradient sees these very numbers.

        Raises:
          InputError: `schedule` was made for another number of entries.
        """
        plan = self._plan_of(samples, schedule)
        options: Any = {
            "temperature": samples.values.get("temperature"),
            "entry_capacity": self._capacity(len(samples.sequence)),
        }
        if isinstance(plan, Schedule):
            return tree_forward(self.model, params, plan, **options)
        options["max_operations"] = self._table_length(plan)
        return mesh_forward(self._mesh(), self.model, params, plan, **options)

    def logprobs(
        self, params: Params, samples: Samples, schedule: Schedule | MeshPlan | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability and entropy, float[E], of the samples' entries; see `forward`.

        Raises:
          InputError: the model is a critic without an LM head.
        """
        require_policy(self.model)
        found = self.forward(params, samples, schedule)
        return found.logp, found.entropy

    def value_and_grad(
        self,
        params: Params,
        samples: Samples,
        loss: TokenLoss | SequenceLoss,
        unit: np.ndarray,
        schedule: Schedule | MeshPlan | None = None,
        first_pass: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> BatchGradient:
        """The loss of the samples and its exact gradient: one pass for token losses, two for sequence losses.

        Args:
          params: the weights, in the dtype that they are computed with.
          samples: with `weight` and everything that the loss reads.
          loss: what to differentiate.
          unit: int[E], what a sequence loss couples.
          schedule: the samples' plan, if it is already made.
          first_pass: what `logprobs` gave with these weights, if that is known: a sequence loss's first pass.

        Raises:
          InputError: a value that the loss reads is missing, or `schedule` is for another number of entries.
        """
        check_required(loss, samples.values)
        schedule = self._plan_of(samples, schedule)
        if isinstance(loss, TokenLoss):
            result = self._backward(params, schedule, samples.values, loss)
            total = float(jax.device_get(result.loss))
            return BatchGradient(total, result.grads, result.logp, result.entropy, schedule)
        logp, entropy = first_pass or self.logprobs(params, samples, schedule)
        total, by_logp, by_entropy = entry_cotangents(loss, logp, entropy, samples.values, unit)
        values = {"weight": np.ones_like(by_logp), "ct_logp": by_logp, "ct_entropy": by_entropy}
        if "temperature" in samples.values:
            values["temperature"] = samples.values["temperature"]
        result = self._backward(params, schedule, values, Injected())
        return BatchGradient(total, result.grads, logp, entropy, schedule)

    def warm_up(self, params: Params, like: Samples, loss: TokenLoss | SequenceLoss) -> None:
        """Compiles whatever batches can need, so that no step compiles later.

        A few tokens go through every width of PUSH and BACK, in as much memory as a step takes. On a mesh one
        program holds all widths; a batch with more than `operations` operations on a rank still compiles.

        Args:
          params: the weights, in the dtype that they are computed with.
          like: samples whose values have the names and dtypes of every batch's. What the loss reads beside
            them is taken to be floats.
          loss: what will be differentiated.
        """
        dtypes = dict.fromkeys(loss.required, np.dtype(np.float32))
        dtypes |= {name: value.dtype for name, value in like.values.items()}
        usual = self.plan(like)
        chain = np.zeros(len(widths(usual.chunk_size)) + 1, np.int32)
        position = np.arange(1, len(chain), dtype=np.int32)
        values = {name: np.ones(len(position), dtype) for name, dtype in dtypes.items()}
        samples = Samples([chain], np.zeros_like(position), position, values)
        plan = _every_width(samples, usual) if isinstance(usual, Schedule) else self.plan(samples)
        self.forward(params, samples, plan)
        found = self.value_and_grad(params, samples, loss, samples.sequence, plan)
        jax.block_until_ready(found.grads)
        if not isinstance(loss, TokenLoss):
            bucket = SMALLEST_BUCKET
            while bucket < 2 * self.entry_capacity:
                some: Any = {name: np.ones(bucket, dtype) for name, dtype in dtypes.items()}
                zeros = np.zeros(bucket, found.logp.dtype)
                entry_cotangents(loss, zeros, zeros, some, zeros)
                bucket *= 2

    def _plan_of(self, samples: Samples, schedule: Schedule | MeshPlan | None) -> Schedule | MeshPlan:
        plan = self.plan(samples) if schedule is None else schedule
        planned = len(plan.entry) if isinstance(plan, Schedule) else plan.num_entries
        entries = len(samples.sequence)
        if planned != entries:
            raise InputError("schedule", "entries", expected=f"{entries}, the samples'", actual=planned)
        return plan

    def _mesh(self) -> Mesh:
        assert self.mesh is not None, "a plan for a mesh needs an engine with one"
        return self.mesh

    def _table_length(self, plan: MeshPlan) -> int:
        return max(self.operations, table_length(plan))

    def _capacity(self, entries: int) -> int:
        return max(self.entry_capacity, entry_capacity(entries))

    def _backward(
        self,
        params: Params,
        plan: Schedule | MeshPlan,
        values: Mapping[str, np.ndarray],
        loss: TokenLoss,
    ) -> TreeResult | MeshResult:
        result: TreeResult | MeshResult
        capacity = self._capacity(len(values["weight"]))
        with jax.transfer_guard("disallow"):
            if isinstance(plan, Schedule):
                result = tree_value_and_grad(self.model, params, plan, values, loss, entry_capacity=capacity)
            else:
                result = mesh_value_and_grad(
                    self._mesh(),
                    self.model,
                    params,
                    plan,
                    values,
                    loss,
                    entry_capacity=capacity,
                    max_operations=self._table_length(plan),
                )
        executed = jax.device_get(result.executed)[[PUSH, BACK]].tolist()
        schedules = (plan,) if isinstance(plan, Schedule) else plan.schedules
        planned = [sum(_rows(schedule, kind) for schedule in schedules) for kind in (PUSH, BACK)]
        if executed != planned or planned[1] != sum(schedule.trie.num_rows for schedule in schedules):
            raise RuntimeError(f"rows of PUSH and BACK: planned {planned}, executed {executed}")
        return result


def _every_width(samples: Samples, usual: Schedule) -> Schedule:
    """A plan of a short sequence, a token per operation, whose operations have all widths of `usual`."""
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    plan = compile_schedule(trie, rows, chunk_size=1, strategy="packed+keep", stack_slots=usual.stack_slots)
    return replace(
        plan,
        width=np.resize(np.array(widths(usual.chunk_size), np.int32), plan.num_ops),
        chunk_size=usual.chunk_size,
        keep_residuals=usual.keep_residuals,
    )


def _rows(schedule: Schedule, kind: int) -> int:
    return int(np.diff(schedule.offset)[schedule.kind == kind].sum())
