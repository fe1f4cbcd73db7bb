"""What a run shows: on a terminal, in a file, without colour, not at all; every option is explained."""

import argparse
import importlib
import io
import re
import warnings
from pathlib import Path

import pytest

from dta_jax import terminal
from dta_jax.terminal import LINES, Terminal, one_line_warnings, print_table
from tests.test_structure import ROOT

ESCAPE = "\x1b"
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])m")
ROW = {"seconds": 2.0, "tree_tokens": 100, "flat_tokens": 2000, "dedupe_ratio": 20.0, "loss": -0.5}


class Screen(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def progress_of(file: io.StringIO, steps: int = 3, *, quiet: bool = False) -> str:
    with Terminal(quiet=quiet, file=file).progress(start=0, steps=steps) as progress:
        for step in range(1, steps + 1):
            progress.phase("rollouts")
            progress.phase("gradient")
            progress.update(ROW | {"step": step, "reward_mean": 0.25, "compile_seconds": 1.5 * (step == 1)})
    return file.getvalue()


def test_a_file_gets_a_few_lines_without_escape_codes():
    shown = progress_of(io.StringIO(), steps=1000)
    lines = shown.splitlines()
    assert ESCAPE not in shown
    assert lines[0] == "step 1/1000: compiling ..."
    assert lines[-1].startswith(
        "step 1000/1000: reward 0.25, loss -0.5, 100 tokens (x20.0), 1,000 flat/s, 2.00 s"
    )
    assert len(lines) == 1 + LINES


def test_what_the_first_step_compiled_is_told():
    lines = progress_of(io.StringIO(), steps=2).splitlines()
    assert [line.endswith("1.5 of them compiling") for line in lines] == [False, True, False]


def test_a_terminal_gets_one_line_that_says_that_the_first_step_compiles(monkeypatch):
    shown: list[str] = []
    update = terminal.rich_progress.Progress.update

    def watched(bar: object, task: object, **fields: object) -> None:
        shown.append(str(fields.get("description")))
        update(bar, task, **fields)

    monkeypatch.setattr(terminal.rich_progress.Progress, "update", watched)
    text = progress_of(Screen())
    assert shown[:3] == ["compiling ... (rollouts)", "compiling ... (gradient)", ""]
    assert shown[3:5] == ["rollouts", "gradient"]
    assert ESCAPE in text
    assert COLOUR.search(text)
    assert text.count("\n") == 1


def test_a_narrow_terminal_cuts_the_words_and_keeps_the_count(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", progress_of(Screen())).rstrip().splitlines()[-1]
    assert last.strip().startswith("3/3 ")
    assert "reward 0.25" in last
    assert last.endswith("…")
    assert len(last) <= 60


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = progress_of(Screen())
    assert "3/3" in text
    assert not COLOUR.search(text)


def test_a_terminal_that_cannot_redraw_is_like_a_file(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    text = progress_of(Screen())
    assert ESCAPE not in text
    assert text.startswith("step 1/3: compiling ...\n")


def test_quiet_shows_what_was_asked_for_and_nothing_else():
    for file in (io.StringIO(), Screen()):
        shown = Terminal(quiet=True, file=file)
        shown.table([("a", "b")])
        with shown.waiting("something"):
            pass
        assert progress_of(file, quiet=True) == ""
        shown.table([("back", "1.0")], "profile:", always=True)
        assert file.getvalue() == "profile:\n  back  1.0\n"


def test_tables_are_aligned_and_numbers_are_to_the_right(capsys):
    print_table([("push", "1.5", "9.0%"), ("back [x]", "20.25", "91.0%")], "of [both]:")
    assert capsys.readouterr().out == "of [both]:\n  push        1.5   9.0%\n  back [x]  20.25  91.0%\n"


def test_a_warning_is_one_line(capsys):
    before = warnings.formatwarning
    with one_line_warnings():
        assert warnings.formatwarning("a\n  b", UserWarning, "file.py", 3) == "warning: a b\n"
    assert warnings.formatwarning is before


def commands() -> list[str]:
    table = (ROOT / "docs" / "design.md").read_text().split("| **Commands** | |")[1].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


@pytest.mark.parametrize("name", commands())
def test_every_option_of_every_command_is_explained(name, monkeypatch):
    class Parsed(Exception):
        pass

    def capture(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Parsed(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", capture)
    with pytest.raises(Parsed) as caught:
        importlib.import_module(f"dta_jax.{name}").main([])
    (parser,) = caught.value.args
    assert parser.description
    assert parser.prog == f"python -m dta_jax.{name}"
    assert [action.dest for action in parser._actions if not action.help] == []
    assert "usage: " in parser.format_help()


def test_commands_are_found():
    assert {"train", "evaluate", "export", "convert", "bench", "inspect", "report"} <= set(commands())
    assert all(Path(ROOT / "dta_jax" / f"{name}.py").exists() for name in commands())
