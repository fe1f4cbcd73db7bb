"""The batch that the mesh tests share, split over a mesh, with as few compiled branches as there can be."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dta_jax.generation.local import LocalSampler
from dta_jax.losses import PPOClip
from dta_jax.mesh_grad import MeshResult, mesh_value_and_grad
from dta_jax.mesh_plan import MeshPlan, plan_ranks
from dta_jax.model import Params
from dta_jax.qwen3 import Qwen3
from dta_jax.settings import LiveRollouts, Train
from dta_jax.sharding import MeshShape, place_params
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples
from tests.trees import CAPACITY, SLOTS, make_model

LOSS = PPOClip(eps_low=0.2, eps_high=0.3)
OPERATIONS = 64
QWEN3: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 16}
UNTIED = QWEN3 | {"tie_word_embeddings": False}
BIASED = QWEN3 | {"model_type": "llama", "attention_bias": True, "mlp_bias": True}


@functools.cache
def biased_and_shaken(**shape: Any) -> tuple[Qwen3, Params]:
    """A model whose norms and biases are not what they are made as, so that every path shows."""
    model, params = make_model(**shape)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    shaken = [leaf + rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype) for leaf in leaves]
    return model, jax.tree.unflatten(tree, shaken)


def on_devices_apart(train: Train, devices: tuple[int, ...], mesh: MeshShape) -> Train:
    """The same run, whose local sampler has devices of its own."""
    assert isinstance(train.rollouts, LiveRollouts)
    assert isinstance(train.rollouts.generator, LocalSampler)
    generator = replace(train.rollouts.generator, devices=devices)
    return replace(train, rollouts=replace(train.rollouts, generator=generator), mesh=mesh)


def plan_for(samples: Samples, ranks: int, **options: Any) -> MeshPlan:
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    return plan_ranks(
        trie, samples.sequence, rows, ranks, **{"chunk_size": 2, "stack_slots": SLOTS} | options
    )


def run_mesh(shape: str, model: Qwen3, params: Params, samples: Samples, **options: Any) -> MeshResult:
    size = MeshShape.parse(shape)
    mesh = size.make()
    placed = place_params(mesh, model, params)
    plan = plan_for(samples, size.data, **options)
    buckets = {"entry_capacity": CAPACITY, "max_operations": OPERATIONS}
    return mesh_value_and_grad(mesh, model, placed, plan, samples.values, LOSS, **buckets)
