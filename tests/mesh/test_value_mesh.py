"""Critics on a mesh against one device: own weights, and a value head beside the policy."""

from collections import defaultdict
from dataclasses import replace

import jax
import numpy as np
import pytest

from dta_jax.composite_losses import Sum
from dta_jax.losses import ValueClip
from dta_jax.mesh_grad import mesh_forward, mesh_value_and_grad
from dta_jax.sharding import MeshShape, place_params
from dta_jax.value_model import ValueModel
from tests.mesh.runs import LOSS, OPERATIONS, UNTIED, biased_and_shaken, plan_for
from tests.trees import CAPACITY, largest_error, random_samples, run_tree

BUCKETS = {"entry_capacity": CAPACITY, "max_operations": OPERATIONS}


def critic(with_policy):
    """Model, parameters whose values are not 0, samples and loss."""
    decoder, policy = biased_and_shaken(**UNTIED)
    model = ValueModel(decoder, with_policy)
    params = model.from_policy(policy)
    params["value"] += jax.random.normal(jax.random.key(1), params["value"].shape)
    samples = random_samples(3)
    count, rng = len(samples.sequence), np.random.default_rng(0)
    targets = {name: rng.uniform(-2, 2, count) for name in ("return", "old_value")}
    samples = replace(samples, values=samples.values | targets)
    return model, params, samples, Sum((LOSS, ValueClip(coef=0.5))) if with_policy else ValueClip()


@pytest.mark.parametrize(
    ("shape", "with_policy"), [("data=1", False), ("data=4,tensor=2", False), ("data=4,tensor=2", True)]
)
def test_values_and_gradients_equal_one_devices(shape, with_policy):
    model, params, samples, loss = critic(with_policy)
    size = MeshShape.parse(shape)
    mesh, plan = size.make(), plan_for(samples, size.data)
    placed = place_params(mesh, model, params)
    got = mesh_value_and_grad(mesh, model, placed, plan, samples.values, loss, **BUCKETS)
    want = run_tree(model, params, samples, loss, 2)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    for found, expected in zip(got.numbers, want.numbers, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert largest_error(jax.device_get(got.grads), want.grads) < 2e-5
    replicas = defaultdict(list)
    for shard in got.grads["value"].addressable_shards:
        replicas[str(shard.index)].append(np.asarray(shard.data))
    assert len(replicas) == size.data
    assert all(len(same) == size.tensor and (same[0] == same[-1]).all() for same in replicas.values())


def test_the_forward_pass_gives_the_gradients_values_to_the_last_bit_and_entropies_to_rounding():
    model, params, samples, loss = critic(with_policy=True)
    size = MeshShape(4, 2)
    mesh, plan = size.make(), plan_for(samples, size.data)
    placed = place_params(mesh, model, params)
    want = mesh_value_and_grad(mesh, model, placed, plan, samples.values, loss, **BUCKETS).numbers
    temperature = samples.values["temperature"]
    got = mesh_forward(mesh, model, placed, plan, temperature=temperature, **BUCKETS)
    np.testing.assert_array_equal(got.logp, want.logp)
    np.testing.assert_array_equal(got.value, want.value)
    np.testing.assert_allclose(got.entropy, want.entropy, rtol=1e-6)
