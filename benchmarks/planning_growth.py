"""How executed slots and planning time grow with the batch.

    python benchmarks/planning_growth.py --rollouts ROLLOUTS.npz [--out FILE]        about 1 minute

`packed` at C = 1024 to 8192 on the first 10, 20 and 40 recorded tasks, and at C = 1024 on generated rollouts
with 25,000 to 100,000 sequences. One JSON object per batch and chunk size:

    slots           3 x rows of BACK + rows of PUSH, padding counted
    slots_over_half over the slots of the batch with half the tasks; slots_growth: that over the growth of T
    forward_only    rows of the forward-only plan over tree tokens
    trie_seconds, plan_seconds     processor time on one core, the least of 3 runs
    seconds_growth  of both together, over the batch half as large, divided by the growth of flat tokens
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from planning import timed

from dta_jax.errors import run_command
from dta_jax.rollouts import Rollouts, load_rollouts, samples_from_rollouts
from dta_jax.schedule import compile_forward_schedule, compile_schedule
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.trie import build_trie, entry_rows

MANY = SyntheticRollouts(
    tasks=3125,
    trials=4,
    turns=8,
    system_tokens=64,
    user_tokens=8,
    completion_tokens=8,
    tool_tokens=8,
    branching=1.0,
)


def growth(name: str, rollouts: Rollouts, counts: list[int], chunk: int) -> Iterator[dict[str, Any]]:
    """The first so many tasks, each count twice the one before."""
    before: dict[str, Any] | None = None
    tasks = np.unique(rollouts.require("task_id")).tolist()
    for count in counts:
        samples = samples_from_rollouts(rollouts.select(tasks[:count]))
        trie, trie_seconds = timed(lambda samples=samples: build_trie(samples.sequences), 3)
        rows = entry_rows(trie, samples.sequence, samples.position)
        plan, plan_seconds = timed(
            lambda trie=trie, rows=rows: compile_schedule(trie, rows, chunk_size=chunk), 3
        )
        forward = compile_forward_schedule(trie, rows, chunk_size=chunk)
        row = {
            "rollouts": name,
            "tasks": count,
            "chunk": chunk,
            "sequences": len(samples.sequences),
            "flat_tokens": sum(map(len, samples.sequences)),
            "tree_tokens": trie.num_rows,
            "slots": 3 * plan.backward_tokens_executed + plan.forward_tokens_executed,
            "forward_only": forward.forward_tokens_executed / trie.num_rows,
            "trie_seconds": trie_seconds,
            "plan_seconds": plan_seconds,
        }
        if before is not None:
            tokens, flat = (row[k] / before[k] for k in ("tree_tokens", "flat_tokens"))
            seconds = (trie_seconds + plan_seconds) / (before["trie_seconds"] + before["plan_seconds"])
            row |= {
                "slots_over_half": row["slots"] / before["slots"],
                "slots_growth": row["slots"] / before["slots"] / tokens,
                "seconds_growth": seconds / flat,
            }
        yield row
        before = row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", required=True, help="recorded rollouts, .npz")
    parser.add_argument("--out", type=Path, help="keep the figures as a JSON list")
    arguments = parser.parse_args()
    recorded = load_rollouts(arguments.rollouts)
    batches = [("recorded", recorded, [10, 20, 40], chunk) for chunk in (1024, 2048, 4096, 8192)]
    batches.append(("generated", generate_rollouts(MANY), [781, 1562, 3125], 1024))
    lines = []
    for batch in batches:
        for row in growth(*batch):
            lines.append(json.dumps(row))
            print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    run_command(main)
