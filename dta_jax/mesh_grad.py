"""Tree gradients on a mesh: one program in which every `data` rank runs its own table of operations.

`tree_grad.push` and `tree_grad.back` are the steps. Under `jax.shard_map`, a rank loops over its own table,
and per operation over the branches, each a step with one width:

    while o < count:                          trips differ from rank to rank
      for each (kind, width):                 0 or 1 trips; a branch of `lax.cond` would copy the carry
        while this is operation o's branch:   push or back on the rank's stack, cotangents, gradients
    reduce-scatter the gradients over `data`

Where every row is pushed (`packed+keep`), the carry also holds what PUSH computed, by slot of the rank's own
stack, and BACK runs nothing a second time.

Until the last line nothing is exchanged over `data`, so ranks need not be in step. What is exchanged over
`tensor` (`dta_jax.tensor_axis`) stays among ranks that share one table.

Varying axes are not checked (`check_vma=False`), so the steps make their carries of plain zeros, as on one
device. Then JAX adds no sum over `data` to a derivative, as we need it, and no plain `psum` may be
differentiated; those of `tensor_axis` bring their own transposes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from dta_jax.entry_blocks import LossFn, Outputs, evaluate_entries
from dta_jax.mesh_plan import MeshPlan, Operations, branches, stack_operations
from dta_jax.model import DecoderModel, Numbers, Params, require_policy
from dta_jax.segment import Residuals, Stack, empty_residuals, num_keys
from dta_jax.sharding import (
    DATA,
    Specs,
    compute_specs,
    data_axis,
    master_specs,
    physical,
    place,
    ranks_sharding,
    split_over,
)
from dta_jax.tree_grad import (
    Back,
    back,
    back_kept,
    in_callers_order,
    push,
    push_keeping,
    start,
    start_forward,
)
from dta_jax.tree_inputs import Entries, Op
from dta_jax.types import BACK


@dataclass(frozen=True)
class MeshResult:
    """Loss and gradients of a batch.

    Attributes:
      grads: float32 (float64 for float64 models), in the layout of the parameters, cut as master weights are.
      outputs: what the ranks collected, with a leading axis of K cut over `data`.
      plan: what was run.
    """

    grads: Params
    outputs: Outputs
    plan: MeshPlan

    @property
    def loss(self) -> float:
        """The sum of the ranks' losses. Waits for the devices."""
        return float(everywhere(self.outputs.loss).sum())

    @property
    def executed(self) -> np.ndarray:
        """int[2], rows run by kind on all ranks."""
        return everywhere(self.outputs.executed).sum(axis=0)

    @property
    def numbers(self) -> Numbers:
        """[E] what the head found for each entry, in the caller's order. Waits for the devices."""
        return _merged_numbers(self.outputs, self.plan)

    @property
    def logp(self) -> np.ndarray:
        """[E] log-probability of each entry, in the caller's order. Waits for the devices."""
        return merge_ranks(self.outputs.numbers.logp, self.plan)

    @property
    def entropy(self) -> np.ndarray:
        """[E] entropy of each entry's distribution, in the caller's order. Waits for the devices."""
        return merge_ranks(self.outputs.numbers.entropy, self.plan)


def mesh_value_and_grad(
    mesh: Mesh,
    model: DecoderModel,
    params: Params,
    plan: MeshPlan,
    values: Mapping[str, np.ndarray],
    loss_fn: LossFn,
    *,
    entry_capacity: int = 0,
    max_operations: int = 0,
) -> MeshResult:
    """`tree_value_and_grad` on a mesh: the same loss, the same gradient.

    Args:
      mesh: from `MeshShape.make`.
      model: the whole model; hashable.
      params: from `place_params`.
      plan: from `plan_ranks`, for as many ranks as the mesh has along `data`.
      values, loss_fn: as in `tree_value_and_grad`.
      entry_capacity, max_operations: E' and O of every rank, to keep compiled shapes; 0 rounds up what they
        need.

    Returns:
      `MeshResult`; nothing has been waited for.

    Raises:
      InputError: see `host_inputs`, or `tensor` devices that do not divide the model.
    """
    operations, entries = _placed(mesh, model, params, plan, values, entry_capacity, max_operations)
    program = _Program.of(mesh, model, params, plan)
    outputs, grads = _value_and_grad(program, loss_fn, params, operations, entries)
    return MeshResult(grads, outputs, plan)


