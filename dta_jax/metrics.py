"""What a run reports: `metrics.jsonl`, one object per step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from dta_jax.errors import InputError, writing

METRICS_FILE: Final = "metrics.jsonl"


class MetricsLog:
    """Appends rows to a `metrics.jsonl`; each is in the file when `write` returns.

    Args:
      path: the file, made if it does not exist.
      keep_through: rows of later steps are dropped (a resumed run writes them again), and so is a last
        row that was cut off.
    """

    def __init__(self, path: Path, *, keep_through: int):
        kept = [row for row in read_metrics(path) if row["step"] <= keep_through] if path.exists() else []
        partial = path.with_name(f".{path.name}.partial")
        with writing(path):
            partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            os.replace(partial, path)
            self._file: TextIO = path.open("a", encoding="utf-8")
        self._path = path

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one object."""
        with writing(self._path):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with writing(self._path):
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, without a last one that was cut off.

    Raises:
      InputError: the file cannot be read, or another line is no row.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(path, "file", expected="one JSON object per line", actual=reason) from None
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [_row(path, number, line) for number, line in enumerate(lines, start=1)]


def read_steps(run: Path, steps: range) -> list[dict[str, Any]]:
    """The rows of some steps of a run.

    Args:
      run: its folder.
      steps: which.

    Raises:
      InputError: see `read_metrics`.
    """
    rows = read_metrics(run / METRICS_FILE) if steps else []
    return [row for row in rows if row["step"] in steps]


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(path, f"line {number}", expected="a JSON object", actual=error) from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise InputError(path, f"line {number}", expected="a JSON object with a step", actual=line[:80])
    return row
