"""The chain of `benchmarks/tau2_mock.py`, a few steps of it: imitation, RL, and success rates after each."""

import json

import pytest

from benchmarks import tau2_mock
from dta_jax.rollouts import load_rollouts

pytestmark = pytest.mark.filterwarnings("ignore")  # other packages warn while they are imported
SMALL = (
    "Qwen3Config.hidden_size = 16",
    "Qwen3Config.num_hidden_layers = 1",
    "Qwen3Config.intermediate_size = 16",
    "Train.steps = 2",
)
SHORT = ("Train.steps = 2", "Collect.group_size = 2", "LocalSampler.rows = 12", "Train.minibatches = 1")


def test_the_chain_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    oracle = tau2_mock.prepare(tmp_path)
    assert list(oracle.values()) == [1.0] * 6
    rollouts = load_rollouts(tmp_path / "oracle.npz")
    assert (rollouts.num_rollouts, len(rollouts.completion_spans)) == (6, 12)
    found = tau2_mock.run(tmp_path, 0, tau2_mock.Chain(SMALL, SHORT, trials=1))
    assert (found["sft_steps"], found["rl_steps"]) == (2, 2)
    assert (len(found["before_per_task"]), len(found["reward"])) == (6, 2)
    results = tmp_path / "results.json"
    for seed in (1, 0, 1):
        tau2_mock.write_results(results, oracle, found | {"seed": seed})
    assert [run["seed"] for run in json.loads(results.read_text())["runs"]] == [0, 1]
