"""`python -m dta_jax.bench --suite gpu`: what a GPU makes of all this, case by case, into one file.

    python -m dta_jax.bench --suite gpu [--out DIR] [--quick] [--minutes M] [--cases 'back/*']
        [--rollouts FILE.npz]

Cases (`dta_jax.gpu_cases`) run one after the other, each in a process of its own. DIR/gpu.json is written
after each one, and a case that is in it is skipped, so the command can be repeated until everything is done:
it starts no case after M minutes, and a case that was cut short by that is run again. A case that fails is
there with its reason, and the others go on.

`--quick` takes fewer models, methods and runs. `--quick --any-device` runs tiny sizes on whatever device
there is, in this process: it shows that the suite works, and nothing else.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jaxlib

from dta_jax.errors import InputError, RunError, writing
from dta_jax.gpu_cases import SCALES, NotAvailable, case_names, run_case
from dta_jax.rollouts import load_rollouts

NAME: Final = "gpu"
FILE: Final = "gpu.json"
DONE, FAILED, NOT_AVAILABLE = "done", "failed", "not available"
MEMORY_SHARE: Final = "0.92"  # of the GPU, for the process of a case; this one takes little
PACKED_OVER: Final = "branch"  # what the gain of `packed` is told against


def is_meant(arguments: Sequence[str]) -> bool:
    """Whether the benchmark's command line asks for a suite."""
    return any(word == "--suite" or word.startswith("--suite=") for word in arguments)


def main(arguments: Sequence[str]) -> None:
    """The command."""
    args = _parser().parse_args(arguments)
    if args.any_device and not args.quick:
        raise InputError("--any-device", "value", expected="--quick beside it", actual="none")
    if not args.minutes > 0:
        raise InputError("--minutes", "value", expected="above 0", actual=args.minutes)
    if args.rollouts is not None:
        load_rollouts(args.rollouts)  # refused here, and not by every case
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # memory is for the cases' processes
    if jax.default_backend() != "gpu" and not args.any_device:
        raise InputError(
            "--suite gpu",
            "device",
            expected="an NVIDIA GPU",
            actual=jax.default_backend(),
            hint="--quick --any-device shows on any machine that the suite works",
        )
    scale = "tiny" if args.any_device else "quick" if args.quick else "full"
    names = [name for name in case_names(SCALES[scale]) if fnmatch.fnmatchcase(name, args.cases)]
    if not names:
        raise InputError("--cases", "pattern", expected="cases of that name", actual=repr(args.cases))
    results = Results(args.out / FILE, scale)
    stop = time.monotonic() + 60 * args.minutes
    for name in names:
        if name in results.cases:
            continue
        left = stop - time.monotonic()
        if left <= 0:
            break
        found = _here(name, scale, args.rollouts) if args.any_device else _apart(name, args, scale, left)
        if found["status"] == FAILED and found.pop("cut_short", False) and left < 0.9 * 60 * args.minutes:
            break  # it had not the whole time
        results.add(name, found)
        print(_line(name, found), flush=True)
    missing = [name for name in names if name not in results.cases]
    for line in results.summary_lines():
        print(line)
    print(f"{len(missing)} cases left: run the same command again" if missing else f"all in {results.file}")


