"""The quickstart on three seeds: synchronous, running ahead, and trained without sharing.

    python benchmarks/quickstart.py [--seeds 0-2] [--runs sync,ahead,leafized,dense,updates] [--steps 60]

`configs/quickstart.gin` as it is, but for

    sync        nothing
    ahead       Collect.max_staleness = 2, Collect.on_stale = "wait", and decoupled PPO
    leafized    sync; every distinct episode is a sequence of its own, with the entries of all its turns
    dense       sync; every turn is a sequence of its own: what its prompt repeats is computed again

The last two train with the same kernels, in chunks packed as full, and from the same seeds: only their tries
share nothing. Seed after seed, all runs one after the other. After that, batches that the first seed trained
on at some steps are trained on again, by `sync`, `leafized` and `dense` in turns. Results of earlier calls
stay, unless they are of the same run and seed, in

    benchmarks/results/quickstart.json        `runs`, one object per run and seed
        reward                                mean over each step's 64 episodes
        loss, grad_norm, entropy              of each of the first five steps
        seconds                               the whole run, compilation included
        rows                                  computed per step, forward and backward, padding counted
        staleness_mean                        versions, over the run's tokens
                                              `updates`, one object per step
        cpu_ratio, wall_ratio                 time of an update, planning included, over that of `sync`:
                                              median of the ratios within each of `repeats` rounds
    docs/pictures/quickstart.svg              rewards: mean over seeds, pale lines for the range

Expected: from under 0.25 to over 0.8 everywhere; the first five losses agree to 1e-3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from absl import logging as absl_logging
from learning import names, numbers, versions, with_range

from dta_jax.config import load_config, operative_config
from dta_jax.curves import Key, chart
from dta_jax.errors import run_command
from dta_jax.guards import Watch
from dta_jax.learner import Learner
from dta_jax.loop import run_training
from dta_jax.metrics import read_steps
from dta_jax.objective import make_batch
from dta_jax.prepare import Run, prepare
from dta_jax.report import COLOURS
from dta_jax.rollouts import load_rollouts
from dta_jax.schedule import compile_schedule
from dta_jax.tree_engine import TreeEngine
from dta_jax.trie import build_trie, entry_rows, leafize
from dta_jax.types import NO_PARENT, Samples, Schedule, Trie

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks/results/quickstart.json"
COMPARED: Final = 5  # first steps, whose losses are compared
REPLAYED: Final = (5, 20, 50)  # steps whose updates are timed
REPEATS: Final = 7
RUNS: Final[dict[str, tuple[str, ...]]] = {
    "sync": (),
    "ahead": (
        "Collect.max_staleness = 2",
        "Collect.on_stale = 'wait'",
        "Train.loss = @OffPolicy()",
        "OffPolicy.loss = @PPOClip()",
        "PPOClip.anchor = 'prox_logp'",
        "BehaviourWeight.high = 5.0",
    ),
    "leafized": (),
    "dense": (),
}


class UnsharedEngine(TreeEngine):
    """Plans a forest with one chain per sequence, so that nothing is shared."""

    def plan(self, samples: Samples) -> Schedule:
        trie = chains(samples.sequences)
        rows = entry_rows(trie, samples.sequence, samples.position)
        return compile_schedule(
            trie,
            rows,
            chunk_size=self.chunk_size,
            strategy=self.strategy,
            stack_slots=self.stack_slots,
            cost=self.cost,
        )


class LeafizedEngine(UnsharedEngine):
    """The same for the sequences that are no prefix of another."""

    def plan(self, samples: Samples) -> Schedule:
        return super().plan(leafize(build_trie(samples.sequences), samples))


def chains(sequences: Sequence[np.ndarray]) -> Trie:
    """A trie whose sequences have nothing in common, one after the other."""
    lengths = np.array([len(sequence) for sequence in sequences])
    stop = np.cumsum(lengths)
    start = np.repeat(stop - lengths, lengths)
    row = np.arange(stop[-1])
    return Trie(
        token=np.concatenate(sequences).astype(np.int32),
        parent=np.where(row == start, NO_PARENT, row - 1).astype(np.int32),
        depth=(row - start).astype(np.int32),
        subtree_end=np.repeat(stop, lengths).astype(np.int32),
        tail=(stop - 1).astype(np.int32),
    )


ENGINES: Final = {"leafized": LeafizedEngine, "dense": UnsharedEngine}


def train_once(name: str, seed: int, steps: int) -> dict[str, Any]:
    """One run, in a folder that is thrown away."""
    bindings = [*RUNS[name], f"Train.seed = {seed}", f"Train.steps = {steps}", "Checkpoints.every = 1000"]
    train = load_config(ROOT / "configs/quickstart.gin", bindings)
    run = prepare(train)
    if name in ENGINES:
        run = Run(with_engine(run.learner, name), run.source)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = read_steps(Path(folder), run_training(run, Path(folder), operative_config()))
    return {
        "run": name,
        "seed": seed,
        "steps": len(rows),
        "first": rows[0]["reward_mean"],
        "last_5": float(np.mean([row["reward_mean"] for row in rows[-5:]])),
        "reward": [round(row["reward_mean"], 4) for row in rows],
        "loss": [row["loss"] for row in rows[:COMPARED]],
        "grad_norm": [row["grad_norm"] for row in rows[:COMPARED]],
        "entropy": [row["entropy_mean"] for row in rows[:COMPARED]],
        "seconds": round(time.perf_counter() - began, 1),
        "rows": [row["executed_tokens"] for row in rows],
        "staleness_mean": float(np.mean([row["staleness_mean"] for row in rows])),
        "bindings": bindings,
        "versions": versions(),
    }


def replay_updates(seed: int) -> list[dict[str, Any]]:
    """Times updates on the same batches by all engines in turns, each warm."""
    bindings = [f"Train.seed = {seed}", f"Train.steps = {max(REPLAYED)}", "LiveRollouts.save_every = 5"]
    train = load_config(ROOT / "configs/quickstart.gin", bindings)
    run, found = prepare(train), []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        run_training(run, out, operative_config())
        learners = {"sync": run.learner} | {name: with_engine(run.learner, name) for name in ENGINES}
        states = {name: learner.starting_state() for name, learner in learners.items()}
        for step in REPLAYED:
            batch = make_batch(load_rollouts(out / "rollouts" / f"{step}.npz"), train.objective)
            seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in learners}
            for _ in range(1 + REPEATS):
                for name, learner in learners.items():
                    wall, cpu = time.perf_counter(), time.process_time()
                    planned = learner.plan(batch)
                    states[name], _ = learner.update(
                        states[name], step, planned, None, Watch(learner.train.guards, out)
                    )
                    seconds[name].append((time.process_time() - cpu, time.perf_counter() - wall))
            found += [timing(step, name, seconds) for name in ENGINES]
    return found


def timing(step: int, name: str, seconds: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """The first round compiles and does not count."""
    cpu, wall = np.median(np.divide(seconds[name][1:], seconds["sync"][1:]), axis=0)
    return {
        "step": step,
        "run": name,
        "cpu_ratio": round(float(cpu), 2),
        "wall_ratio": round(float(wall), 2),
        "cpu_seconds": round(float(np.median(seconds[name][1:], axis=0)[0]), 4),
        "repeats": REPEATS,
    }


def with_engine(learner: Learner, name: str) -> Learner:
    """The learner, with an engine that shares less."""
    return replace(learner, engine=ENGINES[name](**vars(learner.engine)))


def compare(results: Sequence[dict[str, Any]]) -> list[str]:
    """Lines that say how the runs without sharing differ from the one with it."""
    found = {(result["run"], result["seed"]): result for result in results}
    lines = []
    for name in ENGINES:
        pairs = [(found[name, s], found["sync", s]) for n, s in found if n == name and ("sync", s) in found]
        if not pairs:
            continue
        worst = {
            field: max(np.abs(np.subtract(a[field], b[field])).max() for a, b in pairs)
            for field in ("reward", "loss", "grad_norm", "entropy")
        }
        worst["reward"] = max(
            np.abs(np.subtract(a["reward"], b["reward"])[:COMPARED]).max() for a, b in pairs
        )
        work = [np.median(np.divide(a["rows"], b["rows"])) for a, b in pairs]
        lines.append(
            f"{name} against sync, {len(pairs)} seeds: first {COMPARED} steps differ by at most "
            + ", ".join(f"{field} {value:.2g}" for field, value in worst.items())
            + f"; rows x{np.median(work):.1f}"
        )
    return lines


def draw(results: Sequence[dict[str, Any]]) -> None:
    """The rewards over steps."""
    series, key = [], []
    for name, colour in zip(RUNS, COLOURS, strict=False):
        curves = [result["reward"] for result in results if result["run"] == name]
        if curves and len({len(curve) for curve in curves}) == 1:
            series += with_range(name, np.array(curves), colour)
            key.append(Key(name, colour))
    picture = chart("Reward, quickstart", "mean of a step's 64 episodes", series, key)
    (ROOT / "docs/pictures/quickstart.svg").write_text(picture.svg(), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=numbers, default=range(3), help="0-2, or one")
    parser.add_argument("--runs", default=",".join([*RUNS, "updates"]), help="with commas")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    chosen = names(args.runs, [*RUNS, "updates"], "--runs")
    absl_logging.set_verbosity(absl_logging.ERROR)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    runs: list[dict[str, Any]] = results.get("runs", [])
    for seed, name in itertools.product(args.seeds, [name for name in chosen if name in RUNS]):
        result = train_once(name, seed, args.steps)
        runs = [old for old in runs if (old["run"], old["seed"]) != (name, seed)] + [result]
        runs.sort(key=lambda r: (list(RUNS).index(r["run"]), r["seed"]))
        write(results | {"runs": runs})
        print(
            f"{name} seed {seed}: reward {result['first']:.3f} to {result['last_5']:.3f} (last five steps), "
            f"{result['seconds']} s"
        )
    results["runs"] = runs
    if "updates" in chosen:
        results["updates"] = replay_updates(args.seeds[0])
        print("\n".join(map(str, results["updates"])))
    write(results)
    draw(runs)
    print("\n".join(compare(runs)))


def write(results: dict[str, list[dict[str, Any]]]) -> None:
    """One run or step a line."""
    parts = (
        f'"{name}": [\n' + ",\n".join(json.dumps(one) for one in rows) + "\n]"
        for name, rows in results.items()
    )
    RESULTS.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
