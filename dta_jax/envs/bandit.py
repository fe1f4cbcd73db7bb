"""The smallest environment: one question, one token for an answer. For tests, and for timing a loop.

    prompt  [0, 0, ..., context]        answer  [arm]        reward  1 for the context's best arm

Ids: 0 fills the prompt, 1 ... contexts are the contexts, and the arms come after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dta_jax.envs.protocol import Answer, Observation, Step
from dta_jax.errors import InputError


@dataclass(frozen=True)
class Bandit:
    """A contextual bandit; a task is a context.

    Attributes:
      contexts: how many there are.
      arms: how many answers are worth anything.
      prompt_tokens: length of the prompt; all but its last token are the same for every context.
      other_reward: what an arm pays that isn't the best one; an answer that is no arm pays 0.
      seed: which arm is best in which context.
    """

    contexts: int = 8
    arms: int = 4
    prompt_tokens: int = 8
    other_reward: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("contexts", self.contexts >= 1, "at least 1"),
            ("arms", self.arms >= 2, "at least 2"),
            ("prompt_tokens", self.prompt_tokens >= 1, "at least 1"),
            ("other_reward", 0 <= self.other_reward < 1, "at least 0, below 1"),
            ("seed", self.seed >= 0, "at least 0"),
        ):
            if not good:
                raise InputError("Bandit", name, expected=expected, actual=repr(getattr(self, name)))

    @property
    def num_tasks(self) -> int:
        """One task per context."""
        return self.contexts

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return 1 + self.contexts + self.arms

    def best_arm(self, task: int) -> int:
        """The token that pays 1 in a context."""
        arm = np.random.default_rng([self.seed, task]).integers(self.arms)
        return 1 + self.contexts + int(arm)

    def pays(self, task: int, token: int) -> float:
        """What a token is worth in a context."""
        if token == self.best_arm(task):
            return 1.0
        return self.other_reward if 1 + self.contexts <= token < self.vocab_size else 0.0

    def episode(self, task: int, seed: int) -> BanditEpisode:
        """A fresh episode; nothing in it is left to chance.

        Raises:
          InputError: there is no such task.
        """
        if not 0 <= task < self.num_tasks:
            raise InputError("Bandit", "task", expected=f"0 to {self.num_tasks - 1}", actual=task)
        return BanditEpisode(self, task)


class BanditEpisode:
    """One question."""

    def __init__(self, bandit: Bandit, task: int):
        self._bandit, self._task = bandit, task

    async def start(self) -> Step:
        """The prompt."""
        prompt = np.zeros(self._bandit.prompt_tokens, np.int32)
        prompt[-1] = 1 + self._task
        return Step(Observation(tokens=prompt))

    async def step(self, answer: Answer) -> Step:
        """Pays for the answer's first token."""
        reward = self._bandit.pays(self._task, int(answer.tokens[0])) if len(answer.tokens) else 0.0
        return Step(None, reward=reward, info={"best": float(reward == 1)}, stop_reason="done")

    async def close(self) -> None:
        """Holds nothing."""
