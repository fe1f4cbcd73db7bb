"""Models, weights and gradients against transformers itself, on random configs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dta_jax.hf_weights import load_model, plan_tensors, save_folder
from dta_jax.reference import dense_logits
from tests.hf import peer
from tests.ppo import ppo_loss

pytestmark = pytest.mark.optimized

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


CASES = {
    "tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": rope(1e6)}),
    "untied_wide_heads": ("qwen3", {"head_dim": 40, "rope_parameters": rope(5e6)}),
    "multi_head": ("qwen3", {"head_dim": 16, "num_key_value_heads": 4, "rope_parameters": rope(1e4)}),
    "one_kv_head": ("qwen3", {"head_dim": 32, "num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "bias": ("qwen3", {"head_dim": 16, "attention_bias": True, "initializer_range": 0.1}),
    "yarn": ("qwen3", {"head_dim": 64, "max_position_embeddings": 512, "rope_parameters": YARN}),
    "yarn_mscale": (
        "qwen3",
        {
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                **YARN,
                "factor": 8.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
        },
    ),
    "yarn_betas": (
        "qwen3",
        {
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
        },
    ),
    "linear": ("qwen3", {"head_dim": 16, "vocab_size": 1000, "rope_parameters": LINEAR}),
    "windows_unused": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ),
    "one_layer": ("qwen3", {"head_dim": 8, "num_hidden_layers": 1, "intermediate_size": 200}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": rope(1e6)}),
    "llama": ("llama", {"rope_parameters": rope(1e4)}),
    "llama3_biases": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
}
LENGTHS = (1, 2, 17, 600)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    family, fields = CASES[request.param]
    theirs = peer.random_model(family, seed=len(request.param), **(SHAPE | fields))
    folder = peer.save(theirs, tmp_path_factory.mktemp(request.param) / "hf")
    return theirs, folder


def tokens_of(model, length, rng):
    return rng.integers(0, model.vocab_size, length, dtype=np.int32)


def test_logits_agree_at_every_length(case, rng):
    theirs, folder = case
    model, params = load_model(folder)
    for length in LENGTHS:
        tokens = tokens_of(model, length, rng)
        ours = jax.jit(dense_logits, static_argnums=0)(model, params, tokens)
        np.testing.assert_allclose(ours, peer.logits(theirs, tokens), rtol=0, atol=1e-4)


def test_ppo_gradients_agree(case, rng):
    theirs, folder = case
    model, params = load_model(folder)
    tokens = tokens_of(model, 150, rng)
    advantage = rng.standard_normal(149).astype(np.float32)
    log_probs = jax.nn.log_softmax(dense_logits(model, params, tokens)[:-1])
    logp = np.take_along_axis(np.asarray(log_probs), tokens[1:, None], axis=1)[:, 0]
    old_logp = (logp + 0.2 * rng.standard_normal(149)).astype(np.float32)
    loss, gradients = jax.jit(jax.value_and_grad(ppo_loss, argnums=1), static_argnums=0)(
        model, params, tokens, advantage, old_logp
    )
    their_loss, their_gradients = peer.ppo_gradients(theirs, tokens, advantage, old_logp)
    np.testing.assert_allclose(loss, their_loss, rtol=1e-5, atol=1e-6)
    for plan, gradient in zip(
        jax.tree.leaves(plan_tensors(model.config)), jax.tree.leaves(gradients), strict=True
    ):
        for layer, name in enumerate(plan.names):
            ours = np.asarray(gradient[layer] if plan.stacked else gradient)
            ours = ours.T if plan.transposed else ours
            wanted = their_gradients[name]
            error = np.linalg.norm(ours - wanted) / np.linalg.norm(wanted)
            assert error < 1e-4, (name, error)


def test_bf16_is_as_close_to_float32_as_theirs(case, rng):
    theirs, folder = case
    model, _ = load_model(folder)
    half, half_params = load_model(folder, dtype="bfloat16")
    tokens = tokens_of(model, 300, rng)
    exact = peer.logits(theirs, tokens)
    their_half = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    their_error = np.linalg.norm(peer.logits(their_half, tokens) - exact)
    our_error = np.linalg.norm(np.asarray(dense_logits(half, half_params, tokens), np.float32) - exact)
    assert 0 < our_error <= 1.1 * their_error


@pytest.mark.parametrize("shard", [10**9, 50_000])
def test_round_trip_is_bit_identical(case, shard, rng, tmp_path):
    theirs, folder = case
    model, params = load_model(folder)
    save_folder(tmp_path / "back", model.config, params, max_shard_bytes=shard)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    tokens = tokens_of(model, 64, rng)
    np.testing.assert_array_equal(peer.logits(theirs, tokens), peer.logits(again, tokens))


def test_their_shards_and_bf16_load_bit_identically(case, tmp_path):
    theirs, _ = case
    folder = peer.save(theirs.bfloat16(), tmp_path / "half", max_shard_size="50KB")
    model, params = load_model(folder)
    theirs.float()
    assert (folder / "model.safetensors.index.json").exists()
    assert model.config.dtype == "bfloat16"
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    plans = jax.tree.leaves(plan_tensors(model.config))
    for plan, leaf in zip(plans, jax.tree.leaves(params), strict=True):
        assert leaf.dtype == jnp.bfloat16
        for layer, name in enumerate(plan.names):
            ours = np.asarray(leaf[layer] if plan.stacked else leaf, np.float32)
            np.testing.assert_array_equal(ours.T if plan.transposed else ours, state[name].float().numpy())


def test_both_rope_spellings_mean_the_same(case):
    _, folder = case
    model, _ = load_model(folder)
    values = json.loads((folder / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    (folder / "config.json").write_text(json.dumps(values))
    older, _ = load_model(folder)
    assert older == model
