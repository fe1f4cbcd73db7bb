"""PPO, GRPO, RLOO, GSPO and DAPO learn a bandit and a multi-turn game, from random weights.

    python benchmarks/learning.py [--env bandit,...] [--algorithms PPO,...] [--seeds 0-2] [--steps N]

Each algorithm is the lines of its row in `docs/algorithms.md`, put over the environment's config, and the
lines of `ADDED`. Learning rates fall to a tenth. Runs are synchronous. A run that was made before under the
same name is replaced in

    benchmarks/results/learning.json          one object per run
        algorithm, env, seed, steps           what was run; `bindings` are its lines, `versions` the packages'
        reward                                mean over each step's batch; DAPO's batches are filtered
        last_5                                mean of the last five of them
        evaluation                            [step, mean reward] of 64 episodes that nobody trains on
    docs/pictures/learning_ENV.svg            rewards: mean over seeds, pale lines for the range
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from absl import logging as absl_logging

from dta_jax.config import load_config, operative_config
from dta_jax.curves import Key, Series, chart
from dta_jax.errors import InputError, run_command
from dta_jax.loop import run_training
from dta_jax.metrics import read_steps
from dta_jax.picture import blend
from dta_jax.prepare import prepare
from dta_jax.report import COLOURS

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks/results/learning.json"
LAST: Final = 5  # steps whose mean reward counts as reached
EVALUATE_EVERY: Final = 5

ENVIRONMENTS: Final[dict[str, tuple[str, int, tuple[str, ...]]]] = {
    "bandit": ("configs/bandit.gin", 40, ("Evaluate.trials = 16",)),
    "treasure_hunt": ("configs/quickstart.gin", 50, ("AdamW.b2 = 0.999",)),
}
"""Config, steps, and bindings: 64 episodes to evaluate on, sixteen or one for each task."""

TWO_UPDATES: Final = "Train.minibatches = 2"  # ratios of the second differ from 1, so that clips do something
ADDED: Final[dict[str, tuple[str, ...]]] = {
    "PPO": ("Train.advantages = @GAE()", "GAE.whiten = False", "Train.critic = @Critic()", TWO_UPDATES),
    "GRPO": (TWO_UPDATES,),
    "RLOO": (),
    "GSPO": ("Aggregate.unit = 'rollout'", TWO_UPDATES),
    "DAPO": ("Collect.skip_equal = True", "Collect.max_resampled = 8", TWO_UPDATES),
}
"""What an algorithm needs besides its table row."""


def table_lines(algorithm: str) -> list[str]:
    """The config lines of an algorithm's row in `docs/algorithms.md`."""
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {algorithm} \| ([^|]*) \|", text, re.MULTILINE)
    assert row is not None, algorithm
    return re.findall(r"`([^`]+)`", row[1])


