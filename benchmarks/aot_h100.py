"""Compiles the engine's steps for an H100 that is not there, at real sizes, and checks what they need.

    python benchmarks/aot_h100.py [--models qwen3-8b,...] [--chunks 2048] [--methods pallas,...] [--out FILE]

Needs `jax[cuda12]` (or `cuda13`) of the jax in use, and `ptxas`, which comes with it; no GPU. Programs are
compiled from shapes, so no weights are made and a model of any size fits. With the methods `pallas` and
`xla`, which say who computes attention, they are PUSH and BACK: bfloat16 parameters, float32 gradients, no
optimizer, a stack of 16,384 slots. `adamw` is the update of float32 master weights, with clipping.

It fails if a program
  - does not compile;
  - needs more than the planner predicts, headroom included;
  - copies an array as large as the stack's keys or as the smallest accumulator of the layers' matrices;
  - makes another float32 array as large as the LM head, beside those that it updates in place;
  - spills registers in one of our kernels;
  - or if it is BACK of 8B at C = 2048 and needs more than parameters, gradients and 12 GiB.

First it compiles programs that copy and that make such an array, and fails if these are not found.

It says nothing about speed. Cases that FILE has already, of the same jax and the same programs, are not
compiled again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Sets the compiler's flags, so it comes before JAX.
from aot_kernels import DUMP, GPUS, KERNELS, assembled  # isort: skip
from aot_hlo import stored  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, SingleDeviceSharding

from dta_jax.errors import InputError, RunError, run_command
from dta_jax.memory import peak_bytes
from dta_jax.memory_plan import GIB, HEADROOM
from dta_jax.memory_predict import Setup, Steps, fixed_bytes, predict_memory
from dta_jax.optimizer import make_optimizer
from dta_jax.qwen3 import Qwen3, preset
from dta_jax.settings import AdamW
from dta_jax.sharding import DATA, TENSOR
from dta_jax.types import BACK, PUSH
from dta_jax.zero import ShardedOptimizer

MODELS: Final = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")
CHUNKS: Final = (2048, 4096)
ADAMW: Final = "adamw"
METHODS: Final = ("pallas", "xla", ADAMW)
SLOTS: Final = 16_384
ENTRIES: Final = 65_536
TARGET: Final = ("qwen3-8b", 2048, "pallas")
TARGET_GIB: Final = 12  # beside parameters and gradients
GPU: Final = GPUS["h100"]
KERNELS_OF: Final = {"push": KERNELS[:1], "back": KERNELS}


@dataclass(frozen=True)
class Case:
    """One model, and a way to compute attention at a chunk size; or its optimizer's update, of no chunk."""

    model: str
    chunk: int | None
    method: str

    def __str__(self) -> str:
        return f"{self.model} {self.method}" + (f" C={self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Program:
    """A lowered program, and what is expected of it.

    Attributes:
      predicted: bytes, by the planner.
      copy_limit: bytes from which a copy is one too many.
      head: shape of the LM head.
    """

    lowered: jax.stages.Lowered
    predicted: int
    copy_limit: int
    head: tuple[int, ...]


def programs(case: Case) -> tuple[dict[str, Program], dict[str, int]]:
    """The programs of a case, and bytes of parameters and gradients."""
    target = AbstractDevice(GPU.name, GPU.cores, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=target)):
        return _update(case.model) if case.method == ADAMW else _steps(case)


def _steps(case: Case) -> tuple[dict[str, Program], dict[str, int]]:
    assert case.chunk is not None
    model = Qwen3(preset(case.model, dtype="bfloat16"), attention_backend=case.method)
    setup = Setup(model, "bfloat16", SLOTS - case.chunk, ENTRIES, platform="gpu")
    prediction = predict_memory(setup, case.chunk, "packed")
    steps, where = Steps.of(setup, case.chunk, keep=False), SingleDeviceSharding(GPU.device())
    keys = steps.carry.stack.k
    limit = min(_smallest_matrix(steps.params), keys.size * keys.dtype.itemsize)
    found = {}
    for name, kind in (("push", PUSH), ("back", BACK)):
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), steps.arguments(kind)
        )
        traced = jax.jit(steps.program(kind), donate_argnums=1).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("cuda",))
        found[name] = Program(lowered, prediction.programs[kind], limit, steps.params["embed"].shape)
    parts = prediction.parts
    return found, {"parameters": parts.parameters, "gradients": parts.gradients}


