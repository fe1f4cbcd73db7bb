"""The dense oracle: every sequence on its own, differentiated by `jax.grad`. No trie, no stack, no sharing.

What tests compare the tree engine with, and the baselines of the benchmark: `remat=False` keeps every
activation, `remat=True` recomputes each layer in the backward pass (`jax.checkpoint`). With
`attention="blockwise"` sequences of any length fit, and the comparison is with the best that the same
attention can do; `attention="dense"` is the one to trust.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dta_jax import memory
from dta_jax.attention import attend, attend_dense
from dta_jax.entry_blocks import LossFn, entry_loss
from dta_jax.model import DecoderModel, Head, LayerParams, Numbers, Params, head_weights
from dta_jax.segment import zero_gradients
from dta_jax.tree_inputs import HEAD_BLOCK
from dta_jax.types import Samples, accumulator_dtype

Attention: TypeAlias = Literal["dense", "blockwise"]
ATTENTION: Final[Mapping[str, Callable[..., jax.Array]]] = {"dense": attend_dense, "blockwise": attend}


@dataclass(frozen=True)
class DenseResult:
    """loss [], grads in the layout of the parameters, numbers [E] in the caller's order."""

    loss: jax.Array
    grads: Params
    numbers: Numbers

    @property
    def logp(self) -> np.ndarray:
        """[E] log-probability of each entry."""
        return self.numbers.logp

    @property
    def entropy(self) -> np.ndarray:
        """[E] entropy of each entry's distribution."""
        return self.numbers.entropy


def dense_hidden(
    model: DecoderModel,
    params: Params,
    tokens: jax.Array,
    *,
    attention: Attention = "dense",
    remat: bool = False,
) -> jax.Array:
    """Final hidden states [n, D] of one sequence, int32[n], under causal attention."""
    index = jnp.arange(len(tokens), dtype=jnp.int32)
    end = jnp.full_like(index, len(tokens))

    def layer_step(x: jax.Array, layer: LayerParams) -> tuple[jax.Array, None]:
        q, k, v = model.qkv(layer, x, index)
        o = ATTENTION[attention](q, k, v, index, end, model.attention_scale)
        return model.mix(layer, x, o), None

    step = jax.checkpoint(layer_step) if remat else layer_step
    x, _ = jax.lax.scan(step, params["embed"][tokens], params["layers"])
    return model.final(params["final"], x)


