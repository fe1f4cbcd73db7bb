"""What an environment must offer: episodes that ask and judge. How the policy answers is not its business.

    episode = environment.episode(task, seed)
    step = await episode.start()
    while step.observation is not None:
        step = await episode.step(<the policy's answer>)
    await episode.close()

An environment speaks token ids or chat messages. A *thread* is one context that grows: the main
conversation, a sub-agent's, a judge's. An observation names the thread that is to answer, and adds to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

MAIN: Final = "main"


@dataclass(frozen=True, eq=False)
class Observation:
    """What the policy is shown before its next answer; exactly one of `tokens` and `messages` is given.

    Attributes:
      tokens: int32[n], appended to the thread.
      messages: chat messages (`role`, `content`, ...), appended to the thread.
      tools: JSON schemas of functions that may be called; read when a thread begins.
      thread: who is asked.
      restart: the thread begins anew with this observation: its context was rewritten.
    """

    tokens: np.ndarray | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    thread: str = MAIN
    restart: bool = False


@dataclass(frozen=True, eq=False)
class Answer:
    """What the policy said.

    Attributes:
      tokens: int32[n], its completion, the stop token included.
      text: the completion as text, without control tokens at its end; None where there is no tokenizer.
      truncated: it was cut off by a limit of length.
    """

    tokens: np.ndarray
    text: str | None
    truncated: bool


@dataclass(frozen=True, eq=False)
class Step:
    """What an answer led to.

    Attributes:
      observation: what comes next; None when the episode is over.
      reward: earned by the answer just given (0 for `start`).
      final_reward: of the whole episode; read only when it is over.
      info: numbers for the metrics, such as {"correct": 1.0}; read only when it is over.
      stop_reason: why it is over: "done", "length", "error of the agent", ...
    """

    observation: Observation | None
    reward: float = 0.0
    final_reward: float = 0.0
    info: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = ""


@runtime_checkable
class Episode(Protocol):
    """One try at one task. Single use."""

    async def start(self) -> Step:
        """The first observation."""

    async def step(self, answer: Answer) -> Step:
        """Takes the policy's answer to the last observation."""

    async def close(self) -> None:
        """Frees what the episode holds; also called after a failure or a cancellation."""


@runtime_checkable
class Environment(Protocol):
    """A set of tasks. Its settings are a frozen dataclass, so that a config can name it."""

    @property
    def num_tasks(self) -> int:
        """Tasks are 0 ... num_tasks - 1."""

    def episode(self, task: int, seed: int) -> Episode:
        """A fresh episode; the same task, seed and answers lead to the same rewards."""
