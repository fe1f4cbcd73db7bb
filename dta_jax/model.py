"""What a model must offer so that it can be run over a tree: the protocol, and its parameter layout.

The engine owns everything that knows of the tree (positions, masks, the stack, the order of
execution, where gradients are added up). A model owns only what happens to one row at a time, in two
halves of a layer around the attention that the engine runs:

    x = embed[token]
    for each layer:   q, k, v = model.qkv(layer, x, position)
                      o = attention(q; k, v of the row's ancestors and of the row itself)
                      x = model.mix(layer, x, o)
    h = model.final(params["final"], x)
    numbers of the entries whose parent is the row = model.head of h

Parameters are one dictionary:

    embed   [V, D]
    layers  any pytree whose leaves are stacked over layers: [L, ...]
    final   any pytree (the last norm)

and what the head reads beside them: `head` [V, D] of an LM head, absent when that is the embedding
("tied"); `value` [D] of a value head (`dta_jax.value_model`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax

from dta_jax.errors import InputError

Params: TypeAlias = dict[str, Any]
LayerParams: TypeAlias = Any


class Numbers(NamedTuple):
    """What a head finds for entries, one number per entry each; or the cotangents of that.

    logp: log-probability of the entry's token, nats; 0 where the model has no LM head.
    entropy: of the distribution that the token was drawn from, nats; 0 where the model has no LM head.
    value: the critic's value of the state before the token; None where the model has no value head.
    """

    logp: Any
    entropy: Any
    value: Any = None


class Head(Protocol):
    """What reads the numbers of entries off the hidden states of their parent rows. Hashable, as models are.

    Weights are those parameters that the head reads, in a dictionary under their own names.
    """

    @property
    def gives_logp(self) -> bool:
        """Whether `Numbers.logp` and `Numbers.entropy` are a policy's; they are 0 if not."""

    @property
    def gives_value(self) -> bool:
        """Whether `Numbers.value` is there."""

    def weights(self, params: Params) -> Params:
        """The head's own of all parameters, or of a gradient in their layout."""

    def evaluate(
        self,
        weights: Params,
        h: jax.Array,
        token: jax.Array,
        temperature: jax.Array,
        axis: str | None = None,
    ) -> tuple[Numbers, Any]:
        """The numbers of B entries.

        Args:
          weights: from `weights`.
          h: [B, D] hidden states of the entries' parents.
          token: int32[B], below V.
          temperature: float[B], above 0.
          axis: the model's `tensor_axis`; h is whole on all of its devices.

        Returns:
          Numbers [B], in float32 at least, and what `pull` needs of them.
        """

    def pull(
        self,
        weights: Params,
        h: jax.Array,
        token: jax.Array,
        temperature: jax.Array,
        found: Any,
        cotangents: Numbers,
        axis: str | None = None,
    ) -> tuple[jax.Array, Params]:
        """The vjp of `evaluate`: cotangents [B] -> dh [B, D], whole on all devices, and those of the weights.

        `found` is the second result of `evaluate`. Results are in float32 at least; entries with zero
        cotangents add exactly nothing.
        """


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

    @property
    def attention_backend(self) -> str:
        """Who computes attention: "auto", "xla" or "pallas" (`dta_jax.attention_backends`)."""

    @property
    def head(self) -> Head:
        """What losses read of the final hidden states."""

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
        """The last norm: x [C, D] -> hidden states [C, D] that the head reads."""

    def split(self, axis: str, size: int) -> DecoderModel:
        """The model as one of `size` devices along a mesh axis computes it, with the collectives of
        `dta_jax.tensor_axis`.

        Raises:
          InputError: `size` does not divide its heads, MLP or vocabulary.
        """

    def logical_axes(self, params: Params) -> Params:
        """A tuple per parameter that names its dimensions; `dta_jax.sharding.RULES` lists the names."""


def require_policy(model: DecoderModel) -> None:
    """Refuses to take a critic's zeros for log-probabilities.

    Raises:
      InputError: the model has no LM head.
    """
    if not model.head.gives_logp:
        hint = "values are in the numbers of tree_forward or mesh_forward"
        raise InputError("model", "head", expected="an LM head", actual=repr(model.head), hint=hint)


def head_weights(params: Params) -> jax.Array:
    """The LM head's matrix, [V, D]: `params["head"]`, or the embedding when they are tied."""
    return params["head"] if "head" in params else params["embed"]


def cast(params: Params, dtype: str) -> Params:
    """The weights in the dtype that they are computed with; what has it already is not copied."""
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), params)
