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
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import logging as absl_logging

from dta_jax.config import load_config, operative_config
from dta_jax.errors import InputError, run_command
from dta_jax.hosts import Hosts, connect, guarded
from dta_jax.loop import run_training
from dta_jax.prepare import prepare


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m dta_jax.train", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a .gin file")
    parser.add_argument("--gin", action="append", default=[], metavar="BINDING", help="overrides a binding")
    parser.add_argument("--out", type=Path, help="default: runs/CONFIG-TIME")
    parser.add_argument(
        "--allow-changes", action="store_true", help="resume although bindings differ from the checkpoint's"
    )
    args = parser.parse_args(arguments)
    connect(Hosts.from_environment())
    absl_logging.set_verbosity(absl_logging.FATAL)  # errors are raised, too
    train = load_config(args.config, args.gin)
    text = operative_config()
    if args.out is None and jax.process_count() > 1:
        raise InputError("--out", "value", expected="one folder for all processes", actual="none")
    out = args.out or Path("runs", f"{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    rows = run_training(prepare(train), out, text, allow_changes=args.allow_changes)
    if jax.process_index() > 0:
        return
    if not rows:
        print(f"{out}: nothing to do, step {train.steps} is reached; raise Train.steps to go on")
        return
    first, last = rows[0], rows[-1]
    names = ("loss", "reward_mean") if "reward_mean" in last else ("loss",)
    changes = ", ".join(f"{name} {first[name]:z.4f} to {last[name]:z.4f}" for name in names)
    print(
        f"{out}: steps {first['step']} to {last['step']}, {changes}; "
        f"{last['flat_tokens']:,} tokens in {last['tree_tokens']:,} (x{last['dedupe_ratio']:.1f}), "
        f"{last['flat_tokens'] / last['seconds']:,.0f} flat tokens/s in the last step"
    )


if __name__ == "__main__":
    run_command(functools.partial(guarded, main))
