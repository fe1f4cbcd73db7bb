"""Trains a model on rollouts: `python -m dta_jax.train CONFIG.gin [--gin "Binding = value"]... [--out DIR]`.

`dta_jax.loop` names what DIR will hold. Every random choice is a function of seed and step, and so is the
data position: parameters, optimizer state and step are the whole state, and a resumed run repeats the
uninterrupted one bit for bit (on another mesh: up to rounding).

`Train.mesh` says on how many devices. With several processes (`dta_jax.hosts`), every one runs this command
on the same, shared DIR; process 0 writes the log.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging as absl_logging

from dta_jax.config import load_config, operative_config
from dta_jax.errors import InputError, run_command
from dta_jax.hosts import Hosts, connect, guarded
from dta_jax.loop import run_training
from dta_jax.metrics import read_steps
from dta_jax.prepare import prepare
from dta_jax.profiling import ProfiledSteps
from dta_jax.terminal import one_line_warnings, print_table


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m dta_jax.train", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a .gin file")
    parser.add_argument("--gin", action="append", default=[], metavar="BINDING", help="overrides a binding")
    parser.add_argument("--out", type=Path, help="the run's folder (default: runs/CONFIG-TIME)")
    parser.add_argument(
        "--allow-changes", action="store_true", help="resume although bindings differ from the checkpoint's"
    )
    parser.add_argument(
        "--profile",
        metavar="steps=A:B",
        help="trace the steps A to B (OUT/profile) and tell where their time goes",
    )
    parser.add_argument("--quiet", action="store_true", help="show warnings and errors only")
    args = parser.parse_args(arguments)
    profile = None if args.profile is None else ProfiledSteps.parse(args.profile)
    connect(Hosts.from_environment())
    absl_logging.set_verbosity(absl_logging.FATAL)  # errors are raised, too
    with one_line_warnings():
        train = load_config(args.config, args.gin)
        text = operative_config()
        if args.out is None and jax.process_count() > 1:
            raise InputError("--out", "value", expected="one folder for all processes", actual="none")
        out = args.out or Path("runs", f"{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        run = prepare(train)
        quiet = args.quiet or jax.process_index() > 0
        if run.learner.memory is not None and not quiet:
            print(run.learner.memory)
        steps = run_training(
            run, out, text, allow_changes=args.allow_changes, quiet=args.quiet, profile=profile
        )
    if quiet:
        return
    if not steps:
        print(f"{out}: nothing to do, step {train.steps} is reached; raise Train.steps to go on")
        return
    print_table(summary(read_steps(out, steps)), f"{out}:")


def summary(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What came of a run, from its rows of metrics: what and its value, for each line of a table."""
    first, last = rows[0], rows[-1]
    lines = [("steps", f"{first['step']} to {last['step']}")]
    for name in ("loss", "reward_mean", "eval_reward_mean"):
        values = [row[name] for row in rows if name in row]
        if values:
            lines.append((name, f"{values[0]:z.4f} to {values[-1]:z.4f}"))
    flat, tree = (sum(row[f"{kind}_tokens"] for row in rows) for kind in ("flat", "tree"))
    lines.append(("tokens", f"{flat:,} in {tree:,} (x{flat / max(1, tree):.1f})"))
    usual = statistics.median(row["seconds"] for row in rows)
    total = sum(row["seconds"] for row in rows)
    compiling = sum(row["compile_seconds"] for row in rows)
    lines.append(
        ("time", f"{total:,.1f} s, {compiling:,.1f} of them compiling; {usual:.3g} s a step (median)")
    )
    lines.append(("last step", f"{last['flat_tokens'] / max(last['seconds'], 1e-9):,.0f} flat tokens/s"))
    return lines


if __name__ == "__main__":
    run_command(functools.partial(guarded, main))
