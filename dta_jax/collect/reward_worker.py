"""The process in which a reward function runs; `dta_jax.collect.rewards` starts it.

Reads one JSON object per line from stdin, answers each with one on stdout. The first names the function:
{"function": "module:name", "memory_bytes": n} -> {"ready": true}. Then {"arguments": [...]} -> {"reward": x},
or {"error": "..."}. What the function prints goes nowhere.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves until stdin ends."""
    requests, replies = (
        os.fdopen(os.dup(0), "r", encoding="utf-8"),
        os.fdopen(os.dup(1), "w", encoding="utf-8"),
    )
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    first = json.loads(requests.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_AS, (first["memory_bytes"], first["memory_bytes"]))

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    try:
        module, _, name = first["function"].partition(":")
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:  # whatever a module raises when it is imported
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    reply({"ready": True})
    for line in requests:
        try:
            reply({"reward": float(function(*json.loads(line)["arguments"]))})  # type: ignore[operator]
        except Exception as error:  # whatever a reward function raises
            reply({"error": f"{type(error).__name__}: {error}"[:2000]})


if __name__ == "__main__":
    main()
