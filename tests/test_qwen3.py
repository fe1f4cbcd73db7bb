"""The model: config, protocol, dtypes, parameter counts, rotary embedding, and golden logits."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.errors import InputError
from dta_jax.hf_weights import load_model, plan_tensors
from dta_jax.model import DecoderModel
from dta_jax.qwen3 import PRESETS, Qwen3, Qwen3Config, preset
from dta_jax.reference import dense_logits
from dta_jax.rope import RopeScaling, frequencies, rotate
from tests.ppo import ppo_loss

pytestmark = pytest.mark.optimized

GOLDEN = Path(__file__).parent / "golden"
INIT = jax.jit(Qwen3.init, static_argnums=0)
LOGITS = jax.jit(dense_logits, static_argnums=0)
LOSS_AND_GRADIENT = jax.jit(jax.value_and_grad(ppo_loss, argnums=1), static_argnums=0)
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
TINY = Qwen3Config()


def test_golden_cases_cover_every_family_and_scaling():
    configs = [json.loads((GOLDEN / name / "config.json").read_text()) for name in CASES]
    assert {c["model_type"] for c in configs} == {"qwen3", "qwen2", "llama"}
    scalings = {c["rope_parameters"]["rope_type"] for c in configs}
    assert scalings == {"default", "yarn", "linear", "llama3"}
    assert {c["tie_word_embeddings"] for c in configs} == {True, False}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name):
    expected = np.load(GOLDEN / name / "expected.npz")
    model, params = load_model(GOLDEN / name)
    logits = LOGITS(model, params, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_ppo_gradients_equal_transformers(name):
    expected = np.load(GOLDEN / name / "expected.npz")
    model, params = load_model(GOLDEN / name)
    loss, gradients = LOSS_AND_GRADIENT(
        model, params, expected["tokens"], expected["advantage"], expected["old_logp"]
    )
    np.testing.assert_allclose(loss, expected["loss"], rtol=2e-5)
    plans = jax.tree.leaves(plan_tensors(model.config))
    for plan, gradient in zip(plans, jax.tree.leaves(gradients), strict=True):
        for layer, tensor in enumerate(plan.names):
            ours = np.asarray(gradient[layer] if plan.stacked else gradient)
            wanted = expected[tensor].T if plan.transposed else expected[tensor]
            assert np.linalg.norm(ours - wanted) < 2e-5 * np.linalg.norm(wanted), tensor


def test_float64_agrees_with_float32_golden():
    with jax.enable_x64(True):
        expected = np.load(GOLDEN / "qwen3_yarn" / "expected.npz")
        model, params = load_model(GOLDEN / "qwen3_yarn", dtype="float64")
        logits = LOGITS(model, params, expected["tokens"])
        assert logits.dtype == jnp.float64
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tiny", 106_880),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_presets_have_the_public_parameter_counts(name, count):
    shapes = jax.eval_shape(Qwen3(PRESETS[name]).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def test_model_is_a_hashable_decoder_model():
    model = Qwen3(TINY)
    assert isinstance(model, DecoderModel)
    assert hash(model) == hash(Qwen3(Qwen3Config()))
    assert model == Qwen3(Qwen3Config())
    assert model != Qwen3(dataclasses.replace(TINY, rope_theta=5e6))


@pytest.mark.parametrize(
    ("dtype", "param_dtype"),
    [("float32", None), ("bfloat16", None), ("bfloat16", "float32"), ("float64", None)],
)
def test_dtypes_of_every_step(dtype, param_dtype):
    with jax.enable_x64(True):
        model = Qwen3(Qwen3Config(dtype=dtype, param_dtype=param_dtype, tie_word_embeddings=False))
        params = jax.eval_shape(model.init, jax.random.key(0))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(param_dtype or dtype)}
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
        x = jax.ShapeDtypeStruct((5, 64), params["embed"].dtype)
        q, k, v = jax.eval_shape(model.qkv, layer, x, jax.ShapeDtypeStruct((5,), jnp.int32))
        assert (q.shape, k.shape, v.shape) == ((5, 4, 16), (5, 2, 16), (5, 2, 16))
        assert {a.dtype for a in (q, k, v)} == {jnp.dtype(dtype)}
        y = jax.eval_shape(model.mix, layer, x, q)
        assert (y.shape, y.dtype) == ((5, 64), x.dtype)  # the residual stream keeps its dtype
        assert jax.eval_shape(model.final, params["final"], y).dtype == jnp.dtype(dtype)


def test_rows_are_independent(rng):
    model = Qwen3(TINY)
    params = INIT(model, jax.random.key(0))
    layer = jax.tree.map(lambda a: a[1], params["layers"])
    x = jnp.asarray(rng.standard_normal((6, 64)), jnp.float32)
    position = jnp.array([0, 5, 3, 3, 9, 1], jnp.int32)
    changed = x.at[0].set(jnp.inf)
    for before, after in zip(model.qkv(layer, x, position), model.qkv(layer, changed, position), strict=True):
        np.testing.assert_array_equal(before[1:], after[1:])


def test_random_parameters_follow_the_config():
    config = Qwen3Config(
        hidden_size=256, initializer_range=0.05, attention_bias=True, tie_word_embeddings=False
    )
    params = INIT(Qwen3(config), jax.random.key(3))
    layers = params["layers"]
    np.testing.assert_array_equal(layers["q_norm"]["scale"], np.ones((2, 16)))
    np.testing.assert_array_equal(layers["o_proj"]["bias"], np.zeros((2, 256)))
    for matrix in (params["embed"], params["head"], layers["up_proj"]["kernel"]):
        assert np.std(matrix) == pytest.approx(0.05, rel=0.02)
    assert not np.array_equal(layers["up_proj"]["kernel"][0], layers["up_proj"]["kernel"][1])
    assert not np.array_equal(params["embed"], params["head"])


@pytest.mark.parametrize(
    ("family", "fields", "biased", "normed"),
    [
        ("qwen3", {}, set(), True),
        ("qwen3", {"attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}, True),
        ("qwen2", {}, {"q_proj", "k_proj", "v_proj"}, False),
        ("llama", {"mlp_bias": True}, {"gate_proj", "up_proj", "down_proj"}, False),
    ],
)
def test_families_differ_in_biases_and_qk_norm(family, fields, biased, normed):
    config = Qwen3Config(model_type=family, **fields)
    layers = jax.eval_shape(Qwen3(config).init, jax.random.key(0))["layers"]
    assert {name for name, leaves in layers.items() if "bias" in leaves} == biased
    assert ("q_norm" in layers) == ("k_norm" in layers) == normed


# --- rotary embedding


def test_frequencies_without_scaling():
    frequency, factor = frequencies(8, 10_000.0, None)
    np.testing.assert_allclose(frequency, [1, 0.1, 0.01, 0.001], rtol=1e-14)
    assert factor == 1.0


def test_linear_scaling_divides_every_frequency():
    frequency, factor = frequencies(8, 10_000.0, RopeScaling("linear", 4.0))
    np.testing.assert_allclose(frequency, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-14)
    assert factor == 1.0


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    scaling = RopeScaling("yarn", 4.0, original_max_position_embeddings=32_768)
    base, _ = frequencies(128, 1e6, None)
    frequency, factor = frequencies(128, 1e6, scaling)
    ratio = base / frequency
    # t turns over 32768 positions: pair 128 log(32768 / (2 pi t)) / (2 log 1e6) = 23.6 (t = 32), 39.6 (t = 1)
    np.testing.assert_allclose(ratio[:24], 1)
    np.testing.assert_allclose(ratio[40:], 4)
    assert (np.diff(ratio[23:41]) > 0).all()
    np.testing.assert_allclose(1 / ratio[30], 1 - 7 / 17 * 0.75)  # ramp from 23 to 40
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_attention_factor():
    def factor(**fields):
        return frequencies(8, 1e4, RopeScaling("yarn", 8.0, original_max_position_embeddings=64, **fields))[1]

    assert factor(attention_factor=1.5, mscale=3.0, mscale_all_dim=2.0) == 1.5
    grown = 0.1 * math.log(8)
    assert factor(mscale=3.0, mscale_all_dim=2.0) == pytest.approx((3 * grown + 1) / (2 * grown + 1))


def test_rotation_is_relative_and_keeps_lengths(rng):
    x = jnp.asarray(rng.standard_normal((1, 2, 16)), jnp.float32)
    y = jnp.asarray(rng.standard_normal((1, 2, 16)), jnp.float32)

    def product(i, j):
        a, b = (rotate(v, jnp.array([p]), 1e4, None) for v, p in ((x, i), (y, j)))
        return np.einsum("chd,chd->h", a, b)

    np.testing.assert_allclose(product(9, 4), product(105, 100), rtol=0, atol=1e-5)
    assert abs(product(9, 4) - product(9, 5)).max() > 0.1
    turned = rotate(x, jnp.array([7]), 1e4, None)
    np.testing.assert_allclose(np.linalg.norm(turned), np.linalg.norm(x), rtol=1e-6)


def test_theta_changes_the_logits(rng):
    tokens = rng.integers(0, 512, 50, dtype=np.int32)
    params = INIT(Qwen3(TINY), jax.random.key(0))
    params = jax.tree.map(lambda a: a * 4, params)
    one, five = (LOGITS(Qwen3(Qwen3Config(rope_theta=t)), params, tokens) for t in (1e6, 5e6))
    assert abs(one - five).max() > 1e-3


# --- bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "model config: vocab_size: expected a positive integer; got 0"),
        ({"hidden_size": 64.0}, "model config: hidden_size: expected a positive integer; got 64.0"),
        (
            {"num_key_value_heads": 3},
            "model config: num_key_value_heads: expected a divisor of num_attention_heads=4; got 3",
        ),
        ({"head_dim": 15}, "model config: head_dim: expected an even number (rotary pairs); got 15"),
        ({"rms_norm_eps": 0.0}, "model config: rms_norm_eps: expected a positive number; got 0.0"),
        ({"rope_theta": math.nan}, "model config: rope_theta: expected a positive number; got nan"),
        ({"rope_theta": 1.0}, "model config: rope_theta: expected above 1; got 1.0"),
        ({"model_type": "gpt2"}, "model config: model_type: expected one of qwen3, qwen2, llama; got 'gpt2'"),
        ({"rope_scaling": {}}, "model config: rope_scaling: expected a RopeScaling, or None; got {}"),
        ({"mlp_bias": True}, "model config: mlp_bias: expected False for model_type=qwen3; got True"),
        (
            {"dtype": "int8"},
            "model config: dtype: expected one of float32, bfloat16, float16, float64; got 'int8'",
        ),
    ],
)
def test_bad_config(fields, message):
    with pytest.raises(InputError) as error:
        Qwen3Config(**fields)
    assert str(error.value) == message


def test_bad_preset():
    with pytest.raises(InputError, match=r"^model preset: name: expected one of tiny, .*; got 'qwen9'$"):
        preset("qwen9")
    with pytest.raises(InputError, match=r"^model config: width: expected one of .*; got an unknown field$"):
        preset("tiny", width=3)
    assert preset("Qwen3-8B", dtype="float32") == dataclasses.replace(PRESETS["qwen3-8b"], dtype="float32")
