"""Where arrays lie on a mesh `data x tensor`: one table from logical to physical axes.

A model names the axes of its parameters logically (`DecoderModel.logical_axes`); `RULES` says which of them
are cut over `tensor`. Nothing else decides where an array lies:

    parameters that are computed with    cut over `tensor`, whole on every `data` rank
    master weights, optimizer state      cut over `tensor` and, along one more axis, over `data` (ZeRO-1)
    tables of operations, entries        one row of the first axis per `data` rank

Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), stage 1, for the second line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dta_jax.errors import InputError
from dta_jax.model import DecoderModel, Params

DATA: Final = "data"
TENSOR: Final = "tensor"

RULES: Final[Mapping[str, str | None]] = {
    "ranks": DATA,
    "vocab": TENSOR,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "layers": None,
    "embed": None,
    "head_dim": None,
}

Specs: TypeAlias = Any  # a pytree of PartitionSpec in the layout of the parameters


@dataclass(frozen=True)
class MeshShape:
    """How many devices lie along each axis of the mesh.

    Attributes:
      data: K, ranks that run different sequences.
      tensor: devices that share each rank's heads, MLP and vocabulary.
    """

    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or size < 1:
                raise InputError("MeshShape", name, expected="an integer, at least 1", actual=repr(size))

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Reads "data=4,tensor=2"; an axis that is left out has size 1.

        Raises:
          InputError: another form, an unknown or repeated axis, a size below 1.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or name not in (DATA, TENSOR) or name in sizes or not size.isdecimal():
                raise InputError("mesh", "axes", expected="like data=4,tensor=2", actual=repr(text))
            sizes[name] = int(size)
        return cls(**sizes)

    def make(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh over the first `data x tensor` of the devices; `tensor` ranks are neighbours.

        Args:
          devices: by default all of them, of all processes.

        Raises:
          InputError: there are fewer devices, or several processes of which one would take no part.
        """
        devices = jax.devices() if devices is None else devices
        needed = self.data * self.tensor
        good = needed <= len(devices) if jax.process_count() == 1 else needed == len(devices)
        if not good:
            expected = f"{len(devices)} devices, those that are there"
            actual, hint = f"{self.data} x {self.tensor}", "on a CPU, JAX_NUM_CPU_DEVICES makes more"
            raise InputError("MeshShape", "data x tensor", expected=expected, actual=actual, hint=hint)
        grid = np.array(devices[:needed]).reshape(self.data, self.tensor)
        return Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto, AxisType.Auto))


def physical(axes: Sequence[str | None], rules: Mapping[str, str | None] = RULES) -> PartitionSpec:
    """The mesh axes along which an array with these logical axes is cut.

    Args:
      axes: a name per dimension; None for a dimension without one.
      rules: logical to physical.

    Raises:
      InputError: a name that is not in the table, or two dimensions cut along the same mesh axis.
    """
    for name in axes:
        if name is not None and name not in rules:
            raise InputError("sharding", "axis", expected=f"one of {', '.join(rules)}", actual=repr(name))
    cut = [None if name is None else rules[name] for name in axes]
    used = [axis for axis in cut if axis is not None]
    if len(set(used)) < len(used):
        raise InputError(
            "sharding", str(tuple(axes)), expected="every mesh axis at most once", actual=tuple(cut)
        )
    return PartitionSpec(*cut)


def compute_specs(model: DecoderModel, params: Params) -> Specs:
    """How parameters lie that are computed with: by `RULES`, whole on every `data` rank."""
    return jax.tree.map(physical, model.logical_axes(params), is_leaf=lambda x: isinstance(x, tuple))


def master_specs(model: DecoderModel, params: Params, mesh: Mesh) -> Specs:
    """How master weights, gradients and optimizer state lie: cut over `data` too.

    Each array is cut along its first axis that `tensor` leaves alone and that the `data` ranks divide. One
    that has no such axis stays whole on every rank.
    """
    return jax.tree.map(
        lambda leaf, spec: _cut_over_data(leaf.shape, spec, mesh.shape[DATA]),
        params,
        compute_specs(model, params),
    )


def split_over(mesh: Mesh, model: DecoderModel) -> DecoderModel:
    """The model as one device of the mesh computes it.

    Raises:
      InputError: the `tensor` devices do not divide its heads, MLP or vocabulary.
    """
    return model.split(TENSOR, mesh.shape[TENSOR]) if mesh.shape[TENSOR] > 1 else model


def place_params(mesh: Mesh, model: DecoderModel, params: Params) -> Params:
    """Parameters on the mesh as they are computed with.

    Raises:
      InputError: see `split_over`.
    """
    split_over(mesh, model)
    return jax.device_put(params, shardings(mesh, compute_specs(model, params)))


def data_axis(spec: PartitionSpec) -> int | None:
    """The dimension that is cut over `data`, if any."""
    return spec.index(DATA) if DATA in spec else None


def shardings(mesh: Mesh, specs: Specs) -> Any:
    """The specs on a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def ranks_sharding(mesh: Mesh) -> NamedSharding:
    """One row of the first axis per `data` rank."""
    return NamedSharding(mesh, physical(["ranks"]))


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Puts an array that every process has onto the mesh; each process places what its devices hold."""
    parts = sharding.addressable_devices_indices_map(array.shape)
    shards = [jax.device_put(array[index], device) for device, index in parts.items()]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _cut_over_data(shape: tuple[int, ...], spec: PartitionSpec, ranks: int) -> PartitionSpec:
    cut = list(spec)
    for axis, size in enumerate(shape):
        if cut[axis] is None and size % ranks == 0:
            cut[axis] = DATA
            break
    return PartitionSpec(*cut)
