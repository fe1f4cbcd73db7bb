"""How much memory the steps take, as the compiler counts it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import numpy as np

from dta_jax.entry_blocks import LossFn
from dta_jax.model import DecoderModel, Params
from dta_jax.segment import empty_residuals, num_keys
from dta_jax.tree_grad import back_kept_step, back_step, push_keeping_step, push_step, start
from dta_jax.tree_inputs import prepare
from dta_jax.types import PUSH, Schedule

Programs = dict[tuple[int, int], jax.stages.Lowered]


def step_memory(
    model: DecoderModel,
    params: Params,
    schedule: Schedule,
    values: Mapping[str, np.ndarray],
    loss_fn: LossFn,
    *,
    entry_capacity: int = 0,
) -> dict[tuple[int, int], int]:
    """Peak bytes of each program that the schedule runs, as the compiler counts them; runs nothing.

    Args: as in `tree_value_and_grad`; of `params`, shapes are enough.

    Returns:
      {(kind, width): bytes}: parameters, stack, cotangents, gradients, entries, results and temporaries.
    """
    programs = lower_steps(model, params, schedule, values, loss_fn, entry_capacity=entry_capacity)
    return {which: peak_bytes(lowered.compile()) for which, lowered in programs.items()}


def lower_steps(
    model: DecoderModel,
    params: Params,
    schedule: Schedule,
    values: Mapping[str, np.ndarray],
    loss_fn: LossFn,
    *,
    entry_capacity: int = 0,
) -> Programs:
    """The programs that the schedule runs, {(kind, width): lowered}; arguments as in `step_memory`."""
    entries, ops = prepare(model, params, schedule, values, entry_capacity)
    keys, S = num_keys(schedule.stack_slots, schedule.chunk_size), schedule.stack_slots
    carry = jax.eval_shape(functools.partial(start, model, capacity=len(entries.token), keys=keys), params)
    kept = jax.eval_shape(functools.partial(empty_residuals, model), params, carry.stack)
    found: Programs = {}
    for kind, op in ops:
        which = kind, len(op.rows.token)
        if which in found:
            continue
        if kind == PUSH and schedule.keep_residuals:
            state = carry.stack, carry.outputs, kept
            found[which] = push_keeping_step.lower(model, params, state, op, entries, S)
        elif kind == PUSH:
            found[which] = push_step.lower(model, params, (carry.stack, carry.outputs), op, entries, S)
        elif schedule.keep_residuals:
            found[which] = back_kept_step.lower(model, loss_fn, params, (carry, kept), op, entries, S)
        else:
            found[which] = back_step.lower(model, loss_fn, params, carry, op, entries, S)
    return found


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Arguments, results that are not arguments donated, and temporaries of a compiled program, bytes."""
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not count memory"
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
