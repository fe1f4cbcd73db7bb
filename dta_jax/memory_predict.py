"""Predicts the memory of a training step on one device of a mesh. Nothing is allocated, nothing compiled.

    what stays    parameters, master weights, optimizer state, gradients: shapes from `model.init`, cut as
                  `dta_jax.sharding` cuts them
    the carry     the stack and its cotangents, kept residuals, entries and what is collected of them: the
                  very functions that make them, evaluated for shapes
    temporaries   of PUSH and BACK, and of the optimizer's update: the steps are traced, and lifetimes
                  counted (`dta_jax.liveness`)

The peak of a run is the largest, over its programs, of the arrays that are alive meanwhile and the program's
own temporaries. Operations narrower than C need less than those of C rows, so those are what is looked at.

Not counted: batches that wait on the host, arguments of operations that were dispatched but have not run
(8 N bytes each), buffers of collectives, and what the allocator and the libraries of a device reserve.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, fields
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dta_jax import segment, tree_grad
from dta_jax.errors import InputError
from dta_jax.liveness import temporary_bytes
from dta_jax.losses import NLL, TokenLoss
from dta_jax.mesh_plan import FEWEST_OPERATIONS
from dta_jax.model import DecoderModel, Params
from dta_jax.schedule import round_slots
from dta_jax.segment import Rows, num_keys
from dta_jax.sharding import DATA, TENSOR, MeshShape, compute_specs, master_specs, shardings
from dta_jax.tree_inputs import Entries, Op, entry_capacity
from dta_jax.types import BACK, PUSH, accumulator_dtype
from dta_jax.zero import State, state_shardings

PREDICTED: Final = ("packed", "packed+keep")
Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Setup:
    """What a run's memory depends on beside chunk size and strategy.

    Attributes:
      model: the whole model.
      dtype: of the weights that are computed with.
      longest: tokens of the longest sequence.
      entries: the most entries of a batch (on a mesh, too, every rank has room for all of them).
      mesh: devices along each axis.
      optimizer: of float32 master weights; None where there are only gradients.
      loss: of one entry; `dta_jax.sequence_losses.Injected()` stands for all sequence losses.
      resident: bytes of other arrays that stay on each device (a critic, a reference).
      platform: "cpu", "gpu", ...: a CPU widens bfloat16 (`dta_jax.liveness`).
    """

    model: DecoderModel
    dtype: str
    longest: int
    entries: int
    mesh: MeshShape = field(default_factory=MeshShape)
    optimizer: optax.GradientTransformation | None = None
    loss: TokenLoss = field(default_factory=NLL)
    resident: int = 0
    platform: str = field(default_factory=jax.default_backend)

    def __post_init__(self) -> None:
        for name, least in (("longest", 1), ("entries", 0), ("resident", 0)):
            value = getattr(self, name)
            if value < least:
                raise InputError("Setup", name, expected=f"at least {least}", actual=value)


@dataclass(frozen=True)
class Parts:
    """Bytes on one device while a step runs, by what they are for.

    Attributes:
      parameters: the weights that are computed with (0 if they are the master weights themselves).
      master_weights, optimizer_state: cut over `data`.
      gradients: float32 accumulators, whole on every `data` rank; on a mesh also the part that it gets back.
      stack: K, V and hidden states by slot.
      cotangents: of the stack, float32.
      kept_residuals: by slot, with `packed+keep` only.
      entries: tokens, values and what is collected of entries; the operations' tables.
      chunk_residuals: what BACK keeps of its rows between its forward and its reverse pass, and the
        cotangents that it takes over.
      working: what else is alive at the worst moment of PUSH or BACK: a layer's arrays, blocks of scores,
        blocks of logits, the head's gradient.
      resident: what `Setup.resident` says.
    """

    parameters: int
    master_weights: int
    optimizer_state: int
    gradients: int
    stack: int
    cotangents: int
    kept_residuals: int
    entries: int
    chunk_residuals: int
    working: int
    resident: int

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Prediction:
    """What a run with one chunk size and strategy needs on each device.

    Attributes:
      chunk_size, strategy: C and the planner's strategy.
      parts: at the worst moment of the gradient.
      programs: {kind: bytes} of PUSH and BACK of C rows alone: what `memory.step_memory` counts.
      update: bytes while the optimizer updates; 0 without one.
    """

    chunk_size: int
    strategy: str
    parts: Parts
    programs: dict[int, int]
    update: int

    @property
    def peak(self) -> int:
        """Bytes, the largest over the run's programs."""
        return max(self.parts.total, self.update)


