"""What each planner strategy executes on recorded rollouts, and how long planning takes.

    python benchmarks/planning.py --rollouts ROLLOUTS.npz [--chunks 1024,2048] [--out FILE]   about 2 minutes

Tries: the rollouts, their first 8 and their last 10 tasks; the shape that stripped thinking leaves (every
completion is a leaf, `--thinking` tokens longer on average); a conversation with a short branch at every
turn. One JSON object per trie, strategy and chunk size:

    the fields of `ScheduleStats`: `work` beside `work_bound`, `backs_over_full`, ...
    attention       pairs in the query x key blocks that hold a visible pair, weighted as `work` weighs rows,
                    over 3 x the visible pairs of the trie; by block size (rows and keys)
    trie_seconds, plan_seconds, operand_seconds     processor time on one core, the least of --repeat runs

Expected on the recorded file at C = 2048: `packed` within 0.01 of `work_bound`, trie and plan in 0.3 s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dta_jax.errors import run_command
from dta_jax.rollouts import load_rollouts, samples_from_rollouts
from dta_jax.schedule import STRATEGIES, compile_forward_schedule, compile_schedule, operands
from dta_jax.schedule_stats import schedule_stats
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import BACK, Samples, Schedule
from dta_jax.workload import rollouts_vocab, with_thinking

BLOCKS = (128, 512)
Result = TypeVar("Result")


def short_branches(turns: int = 17, trunk: int = 1000, side: int = 500, extension: int = 200) -> Samples:
    """A conversation whose every turn leaves a side branch; loss on the branches and on its last turn."""
    fresh = np.arange(trunk + turns * (side + extension))
    path, used, sequences = fresh[:trunk], trunk, []
    for _ in range(turns):
        sequences.append(np.concatenate([path, fresh[used : used + side]]))
        path = np.concatenate([path, fresh[used + side : used + side + extension]])
        used += side + extension
    sequences.append(path)
    sequence = np.repeat(np.arange(turns), side)
    position = np.concatenate([np.arange(len(s) - side, len(s)) for s in sequences[:-1]])
    return Samples(sequences, sequence, position)


def attention_in_blocks(schedule: Schedule, block: int) -> float:
    """Pairs in blocks that hold a visible pair, weighted by operation, over three times all visible pairs."""
    touched, back_work = 0, 2 if schedule.keep_residuals else 3
    for op in operands(schedule):
        keys = np.flatnonzero(op.q_start < op.q_end)
        blocks = np.zeros((-(-len(op.q_start) // block), -(-op.width // block) + 1), np.int64)
        np.add.at(blocks, (keys // block, op.q_start[keys] // block), 1)
        np.add.at(blocks, (keys // block, (op.q_end[keys] - 1) // block + 1), -1)
        touched += (back_work if op.kind == BACK else 1) * int((np.cumsum(blocks, 1) > 0).sum())
    return touched * block**2 / (3 * float((schedule.trie.depth + 1.0).sum()))


def timed(run: Callable[[], Result], repeat: int) -> tuple[Result, float]:
    """The result, and the least processor time of `repeat` runs."""
    least = np.inf
    for _ in range(repeat):
        start = time.process_time()
        result = run()
        least = min(least, time.process_time() - start)
    return result, float(least)


def measure(name: str, samples: Samples, chunks: list[int], repeat: int) -> Iterator[dict[str, Any]]:
    """Every strategy at every chunk size."""
    trie, trie_seconds = timed(lambda: build_trie(samples.sequences), repeat)
    rows = entry_rows(trie, samples.sequence, samples.position)
    for chunk in chunks:
        forward = compile_forward_schedule(trie, rows, chunk_size=chunk)
        for strategy in STRATEGIES:

            def plan(chunk: int = chunk, strategy: str = strategy) -> Schedule:
                return compile_schedule(trie, rows, chunk_size=chunk, strategy=strategy)

            schedule, plan_seconds = timed(plan, repeat)
            _, operand_seconds = timed(lambda schedule=schedule: sum(1 for _ in operands(schedule)), repeat)
            yield {
                "trie": name,
                "strategy": strategy,
                "chunk": chunk,
                **dataclasses.asdict(schedule_stats(schedule)),
                "forward_only_over_tree_tokens": forward.forward_tokens_executed / trie.num_rows,
                "attention": {block: attention_in_blocks(schedule, block) for block in BLOCKS},
                "trie_seconds": trie_seconds,
                "plan_seconds": plan_seconds,
                "operand_seconds": operand_seconds,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", required=True, help="recorded rollouts, .npz")
    parser.add_argument("--chunks", default="1024,2048,4096,8192", help="chunk sizes")
    parser.add_argument("--thinking", type=float, default=500.0, help="mean length of inserted thinking")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep the figures as a JSON list")
    arguments = parser.parse_args()
    rollouts = load_rollouts(arguments.rollouts)
    tasks = np.unique(rollouts.require("task_id")).tolist()
    whole = samples_from_rollouts(rollouts)
    tries = {
        "recorded": whole,
        "recorded, first 8 tasks": samples_from_rollouts(rollouts.select(tasks[:8])),
        "recorded, last 10 tasks": samples_from_rollouts(rollouts.select(tasks[-10:])),
        "thinking": with_thinking(whole, arguments.thinking, first_id=rollouts_vocab(rollouts)),
        "short branches": short_branches(),
    }
    chunks = [int(chunk) for chunk in arguments.chunks.split(",")]
    lines = []
    for name, samples in tries.items():
        for row in measure(name, samples, chunks, arguments.repeat):
            lines.append(json.dumps(row))
            print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    run_command(main)
