"""Who computes attention: plain JAX, which runs anywhere, or kernels for NVIDIA GPUs.

    xla      `dta_jax.attention`: loops over blocks, compiled by XLA
    pallas   `dta_jax.kernels.tree_attention`: three kernels; Ampere or newer
    auto     the kernels where they can run, else plain JAX

`bind` gives the engine an operation's attention as two functions of arrays; what a backend prepares once per
operation (lists of blocks) stays inside. Another backend is one more function in `BACKENDS`. A model says
which is used (`DecoderModel.attention_backend`), so the choice is part of what programs are compiled for.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax

from dta_jax import attention
from dta_jax.errors import InputError
from dta_jax.kernels.tiles import DTYPES, HEAD_DIMS, HOPPER, Tile, Tiles, choose_tiles, plan_tiles

CHOICES: Final = ("auto", "xla", "pallas")
_OLDEST: Final = 8.0  # Ampere, the first with products in bfloat16


class Attention(NamedTuple):
    """Attention of one operation, for all its layers.

    forward: (q, k, v, layer) -> (out, lse), and
    backward: (do, q, out, lse, k, v, dk, dv, layer) -> (dq, dk, dv), as in `dta_jax.attention`.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@dataclass(frozen=True)
class Problem:
    """What attention is needed: C queries, N keys, width and dtype of heads, factor on q . k."""

    num_queries: int
    num_keys: int
    head_dim: int
    dtype: str
    scale: float


def bind(backend: str, problem: Problem, q_start: jax.Array, q_end: jax.Array) -> Attention:
    """The attention of one operation.

    Args:
      backend: one of `CHOICES`; or "interpret", the kernels in Pallas' interpreter, for tests.
      problem: its shape.
      q_start, q_end: int32[N], each key's interval of queries.

    Raises:
      InputError: no such backend, or kernels were asked for by name and do not support the shape.
    """
    if backend == "auto":
        backend = "pallas" if kernels_can_run(problem) else "xla"
    if backend not in BACKENDS:
        raise _refused(f"one of {', '.join(CHOICES)}", repr(backend))
    return BACKENDS[backend](problem, q_start, q_end)


def require_backend(backend: str) -> None:
    """Refuses, before anything is compiled, a backend that this machine does not have.

    Raises:
      InputError: no such backend, or kernels without a GPU that runs them.
    """
    if backend not in CHOICES:
        raise _refused(f"one of {', '.join(CHOICES)}", repr(backend))
    if backend == "pallas" and (problem := _missing_device()):
        raise _refused("auto or xla", f"pallas, {problem}")


def kernels_can_run(problem: Problem) -> bool:
    """Whether this machine and the kernels are made for it."""
    return _missing_device() is None and _unsupported(problem) is None


def compute_capability() -> float | None:
    """That of the NVIDIA GPU that programs run on by default; None where that is another device."""
    if jax.default_backend() != "gpu":
        return None
    name = str(jax.local_devices()[0].compute_capability)
    return float(name) if re.fullmatch(r"\d+\.\d", name) else None


def _xla(problem: Problem, q_start: jax.Array, q_end: jax.Array) -> Attention:
    block_q, block_k = attention.block_size(problem.num_queries), attention.key_block(problem.num_keys)
    plan = attention.plan_blocks(q_start, q_end, problem.num_queries, block_q, block_k)
    settings: dict[str, Any] = {"block_k": block_k, "scale": problem.scale}
    settings |= {"q_start": q_start, "q_end": q_end, "plan": plan}
    return Attention(
        functools.partial(attention.forward, **settings), functools.partial(attention.backward, **settings)
    )


def _pallas(problem: Problem, q_start: jax.Array, q_end: jax.Array) -> Attention:
    if wrong := _unsupported(problem):
        raise _refused(*wrong)
    # Programs that are compiled ahead of time, where there is no GPU, are taken to be for a Hopper.
    tiles = choose_tiles(problem.head_dim, problem.dtype, compute_capability() or HOPPER)
    return _kernels(problem, q_start, q_end, tiles, interpret=False)


def _interpret(problem: Problem, q_start: jax.Array, q_end: jax.Array) -> Attention:
    tiles = Tiles(Tile(16, 16), Tile(16, 16))
    return _kernels(problem, q_start, q_end, tiles, interpret=True)


def _kernels(
    problem: Problem, q_start: jax.Array, q_end: jax.Array, tiles: Tiles, interpret: bool
) -> Attention:
    from dta_jax.kernels import tree_attention  # needs what `_missing_device` looks for

    plan = plan_tiles(q_start, q_end, problem.num_queries, tiles)
    settings: dict[str, Any] = {"tiles": tiles, "scale": problem.scale, "interpret": interpret}
    settings |= {"q_start": q_start, "q_end": q_end, "plan": plan}
    return Attention(
        functools.partial(tree_attention.forward, **settings),
        functools.partial(tree_attention.backward, **settings),
    )


BACKENDS: Final[Mapping[str, Callable[[Problem, jax.Array, jax.Array], Attention]]] = MappingProxyType(
    {"xla": _xla, "pallas": _pallas, "interpret": _interpret}
)


def _missing_device() -> str | None:
    """Why kernels can't run on this machine."""
    capability = compute_capability()
    if capability is None:
        return f"on {jax.default_backend()}: an NVIDIA GPU is needed"
    if capability < _OLDEST:
        return f"on compute capability {capability}: at least {_OLDEST} is needed"
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return f"with jax {jax.__version__}, which has no Triton lowering any more"
    return None


def _unsupported(problem: Problem) -> tuple[str, str] | None:
    """What the kernels expect and do not find."""
    if problem.dtype not in DTYPES:
        return f"dtype {', '.join(DTYPES)} for pallas", problem.dtype
    if problem.head_dim not in HEAD_DIMS:
        return f"head_dim {', '.join(map(str, HEAD_DIMS))} for pallas", str(problem.head_dim)
    tiles = choose_tiles(problem.head_dim, problem.dtype, HOPPER)
    block = max(tiles.row.block_k, tiles.column.block_k)
    if problem.num_keys % block:
        return f"a multiple of {block} keys (stack and chunk) for pallas", str(problem.num_keys)
    return None


def _refused(expected: str, actual: str) -> InputError:
    hint = "auto takes xla where pallas can't run"
    return InputError("Planner", "attention", expected=expected, actual=actual, hint=hint)