@functools.cache
def predict_memory(setup: Setup, chunk_size: int, strategy: str) -> Prediction:
    """Predicts a run's peak memory per device.

    Args:
      setup: the run.
      chunk_size: C.
      strategy: `packed` or `packed+keep`.

    Raises:
      InputError: another strategy, or a `tensor` axis that does not divide the model.
    """
    if strategy not in PREDICTED:
        raise InputError("memory", "strategy", expected=" or ".join(PREDICTED), actual=repr(strategy))
    fixed = fixed_bytes(setup)
    steps = Steps.of(setup, chunk_size, keep=strategy.endswith("+keep"))
    temporaries = {kind: steps.temporaries(kind, setup.platform) for kind in (PUSH, BACK)}
    residuals = min(steps.residual_bytes(), temporaries[BACK])
    parts = Parts(
        parameters=fixed.parameters,
        master_weights=fixed.master_weights,
        optimizer_state=fixed.optimizer_state,
        gradients=_bytes(steps.carry.grads) + (0 if _is_single(setup.mesh) else fixed.gradients),
        stack=_bytes(steps.carry.stack),
        cotangents=_bytes(steps.carry.cotangents),
        kept_residuals=_bytes(steps.kept),
        entries=_bytes((steps.entries, steps.carry.outputs)) + steps.table_bytes(setup.mesh),
        chunk_residuals=residuals,
        working=max(temporaries.values()) - residuals,
        resident=setup.resident,
    )
    programs = {kind: _bytes(steps.arguments(kind)) + temporaries[kind] for kind in temporaries}
    collected = _bytes(steps.carry.outputs)
    return Prediction(chunk_size, strategy, parts, programs, fixed.update + collected if fixed.update else 0)


@dataclass(frozen=True)
class Fixed:
    """Bytes per device that no plan changes; `gradients` and `update` are those of the optimizer's update."""

    parameters: int
    master_weights: int
    optimizer_state: int
    gradients: int
    update: int


@functools.cache
def fixed_bytes(setup: Setup) -> Fixed:
    """Weights, optimizer state and gradients by shape, each cut as it lies on the mesh."""
    mesh, model = _abstract(setup.mesh), setup.model
    if setup.mesh.tensor > 1:
        model.split(TENSOR, setup.mesh.tensor)  # refuses what does not divide
    compute = _weights(setup)
    wide = jax.tree.map(lambda leaf: Shape(leaf.shape, accumulator_dtype(leaf.dtype)), compute)
    master = shardings(mesh, master_specs(model, wide, mesh))
    parameters = _bytes(_cut(compute, shardings(mesh, compute_specs(model, compute))))
    gradients = _cut(wide, master)
    if setup.optimizer is None:
        return Fixed(parameters, 0, 0, _bytes(gradients), 0)
    state = State(wide, jax.eval_shape(setup.optimizer.init, wide))
    state = _cut(state, State(master, state_shardings(setup.optimizer, wide, master, mesh)))
    if _is_single(setup.mesh) and compute == wide:
        parameters = 0
    traced = jax.make_jaxpr(functools.partial(_update, setup.optimizer))(state, gradients)
    temporaries = temporary_bytes(traced.jaxpr, for_cpu=setup.platform == "cpu")
    held = parameters + _bytes(state) + _bytes(gradients) + setup.resident
    return Fixed(
        parameters, _bytes(state.params), _bytes(state.opt_state), _bytes(gradients), held + temporaries
    )


@functools.cache
def _weights(setup: Setup) -> Params:
    """Shapes of the whole weights that are computed with."""
    init = jax.eval_shape(lambda: setup.model.init(jax.random.key(0)))
    return jax.tree.map(lambda leaf: Shape(leaf.shape, jnp.dtype(setup.dtype)), init)


