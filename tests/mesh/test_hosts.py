"""Two processes on loopback: the same numbers as one, and an end when one of them is lost."""

import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

from dta_jax.errors import InputError
from dta_jax.hosts import EXIT_LOST_PROCESS, Hosts
from dta_jax.metrics import read_metrics
from dta_jax.optimizer import make_optimizer
from dta_jax.settings import AdamW
from tests.mesh.runs import LOSS, UNTIED, biased_and_shaken
from tests.trees import random_samples, run_tree

LIMIT_SECONDS = 60  # for the survivors to end


def start_two(*arguments, worker="tests.mesh.worker"):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = os.environ | {
        "DTA_COORDINATOR": address,
        "DTA_PROCESSES": "2",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", worker, *arguments],
            env=common | {"DTA_PROCESS": str(process)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]


def test_two_processes_of_two_devices_equal_one(tmp_path):
    out = tmp_path / "found.npz"
    for process in start_two("gradient", str(out)):
        _, stderr = process.communicate(timeout=500)
        assert process.returncode == 0, stderr
    model, params = biased_and_shaken(**UNTIED)
    want = run_tree(model, params, random_samples(3), LOSS, 2)
    optimizer = make_optimizer(AdamW())
    updates, _ = optimizer.update(want.grads, optimizer.init(params), params)
    updated = optax.apply_updates(params, updates)
    with np.load(out) as found:
        np.testing.assert_allclose(found["loss"], want.loss, rtol=1e-5)
        np.testing.assert_allclose(found["logp"], want.logp, rtol=1e-5)
        for name, tree in (("grads", want.grads), ("params", updated)):
            for path, leaf in jax.tree.leaves_with_path(tree):
                key = name + jax.tree_util.keystr(path)
                error = np.abs(found[key] - leaf).max() / np.abs(leaf).max()
                assert error < 2e-5, key


@pytest.mark.parametrize("killed", [0, 1])
def test_the_other_ends_when_a_process_is_killed(killed):
    processes = start_two("die", str(killed))
    survivor, victim = processes[1 - killed], processes[killed]
    try:
        victim.communicate(timeout=500)
        assert victim.returncode == -9
        began = time.monotonic()
        _, stderr = survivor.communicate(timeout=LIMIT_SECONDS)
        assert time.monotonic() - began < LIMIT_SECONDS
    finally:
        survivor.kill()
    assert survivor.returncode == EXIT_LOST_PROCESS, stderr
    last = stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: process {1 - killed}: a step failed; is another process lost?"), stderr


def wait_until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path):
    processes = start_two("stop", str(tmp_path))
    metrics = tmp_path / "metrics.jsonl"
    try:
        wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2)
        processes[1].send_signal(signal.SIGTERM)
        written = [process.communicate(timeout=LIMIT_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [143, 143], written
    step = len(read_metrics(metrics))
    said = f"stopped by SIGTERM after step {step}, which is saved; the same command goes on"
    assert [text.splitlines()[-1] for text in written] == [said, said]
    assert (tmp_path / "checkpoints" / str(step) / "state").is_dir()


def test_what_process_0_waits_for_is_given_up_and_a_second_signal_ends_at_once():
    processes = start_two("stop-twice")
    other = processes[1]
    try:
        while other.stderr.readline() not in ("ready\n", ""):
            pass
        other.send_signal(signal.SIGTERM)
        for process in processes:
            while (line := process.stderr.readline()) not in ("stopped by SIGTERM\n", ""):
                pass
            assert line, process.wait()
        other.send_signal(signal.SIGTERM)
        assert other.communicate(timeout=LIMIT_SECONDS)[1].splitlines() == ["terminated"]
        assert other.returncode == 143
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_hosts_are_read_from_the_environment():
    variables = {"DTA_COORDINATOR": "10.0.0.1:1234", "DTA_PROCESSES": "4", "DTA_PROCESS": "3"}
    assert Hosts.from_environment({}) is None
    assert Hosts.from_environment(variables) == Hosts("10.0.0.1:1234", 4, 3)
    wrong = {
        "DTA_COORDINATOR": ("nowhere", "host:port"),
        "DTA_PROCESSES": ("many", "a number"),
        "DTA_PROCESS": ("4", "0 .. 3"),
    }
    for name, (value, expected) in wrong.items():
        with pytest.raises(InputError, match=f"{name}: value: expected {expected}; got '?{value}"):
            Hosts.from_environment(variables | {name: value})
        with pytest.raises(InputError, match=f"{name}: value: expected to be set"):
            Hosts.from_environment({k: v for k, v in variables.items() if k != name})
