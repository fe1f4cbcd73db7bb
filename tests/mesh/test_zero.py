"""The sharded optimizer against the plain one, its bytes, and checkpoints that change meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dta_jax.checkpoint import CheckpointStore
from dta_jax.errors import InputError
from dta_jax.optimizer import make_optimizer
from dta_jax.settings import AdamW
from dta_jax.sharding import MeshShape
from dta_jax.zero import ShardedOptimizer, State, bytes_per_device
from tests.mesh.runs import UNTIED, biased_and_shaken, run_mesh
from tests.trees import largest_error, random_samples

ADAMW = make_optimizer(AdamW(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.01))


def begin(sharded, start):
    master = sharded.place(start)
    return State(master, sharded.init(master))


@pytest.fixture(scope="module")
def trained():
    """Two updates on 4 x 2, and the same on one device."""
    model, start = biased_and_shaken(**UNTIED)
    grads = run_mesh("data=4,tensor=2", model, start, random_samples(3)).grads
    assert optax.tree.norm(grads) > 0.01  # so that clipping shows
    sharded = ShardedOptimizer.on(MeshShape(4, 2).make(), model, ADAMW)
    state = begin(sharded, start)
    plain = State(start, ADAMW.init(start))
    for _ in range(2):
        state = sharded.update(state, grads)
        updates, opt_state = ADAMW.update(jax.device_get(grads), plain.opt_state, plain.params)
        plain = State(optax.apply_updates(plain.params, updates), opt_state)
    return model, sharded, state, plain


def test_updates_equal_one_devices(trained):
    _, _, state, plain = trained
    assert largest_error(jax.device_get(state.params), plain.params) < 2e-5
    for got, want in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(plain.opt_state), strict=True):
        np.testing.assert_allclose(jax.device_get(got), want, rtol=1e-4, atol=1e-7)


def test_every_device_holds_its_share_of_state_and_no_more(trained):
    _, _, state, _ = trained
    adam = optax.tree_utils.tree_get(state.opt_state, "mu"), optax.tree_utils.tree_get(state.opt_state, "nu")
    cut_by_tensor = {"embed", "head"}
    for tree in (state.params, *adam):
        for path, leaf in jax.tree.leaves_with_path(tree):
            name = jax.tree_util.keystr(path)
            share = 8 if "kernel" in name or any(f"'{n}'" in name for n in cut_by_tensor) else 4
            assert {shard.data.size * share for shard in leaf.addressable_shards} == {leaf.size}, name
    held = bytes_per_device((state.params, adam))
    assert len(held) == 8
    assert len(set(held.values())) == 1


def test_weights_to_compute_with_are_whole_on_every_data_rank(trained):
    _, sharded, state, _ = trained
    params = sharded.gather(state.params, "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    norm, kernel = params["layers"]["q_norm"]["scale"], params["layers"]["q_proj"]["kernel"]
    assert norm.sharding.is_fully_replicated
    assert {shard.data.size * 2 for shard in kernel.addressable_shards} == {kernel.size}
    want = jax.device_get(state.params)["layers"]["q_proj"]["kernel"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(jax.device_get(kernel), want)


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1, momentum=0.9), optax.adagrad(0.1), optax.lion(0.1), optax.lamb(0.1)]
)
def test_any_transformation_with_state_per_element_is_taken(optimizer):
    model, start = biased_and_shaken(**UNTIED)
    sharded = ShardedOptimizer.on(MeshShape(8, 1).make(), model, optimizer)
    grads = jax.tree.map(jnp.sin, start)
    with jax.numpy_dtype_promotion("standard"):
        got = sharded.update(begin(sharded, start), grads)
        updates, _ = optimizer.update(grads, optimizer.init(start), start)
    assert largest_error(jax.device_get(got.params), optax.apply_updates(start, updates)) < 2e-5


@pytest.mark.parametrize(
    "optimizer", [optax.adafactor(0.1, min_dim_size_to_factor=2), optax.contrib.muon(0.1)]
)
def test_state_that_is_not_per_element_is_refused(optimizer):
    model, _ = biased_and_shaken(**UNTIED)
    with pytest.raises(InputError, match="optimizer: state: expected"):
        ShardedOptimizer.on(MeshShape(8, 1).make(), model, optimizer)


def test_checkpoints_move_from_mesh_to_mesh(trained, tmp_path):
    """4 x 2 to 2 x 1 to 1 x 1, bit for bit, and the update after each is the same."""
    model, first, state, _ = trained
    want = jax.device_get(state)
    sharded, folder = first, tmp_path
    for step, shape in enumerate((MeshShape(4, 2), MeshShape(2, 1), MeshShape(1, 1))):
        sharded = ShardedOptimizer.on(shape.make(), model, ADAMW)
        with CheckpointStore(folder, keep=1) as store:
            if step == 0:
                store.save(1, state._asdict(), {"step": 1})
                continue
            found = store.newest(sharded.like._asdict(), lambda step, run: None)
            assert found is not None
            got = State(**found[1])
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), want)
            assert jax.tree.map(lambda leaf: leaf.sharding, got) == jax.tree.map(
                lambda leaf: leaf.sharding, sharded.like
            )
            store.save(step + 1, got._asdict(), {"step": step + 1})
