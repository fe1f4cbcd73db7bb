"""Writes a run's weights as a Hugging Face folder: `python -m dta_jax.export CHECKPOINT --hf DIR`.

CHECKPOINT is a run's folder, its `checkpoints` folder (both: the newest step), or one step's folder. DIR gets
`config.json`, safetensors with an index if there are several, the generation config, and the tokenizer of the
folder that the run began from (or of `--tokenizer`). The run's own files are only read.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging as absl_logging

from dta_jax.checkpoint import DamagedCheckpointError, check_run, describe, fingerprints, named_leaves
from dta_jax.errors import InputError, run_command
from dta_jax.hf_config import config_from_hf
from dta_jax.hf_weights import DEFAULT_SHARD_BYTES, check_new_folder, save_folder
from dta_jax.model import Params
from dta_jax.qwen3 import DTYPES, Qwen3, Qwen3Config


def find_step(path: Path) -> Path:
    """The folder of one step: `path` itself, or the newest below it or its `checkpoints`.

    Raises:
      InputError: there is none.
    """
    if not path.is_dir():
        raise InputError(path, "checkpoint", expected="a folder", actual="no such folder")
    if path.name.isdigit() and (path / "state").is_dir():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = [step for step in folder.iterdir() if step.name.isdigit() and (step / "state").is_dir()]
    if not steps:
        expected = "a run's folder, its checkpoints, or one of them"
        raise InputError(path, "checkpoint", expected=expected, actual="no checkpoint there")
    return max(steps, key=lambda step: int(step.name))


def read_checkpoint(step: Path) -> tuple[Qwen3Config, Params, Mapping[str, Any]]:
    """A checkpoint's model config, its parameters (in host memory, checked), and its JSON part.

    Raises:
      InputError: the checkpoint is damaged, or does not say which model it is of.
    """
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(step.parent.absolute(), options=options) as manager:
        run = _restore(manager, step, run=ocp.args.JsonRestore())
        check_run(step, run)
        if not isinstance(run.get("model"), Mapping):
            raise InputError(step, "model", expected="the model's config", actual="none")
        config = config_from_hf(run["model"], source=step / "run")
        host = jax.device_put(0, jax.local_devices(backend="cpu")[0]).sharding
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=host),
            {"params": jax.eval_shape(Qwen3(config).init, jax.random.key(0))},
        )
        for name, leaf in named_leaves(like):
            has = {k: v for k, v in run["arrays"].get(name, {}).items() if k != "fingerprint"}
            if has != describe(leaf):
                raise InputError(step, name, expected=describe(leaf), actual=has or "no such array")
        arguments = ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        state = _restore(manager, step, state=arguments)
    for name, print_ in named_leaves(jax.device_get(fingerprints(state))):
        expected = run["arrays"][name]["fingerprint"]
        if print_ != expected:
            raise DamagedCheckpointError(
                step, name, expected=f"fingerprint {expected}", actual=f"fingerprint {print_}"
            )
    return config, state["params"], run


def _restore(manager: ocp.CheckpointManager, step: Path, **item: ocp.args.CheckpointArgs) -> Any:
    (name,) = item
    try:
        return manager.restore(int(step.name), args=ocp.args.Composite(**item))[name]
    except Exception as error:  # orbax raises a bare Exception for an array that it cannot decode
        reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        raise DamagedCheckpointError(
            step, name, expected="a whole checkpoint", actual=reason[:200]
        ) from error


def export(
    checkpoint: Path,
    folder: Path,
    *,
    tokenizer: Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> str:
    """Writes a checkpoint's weights as a Hugging Face folder, which appears only when it is complete.

    Args:
      checkpoint: see the module.
      folder: the folder to make.
      tokenizer: a folder to take tokenizer and generation config from; None for the one that the run began
        from, if it is still there.
      dtype: dtype to save; None for the one that the run computed with.
      max_shard_bytes: a new file is begun beyond this size.

    Returns:
      One line that says what was written.

    Raises:
      InputError: see `find_step`, `read_checkpoint` and `save_folder`; or `tokenizer` is no folder.
    """
    check_new_folder(folder)
    step = find_step(checkpoint)
    if tokenizer is not None and not tokenizer.is_dir():
        raise InputError(tokenizer, "--tokenizer", expected="a folder", actual="no such folder")
    config, params, run = read_checkpoint(step)
    origin = Path(run["hf_folder"]) if run.get("hf_folder") else None
    companions = tokenizer or (origin if origin is not None and origin.is_dir() else None)
    dtype = dtype or config.dtype
    save_folder(folder, config, params, dtype=dtype, max_shard_bytes=max_shard_bytes, companions=companions)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    source = "no tokenizer" if companions is None else f"tokenizer files of {companions}"
    return f"{folder}: step {step.name}, {count:,} parameters in {dtype}, {source}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m dta_jax.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a run, its checkpoints, or one of them")
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder whose tokenizer goes along (default: the one that the run began from)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (default: the one that the run computed with)"
    )
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        default=DEFAULT_SHARD_BYTES / 1e9,
        metavar="GB",
        help="the most weights in one file (default: %(default)g)",
    )
    args = parser.parse_args(arguments)
    absl_logging.set_verbosity(absl_logging.FATAL)
    if not 1e-9 <= args.max_shard_gb < math.inf:
        raise InputError("export", "--max-shard-gb", expected="a positive size", actual=args.max_shard_gb)
    shard = int(args.max_shard_gb * 1e9)
    print(export(args.checkpoint, args.hf, tokenizer=args.tokenizer, dtype=args.dtype, max_shard_bytes=shard))


if __name__ == "__main__":
    run_command(main)
