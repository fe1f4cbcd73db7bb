"""Predicted memory of a mesh's whole program against what the compiler counts on each device."""

import jax
import numpy as np
import pytest

from dta_jax.losses import NLL
from dta_jax.memory import peak_bytes
from dta_jax.memory_predict import Setup, predict_memory
from dta_jax.mesh_grad import lower_value_and_grad
from dta_jax.mesh_plan import plan_ranks
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.sharding import MeshShape, place_params
from dta_jax.tree_inputs import entry_capacity
from dta_jax.trie import build_trie

pytestmark = pytest.mark.optimized

CONFIG = Qwen3Config(
    vocab_size=1024,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=384,
)
CHUNK, SLOTS, ENTRIES = 64, 1024, 300


@pytest.mark.parametrize("strategy", ["packed", "packed+keep"])
def test_gradients(strategy):
    model, shape = Qwen3(CONFIG), MeshShape(2, 2)
    mesh = shape.make()
    params = place_params(mesh, model, model.init(jax.random.key(0)))
    trie = build_trie([np.arange(k, k + 3 * CHUNK, dtype=np.int32) for k in range(4)])
    row = np.arange(1, 3 * CHUNK)
    options = {"chunk_size": CHUNK, "strategy": strategy, "stack_slots": SLOTS}
    plan = plan_ranks(trie, np.zeros(len(row), np.int32), row, shape.data, **options)
    values, room = {"weight": np.ones(len(row))}, entry_capacity(ENTRIES)
    lowered = lower_value_and_grad(mesh, model, params, plan, values, NLL(), entry_capacity=room)
    counted = peak_bytes(lowered.compile())
    setup = Setup(model, "float32", SLOTS - CHUNK, ENTRIES, shape)
    parts = predict_memory(setup, CHUNK, strategy).parts
    assert abs(parts.total - counted) < 0.05 * counted, (parts, counted)
    assert (parts.kept_residuals > 0.2 * counted) == (strategy == "packed+keep")
