"""A driver that dispatches compiled steps against one compiled loop: the same schedule on one device.

    python benchmarks/device_program.py --rollouts ROLLOUTS.npz [--chunk 256] [--out FILE]        some minutes

`driver` is `tree_value_and_grad`, `loop` is `mesh_value_and_grad` on a mesh of one device. They take turns.
One JSON object, per program

    seconds          the least of --repeat runs, processor time of all threads (`--clock wall` for others)
    peak_bytes       of the largest program, as the compiler counts it
    compile_seconds  tracing and compiling all its programs anew: the driver's those that this schedule meets

and the ratios loop / driver.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from cost_fit import MODEL, short_batch

from dta_jax.errors import run_command
from dta_jax.losses import NLL
from dta_jax.memory import lower_steps, peak_bytes
from dta_jax.mesh_grad import lower_value_and_grad, mesh_value_and_grad
from dta_jax.mesh_plan import plan_ranks
from dta_jax.qwen3 import Qwen3
from dta_jax.sharding import MeshShape, place_params
from dta_jax.tree_grad import tree_value_and_grad
from dta_jax.trie import build_trie, entry_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", required=True, help="recorded rollouts, .npz")
    parser.add_argument("--tokens", type=int, default=4000, help="tree tokens, about")
    parser.add_argument("--skip", type=int, default=3800, help="first tokens of all sequences, left out")
    parser.add_argument("--chunk", type=int, default=256, help="chunk size")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clock", choices=("processor", "wall"), default="processor")
    parser.add_argument("--out", type=Path, help="keep the figures")
    arguments = parser.parse_args()
    cache = tempfile.TemporaryDirectory()  # empty: what is compiled here is compiled anew, and only once
    jax.config.update("jax_compilation_cache_dir", cache.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    clock = time.process_time if arguments.clock == "processor" else time.perf_counter
    samples = short_batch(arguments.rollouts, arguments.skip, arguments.tokens)
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    values = {"weight": np.full(len(rows), 1 / len(rows))}
    model, mesh = Qwen3(MODEL), MeshShape().make()
    params = jax.jit(model.init)(jax.random.key(0))
    placed = place_params(mesh, model, params)
    plan = plan_ranks(trie, samples.sequence, rows, 1, chunk_size=arguments.chunk)
    (schedule,) = plan.schedules
    runs: dict[str, Callable[[], Any]] = {
        "driver": lambda: tree_value_and_grad(model, params, schedule, values, NLL()),
        "loop": lambda: mesh_value_and_grad(mesh, model, placed, plan, values, NLL()),
    }
    lower: dict[str, Callable[[], list[jax.stages.Lowered]]] = {
        "driver": lambda: list(lower_steps(model, params, schedule, values, NLL()).values()),
        "loop": lambda: [lower_value_and_grad(mesh, model, placed, plan, values, NLL())],
    }
    compile_seconds, peak = {}, {}
    for name in runs:
        began = clock()
        programs = [lowered.compile() for lowered in lower[name]()]
        compile_seconds[name] = clock() - began
        peak[name] = max(map(peak_bytes, programs))
    seconds, grads = dict.fromkeys(runs, np.inf), {}
    for run in range(arguments.repeat + 1):
        for name, call in runs.items():
            began = clock()
            grads[name] = jax.block_until_ready(call().grads)
            if run:
                seconds[name] = min(seconds[name], clock() - began)
    found = {
        name: {
            "seconds": seconds[name],
            "peak_bytes": peak[name],
            "compile_seconds": compile_seconds[name],
        }
        for name in runs
    }
    difference = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max()),
        grads["driver"],
        grads["loop"],
    )
    result = {
        "tree_tokens": trie.num_rows,
        "chunk": arguments.chunk,
        "operations": schedule.num_ops,
        "gradient_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(grads["driver"])),
        "largest_gradient_difference": max(jax.tree.leaves(difference)),
        "clock": arguments.clock,
        **found,
        "loop_over_driver": {key: found["loop"][key] / found["driver"][key] for key in found["loop"]},
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
