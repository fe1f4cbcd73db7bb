"""What a server answered to one call, checked: nothing that a server says is taken on trust."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, TypeAlias

import numpy as np

from dta_jax.generation.http import CallError

Finish: TypeAlias = Literal["stop", "length", "abort"]

FINISHES: Final = ("stop", "length", "abort")
TOLERANCE: Final = 1e-3  # a log-probability this far above 0 is rounding


@dataclass(frozen=True, eq=False)
class Reply:
    """The answer to one call.

    Attributes:
      tokens: int32[n].
      logprobs: float32[n]; NaN throughout where the server gives none and that is allowed.
      finish: "stop", "length", or "abort" for a generation that was cut short to be gone on with.
      version: the version of the weights, where the server says it.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    finish: Finish
    version: int | None = None


def bad_reply(expected: str, actual: object) -> NoReturn:
    """Raises the CallError of an answer that makes no sense."""
    raise CallError("reply", f"reply: expected {expected}; got {str(actual)[:80]}")


def field(reply: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """`reply[name]`, which must be there and of that type.

    Raises:
      CallError: it is not.
    """
    value = reply.get(name) if isinstance(reply, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        bad_reply(f"a field {name!r}", type(value).__name__)
    return value


def checked_reply(
    tokens: Sequence[Any],
    logprobs: Sequence[Any],
    finish: Any,
    *,
    vocab_size: int,
    most: int,
    version: int | None = None,
) -> Reply:
    """The reply, if it holds together.

    Args:
      tokens: ids as the server gave them.
      logprobs: of each of them.
      finish: why it ended.
      vocab_size: ids are below.
      most: how many tokens were asked for at most.
      version: see `Reply`.

    Raises:
      CallError: an unknown reason to finish, no token, too many, an id outside the vocabulary, another number
        of log-probabilities than of tokens, or one that is not finite or above 0.
    """
    if finish not in FINISHES:
        bad_reply(f"a finish reason among {', '.join(FINISHES)}", repr(finish))
    if len(tokens) != len(logprobs):
        bad_reply("as many log-probabilities as tokens", f"{len(logprobs)} and {len(tokens)}")
    if len(tokens) > most or (not tokens and finish != "abort"):
        bad_reply(f"1 to {most} tokens", len(tokens))
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            bad_reply(f"token ids from 0 to {vocab_size - 1}", repr(token))
    for logprob in logprobs:
        number = type(logprob) in (int, float)
        if not number or not math.isfinite(logprob) or logprob > TOLERANCE:
            bad_reply("finite log-probabilities, at most 0", repr(logprob))
    values = np.minimum(np.array(logprobs, np.float32), 0)
    if not np.isfinite(values).all():
        bad_reply("log-probabilities within float32", "beyond")
    return Reply(np.array(tokens, np.int32), values, finish, version)
