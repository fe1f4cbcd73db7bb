"""One of two processes with two CPU devices each; started by `test_live_hosts`.

live OUT STEPS      the run of `tests.test_live` on 4 x 1; every process says that it ended
apart OUT STEPS     on three devices; the second of process 0 samples, ahead of the trainer
fail OUT            its engine fails; every process says what it was told
first               results of process 0 of all sizes, in all
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 2)
# Only process 0 writes it. A collective gives up when the other compiles for 30 s what this one has read.
jax.config.update("jax_enable_compilation_cache", False)

from dta_jax.errors import RunError  # noqa: E402
from dta_jax.first_process import on_first  # noqa: E402
from dta_jax.generation.local import LocalGenerator  # noqa: E402
from dta_jax.generation.protocol import GenerationError  # noqa: E402
from dta_jax.hosts import Hosts, connect, guarded  # noqa: E402
from dta_jax.loop import run_training  # noqa: E402
from dta_jax.metrics import read_steps  # noqa: E402
from dta_jax.prepare import prepare  # noqa: E402
from dta_jax.sharding import MeshShape  # noqa: E402
from tests.mesh.runs import on_devices_apart  # noqa: E402
from tests.test_live import AHEAD, SYNCHRONOUS, collecting  # noqa: E402


def main() -> None:
    connect(Hosts.from_environment())
    what, mesh = sys.argv[1], MeshShape(4, 1)
    if what == "first":
        for size in (0, 1, 5000, 100_000):
            assert on_first(lambda size=size: [jax.process_index(), "x" * size]) == [0, "x" * size]
        return
    if what == "fail":
        LocalGenerator.generate = failing  # type: ignore[method-assign]
        try:
            run(dataclasses.replace(collecting(max_rejected=1, retries=0), mesh=mesh))
        except RunError as error:
            print(error, file=sys.stderr)
        return
    if what == "apart":
        rows = run(on_devices_apart(AHEAD, (1,), MeshShape(3, 1)))
        assert max(row["staleness_max"] for row in rows) <= 1
        assert all(abs(row["ratio_max"] - 1) < 1e-4 for row in rows[:1])
        return
    run(dataclasses.replace(SYNCHRONOUS, mesh=mesh))


async def failing(self: LocalGenerator, *args: object, **options: object) -> None:
    raise GenerationError("the engine is gone")


def run(train: object) -> list[dict]:
    if len(sys.argv) > 3:
        train = dataclasses.replace(train, steps=int(sys.argv[3]))  # type: ignore[type-var]
    out = Path(sys.argv[2])
    return read_steps(out, run_training(prepare(train), out, "Train.seed = 0\n"))  # type: ignore[arg-type]


guarded(main)
