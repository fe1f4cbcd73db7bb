"""What an engine that generates must offer: tokens in, tokens out, with log-probabilities and versions.

Every engine speaks token ids: a prompt is never rendered again from text, so what was sampled is what is
trained on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from dta_jax.errors import InputError, RunError
from dta_jax.model import Params

StopReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      max_new_tokens: the most tokens of one completion.
      temperature: of the softmax; 0 takes the likeliest token.
      top_p: the smallest set of likeliest tokens with at least this probability is drawn from.
      top_k: only so many likeliest tokens are drawn from; 0 for all.
      stop_tokens: ids that end a completion; the id stays in it.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "a finite number, at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("stop_tokens", all(token >= 0 for token in self.stop_tokens), "token ids, at least 0"),
        ):
            if not good:
                raise InputError("Sampling", name, expected=expected, actual=repr(getattr(self, name)))


@dataclass(frozen=True, eq=False)
class Completion:
    """What one call generated.

    Attributes:
      tokens: int32[n]; the stop token is the last of them, where one was drawn.
      logprobs: float32[n], log-probability of each token under the distribution that it was drawn from.
      versions: int32[n], the version of the weights that drew each token, not decreasing.
      stop_reason: "stop" at a stop token, "length" at `max_new_tokens` or at the engine's longest context.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop_reason: StopReason


class GenerationError(RunError):
    """A call that failed for good: its episode counts as rejected. Never stands for an answer."""


@runtime_checkable
class Generator(Protocol):
    """Generates completions for many callers at a time. All methods run on one event loop."""

    @property
    def version(self) -> int:
        """The version of the weights that the next token is drawn with."""

    async def generate(self, prompt: np.ndarray, sampling: Sampling, *, seed: int) -> Completion:
        """One completion of `prompt`, int32[p], p >= 1.

        The same weights, prompt, sampling and seed give the same tokens, where the engine can do that.
        New weights that arrive meanwhile take over at the next token; `Completion.versions` says where.
        Cancelling the call frees what it holds.

        Raises:
          InputError: the prompt leaves no room for a token, or has an id outside the vocabulary.
          GenerationError: the engine gave up.
        """

    async def update_weights(self, params: Params, version: int) -> None:
        """Returns when every token from now on is drawn with `params`.

        Args:
          params: the policy's weights, on its devices, in the layout of `dta_jax.model`.
          version: larger than the version before.
        """

    async def close(self) -> None:
        """Ends running calls with `GenerationError` and frees devices and connections."""
