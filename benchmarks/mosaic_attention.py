"""Tree attention's forward pass in the terms of Pallas' Mosaic GPU: compiled for an H100, not run on one.

    python benchmarks/mosaic_attention.py [--out FILE]

The kernels that training uses are lowered through Triton, which is deprecated since jax 0.11. This is the
forward kernel as Mosaic GPU wants it (`kernel` below), for Hopper only; nothing but this script uses it.
Needs `jax[cuda12]` (or `cuda13`) of the jax in use; no GPU. It

  - gives the kernels of `dta_jax.kernels.tree_attention` as they are to Mosaic GPU's lowering, and records
    what it says;
  - runs the kernel in Mosaic GPU's interpreter, under masks with whole, partial and dead blocks, and holds it
    against `dta_jax.attention`. The interpreter knows the threads, the copies and the barriers; the
    products, which have operands that it does not know in every version, are plain ones there (`Machine`);
  - compiles it for the tiles in `TILES`, and reads registers and spills from what the assembler says, and
    tensor core instructions and bulk copies from the assembly.

It fails if results differ, or if a tile compiles with spills or without tensor cores. It says nothing about
speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Final
from unittest import mock

# Sets the compiler's flags, so it comes before JAX. Compilers that dump crash in the interpreter's threads.
from aot_kernels import CHUNK, DUMP_FLAGS, GPUS, HEADS, KEYS, LAYERS  # isort: skip

os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(DUMP_FLAGS, "").strip() or "--xla_dump_to="

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from dta_jax import attention
from dta_jax.errors import RunError, run_command
from dta_jax.kernels import tree_attention
from dta_jax.kernels.tiles import Tile, TilePlan, Tiles, plan_tiles
from dta_jax.kernels.tree_attention import LOG2_E, MASKED

COMPUTE: Final = 2  # warpgroups that compute; one more loads
ROWS: Final = 64  # queries of each, as many as a product of a warpgroup has
REGISTERS: Final = (240, 24)  # per thread that computes and that loads, of 65,536 in all
REPORTED: Final = ("registers", "bytes spill stores", "bytes spill loads")  # as ptxas calls them
TOLERANCE: Final = 2e-5
GPU: Final = GPUS["h100"]
TILES: Final = tuple((d, Tile(COMPUTE * ROWS, k, num_stages=2)) for d in (64, 128) for k in (64, 128))


@dataclasses.dataclass(frozen=True)
class Machine:
    """The two products, of which the interpreter does not know the kinds of operands."""

    interpret: bool

    def scores(self, q_ref: Any, k_ref: Any) -> jax.Array:
        """q [ROWS, d] times k [block_k, d] transposed, both in shared memory."""
        if self.interpret:
            return jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32)

        def product(total: Any) -> jax.Array:
            plgpu.wgmma(total, q_ref, k_ref.transpose((1, 0)))
            return total[...]

        return pl.run_scoped(product, plgpu.ACC((ROWS, k_ref.shape[0]), jnp.float32))

    def add_product(self, total: jax.Array, p: jax.Array, v_ref: Any) -> jax.Array:
        """total [ROWS, d] + p [ROWS, block_k], in registers, times v [block_k, d] in shared memory."""
        if self.interpret:
            return total + jnp.dot(p, v_ref[...], preferred_element_type=jnp.float32)
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v_ref))(plgpu.ACC.init(total))


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array | int,
    q_start: jax.Array,
    q_end: jax.Array,
    plan: TilePlan,
    *,
    tile: Tile,
    scale: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`dta_jax.kernels.tree_attention.forward`, for whole tiles of queries.

    Args:
      plan: from `plan_tiles` with rows of `tile`.
      tile: `block_q` is `COMPUTE * ROWS`.
      interpret: parameters of Mosaic GPU's interpreter, or None.
    """
    (num_queries, heads, d), kv_heads = q.shape, k.shape[1]
    memory = functools.partial(plgpu.SMEM, dtype=q.dtype)
    keys, ints = (tile.num_stages, tile.block_k), plgpu.SMEM((tile.num_stages, tile.block_k), jnp.int32)
    filled = functools.partial(plgpu.Barrier, num_barriers=tile.num_stages)
    run = plgpu.kernel(
        functools.partial(
            kernel, tile=tile, group=heads // kv_heads, scale=scale, machine=Machine(interpret is not None)
        ),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((heads, num_queries), jnp.float32),
        ),
        grid=(heads, num_queries // tile.block_q),
        grid_names=("head", "tile"),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types={
            "q_smem": memory((COMPUTE, ROWS, d)),
            "lse_smem": plgpu.SMEM((COMPUTE, ROWS), jnp.float32),
            "k_smem": memory((*keys, d)),
            "v_smem": memory((*keys, d)),
            "start_smem": ints,
            "end_smem": ints,
            "q_filled": plgpu.Barrier(num_barriers=COMPUTE),
            "k_filled": filled(num_arrivals=3),  # keys, and both ends of their intervals
            "v_filled": filled(),
            "k_free": filled(num_arrivals=COMPUTE),
            "v_free": filled(num_arrivals=COMPUTE),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
        kernel_name="tree_attention_forward",
    )
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    out, lse = run(layers, plan.k_blocks, plan.k_counts, k, v, q_start, q_end, q)
    return out, lse.T


def kernel(
    layer_ref: Any,
    blocks_ref: Any,
    counts_ref: Any,
    k_ref: Any,
    v_ref: Any,
    start_ref: Any,
    end_ref: Any,
    q_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    q_smem: Any,
    lse_smem: Any,
    k_smem: Any,
    v_smem: Any,
    start_smem: Any,
    end_smem: Any,
    q_filled: Any,
    k_filled: Any,
    v_filled: Any,
    k_free: Any,
    v_free: Any,
    tile: Tile,
    group: int,
    scale: float,
    machine: Machine,
) -> None:
    """One tile of queries and one head: a warpgroup loads the blocks on its list, the others compute."""
    head, i, me = (lax.axis_index(name) for name in ("head", "tile", "warpgroup"))
    whole, seen = counts_ref[i, 0], counts_ref[i, 1]
    block_k, stages, factor = tile.block_k, tile.num_stages, scale * LOG2_E

    @pl.when(me == COMPUTE)
    def _load() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        layer, kv_head = layer_ref[0], lax.div(head, jnp.int32(group))

        def fetch(t: jax.Array, _: None) -> None:
            slot = lax.rem(t, jnp.int32(stages))

            @pl.when(t >= stages)
            def _wait() -> None:
                plgpu.barrier_wait(k_free.at[slot])
                plgpu.barrier_wait(v_free.at[slot])

            @pl.when(t < seen)
            def _fill() -> None:
                keys = pl.ds(blocks_ref[i, t] * block_k, block_k)
                for source, target, filled in (
                    (k_ref.at[layer, kv_head, keys], k_smem, k_filled),
                    (start_ref.at[keys], start_smem, k_filled),
                    (end_ref.at[keys], end_smem, k_filled),
                    (v_ref.at[layer, kv_head, keys], v_smem, v_filled),
                ):
                    plgpu.copy_gmem_to_smem(source, target.at[slot], filled.at[slot])

        lax.fori_loop(0, seen + stages, fetch, None)  # the last rounds only wait for what was read

    @pl.when(me < COMPUTE)
    def _compute() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        first = i * tile.block_q + me * ROWS
        rows, q_mine = pl.ds(first, ROWS), q_smem.at[me]
        plgpu.copy_gmem_to_smem(q_ref.at[rows, head], q_mine, q_filled.at[me])
        plgpu.barrier_wait(q_filled.at[me])

        def visit(t: jax.Array, state: tuple, *, masked: bool) -> tuple:
            out, top, total = state  # `top` has the scale and log2(e) in it
            slot = lax.rem(t, jnp.int32(stages))
            plgpu.barrier_wait(k_filled.at[slot])
            scores = machine.scores(q_mine, k_smem.at[slot])

            def along(vector: jax.Array, axis: int, width: int = block_k) -> jax.Array:
                return lax.broadcast_in_dim(vector, (ROWS, width), [axis])

            if masked:
                query = lax.broadcasted_iota(jnp.int32, scores.shape, 0) + first
                visible = (along(start_smem[slot], 1) <= query) & (query < along(end_smem[slot], 1))
                scores = jnp.where(visible, scores, MASKED)
            plgpu.barrier_arrive(k_free.at[slot])
            new_top = jnp.maximum(top, scores.max(axis=1) * factor)
            p = jnp.exp2(scores * factor - along(new_top, 0))
            if masked:
                p = jnp.where(visible, p, 0.0)  # a row that has seen nothing yet has top == MASKED * factor
            fade = jnp.exp2(top - new_top)
            total = total * fade + p.sum(axis=1)
            out = out * along(fade, 0, out.shape[1])
            plgpu.barrier_wait(v_filled.at[slot])
            out = machine.add_product(out, p.astype(v_smem.dtype), v_smem.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
            return out, new_top, total

        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        state = zeros(q_mine.shape), jnp.full((ROWS,), MASKED * factor, jnp.float32), zeros((ROWS,))
        state = lax.fori_loop(0, whole, functools.partial(visit, masked=False), state)
        out, top, total = lax.fori_loop(whole, seen, functools.partial(visit, masked=True), state)
        sees = total > 0
        divisor = jnp.where(sees, total, 1.0)
        q_mine[...] = (out / lax.broadcast_in_dim(divisor, out.shape, [0])).astype(q_smem.dtype)
        lse_smem[me] = jnp.where(sees, top * (1 / LOG2_E) + jnp.log(divisor), -MASKED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_mine, out_ref.at[rows, head])
        plgpu.copy_smem_to_gmem(lse_smem.at[me], lse_ref.at[head, rows])
        plgpu.wait_smem_to_gmem(0)


def said_of_present_kernels() -> dict[str, str]:
    """What Mosaic GPU's lowering says of the product's kernels as they are: "lowers", or its error."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    q, stack, sums = shape((256, 4, 64)), shape((2, 2, 512, 64)), shape((2, 2, 512, 64), dtype=jnp.float32)
    lse, ends = shape((256, 4), dtype=jnp.float32), shape((512,), dtype=jnp.int32)
    tiles = Tiles(Tile(128, 64), Tile(64, 64))

    def run(which: str, *operands: jax.Array) -> Any:
        plan = plan_tiles(*operands[-2:], 256, tiles)
        return getattr(tree_attention, which)(*operands, plan, tiles=tiles, scale=0.1)

    programs = {
        "forward": (q, stack, stack, 0, ends, ends),
        "backward": (q, q, q, lse, stack, stack, sums, sums, 0, ends, ends),
    }
    found = {}
    asked = mock.patch.object(tree_attention, "_compiler_params", return_value=plgpu.CompilerParams())
    for which, operands in programs.items():
        with asked, on_gpu():
            try:
                jax.jit(functools.partial(run, which)).trace(*operands).lower(lowering_platforms=("cuda",))
                found[which] = "lowers"
            except Exception as error:  # whatever it is, it is the answer
                found[which] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return found


def largest_difference(seed: int, d: int, tile: Tile) -> float:
    """Of `out` and log-sum-exp, in the interpreter and by `dta_jax.attention`, float32.

    The mask: a context with a block that all queries see, a dead one and two that some see, then the
    chunk's own keys. The last queries see nothing at all.
    """
    rng, num_queries, layer, scale = np.random.default_rng(seed), 2 * tile.block_q, 1, d**-0.5
    context, seeing, own = 4 * tile.block_k, num_queries - 5, np.arange(num_queries)
    keys = context + num_queries
    start, end = np.zeros((2, keys), np.int32)
    end[: tile.block_k] = seeing
    end[2 * tile.block_k : context] = rng.integers(0, seeing, 2 * tile.block_k)
    start[context:] = own
    end[context:] = np.minimum(own + rng.integers(1, num_queries, num_queries), seeing)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    q, k, v = draw(num_queries, 4, d), draw(2, 2, keys, d), draw(2, 2, keys, d)
    plan = plan_tiles(start, end, num_queries, Tiles(tile, tile))
    assert plan.k_counts[0].tolist() != [0, keys // tile.block_k]
    got = forward(q, k, v, layer, start, end, plan, tile=tile, scale=scale, interpret=interpreter())
    blocks = attention.plan_blocks(start, end, num_queries, attention.block_size(num_queries), tile.block_k)
    want = attention.forward(q, k, v, layer, start, end, blocks, block_k=tile.block_k, scale=scale)
    return max(float(jnp.abs(a - b).max()) for a, b in zip(got, want, strict=True))


def interpreter() -> Any:
    """Mosaic GPU's, which is no public name in every version."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def on_gpu() -> Any:
    """Programs that are lowered meanwhile are for the GPU."""
    target = AbstractDevice(GPU.name, GPU.cores, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=target))


def measure(d: int, tile: Tile) -> dict[str, Any]:
    """What the compiler made of the kernel."""
    (heads, kv_heads), where = HEADS, SingleDeviceSharding(GPU.device())
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=where)
    stack, ends = shape((LAYERS, kv_heads, KEYS, d)), shape((KEYS,), dtype=jnp.int32)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, *ends: jax.Array) -> Any:
        plan = plan_tiles(*ends, CHUNK, Tiles(tile, tile))
        return forward(q, k, v, layer, *ends, plan, tile=tile, scale=d**-0.5)

    arguments = shape((CHUNK, heads, d)), stack, stack, shape((), dtype=jnp.int32), ends, ends
    told = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    with on_gpu(), tempfile.TemporaryDirectory() as dump:
        with mock.patch.dict(os.environ, told | {"MOSAIC_GPU_DUMP_TO": dump}):
            jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
        (ptx,), (report,) = (list(Path(dump).glob(f"*.{kind}")) for kind in ("ptx", "ptxas"))
        code, said = ptx.read_text(), report.read_text()
    found = {name: re.search(rf"(\d+) {name}", said) for name in REPORTED}
    if missing := [name for name, each in found.items() if each is None]:
        raise RunError(f"ptxas does not say {', '.join(missing)}: {said}")
    counts = {name: int(each[1]) for name, each in found.items() if each is not None}
    counts["wgmma"], counts["bulk copies"] = code.count("wgmma.mma_async"), code.count("cp.async.bulk")
    return {"head_dim": d, "tile": vars(tile)} | counts


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache leaves no PTX
    result: dict[str, Any] = {"jax": jax.__version__, "device": GPU.name}
    result["present kernels"] = said_of_present_kernels()
    result["largest difference"] = largest_difference(0, 64, Tile(COMPUTE * ROWS, 64))
    result["cases"] = [measure(d, tile) for d, tile in TILES]
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not result["largest difference"] < TOLERANCE:
        raise RunError(f"the interpreter differs by {result['largest difference']}")
    for case in result["cases"]:
        if case["bytes spill stores"] or case["bytes spill loads"] or not case["wgmma"]:
            raise RunError(f"spills, or no tensor cores: {case}")


if __name__ == "__main__":
    run_command(main)
