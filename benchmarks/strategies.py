"""Strategies on the clock: the same gradient by whole plans of the planner, in turns in one process.

    python benchmarks/strategies.py --rollouts ROLLOUTS.npz --tasks 0-1 --chunk 1024 --out RESULTS.json
    python benchmarks/strategies.py --short-branches --chunk 1024 --out RESULTS.json
    python benchmarks/strategies.py --rollouts ROLLOUTS.npz --tasks 0 --chunk 2048 --forward

The models, float32, vocabulary 8,192: `small` of 4 layers, width 256, 8/4 heads of 32, MLP 768; `wide`, one
layer of Qwen3-0.6B: width 1024, 16/8 heads of 128, MLP 3072. Strategies differ in how many rows they run, far
less in what rows attend to: at 5,000 tokens of context attention is four fifths of the small model's work.
Every strategy runs once to compile and `--repeat` times on the clock; wall seconds and the process's own
seconds are kept. `--forward` times log-probabilities alone, each token once. Two cores: 2 to 4 minutes each.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from planning import short_branches

from dta_jax.bench import task_range
from dta_jax.errors import run_command
from dta_jax.losses import NLL
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.rollouts import load_rollouts, samples_from_rollouts
from dta_jax.schedule import compile_forward_schedule, compile_schedule
from dta_jax.schedule_stats import schedule_stats
from dta_jax.tree_grad import tree_logprobs, tree_value_and_grad
from dta_jax.trie import build_trie, entry_rows

SMALL = Qwen3Config(
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=768,
    tie_word_embeddings=True,
    max_position_embeddings=32_768,
)
WIDE = replace(
    SMALL,
    hidden_size=1024,
    num_hidden_layers=1,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
)
MODELS = {"small": Qwen3(SMALL), "wide": Qwen3(WIDE)}


def timed(cases: dict[str, Callable[[], Any]], repeat: int) -> dict[str, dict[str, list[float]]]:
    """Wall and processor seconds of each case, in turns, after a run that compiles."""
    for run in cases.values():
        jax.block_until_ready(run())
    seconds: dict[str, dict[str, list[float]]] = {name: {"wall": [], "processor": []} for name in cases}
    for _ in range(repeat):
        for name, run in cases.items():
            wall, own = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            seconds[name]["wall"].append(round(time.perf_counter() - wall, 3))
            seconds[name]["processor"].append(round(time.process_time() - own, 3))
    return seconds


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    workload = parser.add_mutually_exclusive_group(required=True)
    workload.add_argument("--rollouts", type=Path)
    workload.add_argument("--short-branches", action="store_true")
    parser.add_argument("--tasks", default="0-1")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--strategies", default="packed,packed+keep,branch,branch+cut_tail+order")
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = MODELS[args.model]
    if args.short_branches:
        samples, name = short_branches(), "short branches"
    else:
        rollouts = load_rollouts(args.rollouts).select(task_range(args.tasks)).modulo(model.vocab_size)
        samples, name = samples_from_rollouts(rollouts), f"recorded tasks {args.tasks}"
    params = model.init(jax.random.key(0))
    trie = build_trie([np.asarray(s % model.vocab_size, np.int32) for s in samples.sequences])
    rows = entry_rows(trie, samples.sequence, samples.position)
    weight = {"weight": np.full(len(rows), 1 / len(rows), np.float32)}
    if args.forward:
        table = compile_forward_schedule(trie, rows, chunk_size=args.chunk)
        cases: dict[str, Callable[[], Any]] = {"forward": lambda: tree_logprobs(model, params, table)}
        stats: dict[str, Any] = {"forward": {"tokens_executed": table.forward_tokens_executed}}
    else:
        plans = {
            strategy: compile_schedule(trie, rows, chunk_size=args.chunk, strategy=strategy)
            for strategy in args.strategies.split(",")
        }
        cases = {
            strategy: lambda plan=plan: tree_value_and_grad(model, params, plan, weight, NLL()).grads
            for strategy, plan in plans.items()
        }
        stats = {strategy: vars(schedule_stats(plan)) for strategy, plan in plans.items()}
    found = {
        "workload": name,
        "model": args.model,
        "chunk": args.chunk,
        "tree_tokens": trie.num_rows,
        "processors": os.cpu_count(),
        "load_before": os.getloadavg(),
        "jax": jax.__version__,
        "methods": {case: stats[case] | timing for case, timing in timed(cases, args.repeat).items()},
    }
    found["load_after"] = os.getloadavg()
    text = json.dumps(found, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    run_command(main)
