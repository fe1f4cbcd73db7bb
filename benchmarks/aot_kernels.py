"""Compiles the attention kernels for GPUs that are not there, and looks at what the compiler made of them.

    python benchmarks/aot_kernels.py [--devices h100,a100,a10] [--dtypes ...] [--head-dims ...] [--out FILE]

Needs `jax[cuda12]` (or `cuda13`) of the jax in use, and `ptxas`, which comes with it; no GPU. Per device,
dtype and head width it compiles one program: forward and backward attention of C = 2048 queries over 16K
slots of context and the chunk's own keys, 16 query and 8 key heads, in a scan over a stack's layers, as in
the engine. For each kernel it reports registers per thread and bytes of spilled registers; for the program,
bytes of temporaries and copies of anything as large as a stack. It fails if there is a spill or such a copy.
It says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DUMP: Final = tempfile.TemporaryDirectory()  # where the compiler leaves PTX; it reads its flags only once
DUMP_FLAGS: Final = f"--xla_dump_to={DUMP.name} --xla_dump_emitter_re=.*"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DUMP_FLAGS}"
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# Where there is an llvm-symbolizer, the compiler may spend minutes in it.
os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from aot_hlo import stored  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding  # noqa: E402

from dta_jax.errors import InputError, RunError, run_command  # noqa: E402
from dta_jax.kernels import tree_attention  # noqa: E402
from dta_jax.kernels.tiles import DTYPES, HEAD_DIMS, choose_tiles, plan_tiles  # noqa: E402

CHUNK: Final = 2048
KEYS: Final = 16_384 + CHUNK
LAYERS: Final = 4  # they are an index: their number changes sizes only
HEADS: Final = (16, 8)  # of queries, of keys
KERNELS: Final = ("tree_attention_forward", "tree_attention_dq", "tree_attention_dkv")
TARGET: Final = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core} threads_per_core_limit: {threads} core_count: {cores}
  fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: {shared} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the compiler needs to know it; memory in bytes, bandwidth in bytes per second."""

    name: str
    major: int
    minor: int
    architecture: str
    cores: int
    fpus: int
    threads: int
    shared: int
    shared_per_core: int
    l2: int
    memory: int
    bandwidth: int
    clock: float

    @property
    def capability(self) -> float:
        return float(f"{self.major}.{self.minor}")

    def device(self) -> jax.Device:
        """It, to compile for."""
        target = TARGET.format(**vars(self))
        return topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1").devices[
            0
        ]


KIB: Final = 1024
GPUS: Final = {
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        architecture="sm_90a",
        cores=132,
        fpus=128,
        threads=2048,
        shared=227 * KIB,
        shared_per_core=228 * KIB,
        l2=50 * KIB**2,
        memory=84_978_434_048,
        bandwidth=3_352_320_000_000,
        clock=1.98,
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        major=8,
        minor=0,
        architecture="sm_80",
        cores=108,
        fpus=64,
        threads=2048,
        shared=163 * KIB,
        shared_per_core=164 * KIB,
        l2=40 * KIB**2,
        memory=84_978_434_048,
        bandwidth=2_039_000_000_000,
        clock=1.41,
    ),
    "a10": Gpu(
        name="NVIDIA A10",
        major=8,
        minor=6,
        architecture="sm_86",
        cores=72,
        fpus=128,
        threads=1536,
        shared=99 * KIB,
        shared_per_core=100 * KIB,
        l2=6 * KIB**2,
        memory=24_000_000_000,
        bandwidth=600_000_000_000,
        clock=1.695,
    ),
}


def layers(gpu: Gpu, head_dim: int, dtype: str) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """The program, and its arguments: queries of all layers, the stack, its cotangents, the mask."""
    tiles, scale = choose_tiles(head_dim, dtype, gpu.capability), head_dim**-0.5
    heads, kv_heads = HEADS
    where = SingleDeviceSharding(gpu.device())

    def shape(*sizes: int, of: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(of), sharding=where)

    def run(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        dk: jax.Array,
        dv: jax.Array,
        start: jax.Array,
        end: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        plan = plan_tiles(start, end, CHUNK, tiles)

        def body(
            carry: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, jax.Array]
        ) -> tuple[Any, jax.Array]:
            dk, dv = carry
            q, layer = xs
            how: dict[str, Any] = {"tiles": tiles, "scale": scale}
            out, lse = tree_attention.forward(q, k, v, layer, start, end, plan, **how)
            dq, dk, dv = tree_attention.backward(
                out, q, out, lse, k, v, dk, dv, layer, start, end, plan, **how
            )
            return (dk, dv), dq

        (dk, dv), dq = lax.scan(body, (dk, dv), (q, jnp.arange(LAYERS, dtype=jnp.int32)))
        return dk, dv, dq

    stack = LAYERS, kv_heads, KEYS, head_dim
    return run, (
        shape(LAYERS, CHUNK, heads, head_dim),
        *(shape(*stack),) * 2,
        *(shape(*stack, of="float32"),) * 2,
        *(shape(KEYS, of="int32"),) * 2,
    )


