"""After a warm-up, batches on a mesh compile nothing, whatever their widths and operations."""

import jax
import numpy as np
import pytest

from dta_jax.errors import InputError
from dta_jax.mesh_grad import mesh_value_and_grad
from dta_jax.sharding import MeshShape, place_params
from dta_jax.tree_engine import TreeEngine
from tests.mesh.runs import LOSS, plan_for
from tests.test_tree_engine import batch_of, compilations
from tests.trees import make_model, random_samples


def test_after_a_warm_up_nothing_compiles():
    model, params = make_model(num_hidden_layers=1, intermediate_size=20)
    mesh = MeshShape(data=2).make()
    buckets = {"chunk_size": 2, "strategy": "packed", "longest": 24, "entries": 300, "operations": 256}
    engine = TreeEngine.for_batches(model, mesh=mesh, **buckets)
    placed = place_params(mesh, model, params)
    engine.warm_up(placed, batch_of(0, 3), LOSS)
    most = []
    for seed, count in ((1, 1), (2, 3), (3, 24)):
        samples = batch_of(seed, count)
        plan = engine.plan(samples)
        most.append(max(schedule.num_ops for schedule in plan.schedules))
        with compilations() as found:
            engine.logprobs(placed, samples, plan)
            got = engine.value_and_grad(placed, samples, LOSS, samples.sequence, plan)
            jax.block_until_ready(got.grads)
        assert not found
        assert np.isfinite(got.loss)
    assert most[0] <= 64 < most[-1] <= 256  # more than the smallest table holds


def test_a_table_that_is_too_short_is_refused():
    model, params = make_model()
    mesh = MeshShape(data=2).make()
    samples = random_samples(3)
    plan = plan_for(samples, 2)
    placed = place_params(mesh, model, params)
    longest = max(schedule.num_ops for schedule in plan.schedules)
    with pytest.raises(InputError, match=f"max_operations: expected at least {longest}; got {longest - 1}"):
        mesh_value_and_grad(mesh, model, placed, plan, samples.values, LOSS, max_operations=longest - 1)
