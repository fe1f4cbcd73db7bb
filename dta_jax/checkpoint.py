"""Checkpoints of a run: complete or invisible, the newest few kept.

    DIR/checkpoints/STEP/state    arrays: parameters, optimizer state (orbax, tensorstore)
    DIR/checkpoints/STEP/run      JSON: step, data position, seed, settings, metrics

Orbax writes into a folder of another name and renames it when everything is on disk, so a process that
is killed at any moment leaves whole checkpoints and, at most, a temporary folder that the next run removes.
Saving copies the arrays to the host and returns; the disk is written in the background.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from dta_jax.errors import InputError


class CheckpointStore:
    """The checkpoints of one run. Use it as a context, or `close` it: leaving waits for what is being saved.

    Args:
      directory: where they are, made if it does not exist.
      keep: how many of the newest stay.
    """

    def __init__(self, directory: Path, *, keep: int):
        self._directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, run: Mapping[str, Any]) -> None:
        """Saves a state in the background. Its arrays may be donated as soon as this returns.

        Args:
          step: optimizer updates that the state has seen.
          state: a pytree of arrays.
          run: everything else, as JSON.
        """
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(dict(run)))
        self._manager.save(step, args=args)

    def run(self, step: int) -> dict[str, Any]:
        """The JSON part of a checkpoint.

        Raises:
          InputError: it cannot be read.
        """
        return self._restore(step, run=ocp.args.JsonRestore())["run"]

    def state(self, step: int, like: Any, shardings: Any = None) -> Any:
        """The arrays of a checkpoint.

        Args:
          step: one of `steps()`.
          like: a pytree of arrays or `jax.ShapeDtypeStruct`: the shapes and dtypes that are wanted.
          shardings: where to put them, a prefix of `like`; None for the shardings of `like`, or the default
            device where it has none. They need not be those of the run that saved.

        Raises:
          InputError: the checkpoint is damaged, or has other arrays.
        """
        if shardings is None:
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda a: getattr(a, "sharding", None) or here, like)
        else:
            shardings = jax.tree.broadcast(shardings, like)
        target = jax.tree.map(
            lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), like, shardings
        )
        return self._restore(step, state=ocp.args.StandardRestore(target))["state"]

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.close()

    def _restore(self, step: int, **items: ocp.args.CheckpointArgs) -> Mapping[str, Any]:
        folder = self._directory / str(step)
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(
                folder,
                next(iter(items)),
                expected="a whole checkpoint of this run",
                actual=reason[:300],
                hint="remove it to go on from the one before",
            ) from error
