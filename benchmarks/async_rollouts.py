"""Episodes per second with and without running ahead, on an environment whose latency is log-normal.

    python benchmarks/async_rollouts.py [--out FILE]       about 4 minutes, hardly any processor time

Environment, engine and trainer wait instead of working: every turn of an episode takes a log-normal time of
mean `--turn-seconds`, every update `--update-seconds`. So what is measured is the collector alone: how much
of the waiting overlaps. All settings make the same number of updates with the same batches in size, one
after the other, `--repeat` times. One JSON object per setting:

    max_staleness, on_stale          the collector's
    max_concurrent                   episodes at a time: those of one batch, or as many as staleness allows
    episodes_per_second              median over the repeats
    speedup                          over max_staleness = 0, median of the ratios within a repeat
    waited                           share of the time that the trainer waited for a batch
    staleness_mean, staleness_max    versions, over all tokens
    stale_dropped                    groups that came too late, in all repeats

Expected: at least 1.5 times as many episodes per second with max_staleness = 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dta_jax.collect.loop import Collector
from dta_jax.collect.order import derived_seed
from dta_jax.collect.settings import Collect, OnStale
from dta_jax.envs.protocol import Answer, Observation, Step
from dta_jax.errors import run_command
from dta_jax.generation.protocol import Completion, Sampling


@dataclass(frozen=True)
class SlowEnvironment:
    """Episodes of some turns that take their time."""

    turn_seconds: float
    sigma: float
    turns: int
    num_tasks: int = 64

    def episode(self, task: int, seed: int) -> SlowEpisode:
        return SlowEpisode(self, task, seed)


class SlowEpisode:
    def __init__(self, environment: SlowEnvironment, task: int, seed: int):
        self._environment, self._task, self._turns = environment, task, 0
        self._rng = np.random.default_rng(seed)

    async def start(self) -> Step:
        return Step(Observation(np.array([self._task], np.int32)))

    async def step(self, answer: Answer) -> Step:
        e = self._environment
        await asyncio.sleep(self._rng.lognormal(np.log(e.turn_seconds) - e.sigma**2 / 2, e.sigma))
        self._turns += 1
        if self._turns < e.turns:
            return Step(Observation(np.array([1], np.int32)))
        return Step(None, final_reward=1.0, stop_reason="done")

    async def close(self) -> None:
        pass


class EchoGenerator:
    """Answers at once."""

    version = 0

    async def generate(self, prompt: np.ndarray, sampling: Sampling, *, seed: int) -> Completion:
        token = np.array([derived_seed(seed) % 100], np.int32)
        return Completion(token, np.zeros(1, np.float32), np.full(1, self.version, np.int32), "stop")

    async def update_weights(self, params: Any, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass


def measure(
    args: argparse.Namespace, staleness: int, on_stale: OnStale, concurrent: int, seed: int
) -> dict[str, float]:
    """One run; the first batch, for which nothing can have run ahead, counts too."""
    environment = SlowEnvironment(args.turn_seconds, args.sigma, args.turns)
    settings = Collect(
        group_size=args.group_size,
        max_staleness=staleness,
        on_stale=on_stale,
        max_concurrent=concurrent,
    )
    rows = []
    began = time.perf_counter()
    with Collector(
        environment, EchoGenerator(), settings, seed=seed, chat=None, batch_groups=args.groups
    ) as collector:
        for step in range(1, args.steps + 1):
            rows.append(collector.batch(step).metrics)
            time.sleep(args.update_seconds)
            collector.publish({}, step)
        seconds = time.perf_counter() - began
    return {
        "episodes_per_second": sum(row["episodes"] for row in rows) / seconds,
        "waited": sum(row["wait_seconds"] for row in rows) / seconds,
        "staleness_mean": float(np.mean([row["staleness_mean"] for row in rows])),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "stale_dropped": sum(row["groups_stale_dropped"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-seconds", type=float, default=0.05)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--update-seconds", type=float, default=0.15)
    parser.add_argument("--staleness", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    one_batch = args.groups * args.group_size
    ways: tuple[OnStale, ...] = ("drop", "wait")
    cases: list[tuple[int, OnStale, int]] = [(0, "drop", one_batch)]
    for n in args.staleness:
        cases += [(n, how, concurrent) for how in ways for concurrent in (one_batch, (n + 1) * one_batch)]
    runs: dict[tuple[int, OnStale, int], list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(args.repeat):
        for case in cases:
            runs[case].append(measure(args, *case, seed=repeat))
    synchronous = [run["episodes_per_second"] for run in runs[cases[0]]]
    results = []
    for (staleness, on_stale, concurrent), found in runs.items():
        rates = [run["episodes_per_second"] for run in found]
        results.append(
            {
                "max_staleness": staleness,
                "on_stale": on_stale,
                "max_concurrent": concurrent,
                "steps": args.steps,
                "episodes_per_step": one_batch,
                "turns": args.turns,
                "turn_seconds": args.turn_seconds,
                "sigma": args.sigma,
                "update_seconds": args.update_seconds,
                "episodes_per_second": round(float(np.median(rates)), 1),
                "speedup": round(float(np.median(np.divide(rates, synchronous))), 2),
                "speedups": [round(float(x), 2) for x in np.divide(rates, synchronous)],
                "waited": round(float(np.median([run["waited"] for run in found])), 3),
                "staleness_mean": round(float(np.mean([run["staleness_mean"] for run in found])), 2),
                "staleness_max": max(run["staleness_max"] for run in found),
                "stale_dropped": sum(run["stale_dropped"] for run in found),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    if args.out is not None:
        args.out.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