def _update(name: str) -> tuple[dict[str, Program], dict[str, int]]:
    model, optimizer = Qwen3(preset(name, dtype="bfloat16")), make_optimizer(AdamW())
    mesh = Mesh(np.array([[GPU.device()]]), (DATA, TENSOR))
    sharded = ShardedOptimizer.on(mesh, model, optimizer)
    like, update = sharded.like, jax.jit(sharded.update, donate_argnums=0)
    lowered = update.trace(like, like.params).lower(lowering_platforms=("cuda",))
    fixed = fixed_bytes(Setup(model, "bfloat16", SLOTS, ENTRIES, optimizer=optimizer, platform="gpu"))
    predicted = fixed.update - fixed.parameters  # those that are computed with are no argument
    limit = _smallest_matrix(like.params)
    sizes = {"parameters": fixed.master_weights, "gradients": fixed.gradients}
    return {"update": Program(lowered, predicted, limit, like.params["embed"].shape)}, sizes


def _smallest_matrix(params: Any) -> int:
    """Bytes in float32 of the smallest of the layers' matrices."""
    return min(leaf.size * 4 for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim >= 3)


def measure(case: Case, known: dict[str, Any]) -> dict[str, Any]:
    """What the compiler made of a case, or what is known of it if its programs are the same."""
    found, sizes = programs(case)
    digest = hashlib.sha256()
    for program in found.values():
        digest.update(program.lowered.as_text().encode())
    if known.get("sha256") == digest.hexdigest():
        return known
    row: dict[str, Any] = {"model": case.model, "chunk": case.chunk, "method": case.method} | sizes
    for name, program in found.items():
        for file in Path(DUMP.name).glob("*.ptx"):
            file.unlink()
        compiled = program.lowered.compile()
        counted = peak_bytes(compiled)
        row[name] = {
            "predicted": program.predicted,
            "counted": counted,
            "deviation": round(counted / program.predicted - 1, 4),
            "temporary": compiled.memory_analysis().temp_size_in_bytes,
            **found_in(compiled.as_text(), program.copy_limit, program.head),
            "kernels": dict(assembled(GPU)) if case.method == "pallas" else {},
        }
    peak = max(row[name]["counted"] for name in found)
    return row | {"peak_gib": round(peak / GIB, 2), "sha256": digest.hexdigest()}


def found_in(text: str, copy_limit: int, head: tuple[int, ...]) -> dict[str, list[str]]:
    """What must not be in a compiled program: large copies, and new arrays like the LM head."""
    arrays = list(stored(text))
    return {
        "large_copies": [str(one) for one in arrays if one.copies and one.bytes >= copy_limit],
        "new_heads": [str(one) for one in arrays if one.makes("f32", head)],
    }


