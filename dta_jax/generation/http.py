"""A small asynchronous JSON client for engines behind HTTP, on aiohttp.

A call has a time limit, its reply a bounded size, and every way to fail is a `CallError` that says what kind
of failure it was: whoever sent the call decides on that whether to try again, and where. The API key goes
into one header; neither errors nor logs ever hold it, also where a server echoes it.
"""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import aiohttp

from dta_jax.errors import InputError

FailureKind: TypeAlias = Literal["unreachable", "timeout", "server", "refused", "reply"]

_KEEPALIVE_SECONDS: Final = 2.0  # below the 5 s after which uvicorn drops idle connections
_BLOCK: Final = 1 << 16
_SHOWN: Final = 200  # characters of a server's own words in an error
_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]*")
_TRY_AGAIN: Final = frozenset({408, 425, 429})


class CallError(Exception):
    """One call that brought no usable answer.

    Attributes:
      kind: "unreachable" (no connection, or it broke), "timeout", "server" (an error of the server, or it is
        busy), "refused" (the server finds the call itself wrong: no other attempt will do better), or "reply"
        (an answer that makes no sense).
      status: of the HTTP reply, if there was one.
    """

    def __init__(self, kind: FailureKind, message: str, status: int | None = None):
        self.kind, self.status = kind, status
        super().__init__(message)


@dataclass(frozen=True)
class Backoff:
    """Waiting times between attempts: doubled each time, and spread so that callers do not come back as one.

    Attributes:
      first: seconds before the second attempt, at most.
      most: seconds, however many attempts failed.
    """

    first: float = 0.5
    most: float = 30.0

    def seconds(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after `failures` >= 1 failed attempts: uniform between half and the whole."""
        whole = min(self.most, self.first * 2.0 ** min(failures - 1, 60))
        return whole * (0.5 + 0.5 * rng.random())


def check_url(source: str, field: str, url: str) -> None:
    """Raises InputError unless `url` is http(s), a host, and at most a path; shows no secret."""
    expected = "http://host:port or https://host:port"
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise InputError(source, field, expected=expected, actual="no URL") from None
    if parts.username is not None or parts.password is not None:
        hint = "name the variable that holds the key in api_key_env"
        raise InputError(source, field, expected=expected, actual="a URL with credentials", hint=hint)
    if not named or parts.query or parts.fragment:
        raise InputError(source, field, expected=expected, actual=repr(url))


def check_variable_name(source: str, field: str, name: str | None) -> None:
    """Raises InputError unless `name` is None or can name an environment variable; never shows it."""
    if name is not None and not _VARIABLE.fullmatch(name):
        expected = "the NAME of an environment variable, in capitals (never the key itself)"
        raise InputError(source, field, expected=expected, actual="something else")


def read_key(source: str, field: str, name: str | None) -> str | None:
    """The key in environment variable `name`; None for None.

    Raises:
      InputError: the variable is not set, or holds what no header can carry.
    """
    if name is None:
        return None
    key = os.environ.get(name, "")
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        actual = "a key with blanks or odd characters" if key else f"{name} is not set"
        raise InputError(source, field, expected=f"a key in the variable {name}", actual=actual)
    return key


class JsonClient:
    """Calls one server. Connections are kept for the next call, and there is no limit to their number.

    Args:
      url: `http://host:port`, and perhaps a path that all calls begin with.
      timeout: seconds that a call may take, unless it says otherwise.
      max_reply_bytes: longer replies fail.
      api_key: sent as `Authorization: Bearer ...`; None for none.
    """

    def __init__(self, url: str, *, timeout: float, max_reply_bytes: int, api_key: str | None = None):
        self.url = url.rstrip("/")
        self._timeout, self._max_bytes, self._key = timeout, max_reply_bytes, api_key
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def json(self, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """Sends `body` as JSON and returns what the reply's JSON says.

        Raises:
          CallError: see `send`; or the reply is no JSON.
        """
        data = await self.send(method, path, body, timeout=timeout)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise CallError(
                "reply", f"{self._name(method, path)}: {len(data)} bytes that are no JSON"
            ) from None

    async def send(self, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> bytes:
        """Sends `body` as JSON and returns the reply's bytes. Cancelling the call closes its connection.

        Raises:
          CallError: no reply in time, none at all, one that is too long, or a status other than 2xx.
        """
        name = self._name(method, path)
        if self._closed:
            raise CallError("unreachable", f"{name}: the client is closed")
        limit = self._timeout if timeout is None else timeout
        try:
            async with self._connection().request(
                method,
                self.url + path,
                json=body,
                timeout=aiohttp.ClientTimeout(total=limit),
                allow_redirects=False,
            ) as response:
                data = await self._read(name, response)
                status = response.status
        except TimeoutError:
            raise CallError("timeout", f"{name}: no reply within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            words = self._shown(f"{type(error).__name__}: {error}")
            raise CallError("unreachable", f"{name}: {words}") from None
        if 200 <= status < 300:
            return data
        kind: FailureKind = "server" if status >= 500 or status in _TRY_AGAIN else "refused"
        words = self._shown(data.decode("utf-8", "replace"))
        raise CallError(kind, f"{name}: status {status}: {words or 'no words'}", status)

    async def close(self) -> None:
        """Closes all connections; calls under way fail, and so do later ones."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _connection(self) -> aiohttp.ClientSession:
        if self._session is None:  # a session belongs to the running event loop
            headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)
        return self._session

    async def _read(self, name: str, response: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_chunked(_BLOCK):
            size += len(part)
            if size > self._max_bytes:
                raise CallError("reply", f"{name}: a reply of more than {self._max_bytes:,} bytes")
            parts.append(part)
        return b"".join(parts)

    def _name(self, method: str, path: str) -> str:
        return f"{method} {self.url}{path}"

    def _shown(self, words: str) -> str:
        """A server's words, on one line, short, and without the key."""
        hidden = words.replace(self._key, "***") if self._key else words
        return " ".join(hidden.split())[:_SHOWN]
