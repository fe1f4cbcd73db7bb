"""The local sampler on a device set apart from those that the weights come from."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.generation.local import LocalSampler, generate_all
from dta_jax.generation.protocol import Sampling
from dta_jax.sharding import MeshShape, place_params
from tests.trees import make_model

SETTINGS = LocalSampler(rows=2, max_context=64, prefill_chunk=8, decode_steps=4)


@pytest.mark.parametrize("shape", ["data=4", "data=2,tensor=2"])
def test_weights_of_a_mesh_are_sampled_from_on_one_device(shape):
    model, params = make_model(vocab_size=12)
    device, mesh = jax.devices()[5], MeshShape.parse(shape).make()
    prompts = [np.arange(n, dtype=np.int32) for n in (3, 9)]
    newer = jax.tree.map(lambda leaf: leaf * jnp.float32(1.1), params)
    generator = SETTINGS.make(model, place_params(mesh, model, params), device=device)
    for version, weights in ((0, params), (1, newer)):
        if version:
            asyncio.run(generator.update_weights(place_params(mesh, model, weights), version))
        alone = SETTINGS.make(model, weights)
        found, want = (generate_all(g, prompts, Sampling(9), (0, 1)) for g in (generator, alone))
        for a, b in zip(found, want, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert {leaf.device for leaf in jax.tree.leaves(generator._device.params)} == {device}
    assert {leaf.device for leaf in generator._device._cache} == {device}
