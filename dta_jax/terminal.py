"""What a run shows on stderr: tables, one line of progress, warnings of one line each.

On a terminal the line is redrawn, with the phase that the step is in. Elsewhere there are no escape codes,
and at most `LINES` lines of progress. `NO_COLOR` is respected.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TextIO

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

LINES: Final = 20  # of progress where nothing can be redrawn
_PLAIN_WIDTH: Final = 10_000  # lines of files are not folded
_REDRAWN_PER_SECOND: Final = 4
_BAR: Final = 12  # characters


class Terminal:
    """Where a run shows what it does.

    Args:
      quiet: show nothing but what is asked for.
      file: where to; None for stderr.
    """

    def __init__(self, *, quiet: bool = False, file: TextIO | None = None):
        stream = file or sys.stderr
        width = None if stream.isatty() else _PLAIN_WIDTH
        self._quiet = quiet
        self._console = Console(file=file, stderr=True, highlight=False, markup=False, width=width)

    def table(self, rows: Sequence[Sequence[str]], title: str = "", *, always: bool = False) -> None:
        """Shows rows of cells, columns aligned.

        Args:
          rows: of cells.
          title: above them.
          always: though the terminal is quiet.
        """
        if self._quiet and not always:
            return
        _print(self._console, rows, title)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Inside, a terminal shows what is waited for; elsewhere nothing is shown."""
        if self._quiet or not self._redraws:
            yield
            return
        with self._console.status(text):
            yield

    @contextlib.contextmanager
    def progress(self, *, start: int, steps: int) -> Iterator[Progress]:
        """Inside, progress of the steps from `start` + 1 to `steps`."""
        if self._quiet:
            yield Progress()
            return
        if not self._redraws:
            yield PlainProgress(self._console, start=start, steps=steps)
            return
        with RedrawnProgress(self._console, start=start, steps=steps) as shown:
            yield shown

    @property
    def _redraws(self) -> bool:
        console = self._console
        return console.is_terminal and not console.is_dumb_terminal


def print_table(rows: Sequence[Sequence[str]], title: str) -> None:
    """Prints rows of cells on stdout: what was asked for, and not how it goes on."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    _print(Console(highlight=False, markup=False, width=width), rows, title)


class Progress:
    """How far a run is; shows nothing by itself."""

    def phase(self, name: str) -> None:
        """The step is in another phase."""

    def update(self, row: Mapping[str, Any]) -> None:
        """A step is done; `row` is its metrics."""


class PlainProgress(Progress):
    """A line now and then.

    Args:
      console: where.
      start, steps: as in `Terminal.progress`.
    """

    def __init__(self, console: Console, *, start: int, steps: int):
        self._console, self._steps = console, steps
        self._every = math.ceil((steps - start) / LINES)
        self._first: int | None = start + 1

    def phase(self, name: str) -> None:
        """Says once that the first step compiles."""
        if self._first is not None:
            self._say(f"step {self._first}/{self._steps}: compiling ...")
            self._first = None

    def update(self, row: Mapping[str, Any]) -> None:
        """A line, if it is this step's turn."""
        self._first = None
        step = row["step"]
        if step % self._every == 0 or step == self._steps:
            self._say(f"step {step}/{self._steps}: {described(row)}")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


class _Words(rich_progress.ProgressColumn):
    """Phase and last step, cut where the line ends: only this column gives way."""

    def render(self, task: rich_progress.Task) -> Text:
        """As the other columns do."""
        words = f"{task.description:9} {task.fields['last']}".rstrip()
        return Text(words, no_wrap=True, overflow="ellipsis")


class RedrawnProgress(Progress):
    """One line with a bar. A context manager; a thread redraws it.

    Args:
      console: a terminal.
      start, steps: as in `Terminal.progress`.
    """

    def __init__(self, console: Console, *, start: int, steps: int):
        self._compiling = True
        self._bar = rich_progress.Progress(
            rich_progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            rich_progress.BarColumn(_BAR, table_column=Column(width=_BAR)),
            rich_progress.TimeElapsedColumn(table_column=Column(no_wrap=True)),
            rich_progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
            _Words(),
            console=console,
            refresh_per_second=_REDRAWN_PER_SECOND,
        )
        self._task = self._bar.add_task("compiling ...", total=steps, completed=start, last="")

    def __enter__(self) -> RedrawnProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def phase(self, name: str) -> None:
        """Shows it."""
        self._bar.update(self._task, description=f"compiling ... ({name})" if self._compiling else name)

    def update(self, row: Mapping[str, Any]) -> None:
        """A step further."""
        self._compiling = False
        self._bar.update(self._task, completed=row["step"], description="", last=described(row))


def described(row: Mapping[str, Any]) -> str:
    """A step in a few words: reward, loss, tokens, throughput, seconds."""
    seconds = max(row["seconds"], 1e-9)
    parts = [f"reward {row['reward_mean']:.3g}"] if "reward_mean" in row else []
    parts += [f"loss {row['loss']:.4g}"] if "loss" in row else []  # a skipped step has none
    parts += [
        f"{row['tree_tokens']:,} tokens (x{row['dedupe_ratio']:.1f})",
        f"{row['flat_tokens'] / seconds:,.0f} flat/s",
        f"{seconds:.2f} s",
    ]
    if row.get("compile_seconds", 0) > seconds / 2:
        parts[-1] += f", {row['compile_seconds']:.1f} of them compiling"
    return ", ".join(parts)


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """Inside, a warning is shown as one line, without the code that gave it."""

    def line(message: Warning | str, *_: object, **__: object) -> str:
        return f"warning: {' '.join(str(message).split())}\n"

    before, warnings.formatwarning = warnings.formatwarning, line
    try:
        yield
    finally:
        warnings.formatwarning = before


def _print(console: Console, rows: Sequence[Sequence[str]], title: str) -> None:
    """The title, then columns: names, and what is said of them; numbers to the right."""
    grid = Table.grid(padding=(0, 2))
    for column in range(max(map(len, rows), default=0)):
        cells = [row[column] for row in rows if len(row) > column]
        numbers = column > 0 and all(cell[:1].isdecimal() and " " not in cell for cell in cells)
        grid.add_column(justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(f"  {cell}" if index == 0 else cell for index, cell in enumerate(row)))
    with console.capture() as captured:
        console.print(grid)
    lines = [title] * bool(title) + [line.rstrip() for line in captured.get().splitlines()]
    console.print("\n".join(lines), soft_wrap=True)
