"""Checkpoints of a run: complete or invisible, checked when they are read, the newest and the best few kept.

    DIR/checkpoints/STEP/state    arrays: parameters, optimizer state (orbax, tensorstore)
    DIR/checkpoints/STEP/run      JSON: step, settings, metrics; dtype, shape and fingerprint of every array

Orbax writes into a folder of another name and renames it when everything is on disk, so a process that
is killed at any moment leaves whole checkpoints and, at most, a temporary folder that the next run removes.
Saving copies the arrays to the host and returns; the disk is written in the background. What the disk
does later is caught by fingerprints; the checkpoint before is used then.

Which are best is read from the JSON parts, not from orbax's own item for metrics: a damaged one of those
keeps orbax from opening the folder at all.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    LatestN,
    PolicyCheckpointInfo,
    PreservationContext,
    PreservationPolicy,
)

from dta_jax.errors import InputError, RunError
from dta_jax.hosts import answer_of_process_0
from dta_jax.settings import Checkpoints


class DamagedCheckpointError(InputError):
    """A checkpoint that was complete once and cannot be read as it was written."""


class DueCheckpoints:
    """When a checkpoint is due. Several processes go by the clock of process 0.

    Args:
      settings: of the run.
      clock: seconds.
    """

    def __init__(self, settings: Checkpoints, clock: Callable[[], float] = time.monotonic):
        self._settings, self._clock = settings, clock
        self._last = clock()

    def at(self, step: int, row: Mapping[str, Any]) -> bool:
        """Whether the state of a step that is over is to be saved.

        Args:
          step: from 1.
          row: its metrics.
        """
        settings = self._settings
        by_clock = False
        if settings.every_minutes is not None:
            by_clock = answer_of_process_0(self._clock() - self._last >= 60 * settings.every_minutes)
        rated = settings.best_is_evaluated and settings.best_metric in row
        return by_clock or rated or step % settings.every == 0

    def note_saved(self) -> None:
        """The clock begins anew."""
        self._last = self._clock()


class CheckpointStore:
    """The checkpoints of one run. Use it as a context, or `close` it: leaving waits for what is being saved.

    Args:
      directory: where they are, made if it does not exist.
      keep, keep_best, best_metric, best_mode: see `Checkpoints`; metrics are those of the `run` part.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        keep_best: int = 0,
        best_metric: str | None = None,
        best_mode: str = "max",
    ):
        self._directory = directory.absolute()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(directory, "folder", expected="a folder", actual=error.strerror) from None
        steps = (path for path in self._directory.iterdir() if path.name.isdecimal())
        self._metrics = {int(path.name): _saved_metrics(path) for path in steps}
        self._best = _Best(keep_best, best_metric or "", best_mode, self._metrics)
        self._looked_for_metric = False
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), self._best]),
            cleanup_tmp_directories=True,
        )
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

    def best(self) -> int | None:
        """The step of the best checkpoint; None if none is rated."""
        ranked = self._best.ranked(self.steps())
        return ranked[-1] if ranked else None

    def save(self, step: int, state: Any, run: Mapping[str, Any]) -> None:
        """Saves a state in the background. Its arrays may be donated as soon as this returns.

        Args:
          step: steps that the state has seen.
          state: a pytree of arrays.
          run: everything else, as JSON; its `metrics`, float by name, say how good the state is.

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
        self._metrics[step] = run.get("metrics", {})
        self._look_for_metric(step)
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
            for other in self._best.unknown(self.steps()):
                path = self._directory / str(other)
                warnings.warn(f"{path}: run: cannot be read; it is kept, and not rated", stacklevel=2)
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
        self._metrics.pop(step, None)
        if jax.process_index() == 0:
            (self._directory / str(step)).rename(aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(aside.name)
        self._manager.reload()

    def _look_for_metric(self, step: int) -> None:
        """Says once that no metric has the name that the best are known by."""
        name, metrics = self._best.metric, self._metrics[step] or {}
        evaluated = not name.startswith("eval_") or any(other.startswith("eval_") for other in metrics)
        if not name or self._looked_for_metric or not evaluated:
            return
        self._looked_for_metric = True
        if name not in metrics:
            close = difflib.get_close_matches(name, metrics, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            warnings.warn(f"Checkpoints.best_metric: step {step} has no {name}{hint}", stacklevel=3)

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
        here = jax.device_put(0, jax.local_devices()[0]).sharding
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


class _Best(PreservationPolicy):
    """Preserves the best few, and those of which nothing can be read: they may be among the best.

    Args:
      number: how many.
      metric, mode: what is best.
      metrics: of all checkpoints, by step; None where they cannot be read.
    """

    def __init__(
        self, number: int, metric: str, mode: str, metrics: Mapping[int, Mapping[str, float] | None]
    ):
        self.metric = metric
        self._number, self._sign, self._metrics = number, 1 if mode == "max" else -1, metrics

    def ranked(self, steps: Sequence[int]) -> list[int]:
        """Those steps that are rated, from the worst to the best; of equal ones, the newest is the best."""
        rated = {step: metrics[self.metric] for step in steps
                 if (metrics := self._metrics.get(step)) and self.metric in metrics}  # fmt: skip
        return sorted(rated, key=lambda step: (self._sign * rated[step], step))

    def unknown(self, steps: Sequence[int]) -> list[int]:
        """Those steps of which nothing can be read; none if nobody asks for the best."""
        return [step for step in steps if self._metrics.get(step, {}) is None] if self._number else []

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """See `PreservationPolicy`."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        ranked = self.ranked(steps)
        kept = {*ranked[max(len(ranked) - self._number, 0) :], *self.unknown(steps)}
        return [step in kept for step in steps]


def _saved_metrics(step: Path) -> dict[str, float] | None:
    """The metrics in a checkpoint's JSON part; None if it cannot be read."""
    try:
        run = json.loads((step / "run" / "metadata").read_text(encoding="utf-8"))
        metrics = run.get("metrics", {})
        return {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    except (OSError, ValueError, AttributeError):  # no file, no JSON, no object
        return None


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
