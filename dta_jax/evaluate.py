"""How good a trained policy is: `python -m dta_jax.evaluate RUN [--step N] [--tasks N] [--trials K]`.

RUN is the folder of a run whose rollouts were made on the way. Its environment, engine and sampling are used
with the weights of a checkpoint, the newest unless `--step` names another; nothing in the folder changes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging as absl_logging

from dta_jax.collect.evaluation import Evaluate
from dta_jax.collect.loop import Collector
from dta_jax.config import load_config
from dta_jax.errors import InputError, run_command, writing
from dta_jax.export import read_checkpoint
from dta_jax.generation.sglang import SGLang
from dta_jax.generation.vllm import VLLM
from dta_jax.live import check_fits, load_chat, make_generator
from dta_jax.model import cast
from dta_jax.qwen3 import Qwen3
from dta_jax.settings import LiveRollouts


def evaluate_run(
    folder: Path, *, step: int | None, how: Evaluate | None, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Plays episodes with a checkpoint's weights.

    Args:
      folder: of the run.
      step: of the checkpoint; None for the newest.
      how: which tasks and how often; None for the run's `Train.evaluate`, or every task once, with the
        run's sampling.
      overrides: bindings that win over the run's, such as another seed of the environment.

    Returns:
      `dta_jax.collect.evaluation.evaluate_episodes`, and `step`.

    Raises:
      InputError: no such checkpoint; the run's rollouts were recorded.
    """
    train = load_config(folder / "operative_config.gin", overrides)
    source = train.rollouts
    if not isinstance(source, LiveRollouts):
        raise InputError(folder, "Train.rollouts", expected="an environment", actual="recorded rollouts")
    checkpoint = find_checkpoint(folder, step)
    config, params, _ = read_checkpoint(checkpoint)
    device = jax.local_devices()[0]
    params = jax.device_put(jax.tree.map(jnp.asarray, cast(params, config.dtype)), device)
    version = int(checkpoint.name)
    how = how or train.evaluate or Evaluate(sampling=source.collect.sampling)
    generator = make_generator(source, Qwen3(config), params, version=version, seed=train.seed)
    collector = Collector(
        source.environment,
        generator,
        replace(source.collect, max_context=check_fits(source, config, train.max_length)),
        seed=train.seed,
        chat=load_chat(source, config.vocab_size),
        batch_groups=1,
    )
    with collector:
        if isinstance(source.generator, SGLang | VLLM):
            collector.publish(params, version)
        return {"step": version} | collector.evaluate(how, seed=train.seed)


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The checkpoint of a step; the newest for None.

    Raises:
      InputError: there is none.
    """
    found = {int(path.name): path for path in (folder / "checkpoints").glob("*") if path.name.isdigit()}
    if not found or (step is not None and step not in found):
        steps = f"one of {', '.join(map(str, sorted(found)))}" if found else "a checkpoint"
        raise InputError(
            folder / "checkpoints", "step", expected=steps, actual="none" if step is None else step
        )
    return found[max(found) if step is None else step]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m dta_jax.evaluate", description=__doc__.splitlines()[0].split(":")[0] + "."
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
    parser.add_argument("--tasks", type=int, help="only the first so many tasks")
    parser.add_argument("--trials", type=int, help="tries per task")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token")
    parser.add_argument("--gin", action="append", default=[], metavar="BINDING", help="overrides a binding")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, per task too, there")
    args = parser.parse_args(arguments)
    absl_logging.set_verbosity(absl_logging.FATAL)  # errors are raised, too
    if args.json is not None and not args.json.parent.is_dir():
        raise InputError(
            args.json, "--json", expected="a file in a folder that exists", actual="no such folder"
        )
    found = evaluate_run(args.run, step=args.step, how=_settings(args), overrides=args.gin)
    print(json.dumps(_numbers(found)))
    if args.json is not None:
        with writing(args.json):
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _settings(args: argparse.Namespace) -> Evaluate | None:
    """The run's own, with what the command line says; None where it says nothing."""
    given = {name: getattr(args, name) for name in ("tasks", "trials") if getattr(args, name) is not None}
    if not given and args.temperature is None:
        return None
    train = load_config(args.run / "operative_config.gin", args.gin)
    if not isinstance(train.rollouts, LiveRollouts):
        return None  # refused with the run's name
    base = train.evaluate or Evaluate(sampling=train.rollouts.collect.sampling)
    if args.temperature is not None:
        given["sampling"] = replace(base.sampling, temperature=args.temperature)
    return replace(base, **given)


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


if __name__ == "__main__":
    run_command(main)
