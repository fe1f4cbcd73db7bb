"""Exact losses and gradients over a prefix tree: each shared token is computed once.

`tree_value_and_grad` interprets a schedule on one device (`dta_jax.mesh_grad` runs the same steps on a mesh).
Its two kinds of operation are two jitted steps that the host dispatches one after the other, without
waiting for any:

    PUSH   h, K, V of some rows, written to their slots of the stack
    BACK   the same forward pass; then the loss of the rows' entries and its vjp. The rows first take over
           the cotangents which later rows left at their slots; what they owe to their own context they
           add at its slots. Where every row is pushed (`Schedule.keep_residuals`), what its vjp needs is kept
           by slot, and BACK runs nothing a second time.

What a loss reads of a row's token comes from the hidden state of its parent, which is one of the rows or on
the stack, under the model's head: an LM head, a value head, or both. Only rows with entries go through it, in
blocks (`dta_jax.entry_blocks`).

Losses that are sums over entries (`dta_jax.losses`) take one pass. For any other function of the entries'
log-probabilities, call `tree_logprobs`, take the function's gradient, and give it back as the
cotangents of a linear loss (`dta_jax.sequence_losses`); that is exact too.

Compiled programs depend on the model, the loss, and the buckets (chunk and push widths, S, entry
capacity), never on the trie. Source: AReaL-DTA, arXiv 2602.00482; the order of execution is ours
(`dta_jax.schedule`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from dta_jax import segment
from dta_jax.entry_blocks import LossFn, Outputs, evaluate_entries, no_outputs, pull_entries
from dta_jax.model import DecoderModel, Numbers, Params, require_policy
from dta_jax.phases import dispatch
from dta_jax.segment import Residuals, Stack, num_keys
from dta_jax.tree_inputs import Entries, Op, prepare
from dta_jax.types import BACK, PUSH, Schedule, accumulator_dtype


class Back(NamedTuple):
    """What BACK steps carry from one to the next; donated, so updated in place."""

    stack: Stack
    cotangents: Stack
    grads: Params
    outputs: Outputs


@dataclass(frozen=True)
class TreeResult:
    """Loss and gradients of a batch.

    Attributes:
      grads: float32 (float64 for float64 models), in the layout of the parameters.
      outputs: everything that was collected, on the device, in the schedule's order.
      schedule: what was run.
    """

    grads: Params
    outputs: Outputs
    schedule: Schedule

    @property
    def loss(self) -> jax.Array:
        """float[], `sum_e weight[e] * loss(e)`, on the device."""
        return self.outputs.loss

    @property
    def executed(self) -> jax.Array:
        """int32[2], rows run by kind."""
        return self.outputs.executed

    @property
    def numbers(self) -> Numbers:
        """[E] what the head found for each entry, in the caller's order. Waits for the device."""
        return numbers_in_callers_order(self.outputs, self.schedule)

    @property
    def logp(self) -> np.ndarray:
        """[E] log-probability of each entry, in the caller's order. Waits for the device."""
        return in_callers_order(self.outputs.numbers.logp, self.schedule)

    @property
    def entropy(self) -> np.ndarray:
        """[E] entropy of each entry's distribution, in the caller's order. Waits for the device."""
        return in_callers_order(self.outputs.numbers.entropy, self.schedule)

    @property
    def token_loss(self) -> np.ndarray:
        """[E] loss of each entry before its weight, in the caller's order. Waits for the device."""
        return in_callers_order(self.outputs.token_loss, self.schedule)


def tree_value_and_grad(
    model: DecoderModel,
    params: Params,
    schedule: Schedule,
    values: Mapping[str, np.ndarray],
    loss_fn: LossFn,
    *,
    entry_capacity: int = 0,
) -> TreeResult:
    """The loss `sum_e weight[e] * loss_fn(logp_e, entropy_e, values_e)` and its exact gradient.

    Args:
      model: hashable; equal models share compiled programs.
      params: parameters in the layout of `dta_jax.model`.
      schedule: from `compile_schedule`, with BACK operations for every row.
      values: float[E] arrays by name, in the order of the entries that the schedule was compiled for:
        `weight` (required), `temperature` (default 1), and whatever `loss_fn` reads.
      loss_fn: hashable; (logp [], entropy [], {name: []}) -> loss [] of one entry. If the model has a value
        head, its value is among the named ones, as "value", and is differentiated.
      entry_capacity: E', to keep compiled shapes; 0 rounds the number of entries up.

    Returns:
      `TreeResult`; nothing has been waited for.

    Raises:
      InputError: a chunk size that does not fit, values that are missing or of another length.
    """
    entries, ops = prepare(model, params, schedule, values, entry_capacity)
    carry = start(model, params, len(entries.token), num_keys(schedule.stack_slots, schedule.chunk_size))
    kept = start_keeping(model, params, carry.stack) if schedule.keep_residuals else None
    S = schedule.stack_slots
    for kind, op in ops:
        if kind == PUSH and kept is None:
            own = carry.stack, carry.outputs
            stack, outputs = dispatch("push", push_step, model, params, own, op, entries, S)
            carry = carry._replace(stack=stack, outputs=outputs)
        elif kind == PUSH:
            state = carry.stack, carry.outputs, kept
            stack, outputs, kept = dispatch("push", push_keeping_step, model, params, state, op, entries, S)
            carry = carry._replace(stack=stack, outputs=outputs)
        elif kept is None:
            carry = dispatch("back", back_step, model, loss_fn, params, carry, op, entries, S)
        else:
            both = carry, kept
            carry, kept = dispatch("back", back_kept_step, model, loss_fn, params, both, op, entries, S)
    return TreeResult(carry.grads, carry.outputs, schedule)


