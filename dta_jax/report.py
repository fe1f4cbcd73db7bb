"""Figures of training runs: `python -m dta_jax.report RUN [RUN...] --out DIR`.

    DIR/index.html               one page that needs nothing else; several runs are compared in it
    DIR/reward.svg, .png, ...    its figures, one by one (PNG where matplotlib is installed)

RUN is a run's folder, or its `metrics.jsonl`. What a run does not report is left out.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dta_jax.curves import Key, Series, chart
from dta_jax.errors import InputError, run_command
from dta_jax.metrics import METRICS_FILE, read_metrics
from dta_jax.picture import can_write_png
from dta_jax.report_page import report_page

COLOURS: Final = ("#2f74b5", "#d1702a", "#2a9d8f", "#8e5ea2", "#c8314a", "#7a7a2b", "#3b4a59", "#c2569b")
DASHES: Final[tuple[tuple[float, ...], ...]] = ((), (6, 4), (2, 3), (9, 3, 2, 3))


@dataclass(frozen=True)
class Figure:
    """One chart.

    Attributes:
      name: of its files.
      title, unit: what it shows.
      columns: of `metrics.jsonl`; one that ends in `*` is every column that begins so, one that begins with
        `*` every one that ends so; `a / b` is a quotient.
    """

    name: str
    title: str
    unit: str
    columns: tuple[str, ...]


FIGURES: Final = (
    Figure("reward", "Reward", "mean of the batch", ("reward_mean",)),
    Figure("loss", "Loss", "", ("loss",)),
    Figure("throughput", "Throughput", "tokens/s", ("flat_tokens / seconds", "tree_tokens / seconds")),
    Figure("staleness", "Staleness", "updates", ("staleness_mean", "staleness_max")),
    Figure("memory", "Memory", "bytes", ("*_bytes",)),
    Figure("dedupe", "Dedupe", "flat over tree tokens", ("dedupe_ratio",)),
    Figure("seconds", "Time of a step", "s", ("seconds",)),
    Figure("grad_norm", "Gradient norm", "", ("grad_norm",)),
    Figure("entropy", "Entropy", "nats", ("entropy_mean",)),
    Figure("kl", "KL divergence", "nats", ("kl_*",)),
    Figure("clip", "Entries at a clip bound", "share", ("clip_fraction_*",)),
    Figure("learning_rate", "Learning rate", "", ("learning_rate",)),
)


@dataclass(frozen=True, eq=False)
class RunMetrics:
    """The numbers of one run.

    Attributes:
      name: as the user gave it.
      steps: float64[n], ascending.
      columns: float64[n] by name, NaN where a step does not say.
    """

    name: str
    steps: np.ndarray
    columns: Mapping[str, np.ndarray]

    def column(self, name: str) -> np.ndarray:
        """A column or the quotient of two, float64[n]; NaN where it is not known."""
        if " / " in name:
            above, below = (self.column(part) for part in name.split(" / "))
            return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
        return self.columns.get(name, np.full(len(self.steps), np.nan))


def read_run(run: Path) -> RunMetrics:
    """Reads a run's `metrics.jsonl`.

    Raises:
      InputError: no such file, no row in it, or a line that is not a row with an ascending step; it names the
        line.
    """
    path = run / METRICS_FILE if run.is_dir() or not run.suffix else run
    rows = read_metrics(path)
    if not rows:
        raise InputError(path, "rows", expected="at least one step", actual="none")
    for line, (before, row) in enumerate(itertools.pairwise(rows), start=2):
        if row["step"] <= before["step"]:
            expected = f"a step after {before['step']}"
            raise InputError(path, f"line {line}", expected=expected, actual=row["step"])
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _numbers(path, name, rows) for name in names if _is_column(rows, name)}
    return RunMetrics(str(run), np.array([row["step"] for row in rows], float), columns)


def _is_column(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether a name stands for one number per step, or for a text, a list or a flag."""
    first = next((row[name] for row in rows if row.get(name) is not None), None)
    return isinstance(first, int | float) and not isinstance(first, bool)


