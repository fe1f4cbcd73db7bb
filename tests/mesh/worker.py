"""One of two processes with two CPU devices each; started by `test_hosts`.

gradient OUT  the shared batch's gradient and one update on 2 x 2; process 0 saves them to OUT
train OUT     the run of `test_train` on 2 x 2
die PROCESS   that process is killed between two steps
stop OUT      the same run as `train`, without end
stop-twice    waits for a signal, and then for another
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 2)

from dta_jax.errors import run_command  # noqa: E402
from dta_jax.first_process import on_first  # noqa: E402
from dta_jax.hosts import Hosts, connect, guarded  # noqa: E402
from dta_jax.mesh_grad import everywhere  # noqa: E402
from dta_jax.optimizer import make_optimizer  # noqa: E402
from dta_jax.settings import AdamW  # noqa: E402
from dta_jax.sharding import MeshShape  # noqa: E402
from dta_jax.signals import Stopped, StopSignals  # noqa: E402
from dta_jax.zero import ShardedOptimizer, State  # noqa: E402
from tests.mesh.runs import UNTIED, biased_and_shaken, run_mesh  # noqa: E402
from tests.mesh.test_train import STEPS, train_on  # noqa: E402
from tests.trees import random_samples  # noqa: E402

SHAPE = "data=2,tensor=2"


def main() -> None:
    connect(Hosts.from_environment())
    assert jax.process_count() == 2
    assert jax.device_count() == 4
    if sys.argv[1] in ("train", "stop"):
        steps = STEPS if sys.argv[1] == "train" else 100_000
        train_on(MeshShape.parse(SHAPE), steps, Path(sys.argv[2]))
        return
    if sys.argv[1] == "stop-twice":
        wait_for_signals()
    model, start = biased_and_shaken(**UNTIED)
    got = run_mesh(SHAPE, model, start, random_samples(3))
    if sys.argv[1] == "die":
        loss = got.loss
        if jax.process_index() == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            assert run_mesh(SHAPE, model, start, random_samples(3)).loss == loss
        return
    sharded = ShardedOptimizer.on(MeshShape.parse(SHAPE).make(), model, make_optimizer(AdamW()))
    master = sharded.place(start)
    state = sharded.update(State(master, sharded.init(master)), got.grads)
    found = {"loss": got.loss, "logp": got.logp}
    for name, tree in (("grads", got.grads), ("params", state.params)):
        found |= {name + jax.tree_util.keystr(p): everywhere(a) for p, a in jax.tree.leaves_with_path(tree)}
    if jax.process_index() == 0:
        np.savez(sys.argv[2], **found)


def wait_for_signals() -> None:
    """Says so when the first has come; process 0 is then busy for long, and the other waits for it."""
    with StopSignals() as signals:
        print("ready", file=sys.stderr, flush=True)
        try:
            with signals.interrupting():
                on_first(lambda: concurrent.futures.Future().result(timeout=500))
        except Stopped:
            assert signals.received is not None
            print(f"stopped by {signals.received.name}", file=sys.stderr, flush=True)
        on_first(lambda: time.sleep(500))


run_command(functools.partial(guarded, main))