def measure(gpu: Gpu, head_dim: int, dtype: str) -> dict[str, Any]:
    """What the compiler made of one case."""
    for file in Path(DUMP.name).iterdir():
        file.unlink()
    run, arguments = layers(gpu, head_dim, dtype)
    target = AbstractDevice(gpu.name, gpu.cores, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=target)):
        lowered = jax.jit(run, donate_argnums=(3, 4)).trace(*arguments).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile()
    stacks = [one for one in stored(compiled.as_text()) if one.shape == arguments[1].shape]
    copies = [one for one in stacks if one.copies or one.opcode == "fusion"]
    tiles = choose_tiles(head_dim, dtype, gpu.capability)
    return {
        "device": gpu.name,
        "architecture": gpu.architecture,
        "dtype": dtype,
        "head_dim": head_dim,
        "tiles": {"forward, dq": vars(tiles.row), "dkv": vars(tiles.column)},
        "kernels": dict(assembled(gpu)),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "stack_sized_copies": len(copies),
    }


def assembled(gpu: Gpu) -> Iterator[tuple[str, dict[str, int]]]:
    """Registers and spills per kernel, by the assembler, of the PTX that was left in the dump."""
    for ptx in Path(DUMP.name).glob("*.ptx"):
        text = ptx.read_text()
        found = [name for name in KERNELS if f".entry {name}" in text]
        if not found:
            continue
        command = [assembler(), "-v", f"--gpu-name={gpu.architecture}", str(ptx), "-o", os.devnull]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        for part in told.split("Compiling entry function")[1:]:
            (name,) = (name for name in found if f"'{name}'" in part)
            spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
            registers = re.search(r"Used (\d+) registers", part)
            if spills is None or registers is None:
                raise RunError(f"ptxas: no report on {name} in: {part}")
            yield (
                name,
                {
                    "registers": int(registers[1]),
                    "spill_stores": int(spills[1]),
                    "spill_loads": int(spills[2]),
                    "tensor_core_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync", text)),
                },
            )


def assembler() -> str:
    """`ptxas`: that of the pip packages, else the one on the path."""
    packaged = sorted(Path(sysconfig.get_paths()["purelib"], "nvidia").glob("*/bin/ptxas"))
    found = str(packaged[-1]) if packaged else shutil.which("ptxas")
    if found is None:
        raise RunError("ptxas: not found; it comes with jax[cuda12], or with a CUDA toolkit")
    return found


def check(row: dict[str, Any]) -> None:
    """Refuses what must not be."""
    case = f"{row['device']} {row['dtype']} head_dim={row['head_dim']}"
    if sorted(row["kernels"]) != sorted(KERNELS):
        raise RunError(f"{case}: compiled kernels are {sorted(row['kernels'])}")
    for name, found in row["kernels"].items():
        if found["spill_stores"] or found["spill_loads"]:
            raise RunError(f"{case}: {name} spills {found['spill_stores']} bytes")
        if not found["tensor_core_instructions"]:
            raise RunError(f"{case}: {name} uses no tensor cores")
    if row["stack_sized_copies"]:
        raise RunError(f"{case}: {row['stack_sized_copies']} copies as large as a stack")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default=",".join(GPUS), help="with commas")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--out", type=Path, help="a JSON file, all cases")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache leaves no PTX
    rows = []
    for name in args.devices.split(","):
        if name not in GPUS:
            raise InputError("--devices", "name", expected=f"some of {', '.join(GPUS)}", actual=repr(name))
        for dtype in args.dtypes:
            for head_dim in args.head_dims:
                rows.append(measure(GPUS[name], head_dim, dtype))
                print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        result = {"jax": jax.__version__, "chunk": CHUNK, "keys": KEYS, "heads": HEADS, "cases": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        check(row)


if __name__ == "__main__":
    run_command(main)
