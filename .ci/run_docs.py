"""Runs what the given Markdown files show: commands in blocks fenced as ```bash, and ```python blocks whole.

Commands run in a scratch folder that holds links to the repository's configs and a small recorded file,
ROLLOUTS.npz, which the texts use as the name of the reader's own. Commands that install are taken as
done (they made the environment this runs in). A block with a title (```python title="my_game.py") is a file
that the page's commands need: it is written there first. What cannot run everywhere is fenced as ```text, and
fragments of Python that need names from elsewhere as ```py.
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


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def files(text: str) -> dict[str, str]:
    """Blocks that are files, by name."""
    return dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', text, re.DOTALL | re.MULTILINE))


def commands(text: str) -> list[list[str]]:
    """Arguments of what is to run: the bash blocks' commands, one per line, and the Python blocks."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in line.split(" #")[0].split("&&")]
    shell = [part for part in parts if part and not INSTALLS.match(part) and not TESTS.match(part)]
    return [["bash", "-c", part] for part in shell] + [
        [sys.executable, "-c", block] for block in blocks(text, "python")
    ]


def main() -> int:
    seen: list[list[str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("configs", "benchmarks", "notebooks"):
            os.symlink(ROOT / name, Path(scratch, name))
        spec = SyntheticRollouts(tasks=4, trials=4, system_tokens=64, completion_tokens=12)
        save_rollouts(Path(scratch, "ROLLOUTS.npz"), generate_rollouts(spec))
        for file in sys.argv[1:]:
            text = Path(file).read_text()
            for name, content in files(text).items():
                Path(scratch, name).write_text(content)
            for command in commands(text):
                if command in seen:
                    continue
                seen.append(command)
                start = time.monotonic()
                done = subprocess.run(command, cwd=scratch, timeout=TIMEOUT, capture_output=True, text=True)
                name, seconds = command[-1].splitlines()[0], time.monotonic() - start
                print(f"{file}: {name}: {seconds:.0f} s, status {done.returncode}", flush=True)
                if done.returncode:
                    print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
                    return 1
    print(f"{len(seen)} commands ran")
    return 0 if seen else 1


if __name__ == "__main__":
    sys.exit(main())
