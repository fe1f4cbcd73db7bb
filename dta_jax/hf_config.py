"""Hugging Face `config.json` to `Qwen3Config` and back.

Every number comes from the file; a field that the file leaves out has the default that transformers
gives it. What this package does not compute (sliding windows in use, other activations, partial
rotary embedding, unknown scalings) is refused, never ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dta_jax.errors import InputError
from dta_jax.qwen3 import DTYPES, FAMILIES, Qwen3Config
from dta_jax.rope import ROPE_FIELDS, ROPE_TYPES, RopeScaling

ARCHITECTURES: Final = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}
CONFIG_FILE: Final = "config.json"
_REQUIRED: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
_DEFAULT_POSITIONS: Final = {"qwen3": 32_768, "qwen2": 32_768, "llama": 2048}
_DEFAULT_THETA: Final = 10_000.0
_QWEN3_HEAD_DIM: Final = 128
_ROPE_COMMON: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      InputError: there is no such file, or it does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(path.parent, path.name, expected=what, actual="no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(path.parent, path.name, expected=what, actual=error) from None
    if not isinstance(value, dict):
        raise InputError(path, "content", expected="a JSON object", actual=type(value).__name__)
    return value


def read_config(folder: str | Path, **changes: Any) -> Qwen3Config:
    """The config of a Hugging Face model folder.

    Args:
      folder: the folder with `config.json`.
      **changes: fields to replace, e.g. `dtype` (of computation; the file's dtype is that of the
        parameters and, if not replaced, of computation too).

    Raises:
      InputError: no config, another architecture, or a field that this package does not compute.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(folder, "folder", expected="a Hugging Face model folder", actual="no such folder")
    values = read_json(folder / CONFIG_FILE, "a Hugging Face model config")
    return dataclasses.replace(config_from_hf(values, source=folder / CONFIG_FILE), **changes)


