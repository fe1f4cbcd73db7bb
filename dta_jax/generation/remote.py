"""The engine over HTTP: calls to one of several servers, checked, and tried again where that helps.

Every call that `RemoteGenerator.generate` makes ends in one of four ways:

    a good answer          the completion is done
    a good answer, cut     the server was told to stop for new weights: prompt and tokens so far are sent
                           again, for the rest; every part is stamped with the version of its server
    a bad one, or none     it counts as failed; it is tried again, elsewhere if there is another server
    "refused"              the server finds the call wrong: no other attempt is made

A completion is made of good answers only, so none is there twice, and a call that fails for good raises
`GenerationError`. What each server's interface looks like is `ServerApi`'s business (`sglang`, `vllm`,
`openai`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from dta_jax.errors import InputError
from dta_jax.generation.http import Backoff, CallError, JsonClient, read_key
from dta_jax.generation.pool import Pool, Server, Servers
from dta_jax.generation.protocol import Completion, GenerationError, Sampling, StopReason
from dta_jax.generation.replies import Reply
from dta_jax.model import Params

T = TypeVar("T")

_MEGABYTE: Final = 1_000_000


class ServerApi(Protocol):
    """How to talk to one kind of server. All methods but `check_sampling` raise CallError."""

    @property
    def spare_tokens(self) -> int:
        """By how many tokens a server's longest sequence falls short of its context length."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises InputError if the server can't draw like that, or gives no log-probabilities for it."""

    async def generate(self, client: JsonClient, prompt: np.ndarray, sampling: Sampling, seed: int) -> Reply:
        """One checked answer to `prompt`, int32[p]."""

    async def health(self, client: JsonClient) -> None:
        """Returns if the server takes calls."""


def make_servers(settings: Servers, version: int) -> list[Server]:
    """The servers of `settings`, all with the weights of `version`.

    Raises:
      InputError: the API key's variable is not set.
    """
    key = read_key(type(settings).__name__, "api_key_env", settings.api_key_env)
    limit = settings.max_reply_mb * _MEGABYTE
    return [
        Server(i, JsonClient(url, timeout=settings.timeout, max_reply_bytes=limit, api_key=key), version)
        for i, url in enumerate(settings.urls)
    ]


@dataclass
class Failures:
    """What failed of one call: the server of each attempt."""

    servers: list[Server] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of a completion: the answer, the version of its weights, the index of its server."""

    reply: Reply
    version: int
    server: int