def lower_value_and_grad(
    mesh: Mesh,
    model: DecoderModel,
    params: Params,
    plan: MeshPlan,
    values: Mapping[str, np.ndarray],
    loss_fn: LossFn,
    *,
    entry_capacity: int = 0,
    max_operations: int = 0,
) -> jax.stages.Lowered:
    """The program that `mesh_value_and_grad` would run with these arguments."""
    operations, entries = _placed(mesh, model, params, plan, values, entry_capacity, max_operations)
    program = _Program.of(mesh, model, params, plan)
    return _value_and_grad.lower(program, loss_fn, params, operations, entries)


def mesh_forward(
    mesh: Mesh,
    model: DecoderModel,
    params: Params,
    plan: MeshPlan,
    *,
    temperature: np.ndarray | None = None,
    entry_capacity: int = 0,
    max_operations: int = 0,
) -> Numbers:
    """What the head finds for every entry, [E], by the gradient's own operations, run forward only.

    With the same weights the log-probabilities are the gradient's own to the last bit (tested on CPUs), other
    numbers to rounding: the sum of an entropy is compiled into another program. Where residuals are kept,
    PUSH has run every row, and BACK only evaluates entries.

    Args: as in `mesh_value_and_grad` and `tree_forward`.
    """
    values = {"weight": np.ones(plan.num_entries)}
    if temperature is not None:
        values["temperature"] = temperature
    operations, entries = _placed(mesh, model, params, plan, values, entry_capacity, max_operations)
    outputs = _forward(_Program.of(mesh, model, params, plan), params, operations, entries)
    return _merged_numbers(outputs, plan)


