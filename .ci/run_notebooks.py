"""Runs notebooks from top to bottom, two at a time, in fresh kernels: python .ci/run_notebooks.py [FILE...]

Without files, all of notebooks/. Nothing is written: outputs stay out of the repository. `DTA_NOTEBOOK_STEPS`
makes the training notebook short.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds for one cell


def run(path: Path) -> str:
    """Runs one notebook; returns what failed, or nothing."""
    notebook = nbformat.read(path, as_version=4)
    start, error = time.monotonic(), ""
    try:
        where = {"metadata": {"path": str(path.parent)}}
        NotebookClient(notebook, timeout=TIMEOUT, resources=where, startup_timeout=TIMEOUT).execute()
    except CellExecutionError as failed:
        error = str(failed)
    print(f"{path.name}: {time.monotonic() - start:.0f} s{', failed' if error else ''}", flush=True)
    return error


def main() -> int:
    os.environ.setdefault("DTA_NOTEBOOK_STEPS", "3")
    paths = [Path(name).resolve() for name in sys.argv[1:]] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    with ThreadPoolExecutor(2) as pool:
        errors = [error for error in pool.map(run, paths) if error]
    print(*errors, sep="\n")
    return 1 if errors or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
