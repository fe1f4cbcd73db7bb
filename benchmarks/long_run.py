"""Whether a long run grows: memory, threads, open files and compilations of the quickstart, step after step.

    python benchmarks/long_run.py --steps 2000 --out RESULTS.json

The run is a process of its own, looked at from outside twice a second. Means over its last quarter of steps
are compared with those over its second quarter. Two cores: 5 to 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dta_jax.errors import RunError, run_command
from dta_jax.metrics import read_metrics

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.gin"


def look_at(process: int) -> dict[str, int]:
    """Resident memory (KiB), threads and open files of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "rss_kib": int(fields["VmRSS"].split()[0]),
        "threads": int(fields["Threads"]),
        "files": len(os.listdir(f"/proc/{process}/fd")),
    }


def watch(process: subprocess.Popen, metrics: Path) -> list[dict[str, int]]:
    """Looks at the process until it ends, with the steps that are done."""
    seen = []
    while process.poll() is None:
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        try:
            seen.append({"step": step} | look_at(process.pid))
        except (OSError, KeyError):  # it ends just now
            break
        time.sleep(0.5)
    if process.wait() != 0:
        raise RunError(f"the run ended with status {process.returncode}")
    return seen


def quarter(seen: list[dict[str, int]], steps: int, which: int) -> dict[str, float]:
    """Means over one quarter of the steps, from 0."""
    low, high = steps * which // 4, steps * (which + 1) // 4
    chosen = [x for x in seen if low <= x["step"] < high]
    return {name: float(np.mean([x[name] for x in chosen])) for name in ("rss_kib", "threads", "files")}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="of the run (default: %(default)s)")
    parser.add_argument("--gin", action="append", default=[], help="more bindings")
    parser.add_argument("--out", type=Path, help="where the figures go")
    args = parser.parse_args()
    bindings = [f"Train.steps = {args.steps}", *args.gin]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "dta_jax.train", str(CONFIG), "--out", str(out), "--quiet"]
        command += [word for binding in bindings for word in ("--gin", binding)]
        seen = watch(subprocess.Popen(command), out / "metrics.jsonl")
        rows = read_metrics(out / "metrics.jsonl")
    second, last = quarter(seen, args.steps, 1), quarter(seen, args.steps, 3)
    compiling = [row["step"] for row in rows if row.get("compile_seconds", 0) > 0]
    found: dict[str, Any] = {
        "steps": args.steps,
        "bindings": bindings,
        "jax": jax.__version__,
        "second_quarter": second,
        "last_quarter": last,
        "growth": {name: last[name] / second[name] - 1 for name in second},
        "steps_that_compiled": compiling,
        "reward_mean_of_the_last_100": float(np.mean([row["reward_mean"] for row in rows[-100:]])),
    }
    text = json.dumps(found, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    run_command(main)