class RemoteGenerator:
    """A `Generator` whose servers keep the weights that they were started with.

    Args:
      api: the servers' interface.
      settings: the servers.
      vocab_size: ids are below.
      context_length: tokens of prompt and completion together, at most.
      version: of the servers' weights.
      seed: of the spread of waiting times; of nothing else.

    Raises:
      InputError: the API key's variable is not set.
    """

    def __init__(
        self,
        api: ServerApi,
        settings: Servers,
        *,
        vocab_size: int,
        context_length: int,
        version: int = 0,
        seed: int = 0,
    ):
        self._api, self._settings = api, settings
        self._vocab_size, self._longest = vocab_size, context_length - api.spare_tokens
        self._version = version
        self._rng = random.Random(seed)
        self._backoff = Backoff(settings.backoff)
        self._pool = Pool(
            make_servers(settings, version),
            settings,
            inspect=self._inspect,
            revive=self._revive,
            rng=self._rng,
        )

    @property
    def version(self) -> int:
        """The version of the weights that the next token is drawn with."""
        return self._version

    async def generate(self, prompt: np.ndarray, sampling: Sampling, *, seed: int) -> Completion:
        """See `Generator.generate`. Seeds reproduce tokens as far as the server's do; see its module."""
        prompt = self._checked_prompt(prompt)
        self._api.check_sampling(sampling)
        budget = min(sampling.max_new_tokens, self._longest - len(prompt))
        parts: list[_Part] = []
        tokens, failures = prompt, Failures()
        while len(tokens) < len(prompt) + budget:
            done = len(tokens) - len(prompt)
            left = replace(sampling, max_new_tokens=budget - done)
            keys = self._pool.routes.keys(tokens)
            part = await self._answer(
                partial(self._part, keys, tokens, left, _part_seed(seed, done)), keys, failures
            )
            parts.append(part)
            tokens = np.concatenate([tokens, part.reply.tokens])
            if part.reply.finish != "abort":
                self._pool.routes.remember(self._pool.routes.keys(tokens), part.server)
                return _completion(parts, part.reply.finish)
        return _completion(parts, "length")

    async def update_weights(self, params: Params, version: int) -> None:
        """Not possible here: the servers keep their weights.

        Raises:
          InputError: always.
        """
        expected = "servers that can be told to load weights: SGLang or VLLM"
        raise InputError(type(self._settings).__name__, "update_weights", expected=expected, actual="another")

    async def close(self) -> None:
        """See `Generator.close`."""
        await self._pool.close()

    def _checked_prompt(self, prompt: np.ndarray) -> np.ndarray:
        prompt = np.asarray(prompt)
        if prompt.ndim != 1 or not len(prompt) or prompt.dtype.kind not in "iu":
            actual = f"{prompt.dtype}{list(prompt.shape)}"
            raise InputError("generate", "prompt", expected="token ids, int32[p], p >= 1", actual=actual)
        if len(prompt) >= self._longest:
            expected = f"fewer than {self._longest} tokens, so that one more has room"
            raise InputError("generate", "prompt", expected=expected, actual=len(prompt))
        if prompt.min() < 0 or prompt.max() >= self._vocab_size:
            expected = f"ids from 0 to {self._vocab_size - 1}"
            raise InputError(
                "generate", "prompt", expected=expected, actual=f"{prompt.min()} to {prompt.max()}"
            )
        return prompt.astype(np.int32)

    async def _answer(
        self, ask: Callable[[Server], Coroutine[Any, Any, T]], keys: Sequence[bytes], failures: Failures
    ) -> T:
        """The first good answer to a question, whichever server gives it.

        Args:
          ask: asks a server.
          keys: of the prompt; see `PrefixRoutes`.
          failures: what failed of this call so far; goes on counting.

        Raises:
          GenerationError: too many attempts failed, the call was refused, or the engine is closed.
        """
        while True:
            server = await self._pool.acquire(keys, failures.servers)
            try:
                answer = await _unless_lost(ask(server), server)
            except CallError as error:
                if self._pool.closed:
                    raise GenerationError("the engine is closed") from None
                if error.kind == "refused":
                    raise GenerationError(str(error)) from None
                self._pool.failed(server, error)
                failures.servers.append(server)
                if len(failures.servers) > self._settings.retries:
                    count = len(failures.servers)
                    raise GenerationError(f"{count} attempts failed, the last: {error}") from None
            else:
                self._pool.succeeded(server)
                return answer
            finally:
                self._pool.release(server)
            await asyncio.sleep(self._backoff.seconds(len(failures.servers), self._rng))

    async def _part(
        self, keys: Sequence[bytes], tokens: np.ndarray, sampling: Sampling, seed: int, server: Server
    ) -> _Part:
        self._pool.routes.remember(keys, server.index)
        version = server.version
        reply = await self._api.generate(server.client, tokens, sampling, seed)
        self._check_version(server, reply, version)
        if reply.finish == "abort" and not len(reply.tokens) and server.state == "in":
            words = "cut short before the first token, and not by us"
            raise CallError("reply", f"{server.client.url}: {words}")
        return _Part(reply, version, server.index)

    def _check_version(self, server: Server, reply: Reply, version: int) -> None:
        """Servers whose weights never change may report what they like."""

    async def _inspect(self, server: Server) -> None:
        await self._api.health(server.client)

    async def _revive(self, server: Server) -> None:
        await self._api.health(server.client)


async def _unless_lost(question: Coroutine[Any, Any, T], server: Server) -> T:
    """The question's answer, or an error as soon as the server is given up."""
    call = asyncio.ensure_future(question)
    lost = asyncio.ensure_future(server.lost.wait())
    try:
        await asyncio.wait((call, lost), return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise CallError("unreachable", f"{server.client.url}: given up: {server.reason}")
        return call.result()
    finally:
        call.cancel()
        lost.cancel()
        await asyncio.gather(call, lost, return_exceptions=True)


def _part_seed(seed: int, done: int) -> int:
    """31 bits; another seed for every part, or each would begin with the same draws."""
    return int(np.random.SeedSequence([seed % 2**64, done]).generate_state(1)[0]) >> 1


def _completion(parts: Sequence[_Part], reason: StopReason) -> Completion:
    return Completion(
        np.concatenate([part.reply.tokens for part in parts]),
        np.concatenate([part.reply.logprobs for part in parts]),
        np.concatenate([np.full(len(part.reply.tokens), part.version, np.int32) for part in parts]),
        reason,
    )