def _numbers(path: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    values = np.full(len(rows), np.nan)
    for i, row in enumerate(rows):
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(path, f"line {i + 1}: {name}", expected="a finite number", actual=repr(value))
        values[i] = value
    return values


def series_of(figure: Figure, runs: Sequence[RunMetrics]) -> list[Series]:
    """A figure's lines. Of one run, each column has a colour; of several, each run, and columns a dash."""
    found = []
    for k, run in enumerate(runs):
        for j, name in enumerate(_columns(figure, runs)):
            values = run.column(name)
            known = np.isfinite(values)
            if not known.any():
                continue
            style = (_colour(j), ()) if len(runs) == 1 else (_colour(k), DASHES[j % len(DASHES)])
            label = name if len(runs) == 1 else f"{run.name} {name}"
            found.append(Series(label, run.steps[known], values[known], *style))
    return found


def key_of(figure: Figure, runs: Sequence[RunMetrics]) -> list[Key]:
    """What a figure's colours and dashes mean; nothing if there is one line only."""
    columns = [
        name for name in _columns(figure, runs) if any(np.isfinite(r.column(name)).any() for r in runs)
    ]
    if len(runs) == 1:
        return [Key(name, _colour(j)) for j, name in enumerate(columns)] if len(columns) > 1 else []
    dashes = [Key(name, "#5b6b7a", DASHES[j % len(DASHES)]) for j, name in enumerate(columns)]
    return [Key(run.name, _colour(k)) for k, run in enumerate(runs)] + (dashes if len(columns) > 1 else [])


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)]


def _columns(figure: Figure, runs: Sequence[RunMetrics]) -> list[str]:
    """The columns of a figure that any of the runs has."""
    names = dict.fromkeys(name for run in runs for name in _matching(figure, run))
    return [name for name in names if any(np.isfinite(run.column(name)).any() for run in runs)]


def _matching(figure: Figure, run: RunMetrics) -> list[str]:
    names: list[str] = []
    for pattern in figure.columns:
        if pattern.endswith("*"):
            names += [name for name in run.columns if name.startswith(pattern[:-1])]
        elif pattern.startswith("*"):
            names += [name for name in run.columns if name.endswith(pattern[1:])]
        else:
            names.append(pattern)
    return names


def summary(runs: Sequence[RunMetrics]) -> list[dict[str, str]]:
    """One row per run: where it began and ended (means of its first and its last tenth), and its rates."""
    return [_summary(run) for run in runs]


def _summary(run: RunMetrics) -> dict[str, str]:
    def mean(name: str, part: slice) -> str:
        values = run.column(name)[part]
        values = values[np.isfinite(values)]
        return f"{values.mean():,.4g}" if len(values) else ""

    tenth = max(1, len(run.steps) // 10)
    begin, end, everything = slice(0, tenth), slice(-tenth, None), slice(None)
    flat, tree, seconds = (np.nansum(run.column(name)) for name in ("flat_tokens", "tree_tokens", "seconds"))
    return {
        "run": run.name,
        "steps": f"{int(run.steps[-1]):,}",
        "reward, begin": mean("reward_mean", begin),
        "reward, end": mean("reward_mean", end),
        "loss, begin": mean("loss", begin),
        "loss, end": mean("loss", end),
        "hours": f"{seconds / 3600:.3g}" if seconds else "",
        "flat tokens/s": f"{flat / seconds:,.0f}" if seconds and flat else "",
        "tree tokens/s": f"{tree / seconds:,.0f}" if seconds and tree else "",
        "dedupe": mean("dedupe_ratio", everything),
        "guards": ", ".join(
            f"{name.removeprefix('guard_')} {np.nansum(counts):.0f}"
            for name, counts in run.columns.items()
            if name.startswith("guard_")
        ),
    }


def write_report(runs: Sequence[RunMetrics], out: Path) -> list[Path]:
    """Writes page and figures to a folder, which is made if it is not there; returns the files.

    Raises:
      InputError: the folder cannot be written to.
    """
    charts = {}
    for figure in FIGURES:
        if series := series_of(figure, runs):
            picture = chart(figure.title, figure.unit, series, key_of(figure, runs))
            charts[figure.name] = picture, series
    colours = [_colour(k) for k in range(len(runs))] if len(runs) > 1 else None
    try:
        out.mkdir(parents=True, exist_ok=True)
        index = out / "index.html"
        index.write_text(report_page(summary(runs), list(charts.values()), colours), encoding="utf-8")
        written = [index]
        for name, (picture, _) in charts.items():
            written += picture.write(out / name)
    except OSError as error:
        raise InputError("--out", str(out), expected="a folder to write to", actual=error.strerror) from None
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    about = "Figures of training runs, as one HTML page and as pictures; several runs are compared."
    parser = argparse.ArgumentParser(prog="python -m dta_jax.report", description=about)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or its metrics.jsonl"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for page and pictures")
    args = parser.parse_args(arguments)
    runs = [read_run(run) for run in args.runs]
    written = write_report(runs, args.out)
    for row in summary(runs):
        print("; ".join(f"{name} {value}" for name, value in row.items() if value))
    print("wrote", ", ".join(str(path) for path in written))
    if not can_write_png():
        print("no PNG pictures: they need matplotlib (pip install 'dta_jax[plots]')", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
