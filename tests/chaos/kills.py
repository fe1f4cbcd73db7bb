"""Kills a run with SIGKILL at random moments, takes it up again, and compares with a run left alone.

    python -m tests.chaos.kills --kills 50 [--kind recorded|live] [--seed 0] [--folder DIR]

Every step is saved, so kills often come while a checkpoint is being written. At the end all losses, and the
fingerprints of every array of the last checkpoint, must be those of the run that nobody killed. Each kill
costs a start of the program.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dta_jax.metrics import read_metrics

ROOT = Path(__file__).parents[2]
STEPS = 24
COMMON = (
    f"Train.steps = {STEPS}",
    "Checkpoints.every = 1",
    "Checkpoints.keep = 3",
    "Planner.chunk_size = 64",
    "Qwen3Config.hidden_size = 32",
    "Qwen3Config.num_hidden_layers = 1",
    "Qwen3Config.num_attention_heads = 2",
    "Qwen3Config.num_key_value_heads = 1",
    "Qwen3Config.head_dim = 16",
    "Qwen3Config.intermediate_size = 48",
)
KINDS = {
    "recorded": ("offline.gin", ("SyntheticRollouts.system_tokens = 32", "SyntheticRollouts.turns = 2")),
    "live": ("quickstart.gin", ("Train.batch_groups = 2", "Collect.group_size = 4")),
}


@dataclass(frozen=True)
class Ended:
    """What is left of a run.

    Attributes:
      rows: its metrics, without times.
      arrays: dtype, shape and fingerprint of the last checkpoint's arrays.
    """

    rows: list[dict[str, Any]]
    arrays: dict[str, Any]


def command(kind: str, out: Path) -> list[str]:
    """The command of a run."""
    config, own = KINDS[kind]
    bindings = [word for binding in (*COMMON, *own) for word in ("--gin", binding)]
    return [
        sys.executable,
        "-m",
        "dta_jax.train",
        str(ROOT / "configs" / config),
        *bindings,
        "--out",
        str(out),
    ]


def start(kind: str, out: Path, log: Path) -> subprocess.Popen:
    """Starts a run; what it says goes into `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(command(kind, out), cwd=ROOT, stdout=file, stderr=file)


def finish(kind: str, out: Path, log: Path) -> None:
    """Runs to the end.

    Raises:
      RuntimeError: it ends in an error.
    """
    status = start(kind, out, log).wait()
    if status != 0:
        raise RuntimeError(f"status {status}: {log.read_text(errors='replace')[-3000:]}")


def steps_done(out: Path) -> int:
    """The rows of metrics that are there."""
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_once(kind: str, out: Path, log: Path, rng: random.Random) -> bool:
    """Starts a run and kills it; whether it was still running.

    One in five is killed while it starts, the others a little after they came further than before.
    """
    process, before = start(kind, out, log), steps_done(out)
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0, 5))
    else:
        while process.poll() is None and steps_done(out) <= before:  # rows that were not saved are dropped
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.5))
    running = process.poll() is None
    process.kill()
    status = process.wait()
    if status not in (0, -signal.SIGKILL):
        raise RuntimeError(f"status {status}: {log.read_text(errors='replace')[-3000:]}")
    return running


def ended(out: Path) -> Ended:
    """What a finished run left."""
    rows = read_metrics(out / "metrics.jsonl")
    timeless = [{k: v for k, v in row.items() if "seconds" not in k and "_per_" not in k} for row in rows]
    last = max((out / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    return Ended(timeless, json.loads((last / "run" / "metadata").read_text())["arrays"])


def killed_often(kind: str, kills: int, seed: int, folder: Path) -> int:
    """Kills runs until `kills` of them died; raises AssertionError if anything differs from a run left alone.

    A run that comes to its last step is begun anew in another folder, and compared as well.

    Returns:
      How many runs came to their end and were compared.
    """
    rng, log = random.Random(seed), folder / "log.txt"
    finish(kind, folder / "alone", log)
    alone, died, compared = ended(folder / "alone"), 0, 0
    while died < kills or not compared:
        out = folder / f"killed-{compared}"
        while died < kills and steps_done(out) < STEPS:
            if kill_once(kind, out, log, rng):
                died += 1
                print(f"kill {died}: step {steps_done(out)} of {STEPS}", flush=True)
        finish(kind, out, log)
        found = ended(out)
        assert found.rows == alone.rows, "metrics differ"
        assert found.arrays == alone.arrays, "weights differ"
        compared += 1
    return compared


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="how many runs die (default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, default="recorded", help="where rollouts come from")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="where the runs go; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        compared = killed_often(args.kind, args.kills, args.seed, folder)
    print(
        f"{args.kills} kills ({args.kind}): {compared} runs ended as the run that nobody killed, bit for bit"
    )


if __name__ == "__main__":
    main()