def config_from_hf(values: Mapping[str, Any], *, source: object = CONFIG_FILE) -> Qwen3Config:
    """The `Qwen3Config` that the contents of a `config.json` mean.

    Raises:
      InputError: a field is missing, out of range or not computed by this package; names `source`.
    """
    family = values.get("model_type")
    if family not in FAMILIES:
        expected = f"one of {', '.join(FAMILIES)}"
        raise InputError(source, "model_type", expected=expected, actual=repr(family))
    architectures = values.get("architectures") or [ARCHITECTURES[family]]
    if architectures != [ARCHITECTURES[family]]:
        raise InputError(source, "architectures", expected=[ARCHITECTURES[family]], actual=architectures)
    for name in _REQUIRED:
        if not isinstance(values.get(name), int):
            actual = repr(values[name]) if name in values else "no such field"
            raise InputError(source, name, expected="a positive integer", actual=actual)
    _refuse_what_is_not_computed(values, family, source)
    heads = values["num_attention_heads"]
    dtype = str(_first(values.get("dtype"), values.get("torch_dtype"), "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise InputError(source, "torch_dtype", expected=f"one of {', '.join(DTYPES)}", actual=repr(dtype))
    theta, scaling = _rope(values, family, source)
    eos = values.get("eos_token_id")
    try:
        return Qwen3Config(
            **{name: values[name] for name in _REQUIRED},
            num_key_value_heads=_first(values.get("num_key_value_heads"), heads),
            head_dim=_first(
                values.get("head_dim"),
                _QWEN3_HEAD_DIM if family == "qwen3" else values["hidden_size"] // max(heads, 1),
            ),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=values.get("tie_word_embeddings", False),
            attention_bias=family != "qwen2" and values.get("attention_bias", False),
            mlp_bias=family == "llama" and values.get("mlp_bias", False),
            max_position_embeddings=values.get("max_position_embeddings", _DEFAULT_POSITIONS[family]),
            initializer_range=values.get("initializer_range", 0.02),
            model_type=family,
            bos_token_id=values.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            dtype=dtype,
        )
    except InputError as error:  # says the field; the user needs the file too
        raise InputError(source, error.field, expected=error.expected, actual=error.actual) from None


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _refuse_what_is_not_computed(values: Mapping[str, Any], family: str, source: object) -> None:
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise InputError(source, "hidden_act", expected="silu", actual=repr(activation))
    if values.get("use_sliding_window") and values.get("sliding_window") is not None and family != "llama":
        full = values.get("max_window_layers", 28)
        if not isinstance(full, int):
            raise InputError(source, "max_window_layers", expected="an integer", actual=repr(full))
        if full < values["num_hidden_layers"] and values.get("layer_types") is None:
            raise InputError(
                source,
                "use_sliding_window",
                expected="false (attention over the whole path in every layer)",
                actual=f"true, with sliding_window={values['sliding_window']} from layer {full} on",
            )
    kinds = values.get("layer_types")
    if not isinstance(kinds, list | None):
        raise InputError(source, "layer_types", expected="a list", actual=repr(kinds))
    for layer, kind in enumerate(kinds or []):
        if kind != "full_attention":
            raise InputError(source, f"layer_types[{layer}]", expected="full_attention", actual=repr(kind))
    if values.get("quantization_config"):
        actual = values["quantization_config"]
        raise InputError(source, "quantization_config", expected="none (plain weights)", actual=actual)


def _rope(values: Mapping[str, Any], family: str, source: object) -> tuple[float, RopeScaling | None]:
    """`rope_theta` and scaling: at top level and in `rope_scaling`, or together in `rope_parameters`."""
    spellings = [_first(values.get(name), {}) for name in ("rope_scaling", "rope_parameters")]
    for name, part in zip(("rope_scaling", "rope_parameters"), spellings, strict=True):
        if not isinstance(part, Mapping):
            raise InputError(source, name, expected="an object", actual=repr(part))
    thetas = [part["rope_theta"] for part in (*spellings, values) if part.get("rope_theta") is not None]
    if any(theta != thetas[0] for theta in thetas):
        raise InputError(source, "rope_theta", expected="one value", actual=thetas)
    theta = thetas[0] if thetas else _DEFAULT_THETA

    rope = {k: v for k, v in (spellings[0] or spellings[1]).items() if v is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = _first(rope.get("partial_rotary_factor"), values.get("partial_rotary_factor"), 1.0)
    if partial != 1.0:
        raise InputError(source, "partial_rotary_factor", expected="1.0", actual=partial)
    if kind == "default":
        return theta, None
    if kind not in ROPE_TYPES:
        expected = f"one of default, {', '.join(ROPE_TYPES)}"
        raise InputError(source, "rope_scaling.rope_type", expected=expected, actual=repr(kind))
    fields = {k: v for k, v in rope.items() if k not in _ROPE_COMMON}
    for name in fields:
        if name not in ROPE_FIELDS[kind]:
            expected = f"one of {', '.join(ROPE_FIELDS[kind])}"
            raise InputError(source, f"rope_scaling.{name}", expected=expected, actual="an unknown field")
    if "factor" not in fields:
        raise InputError(source, "rope_scaling.factor", expected="a number", actual="no such field")
    if "original_max_position_embeddings" in ROPE_FIELDS[kind]:
        fields["original_max_position_embeddings"] = _first(
            values.get("original_max_position_embeddings"),
            fields.get("original_max_position_embeddings"),
            values.get("max_position_embeddings", _DEFAULT_POSITIONS[family]),
        )
    try:
        return theta, RopeScaling(kind, **fields)
    except InputError as error:
        field = f"rope_scaling.{error.field}"
        raise InputError(source, field, expected=error.expected, actual=error.actual) from None


def config_to_hf(config: Qwen3Config, *, dtype: str | None = None) -> dict[str, Any]:
    """The contents of a `config.json` that transformers (4 and 5), vLLM and SGLang read.

    Args:
      config: the model.
      dtype: the dtype of the saved parameters; None for the config's.
    """
    scaling, rope = config.rope_scaling, {"rope_type": "default"}
    if scaling is not None:
        fields = {name: getattr(scaling, name) for name in ROPE_FIELDS[scaling.rope_type]}
        rope = {"rope_type": scaling.rope_type, **{k: v for k, v in fields.items() if v is not None}}
    eos = config.eos_token_id
    dtype = dtype or config.storage_dtype
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        **{name: getattr(config, name) for name in _REQUIRED},
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if config.model_type != "qwen2":
        values["attention_bias"] = config.attention_bias
    if config.model_type == "llama":
        values["mlp_bias"] = config.mlp_bias
    else:
        values |= {"use_sliding_window": False, "sliding_window": None}
    return values
