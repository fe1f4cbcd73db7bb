"""Single-turn questions with a verifier, from the package `reasoning-gym`: arithmetic, logic, puzzles, games.

Question i is the package's of seed `seed * 2**20 + i`: nothing is downloaded, and two seeds share no question
(the package's own seeds 1 and 2 share all but one). The answer is what stands in the last pair of `<answer>`
tags behind the thinking, or the last line of the text; the dataset's own verifier scores it, from 0 to 1. An
answer without either scores 0.

Questions are made and scored in this process, in threads, one at a time per dataset: some keep state in
between. An exception in a verifier isn't caught here and is not a score of 0: it leaves `step`, and whoever
runs the episode reports it.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from dta_jax.envs.packages import require
from dta_jax.envs.protocol import Answer, Observation, Step
from dta_jax.envs.tool_calls import without_thinking
from dta_jax.errors import InputError

Extraction: TypeAlias = Literal["tags", "last_line"]
EXTRACTIONS: Final = ("tags", "last_line")
MAX_SIZE: Final = 2**20
MAX_SEED: Final = 2**12 - 1  # what is made of it must fit 32 bits
_OPEN, _CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True)
class ReasoningGym:
    """Questions of one dataset; a task is a question.

    Attributes:
      dataset: its name in `reasoning-gym`.
      size: how many questions.
      seed: of the questions. Another seed gives questions to evaluate on.
      options: the dataset's own options, a JSON object, such as '{"max_digits": 2}'.
      extraction: "tags" takes what stands in the last pair of answer tags, "last_line" the last line that
        is not blank.
      system_prompt: said before the question; "" for no system message. None: with "tags", a request to
        put the answer into tags, else no system message.
    """

    dataset: str = "chain_sum"
    size: int = 1000
    seed: int = 0
    options: str = "{}"
    extraction: Extraction = "tags"
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("size", 1 <= self.size <= MAX_SIZE, f"1 to {MAX_SIZE}"),
            ("seed", 0 <= self.seed <= MAX_SEED, f"0 to {MAX_SEED}"),
            ("extraction", self.extraction in EXTRACTIONS, " or ".join(EXTRACTIONS)),
        ):
            if not good:
                raise InputError("ReasoningGym", name, expected=expected, actual=repr(getattr(self, name)))
        _questions(self.dataset, self.size, self.seed, self.options)

    @property
    def num_tasks(self) -> int:
        """The number of questions."""
        return self.size

    def episode(self, task: int, seed: int) -> Question:
        """A fresh episode; nothing in it is left to chance.

        Raises:
          InputError: there is no such task.
        """
        if not 0 <= task < self.size:
            raise InputError("ReasoningGym", "task", expected=f"0 to {self.size - 1}", actual=task)
        return Question(self, _questions(self.dataset, self.size, self.seed, self.options), task)


class Questions:
    """A dataset of the package."""

    def __init__(self, dataset: Any):
        self._dataset, self._free = dataset, threading.Lock()

    def make(self, task: int) -> Mapping[str, Any]:
        """Question `task`: `question`, and what its verifier needs."""
        with self._free:
            return self._dataset[task]

    def score(self, answer: str, made: Mapping[str, Any]) -> float:
        """The verifier's score of an answer to a question."""
        with self._free:
            return float(self._dataset.score_answer(answer, made))


class Question:
    """One question and its verifier."""

    def __init__(self, settings: ReasoningGym, questions: Questions, task: int):
        self._settings, self._questions, self._task = settings, questions, task
        self._made: Mapping[str, Any] = {}

    async def start(self) -> Step:
        """The question."""
        self._made = await asyncio.to_thread(self._questions.make, self._task)
        system = self._settings.system_prompt
        if system is None:
            system = _ASK_FOR_TAGS if self._settings.extraction == "tags" else ""
        messages = [{"role": "system", "content": system}] if system else []
        return Step(Observation(messages=[*messages, {"role": "user", "content": self._made["question"]}]))

    async def step(self, answer: Answer) -> Step:
        """The verifier's score."""
        said = extract_answer(answer.text or "", self._settings.extraction)
        score = 0.0
        if said is not None:
            score = await asyncio.to_thread(self._questions.score, said, self._made)
        info = {"correct": float(score == 1), "answered": float(said is not None)}
        reason = "length" if answer.truncated else "done"
        return Step(None, final_reward=score, info=info, stop_reason=reason)

    async def close(self) -> None:
        """Holds nothing."""


_ASK_FOR_TAGS: Final = (
    "Think about the question first, then end with the answer alone, in the form that the question asks "
    f"for, between {_OPEN} and {_CLOSE}."
)


def extract_answer(text: str, extraction: Extraction) -> str | None:
    """What a text answers; None if it doesn't. Thinking, up to `</think>`, does not count.

    Args:
      text: what the policy said.
      extraction: see `ReasoningGym`.
    """
    text = without_thinking(text)
    if extraction == "tags":
        before, closed, _ = text.rpartition(_CLOSE)
        _, opened, inside = before.rpartition(_OPEN)
        return inside.strip() if closed and opened else None
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


@functools.lru_cache(maxsize=64)
def _questions(dataset: str, size: int, seed: int, options: str) -> Questions:
    gym = require("reasoning_gym", package="reasoning-gym", wanted_by="ReasoningGym")
    known = require("reasoning_gym.factory", package="reasoning-gym", wanted_by="ReasoningGym").DATASETS
    if dataset not in known:
        near = ", ".join(difflib.get_close_matches(dataset, known, n=3, cutoff=0.4))
        hint = f"did you mean {near}" if near else ""
        expected = f"one of its {len(known)} datasets"
        raise InputError("ReasoningGym", "dataset", expected=expected, actual=repr(dataset), hint=hint)
    try:
        named = json.loads(options)
    except ValueError as error:
        raise InputError("ReasoningGym", "options", expected="a JSON object", actual=error) from None
    if not isinstance(named, dict) or named.keys() & {"size", "seed"}:
        raise InputError(
            "ReasoningGym", "options", expected="a JSON object without size and seed", actual=options
        )
    try:
        return Questions(gym.create_dataset(dataset, size=size, seed=seed * MAX_SIZE, **named))
    except (TypeError, ValueError, AssertionError) as error:  # how its settings classes refuse
        expected = f"options that {dataset} takes"
        raise InputError("ReasoningGym", "options", expected=expected, actual=error) from None
