"""Predicted memory of PUSH and BACK against what the compiler counts, for three model sizes.

    python benchmarks/memory_prediction.py [--models tiny,small,qwen3-0.6b] [--out FILE]
    python benchmarks/memory_prediction.py --aot h100 ...          compiled for a GPU

Both strategies, float32 and bfloat16, one chunk size each. Programs are compiled from shapes alone, so the
models need no memory; it takes some minutes. One JSON object per case:

    predicted, counted    bytes of each program: arguments, results that replace none, temporaries
    error                 predicted / counted - 1 of the larger program: the peak
    arguments             bytes of its arguments; these are exact, so the rest of the error is in temporaries

`--aot h100` compiles for an H100 without one. It needs `jax[cuda12]` of the same version installed; no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from dta_jax.errors import InputError, run_command
from dta_jax.memory import peak_bytes
from dta_jax.memory_predict import PREDICTED, Setup, Steps, predict_memory
from dta_jax.qwen3 import Qwen3, Qwen3Config, preset
from dta_jax.types import BACK, PUSH

SMALL: Final = Qwen3Config(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=768,
)
CASES: Final = {  # chunk size, tokens of the longest sequence
    "tiny": (512, 512),
    "small": (512, 3584),
    "qwen3-0.6b": (1024, 7168),
}
ENTRIES: Final = 8000
H100: Final = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def h100() -> jax.Device:
    """A device that programs can be compiled for, though it is not there."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    return topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0]


def counted_bytes(steps: Steps, kind: int, device: jax.Device | None) -> int:
    """Bytes of a compiled step, for a device or for where we run."""
    arguments: Any = steps.arguments(kind)
    if device is not None:
        there = SingleDeviceSharding(device)
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there), arguments
        )
    traced = jax.jit(steps.program(kind), donate_argnums=1).trace(*arguments)
    platforms = None if device is None else ("cuda",)
    return peak_bytes(traced.lower(lowering_platforms=platforms).compile())


def measure(name: str, dtype: str, device: jax.Device | None) -> Iterator[dict[str, Any]]:
    """Every case of one model."""
    config = preset(name, dtype=dtype) if name != "small" else Qwen3Config(**(vars(SMALL) | {"dtype": dtype}))
    (chunk, longest), platform = CASES[name], "cpu" if device is None else "gpu"
    setup = Setup(Qwen3(config), dtype, longest, ENTRIES, platform=platform)
    for strategy in PREDICTED:
        predicted = predict_memory(setup, chunk, strategy).programs
        steps = Steps.of(setup, chunk, keep=strategy.endswith("+keep"))
        counted = {kind: counted_bytes(steps, kind, device) for kind in (PUSH, BACK)}
        leaves = jax.tree.leaves(steps.arguments(BACK))
        yield {
            "model": name,
            "dtype": dtype,
            "strategy": strategy,
            "chunk": chunk,
            "longest": longest,
            "platform": platform,
            "predicted": {"push": predicted[PUSH], "back": predicted[BACK]},
            "counted": {"push": counted[PUSH], "back": counted[BACK]},
            "error": round(max(predicted.values()) / max(counted.values()) - 1, 4),
            "arguments": sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves),
        }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES), help="with commas")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="with commas")
    parser.add_argument("--aot", choices=("h100",), help="compile for a GPU that is not there")
    parser.add_argument("--out", type=Path, help="a JSON file, all cases")
    args = parser.parse_args()
    device, rows = h100() if args.aot else None, []
    for name in args.models.split(","):
        if name not in CASES:
            raise InputError("--models", "name", expected=f"one of {', '.join(CASES)}", actual=repr(name))
        for dtype in args.dtypes.split(","):
            for row in measure(name, dtype, device):
                print(json.dumps(row), flush=True)
                rows.append(row)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