def dense_logits(model: DecoderModel, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits [n, V] of one sequence, int32[n]; float32, or float64 for a float64 model."""
    h = dense_hidden(model, params, tokens)
    acc = accumulator_dtype(h.dtype)
    return jnp.einsum("nd,vd->nv", h, head_weights(params).astype(h.dtype), preferred_element_type=acc)


def dense_value_and_grad(
    model: DecoderModel,
    params: Params,
    samples: Samples,
    loss_fn: LossFn,
    *,
    attention: Attention = "dense",
    remat: bool = False,
    pad_to: int = 1,
) -> DenseResult:
    """The same loss and gradient as `tree_value_and_grad`, one sequence after the other.

    Args:
      model, params, loss_fn: as there.
      samples: sequences and entries; `samples.values` as the `values` there.
      attention, remat: see the module.
      pad_to: lengths and entry counts are padded to multiples of it, to compile fewer shapes.

    Returns:
      `DenseResult`; gradients are summed over sequences in float32 (float64 for float64 models).
    """
    acc = accumulator_dtype(params["embed"].dtype)
    grads, loss = zero_gradients(params), jnp.zeros((), acc)
    fields = Numbers._fields if model.head.gives_value else Numbers._fields[:2]
    numbers = Numbers(**{name: np.zeros(len(samples.sequence), acc) for name in fields})
    for mine, batch in _one_by_one(samples, pad_to, acc):
        loss, grads, found = _add_sequence(model, loss_fn, params, loss, grads, *batch, attention, remat)
        for all_numbers, some in zip(jax.tree.leaves(numbers), jax.tree.leaves(found), strict=True):
            all_numbers[mine] = np.asarray(some)[: len(mine)]
    return DenseResult(loss, grads, numbers)


def peak_bytes(
    model: DecoderModel,
    params: Params,
    samples: Samples,
    loss_fn: LossFn,
    *,
    attention: Attention = "dense",
    remat: bool = False,
    pad_to: int = 1,
) -> int:
    """Peak bytes of the largest program that `dense_value_and_grad` would run; arguments as there."""
    acc = accumulator_dtype(params["embed"].dtype)
    start = jax.ShapeDtypeStruct((), acc), jax.eval_shape(zero_gradients, params)
    return max(
        memory.peak_bytes(
            _add_sequence.lower(model, loss_fn, params, *start, *batch, attention, remat).compile()
        )
        for _, batch in _one_by_one(samples, pad_to, acc)
    )


def _one_by_one(samples: Samples, pad_to: int, acc: np.dtype) -> Iterator[tuple[np.ndarray, tuple]]:
    """Each sequence that has entries: their indices, and its arrays."""
    by_sequence = np.argsort(samples.sequence, kind="stable")
    bounds = np.searchsorted(samples.sequence[by_sequence], np.arange(len(samples.sequences) + 1))
    for i, sequence in enumerate(samples.sequences):
        mine = by_sequence[bounds[i] : bounds[i + 1]]
        if len(mine):
            yield mine, _padded(sequence, samples.position[mine], samples.values, mine, pad_to, acc)


def _padded(
    sequence: np.ndarray,
    position: np.ndarray,
    values: Mapping[str, np.ndarray],
    mine: np.ndarray,
    pad_to: int,
    acc: np.dtype,
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    tokens = np.pad(sequence, (0, -len(sequence) % pad_to)).astype(np.int32)
    extra = -len(mine) % pad_to
    entry = {"temperature": np.ones(len(mine), acc)} | {k: v[mine].astype(acc) for k, v in values.items()}
    entry = {k: np.concatenate([v, np.ones(extra, acc)]) for k, v in entry.items()}
    entry["weight"][len(mine) :] = 0
    return tokens, np.concatenate([position, np.ones(extra)]).astype(np.int32), entry


@functools.partial(
    jax.jit, static_argnames=("model", "loss_fn", "attention", "remat"), donate_argnames=("loss", "grads")
)
def _add_sequence(
    model: DecoderModel,
    loss_fn: LossFn,
    params: Params,
    loss: jax.Array,
    grads: Params,
    tokens: jax.Array,
    position: jax.Array,
    entry: dict[str, jax.Array],
    attention: Attention,
    remat: bool,
) -> tuple[jax.Array, Params, Numbers]:
    def sequence_loss(params: Params) -> tuple[jax.Array, Numbers]:
        h = dense_hidden(model, params, tokens, attention=attention, remat=remat)
        numbers = _entry_numbers(model.head, h[position - 1], params, tokens[position], entry["temperature"])
        losses = jax.vmap(functools.partial(entry_loss, loss_fn))(numbers, entry)
        return jnp.where(entry["weight"] != 0, entry["weight"] * losses, 0).sum(), numbers

    (value, found), d = jax.value_and_grad(sequence_loss, has_aux=True)(params)
    return loss + value, jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, d), found


def _entry_numbers(
    head: Head, h: jax.Array, params: Params, token: jax.Array, temperature: jax.Array
) -> Numbers:
    """Plain autodiff for few entries; blocks, recomputed in the backward pass, for many."""
    weights = head.weights(params)
    if len(token) <= HEAD_BLOCK or len(token) % HEAD_BLOCK:
        return head.evaluate(weights, h, token, temperature)[0]
    blocks = jax.tree.map(lambda a: a.reshape(-1, HEAD_BLOCK, *a.shape[1:]), (h, token, temperature))
    numbers = jax.lax.map(lambda block: recomputed_numbers(head, weights, *block), blocks)
    return jax.tree.map(lambda a: a.reshape(-1), numbers)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recomputed_numbers(
    head: Head, weights: Params, h: jax.Array, token: jax.Array, temperature: jax.Array
) -> Numbers:
    """`Head.evaluate` as one function, differentiable in weights and h, that keeps neither logits nor p."""
    return head.evaluate(weights, h, token, temperature)[0]


def _recomputed_fwd(head: Head, *given: Any) -> tuple[Numbers, tuple]:
    return recomputed_numbers(head, *given), given


def _recomputed_bwd(head: Head, given: tuple, cotangents: Numbers) -> tuple:
    weights, h, token, temperature = given
    _, found = head.evaluate(weights, h, token, temperature)
    dh, d_weights = head.pull(weights, h, token, temperature, found, cotangents)
    return jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights), dh.astype(h.dtype), None, None


recomputed_numbers.defvjp(_recomputed_fwd, _recomputed_bwd)
