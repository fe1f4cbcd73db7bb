"""An operation's entries under the model's head, block by block: numbers, losses and their vjp.

An operation's entries are one range. They go through the head `HEAD_BLOCK` at a time, in a loop that runs as
often as there are blocks: the numbers, their losses, and cotangents back to hidden states and head weights.
So nothing of size E x V exists, and operations without entries do nothing here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from dta_jax.model import DecoderModel, Head, Numbers, Params
from dta_jax.tree_inputs import HEAD_BLOCK, Entries, Op

LossFn: TypeAlias = Callable[[jax.Array, jax.Array, Mapping[str, jax.Array]], jax.Array]


class Outputs(NamedTuple):
    """What is collected: numbers and token_loss (unweighted) [E'], the loss [], rows run by kind [2]."""

    numbers: Numbers
    token_loss: jax.Array
    loss: jax.Array
    executed: jax.Array


def no_outputs(head: Head, capacity: int, dtype: Any) -> Outputs:
    """Zeros for E' = `capacity` entries."""
    zeros = jnp.zeros(capacity, dtype)
    numbers = Numbers(zeros, zeros, zeros if head.gives_value else None)
    return Outputs(numbers, zeros, zeros[0], jnp.zeros(2, jnp.int32))


def entry_loss(loss_fn: LossFn, numbers: Numbers, values: Mapping[str, jax.Array]) -> jax.Array:
    """The loss of one entry, scalars in, a scalar out. It finds a critic's value among the entry's values."""
    if numbers.value is not None:
        values = {**values, "value": numbers.value}
    return loss_fn(numbers.logp, numbers.entropy, values)


def evaluate_entries(
    model: DecoderModel, params: Params, h: jax.Array, op: Op, entries: Entries, outputs: Outputs
) -> Outputs:
    """Collects the numbers of the operation's entries.

    Args:
      h: [N, D], hidden states of all keys; entries name their parents among them.
    """
    weights = model.head.weights(params)

    def body(block: _Block, outputs: Outputs) -> Outputs:
        temperature = block.values["temperature"]
        numbers, _ = model.head.evaluate(
            weights, h[block.source], block.token, temperature, model.tensor_axis
        )
        return outputs._replace(numbers=block.store(outputs.numbers, numbers))

    return _for_blocks(op, entries, body, outputs)


def pull_entries(
    model: DecoderModel,
    loss_fn: LossFn,
    params: Params,
    h: jax.Array,
    dh: jax.Array,
    grads: Params,
    op: Op,
    entries: Entries,
    outputs: Outputs,
) -> tuple[jax.Array, Params, Outputs]:
    """Collects numbers and losses of the operation's entries, and pulls the losses back.

    Args:
      h: as in `evaluate_entries`.
      dh: [N, D], sums of the cotangents of h so far.
      grads: sums of parameter gradients so far, in the layout of `params`.

    Returns:
      dh and outputs with this operation's added, and the head's part of the gradients, likewise.
    """
    head, weights = model.head, model.head.weights(params)

    def body(block: _Block, state: tuple) -> tuple:
        dh, d_weights, outputs = state
        rows, temperature = h[block.source], block.values["temperature"]
        numbers, found = head.evaluate(weights, rows, block.token, temperature, model.tensor_axis)
        per_entry = jax.vmap(jax.value_and_grad(functools.partial(entry_loss, loss_fn)))
        token_loss, slope = per_entry(numbers, block.values)
        weight = block.values["weight"].astype(token_loss.dtype)
        cotangents = jax.tree.map(lambda d: jnp.where(block.real, weight * d, 0), slope)
        dh_rows, d_block = head.pull(
            weights, rows, block.token, temperature, found, cotangents, model.tensor_axis
        )
        outputs = Outputs(
            block.store(outputs.numbers, numbers),
            block.store(outputs.token_loss, token_loss),
            outputs.loss + jnp.where(block.real, weight * token_loss, 0).sum(),
            outputs.executed,
        )
        return dh.at[block.source].add(dh_rows), jax.tree.map(jnp.add, d_weights, d_block), outputs

    return _for_blocks(op, entries, body, (dh, head.weights(grads), outputs))


class _Block(NamedTuple):
    """HEAD_BLOCK entries, of which those with `real` belong to the operation that runs."""

    at: jax.Array
    real: jax.Array
    token: jax.Array
    source: jax.Array
    values: dict[str, jax.Array]

    def store(self, collected: Any, found: Any) -> Any:
        """Writes arrays [B] of this block into arrays [E']."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            kept = lax.dynamic_slice_in_dim(old, self.at, len(new))
            return lax.dynamic_update_slice_in_dim(
                old, jnp.where(self.real, new.astype(old.dtype), kept), self.at, 0
            )

        return jax.tree.map(put, collected, found)


def _for_blocks(op: Op, entries: Entries, body: Callable[[_Block, Any], Any], state: Any) -> Any:
    """Runs `body` on each block of the operation's entries."""

    def step(carry: tuple) -> tuple:
        at, state = carry
        token, source, values = jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(a, at, min(HEAD_BLOCK, len(a))), entries
        )
        real = at + jnp.arange(len(token), dtype=jnp.int32) < op.stop
        # Entries of other operations may have sources that are not there: read row 0 in their place.
        return at + len(token), body(_Block(at, real, token, jnp.where(real, source, 0), values), state)

    return lax.while_loop(lambda carry: carry[0] < op.stop, step, (op.start, state))[1]
