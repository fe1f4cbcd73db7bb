"""Training on a mesh: what one device computes, from checkpoints of other meshes, in two processes."""

import dataclasses

import numpy as np
import pytest

from dta_jax.errors import InputError
from dta_jax.guard_settings import Guards
from dta_jax.loop import run_training
from dta_jax.losses import PPOClip
from dta_jax.metrics import read_metrics, read_steps
from dta_jax.objective import GroupNormalized
from dta_jax.prepare import prepare
from dta_jax.qwen3 import Qwen3Config
from dta_jax.settings import AdamW, Checkpoints, Planner, Train
from dta_jax.sharding import MeshShape
from dta_jax.synthetic import SyntheticRollouts
from tests.mesh.test_hosts import start_two

STEPS = 3
TRAIN = Train(
    rollouts=SyntheticRollouts(
        vocab_size=48,
        tasks=4,
        trials=3,
        turns=2,
        system_tokens=12,
        user_tokens=4,
        completion_tokens=6,
        tool_tokens=4,
    ),
    model=Qwen3Config(
        vocab_size=48,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
    ),
    loss=PPOClip(),
    advantages=GroupNormalized(),
    optimizer=AdamW(learning_rate=3e-3),
    planner=Planner(chunk_size=2),
    checkpoints=Checkpoints(every=50, every_minutes=1e-9),  # several processes have to agree on the time
    guards=Guards(max_ratio=1.0001, ratio="warn"),
    batch_groups=2,
    steps=STEPS,
)
SAME = ("loss", "grad_norm", "clip_fraction", "entropy")


def train_on(mesh, steps, out):
    """Rows of the steps that are run, up to `steps`."""
    settings = dataclasses.replace(TRAIN, mesh=mesh, steps=steps)
    return read_steps(out, run_training(prepare(settings), out, ""))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return train_on(MeshShape(), STEPS, tmp_path_factory.mktemp("one_device"))


def assert_same(got, want):
    assert len(got) == len(want)
    for row, expected in zip(got, want, strict=True):
        for name in ("tree_tokens", "guard_ratio"):
            assert row.get(name) == expected.get(name)
        for name in set(SAME) & expected.keys():
            np.testing.assert_allclose(row[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_run_moves_from_mesh_to_mesh(one_device, tmp_path):
    """One step each on 4 x 2, 2 x 1 and 1 x 1, each from the checkpoint before."""
    rows = []
    for step, mesh in enumerate((MeshShape(4, 2), MeshShape(2, 1), MeshShape(1, 1)), start=1):
        rows += train_on(mesh, step, tmp_path)
    assert_same(rows, one_device)


def test_two_processes_train_as_one(one_device, tmp_path):
    assert ["guard_ratio" in row for row in one_device] == [False, True, True]
    for process in start_two("train", str(tmp_path)):
        _, stderr = process.communicate(timeout=500)
        assert process.returncode == 0, stderr
    assert_same(read_metrics(tmp_path / "metrics.jsonl"), one_device)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_a_mesh_that_does_not_fit_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(InputError, match="MeshShape: data x tensor: expected 8 devices"):
        train_on(MeshShape(16, 1), 1, tmp_path)
    with pytest.raises(InputError, match="num_key_value_heads: expected a multiple of tensor=4"):
        train_on(MeshShape(2, 4), 1, tmp_path)
    assert not list(tmp_path.iterdir())
