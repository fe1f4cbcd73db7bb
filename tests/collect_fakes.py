"""Environments and engines for the tests of `dta_jax.collect`: deterministic, slow, failing, hanging."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np

from dta_jax.collect.order import derived_seed
from dta_jax.envs.protocol import Answer, Observation, Step
from dta_jax.errors import InputError
from dta_jax.generation.protocol import Completion, GenerationError, Sampling

Seconds = Callable[[int], float]
"""How long something takes, by its seed."""


def at_once(seed: int) -> float:
    return 0.0


def log_normal(mean: float, sigma: float = 1.0) -> Seconds:
    """Seconds with that mean, by seed."""
    return lambda seed: float(np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma))


class FakeGenerator:
    """Draws tokens from a hash of seed, prompt and version; the first token says how often it failed before.

    Args:
      seconds: how long a call takes.
      fault: "", "fail", "hang" or "garbage": what happens to a call, by its seed and how often that came up.
    """

    def __init__(self, seconds: Seconds = at_once, fault: Callable[[int, int], str] = lambda seed, count: ""):
        self.version = 0
        self.seconds, self.fault = seconds, fault
        self.seen: Counter[int] = Counter()
        self.asked: list[tuple[int, int]] = []  # (seed, how many calls were running) of every call, in order
        self.running = 0
        self.most_running = 0
        self.weights: list[object] = []
        self.closed = False

    async def generate(self, prompt: np.ndarray, sampling: Sampling, *, seed: int) -> Completion:
        fault = self.fault(seed, self.seen[seed])
        self.seen[seed] += 1
        self.asked.append((seed, self.running))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        began = self.version
        try:
            await asyncio.sleep(self.seconds(seed))
            if fault == "hang":
                await asyncio.Event().wait()
        finally:
            self.running -= 1
        if fault == "fail":
            raise GenerationError("connection lost")
        n = min(3, sampling.max_new_tokens)
        rng = np.random.default_rng(derived_seed(seed, began, *prompt.tolist()))
        tokens = rng.integers(2, 90, n, dtype=np.int32)
        versions = np.full(n, began, np.int32)
        versions[n // 2 :] = self.version
        logprobs = -rng.random(n, dtype=np.float32)
        if fault == "garbage":
            return Completion(tokens[:0], logprobs, versions, "stop")
        return Completion(tokens, logprobs, versions, "stop")

    async def update_weights(self, params: object, version: int) -> None:
        if version <= self.version:
            raise InputError("engine", "version", expected=f"above {self.version}", actual=version)
        await asyncio.sleep(0)
        self.weights.append(params)
        self.version = version

    async def moment(self) -> None:
        """Lets others go on."""
        await asyncio.sleep(0.002)

    async def close(self) -> None:
        self.closed = True


@dataclasses.dataclass
class FakeEnvironment:
    """Episodes of some turns: shows its seed and a few tokens, and rewards by what was answered.

    Attributes:
      reward: of (task, seed, sum of all answered tokens).
      fault: what happens to an episode, by its seed and how often it began: "", "raise", "hang".
    """

    num_tasks: int = 5
    turns: int = 2
    seconds: Seconds = at_once
    reward: Callable[[int, int, int], float] = lambda task, seed, answered: float(answered % 2)
    fault: Callable[[int, int], str] = lambda seed, count: ""
    began: Counter[int] = dataclasses.field(default_factory=Counter)
    tasks: list[int] = dataclasses.field(default_factory=list)
    open: int = 0

    def episode(self, task: int, seed: int) -> "FakeEpisode":
        fault = self.fault(seed, self.began[seed])
        self.began[seed] += 1
        self.tasks.append(task)
        self.open += 1
        return FakeEpisode(self, task, seed, fault)


class FakeEpisode:
    def __init__(self, environment: FakeEnvironment, task: int, seed: int, fault: str):
        self.environment, self.task, self.seed, self.fault = environment, task, seed, fault
        self.answers: list[Answer] = []

    async def start(self) -> Step:
        return Step(Observation(np.array([self.seed, self.task + 2], np.int32)))

    async def step(self, answer: Answer) -> Step:
        await asyncio.sleep(self.environment.seconds(derived_seed(self.seed, len(self.answers))))
        if self.fault == "raise":
            raise LookupError("no such flight")
        if self.fault == "hang":
            await asyncio.Event().wait()
        self.answers.append(answer)
        turn = len(self.answers)
        if turn < self.environment.turns:
            return Step(Observation(np.array([1, turn], np.int32)), reward=0.25)
        answered = sum(int(a.tokens.sum()) for a in self.answers)
        reward = self.environment.reward(self.task, self.seed, answered)
        return Step(None, final_reward=reward, info={"answered": float(answered)}, stop_reason="done")

    async def close(self) -> None:
        self.environment.open -= 1
