"""The sampler's device: its weights, its cache, and one round's work on them.

Work is described on the host (`copies`, `filling`, `resting_rows`) in tables of few shapes, so that few
programs are compiled, whatever the lengths are: one for each width of `widths` that comes up, one for copies,
one for decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np

from dta_jax.generation import decode as programs
from dta_jax.generation.rows import Piece
from dta_jax.model import DecoderModel, Params

MIN_PREFILL_WIDTH: Final = 8
MAX_PREFILL_GROUP: Final = 8  # rows that are prefilled together


class SamplerDevice:
    """Weights and cache. `take` and `run` are called by one thread at a time.

    Args:
      model: a whole model.
      params: its weights, jax arrays.
      rows: R.
      max_context: longest context, tokens.
      prefill_chunk: widest piece that is prefilled.
      decode_steps: the most tokens per row and `run`.
      device: where; None for the first device that `params` lie on.

    Attributes:
      params: the present weights.
      widths: of pieces to prefill, ascending: `prefill_chunk`, a quarter of it, and so on.
      dispatches: programs started.
    """

    def __init__(
        self,
        model: DecoderModel,
        params: Params,
        *,
        rows: int,
        max_context: int,
        prefill_chunk: int,
        decode_steps: int,
        device: jax.Device | None,
    ) -> None:
        self._model, self._num_rows, self._max_context = model, rows, max_context
        self._decode_steps, self._block = decode_steps, programs.key_block(max_context)
        self._device = _first_device(params) if device is None else device
        self._cache: programs.Cache | None = None
        self.widths = _widths(prefill_chunk)
        self.dispatches = 0
        self.take(params)

    def take(self, params: Params) -> None:
        """New weights. What lies on the device already is not copied."""
        self.params = jax.device_put(params, self._device)

    def fits(self, params: Params) -> bool:
        """Whether weights have the present ones' names, shapes and dtypes."""
        return _form(params) == _form(self.params)

    def drop_cache(self) -> None:
        """The next `run` begins with an empty cache."""
        self._cache = None

    def release(self) -> None:
        """Frees weights and cache; nothing runs afterwards."""
        self._cache, self.params = None, {}

    def copies(self, moves: Sequence[tuple[int, int, int]]) -> programs.Copies | None:
        """The table of copies (source, target, length), at most one per row; None for none."""
        if not moves:
            return None
        source, target, length = np.zeros((3, self._num_rows), np.int32)
        for i, move in enumerate(moves):
            source[i], target[i], length[i] = move
        return programs.Copies(source, target, length, np.array(len(moves), np.int32))

    def filling(self, width: int, pieces: Sequence[Piece], context: np.ndarray) -> programs.Prefill | None:
        """The table of pieces of one width, at most one per row, in groups that run together; None for none.

        Args:
          width: one of `widths`.
          pieces: which tokens.
          context: int32[R, ...], the rows' tokens.
        """
        if not pieces:
            return None
        group = max(1, min(MAX_PREFILL_GROUP, self._num_rows, self.widths[-1] // width))
        groups = -(-self._num_rows // group)
        token = np.zeros((groups * group, width), np.int32)
        row, start, length = np.zeros((3, groups * group), np.int32)
        for place, piece in enumerate(pieces):
            token[place, : piece.length] = context[piece.row, piece.start : piece.start + piece.length]
            row[place], start[place], length[place] = piece
        shape = (groups, group)
        return programs.Prefill(
            token.reshape(*shape, width),
            row.reshape(shape),
            start.reshape(shape),
            length.reshape(shape),
            np.array(-(-len(pieces) // group), np.int32),
        )

    def run(
        self,
        copies: programs.Copies | None,
        filling: programs.Prefill | None,
        decoding: programs.Decoding | None,
    ) -> programs.Drawn | None:
        """One round's work, in this order; what was drawn, in numpy. Waits for it only if it decodes."""
        if self._cache is None:
            self._cache = programs.empty_cache(self._model, self.params, self._num_rows, self._max_context)
        if copies is not None:
            self._cache = programs.copy(self._cache, self._put(copies), block=self._block)
            self.dispatches += 1
        if filling is not None:
            work = self._put(filling)
            self._cache = programs.prefill(self._model, self.params, self._cache, work, block=self._block)
            self.dispatches += 1
        if decoding is None:
            return None
        self._cache, drawn = programs.decode(
            self._model,
            self.params,
            self._cache,
            self._put(decoding),
            steps=self._decode_steps,
            block=self._block,
        )
        self.dispatches += 1
        return jax.device_get(drawn)

    def _put(self, work: Any) -> Any:
        return jax.device_put(work, self._device)


def resting_rows(rows: int, stop_tokens: int) -> programs.Decoding:
    """The table of what rows decode, for rows that all rest; to be filled in."""
    return programs.Decoding(
        token=np.zeros(rows, np.int32),
        length=np.zeros(rows, np.int32),
        drawn=np.zeros(rows, np.int32),
        limit=np.zeros(rows, np.int32),
        seed=np.zeros((rows, 2), np.uint32),
        temperature=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        stop=np.full((rows, stop_tokens), -1, np.int32),
    )


def _first_device(params: Params) -> jax.Device:
    return min(jax.tree.leaves(params)[0].devices(), key=lambda device: device.id)


def _form(params: Params) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


def _widths(prefill_chunk: int) -> tuple[int, ...]:
    widths = [prefill_chunk]
    while widths[-1] // 4 >= MIN_PREFILL_WIDTH:
        widths.append(widths[-1] // 4)
    return tuple(reversed(widths))