def run(algorithm: str, env: str, seed: int, steps: int | None) -> dict[str, Any]:
    """Trains once, in a folder that is thrown away."""
    config, usual_steps, own = ENVIRONMENTS[env]
    steps = steps or usual_steps
    updates = steps * (2 if TWO_UPDATES in ADDED[algorithm] else 1)
    bindings = [*own, *table_lines(algorithm), *ADDED[algorithm], f"Train.steps = {steps}"]
    bindings += [f"AdamW.decay_steps = {updates}"]
    bindings += ["Train.evaluate = @Evaluate()", f"Train.evaluate_every = {EVALUATE_EVERY}"]
    train = load_config(ROOT / config, [*bindings, f"Train.seed = {seed}", "Checkpoints.every = 1000"])
    with tempfile.TemporaryDirectory() as folder:
        rows = read_steps(Path(folder), run_training(prepare(train), Path(folder), operative_config()))
    return {
        "algorithm": algorithm,
        "env": env,
        "seed": seed,
        "steps": len(rows),
        "last_5": round(float(np.mean([row["reward_mean"] for row in rows[-LAST:]])), 4),
        "reward": [round(row["reward_mean"], 4) for row in rows],
        "evaluation": [
            [row["step"], round(row["eval_reward_mean"], 4)] for row in rows if "eval_reward_mean" in row
        ],
        "bindings": bindings,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that compute."""
    packages = ("jax", "jaxlib", "numpy", "optax")
    return {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in packages}


def read_results(path: Path) -> list[dict[str, Any]]:
    """The runs of earlier calls."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write_results(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """One run a line."""
    lines = ",\n".join(json.dumps(result) for result in results)
    new = path.with_suffix(".new")
    new.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    new.replace(path)


def merge(results: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The results with a run that replaces the one of its name."""

    def name(result: dict[str, Any]) -> tuple[int, int, int]:
        env, algorithm = list(ENVIRONMENTS).index(result["env"]), list(ADDED).index(result["algorithm"])
        return env, algorithm, result["seed"]

    return sorted([*(old for old in results if name(old) != name(new)), new], key=name)


def draw(results: Sequence[dict[str, Any]], env: str) -> None:
    """The picture of an environment: rewards of the runs that are as long as the longest."""
    series, key = [], []
    found = [result for result in results if result["env"] == env]
    longest = max(result["steps"] for result in found)
    for algorithm, colour in zip(ADDED, COLOURS, strict=False):
        runs = [
            result["reward"]
            for result in found
            if result["algorithm"] == algorithm and result["steps"] == longest
        ]
        if runs:
            series += with_range(algorithm, np.array(runs), colour)
            key.append(Key(f"{algorithm} (filtered)" if algorithm == "DAPO" else algorithm, colour))
    stem = ROOT / f"docs/pictures/learning_{env}.svg"
    picture = chart(f"Reward, {env.replace('_', ' ')}", "mean of a step's batch", series, key)
    stem.write_text(picture.svg(), encoding="utf-8")


def with_range(label: str, curves: np.ndarray, colour: str) -> list[Series]:
    """Pale lines for the lowest and the highest seed, then the mean; `curves` float[seeds, steps]."""
    x = np.arange(1.0, curves.shape[1] + 1)
    pale = blend([colour, "#ffffff"], 0.7)
    return [
        Series(f"{label}, lowest", x, curves.min(axis=0), pale),
        Series(f"{label}, highest", x, curves.max(axis=0), pale),
        Series(label, x, curves.mean(axis=0), colour),
    ]


def names(text: str, allowed: Sequence[str], flag: str) -> list[str]:
    """The parts of a list with commas.

    Raises:
      InputError: one of them is not allowed.
    """
    found = text.split(",")
    for name in found:
        if name not in allowed:
            raise InputError(flag, "name", expected=f"one of {', '.join(allowed)}", actual=repr(name))
    return found


def numbers(text: str) -> range:
    """`3` or `0-2`."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default=",".join(ENVIRONMENTS), help="with commas")
    parser.add_argument("--algorithms", default=",".join(ADDED), help="with commas")
    parser.add_argument("--seeds", type=numbers, default=range(3), help="0-2, or one")
    parser.add_argument("--steps", type=int, help="default: 40 for the bandit, 50 for the game")
    args = parser.parse_args()
    environments = names(args.env, list(ENVIRONMENTS), "--env")
    algorithms = names(args.algorithms, list(ADDED), "--algorithms")
    absl_logging.set_verbosity(absl_logging.ERROR)
    for env in environments:
        for algorithm in algorithms:
            for seed in args.seeds:
                result = run(algorithm, env, seed, args.steps)
                results = merge(read_results(RESULTS), result)
                write_results(RESULTS, results)
                end = result["evaluation"][-1][1]
                print(f"{env} {algorithm} seed {seed}: last 5 steps {result['last_5']}, evaluated {end}")
        draw(read_results(RESULTS), env)


if __name__ == "__main__":
    run_command(main)
