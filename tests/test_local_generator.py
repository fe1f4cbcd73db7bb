"""The local sampler: what it draws, what its cache saves, and what happens when calls come, go and fail."""

import asyncio
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.errors import InputError
from dta_jax.generation import decode as programs
from dta_jax.generation.device import resting_rows
from dta_jax.generation.local import LocalGenerator, LocalSampler, generate_all
from dta_jax.generation.protocol import Completion, GenerationError, Generator, Sampling
from dta_jax.generation.rows import Piece, RowTable
from dta_jax.reference import dense_logits
from dta_jax.tree_engine import TreeEngine
from dta_jax.types import Samples
from tests.test_sampling import kept_logprobs
from tests.trees import make_model

pytestmark = pytest.mark.optimized

VOCABULARY, ROWS, CONTEXT = 64, 4, 96
SETTINGS = LocalSampler(rows=ROWS, max_context=CONTEXT, prefill_chunk=32, decode_steps=4)
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "head_dim": 8, "intermediate_size": 64}
MODEL, PARAMS = make_model(**SHAPE)
NEW_PARAMS = jax.tree.map(lambda leaf: leaf * jnp.float32(1.05), PARAMS)
FREE = Sampling(max_new_tokens=12)
dense = jax.jit(dense_logits, static_argnums=0)


def make(**changes) -> LocalGenerator:
    settings = LocalSampler(**(vars(SETTINGS) | changes))
    return settings.make(MODEL, PARAMS)


def prompts_of(rng: np.random.Generator, *lengths: int) -> list[np.ndarray]:
    return [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]


def logits_after(tokens: np.ndarray) -> np.ndarray:
    """float32[n, V], by the dense oracle; padded to one length, so that it compiles once."""
    return np.asarray(dense(MODEL, PARAMS, np.pad(tokens, (0, CONTEXT - len(tokens)))))[: len(tokens)]


def assert_same(a: Completion, b: Completion) -> None:
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-6 * CONTEXT)
    assert a.stop_reason == b.stop_reason


async def one(generator: LocalGenerator, prompt: np.ndarray, sampling: Sampling = FREE, seed: int = 0):
    return await generator.generate(prompt, sampling, seed=seed)


async def decoding(generator: LocalGenerator) -> None:
    """Returns when tokens have been drawn that had not been drawn at the call."""
    before = generator.counters.decoded_tokens
    while generator.counters.decoded_tokens == before:
        await asyncio.sleep(0)


# What is drawn.


def test_logprobs_are_the_trainers(rng):
    temperature = 0.7
    prompts = prompts_of(rng, 1, 2, 9, 30, 45, 70)
    sampling = Sampling(max_new_tokens=14, temperature=temperature)
    found = generate_all(make(), prompts, sampling, range(len(prompts)))
    sequences = [np.concatenate([p, c.tokens]) for p, c in zip(prompts, found, strict=True)]
    pairs = [(i, j) for i, p in enumerate(prompts) for j in range(len(p), len(sequences[i]))]
    sequence, position = np.array(pairs, np.int32).T
    values = {"temperature": np.full(len(pairs), temperature, np.float32)}
    engine = TreeEngine.for_batches(
        MODEL, chunk_size=32, strategy="packed", longest=CONTEXT, entries=len(pairs)
    )
    trained, _ = engine.logprobs(PARAMS, Samples(sequences, sequence, position, values))
    np.testing.assert_allclose(np.concatenate([c.logprobs for c in found]), trained, atol=1e-4)
    assert all(c.logprobs.dtype == np.float32 and c.tokens.dtype == np.int32 for c in found)


def test_logprobs_are_of_the_kept_tokens(rng):
    sampling = Sampling(max_new_tokens=8, temperature=1.3, top_k=9, top_p=0.8)
    prompts = prompts_of(rng, 5, 20)
    for prompt, found in zip(prompts, generate_all(make(), prompts, sampling, (1, 2)), strict=True):
        logits = logits_after(np.concatenate([prompt, found.tokens]))[len(prompt) - 1 : -1]
        want = [kept_logprobs(z, 1.3, 9, 0.8)[t] for z, t in zip(logits, found.tokens, strict=True)]
        np.testing.assert_allclose(found.logprobs, want, atol=1e-4)


def test_greedy_takes_the_likeliest_token_of_every_context(rng):
    (prompt,) = prompts_of(rng, 11)
    (found,) = generate_all(make(), [prompt], Sampling(max_new_tokens=20, temperature=0), [0])
    logits = logits_after(np.concatenate([prompt, found.tokens]))
    np.testing.assert_array_equal(found.tokens, logits[len(prompt) - 1 : -1].argmax(axis=1))
    np.testing.assert_array_equal(found.logprobs, 0)


