"""Runs one episode: an environment asks, the engine answers, until the environment has judged.

What fails is tried again from the start, with the same seed and a fresh episode, a bounded number of times.
What fails for good raises `EpisodeFailure` with its reason; nothing that failed ever counts as an answer or
as a reward. Bad input (`InputError`), and whatever an engine raises that its protocol does not name, is no
episode's fault and goes through to the caller.

Limits: an environment that blocks the event loop blocks all episodes (it should use `asyncio.to_thread`),
and one that swallows its cancellation can't be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Literal, TypeAlias

import numpy as np

from dta_jax.chat import Chat
from dta_jax.collect.lockstep import Lockstep
from dta_jax.collect.order import derived_seed
from dta_jax.collect.records import Call, Ending, EpisodeRecord
from dta_jax.collect.settings import Collect
from dta_jax.collect.threads import Speaker, Threads
from dta_jax.envs.protocol import Answer, Environment, Episode, Step
from dta_jax.errors import InputError
from dta_jax.generation.protocol import Completion, GenerationError, Generator, Sampling

Reason: TypeAlias = Literal[
    "timeout", "generation", "garbage", "environment", "reward", "unfinished", "stale"
]
"""Why an episode failed: it took too long; the engine gave up; it returned what its protocol forbids; the
environment raised; it judged with a number that is not finite; a limit was reached and none may be; its
first tokens became too old while it ran."""

CLOSE_SECONDS: Final = 5.0
"""How long an episode may take to close."""

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_log = logging.getLogger(__name__)


class EpisodeFailure(RuntimeError):
    """An episode that failed.

    Args:
      reason: which kind of failure, for the metrics.
      detail: what happened.
    """

    def __init__(self, reason: Reason, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason


class EpisodeRunner:
    """Runs episodes on the event loop that it is called on.

    Args:
      environment: whose tasks.
      generator: who answers.
      settings: limits, retries and sampling.
      chat: for environments that speak messages.
      lockstep: tells a call when its turn is.
      newest_version: of weights that an engine may have by now.
      oldest_version: tokens of older weights make the rest of an episode worthless.
      progress: called after every model call and every step of an environment that was completed.
      retried: called with every failure that is followed by a retry.
      judged: called with the seconds that the environment took for a step, its reward included.
    """

    def __init__(
        self,
        environment: Environment,
        generator: Generator,
        settings: Collect,
        *,
        chat: Chat | None,
        lockstep: Lockstep,
        newest_version: Callable[[], int],
        oldest_version: Callable[[], int],
        progress: Callable[[], None],
        retried: Callable[[EpisodeFailure], None],
        judged: Callable[[float], None] = lambda seconds: None,
    ):
        self._environment, self._generator, self._settings = environment, generator, settings
        self._speaker = Speaker(chat, settings.sampling.stop_tokens)
        self._free, self._lockstep = asyncio.Semaphore(settings.max_concurrent), lockstep
        self._newest_version, self._oldest_version = newest_version, oldest_version
        self._progress, self._retried, self._judged_in = progress, retried, judged

    async def run(self, task: int, trial: int, seed: int) -> EpisodeRecord:
        """One episode, once it is its turn.

        Args:
          task: the environment's task.
          trial: which episode of its group.
          seed: of the environment and of all its model calls.

        Raises:
          EpisodeFailure: it failed, and all retries did; or it is stale.
          InputError: see the module.
        """
        for attempt in range(self._settings.retries):
            try:
                return await self._attempt(task, trial, seed)
            except EpisodeFailure as failure:
                if failure.reason == "stale":
                    raise
                _log.warning("task %d, trial %d: %s; tried again", task, trial, failure)
                self._retried(failure)
            await asyncio.sleep(self._settings.retry_delay * 2**attempt)
        return await self._attempt(task, trial, seed)

    async def _attempt(self, task: int, trial: int, seed: int) -> EpisodeRecord:
        seconds = self._settings.episode_timeout
        async with self._leave_to_begin():
            episode = self._fresh(task, seed)
            try:
                async with asyncio.timeout(seconds) as limit:
                    return await self._converse(episode, task, trial, seed)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise EpisodeFailure("timeout", f"not over after {seconds:g} s") from None
            finally:
                await _close(episode)

    @contextlib.asynccontextmanager
    async def _leave_to_begin(self) -> AsyncIterator[None]:
        """While one of the `max_concurrent` episodes runs."""
        with self._lockstep.parked() if self._free.locked() else contextlib.nullcontext():
            await self._free.acquire()
        try:
            yield
        finally:
            self._free.release()

    async def _converse(self, episode: Episode, task: int, trial: int, seed: int) -> EpisodeRecord:
        threads, calls = Threads(self._speaker), list[Call]()
        step = await self._judged(episode.start())
        while (observation := step.observation) is not None:
            if len(calls) == self._settings.max_turns:
                return self._unfinished("max_turns", task, trial, calls)
            if calls and calls[0].completion.versions[0] < self._oldest_version():
                raise EpisodeFailure(
                    "stale", f"its first token is of version {calls[0].completion.versions[0]}"
                )
            prompt = threads.observe(observation)
            sampling = self._with_room(len(prompt))
            if sampling is None:
                return self._unfinished("max_context", task, trial, calls)
            await self._lockstep.turn(task, trial, seed)
            made = await self._generate(prompt, sampling, derived_seed(seed, len(calls)))
            threads.answered(observation.thread, made.tokens)
            answer = Answer(made.tokens, self._speaker.text(made.tokens), made.stop_reason == "length")
            step = await self._judged(episode.step(answer))
            calls.append(Call(observation.thread, prompt, made, step.reward))
        info = {name: float(value) for name, value in step.info.items()}
        for name, value in (("final_reward", step.final_reward), *info.items()):
            _check_number(name, value)
        ending = Ending(step.stop_reason, unfinished=False, info=info)
        return EpisodeRecord(task, trial, tuple(calls), step.final_reward, ending)

    def _unfinished(self, limit: str, task: int, trial: int, calls: list[Call]) -> EpisodeRecord:
        reward = self._settings.unfinished_reward
        if reward is None:
            raise EpisodeFailure("unfinished", f"{limit} reached after {len(calls)} model calls")
        return EpisodeRecord(task, trial, tuple(calls), reward, Ending(limit, unfinished=True, info={}))

    def _with_room(self, prompt_tokens: int) -> Sampling | None:
        """The sampling settings that a prompt leaves room for, None if there is none."""
        sampling, longest = self._settings.sampling, self._settings.max_context
        if longest is None or prompt_tokens + sampling.max_new_tokens <= longest:
            return sampling
        if prompt_tokens >= longest:
            return None
        return dataclasses.replace(sampling, max_new_tokens=longest - prompt_tokens)

    async def _generate(self, prompt: np.ndarray, sampling: Sampling, seed: int) -> Completion:
        try:
            made = await self._generator.generate(prompt, sampling, seed=seed)
        except GenerationError as error:
            raise EpisodeFailure("generation", str(error)) from error
        _check_completion(made, sampling, self._newest_version())
        self._progress()
        return made

    def _fresh(self, task: int, seed: int) -> Episode:
        try:
            return self._environment.episode(task, seed)
        except InputError:
            raise
        except Exception as error:  # foreign code, see `_judged`
            raise _environment_failure(error) from error

    async def _judged(self, turn: Awaitable[Step]) -> Step:
        began = time.perf_counter()
        try:
            step = await turn
        except InputError:
            raise
        except (
            Exception
        ) as error:  # foreign code: whatever it raises is this episode's failure, and is reported
            raise _environment_failure(error) from error
        self._judged_in(time.perf_counter() - began)
        _check_number("reward", step.reward)
        self._progress()
        return step


def first_cause(error: BaseException) -> BaseException:
    """What a group of tasks failed of: the first exception inside the group's exception."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _environment_failure(error: Exception) -> EpisodeFailure:
    return EpisodeFailure("environment", f"{type(error).__name__}: {error}")


