"""Kept residuals on a mesh: one device's gradients, nothing run twice, nothing of size copied."""

import functools
import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from dta_jax.mesh_grad import lower_value_and_grad, mesh_logprobs
from dta_jax.segment import num_keys
from dta_jax.sequence_losses import SequenceRatio
from dta_jax.sharding import MeshShape, place_params
from dta_jax.tree_engine import TreeEngine
from dta_jax.types import Samples
from tests.mesh.runs import BIASED, LOSS, OPERATIONS, UNTIED, biased_and_shaken, plan_for, run_mesh
from tests.trees import CAPACITY, largest_error, random_samples, run_tree

pytestmark = pytest.mark.optimized

KEEP = "packed+keep"
BUCKETS = {"entry_capacity": CAPACITY, "max_operations": OPERATIONS}
ONE_LAYER = UNTIED | {"num_hidden_layers": 1}
run_keeping = functools.partial(run_mesh, strategy=KEEP)


def one_sequence():
    """For eight ranks, of which seven have no work."""
    values = {"weight": np.ones(1), "advantage": np.ones(1), "old_logp": np.full(1, -2.0)}
    return Samples([np.array([1, 2, 3, 4], np.int32)], np.array([0]), np.array([3]), values)


@pytest.mark.parametrize(
    ("shape", "family"), [("data=8", UNTIED), ("data=4,tensor=2", BIASED), ("data=2,tensor=4", UNTIED)]
)
def test_loss_and_gradients_equal_one_devices(shape, family):
    model, params = biased_and_shaken(**family)
    for samples in (random_samples(3), random_samples(5), one_sequence()):
        got = run_keeping(shape, model, params, samples)
        want = run_tree(model, params, samples, LOSS, 2)
        np.testing.assert_allclose(got.loss, want.loss, rtol=2e-5)
        np.testing.assert_allclose(got.logp, want.logp, rtol=2e-5)
        np.testing.assert_allclose(got.entropy, want.entropy, rtol=2e-5)
        assert largest_error(jax.device_get(got.grads), want.grads) < 2e-5
        rows = sum(schedule.trie.num_rows for schedule in got.plan.schedules)
        assert got.executed.tolist() == [rows, rows]
    assert [schedule.num_ops > 0 for schedule in got.plan.schedules].count(True) == 1


def test_ranks_have_as_many_slots_as_the_longest_of_them_needs():
    model, params = biased_and_shaken(**ONE_LAYER)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 10, length).astype(np.int32) for length in (24, 6, 6, 6, 6)]
    position = np.array([len(sequence) - 1 for sequence in sequences])
    samples = Samples(sequences, np.arange(5), position, {"weight": np.full(5, 0.2)})
    samples = replace(samples, values=samples.values | {"advantage": np.ones(5), "old_logp": np.zeros(5)})
    got = run_keeping("data=2", model, params, samples, chunk_size=1, stack_slots=0)
    assert {schedule.stack_slots for schedule in got.plan.schedules} == {got.plan.stack_slots}
    needed = [schedule.trie.longest_path + 1 for schedule in got.plan.schedules]
    assert max(needed) <= got.plan.stack_slots
    assert min(needed) < got.plan.stack_slots / 2
    want = run_tree(model, params, samples, LOSS, 1)
    assert largest_error(jax.device_get(got.grads), want.grads) < 2e-5


def test_logprobs_are_the_gradients_own_to_the_last_bit_and_entropies_to_rounding():
    model, params = biased_and_shaken(**UNTIED)
    samples = random_samples(3)
    got = run_keeping("data=8", model, params, samples)
    mesh = MeshShape(data=8).make()
    placed, temperature = place_params(mesh, model, params), samples.values["temperature"]
    logp, entropy = mesh_logprobs(mesh, model, placed, got.plan, temperature=temperature, **BUCKETS)
    np.testing.assert_array_equal(logp, got.logp)
    np.testing.assert_allclose(entropy, got.entropy, rtol=1e-6)


def test_losses_in_two_passes_equal_one_devices():
    model, params = biased_and_shaken(**ONE_LAYER)
    samples, mesh = random_samples(3), MeshShape(2, 2).make()
    loss, found = SequenceRatio(LOSS), []
    for where, weights in ((None, params), (mesh, place_params(mesh, model, params))):
        options = {"chunk_size": 1, "strategy": KEEP, "longest": 12, "entries": 100, "operations": 128}
        engine = TreeEngine.for_batches(model, mesh=where, **options)
        found.append(engine.value_and_grad(weights, samples, loss, samples.sequence))
    want, got = found
    np.testing.assert_allclose(got.loss, want.loss, rtol=2e-5)
    np.testing.assert_allclose(got.logp, want.logp, rtol=2e-5)
    assert largest_error(jax.device_get(got.grads), jax.device_get(want.grads)) < 2e-5


def test_loops_copy_no_keys_no_residuals_and_no_gradients():
    """They update what they carry in place, but for [N, D] hidden states; only devices of one rank meet."""
    model, params = biased_and_shaken(**(UNTIED | {"vocab_size": 8192, "intermediate_size": 2048}))
    mesh, samples = MeshShape(2, 2).make(), random_samples(3)
    plan = plan_for(samples, 2, chunk_size=16, stack_slots=2048, strategy=KEEP)
    placed = place_params(mesh, model, params)
    compiled = lower_value_and_grad(mesh, model, placed, plan, samples.values, LOSS).compile()
    loops = [part for part in re.split(r"\n(?=\S)", compiled.as_text()) if part.startswith("%region")]
    copied = {shape for part in loops for shape in re.findall(r"= f32\[([\d,]+)\]\S* copy\(", part)}
    keys, split = num_keys(2048, 16), model.split("tensor", 2)
    heads = split.num_heads
    by_slot = {(2, split.num_kv_heads, keys, 4), (2, keys, 16), (2, keys, heads, 4), (2, keys, heads)}
    gradients = {leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(placed)}
    large = {shape for shape in by_slot | gradients if math.prod(shape) >= keys * 4}
    assert len(large) >= 6
    assert not copied & {",".join(map(str, shape)) for shape in large}
    met = {groups for part in loops for groups in re.findall(r"replica_groups=(\{\{.*?\}\}|\[[^ ]*)", part)}
    assert met == {"{{0,1},{2,3}}"}