def prove_what_is_looked_for_is_found() -> None:
    """Compiles two programs that do what must not be done, and two that do the same as they should.

    Raises:
      RunError: what must not be is not found, or found where it is not.
    """
    where, head = SingleDeviceSharding(GPU.device()), (4096, 512)
    total = jax.ShapeDtypeStruct(head, "float32", sharding=where)
    rows = [jax.ShapeDtypeStruct((256, width), "bfloat16", sharding=where) for width in head]

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.dot(x.T, y, preferred_element_type="float32")

    def keeps_the_old(total: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        return total, total.at[0].add(1.0)

    def adds_in_place(total: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return total.at[0].add(1.0)

    def stores_the_product(total: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        new = product(x, y)
        return total + new * new.max(), new.sum()

    def adds_the_product(total: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return total + product(x, y)

    for program, expected in (
        (keeps_the_old, "large_copies"),
        (adds_in_place, None),
        (stores_the_product, "new_heads"),
        (adds_the_product, None),
    ):
        lowered = jax.jit(program, donate_argnums=0).trace(total, *rows).lower(lowering_platforms=("cuda",))
        found = found_in(lowered.compile().as_text(), math.prod(head) * 4, head)
        if [name for name, arrays in found.items() if arrays] != [expected] * (expected is not None):
            raise RunError(f"{program.__name__}: expected {expected}, found {found}")


def check(row: dict[str, Any]) -> None:
    """Refuses what must not be."""
    case = Case(row["model"], row["chunk"], row["method"])
    for name in ("push", "back", "update"):
        if name not in row:
            continue
        found = row[name]
        if found["counted"] > found["predicted"] * HEADROOM:
            raise RunError(f"{case}: {name} needs {found['counted']} bytes, predicted {found['predicted']}")
        if found["large_copies"]:
            raise RunError(f"{case}: {name} copies {', '.join(found['large_copies'])}")
        if found["new_heads"]:
            raise RunError(f"{case}: {name} makes {', '.join(found['new_heads'])}")
        wanted = KERNELS_OF[name] if case.method == "pallas" else ()
        if sorted(found["kernels"]) != sorted(wanted):
            raise RunError(f"{case}: kernels of {name} are {sorted(found['kernels'])}")
        for kernel, registers in found["kernels"].items():
            if registers["spill_stores"] or registers["spill_loads"]:
                raise RunError(f"{case}: {kernel} spills {registers['spill_stores']} bytes")
    if (case.model, case.chunk, case.method) == TARGET:
        beside = (row["back"]["counted"] - row["parameters"] - row["gradients"]) / GIB
        if beside > TARGET_GIB:
            raise RunError(f"{case}: {beside:.2f} GiB beside parameters and gradients, not {TARGET_GIB}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="with commas")
    parser.add_argument("--chunks", default=",".join(map(str, CHUNKS)), help="with commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas")
    parser.add_argument("--out", type=Path, help="a JSON file, all cases; those in it are not compiled again")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache leaves no PTX
    prove_what_is_looked_for_is_found()
    rows: dict[Case, dict[str, Any]] = {}
    if args.out is not None and args.out.exists():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        if before["jax"] == jax.__version__:
            rows = {Case(row["model"], row["chunk"], row["method"]): row for row in before["cases"]}
    for case in asked(args):
        rows[case] = measure(case, rows.get(case, {}))
        print(json.dumps(rows[case]), flush=True)
        if args.out is not None:
            result = {"jax": jax.__version__, "device": GPU.name, "slots": SLOTS}
            result["cases"] = [rows[each] for each in sorted(rows, key=order)]
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for case in asked(args):
        check(rows[case])


def asked(args: argparse.Namespace) -> Iterator[Case]:
    """The cases that the command line names.

    Raises:
      InputError: a name or number that there is not.
    """
    chunks = args.chunks.split(",")
    for option, names, allowed in (
        ("--models", args.models.split(","), MODELS),
        ("--chunks", chunks, tuple(map(str, CHUNKS))),
        ("--methods", args.methods.split(","), METHODS),
    ):
        for name in names:
            if name not in allowed:
                raise InputError(option, "name", expected=f"some of {', '.join(allowed)}", actual=repr(name))
    for model in args.models.split(","):
        for method in args.methods.split(","):
            for chunk in (None,) if method == ADAMW else map(int, chunks):
                yield Case(model, chunk, method)


def order(case: Case) -> tuple[int, int, int]:
    """Cases as the table has them."""
    return MODELS.index(case.model), METHODS.index(case.method), case.chunk or 0


if __name__ == "__main__":
    run_command(main)
