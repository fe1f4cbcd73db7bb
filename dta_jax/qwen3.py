"""Qwen3 (and its plainer relatives Qwen2 and Llama) behind the protocol of `dta_jax.model`.

One layer, rows in, rows out; the engine runs the attention between the two halves:

    qkv:  q, k, v = W_q n, W_k n, W_v n  with  n = RMSNorm(x);  q, k = rope(RMSNorm(q)), rope(RMSNorm(k))
    mix:  y = x + W_o o;  y + W_down (silu(W_gate m) * W_up m)  with  m = RMSNorm(y)

The families differ in three switches only: Qwen3 normalises q and k per head, Qwen2 has biases on q, k
and v, Llama has neither. Field names are those of a Hugging Face `config.json`.

Mixed precision: matrix products run in `dtype`; RMSNorm and RoPE run in float32 at least; the residual
stream keeps the dtype it came in with.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp

from dta_jax.errors import InputError
from dta_jax.lm_head import LMHead
from dta_jax.model import LayerParams, Params
from dta_jax.rope import RopeScaling, rotate
from dta_jax.tensor_axis import enter, leave
from dta_jax.types import accumulator_dtype

FAMILIES: Final = ("qwen3", "qwen2", "llama")
PROJECTIONS: Final = {  # logical axes that each matrix takes and gives
    "q_proj": ("embed", "heads"),
    "k_proj": ("embed", "kv_heads"),
    "v_proj": ("embed", "kv_heads"),
    "o_proj": ("heads", "embed"),
    "gate_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
}
DTYPES: Final = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Qwen3Config:
    """Shape and numerics of a dense decoder, by the names of `config.json`. Frozen and hashable.

    Attributes:
      vocab_size: V.
      hidden_size: D.
      num_hidden_layers: L.
      num_attention_heads: H, query heads.
      num_key_value_heads: K, divides H.
      head_dim: width of one head; need not be D / H.
      intermediate_size: width of the MLP.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how the frequencies are stretched for long contexts, if at all.
      rms_norm_eps: added to the mean square.
      tie_word_embeddings: the head is the embedding.
      attention_bias: biases on q, k, v and o. (Qwen2 always has them on q, k and v, never on o.)
      mlp_bias: biases on the MLP's three matrices (Llama only).
      max_position_embeddings: the longest path that the model is meant for.
      initializer_range: standard deviation of random matrices.
      model_type: "qwen3", "qwen2" or "llama".
      bos_token_id, eos_token_id: carried along for generation and export.
      dtype: dtype of matrix products and activations.
      param_dtype: dtype that parameters are made in; None means `dtype`.
    """

    vocab_size: int = 512
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 40_960
    initializer_range: float = 0.02
    model_type: str = "qwen3"
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    dtype: str = "float32"
    param_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _bad(name, "a positive integer", repr(value))
        for name in ("bos_token_id", "eos_token_id"):
            ids = getattr(self, name)
            several = isinstance(ids, tuple) and name == "eos_token_id"
            if not all(type(token) is int for token in (ids if several else (0 if ids is None else ids,))):
                raise _bad(name, "a token id, or None", repr(ids))
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise _bad("rope_scaling", "a RopeScaling, or None", repr(self.rope_scaling))
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, "True or False", repr(getattr(self, name)))
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
                raise _bad(name, "a positive number", repr(value))
        if self.rope_theta <= 1:
            raise _bad("rope_theta", "above 1", self.rope_theta)
        if self.num_attention_heads % self.num_key_value_heads:
            divisor = f"a divisor of num_attention_heads={self.num_attention_heads}"
            raise _bad("num_key_value_heads", divisor, self.num_key_value_heads)
        if self.head_dim % 2:
            raise _bad("head_dim", "an even number (rotary pairs)", self.head_dim)
        if self.model_type not in FAMILIES:
            raise _bad("model_type", f"one of {', '.join(FAMILIES)}", repr(self.model_type))
        if self.mlp_bias and self.model_type != "llama":
            raise _bad("mlp_bias", f"False for model_type={self.model_type}", True)
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            if value not in DTYPES and not (name == "param_dtype" and value is None):
                raise _bad(name, f"one of {', '.join(DTYPES)}", repr(value))

    @property
    def qk_norm(self) -> bool:
        """Whether q and k are normalised per head."""
        return self.model_type == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.model_type == "qwen2" or self.attention_bias

    @property
    def o_bias(self) -> bool:
        """Whether o has a bias."""
        return self.model_type != "qwen2" and self.attention_bias

    @property
    def storage_dtype(self) -> str:
        """The dtype of the parameters."""
        return self.param_dtype or self.dtype


def _bad(field: str, expected: object, actual: object) -> InputError:
    return InputError("model config", field, expected=expected, actual=actual)


class RMSNorm(nn.Module):
    """y = scale * x / sqrt(mean(x^2) + eps), in float32 at least, over the last axis."""

    eps: float
    dtype: str
    param_dtype: str
    axis: str | None = None  # set where the rows are cut over `tensor` and the scale is not

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.dtype(self.param_dtype))
        wide = accumulator_dtype(x.dtype)
        x = x.astype(wide)
        scale = enter(scale, self.axis)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (scale.astype(wide) * x).astype(self.dtype)


class Projection(nn.Module):
    """y = x W + b. `reduced`: the inputs are cut over `axis`, and what the devices compute is added up."""

    features: int
    use_bias: bool
    dtype: str
    param_dtype: str
    scale: float
    axis: str | None
    reduced: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init, stored = nn.initializers.normal(self.scale), jnp.dtype(self.param_dtype)
        kernel = self.param("kernel", init, (x.shape[-1], self.features), stored)
        y = jnp.dot(x.astype(self.dtype), kernel.astype(self.dtype))
        if self.reduced:
            y = leave(y, self.axis)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,), stored).astype(self.dtype)
        return y


class Block(nn.Module):
    """One layer in two halves; see the module docstring. Submodules bear Hugging Face's names."""

    config: Qwen3Config
    axis: str | None = None

    def setup(self) -> None:
        c = self.config
        self.input_layernorm = _norm(c)
        self.q_proj = self._projection(c.num_attention_heads * c.head_dim, c.qkv_bias)
        self.k_proj = self._projection(c.num_key_value_heads * c.head_dim, c.qkv_bias)
        self.v_proj = self._projection(c.num_key_value_heads * c.head_dim, c.qkv_bias)
        if c.qk_norm:
            self.q_norm = _norm(c, self.axis)
            self.k_norm = _norm(c, self.axis)
        self.o_proj = self._projection(c.hidden_size, c.o_bias, reduced=True)
        self.post_attention_layernorm = _norm(c)
        self.gate_proj = self._projection(c.intermediate_size, c.mlp_bias)
        self.up_proj = self._projection(c.intermediate_size, c.mlp_bias)
        self.down_proj = self._projection(c.hidden_size, c.mlp_bias, reduced=True)

    def _projection(self, features: int, bias: bool, reduced: bool = False) -> Projection:
        c = self.config
        return Projection(features, bias, c.dtype, c.storage_dtype, c.initializer_range, self.axis, reduced)

    def qkv(self, x: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [C, D], position [C] -> q [C, H, head_dim], k and v [C, K, head_dim]."""
        c = self.config
        n = enter(self.input_layernorm(x), self.axis)
        q, k, v = (
            project(n).reshape(len(x), -1, c.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(a, position, c.rope_theta, c.rope_scaling) for a in (q, k))
        return q, k, v

    def mix(self, x: jax.Array, o: jax.Array) -> jax.Array:
        """x [C, D], o [C, H, head_dim] -> [C, D] in x's dtype."""
        x = x + self.o_proj(o.reshape(len(x), -1)).astype(x.dtype)
        m = enter(self.post_attention_layernorm(x), self.axis)
        return x + self.down_proj(nn.silu(self.gate_proj(m)) * self.up_proj(m)).astype(x.dtype)

    def init_all(self, x: jax.Array, position: jax.Array) -> jax.Array:
        """Touches every parameter, so that `init` makes them all."""
        q, _, _ = self.qkv(x, position)
        return self.mix(x, q)


def _norm(c: Qwen3Config, axis: str | None = None) -> RMSNorm:
    return RMSNorm(c.rms_norm_eps, c.dtype, c.storage_dtype, axis)


@dataclass(frozen=True)
class Qwen3:
    """`dta_jax.model.DecoderModel` for a `Qwen3Config`; a static argument of compiled functions.

    With a `tensor_axis`, the config's numbers of heads and its MLP are those of one device (see `split`).
    `attention_backend` is one of `dta_jax.attention_backends.CHOICES`.
    """

    config: Qwen3Config
    tensor_axis: str | None = None
    attention_backend: str = "auto"

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def num_heads(self) -> int:
        return self.config.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def attention_scale(self) -> float:
        return self.config.head_dim**-0.5

    @property
    def head(self) -> LMHead:
        return LMHead()

    def init(self, key: jax.Array) -> Params:
        """Random parameters: matrices normal with `initializer_range`, norms 1, biases 0."""
        c = self.config
        dtype = jnp.dtype(c.storage_dtype)
        embed_key, head_key, layer_key = jax.random.split(key, 3)
        normal = nn.initializers.normal(c.initializer_range)
        row = jnp.zeros((1, c.hidden_size), jnp.dtype(c.dtype))
        at = jnp.zeros(1, jnp.int32)
        block = Block(c)
        params: Params = {
            "embed": normal(embed_key, (c.vocab_size, c.hidden_size), dtype),
            "layers": jax.vmap(lambda k: block.init(k, row, at, method="init_all")["params"])(
                jax.random.split(layer_key, c.num_hidden_layers)
            ),
            "final": {"scale": jnp.ones(c.hidden_size, dtype)},
        }
        if not c.tie_word_embeddings:
            params["head"] = normal(head_key, (c.vocab_size, c.hidden_size), dtype)
        return params

    def qkv(
        self, layer: LayerParams, x: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The layer up to its attention; see `DecoderModel.qkv`."""
        return _apply(Block(self.config, self.tensor_axis), layer, x, position, method="qkv")

    def mix(self, layer: LayerParams, x: jax.Array, o: jax.Array) -> jax.Array:
        """The layer from its attention output on; see `DecoderModel.mix`."""
        return _apply(Block(self.config, self.tensor_axis), layer, x, o, method="mix")

    def final(self, params: LayerParams, x: jax.Array) -> jax.Array:
        """The last norm; see `DecoderModel.final`."""
        return _apply(_norm(self.config), params, x)

    def split(self, axis: str, size: int) -> Qwen3:
        """One device's share of heads and MLP; see `DecoderModel.split`."""
        shares = {}
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
            whole = getattr(self.config, name)
            if whole % size:
                hint = f"choose {axis} such that it divides {whole}"
                raise InputError(
                    "model config", name, expected=f"a multiple of {axis}={size}", actual=whole, hint=hint
                )
            shares[name] = whole // size
        del shares["vocab_size"]  # ids are checked against the whole
        return Qwen3(dataclasses.replace(self.config, **shares), axis, self.attention_backend)

    def logical_axes(self, params: Params) -> Params:
        """Names of the parameters' dimensions; see `DecoderModel.logical_axes`."""
        return jax.tree_util.tree_map_with_path(lambda path, _: _logical_axes(*(k.key for k in path)), params)


def _logical_axes(group: str, *path: str) -> tuple[str, ...]:
    if group in ("embed", "head"):
        return ("vocab", "embed")
    if group == "final":
        return ("embed",)
    module, leaf = path
    if leaf == "scale":
        return ("layers", "head_dim" if module in ("q_norm", "k_norm") else "embed")
    inputs, outputs = PROJECTIONS[module]
    return ("layers", outputs) if leaf == "bias" else ("layers", inputs, outputs)


def _apply(module: nn.Module, params: Any, *args: jax.Array, method: str = "__call__") -> Any:
    return module.apply({"params": params}, *args, method=method)


def _public(width: int, layers: int, heads: int, mlp: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=mlp,
        tie_word_embeddings=tied,
        bos_token_id=151_643,
        eos_token_id=151_645,
        dtype="bfloat16",
    )


PRESETS: Final = {
    "tiny": Qwen3Config(),
    "qwen3-0.6b": _public(1024, 28, 16, 3072, True),
    "qwen3-1.7b": _public(2048, 28, 16, 6144, True),
    "qwen3-4b": _public(2560, 36, 32, 9728, True),
    "qwen3-8b": _public(4096, 36, 32, 12_288, False),
    "qwen3-14b": _public(5120, 40, 40, 17_408, False),
    "qwen3-32b": _public(5120, 64, 64, 25_600, False),
}


def preset(name: str, **changes: object) -> Qwen3Config:
    """The named config of `PRESETS`, with some fields changed; weights and theta of a real checkpoint
    always come from its own folder, never from here.

    Raises:
      InputError: the name or a field is unknown, or a value is out of range.
    """
    if name.lower() not in PRESETS:
        raise InputError("model preset", "name", expected=f"one of {', '.join(PRESETS)}", actual=repr(name))
    fields = {f.name for f in dataclasses.fields(Qwen3Config)}
    for field in changes:
        if field not in fields:
            raise _bad(field, f"one of {', '.join(sorted(fields))}", "an unknown field")
    return dataclasses.replace(PRESETS[name.lower()], **changes)  # type: ignore[arg-type]