def tree_forward(
    model: DecoderModel,
    params: Params,
    schedule: Schedule,
    *,
    temperature: np.ndarray | None = None,
    entry_capacity: int = 0,
) -> Numbers:
    """What the model's head finds for every entry, forward only.

    Args:
      model, params, entry_capacity: as in `tree_value_and_grad`.
      schedule: from `compile_forward_schedule`, which runs each token once; or from `compile_schedule`,
        whose operations then run forward only. With the schedule of a gradient, the results are that
        gradient's own to the last bit, for the same rows run together: first ratios are exactly 1. (Not
        with kept residuals: there, rows ran in their PUSH, together with others.)
      temperature: float[E], above 0; None for 1.

    Returns:
      numbers [E] on the host, in the caller's order.
    """
    values = {"weight": np.ones(len(schedule.entry))}
    if temperature is not None:
        values["temperature"] = temperature
    entries, ops = prepare(model, params, schedule, values, entry_capacity)
    keys = num_keys(schedule.stack_slots, schedule.chunk_size)
    stack, outputs = start_forward(model, params, len(entries.token), keys)
    for _, op in ops:
        stack, outputs = push_step(model, params, (stack, outputs), op, entries, schedule.stack_slots)
    return numbers_in_callers_order(outputs, schedule)


def tree_logprobs(
    model: DecoderModel,
    params: Params,
    schedule: Schedule,
    *,
    temperature: np.ndarray | None = None,
    entry_capacity: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability [E] and entropy [E] of every entry: `tree_forward` of a policy, arguments as there.

    Raises:
      InputError: the model has no LM head.
    """
    require_policy(model)
    numbers = tree_forward(model, params, schedule, temperature=temperature, entry_capacity=entry_capacity)
    return numbers.logp, numbers.entropy


def numbers_in_callers_order(outputs: Outputs, schedule: Schedule) -> Numbers:
    """What was collected of the entries, by `in_callers_order`."""
    return jax.tree.map(functools.partial(in_callers_order, schedule=schedule), outputs.numbers)


def in_callers_order(collected: jax.Array | np.ndarray, schedule: Schedule) -> np.ndarray:
    """[E'] in order of evaluation, on the device -> [E] in the order of the caller's entries, on the host."""
    result = np.empty(len(schedule.entry), collected.dtype)
    result[schedule.entry] = np.asarray(collected)[: len(schedule.entry)]
    return result


@jax.named_scope("push")
def push(
    model: DecoderModel, params: Params, carry: tuple[Stack, Outputs], op: Op, entries: Entries, first: int
) -> tuple[Stack, Outputs]:
    """PUSH: runs the rows, evaluates entries if they have any, and writes their state to their slots."""
    stack, outputs, _ = _push_rows(model, params, *carry, op, entries, first)
    return stack, outputs


@jax.named_scope("push")
def push_keeping(
    model: DecoderModel,
    params: Params,
    carry: tuple[Stack, Outputs, Residuals],
    op: Op,
    entries: Entries,
    first: int,
) -> tuple[Stack, Outputs, Residuals]:
    """`push`, with what the rows' vjp needs kept at their slots, for `back_kept`."""
    stack, outputs, kept = carry
    stack, outputs, residuals = _push_rows(model, params, stack, outputs, op, entries, first)
    return stack, outputs, segment.keep(kept, residuals, op.rows.slot)


@jax.named_scope("back")
def back(
    model: DecoderModel,
    loss_fn: LossFn,
    params: Params,
    carry: Back,
    op: Op,
    entries: Entries,
    first: int,
) -> Back:
    """BACK: takes over the rows' cotangents, runs the rows and their entries, and pulls everything back."""
    own, cotangents = _take(carry.cotangents, op.rows.slot, first)
    _, stack, residuals = segment.run(model, params, carry.stack, op.rows, first)
    carry = carry._replace(stack=stack, cotangents=cotangents)
    return _pull_rows(model, loss_fn, params, carry, own, residuals, op, entries, first)


@jax.named_scope("back")
def back_kept(
    model: DecoderModel,
    loss_fn: LossFn,
    params: Params,
    carry: tuple[Back, Residuals],
    op: Op,
    entries: Entries,
    first: int,
) -> tuple[Back, Residuals]:
    """`back` of rows that `push_keeping` ran: nothing is run a second time."""
    state, kept = carry
    own, cotangents = _take(state.cotangents, op.rows.slot, first)
    stack, residuals = segment.recall(state.stack, kept, op.rows, first)
    state = state._replace(stack=stack, cotangents=cotangents)
    return _pull_rows(model, loss_fn, params, state, own, residuals, op, entries, first), kept


def _push_rows(
    model: DecoderModel,
    params: Params,
    stack: Stack,
    outputs: Outputs,
    op: Op,
    entries: Entries,
    first: int,
) -> tuple[Stack, Outputs, Residuals]:
    h, stack, residuals = segment.run(model, params, stack, op.rows, first)
    outputs = evaluate_entries(model, params, stack.h, op, entries, outputs)
    own = slice(first, first + len(op.rows.slot))
    at = op.rows.slot
    stack = Stack(
        stack.k.at[:, :, at].set(stack.k[:, :, own], mode="drop", unique_indices=True),
        stack.v.at[:, :, at].set(stack.v[:, :, own], mode="drop", unique_indices=True),
        stack.h.at[at].set(h, mode="drop", unique_indices=True),
    )
    return stack, outputs._replace(executed=outputs.executed.at[PUSH].add(op.num_rows)), residuals


def _pull_rows(
    model: DecoderModel,
    loss_fn: LossFn,
    params: Params,
    carry: Back,
    own: Stack,
    residuals: Residuals,
    op: Op,
    entries: Entries,
    first: int,
) -> Back:
    """The loss of the rows' entries and its vjp, from residuals and the cotangents left for the rows."""
    stack, cotangents, grads, outputs = carry
    dh, d_head, outputs = pull_entries(
        model, loss_fn, params, stack.h, cotangents.h, grads, op, entries, outputs
    )
    own = own._replace(h=own.h + lax.dynamic_slice_in_dim(dh, first, len(op.rows.slot)))
    grads, cotangents = segment.pull(
        model,
        params,
        grads | d_head,
        stack,
        cotangents._replace(h=dh),
        own,
        op.rows,
        residuals,
        first,
    )
    outputs = outputs._replace(executed=outputs.executed.at[BACK].add(op.num_rows))
    return Back(stack, cotangents, grads, outputs)


push_step = jax.jit(push, static_argnames=("model", "first"), donate_argnames="carry")
back_step = jax.jit(back, static_argnames=("model", "loss_fn", "first"), donate_argnames="carry")
push_keeping_step = jax.jit(push_keeping, static_argnames=("model", "first"), donate_argnames="carry")
back_kept_step = jax.jit(back_kept, static_argnames=("model", "loss_fn", "first"), donate_argnames="carry")
start_keeping = jax.jit(segment.empty_residuals, static_argnames="model")


def _take(cotangents: Stack, slot: jax.Array, first: int) -> tuple[Stack, Stack]:
    """Reads the cotangents at the rows' slots, and clears them there and behind the slots."""
    width = len(slot)
    own = Stack(
        cotangents.k.at[:, :, slot].get(mode="fill", fill_value=0),
        cotangents.v.at[:, :, slot].get(mode="fill", fill_value=0),
        cotangents.h.at[slot].get(mode="fill", fill_value=0),
    )
    # Cleared by subtracting what was read, not by writing zeros: the clearing then depends on the reading,
    # and the compiler needs no copy of the stack to keep the two apart.
    behind = slice(first, first + width)
    rest = Stack(
        cotangents.k.at[:, :, slot].add(-own.k, mode="drop").at[:, :, behind].set(0),
        cotangents.v.at[:, :, slot].add(-own.v, mode="drop").at[:, :, behind].set(0),
        cotangents.h.at[slot].add(-own.h, mode="drop").at[behind].set(0),
    )
    return own, rest


@functools.partial(jax.jit, static_argnames=("model", "capacity", "keys"))
def start_forward(model: DecoderModel, params: Params, capacity: int, keys: int) -> tuple[Stack, Outputs]:
    """What PUSH steps carry, all zeros: a stack of N `keys`, outputs for E' = `capacity` entries."""
    stack = segment.empty_stack(model, params, keys)
    return stack, no_outputs(model.head, capacity, accumulator_dtype(stack.h.dtype))


@functools.partial(jax.jit, static_argnames=("model", "capacity", "keys"))
def start(model: DecoderModel, params: Params, capacity: int, keys: int) -> Back:
    """What BACK steps carry, all zeros; arguments as in `start_forward`."""
    stack, outputs = start_forward(model, params, capacity, keys)
    return Back(stack, segment.zero_cotangents(stack), segment.zero_gradients(params), outputs)
