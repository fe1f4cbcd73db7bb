"""Runs every shell command that the given Markdown files show: the blocks fenced as ```bash.

Commands run in a scratch folder that holds links to the repository's configs and a small recorded file,
ROLLOUTS.npz, which the texts use as the name of the reader's own. Commands that install are taken as
done (they made the environment this runs in). What cannot run everywhere is fenced as ```text.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dta_jax.rollouts import save_rollouts
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts

ROOT = Path(__file__).resolve().parent.parent
INSTALLS = re.compile(r"^(git clone|cd |pip install|python3? -m venv|\. |source )")
TESTS = re.compile(r"^python -m pytest")  # a job of its own
TIMEOUT = 600


def commands(text: str) -> list[str]:
    """Commands of the bash blocks, one per line; lines ending in a backslash are joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in line.split("#")[0].split("&&")]
    return [part for part in parts if part and not INSTALLS.match(part) and not TESTS.match(part)]


def main() -> int:
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("configs", "benchmarks", "notebooks"):
            os.symlink(ROOT / name, Path(scratch, name))
        spec = SyntheticRollouts(tasks=4, trials=4, system_tokens=64, completion_tokens=12)
        save_rollouts(Path(scratch, "ROLLOUTS.npz"), generate_rollouts(spec))
        for file in sys.argv[1:]:
            for command in commands(Path(file).read_text()):
                if command in seen:
                    continue
                seen.add(command)
                start = time.monotonic()
                done = subprocess.run(
                    ["bash", "-c", command], cwd=scratch, timeout=TIMEOUT, capture_output=True, text=True
                )
                print(f"{file}: {command}: {time.monotonic() - start:.0f} s, status {done.returncode}")
                if done.returncode:
                    print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
                    return 1
    print(f"{len(seen)} commands ran")
    return 0 if seen else 1


if __name__ == "__main__":
    sys.exit(main())
