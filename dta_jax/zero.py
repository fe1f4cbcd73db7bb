"""The optimizer on a mesh: master weights and optimizer state cut over `data` (ZeRO, stage 1).

    gradients, from `mesh_grad`   each rank has the sum over all ranks for its part
    update                        each rank updates its part of weights and state
    gather                        the parts, cast and then gathered: what the next step computes with

The arrays are global ones, and the update is compiled for their shardings. So norms over a tensor or over
all of them (clipping) are what they are on one device, and a checkpoint knows nothing of the mesh.

What is cut is what has a parameter's shape. A transformation whose state is of another kind (factored
moments, projections) is refused, because whole copies of it on every rank are not what ZeRO promises.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dta_jax.errors import InputError
from dta_jax.model import DecoderModel, Params
from dta_jax.sharding import compute_specs, master_specs, shardings, split_over
from dta_jax.types import accumulator_dtype


class State(NamedTuple):
    """What a step changes: float32 master weights and the optimizer's state."""

    params: Params
    opt_state: optax.OptState


@dataclass(frozen=True, eq=False)
class ShardedOptimizer:
    """An optimizer whose weights and state lie on a mesh.

    Attributes:
      like: shapes, dtypes and shardings of the state; what a checkpoint is read into.
      place: float32 weights, anywhere -> master weights.
      init: master weights -> the optimizer's first state.
      update: (state, gradients) -> the next state. The old one is donated.
      gather: (master weights, dtype) -> weights in that dtype, whole on every `data` rank.
    """

    like: State
    place: Callable[[Params], Params]
    init: Callable[[Params], optax.OptState]
    update: Callable[[State, Params], State]
    gather: Callable[[Params, str], Params]

    @classmethod
    def on(cls, mesh: Mesh, model: DecoderModel, optimizer: optax.GradientTransformation) -> ShardedOptimizer:
        """Builds the functions; each compiles once.

        Raises:
          InputError: state that belongs to no parameter, or see `split_over`.
        """
        split_over(mesh, model)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, accumulator_dtype(leaf.dtype)),
            jax.eval_shape(model.init, jax.random.key(0)),
        )
        master = shardings(mesh, master_specs(model, shapes, mesh))
        state = State(master, state_shardings(optimizer, shapes, master, mesh))
        like = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            State(shapes, jax.eval_shape(optimizer.init, shapes)),
            state,
        )

        init = jax.jit(optimizer.init, out_shardings=state.opt_state)
        copy = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=master)

        def place(params: Params) -> Params:
            # device_put may share buffers with what it is given, and updates donate master weights.
            return copy(jax.device_put(params, master))

        @functools.partial(jax.jit, out_shardings=state, donate_argnums=0)
        def update(state: State, grads: Params) -> State:
            with jax.named_scope("update"):
                updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
                return State(optax.apply_updates(state.params, updates), opt_state)

        whole = shardings(mesh, compute_specs(model, shapes))

        @functools.partial(jax.jit, static_argnums=1, out_shardings=whole)
        def cast_and_gather(params: Params, dtype: str) -> Params:
            # Cast where the parts lie, so that what travels is as narrow as what is computed with.
            cut = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
            return jax.lax.with_sharding_constraint(cut, master)

        def gather(params: Params, dtype: str) -> Params:
            if mesh.size == 1 and all(leaf.dtype == dtype for leaf in jax.tree.leaves(params)):
                return params
            return cast_and_gather(params, dtype)

        return cls(like, place, init, update, gather)


def state_shardings(
    optimizer: optax.GradientTransformation, params: Params, master: Any, mesh: Mesh
) -> optax.OptState:
    """A sharding per array of the optimizer's state: that of its parameter; scalars are whole everywhere.

    Args:
      params: shapes of the parameters.
      master: their shardings.

    Raises:
      InputError: an array of the state that is neither like a parameter nor a scalar.
    """

    def of_parameter(leaf: Any, param: jax.ShapeDtypeStruct, place: NamedSharding) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        if leaf.shape != param.shape:
            raise _refused(leaf, f"shape {param.shape}, its parameter's")
        return place

    def of_other(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        if leaf.shape:
            raise _refused(leaf, "scalars beside what has a parameter's shape")
        return NamedSharding(mesh, PartitionSpec())

    return optax.tree_utils.tree_map_params(
        optimizer,
        of_parameter,
        jax.eval_shape(optimizer.init, params),
        params,
        master,
        transform_non_params=of_other,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )


def bytes_on_a_device(like: Any) -> int:
    """Bytes that each device holds of arrays, or of shapes, with shardings."""
    leaves = jax.tree.leaves(like)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def bytes_per_device(tree: Any) -> dict[jax.Device, int]:
    """Bytes that the arrays' shards take on each of this process's devices."""
    found: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


def _refused(leaf: jax.ShapeDtypeStruct, expected: str) -> InputError:
    hint = "use a transformation that works on each parameter's elements, or one device"
    return InputError("optimizer", "state", expected=expected, actual=f"shape {leaf.shape}", hint=hint)
