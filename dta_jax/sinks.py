"""Where a run's metrics go: `metrics.jsonl`, TensorBoard, and Weights & Biases.

    OUT/metrics.jsonl    `dta_jax.metrics`
    OUT/tensorboard/     event files of tensorboardX; scalars have the names that they have in `metrics.jsonl`
    OUT/wandb/           what the package wandb keeps, and `id`, so that a resumed run goes on in the same run

A resumed run drops the events of steps that it makes again; Weights & Biases ignores their second values,
which are the same. Whatever Weights & Biases raises is one warning, and the run goes on without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import socket
import struct
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from dta_jax.errors import InputError, writing
from dta_jax.metrics import METRICS_FILE, MetricsLog
from dta_jax.settings import Logging, Train

TENSORBOARD: Final = "tensorboard"
WANDB: Final = "wandb"
_EVENTS: Final = "events.out.tfevents."
_HEADER, _FOOTER = struct.Struct("<Q4x"), 4  # of a record: its length and a checksum; another checksum
_WANDB_SECONDS: Final = 30  # for its servers to answer, at the start


class Sink(Protocol):
    """Takes rows of metrics."""

    def write(self, row: Mapping[str, Any]) -> None:
        """One step's row."""

    def close(self) -> None:
        """Nothing more will come."""


def check_sinks(log: Logging) -> None:
    """Refuses, before anything runs, what needs a package that is not there.

    Raises:
      InputError: names the package.
    """
    if log.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise InputError(
            "Logging",
            "wandb_project",
            expected="the package wandb",
            actual="no module named wandb",
            hint="pip install 'dta_jax[wandb]', or set it to None",
        )


def has_tensorboard() -> bool:
    """Whether the package that writes event files is installed."""
    return importlib.util.find_spec("tensorboardX") is not None


@contextlib.contextmanager
def open_sinks(train: Train, out: Path, *, keep_through: int) -> Iterator[list[Sink]]:
    """`metrics.jsonl`, and the sinks that the settings ask for.

    Args:
      train: the run's settings.
      out: its folder.
      keep_through: the step that it goes on from; what is there of later steps is dropped.

    Raises:
      InputError: `metrics.jsonl` holds something else.
      RunError: the folder cannot be written to.
    """
    log = train.log
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = [MetricsLog(out / METRICS_FILE, keep_through=keep_through)]
        stack.callback(sinks[0].close)
        if log.tensorboard and has_tensorboard():
            sinks.append(TensorBoard(out / TENSORBOARD, keep_through=keep_through))
            stack.callback(sinks[-1].close)
        if log.wandb_project is not None:
            sinks.append(WeightsAndBiases(log, out, dataclasses.asdict(train)))
            stack.callback(sinks[-1].close)
        yield sinks


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """What of a row is a number, but for the step."""
    return {name: x for name, x in row.items() if isinstance(x, int | float) and name != "step"}


class TensorBoard:
    """Writes event files; each row is in the file when `write` returns.

    Args:
      folder: made if it does not exist.
      keep_through: events of later steps are dropped from the files that are there.
    """

    def __init__(self, folder: Path, *, keep_through: int):
        self._records: Any = importlib.import_module("tensorboardX.record_writer")
        self._events: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboardX.proto.summary_pb2")
        self._folder = folder
        with writing(folder):
            folder.mkdir(exist_ok=True)
            for file in folder.glob(f"{_EVENTS}*"):
                self._drop_later(file, keep_through)
            # TensorBoard reads files in the order of their names.
            name = f"{_EVENTS}{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            self._file = self._records.RecordWriter(str(folder / name))
        self._add(file_version="brain.Event:2")

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds a row's numbers."""
        values = [self._summaries.Summary.Value(tag=name, simple_value=x) for name, x in scalars(row).items()]
        self._add(step=row["step"], summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        """Closes the file."""
        with writing(self._folder):
            self._file.close()

    def _add(self, **fields: Any) -> None:
        with writing(self._folder):
            self._file.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
            self._file.flush()

    def _drop_later(self, file: Path, keep_through: int) -> None:
        data = file.read_bytes()
        kept = b"".join(
            record
            for record, event in records(data)
            if self._events.Event.FromString(event).step <= keep_through
        )
        if kept != data:
            partial = file.with_name(f".{file.name}.partial")
            partial.write_bytes(kept)
            os.replace(partial, file)


def records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The whole records of an event file: all bytes of each, and those of its event; not one cut off."""
    start = 0
    while start + _HEADER.size <= len(data):
        begin = start + _HEADER.size
        end = begin + _HEADER.unpack_from(data, start)[0]
        if end + _FOOTER > len(data):
            return
        yield data[start : end + _FOOTER], data[begin:end]
        start = end + _FOOTER


class WeightsAndBiases:
    """A run at Weights & Biases, or, offline, a folder that `wandb sync` uploads. Never raises.

    Args:
      log: with a project.
      out: the run's folder.
      config: the run's settings.
    """

    def __init__(self, log: Logging, out: Path, config: Mapping[str, Any]):
        self._run: Any = None
        with self._forgiven():
            wandb = importlib.import_module("wandb")
            self._run = wandb.init(
                project=log.wandb_project,
                name=log.wandb_name or out.name,
                mode=log.wandb_mode,
                dir=out,
                id=_run_id(out / WANDB / "id"),
                resume="allow",
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off", init_timeout=_WANDB_SECONDS),
            )

    def write(self, row: Mapping[str, Any]) -> None:
        """Logs a row's numbers."""
        if self._run is not None:
            with self._forgiven():
                self._run.log(scalars(row), step=row["step"])

    def close(self) -> None:
        """Ends the run there; online, waits until everything is uploaded."""
        if self._run is not None:
            with self._forgiven():
                self._run.finish()

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a service that no run depends on
            self._run = None
            reason = " ".join(str(error).split())
            warnings.warn(f"Weights & Biases: {reason}; the run goes on without it", stacklevel=4)


def _run_id(file: Path) -> str:
    """The same for every start of a run."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return file.read_text(encoding="utf-8")