def mesh_logprobs(
    mesh: Mesh,
    model: DecoderModel,
    params: Params,
    plan: MeshPlan,
    *,
    temperature: np.ndarray | None = None,
    entry_capacity: int = 0,
    max_operations: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability [E] and entropy [E] of every entry: `mesh_forward` of a policy, arguments as there.

    Raises:
      InputError: the model has no LM head.
    """
    require_policy(model)
    buckets: Any = {"entry_capacity": entry_capacity, "max_operations": max_operations}
    numbers = mesh_forward(mesh, model, params, plan, temperature=temperature, **buckets)
    return numbers.logp, numbers.entropy


def merge_ranks(collected: jax.Array, plan: MeshPlan) -> np.ndarray:
    """[K, E'] in the ranks' orders of evaluation -> [E] in the caller's order, on the host."""
    result = np.empty(plan.num_entries, collected.dtype)
    for schedule, mine, row in zip(plan.schedules, plan.entries, everywhere(collected), strict=True):
        result[mine] = in_callers_order(row, schedule)
    return result


def _merged_numbers(outputs: Outputs, plan: MeshPlan) -> Numbers:
    return jax.tree.map(functools.partial(merge_ranks, plan=plan), outputs.numbers)


def everywhere(array: jax.Array) -> np.ndarray:
    """The whole of an array that is cut over the mesh, on the host of every process."""
    if jax.process_count() == 1:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


class _Program(NamedTuple):
    """What a compiled program depends on beside shapes; hashable, a static argument."""

    mesh: Mesh
    model: DecoderModel  # as one `tensor` rank sees it
    first: int
    branches: tuple[tuple[int, int], ...]
    keeps: bool  # residuals, from each row's PUSH to its BACK
    compute: tuple[PartitionSpec, ...]  # of the parameters' leaves
    master: tuple[PartitionSpec, ...]

    @classmethod
    def of(cls, mesh: Mesh, model: DecoderModel, params: Params, plan: MeshPlan) -> _Program:
        return cls(
            mesh,
            split_over(mesh, model),
            plan.stack_slots,
            branches(plan.chunk_size),
            plan.keep_residuals,
            tuple(jax.tree.leaves(compute_specs(model, params))),
            tuple(jax.tree.leaves(master_specs(model, params, mesh))),
        )

    def like_params(self, params: Params, specs: tuple[PartitionSpec, ...]) -> Specs:
        return jax.tree.unflatten(jax.tree.structure(params), specs)

    def keys(self) -> int:
        return num_keys(self.first, max(width for _, width in self.branches))


def _placed(
    mesh: Mesh,
    model: DecoderModel,
    params: Params,
    plan: MeshPlan,
    values: Mapping[str, np.ndarray],
    capacity: int,
    max_operations: int,
) -> tuple[Operations, Entries]:
    arrays = stack_operations(model, params, plan, values, capacity=capacity, max_operations=max_operations)
    return jax.tree.map(functools.partial(place, sharding=ranks_sharding(mesh)), arrays)


@functools.partial(jax.jit, static_argnames=("program", "loss_fn"))
def _value_and_grad(
    program: _Program, loss_fn: LossFn, params: Params, operations: Operations, entries: Entries
) -> tuple[Outputs, Params]:
    model, ranks = program.model, physical(["ranks"])

    def run(params: Params, operations: Operations, entries: Entries) -> tuple[Outputs, Params]:
        operations, entries = _own((operations, entries))

        def step(kind: int, both: tuple[Back, Residuals | None], op: Op) -> tuple[Back, Residuals | None]:
            carry, kept = both
            if kept is None:
                if kind == BACK:
                    return back(model, loss_fn, params, carry, op, entries, program.first), None
                own = carry.stack, carry.outputs
                stack, outputs = push(model, params, own, op, entries, program.first)
            elif kind == BACK:
                return back_kept(model, loss_fn, params, (carry, kept), op, entries, program.first)
            else:
                state = carry.stack, carry.outputs, kept
                stack, outputs, kept = push_keeping(model, params, state, op, entries, program.first)
            return carry._replace(stack=stack, outputs=outputs), kept

        carry = start(model, params, len(entries.token), program.keys())
        kept = empty_residuals(model, params, carry.stack) if program.keeps else None
        carry, _ = _run_table(operations, program.branches, step, (carry, kept))
        with jax.named_scope("reduce"):
            grads = jax.tree.map(_reduce, carry.grads, program.like_params(params, program.master))
        return jax.tree.map(lambda leaf: leaf[None], carry.outputs), grads

    return jax.shard_map(
        run,
        mesh=program.mesh,
        in_specs=(program.like_params(params, program.compute), ranks, ranks),
        out_specs=(ranks, program.like_params(params, program.master)),
        check_vma=False,
    )(params, operations, entries)


@functools.partial(jax.jit, static_argnames="program")
def _forward(program: _Program, params: Params, operations: Operations, entries: Entries) -> Outputs:
    ranks = physical(["ranks"])

    def run(params: Params, operations: Operations, entries: Entries) -> Outputs:
        operations, entries = _own((operations, entries))

        def step(kind: int, carry: tuple[Stack, Outputs], op: Op) -> tuple[Stack, Outputs]:
            run_rows = _evaluate_pushed if program.keeps and kind == BACK else push
            return run_rows(program.model, params, carry, op, entries, program.first)

        carry = start_forward(program.model, params, len(entries.token), program.keys())
        _, outputs = _run_table(operations, program.branches, step, carry)
        return jax.tree.map(lambda leaf: leaf[None], outputs)

    specs = (program.like_params(params, program.compute), ranks, ranks)
    return jax.shard_map(run, mesh=program.mesh, in_specs=specs, out_specs=ranks, check_vma=False)(
        params, operations, entries
    )


@jax.named_scope("evaluate")
def _evaluate_pushed(
    model: DecoderModel, params: Params, carry: tuple[Stack, Outputs], op: Op, entries: Entries, first: int
) -> tuple[Stack, Outputs]:
    """BACK of rows that were pushed, forward only: their hidden states are on the stack, so none is run."""
    stack, outputs = carry
    h = jnp.take(stack.h, op.rows.slot, axis=0, mode="fill", fill_value=0)
    stack = stack._replace(h=lax.dynamic_update_slice_in_dim(stack.h, h, first, 0))
    return stack, evaluate_entries(model, params, stack.h, op, entries, outputs)


def _run_table(
    operations: Operations,
    kinds: tuple[tuple[int, int], ...],
    step: Callable[[int, Any, Op], Any],
    carry: Any,
) -> Any:
    """Runs this rank's operations, in order."""

    def operation(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        o, carry = state
        op = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, o, keepdims=False), operations.op)
        for index, (kind, width) in enumerate(kinds):
            narrow = op._replace(
                rows=op.rows._replace(
                    **{n: getattr(op.rows, n)[:width] for n in ("token", "position", "slot")}
                )
            )

            def once(state: tuple, kind: int = kind, op: Op = narrow) -> tuple:
                return jnp.bool_(False), step(kind, state[1], op)

            mine = operations.branch[o] == index
            _, carry = lax.while_loop(lambda state: state[0], once, (mine, carry))
        return o + 1, carry

    return lax.while_loop(lambda state: state[0] < operations.count, operation, (jnp.int32(0), carry))[1]


def _own(arrays: Any) -> Any:
    """This rank's row of arrays that are cut over `data`."""
    return jax.tree.map(lambda leaf: leaf[0], arrays)


def _reduce(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Adds the ranks' gradients up; each rank gets the part that it updates."""
    axis = data_axis(spec)
    if axis is None:
        return lax.psum(grad, DATA)
    return lax.psum_scatter(grad, DATA, scatter_dimension=axis, tiled=True)
