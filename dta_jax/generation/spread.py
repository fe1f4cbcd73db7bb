"""Several local samplers as one, each on a device of its own: calls go where their beginning lies.

A call goes to the sampler that has served its beginning: the turn before, or a call with the same prompt, as
the episodes of a group have. Any other goes to the sampler with the fewest calls, and so does one that would
have to wait while another sampler has a row free. Every sampler has weights and a cache of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np

from dta_jax.generation.local import LocalGenerator
from dta_jax.generation.protocol import Completion, Sampling
from dta_jax.model import Params


class SpreadGenerator:
    """`dta_jax.generation.protocol.Generator` over several local ones, which it closes.

    Args:
      generators: with the same weights, each on its own device.
      rows: calls that each decodes at a time.
    """

    def __init__(self, generators: Sequence[LocalGenerator], rows: int):
        self._generators, self._rows = tuple(generators), rows
        self._running = [0 for _ in generators]
        self._served: list[deque[bytes]] = [deque(maxlen=rows) for _ in generators]

    @property
    def version(self) -> int:
        """The oldest version that a next token is drawn with."""
        return min(generator.version for generator in self._generators)

    async def generate(self, prompt: np.ndarray, sampling: Sampling, *, seed: int) -> Completion:
        """One completion; see `LocalGenerator.generate`."""
        asked = np.asarray(prompt, np.int32).tobytes()
        chosen = self._choose(asked)
        self._served[chosen].append(asked)
        self._running[chosen] += 1
        try:
            completion = await self._generators[chosen].generate(prompt, sampling, seed=seed)
        finally:
            self._running[chosen] -= 1
        self._served[chosen].append(asked + completion.tokens.tobytes())
        return completion

    async def update_weights(self, params: Params, version: int) -> None:
        """New weights on all devices; see `LocalGenerator.update_weights`."""
        await asyncio.gather(*(one.update_weights(params, version) for one in self._generators))

    async def close(self) -> None:
        """Closes them all."""
        await asyncio.gather(*(one.close() for one in self._generators))

    def _choose(self, asked: bytes) -> int:
        idlest = min(range(len(self._running)), key=self._running.__getitem__)
        known = [
            max((len(context) for context in served if asked.startswith(context)), default=0)
            for served in self._served
        ]
        best = max(range(len(known)), key=lambda i: (known[i], -self._running[i]))
        waits = self._running[best] >= self._rows > self._running[idlest]
        return idlest if waits or not known[best] else best
