"""Several servers as one: who takes the next call, who is out of service, and when it comes back.

A call goes to the server that runs the fewest calls, unless another one has seen more of its prompt and is
not much busier: the turns of one conversation, and the samples of one prompt, then find their keys and values
in a cache. No server runs more than `max_running` calls; further ones wait, first come, first served. So a
slow server takes what it can, and the fast ones take the rest.

    in        takes calls; looked at every `probe_seconds`
    updating  takes none until it has its new weights
    out       takes none; looked at, with growing pauses, until it is well and has the right weights

A server goes out when it cannot be reached, when it fails three times in a row, or when two looks at it find
nothing. If the next look finds nothing either, the calls that it still runs are given up, to be sent
elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np

from dta_jax.errors import InputError
from dta_jax.generation.http import Backoff, CallError, JsonClient, check_url, check_variable_name
from dta_jax.generation.protocol import GenerationError

State: TypeAlias = Literal["in", "updating", "out"]

MAX_FAILURES: Final = 3  # in a row
MAX_MISSED_LOOKS: Final = 2
PREFIX_BLOCK: Final = 64  # tokens
MAX_PREFIXES: Final = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Servers:
    """Servers of one model, and how to call them.

    Attributes:
      urls: `http://host:port` of each.
      timeout: seconds that one call may take.
      retries: how often a failed call is tried again.
      backoff: seconds before the first retry, at most; doubled each time, up to 30.
      probe_seconds: between two looks at a server, and how long a look may take.
      outage_seconds: how long a call waits when no server is in service.
      max_running: calls that one server runs at a time.
      sticky_slack: a server that has seen a prompt's beginning gets the call unless it runs this many calls
        more than the idlest one.
      api_key_env: the NAME of the environment variable with the servers' API key; None for none.
      max_reply_mb: longer replies fail.
    """

    urls: tuple[str, ...]
    timeout: float = 600.0
    retries: int = 4
    backoff: float = 0.5
    probe_seconds: float = 10.0
    outage_seconds: float = 600.0
    max_running: int = 256
    sticky_slack: int = 8
    api_key_env: str | None = None
    max_reply_mb: int = 64

    def __post_init__(self) -> None:
        source = type(self).__name__
        for url in self.urls:
            check_url(source, "urls", url)
        self._check("urls", 0 < len(set(self.urls)) == len(self.urls), "at least one server, each once")
        for name in ("timeout", "backoff", "probe_seconds", "outage_seconds"):
            self._check(name, 0 < getattr(self, name) <= 1e6, "a positive number of seconds")
        for name, least in (("retries", 0), ("max_running", 1), ("sticky_slack", 0), ("max_reply_mb", 1)):
            self._check(name, getattr(self, name) >= least, f"at least {least}")
        check_variable_name(source, "api_key_env", self.api_key_env)

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise InputError(type(self).__name__, name, expected=expected, actual=repr(getattr(self, name)))


@dataclass(eq=False)
class Server:
    """One server as the pool sees it.

    Attributes:
      index: its place among the URLs.
      client: calls it.
      version: the version of the weights that it has.
      state: see the module.
      running: calls that it runs now.
      calls: calls that it was given so far.
      failures: in a row.
      outs: how often it went out since its last success.
      reason: why it last went out.
      changed, idle, lost: events: `state` changed; nothing runs; its calls are given up.
    """

    index: int
    client: JsonClient
    version: int
    state: State = "in"
    running: int = 0
    calls: int = 0
    failures: int = 0
    outs: int = 0
    reason: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class PrefixRoutes:
    """Remembers which servers have seen which beginnings of prompts, in whole blocks of tokens."""

    def __init__(self, block: int = PREFIX_BLOCK, most: int = MAX_PREFIXES):
        self._block, self._most = block, most
        self._seen: OrderedDict[bytes, set[int]] = OrderedDict()

    def keys(self, tokens: np.ndarray) -> list[bytes]:
        """One key per beginning of 1, 2, ... whole blocks of `tokens`, int32[n]."""
        data, size = tokens.astype("<i4").tobytes(), 4 * self._block
        running, keys = hashlib.blake2b(digest_size=16), []
        for start in range(0, len(data) - size + 1, size):
            running.update(data[start : start + size])
            keys.append(running.digest())
        return keys

    def remember(self, keys: Sequence[bytes], server: int) -> None:
        """Notes that `server` has seen these beginnings; the ones used least recently are forgotten."""
        for key in keys:
            self._seen.setdefault(key, set()).add(server)
            self._seen.move_to_end(key)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def servers(self, keys: Sequence[bytes]) -> Collection[int]:
        """The servers that have seen the longest beginning that any has seen."""
        return next((self._seen[key] for key in reversed(keys) if key in self._seen), ())


class Pool:
    """Hands out servers, and watches them.

    Args:
      servers: at least one.
      settings: how.
      inspect: a look at a server in service; raises CallError if it is not well.
      revive: the same for one that is out, and gives it the right weights.
      rng: for the spread of waiting times.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        settings: Servers,
        *,
        inspect: Callable[[Server], Awaitable[None]],
        revive: Callable[[Server], Awaitable[None]],
        rng: random.Random,
    ):
        self.servers, self._settings = tuple(servers), settings
        self._inspect, self._revive, self._rng = inspect, revive, rng
        self.routes = PrefixRoutes()
        self._backoff = Backoff(settings.backoff)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._keepers: list[asyncio.Task[None]] = []
        self.admitted = asyncio.Event()
        self.closed = False

    async def acquire(self, keys: Sequence[bytes], avoid: Collection[Server] = ()) -> Server:
        """A server for a call, counted as running until `release`.

        Args:
          keys: of the prompt; see `PrefixRoutes`.
          avoid: servers to be taken only if there is no other.

        Raises:
          GenerationError: none was in service for `outage_seconds`, or the pool is closed.
        """
        self.watch()
        its_turn = not self._waiting
        while not self.closed:
            server = self._choose(keys, avoid) if its_turn else None
            if server is not None:
                server.running += 1
                server.calls += 1
                server.idle.clear()
                return server
            await self._wait_for_turn()
            its_turn = True
        raise GenerationError("the engine is closed")

    def release(self, server: Server) -> None:
        """The call is over, however it went."""
        server.running -= 1
        if not server.running:
            server.idle.set()
        self._wake(1)

    def succeeded(self, server: Server) -> None:
        """Its answer was good."""
        server.failures = server.outs = 0

    def failed(self, server: Server, error: CallError) -> None:
        """Its answer was bad, or there was none."""
        server.failures += 1
        if error.kind == "unreachable" or server.failures >= MAX_FAILURES:
            self.take_out(server, str(error))

    def hold(self, server: Server) -> None:
        """No further call until it is admitted."""
        server.state = "updating"
        server.changed.set()

    def admit(self, server: Server) -> None:
        """In service, and again if it was out."""
        if server.state == "out":
            _log.info("%s: in service again", server.client.url)
        server.state, server.failures = "in", 0
        server.lost.clear()
        self._wake(self._settings.max_running - server.running)
        self.admitted.set()

    def take_out(self, server: Server, reason: str) -> None:
        """Out of service until a look finds it well."""
        if server.state != "out":
            _log.warning("%s: out of service: %s", server.client.url, reason)
            server.outs += 1
        server.state, server.reason = "out", reason
        server.changed.set()

    async def close(self) -> None:
        """Gives up all calls, running and waiting, and closes the clients when none runs."""
        self.closed = True
        self.admitted.set()
        for server in self.servers:
            server.lost.set()
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for server in self.servers:
            if server.running:
                await server.idle.wait()
            await server.client.close()

    def _choose(self, keys: Sequence[bytes], avoid: Collection[Server]) -> Server | None:
        most = self._settings.max_running
        free = [server for server in self.servers if server.state == "in" and server.running < most]
        free = [server for server in free if server not in avoid] or free
        if not free:
            return None
        idlest = min(free, key=lambda server: (server.running, server.calls))
        seen = self.routes.servers(keys)
        knowing = [server for server in free if server.index in seen]
        if knowing:
            best = min(knowing, key=lambda server: (server.running, server.calls))
            if best.running <= idlest.running + self._settings.sticky_slack:
                return best
        return idlest

    async def _wait_for_turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._settings.outage_seconds):
                await turn
        except TimeoutError:
            if all(server.state == "out" for server in self.servers):
                reasons = "; ".join(server.reason for server in self.servers)
                limit = self._settings.outage_seconds
                raise GenerationError(f"no server in service for {limit:g} s: {reasons}") from None
        except asyncio.CancelledError:
            if not turn.cancelled():  # woken and cancelled at once: the turn is the next one's
                self._wake(1)
            raise
        finally:
            self._waiting.remove(turn)

    def _wake(self, count: int) -> None:
        for future in self._waiting:
            if not count:
                return
            if not future.done():
                future.set_result(None)
                count -= 1

    def watch(self) -> None:
        """Begins to look at the servers, if that has not begun."""
        if self.closed:
            return
        if not self._keepers:
            self._keepers = [asyncio.ensure_future(self._keep(server)) for server in self.servers]
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()  # a fault of ours: it must not pass in silence

    async def _keep(self, server: Server) -> None:
        """Looks at one server for as long as the pool lives."""
        missed = 0
        while True:
            if server.state == "out":
                missed = 0
                await self._bring_back(server)
                continue
            server.changed.clear()
            try:
                async with asyncio.timeout(self._settings.probe_seconds):
                    await server.changed.wait()
                continue
            except TimeoutError:
                pass
            if server.state != "in":
                continue
            try:
                await self._inspect(server)
                missed = 0
            except CallError as error:
                missed += 1
                if missed >= MAX_MISSED_LOOKS and server.state == "in":
                    self.take_out(server, str(error))

    async def _bring_back(self, server: Server) -> None:
        if server.outs > 1:
            await asyncio.sleep(self._backoff.seconds(server.outs - 1, self._rng))
        try:
            await self._revive(server)
        except CallError as error:
            server.outs += 1
            server.reason = str(error)
            server.lost.set()
        else:
            self.admit(server)
