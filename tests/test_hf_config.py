"""`config.json` in both spellings, with transformers' defaults, and what is refused."""

import json

import pytest

from dta_jax.errors import InputError
from dta_jax.hf_config import config_from_hf, config_to_hf, read_config
from dta_jax.qwen3 import PRESETS, Qwen3Config
from dta_jax.rope import RopeScaling

# Qwen3-0.6B as it is published (transformers 4 spelling).
PUBLISHED = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
BARE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_a_published_config_is_its_preset():
    assert config_from_hf(PUBLISHED) == PRESETS["qwen3-0.6b"]


@pytest.mark.parametrize(
    ("spelling", "theta", "scaling"),
    [
        ({"rope_theta": 5e6}, 5e6, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, 5e6, None),
        ({"rope_theta": 5e6, "rope_scaling": YARN}, 5e6, RopeScaling("yarn", 4.0, 32768)),
        ({"rope_parameters": {**YARN, "rope_theta": 5e6}}, 5e6, RopeScaling("yarn", 4.0, 32768)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, RopeScaling("linear", 2.0)),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 512},
            1e4,
            RopeScaling("yarn", 2.0, 512),
        ),
        ({}, 1e4, None),
    ],
)
def test_rope_spellings(spelling, theta, scaling):
    config = config_from_hf({"model_type": "qwen3", **BARE, **spelling})
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("family", "head_dim", "positions"), [("qwen3", 128, 32768), ("qwen2", 16, 32768), ("llama", 16, 2048)]
)
def test_defaults_are_those_of_transformers(family, head_dim, positions):
    assert config_from_hf({"model_type": family, **BARE}) == Qwen3Config(
        **BARE,
        num_key_value_heads=4,
        head_dim=head_dim,
        rope_theta=1e4,
        tie_word_embeddings=False,
        max_position_embeddings=positions,
        model_type=family,
    )


def test_head_dim_need_not_be_width_over_heads():
    assert config_from_hf({"model_type": "qwen3", **BARE, "head_dim": 40}).head_dim == 40


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        Qwen3Config(
            rope_scaling=RopeScaling("yarn", 4.0, 128, mscale=1.0, mscale_all_dim=0.5, truncate=False)
        ),
        Qwen3Config(rope_scaling=RopeScaling("linear", 2.0), attention_bias=True, eos_token_id=(3, 5)),
        Qwen3Config(model_type="qwen2", bos_token_id=1, rope_theta=1e4),
        Qwen3Config(
            model_type="llama",
            mlp_bias=True,
            rope_scaling=RopeScaling("llama3", 8.0, 64, low_freq_factor=2.0, high_freq_factor=5.0),
        ),
    ],
)
def test_config_survives_the_round_trip(config):
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_windows_that_no_layer_uses_are_accepted():
    windowed = {"use_sliding_window": True, "sliding_window": 8}
    config_from_hf({**PUBLISHED, **windowed, "max_window_layers": 28})
    config_from_hf({**PUBLISHED, **windowed, "layer_types": ["full_attention"] * 28})
    config_from_hf({**PUBLISHED, "sliding_window": 4096})


def test_read_config_replaces_fields(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = read_config(tmp_path, dtype="float32", param_dtype="bfloat16")
    assert (config.dtype, config.storage_dtype, config.rope_theta) == ("float32", "bfloat16", 1e6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type: expected one of qwen3, qwen2, llama; got 'mistral'"),
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            "architectures: expected ['Qwen3ForCausalLM']; got ['Qwen3ForSequenceClassification']",
        ),
        ({"hidden_size": None}, "hidden_size: expected a positive integer; got None"),
        ({"hidden_size": "1024"}, "hidden_size: expected a positive integer; got '1024'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected True or False; got 'no'"),
        ({"rope_scaling": "yarn"}, "rope_scaling: expected an object; got 'yarn'"),
        (
            {"num_key_value_heads": 5},
            "num_key_value_heads: expected a divisor of num_attention_heads=16; got 5",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu; got 'gelu'"),
        (
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20},
            "use_sliding_window: expected false (attention over the whole path in every layer); "
            "got true, with sliding_window=4096 from layer 20 on",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types[1]: expected full_attention; got 'sliding_attention'",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type: expected one of default, linear, yarn, llama3; got 'dynamic'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            "rope_scaling.factor: expected a number; got no such field",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            "rope_scaling.factor: expected at least 1; got 0.5",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}},
            "rope_scaling.beta_fast: expected one of factor; got an unknown field",
        ),
        ({"layer_types": 5}, "layer_types: expected a list; got 5"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": "x"},
            "max_window_layers: expected an integer; got 'x'",
        ),
        ({"rope_scaling": []}, "rope_scaling: expected an object; got []"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id: expected a token id, or None; got (1, 'x')"),
        ({"bos_token_id": []}, "bos_token_id: expected a token id, or None; got []"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0; got 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
            "rope_theta: expected one value; got [5000000.0, 1000000]",
        ),
        (
            {"torch_dtype": "float8_e4m3fn"},
            "torch_dtype: expected one of float32, bfloat16, float16, float64; got 'float8_e4m3fn'",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config: expected none (plain weights); got {'quant_method': 'fp8'}",
        ),
    ],
)
def test_bad_config_names_file_field_and_values(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | changes))
    with pytest.raises(InputError) as error:
        read_config(tmp_path)
    assert str(error.value) == f"{tmp_path / 'config.json'}: {message}"


def test_no_folder_no_config_no_json(tmp_path):
    def message(folder):
        with pytest.raises(InputError) as error:
            read_config(folder)
        return str(error.value)

    none, path = tmp_path / "none", tmp_path / "config.json"
    assert message(none) == f"{none}: folder: expected a Hugging Face model folder; got no such folder"
    wanted = f"{tmp_path}: config.json: expected a Hugging Face model config; got"
    assert message(tmp_path) == f"{wanted} no such file"
    path.write_text("{")
    assert message(tmp_path).startswith(f"{wanted} Expecting property name")
    path.write_text("[" * 100_000)
    assert message(tmp_path).startswith(f"{wanted} maximum recursion depth")
    path.write_text("[]")
    assert message(tmp_path) == f"{path}: content: expected a JSON object; got list"
