"""The optimizer: AdamW behind a clipped gradient, with a warm-up and a cosine decay."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax

from dta_jax.model import Params
from dta_jax.settings import AdamW


def learning_rate(settings: AdamW) -> optax.Schedule:
    """The rate of update `n` (from 0): up in equal steps to the peak, then half a cosine down, then constant.

    The first update has rate `peak / (warmup + 1)`: none is wasted on a rate of 0.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if settings.decay_steps is None:
        after = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(peak, settings.decay_steps - warmup, settings.final_fraction)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup])


def updates_made(state: optax.OptState) -> int:
    """How many updates an optimizer's state has seen; skipped ones do not count."""
    counts = optax.tree.get_all_with_path(state, "count")
    return int(jax.device_get(counts[0][1]))


@functools.cache
def make_optimizer(settings: AdamW) -> optax.GradientTransformation:
    """AdamW for parameters in the layout of `dta_jax.model`; norms and biases do not decay.

    Equal settings give the same object, so that a step compiled for one run serves the next.
    """
    adamw = optax.adamw(
        learning_rate(settings),
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=_matrices,
    )
    inner = adamw
    if settings.clip_norm is not None:
        inner = optax.chain(optax.clip_by_global_norm(settings.clip_norm), adamw)

    def update(grads: Params, state: optax.OptState, params: Params) -> tuple[Params, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):  # optax multiplies its integer count with floats
            return inner.update(grads, state, params)

    return optax.GradientTransformation(inner.init, update)


def _matrices(params: Params) -> Any:
    def is_matrix(path: tuple[jax.tree_util.DictKey, ...], _: Any) -> bool:
        return path[0].key in ("embed", "head") or path[-1].key == "kernel"

    return jax.tree_util.tree_map_with_path(is_matrix, params)