def test_stop_tokens_lengths_and_the_longest_context_end_completions(rng):
    prompt, long = prompts_of(rng, 6, CONTEXT - 3)
    generator = make()
    (whole,) = generate_all(generator, [prompt], FREE, [3])
    assert (len(whole.tokens), whole.stop_reason) == (12, "length")
    stop = int(whole.tokens[5])
    (stopped,) = generate_all(generator, [prompt], Sampling(12, stop_tokens=(VOCABULARY + 5, stop)), [3])
    first = whole.tokens.tolist().index(stop) + 1
    np.testing.assert_array_equal(stopped.tokens, whole.tokens[:first])
    assert stopped.stop_reason == "stop"
    (full,) = generate_all(generator, [long], FREE, [0])
    assert (len(full.tokens), full.stop_reason) == (3, "length")


def test_neighbours_rows_and_reused_keys_change_nothing(rng):
    """Completions end at different steps, so that together and alone dispatches begin at different tokens."""
    prompts = prompts_of(rng, 40, 3, 9, 40, 17, 1, 60)
    lengths = (15, 6, 9, 14, 3, 11, 15)
    samplings = [Sampling(length, temperature=0.9, top_p=0.95) for length in lengths]

    async def together(generator: LocalGenerator, calls: Sequence[int]) -> list[Completion]:
        return await asyncio.gather(*(one(generator, prompts[i], samplings[i], seed=i) for i in calls))

    generator = make()
    found = asyncio.run(together(generator, range(7)))
    for i in range(7):
        assert_same(asyncio.run(one(make(), prompts[i], samplings[i], seed=i)), found[i])
    before = generator.counters
    again = asyncio.run(together(generator, (5, 6)))
    assert generator.counters.reused_tokens > before.reused_tokens + 50
    for a, b in zip(again, found[5:], strict=True):
        assert_same(a, b)


