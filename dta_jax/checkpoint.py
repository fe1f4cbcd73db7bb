"""Checkpoints of a run: complete or invisible, checked when they are read, the newest few kept.

    DIR/checkpoints/STEP/state    arrays: parameters, optimizer state (orbax, tensorstore)
    DIR/checkpoints/STEP/run      JSON: step, seed, settings; dtype, shape and fingerprint of every array

Orbax writes into a folder of another name and renames it when everything is on disk, so a process that
is killed at any moment leaves whole checkpoints and, at most, a temporary folder that the next run removes.
Saving copies the arrays to the host and returns; the disk is written in the background. What the disk
does later is caught by fingerprints; the checkpoint before is used then.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dta_jax.errors import InputError, RunError


class DamagedCheckpointError(InputError):
    """A checkpoint that was complete once and cannot be read as it was written."""


class CheckpointStore:
    """The checkpoints of one run. Use it as a context, or `close` it: leaving waits for what is being saved.

    Args:
      directory: where they are, made if it does not exist.
      keep: how many of the newest stay.
    """

    def __init__(self, directory: Path, *, keep: int):
        self._directory = directory.absolute()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(directory, "folder", expected="a folder", actual=error.strerror) from None
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

        Raises:
          RunError: it cannot be written, or the one before could not.
        """
        prints = jax.device_get(fingerprints(state))
        arrays = {
            name: describe(leaf) | {"fingerprint": int(print_)}
            for (name, leaf), print_ in zip(named_leaves(state), jax.tree.leaves(prints), strict=True)
        }
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), run=ocp.args.JsonSave({**run, "arrays": arrays})
        )
        with self._saving():
            self._manager.save(step, args=args)

    def newest(
        self, like: Any, check: Callable[[int, Mapping[str, Any]], None], shardings: Any = None
    ) -> tuple[int, Any] | None:
        """The newest checkpoint that is whole. Damaged ones after it are moved aside, with a warning.

        Args:
          like: a pytree of arrays or `jax.ShapeDtypeStruct`: the shapes and dtypes that are wanted.
          check: is given the step and the JSON part, and raises if the run must not go on from it.
          shardings: where to put the arrays, a prefix of `like`; None for the shardings of `like`, or the
            default device where it has none. They need not be those of the run that saved.

        Returns:
          Its step and arrays; None if there is no checkpoint.

        Raises:
          InputError: what `check` raises, or arrays other than those of `like`; or none of the checkpoints
            is whole, and all are left as they are: a run must not begin anew where another got far.
        """
        damaged: dict[int, DamagedCheckpointError] = {}
        for step in reversed(self.steps()):
            try:
                run = self._read(step, "run", ocp.args.JsonRestore())
                check_run(self._directory / str(step), run)
                check(step, run)
                state = self._state(step, run, like, shardings)
            except DamagedCheckpointError as error:
                damaged[step] = error
                continue
            for item in damaged.items():
                self._move_aside(*item)
            return step, state
        for newest in damaged.values():
            hint = "no checkpoint before it is whole; to begin anew, choose another folder"
            raise InputError(
                newest.source, newest.field, expected=newest.expected, actual=newest.actual, hint=hint
            )
        return None

    def _move_aside(self, step: int, error: DamagedCheckpointError) -> None:
        names = (f"{step}.damaged{n or ''}" for n in itertools.count())
        aside = next(p for p in map(self._directory.joinpath, names) if not p.exists())
        warnings.warn(f"{error}; moved to {aside.name}, going on from the one before", stacklevel=3)
        (self._directory / str(step)).rename(aside)
        self._manager.reload()

    def close(self) -> None:
        """Waits until everything is on disk.

        Raises:
          RunError: it could not be written.
        """
        with self._saving():
            self._manager.close()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # tensorstore raises a ValueError for a full disk
            message = f"{self._directory}: a checkpoint cannot be written: {_reason(error)}"
            raise RunError(message) from error

    def _state(self, step: int, run: Mapping[str, Any], like: Any, shardings: Any) -> Any:
        saved = run["arrays"]
        wanted = {name: describe(leaf) for name, leaf in named_leaves(like)}
        for name in sorted(saved.keys() | wanted.keys()):
            has = {k: v for k, v in saved.get(name, {}).items() if k != "fingerprint"}
            if has != wanted.get(name, {}):
                raise InputError(
                    self._directory / str(step), name, expected=wanted.get(name, "none"), actual=has or "none"
                )
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        if shardings is None:
            shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None) or here, like)
        else:
            shardings = jax.tree.broadcast(shardings, like)
        target = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), like, shardings
        )
        state = self._read(step, "state", ocp.args.StandardRestore(target))
        prints = jax.tree.leaves(jax.device_get(fingerprints(state)))
        for name, print_ in zip(wanted, prints, strict=True):
            if print_ != saved[name]["fingerprint"]:
                raise DamagedCheckpointError(
                    self._directory / str(step),
                    name,
                    expected=f"fingerprint {saved[name]['fingerprint']}",
                    actual=int(print_),
                )
        return state

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except Exception as error:  # orbax raises a bare Exception for an array that it cannot decode
            raise DamagedCheckpointError(
                self._directory / str(step), item, expected="a whole checkpoint", actual=_reason(error)[:200]
            ) from error


def _reason(error: Exception) -> str:
    """The first line of what an error of orbax says, without the specification of the array."""
    cause = error.__cause__ or error
    line = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    return line.split(" [tensorstore_spec=")[0]


def check_run(step: Path, run: Any) -> None:
    """Raises DamagedCheckpointError if a checkpoint's JSON part does not describe its arrays."""
    arrays = run.get("arrays") if isinstance(run, dict) else None
    if not isinstance(arrays, dict) or not all(isinstance(array, dict) for array in arrays.values()):
        raise DamagedCheckpointError(
            step, "run", expected="an object that describes arrays", actual=str(run)[:80]
        )


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with the names that a checkpoint's JSON part gives them."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def describe(leaf: Any) -> dict[str, Any]:
    """What a checkpoint's JSON part says of an array, but for its fingerprint."""
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}


@jax.jit
def fingerprints(tree: Any) -> Any:
    """uint32 per array: `sum_i (2 i + 1) word_i` modulo 2^32, over its 32-bit (or narrower) words.

    Any change of one word changes it, as odd factors have inverses. Integer sums do not depend on their
    order, so neither does it depend on sharding.
    """

    def fingerprint(leaf: jax.Array) -> jax.Array:
        width = min(leaf.dtype.itemsize, 4)
        words = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * width}")).ravel().astype(jnp.uint32)
        factors = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
        return jnp.sum(words * factors, dtype=jnp.uint32)

    return jax.tree.map(fingerprint, tree)
