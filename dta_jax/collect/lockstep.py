"""Lockstep: the engine is asked only when every episode waits for it, so the clock decides nothing.

An engine batches what it has, and the shape of a batch decides the last bits of a log-probability. Episodes
whose environments take now longer, now shorter, would reach the engine in another order every time. In
lockstep their calls are held until nothing else moves, and then start together, in the order of their keys.

An episode is a *member* from the moment that its group starts. It is *parked* while it waits here or for
leave to begin. Not covered is what fails or times out and is tried again. All on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Lockstep:
    """Holds calls until all members are parked.

    Args:
      on: False lets every call pass at once.
    """

    def __init__(self, *, on: bool):
        self._on = on
        self._members = self._parked = 0
        self._held: list[tuple[tuple[int, ...], asyncio.Future[None]]] = []

    def party(self, size: int) -> Party:
        """So many new members. They count as moving until they are parked."""
        self._members += size
        return Party(self, size)

    async def turn(self, *key: int) -> None:
        """Returns when it is the caller's turn: when all members are parked, smaller keys first."""
        if self._on:
            go = asyncio.get_running_loop().create_future()
            self._held.append((key, go))
            with self.parked():
                await go

    @contextlib.contextmanager
    def parked(self) -> Iterator[None]:
        """While a member waits for others."""
        self._parked += 1
        self._look_again()
        try:
            yield
        finally:
            self._parked -= 1

    def leave(self) -> None:
        """One member fewer."""
        self._members -= 1
        self._look_again()

    def _look_again(self) -> None:
        """Soon, not now: the one who parks last must be waiting too, or it would go first."""
        asyncio.get_running_loop().call_soon(self._release_if_all_wait)

    def _release_if_all_wait(self) -> None:
        if self._parked < self._members:
            return
        held, self._held = self._held, []
        for _, go in sorted(held, key=lambda entry: entry[0]):
            if not go.done():  # cancelled
                go.set_result(None)


class Party:
    """Members that start together, made by `Lockstep.party`.

    The last one only leaves with `over`: whoever takes the party's place must have become a member before.
    """

    def __init__(self, lockstep: Lockstep, size: int):
        self._lockstep, self._staying = lockstep, size

    def left(self) -> None:
        """One of them is done."""
        self._staying -= 1
        if self._staying:
            self._lockstep.leave()

    def over(self) -> None:
        """All of them are done, and what follows has started."""
        self._lockstep.leave()
