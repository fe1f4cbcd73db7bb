"""Which devices train and which sample: those of `LocalSampler.devices` are kept out of the mesh.

    LocalSampler.devices = None      the sampler shares the first device of the mesh, in turns with training
    LocalSampler.devices = (6, 7)    devices 6 and 7 sample; the mesh is made of the others

Numbers count the devices of one process, the first one if there are several.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from dta_jax.errors import InputError
from dta_jax.generation.local import LocalSampler
from dta_jax.settings import LiveRollouts, Train


def sampling_devices(sampler: LocalSampler) -> list[jax.Device]:
    """The devices set apart for sampling; none if it shares the trainer's.

    Raises:
      InputError: there is no such device.
    """
    own = [device for device in jax.devices() if device.process_index == 0]
    for number in sampler.devices or ():
        if number >= len(own):
            expected = (
                f"numbers of devices, 1 to {len(own) - 1}" if len(own) > 1 else "None: there is one device"
            )
            hint = "on a CPU, JAX_NUM_CPU_DEVICES makes more"
            raise InputError("LocalSampler", "devices", expected=expected, actual=number, hint=hint)
    return [own[number] for number in sampler.devices or ()]


def training_devices(train: Train) -> Sequence[jax.Device]:
    """All devices but those set apart, in JAX's order.

    Raises:
      InputError: see `sampling_devices`.
    """
    source, apart = train.rollouts, []
    if isinstance(source, LiveRollouts) and isinstance(source.generator, LocalSampler):
        apart = sampling_devices(source.generator)
    return [device for device in jax.devices() if device not in apart]
