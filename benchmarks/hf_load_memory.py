"""Peak host memory and time of loading and saving a random Hugging Face checkpoint.

    python benchmarks/hf_load_memory.py [--gigabytes 2] [--param-dtype bfloat16]

Saves a checkpoint of about that size into a temporary folder, then loads it in a process of its own.
Prints one JSON object per step: `seconds`, `stays` (bytes of parameters), `peak_above` (peak resident
memory above the start of the step and what stays; mapped pages of the files count) and `largest_stacked`
(bytes of the largest parameter).
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dta_jax.hf_weights import load_model, save_folder
from dta_jax.qwen3 import Qwen3, Qwen3Config

WIDTH, MLP, VOCAB = 2048, 6144, 65_536
SHARD_BYTES = 500_000_000


def status(field: str) -> int:
    """A memory figure of this process from /proc, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def config_of(gigabytes: float) -> Qwen3Config:
    """Qwen3-1.7B's layers, as many as make a bfloat16 checkpoint of that size."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=MLP,
        dtype="bfloat16",
    )
    shapes = jax.eval_shape(Qwen3(config).init, jax.random.key(0))
    per_layer = sum(leaf.size for leaf in jax.tree.leaves(shapes["layers"]))
    layers = round((gigabytes * 1e9 / 2 - VOCAB * WIDTH) / per_layer)
    return dataclasses.replace(config, num_hidden_layers=max(1, layers))


def make(folder: Path, gigabytes: float) -> None:
    config, rng = config_of(gigabytes), np.random.default_rng(0)
    shapes = jax.eval_shape(Qwen3(config).init, jax.random.key(0))

    def random(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        bits = rng.integers(0, 2**15, leaf.shape, np.uint16) // 2 + 0x3000  # 5e-10 to 4, never NaN
        return bits.astype(np.uint16).view(ml_dtypes.bfloat16)

    params = jax.tree.map(random, shapes)
    report("save", params, lambda: save_folder(folder, config, params, max_shard_bytes=SHARD_BYTES))


def load(folder: Path, param_dtype: str) -> None:
    jax.device_put(np.zeros(1)).block_until_ready()
    report("load", None, lambda: jax.block_until_ready(load_model(folder, param_dtype=param_dtype)[1]))


def report(step: str, params: Any, run: Callable[[], Any]) -> None:
    """Runs one step and prints its row; `params` are those there already, else the result's."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, began = status("VmRSS"), time.perf_counter()
    result = run()
    row = {"step": step, "seconds": round(time.perf_counter() - began, 2)}
    leaves = jax.tree.leaves(result if params is None else params)
    row["param_dtype"] = str(leaves[0].dtype)
    row["stays"] = sum(leaf.nbytes for leaf in leaves)
    row["peak_above"] = status("VmHWM") - before - (row["stays"] if params is None else 0)
    row["largest_stacked"] = max(leaf.nbytes for leaf in leaves)
    row["within_largest_plus_1_GiB"] = row["peak_above"] <= row["largest_stacked"] + 2**30
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--param-dtype", default="bfloat16")
    parser.add_argument("--load", type=Path, help="measure the loading of this folder only")
    args = parser.parse_args()
    if args.load is not None:
        load(args.load, args.param_dtype)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "hf")
        make(folder, args.gigabytes)
        command = [sys.executable, __file__, "--param-dtype", args.param_dtype, "--load", str(folder)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
