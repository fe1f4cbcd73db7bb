"""What a model must offer so that it can be run over a tree: the protocol, and its parameter layout.

The engine owns everything that knows of the tree (positions, masks, the stack, the order of
execution, where gradients are added up). A model owns only what happens to one row at a time, in two
halves of a layer around the attention that the engine runs:

    x = embed[token]
    for each layer:   q, k, v = model.qkv(layer, x, position)
                      o = attention(q; k, v of the row's ancestors and of the row itself)
                      x = model.mix(layer, x, o)
    h = model.final(params["final"], x);   logits = h @ head.T

Parameters are one dictionary:

    embed   [V, D]
    layers  any pytree whose leaves are stacked over layers: [L, ...]
    final   any pytree (the last norm)
    head    [V, D]; absent when the model's head is its embedding ("tied")
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax

Params: TypeAlias = dict[str, Any]
LayerParams: TypeAlias = Any


@runtime_checkable
class DecoderModel(Protocol):
    """A decoder-only transformer, seen one row at a time. Must be hashable: it is a static argument."""

    @property
    def num_layers(self) -> int:
        """L."""

    @property
    def num_heads(self) -> int:
        """H, query heads."""

    @property
    def num_kv_heads(self) -> int:
        """K, key and value heads; divides H. Query head `i` reads key head `i // (H // K)`."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""

    @property
    def hidden_size(self) -> int:
        """D."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def tensor_axis(self) -> str | None:
        """The mesh axis over which heads, MLP and vocabulary are cut; None for a whole model. Numbers of
        heads are then those of one device, the vocabulary is the whole."""

    @property
    def attention_scale(self) -> float:
        """Factor on q . k before the softmax."""

    def init(self, key: jax.Array) -> Params:
        """Random parameters in the layout above, in the model's parameter dtype."""

    def qkv(
        self, layer: LayerParams, x: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The layer up to its attention, positions applied.

        Args:
          layer: one layer's parameters (a slice of `params["layers"]`).
          x: [C, D] rows; every row is independent of the others.
          position: int32[C], depth of each row in its sequence.

        Returns:
          q [C, H, head_dim], k [C, K, head_dim], v [C, K, head_dim].
        """

    def mix(self, layer: LayerParams, x: jax.Array, o: jax.Array) -> jax.Array:
        """The layer from its attention output on: x [C, D], o [C, H, head_dim] -> [C, D]."""

    def final(self, params: Any, x: jax.Array) -> jax.Array:
        """The last norm: x [C, D] -> hidden states [C, D] that the head multiplies."""

    def split(self, axis: str, size: int) -> DecoderModel:
        """The model as one of `size` devices along a mesh axis computes it, with the collectives of
        `dta_jax.tensor_axis`.

        Raises:
          InputError: `size` does not divide its heads, MLP or vocabulary.
        """

    def logical_axes(self, params: Params) -> Params:
        """A tuple per parameter that names its dimensions; `dta_jax.sharding.RULES` lists the names."""


def head_weights(params: Params) -> jax.Array:
    """The LM head, [V, D]: `params["head"]`, or the embedding when they are tied."""
    return params["head"] if "head" in params else params["embed"]