async def _close(episode: Episode) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await episode.close()
    except Exception as error:  # foreign code, and the episode's result stands
        _log.warning("an episode could not be closed: %s: %s", type(error).__name__, error)


def _check_number(name: str, value: float) -> None:
    """Refuses what is no number of float32."""
    if not math.isfinite(value) or abs(value) > _FLOAT32_MAX:
        raise EpisodeFailure("reward", f"{name} is {value}, not a finite float32")


def _check_completion(made: Completion, sampling: Sampling, newest: int) -> None:
    """Refuses what `Completion` forbids: an engine's garbage must not become training data."""
    tokens, logprobs, versions = made.tokens, made.logprobs, made.versions
    arrays = (
        ("tokens", tokens, np.int32),
        ("logprobs", logprobs, np.float32),
        ("versions", versions, np.int32),
    )
    for name, array, dtype in arrays:
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (len(tokens),):
            found = (
                f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            )
            raise EpisodeFailure("garbage", f"{name} are {found}, for {len(tokens)} tokens")
    if not 1 <= len(tokens) <= sampling.max_new_tokens:
        raise EpisodeFailure("garbage", f"{len(tokens)} tokens of 1 to {sampling.max_new_tokens}")
    if tokens.min() < 0:
        raise EpisodeFailure("garbage", f"token id {tokens.min()}")
    if not np.isfinite(logprobs).all() or logprobs.max() > 1e-3:
        raise EpisodeFailure("garbage", "log-probabilities that are none")
    if versions[0] < 0 or versions[-1] > newest or (np.diff(versions) < 0).any():
        raise EpisodeFailure("garbage", f"versions {versions[0]} to {versions[-1]}, the newest is {newest}")
