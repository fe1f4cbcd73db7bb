"""How the attention kernels cut their work: tile sizes by device, dtype and head width, and lists of blocks.

A tile is what a program of a kernel keeps in registers and shared memory, so its size decides whether
registers spill. `choose_tiles` has sizes that the compiler fits into an H100, an A100 and an A10 without
spills (`benchmarks/aot_kernels.py` compiles them all and checks). None has been timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

HOPPER: Final = 9.0  # compute capability
HEAD_DIMS: Final = (16, 32, 64, 128)
DTYPES: Final = ("bfloat16", "float16", "float32")
_WHOLE, _PARTIAL, _DEAD = range(3)  # how much is visible in a pair of blocks


@dataclass(frozen=True)
class Tile:
    """How one kernel cuts its work.

    Attributes:
      block_q, block_k: queries and keys of one step; powers of two, at least 16.
      num_warps: warps that share a tile.
      num_stages: depth of the pipeline of loads.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Tiles:
    """Tiles of all kernels: `row` of those that go along a row of blocks (forward, dq), `column` of the other
    (dk and dv)."""

    row: Tile
    column: Tile


class TilePlan(NamedTuple):
    """Which blocks every program visits.

    Attributes:
      k_blocks: int32[nq, nk], per query block the key blocks to visit, wholly visible ones first.
      k_counts: int32[nq, 2], how many of them are wholly visible, and how many are visible at all.
      q_blocks, q_counts: int32[nk, nq], int32[nk, 2], the same per key block.
    """

    k_blocks: jax.Array
    k_counts: jax.Array
    q_blocks: jax.Array
    q_counts: jax.Array


def choose_tiles(head_dim: int, dtype: str, capability: float) -> Tiles:
    """The tiles for one of `HEAD_DIMS` and `DTYPES`.

    Args:
      head_dim: d; every width has the tiles of 128, which fit the others too.
      dtype: of queries, keys and values.
      capability: the device's compute capability, e.g. 9.0.
    """
    assert head_dim in HEAD_DIMS
    if dtype == "float32":
        return Tiles(Tile(32, 32), Tile(32, 32))
    hopper = HOPPER <= capability < 12  # consumer cards from 12 on have the shared memory of an A10
    return Tiles(Tile(128, 64, num_warps=8), Tile(64, 64 if hopper else 32))


def plan_tiles(q_start: jax.Array, q_end: jax.Array, num_queries: int, tiles: Tiles) -> TilePlan:
    """Lists the blocks; made once per chunk, used by every layer in both directions.

    Args:
      q_start, q_end: int32[N], each key's interval of queries, within 0 .. C.
      num_queries: C.
      tiles: both `block_k` divide N.
    """
    k_blocks, k_counts = _list(_visibility(q_start, q_end, num_queries, tiles.row))
    q_blocks, q_counts = _list(_visibility(q_start, q_end, num_queries, tiles.column).T)
    return TilePlan(k_blocks, k_counts, q_blocks, q_counts)


def _visibility(q_start: jax.Array, q_end: jax.Array, num_queries: int, tile: Tile) -> jax.Array:
    """int32[nq, nk] of `_WHOLE`, `_PARTIAL`, `_DEAD`. Queries that are only padding need no mask."""
    seen = q_start < q_end

    def per_block(reduce: Callable[..., jax.Array], bound: jax.Array, unseen: int) -> jax.Array:
        return reduce(jnp.where(seen, bound, unseen).reshape(-1, tile.block_k), axis=1)

    first = jnp.arange(0, num_queries, tile.block_q, dtype=jnp.int32)[:, None]
    end = jnp.minimum(first + tile.block_q, num_queries)
    live = (per_block(jnp.min, q_start, num_queries) < end) & (per_block(jnp.max, q_end, 0) > first)
    whole = (per_block(jnp.max, q_start, num_queries) <= first) & (per_block(jnp.min, q_end, 0) >= end)
    return jnp.where(whole, _WHOLE, jnp.where(live, _PARTIAL, _DEAD)).astype(jnp.int32)


def _list(visibility: jax.Array) -> tuple[jax.Array, jax.Array]:
    blocks = jnp.argsort(visibility, axis=1, stable=True).astype(jnp.int32)
    counts = [(visibility < bound).sum(axis=1, dtype=jnp.int32) for bound in (_PARTIAL, _DEAD)]
    return blocks, jnp.stack(counts, axis=1)
