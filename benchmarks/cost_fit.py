"""How well a cost model fitted to this machine predicts what whole plans take.

    python benchmarks/cost_fit.py --rollouts ROLLOUTS.npz [--chunk 256] [--out FILE]        some minutes

The model is fitted on calibration plans only (`dta_jax.cost_fit.calibration`). Then plans of a recorded task
by several strategies run in turns, each as a whole. One JSON object: the fit, and per strategy

    predicted        seconds by the fitted model
    documented       forward passes of a row by `CostModel()`, scaled so that `packed` is exact
    measured         the least of --repeat runs
    error            predicted / measured - 1
    documented_error the same for the documented model

and which strategy each of them holds for the fastest. Seconds are processor time of all threads
(`--clock wall` for others, on a machine that does nothing else).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dta_jax.cost_fit import fit_cost
from dta_jax.errors import run_command
from dta_jax.losses import NLL
from dta_jax.planner import CostModel
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.rollouts import load_rollouts, samples_from_rollouts
from dta_jax.schedule import compile_schedule, round_slots
from dta_jax.schedule_stats import schedule_cost, schedule_stats
from dta_jax.tree_grad import tree_value_and_grad
from dta_jax.tree_inputs import entry_capacity
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples

STRATEGIES = ("packed", "packed+keep", "branch", "branch+cut_tail", "branch+cut_tail+order")
VOCABULARY = 2048
MODEL = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=384,
)


def short_batch(file: str, skip: int, tokens: int) -> Samples:
    """Recorded rollouts without their first `skip` tokens, as many sequences as make `tokens` tree tokens.

    The system prompt, the same in all of them, is most of what is skipped; contexts become short.
    """
    rollouts = load_rollouts(file)
    tasks = np.unique(rollouts.require("task_id"))[:1]
    samples = samples_from_rollouts(rollouts.select(tasks.tolist()).modulo(VOCABULARY))
    sequences = [tokens[skip:] for tokens in samples.sequences]
    size = [build_trie(sequences[: n + 1]).num_rows for n in range(len(sequences))]
    count = 1 + int(np.searchsorted(size, tokens))
    kept = (samples.sequence < count) & (samples.position > skip)
    return Samples(sequences[:count], samples.sequence[kept], samples.position[kept] - skip)


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
    clock = time.process_time if arguments.clock == "processor" else time.perf_counter
    samples = short_batch(arguments.rollouts, arguments.skip, arguments.tokens)
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    values = {"weight": np.full(len(rows), 1 / len(rows))}
    model = Qwen3(MODEL)
    params = jax.jit(model.init)(jax.random.key(0))
    chunk, buckets = arguments.chunk, {"entry_capacity": entry_capacity(len(rows))}
    fit = fit_cost(
        model,
        params,
        chunk_size=chunk,
        longest=trie.longest_path,
        repeat=arguments.repeat,
        clock=clock,
    )
    slots = round_slots(trie.longest_path + chunk)
    plans = {
        strategy: compile_schedule(
            trie, rows, chunk_size=chunk, strategy=strategy, stack_slots=slots, cost=fit.cost
        )
        for strategy in STRATEGIES
    }
    least = dict.fromkeys(STRATEGIES, np.inf)
    for run in range(arguments.repeat + 1):
        for strategy, plan in plans.items():
            began = clock()
            result = tree_value_and_grad(model, params, plan, values, NLL(), **buckets)
            jax.block_until_ready(result.grads)
            if run:
                least[strategy] = min(least[strategy], clock() - began)
    usual = {strategy: schedule_cost(plan, CostModel()) for strategy, plan in plans.items()}
    scale = least["packed"] / usual["packed"]
    found: dict[str, Any] = {}
    for strategy, plan in plans.items():
        measured, predicted, documented = least[strategy], fit.seconds(plan), scale * usual[strategy]
        found[strategy] = {
            "operations": plan.num_ops,
            "work": schedule_stats(plan).work,
            "predicted": predicted,
            "documented": documented,
            "measured": measured,
            "error": predicted / measured - 1,
            "documented_error": documented / measured - 1,
        }
    result = {
        "tree_tokens": trie.num_rows,
        "chunk": chunk,
        "clock": arguments.clock,
        "fit": dataclasses.asdict(fit),
        "strategies": found,
        "fastest": {
            by: min(STRATEGIES, key=lambda s, by=by: found[s][by])
            for by in ("predicted", "documented", "measured")
        },
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
