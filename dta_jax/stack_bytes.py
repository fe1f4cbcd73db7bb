"""Bytes of what a schedule keeps beside weights and gradients: the stack, its cotangents, and residuals."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dta_jax.model import DecoderModel
from dta_jax.segment import empty_residuals, empty_stack, num_keys
from dta_jax.types import Schedule, accumulator_dtype


@dataclass(frozen=True)
class RowBytes:
    """What one row takes.

    Attributes:
      stack: bytes of a slot of the stack: keys, values and hidden state, and their cotangents.
      residuals: bytes that BACK needs of the row's forward pass.
    """

    stack: int
    residuals: int

    def of(self, schedule: Schedule) -> int:
        """Bytes of the stack, of its cotangents, and of the residuals of one chunk (of every slot, if kept).

        Weights, gradients, the LM head's blocks and the compiler's temporaries come on top;
        `dta_jax.memory.step_memory` counts those too.
        """
        keys = num_keys(schedule.stack_slots, schedule.chunk_size)
        return keys * self.stack + (keys if schedule.keep_residuals else schedule.chunk_size) * self.residuals


def row_bytes(model: DecoderModel) -> RowBytes:
    """Bytes per row, from shapes: nothing is allocated or compiled."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    stack = jax.eval_shape(functools.partial(empty_stack, model, keys=1), params)
    residuals = jax.eval_shape(functools.partial(empty_residuals, model), params, stack)
    cotangents = sum(leaf.size * accumulator_dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(stack))
    return RowBytes(_size(stack) + cotangents, _size(residuals))


def _size(tree: Any) -> int:
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
