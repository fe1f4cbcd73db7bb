"""Live rollouts with two processes on loopback: the first collects, both train on the same, as one would."""

import json

import numpy as np
import pytest

from dta_jax.loop import run_training
from dta_jax.metrics import read_metrics, read_steps
from dta_jax.prepare import prepare
from tests.mesh.test_hosts import start_two
from tests.test_live import SYNCHRONOUS

SAME = ("loss", "grad_norm", "entropy_mean", "reward_mean", "tree_tokens")


def run_two(*arguments):
    """What each wrote to stderr."""
    written = []
    for process in start_two(*arguments, worker="tests.mesh.live_worker"):
        _, stderr = process.communicate(timeout=500)
        assert process.returncode == 0, stderr
        written.append(stderr)
    return written


def test_two_processes_train_on_live_rollouts_as_one(tmp_path):
    """Taken up again in the middle; as in one process and on one device."""
    run_two("live", str(tmp_path / "two"), "2")
    saved = json.loads((tmp_path / "two" / "checkpoints" / "2" / "run" / "metadata").read_text())
    assert saved["collector"]["step"] == 2
    run_two("live", str(tmp_path / "two"), "4")
    rows = read_metrics(tmp_path / "two" / "metrics.jsonl")
    one = tmp_path / "one"
    alone = read_steps(one, run_training(prepare(SYNCHRONOUS), one, "Train.seed = 0\n"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for got, want in zip(rows, alone, strict=True):
        assert got["ratio_max"] == pytest.approx(1, abs=1e-4)
        for name in SAME:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_device_of_the_first_process_samples_ahead(tmp_path):
    run_two("apart", str(tmp_path))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_a_failure_of_the_first_process_ends_all_in_order(tmp_path):
    first, second = run_two("fail", str(tmp_path))
    assert "groups rejected in a row" in first.splitlines()[-1]
    assert second.splitlines()[-1] == f"process 0: {first.splitlines()[-1]}"


def test_results_of_any_size_reach_all():
    run_two("first")