class Results:
    """The file of results, with what was in it before.

    Args:
      file: where it is, or will be.
      scale: the name of the cases' scale.

    Raises:
      InputError: it holds results of another scale or another GPU.
    """

    def __init__(self, file: Path, scale: str):
        self.file, self.scale = file, scale
        self.cases: dict[str, dict[str, Any]] = {}
        if file.exists():
            stored = json.loads(file.read_text(encoding="utf-8"))
            for field, mine in (("scale", scale), ("device", jax.devices()[0].device_kind)):
                if stored[field] != mine:
                    hint = "take another --out"
                    raise InputError(file, field, expected=mine, actual=stored[field], hint=hint)
            self.cases = stored["cases"]

    def add(self, name: str, found: Mapping[str, Any]) -> None:
        """Takes a case's result, and writes all of them."""
        self.cases[name] = dict(found) | versions()
        stored = {"scale": self.scale, "device": jax.devices()[0].device_kind}
        stored |= {"summary": summary(self.cases), "cases": self.cases}
        partial = self.file.with_suffix(".partial")
        with writing(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
            partial.replace(self.file)

    def summary_lines(self) -> list[str]:
        """The summary as text."""
        return [f"{name:58}{value:8.3f}" for name, value in summary(self.cases).items()]


def summary(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """What the figures come to, of the cases that are done.

    Returns:
      Attention's rate over cuDNN's, per direction; MFU of BACK steps: useful FLOP/s over the measured matmul
      rate; how many times as fast as one branch at a time `packed` is.
    """
    done = {name: case["figures"] for name, case in cases.items() if case["status"] == DONE}
    found = {}
    if "attention/cudnn" in done and "attention/pallas" in done:
        for direction in ("forward", "backward"):
            ours, theirs = (
                done[f"attention/{which}"][direction]["flops_per_second"] for which in ("pallas", "cudnn")
            )
            found[f"attention/pallas {direction}, rate over cuDNN's"] = ours / theirs
    for name, figures in done.items():
        kind, *rest = name.split("/")
        if kind == "back" and "rate/matmul" in done:
            found[f"{name} MFU"] = figures["flops_per_second"] / done["rate/matmul"]["flops_per_second"]
        if (
            kind == "methods"
            and rest[1] == "packed"
            and (other := done.get(f"methods/{rest[0]}/{PACKED_OVER}"))
        ):
            found[f"{name}, times as fast as {PACKED_OVER}"] = other["seconds"] / figures["seconds"]
    return found


def versions() -> dict[str, Any]:
    """Of what a result depends on: driver, JAX, this code."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform_version": " ".join(device.client.platform_version.split()),
        "driver": _told("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": _told(
            "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"
        ),
    }


def _told(*command: str) -> str | None:
    """The first line that a command prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _here(name: str, scale: str, rollouts: str | None) -> dict[str, Any]:
    try:
        return {"status": DONE, "figures": run_case(name, SCALES[scale], rollouts)}
    except NotAvailable as missing:
        return {"status": NOT_AVAILABLE, "reason": str(missing)}
    except (InputError, RunError) as error:
        return {"status": FAILED, "reason": str(error)}


def _apart(name: str, args: argparse.Namespace, scale: str, seconds: float) -> dict[str, Any]:
    """A case in its own process."""
    command = [sys.executable, "-m", "dta_jax.gpu_cases", name, scale]
    command += [] if args.rollouts is None else [args.rollouts]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str((args.out / "compiled").absolute()))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"status": FAILED, "reason": f"not done after {seconds:.0f} s", "cut_short": True}
    if done.returncode == 0:
        return {"status": DONE, "figures": json.loads(done.stdout.splitlines()[-1])}
    said = [line for line in done.stderr.splitlines() if line.strip()] or [""]
    return {"status": FAILED, "reason": f"status {done.returncode}: {said[-1][:500]}"}


def _line(name: str, found: Mapping[str, Any]) -> str:
    told = found.get("reason")
    if told is None:
        figures = found["figures"]
        told = "  ".join(
            f"{key} {figures[key]:.4g}" for key in ("seconds", "flops_per_second", "bound") if key in figures
        )
    return f"{found['status']:14}{name:50}{told}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dta_jax.bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--suite", choices=(NAME,), required=True)
    add(
        "--out",
        type=Path,
        default=Path("runs/gpu_suite"),
        metavar="DIR",
        help="where gpu.json is, or will be",
    )
    add("--quick", action="store_true", help="fewer models, methods and runs")
    add("--any-device", action="store_true", help="tiny sizes on any device, to see that the suite works")
    add("--minutes", type=float, default=9, metavar="M", help="after which no case is started (9)")
    add(
        "--rollouts", metavar="FILE.npz", help="recorded rollouts for methods/ cases; default: generated ones"
    )
    add("--cases", default="*", metavar="PATTERN", help="only these, like 'back/*'")
    return parser
