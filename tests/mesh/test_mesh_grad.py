"""The mesh program against one device: losses, gradients, log-probabilities, and what it exchanges."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax import mesh_grad
from dta_jax.errors import InputError
from dta_jax.mesh_grad import lower_value_and_grad, mesh_logprobs
from dta_jax.sharding import MeshShape, compute_specs, physical, place_params
from dta_jax.types import Samples
from tests.mesh.runs import BIASED, LOSS, OPERATIONS, UNTIED, biased_and_shaken, plan_for, run_mesh
from tests.trees import CAPACITY, largest_error, random_samples, run_dense, run_tree

pytestmark = pytest.mark.optimized

CASES = [("data=8", UNTIED), ("data=4,tensor=2", BIASED), ("data=2,tensor=4", UNTIED)]


@functools.cache
def one_device(kind, seed):
    model, params = biased_and_shaken(**(UNTIED if kind == "untied" else BIASED))
    return run_tree(model, params, random_samples(seed), LOSS, 2)


@pytest.mark.parametrize(("shape", "family"), CASES)
def test_loss_and_gradients_equal_one_devices(shape, family):
    model, params = biased_and_shaken(**family)
    for seed in (3, 5):
        samples = random_samples(seed)
        got = run_mesh(shape, model, params, samples)
        want = one_device("untied" if family is UNTIED else "biased", seed)
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
        np.testing.assert_allclose(got.logp, want.logp, rtol=1e-5)
        np.testing.assert_allclose(got.entropy, want.entropy, rtol=1e-5)
        assert largest_error(jax.device_get(got.grads), want.grads) < 2e-5
        rows = sum(schedule.trie.num_rows for schedule in got.plan.schedules)
        assert got.executed[1] == rows >= got.plan.trie.num_rows


def test_split_models_equal_the_dense_oracle():
    model, params = biased_and_shaken(**BIASED)
    samples = random_samples(3)
    want = run_dense(model, params, samples, LOSS)
    got = run_mesh("data=4,tensor=2", model, params, samples)
    assert largest_error(jax.device_get(got.grads), want.grads) < 2e-5


def test_ranks_without_sequences_add_zeros():
    model, params = biased_and_shaken(**UNTIED)
    sequence = np.array([1, 2, 3, 4], np.int32)
    values = {"weight": np.ones(1), "advantage": np.ones(1), "old_logp": np.full(1, -2.0)}
    samples = Samples([sequence], np.array([0]), np.array([3]), values)
    got = run_mesh("data=8", model, params, samples)
    assert [schedule.num_ops > 0 for schedule in got.plan.schedules].count(True) == 1
    want = run_tree(model, params, samples, LOSS, 2)
    assert largest_error(jax.device_get(got.grads), want.grads) < 2e-5
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6)


def test_new_tries_compile_nothing():
    model, params = biased_and_shaken(**UNTIED)
    run_mesh("data=8", model, params, random_samples(3))
    before = mesh_grad._value_and_grad._cache_size()
    for seed in (11, 12, 13):
        run_mesh("data=8", model, params, random_samples(seed))
    assert mesh_grad._value_and_grad._cache_size() == before


def test_logprobs_are_the_gradients_own_to_the_last_bit_and_entropies_to_rounding():
    model, params = biased_and_shaken(**UNTIED)
    samples = random_samples(3)
    got = run_mesh("data=8", model, params, samples)
    mesh = MeshShape(data=8).make()
    placed = place_params(mesh, model, params)
    logp, entropy = mesh_logprobs(
        mesh,
        model,
        placed,
        got.plan,
        temperature=samples.values["temperature"],
        entry_capacity=CAPACITY,
        max_operations=OPERATIONS,
    )
    np.testing.assert_array_equal(logp, got.logp)
    np.testing.assert_allclose(entropy, got.entropy, rtol=1e-6)


def lowered(shape, family):
    """The compiled program of `run_mesh`."""
    model, params = biased_and_shaken(**family)
    size, samples = MeshShape.parse(shape), random_samples(3)
    mesh, plan = size.make(), plan_for(samples, size.data)
    placed = place_params(mesh, model, params)
    buckets = {"entry_capacity": CAPACITY, "max_operations": OPERATIONS}
    return lower_value_and_grad(mesh, model, placed, plan, samples.values, LOSS, **buckets).compile()


def test_nothing_is_exchanged_over_data_before_the_gradients_are_summed():
    """On 4 x 2, devices 2r and 2r + 1 are rank r. Loops may join these pairs only."""
    computations = re.split(r"\n(?=\S)", lowered("data=4,tensor=2", BIASED).as_text())
    joined = {"inside": set(), "outside": set()}
    for text in computations:
        where = "outside" if text.startswith("ENTRY") else "inside"
        for groups in re.findall(r"replica_groups=(\{\{.*?\}\}|\[[^ ]*)", text):
            joined[where].add(groups)
    assert joined["inside"] == {"{{0,1},{2,3},{4,5},{6,7}}"}
    assert joined["outside"] == {"{{0,2,4,6},{1,3,5,7}}"}


def test_program_holds_one_copy_of_the_gradients():
    """Beyond accumulator, stack and cotangents there is only what a chunk needs."""
    wide = UNTIED | {"intermediate_size": 2048, "num_hidden_layers": 24}
    compiled = lowered("data=8", wide)
    _, params = biased_and_shaken(**wide)
    gradients = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert gradients < temporaries < 1.3 * gradients


def test_tensor_devices_that_do_not_divide_the_model_are_refused():
    model, params = biased_and_shaken(**(UNTIED | {"num_key_value_heads": 2}))
    with pytest.raises(InputError, match="num_key_value_heads: expected a multiple of tensor=4; got 2"):
        run_mesh("data=2,tensor=4", model, params, random_samples(3))
    odd, odd_params = biased_and_shaken(**(UNTIED | {"vocab_size": 15}))
    with pytest.raises(InputError, match="vocab_size: expected a multiple of tensor=2; got 15"):
        run_mesh("data=2,tensor=2", odd, odd_params, random_samples(3))


def test_mesh_shapes_are_read_and_checked():
    assert MeshShape.parse("data=4, tensor=2") == MeshShape(4, 2)
    assert MeshShape.parse("tensor=2") == MeshShape(1, 2)
    for text in ("4x2", "data=4,data=2", "pipe=2", "data=", "data=-1", ""):
        with pytest.raises(InputError, match="like data=4,tensor=2"):
            MeshShape.parse(text)
    with pytest.raises(InputError, match="at least 1; got 0"):
        MeshShape.parse("data=0")
    with pytest.raises(InputError, match="8 devices, those that are there; got 8 x 2"):
        MeshShape(8, 2).make()


def test_no_array_is_cut_twice_along_one_mesh_axis():
    assert physical(["layers", "embed", "heads"]) == jax.sharding.PartitionSpec(None, None, "tensor")
    with pytest.raises(InputError, match="every mesh axis at most once"):
        physical(["heads", "mlp"])
    with pytest.raises(InputError, match="'banana'"):
        physical(["banana"])


def test_every_parameter_is_cut_where_its_matrix_is():
    model, params = biased_and_shaken(**BIASED)
    specs = compute_specs(model, params)
    split = model.split("tensor", 2)
    local = jax.eval_shape(split.init, jax.random.key(0))["layers"]
    for (path, leaf), spec, part in zip(
        jax.tree.leaves_with_path(params["layers"]),
        jax.tree.leaves(specs["layers"]),
        jax.tree.leaves(local),
        strict=True,
    ):
        want = tuple(n // 2 if cut == "tensor" else n for n, cut in zip(leaf.shape, spec, strict=True))
        assert part.shape == want, jax.tree_util.keystr(path)
    assert jnp.shape(params["embed"])[0] % 2 == 0
    assert specs["embed"] == jax.sharding.PartitionSpec("tensor", None)
