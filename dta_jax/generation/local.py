"""The local sampler: many calls at a time on one device, in JAX.

    sampler = LocalSampler(rows=64, max_context=4096).make(model, params)
    completion = await sampler.generate(prompt, Sampling(), seed=0)

Calls wait in one queue, first come, first served. A task on the caller's event loop, the *driver*, plans
round after round: it gives waiting calls the rows that rest, takes over beginnings that lie in the cache
already, prefills what is missing, decodes a few tokens in all rows, and hands completions out. All of the
sampler's state belongs to the driver. A round's device work runs in one worker thread, so the event loop is
never blocked; new weights are taken between two rounds.

`rows` says what the cache holds, `device` runs a round's work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import jax
import numpy as np

from dta_jax.errors import InputError
from dta_jax.generation.decode import Decoding
from dta_jax.generation.device import MIN_PREFILL_WIDTH, SamplerDevice, resting_rows
from dta_jax.generation.protocol import Completion, GenerationError, Sampling, StopReason
from dta_jax.generation.rows import RowTable
from dta_jax.generation.sampling import seed_words
from dta_jax.model import DecoderModel, Params

MAX_STOP_TOKENS: Final = 16
Result = TypeVar("Result")


@dataclass(frozen=True)
class LocalSampler:
    """Settings of the local sampler.

    Attributes:
      rows: R, calls that are decoded together, and contexts that are kept.
      max_context: longest context, prompt and completion, tokens.
      prefill_chunk: the most tokens of one row that are prefilled at a time.
      decode_steps: the most tokens per row from one dispatch to the next.
      reuse_stale_cache: new calls may take over keys that older weights have made. Log-probabilities are
        then not exactly those of the weights that `Completion.versions` names.
      devices: of a run, those that sample and do not train, by number; each has a sampler of its own. None:
        the first device of the mesh does both.
    """

    rows: int = 16
    max_context: int = 4096
    prefill_chunk: int = 512
    decode_steps: int = 16
    reuse_stale_cache: bool = False
    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("rows", 1),
            ("max_context", 2),
            ("prefill_chunk", MIN_PREFILL_WIDTH),
            ("decode_steps", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise InputError("LocalSampler", name, expected=f"at least {least}", actual=repr(value))
        apart = self.devices
        if apart is not None and (not apart or min(apart) < 1 or len(set(apart)) < len(apart)):
            expected = "None or different numbers, at least 1 (device 0 trains)"
            raise InputError("LocalSampler", "devices", expected=expected, actual=repr(apart))

    def make(
        self, model: DecoderModel, params: Params, *, version: int = 0, device: jax.Device | None = None
    ) -> LocalGenerator:
        """The generator.

        Args:
          model: a whole model (`tensor_axis` is None).
          params: its weights, in the dtype that they are computed with.
          version: of these weights.
          device: where to sample; None for the first device that `params` lie on.
        """
        return LocalGenerator(self, model, params, version, device)


@dataclass(frozen=True)
class Counters:
    """What a generator has done since it was made.

    Attributes:
      completions: calls answered.
      reused_tokens: tokens of contexts whose keys were in the cache already.
      prefilled_tokens: tokens of contexts that were run before decoding. The last token of a prompt counts in
        neither: decoding begins with it.
      decoded_tokens: tokens drawn.
      dispatches: device programs started.
    """

    completions: int = 0
    reused_tokens: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    dispatches: int = 0


@dataclass(eq=False)
class _Call:
    prompt: np.ndarray
    sampling: Sampling
    seed: np.ndarray
    limit: int
    answer: asyncio.Future[Completion]
    tokens: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    drawn: int = 0

    def add(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.versions.append(np.full(len(tokens), version, np.int32))
        self.drawn += len(tokens)

    @property
    def stop_reason(self) -> StopReason | None:
        if self.drawn and int(self.tokens[-1][-1]) in self.sampling.stop_tokens:
            return "stop"
        return "length" if self.drawn == self.limit else None

    def completion(self, stop_reason: StopReason) -> Completion:
        tokens, logprobs, versions = map(np.concatenate, (self.tokens, self.logprobs, self.versions))
        return Completion(tokens, logprobs, versions, stop_reason)


@dataclass(eq=False)
class _NewWeights:
    params: Params
    version: int
    taken: asyncio.Future[None]


class LocalGenerator:
    """`dta_jax.generation.protocol.Generator` on one device; made by `LocalSampler.make`.

    All methods are called on one event loop. A call's tokens are a function of weights, prompt, sampling
    and seed, up to rounding: where its row lies, who its neighbours are, and what was taken over from the
    cache make no other difference.
    """

    def __init__(
        self,
        settings: LocalSampler,
        model: DecoderModel,
        params: Params,
        version: int,
        device: jax.Device | None,
    ) -> None:
        if model.tensor_axis is not None:
            raise InputError("LocalSampler", "model", expected="a whole model", actual="a part of one")
        self._settings, self._vocabulary, self._version = settings, model.vocab_size, version
        self._device = SamplerDevice(
            model,
            params,
            rows=settings.rows,
            max_context=settings.max_context,
            prefill_chunk=settings.prefill_chunk,
            decode_steps=settings.decode_steps,
            device=device,
        )
        self._rows = self._empty_rows()
        self._serving: dict[int, _Call] = {}
        self._waiting: deque[_Call] = deque()
        self._updates: deque[_NewWeights] = deque()
        self._newest, self._closed = version, False
        self._completions = self._decoded = 0
        self._reused = self._prefilled = 0  # by row tables before the present one
        self._driver: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="local-sampler")

    @property
    def version(self) -> int:
        """The version of the weights that the next token is drawn with."""
        return self._version

    @property
    def counters(self) -> Counters:
        """What has been done so far."""
        return Counters(
            self._completions,
            self._reused + self._rows.reused,
            self._prefilled + self._rows.prefilled,
            self._decoded,
            self._device.dispatches,
        )

    async def generate(self, prompt: np.ndarray, sampling: Sampling, *, seed: int) -> Completion:
        """One completion; see `Generator.generate`.

        Raises:
          InputError: a prompt without room for a token, an id outside the vocabulary, more than 16 stop
            tokens, a seed outside 0 .. 2^64 - 1.
          GenerationError: the device failed (the cause is chained), log-probabilities are not finite, or the
            generator was closed.
        """
        self._refuse_if_closed()
        self._check_prompt(prompt)
        if len(sampling.stop_tokens) > MAX_STOP_TOKENS:
            actual = len(sampling.stop_tokens)
            raise InputError("Sampling", "stop_tokens", expected=f"at most {MAX_STOP_TOKENS}", actual=actual)
        limit = min(sampling.max_new_tokens, self._settings.max_context - len(prompt))
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(np.array(prompt, np.int32), sampling, seed_words(seed), limit, answer))
        self._start_driver()
        return await answer

    async def update_weights(self, params: Params, version: int) -> None:
        """New weights; see `Generator.update_weights`.

        Calls that have drawn tokens keep their cache, which the older weights have made. Calls that have not
        are prefilled anew, and so is whatever comes later, unless `reuse_stale_cache`.

        What lies on the sampler's device already is not copied: it must not be donated afterwards.

        Raises:
          InputError: a version that is not newer, or weights of another form.
          GenerationError: the device failed, or the generator was closed.
        """
        self._refuse_if_closed()
        if version <= self._newest:
            expected = f"above {self._newest}, the version before"
            raise InputError("update_weights", "version", expected=expected, actual=version)
        if not self._device.fits(params):
            expected = "names, shapes and dtypes of the weights before"
            raise InputError("update_weights", "params", expected=expected, actual="others")
        self._newest = version
        update = _NewWeights(params, version, asyncio.get_running_loop().create_future())
        self._updates.append(update)
        self._start_driver()
        await update.taken

    async def close(self) -> None:
        """Ends running calls with `GenerationError` and frees the device."""
        self._closed = True
        self._fail_all("the generator was closed")
        if self._driver is not None and not self._driver.done():
            await asyncio.wait([self._driver])
        self._worker.shutdown()
        self._device.release()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise GenerationError("the generator is closed")

    def _check_prompt(self, prompt: np.ndarray) -> None:
        longest, vocabulary = self._settings.max_context - 1, self._vocabulary
        prompt = np.asarray(prompt)
        if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
            actual = f"{prompt.dtype}{list(prompt.shape)}"
            raise InputError("generate", "prompt", expected="token ids, int32[p]", actual=actual)
        if not 1 <= len(prompt) <= longest:
            expected = f"1 to {longest} tokens, so that one more fits into max_context"
            raise InputError("generate", "prompt", expected=expected, actual=len(prompt))
        outside = prompt[(prompt < 0) | (prompt >= vocabulary)]
        if len(outside):
            expected = f"ids below {vocabulary}"
            raise InputError("generate", "prompt", expected=expected, actual=int(outside[0]))

    # The driver.

    def _start_driver(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
            self._driver.add_done_callback(self._driver_ended)

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        """A driver that was cancelled or raised takes all calls with it; the next call starts afresh."""
        cause = None if driver.cancelled() else driver.exception()
        if cause is not None:
            self._fail_all(f"sampling failed: {cause}", cause)
            self._device.drop_cache()
        elif driver.cancelled():
            self._fail_all("the event loop has ended")
        else:
            return
        self._reused, self._prefilled = self.counters.reused_tokens, self.counters.prefilled_tokens
        self._rows = self._empty_rows()

    def _fail_all(self, why: str, cause: BaseException | None = None) -> None:
        calls = (*self._serving.values(), *self._waiting)
        answers: list[asyncio.Future[Any]] = [call.answer for call in calls]
        for answer in answers + [update.taken for update in self._updates]:
            if not answer.done():
                failure = GenerationError(why)
                failure.__cause__ = cause
                answer.set_exception(failure)
        for row in self._serving:
            self._rows.rest(row)
        self._serving.clear()
        self._waiting.clear()
        self._updates.clear()
        self._newest = self._version

    async def _drive(self) -> None:
        while True:
            self._drop_cancelled()
            if self._updates:
                await self._take_weights()
            elif self._serving or self._waiting:
                await self._round()
            else:
                return

    def _drop_cancelled(self) -> None:
        for row, call in list(self._serving.items()):
            if call.answer.done():
                self._free(row)
        self._waiting = deque(call for call in self._waiting if not call.answer.done())

    async def _take_weights(self) -> None:
        update = self._updates[0]
        await self._on_worker(lambda: self._device.take(update.params))
        if self._closed:
            return
        self._updates.popleft()
        self._version = update.version
        self._rows.renew(self._version, [row for row, call in self._serving.items() if not call.drawn])
        if not update.taken.done():
            update.taken.set_result(None)

    async def _round(self) -> None:
        """Fills rows as far as one dispatch goes; if then none is left to be filled, decodes."""
        moves = [move for row in self._rows.to_fill for move in self._rows.share(row)]
        while self._waiting and self._rows.resting:
            call = self._waiting.popleft()
            row = self._rows.place(call.prompt)
            self._serving[row] = call
            moves += self._rows.share(row)  # before the next call takes the row that it is copied from
        copies = self._device.copies(moves)
        filling = self._device.filling(*self._rows.fill(self._device.widths), self._rows.context)
        decoding = None if self._rows.to_fill else self._decoding()
        serving, version = dict(self._serving), self._version
        drawn = await self._on_worker(lambda: self._device.run(copies, filling, decoding))
        if drawn is None:
            return
        for row, call in serving.items():
            count = int(drawn.length[row])
            if self._serving.get(row) is not call or not count:
                continue
            tokens, logprobs = drawn.token[:count, row], drawn.logp[:count, row]
            if not np.isfinite(logprobs).all():
                raise FloatingPointError(
                    f"log-probabilities are not finite with weights of version {version}"
                )
            self._decoded += count
            self._rows.extend(row, tokens)
            call.add(tokens, logprobs, version)
            if call.stop_reason is not None:
                self._free(row)
                self._completions += 1
                if not call.answer.done():
                    call.answer.set_result(call.completion(call.stop_reason))

    def _free(self, row: int) -> None:
        del self._serving[row]
        self._rows.rest(row)

    def _decoding(self) -> Decoding:
        rows = resting_rows(self._settings.rows, MAX_STOP_TOKENS)
        for row, call in self._serving.items():
            rows.token[row] = self._rows.context[row, self._rows.cached[row]]
            rows.length[row] = self._rows.cached[row]
            rows.drawn[row] = call.drawn
            rows.limit[row] = call.limit - call.drawn
            rows.seed[row] = call.seed
            rows.temperature[row] = call.sampling.temperature
            rows.top_k[row] = call.sampling.top_k
            rows.top_p[row] = call.sampling.top_p
            rows.stop[row, : len(call.sampling.stop_tokens)] = call.sampling.stop_tokens
        return rows

    async def _on_worker(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _empty_rows(self) -> RowTable:
        settings = self._settings
        return RowTable(settings.rows, settings.max_context, self._version, settings.reuse_stale_cache)


def generate_all(
    generator: LocalGenerator, prompts: Sequence[np.ndarray], sampling: Sampling, seeds: Sequence[int]
) -> list[Completion]:
    """Completions of all prompts, for callers without an event loop."""

    async def run() -> list[Completion]:
        calls = (generator.generate(p, sampling, seed=s) for p, s in zip(prompts, seeds, strict=True))
        return await asyncio.gather(*calls)

    return asyncio.run(run())