def test_the_same_calls_give_the_same_bits(rng):
    prompts = prompts_of(rng, 30, 4, 30, 12, 7, 50)
    runs = [generate_all(make(), prompts, FREE, range(6)) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


# What the cache saves.


def test_a_groups_prompt_is_prefilled_once(rng):
    (prompt,) = prompts_of(rng, 50)
    generator = make()
    found = generate_all(generator, [prompt] * ROWS, FREE, range(ROWS))
    counters = generator.counters
    assert (counters.prefilled_tokens, counters.reused_tokens) == (49, 49 * (ROWS - 1))
    assert len({c.tokens.tobytes() for c in found}) == ROWS
    for seed in (0, ROWS - 1):
        assert_same(generate_all(make(), [prompt], FREE, [seed])[0], found[seed])


def test_a_turn_continues_its_cache(rng):
    first, second = prompts_of(rng, 30, 30)
    generator = make()
    answers = generate_all(generator, [first, second], FREE, [0, 1])
    turns = [np.concatenate([p, a.tokens, [7, 8, 9]]) for p, a in zip((first, second), answers, strict=True)]
    before = generator.counters
    found = generate_all(generator, turns, FREE, [2, 3])
    after = generator.counters
    # Of 45 tokens 41 have keys: the last one drawn has not run. A prompt's last token runs in decoding.
    assert after.reused_tokens - before.reused_tokens == 2 * 41
    assert after.prefilled_tokens - before.prefilled_tokens == 2 * 3
    for turn, seed, answer in zip(turns, (2, 3), found, strict=True):
        assert_same(generate_all(make(), [turn], FREE, [seed])[0], answer)


def test_a_beginning_is_shared_with_a_row_that_still_decodes(rng):
    (shared,) = prompts_of(rng, 40)

    async def run() -> None:
        generator = make()
        running = asyncio.create_task(one(generator, shared, Sampling(max_new_tokens=50)))
        await decoding(generator)
        before = generator.counters.prefilled_tokens
        branch = np.append(shared[:35], [1, 2, 3]).astype(np.int32)
        found = await one(generator, branch, seed=5)
        assert generator.counters.prefilled_tokens - before == 2
        assert_same(await one(make(), branch, seed=5), found)
        await running

    asyncio.run(run())


def test_no_length_compiles_anything_new(rng):
    generator = make()
    generate_all(generator, prompts_of(rng, 3, 8, 40, 40), FREE, range(4))
    (prompt,) = prompts_of(rng, 20)
    generate_all(generator, [prompt, prompt], FREE, range(2))
    compiled = (programs.prefill, programs.copy, programs.decode)
    before = [program._cache_size() for program in compiled]
    sampling = Sampling(max_new_tokens=7, temperature=0.5, top_k=3, top_p=0.9, stop_tokens=(1, 2, 3))
    prompts = prompts_of(rng, 1, 2, 7, 13, 29, 31, 33, 64, 80, 95)
    generate_all(generator, prompts + prompts[5:], sampling, range(15))
    assert [program._cache_size() for program in compiled] == before


def test_the_cache_is_changed_in_place():
    rows, context = 64, 512
    cache = programs.empty_cache(MODEL, PARAMS, rows, context)
    size, work = sum(a.nbytes for a in cache), resting_rows(rows, 16)
    lowered = programs.decode.lower(MODEL, PARAMS, cache, work, steps=4, block=64)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2  # a copy of the keys alone would be half of it


# Rows of the cache, without a device.


def test_the_longest_rested_row_is_lost_first():
    table = RowTable(3, 10, version=0, lend_stale=False)
    prompts = [np.full(4, token) for token in (1, 2, 3)]
    rows = [fill_row(table, prompt) for prompt in prompts]
    for row in (rows[1], rows[0], rows[2]):
        table.rest(row)
    assert fill_row(table, np.full(4, 4)) == rows[1]
    assert table.place(np.array([1, 1, 1, 5])) == rows[0]  # continued: its whole context begins the prompt
    assert table.reused == 3


def test_a_row_that_others_begin_with_is_copied_not_taken():
    table = RowTable(2, 10, version=0, lend_stale=False)
    row = fill_row(table, np.array([1, 2, 3, 4, 5]))
    table.rest(row)
    other = table.place(np.array([1, 2, 9]))
    assert other != row
    assert table.share(other) == [(row, other, 2)]
    assert table.to_fill == []


def test_a_row_is_copied_before_another_call_takes_it():
    table = RowTable(2, 10, version=0, lend_stale=False)
    for prompt in (np.array([1, 2, 3, 4]), np.array([5, 6, 7])):
        table.rest(fill_row(table, prompt))
    assert table.place(np.array([5, 6, 8, 9])) == 1
    assert table.share(1) == []
    assert (table.place(np.array([8, 9])), table.cached.tolist()) == (0, [0, 2])


def test_calls_wait_for_a_row_that_fills_what_they_share():
    table = RowTable(3, 20, version=0, lend_stale=False)
    a, b, c = (table.place(np.append(np.arange(10), [tail, 0])) for tail in (11, 12, 13))
    assert share_all(table) == []
    assert table.fill((4, 8)) == (8, [Piece(a, 0, 8)])
    assert share_all(table) == []
    assert table.fill((4, 8)) == (4, [Piece(a, 8, 3)])
    assert share_all(table) == [(a, b, 10), (a, c, 10)]
    assert table.fill((4, 8)) == (4, [Piece(b, 10, 1), Piece(c, 10, 1)])
    assert table.to_fill == []
    assert (table.prefilled, table.reused) == (13, 20)


def test_calls_go_on_alone_when_the_row_that_they_waited_for_is_freed():
    table = RowTable(2, 20, version=0, lend_stale=False)
    a, b = (table.place(np.append(np.arange(10), tail)) for tail in (11, 12))
    share_all(table)
    table.fill((4,))
    table.rest(a)
    assert share_all(table) == [(a, b, 4)]
    assert table.fill((4,)) == (4, [Piece(b, 4, 4)])


def fill_row(table: RowTable, prompt: np.ndarray) -> int:
    row = table.place(prompt)
    while table.to_fill:
        share_all(table)
        table.fill((16,))
    return row


def share_all(table: RowTable) -> list[tuple[int, int, int]]:
    return [move for row in table.to_fill for move in table.share(row)]


# Calls that come and go.


def test_calls_are_answered_in_turn_and_rows_are_refilled(rng):
    lengths = [60, 60, 60, 4, 4, 4, 4]
    prompts = prompts_of(rng, *range(5, 12))
    ended: list[int] = []

    async def run() -> None:
        generator = make()

        async def call(i: int) -> None:
            await one(generator, prompts[i], Sampling(max_new_tokens=lengths[i]), seed=i)
            ended.append(i)

        await asyncio.gather(*(call(i) for i in range(7)))
        assert generator.counters.completions == 7

    asyncio.run(run())
    assert ended == [3, 4, 5, 6, 0, 1, 2]


def test_new_weights_take_over_between_tokens(rng):
    (prompt,) = prompts_of(rng, 9)
    sampling = Sampling(max_new_tokens=80)

    async def run() -> tuple[Completion, Completion]:
        generator = make()
        assert isinstance(generator, Generator)
        running = asyncio.create_task(one(generator, prompt, sampling))
        await decoding(generator)
        await generator.update_weights(NEW_PARAMS, 7)
        assert generator.version == 7
        return await running, await one(make(), prompt, sampling)

    mixed, old = asyncio.run(run())
    assert len(mixed.tokens) == 80
    switch = int((mixed.versions == 0).sum())
    assert 0 < switch < 80
    assert mixed.versions.tolist() == [0] * switch + [7] * (80 - switch)
    np.testing.assert_array_equal(mixed.tokens[:switch], old.tokens[:switch])
    assert mixed.tokens[switch:].tolist() != old.tokens[switch:].tolist()


@pytest.mark.parametrize("reuse", [False, True])
def test_keys_of_older_weights_are_lent_only_if_told(rng, reuse):
    (prompt,) = prompts_of(rng, 40)

    async def run() -> None:
        generator = make(reuse_stale_cache=reuse)
        answer = await one(generator, prompt)
        await generator.update_weights(NEW_PARAMS, 1)
        before = generator.counters
        turn = np.concatenate([prompt, answer.tokens, [5]])
        found = await one(generator, turn, seed=1)
        assert generator.counters.reused_tokens - before.reused_tokens == (51 if reuse else 0)
        assert found.versions.tolist() == [1] * 12
        fresh = await one(SETTINGS.make(MODEL, NEW_PARAMS, version=1), turn, seed=1)
        if reuse:
            assert np.abs(fresh.logprobs[0] - found.logprobs[0]) > 1e-4
        else:
            assert_same(found, fresh)

    asyncio.run(run())


def test_a_call_that_has_drawn_nothing_is_prefilled_anew(rng):
    """The weights arrive when a third of its prompt is prefilled."""
    (prompt,) = prompts_of(rng, 90)

    async def run() -> None:
        generator = make()
        call = asyncio.create_task(one(generator, prompt))
        while not generator.counters.prefilled_tokens:
            await asyncio.sleep(0)
        await generator.update_weights(NEW_PARAMS, 1)
        found = await call
        assert generator.counters.prefilled_tokens > 89
        assert found.versions.tolist() == [1] * 6
        assert_same(found, await one(SETTINGS.make(MODEL, NEW_PARAMS), prompt))

    asyncio.run(run())


def test_weights_that_lie_there_are_not_copied():
    generator = make()
    asyncio.run(generator.update_weights(NEW_PARAMS, 1))
    for given, used in zip(
        jax.tree.leaves(NEW_PARAMS), jax.tree.leaves(generator._device.params), strict=True
    ):
        assert used.unsafe_buffer_pointer() == given.unsafe_buffer_pointer()


def test_a_cancelled_call_frees_its_row(rng):
    long, short = Sampling(max_new_tokens=80), Sampling(max_new_tokens=4)
    *prompts, last = prompts_of(rng, *[9] * (ROWS + 2))

    async def run() -> None:
        generator = make()
        calls = [asyncio.create_task(one(generator, prompt, long)) for prompt in prompts]
        queued = asyncio.create_task(one(generator, last, short))
        await decoding(generator)
        for call in calls:
            call.cancel()
        assert len((await queued).tokens) == 4
        assert all(call.cancelled() for call in calls)
        assert generator.counters.completions == 1
        assert generator.counters.decoded_tokens < 10 * ROWS

    asyncio.run(run())


def test_closing_ends_all_calls(rng):
    prompts = prompts_of(rng, *[9] * 6)

    async def run() -> None:
        generator = make()
        calls = [asyncio.create_task(one(generator, p, Sampling(max_new_tokens=80))) for p in prompts]
        await decoding(generator)
        update = asyncio.create_task(generator.update_weights(NEW_PARAMS, 1))
        await asyncio.sleep(0)
        await generator.close()
        for failure in await asyncio.gather(*calls, update, return_exceptions=True):
            assert isinstance(failure, GenerationError)
        with pytest.raises(GenerationError, match="closed"):
            await one(generator, prompts[0])
        with pytest.raises(GenerationError, match="closed"):
            await generator.update_weights(NEW_PARAMS, 2)
        await generator.close()

    asyncio.run(run())


def test_a_failing_device_fails_all_calls_and_then_may_work_again(rng, monkeypatch):
    prompts = prompts_of(rng, *[9] * 6)
    generator, failure, decode = make(), OSError("device lost"), programs.decode

    def broken(*args: object, **options: object) -> None:
        raise failure

    async def run() -> Sequence[Completion | BaseException]:
        return await asyncio.gather(*(one(generator, p) for p in prompts), return_exceptions=True)

    asyncio.run(run())
    monkeypatch.setattr(programs, "decode", broken)
    for error in asyncio.run(run()):
        assert isinstance(error, GenerationError)
        assert error.__cause__ is failure
    monkeypatch.setattr(programs, "decode", decode)
    (want,) = generate_all(make(), prompts[:1], FREE, [0])
    assert_same(asyncio.run(run())[0], want)


def test_new_weights_that_could_not_be_placed_can_be_given_again(monkeypatch):
    generator, put = make(), jax.device_put

    def broken(*args: object) -> None:
        raise OSError("out of memory")

    monkeypatch.setattr(jax, "device_put", broken)
    with pytest.raises(GenerationError, match="out of memory"):
        asyncio.run(generator.update_weights(NEW_PARAMS, 1))
    monkeypatch.setattr(jax, "device_put", put)
    asyncio.run(generator.update_weights(NEW_PARAMS, 1))
    assert generator.version == 1


def test_an_event_loop_that_ends_leaves_a_generator_that_works(rng):
    (prompt,) = prompts_of(rng, 40)
    generator = make()

    async def leave() -> None:
        call = asyncio.create_task(one(generator, prompt, Sampling(max_new_tokens=50)))
        await decoding(generator)
        assert not call.done()

    asyncio.run(leave())
    (want,) = generate_all(make(), [prompt], FREE, [0])
    assert_same(generate_all(generator, [prompt], FREE, [0])[0], want)


def test_broken_weights_fail_calls(rng):
    broken = jax.tree.map(lambda leaf: leaf * jnp.float32(jnp.nan), PARAMS)
    with pytest.raises(GenerationError, match="not finite with weights of version 3"):
        generate_all(SETTINGS.make(MODEL, broken, version=3), prompts_of(rng, 5), FREE, [0])


# What is refused.


@pytest.mark.parametrize(
    ("prompt", "sampling", "seed", "message"),
    [
        (np.zeros(0, np.int32), FREE, 0, "prompt: expected 1 to 95 tokens"),
        (np.zeros(CONTEXT, np.int32), FREE, 0, "prompt: expected 1 to 95 tokens.*; got 96"),
        (np.array([3, VOCABULARY]), FREE, 0, "prompt: expected ids below 64; got 64"),
        (np.array([-1, 2]), FREE, 0, "prompt: expected ids below 64; got -1"),
        (np.zeros((2, 2), np.int32), FREE, 0, r"prompt: expected token ids, int32\[p\]; got int32\[2, 2\]"),
        (np.zeros(3), FREE, 0, r"prompt: expected token ids, int32\[p\]; got float64\[3\]"),
        (np.zeros(3, np.int32), FREE, -1, "seed: expected"),
        (
            np.zeros(3, np.int32),
            Sampling(stop_tokens=tuple(range(17))),
            0,
            "stop_tokens: expected at most 16",
        ),
    ],
)
def test_calls_that_cannot_be_answered(prompt, sampling, seed, message):
    with pytest.raises(InputError, match=message):
        asyncio.run(one(make(), prompt, sampling, seed))


@pytest.mark.parametrize("name", ["rows", "max_context", "prefill_chunk", "decode_steps"])
def test_settings_that_cannot_be_used(name):
    with pytest.raises(InputError, match=f"LocalSampler: {name}: expected at least"):
        LocalSampler(**{name: 0})


def test_weights_that_cannot_be_used():
    generator = make()
    asyncio.run(generator.update_weights(NEW_PARAMS, 3))
    with pytest.raises(InputError, match="version: expected above 3"):
        asyncio.run(generator.update_weights(PARAMS, 3))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    for other in (half, PARAMS | {"head": PARAMS["embed"]}):
        with pytest.raises(InputError, match="params: expected names, shapes and dtypes"):
            asyncio.run(generator.update_weights(other, 4))
    with pytest.raises(InputError, match="model: expected a whole model"):
        SETTINGS.make(MODEL.split("tensor", 2), PARAMS)
