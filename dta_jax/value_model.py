"""Critics: any decoder with a value head, in place of its LM head or beside it.

    ValueModel(decoder)                      weights of its own; losses read entry["value"]
    ValueModel(decoder, with_policy=True)    one trunk for both: log-probability and entropy too, in one pass

Parameters are the decoder's and `value` [D]; without the policy, an LM head of its own is left out. The tree
engine runs a critic as it runs any model, on one device and on a mesh (`value` is whole on every `tensor`
device). What it costs is the trunk; a value alone costs next to nothing where an LM head costs E x V.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dta_jax.errors import InputError
from dta_jax.model import DecoderModel, Head, LayerParams, Params
from dta_jax.value_head import PolicyValueHead, ValueHead


@dataclass(frozen=True)
class ValueModel:
    """`dta_jax.model.DecoderModel` around another one.

    Attributes:
      decoder: a model with an LM head; it computes everything but the value.
      with_policy: keeps its LM head, so that one pass gives log-probability, entropy and value.
    """

    decoder: DecoderModel
    with_policy: bool = False

    def __post_init__(self) -> None:
        if self.decoder.head.gives_value:
            raise InputError(
                "ValueModel", "decoder", expected="a model without a value head", actual=repr(self.decoder)
            )

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def num_heads(self) -> int:
        return self.decoder.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.decoder.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.decoder.head_dim

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def tensor_axis(self) -> str | None:
        return self.decoder.tensor_axis

    @property
    def attention_scale(self) -> float:
        return self.decoder.attention_scale

    @property
    def attention_backend(self) -> str:
        return self.decoder.attention_backend

    @property
    def head(self) -> Head:
        return PolicyValueHead() if self.with_policy else ValueHead()

    def init(self, key: jax.Array) -> Params:
        """The decoder's random parameters, and values of 0."""
        return self.from_policy(self.decoder.init(key))

    def from_policy(self, params: Params) -> Params:
        """A critic's parameters that begin as a policy's: its trunk, and a value head of zeros.

        Args:
          params: the decoder's, e.g. from a Hugging Face folder or a policy's checkpoint, not yet on a mesh.

        Returns:
          a dictionary of its own that shares the policy's arrays: copy them before one of the two is donated.

        Raises:
          InputError: they have a value head already.
        """
        if "value" in params:
            raise InputError("policy", "params", expected="no parameter 'value'", actual=sorted(params))
        value = jnp.zeros(self.hidden_size, params["embed"].dtype)
        return self._trunk(params) | {"value": value}

    def policy_params(self, params: Params) -> Params:
        """The decoder's part of a policy with a value head, to generate with it or to export it.

        Raises:
          InputError: this critic has no policy.
        """
        if not self.with_policy:
            raise InputError("ValueModel", "with_policy", expected="True, to have a policy", actual=False)
        return {name: part for name, part in params.items() if name != "value"}

    def qkv(
        self, layer: LayerParams, x: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The decoder's."""
        return self.decoder.qkv(layer, x, position)

    def mix(self, layer: LayerParams, x: jax.Array, o: jax.Array) -> jax.Array:
        """The decoder's."""
        return self.decoder.mix(layer, x, o)

    def final(self, params: LayerParams, x: jax.Array) -> jax.Array:
        """The decoder's."""
        return self.decoder.final(params, x)

    def split(self, axis: str, size: int) -> ValueModel:
        """One device's share of the decoder; see `DecoderModel.split`."""
        return ValueModel(self.decoder.split(axis, size), self.with_policy)

    def logical_axes(self, params: Params) -> Params:
        """The decoder's; the value head's vector is cut nowhere."""
        decoder = {name: part for name, part in params.items() if name != "value"}
        return self.decoder.logical_axes(decoder) | {"value": ("embed",)}

    def _trunk(self, params: Params) -> Params:
        dropped = () if self.with_policy else ("head",)
        return {name: part for name, part in params.items() if name not in dropped}