def _update(optimizer: optax.GradientTransformation, state: State, grads: Params) -> State:
    """What `ShardedOptimizer.update` computes."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state)


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of C rows and the shapes of their arguments, as one device sees them."""

    model: DecoderModel
    loss: TokenLoss
    params: Params
    carry: tree_grad.Back
    kept: segment.Residuals | None
    op: Op
    entries: Entries
    slots: int
    mesh: AbstractMesh

    @classmethod
    def of(cls, setup: Setup, chunk_size: int, *, keep: bool) -> Steps:
        mesh, model = _abstract(setup.mesh), setup.model
        params = _weights(setup)
        params = _cut(params, shardings(mesh, compute_specs(model, params)))
        if setup.mesh.tensor > 1:
            model = model.split(TENSOR, setup.mesh.tensor)
        slots, capacity = round_slots(setup.longest + chunk_size), entry_capacity(setup.entries)
        keys = num_keys(slots, chunk_size)
        on_device = functools.partial(_on_device, mesh, setup.mesh.tensor > 1)
        start = functools.partial(tree_grad.start, model, capacity=capacity, keys=keys)
        carry = jax.eval_shape(on_device(start), params)
        residuals = functools.partial(segment.empty_residuals, model)
        kept = jax.eval_shape(on_device(residuals), params, carry.stack) if keep else None
        values = dict.fromkeys(("weight", "temperature", *setup.loss.required))
        wide = accumulator_dtype(setup.dtype)
        floats: Any = {name: Shape((capacity,), wide) for name in values}
        ids: Any = Shape((capacity,), jnp.int32)
        entries = Entries(ids, ids, floats)
        number: Any = Shape((), jnp.int32)
        op = Op(Rows(*_ints(chunk_size, 3), *_ints(keys, 2)), number, number, number)
        return cls(model, setup.loss, params, carry, kept, op, entries, slots, mesh)

    def arguments(self, kind: int) -> tuple[Any, ...]:
        """(params, carry, op, entries) of a step."""
        carry: Any = (self.carry.stack, self.carry.outputs) if kind == PUSH else self.carry
        if self.kept is not None:
            carry = (*carry, self.kept) if kind == PUSH else (carry, self.kept)
        return self.params, carry, self.op, self.entries

    def program(self, kind: int) -> Any:
        """A step as a function of `arguments`; the second is what it changes."""
        kept = self.kept is not None
        if kind == PUSH:
            step: Any = functools.partial(tree_grad.push_keeping if kept else tree_grad.push, self.model)
        else:
            back = tree_grad.back_kept if kept else tree_grad.back
            step = functools.partial(back, self.model, self.loss)
        step = functools.partial(step, first=self.slots)
        return _on_device(self.mesh, self.model.tensor_axis is not None, step)

    def temporaries(self, kind: int, platform: str) -> int:
        """Bytes that a step needs beside its arguments."""
        traced = jax.make_jaxpr(self.program(kind))(*self.arguments(kind))
        return temporary_bytes(traced.jaxpr, for_cpu=platform == "cpu")

    def residual_bytes(self) -> int:
        """Bytes of the residuals of C rows, and of the cotangents that BACK takes over."""
        keys, width = len(self.op.rows.q_start), len(self.op.rows.token)
        cotangents = _bytes(self.carry.cotangents)
        make = functools.partial(segment.empty_residuals, self.model)
        make = _on_device(self.mesh, self.model.tensor_axis is not None, make)
        by_slot = _bytes(jax.eval_shape(make, self.params, self.carry.stack))
        return (by_slot + cotangents) * width // keys

    def table_bytes(self, mesh: MeshShape) -> int:
        """Bytes of an operation's arrays; on a mesh, of a table of them."""
        return _bytes(self.op) * (1 if _is_single(mesh) else FEWEST_OPERATIONS)


def _on_device(mesh: AbstractMesh, cut: bool, function: Any) -> Any:
    """The function as one device of the mesh runs it, so that its collectives can be traced."""
    if not cut:
        return function
    everywhere = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)


def _abstract(mesh: MeshShape) -> Any:
    """A mesh without devices, in place of one."""
    return AbstractMesh((mesh.data, mesh.tensor), (DATA, TENSOR))


def _is_single(mesh: MeshShape) -> bool:
    return mesh.data * mesh.tensor == 1


def _cut(tree: Any, places: Any) -> Any:
    """Shapes of what one device holds."""

    def local(leaf: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
        return Shape(place.shard_shape(leaf.shape), leaf.dtype)

    return jax.tree.map(local, tree, places)


def _ints(size: int, count: int) -> Any:
    return (Shape((size,), jnp.int32),) * count


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
