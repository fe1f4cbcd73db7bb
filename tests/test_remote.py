"""Engines over HTTP, against servers that fail as told: answers are right, come once, are stamped truly."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.errors import InputError
from dta_jax.generation.http import Backoff, CallError, JsonClient
from dta_jax.generation.pool import PrefixRoutes, Servers
from dta_jax.generation.protocol import GenerationError, Generator, Sampling
from dta_jax.generation.replies import checked_reply
from dta_jax.generation.sglang import SGLang, sglang_generator
from dta_jax.generation.sglang import read_answer as read_sglang
from dta_jax.generation.vllm import VLLM, vllm_generator
from dta_jax.generation.vllm import read_answer as read_vllm
from dta_jax.hf_weights import load_model, plan_tensors
from dta_jax.qwen3 import Qwen3Config
from tests.fake_server import FAULTS, STOP, VOCAB, FakeServer, check_completion, wait_until

MODEL = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=8,
    max_position_embeddings=256,
)
KINDS = {"sglang": (SGLang, sglang_generator), "vllm": (VLLM, vllm_generator)}
QUICK = {"timeout": 20.0, "backoff": 0.01, "probe_seconds": 0.2, "outage_seconds": 20.0}
SAMPLING = Sampling(max_new_tokens=12, stop_tokens=(STOP,))


@pytest.fixture
def params(rng):
    return jax.tree.map(lambda plan: rng.standard_normal(plan.shape).astype(np.float32), plan_tensors(MODEL))


@pytest.fixture
def servers():
    """Makes fake servers, and ends them."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(FakeServer(**options))


@pytest.fixture(params=KINDS)
def connect(request, tmp_path):
    """Makes an engine of either kind, as a context, for some servers."""
    kind, build = KINDS[request.param]

    @contextlib.asynccontextmanager
    async def make(*fakes, **options):
        urls = tuple(fake.url for fake in fakes)
        engine = build(kind(urls=urls, weights_dir=str(tmp_path / "weights"), **(QUICK | options)), MODEL)
        try:
            yield engine
        finally:
            await engine.close()

    return make


def prompt(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_a_completion_is_what_the_server_drew(servers, connect):
    fake = servers()

    async def run():
        async with connect(fake) as engine:
            assert isinstance(engine, Generator)
            return [await engine.generate(prompt(1, 2, i), SAMPLING, seed=i) for i in range(20)]

    completions = asyncio.run(run())
    for i, completion in enumerate(completions):
        check_completion([1, 2, i], completion, SAMPLING.max_new_tokens)
        assert completion.tokens.dtype == completion.versions.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
    assert {completion.stop_reason for completion in completions} == {"stop", "length"}


def test_every_sampling_parameter_is_sent(servers, connect):
    fake = servers()
    sampling = Sampling(max_new_tokens=3, temperature=0.5, top_p=0.9, top_k=7, stop_tokens=(5, STOP))

    async def run():
        async with connect(fake, allow_inexact_logprobs=True) as engine:
            await engine.generate(prompt(1), sampling, seed=4)
            await engine.generate(prompt(1), sampling, seed=4)
            await engine.generate(prompt(1), sampling, seed=5)
            await engine.generate(prompt(1), Sampling(max_new_tokens=3), seed=4)

    asyncio.run(run())
    sent = [body.get("sampling_params", body) for _, body, _ in fake.requests]
    assert sent[0]["temperature"] == 0.5
    assert sent[0]["top_p"] == 0.9
    assert [body["top_k"] for body in sent] == [7, 7, 7, -1]
    assert sent[0]["stop_token_ids"] == [5, STOP]
    seeds = [body.get("sampling_seed", body.get("seed")) for body in sent]
    assert seeds[0] == seeds[1] == seeds[3] != seeds[2]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_call_is_tried_again(servers, connect, fault):
    fake = servers()
    fake.faults.extend([fault, fault, None])

    async def run():
        async with connect(fake, timeout=0.2) as engine:
            return await engine.generate(prompt(3, 4), SAMPLING, seed=0)

    check_completion([3, 4], asyncio.run(run()), SAMPLING.max_new_tokens)
    assert len(fake.answered) == 1


def test_too_many_failures_are_a_generation_error(servers, connect):
    fake = servers()
    fake.faults.extend(["nan"] * 3)

    async def run():
        async with connect(fake, retries=2) as engine:
            with pytest.raises(GenerationError, match="3 attempts failed, the last: reply: expected finite"):
                await engine.generate(prompt(1), SAMPLING, seed=0)
            return await engine.generate(prompt(1), SAMPLING, seed=0)

    check_completion([1], asyncio.run(run()), SAMPLING.max_new_tokens)


def test_failures_go_to_another_server(servers, connect):
    bad, good = servers(), servers()
    bad.fault_rate = 1.0

    async def run():
        async with connect(bad, good, retries=1, timeout=0.2) as engine:
            return await asyncio.gather(*(engine.generate(prompt(1, i), SAMPLING, seed=i) for i in range(10)))

    for i, completion in enumerate(asyncio.run(run())):
        check_completion([1, i], completion, SAMPLING.max_new_tokens)
    assert len(good.answered) == 10


def test_a_server_that_finds_the_call_wrong_is_not_asked_again(servers, tmp_path):
    fake = servers()

    async def run():
        settings = SGLang(urls=(fake.url + "/elsewhere",), weights_dir=str(tmp_path), **QUICK)
        engine = sglang_generator(settings, MODEL)
        with pytest.raises(GenerationError, match="status 404"):
            await engine.generate(prompt(1), SAMPLING, seed=0)
        await engine.close()

    asyncio.run(run())
    assert [path for path, _, _ in fake.requests] == ["/elsewhere/generate"]


def test_prompts_are_checked_before_they_are_sent(servers, connect):
    fake = servers()

    async def run():
        async with connect(fake, context_length=10) as engine:
            for bad in (prompt(), prompt(VOCAB), prompt(-1), prompt(*[1] * 10), np.array([1.0])):
                with pytest.raises(InputError, match="generate: prompt"):
                    await engine.generate(bad, SAMPLING, seed=0)
            return await engine.generate(prompt(*[1] * 7), SAMPLING, seed=0)

    completion = asyncio.run(run())
    assert completion.stop_reason == "length"
    assert 2 <= len(completion.tokens) <= 3  # all that the context has room for
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("sampling", "refused_by"),
    [
        (Sampling(top_p=0.5), {"sglang", "vllm"}),
        (Sampling(top_k=3), {"sglang", "vllm"}),
        (Sampling(temperature=0.5), {"vllm"}),
        (Sampling(), set()),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_without_its_logprobs_is_refused(kind, sampling, refused_by):
    make, build = KINDS[kind]
    raw = {} if make is SGLang else {"processed_logprobs": False}
    refusal = pytest.raises(InputError, match=make.__name__)
    for allowed in (False, True):
        fields = raw | {"urls": ("http://localhost:1",), "allow_inexact_logprobs": allowed}
        engine = build(make(weights_dir="shared", **fields), MODEL)
        with refusal if kind in refused_by and not allowed else contextlib.nullcontext():
            engine._api.check_sampling(sampling)


def test_cancelling_a_call_frees_the_server(servers, connect):
    fake = servers(tick=0.05)

    async def run():
        async with connect(fake, max_running=1) as engine:
            call = asyncio.ensure_future(engine.generate(prompt(1), SAMPLING, seed=0))
            await asyncio.to_thread(wait_until, lambda: fake.running == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.to_thread(wait_until, lambda: fake.disconnects == 1)
            fake.tick = 0.0
            return await engine.generate(prompt(2), SAMPLING, seed=0)

    check_completion([2], asyncio.run(run()), SAMPLING.max_new_tokens)


def test_closing_ends_running_and_waiting_calls(servers, connect):
    fake = servers(tick=0.05)

    async def run():
        async with connect(fake, max_running=1) as engine:
            calls = [asyncio.ensure_future(engine.generate(prompt(i), SAMPLING, seed=0)) for i in range(3)]
            await asyncio.to_thread(wait_until, lambda: fake.running == 1)
            await engine.close()
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, GenerationError)
            with pytest.raises(GenerationError, match="closed"):
                await engine.generate(prompt(1), SAMPLING, seed=0)

    asyncio.run(run())
    wait_until(lambda: fake.running == 0)


def test_new_weights_take_over_in_the_middle_of_completions(servers, connect, params, tmp_path):
    fakes = [servers(tick=0.05), servers(tick=0.05)]
    sampling = Sampling(max_new_tokens=200)

    async def run():
        async with connect(*fakes) as engine:
            calls = [asyncio.ensure_future(engine.generate(prompt(7, i), sampling, seed=i)) for i in range(8)]
            for version in (1, 2, 5):
                before = sum(fake.drawn for fake in fakes)
                await asyncio.to_thread(wait_until, lambda n=before: sum(f.drawn for f in fakes) > n + 20)
                await engine.update_weights(params, version)
                assert engine.version == version
                assert [fake.version for fake in fakes] == [version, version]
            for fake in fakes:
                fake.tick = 0.0
            late = await engine.generate(prompt(9), sampling, seed=0)
            return await asyncio.gather(*calls), late

    completions, late = asyncio.run(run())
    for i, completion in enumerate(completions):
        check_completion([7, i], completion, sampling.max_new_tokens, stops=False)
    assert any(len(set(completion.versions.tolist())) > 2 for completion in completions)
    assert set(late.versions.tolist()) == {5}
    assert not any(fake.overlaps for fake in fakes)
    left = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert left == ["version-2", "version-5"]
    _, loaded = load_model(tmp_path / "weights" / "version-5")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_versions_must_rise(servers, connect, params):
    async def run():
        async with connect(servers()) as engine:
            await engine.update_weights(params, 3)
            for version in (3, 2):
                with pytest.raises(InputError, match="above 3"):
                    await engine.update_weights(params, version)

    asyncio.run(run())


def test_a_server_that_cannot_load_is_out_until_it_has_the_version(servers, connect, params):
    fakes = [servers(), servers()]
    fakes[0].refusals = 3

    async def run():
        async with connect(*fakes) as engine:
            await engine.update_weights(params, 1)
            first = await engine.generate(prompt(1), SAMPLING, seed=0)
            await asyncio.to_thread(wait_until, lambda: fakes[0].version == 1)
            await asyncio.to_thread(wait_until, lambda: engine._pool.servers[0].state == "in")
            more = await asyncio.gather(*(engine.generate(prompt(1, i), SAMPLING, seed=0) for i in range(6)))
            return [first, *more]

    for completion in asyncio.run(run()):
        assert set(completion.versions.tolist()) == {1}
    assert all(fake.answered for fake in fakes)


def test_an_update_waits_for_the_only_server(servers, connect, params):
    fake = servers()
    fake.refusals = 2

    async def run():
        async with connect(fake) as engine:
            await engine.update_weights(params, 1)
            assert fake.version == 1
            return await engine.generate(prompt(1), SAMPLING, seed=0)

    check_completion([1], asyncio.run(run()), SAMPLING.max_new_tokens, oldest=1)


def test_a_broken_off_update_leaves_no_server_behind(servers, connect, params):
    fakes = [servers(tick=1.0), servers()]

    async def run():
        async with connect(*fakes) as engine:
            update = asyncio.ensure_future(engine.update_weights(params, 1))
            loading = ("/update_weights_from_disk", "/collective_rpc")
            await asyncio.to_thread(wait_until, lambda: any(fakes[0].calls_to(path) for path in loading))
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            fakes[0].tick = 0.0
            await asyncio.to_thread(wait_until, lambda: all(fake.version == 1 for fake in fakes))
            return [await engine.generate(prompt(i), SAMPLING, seed=0) for i in range(4)]

    for i, completion in enumerate(asyncio.run(run())):
        check_completion([i], completion, SAMPLING.max_new_tokens, oldest=1)


def test_an_update_that_no_server_takes_is_an_error(servers, connect, params):
    fake = servers()
    fake.refusals = 10**6

    async def run():
        async with connect(fake, outage_seconds=0.3) as engine:
            with pytest.raises(GenerationError, match="no server loaded version 1"):
                await engine.update_weights(params, 1)

    asyncio.run(run())


@pytest.mark.parametrize("reports", [True, False])
def test_a_server_that_comes_back_gets_the_newest_weights_first(servers, connect, params, reports):
    fakes = [servers(), servers()]
    fakes[0].reports = reports

    async def run():
        async with connect(*fakes) as engine:
            await engine.update_weights(params, 1)
            fakes[0].kill()
            calls = [engine.generate(prompt(1, i), SAMPLING, seed=0) for i in range(6)]
            completions = await asyncio.gather(*calls)
            await engine.update_weights(params, 2)
            fakes[0].start()  # with weights of version 0
            await asyncio.to_thread(wait_until, lambda: engine._pool.servers[0].state == "in")
            before = len(fakes[0].answered)
            late = await asyncio.gather(*(engine.generate(prompt(2, i), SAMPLING, seed=0) for i in range(6)))
            return completions, late, len(fakes[0].answered) - before

    completions, late, taken = asyncio.run(run())
    for i in range(6):
        check_completion([1, i], completions[i], SAMPLING.max_new_tokens, oldest=1)
        check_completion([2, i], late[i], SAMPLING.max_new_tokens, oldest=2)
    assert taken


def test_answers_of_a_secretly_restarted_server_do_not_count(servers, tmp_path, params):
    """Its reports give it away."""
    fake = servers()

    async def run():
        engine = sglang_generator(SGLang(urls=(fake.url,), weights_dir=str(tmp_path), **QUICK), MODEL)
        await engine.update_weights(params, 1)
        fake.version, fake._reported = 0, "0"
        completion = await engine.generate(prompt(1), SAMPLING, seed=0)
        await engine.close()
        return completion

    check_completion([1], asyncio.run(run()), SAMPLING.max_new_tokens, oldest=1)


def test_calls_of_a_server_that_no_longer_answers_are_sent_elsewhere(servers, connect):
    """Connections stand, but nothing comes: only looks at its health can tell."""
    fakes = [servers(tick=0.01), servers(tick=0.01)]

    async def run():
        async with connect(*fakes, probe_seconds=0.05, timeout=1000.0) as engine, asyncio.timeout(30):
            fakes[0].faults.extend(["hang"] * 4)
            calls = [asyncio.ensure_future(engine.generate(prompt(1, i), SAMPLING, seed=0)) for i in range(8)]
            await asyncio.to_thread(wait_until, lambda: not fakes[0].faults)
            fakes[0].healthy = False
            return await asyncio.gather(*calls)

    for i, completion in enumerate(asyncio.run(run())):
        check_completion([1, i], completion, SAMPLING.max_new_tokens)
    assert len(fakes[1].answered) == 8


def test_without_any_server_calls_end(servers, connect):
    fake = servers()
    fake.kill()

    async def run():
        async with connect(fake, outage_seconds=0.2) as engine:
            with pytest.raises(GenerationError, match=r"no server in service for 0\.2 s"):
                await engine.generate(prompt(1), SAMPLING, seed=0)

    asyncio.run(run())


def test_no_server_runs_more_than_its_share_and_all_calls_get_their_turn(servers, connect):
    fakes = [servers(tick=0.001), servers(tick=0.004)]

    async def run():
        async with connect(*fakes, max_running=3) as engine:
            calls = [
                asyncio.ensure_future(engine.generate(prompt(1, i), SAMPLING, seed=0)) for i in range(60)
            ]
            for call in calls[10::7]:
                call.cancel()
            return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(run())
    for i, result in enumerate(results):
        if i >= 10 and (i - 10) % 7 == 0:
            assert isinstance(result, asyncio.CancelledError)
        else:
            check_completion([1, i], result, SAMPLING.max_new_tokens)
    assert [fake.most_running for fake in fakes] == [3, 3]
    assert len(fakes[0].answered) > len(fakes[1].answered)  # the faster one does more


def test_turns_of_a_conversation_stay_with_their_server(servers, connect):
    fakes = [servers(), servers(), servers()]
    system = [5] * 128

    async def run():
        async with connect(*fakes, sticky_slack=2) as engine:

            async def conversation(i):
                context, used = [*system, *[i] * 70], []
                for _ in range(4):
                    before = [len(fake.answered) for fake in fakes]
                    await engine.generate(prompt(*context), Sampling(max_new_tokens=2), seed=0)
                    used.append([len(f.answered) - n for f, n in zip(fakes, before, strict=True)].index(1))
                    context += [i] * 5
                return used

            return [await conversation(i) for i in range(6)]

    for used in asyncio.run(run()):
        assert len(set(used)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_fault_run(servers, tmp_path, params, kind):
    """A fifth of all calls fails, one of three servers dies and returns: no call is lost, doubled, stale."""
    fakes = [servers(tick=0.002, seed=i) for i in range(3)]
    for fake in fakes:
        fake.fault_rate = 0.2
    sampling = Sampling(max_new_tokens=16, stop_tokens=(STOP,))
    make, build = KINDS[kind]
    options = QUICK | {"timeout": 0.5, "retries": 20, "max_running": 8}
    results: dict[int, list] = {}

    async def run():
        urls = tuple(fake.url for fake in fakes)
        engine = build(make(urls=urls, weights_dir=str(tmp_path), **options), MODEL)
        numbers, going = itertools.count(), True

        async def work():
            while going:
                i, oldest = next(numbers), engine.version
                completion = await engine.generate(prompt(*divmod(i, VOCAB)), sampling, seed=i)
                results.setdefault(i, []).append((oldest, completion))

        async def more(count):
            goal = len(results) + count
            await asyncio.to_thread(wait_until, lambda: len(results) >= goal)

        workers = [asyncio.ensure_future(work()) for _ in range(24)]
        await more(40)
        await engine.update_weights(params, 1)
        await more(40)
        await asyncio.to_thread(wait_until, lambda: fakes[1].running)
        fakes[1].kill()
        await engine.update_weights(params, 2)
        await more(40)
        fakes[1].start()
        back = len(fakes[1].answered)
        await engine.update_weights(params, 3)
        await asyncio.to_thread(wait_until, lambda: len(fakes[1].answered) > back + 5)
        going = False
        await asyncio.gather(*workers)
        await engine.close()
        return next(numbers)

    calls = asyncio.run(run())
    assert sorted(results) == list(range(calls))
    for i, found in results.items():
        ((oldest, completion),) = found
        check_completion(divmod(i, VOCAB), completion, sampling.max_new_tokens, oldest=oldest)
    assert not any(fake.overlaps for fake in fakes)
    assert fakes[1].version == 3


# --- single parts


@pytest.mark.parametrize(
    ("tokens", "logprobs", "finish", "words"),
    [
        ([1, 2], [-1.0], "stop", "as many log-probabilities"),
        ([1], [-1.0], "done", "finish reason"),
        ([], [], "length", "1 to 4 tokens"),
        ([1] * 5, [-1.0] * 5, "length", "1 to 4 tokens"),
        ([8], [-1.0], "stop", "token ids"),
        ([-1], [-1.0], "stop", "token ids"),
        ([True], [-1.0], "stop", "token ids"),
        ([1.0], [-1.0], "stop", "token ids"),
        ([1], [0.1], "stop", "at most 0"),
        ([1], [math.nan], "stop", "finite"),
        ([1], [-math.inf], "stop", "finite"),
        ([1], [-1e300], "stop", "float32"),
        ([1], [None], "stop", "finite"),
        ([1], ["-1"], "stop", "finite"),
    ],
)
def test_bad_replies(tokens, logprobs, finish, words):
    with np.errstate(over="ignore"), pytest.raises(CallError, match=words) as caught:
        checked_reply(tokens, logprobs, finish, vocab_size=8, most=4)
    assert caught.value.kind == "reply"


def test_a_reply_may_be_cut_short_at_once_and_rounding_is_forgiven():
    assert len(checked_reply([], [], "abort", vocab_size=8, most=4).tokens) == 0
    assert checked_reply([1], [1e-5], "stop", vocab_size=8, most=4).logprobs.tolist() == [0.0]


GOOD_SGLANG = {
    "output_ids": [4, 5],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 5},
        "output_token_logprobs": [[-1.0, 4, None], [-2.0, 5, None]],
        "weight_version": "12",
    },
}
GOOD_VLLM = {
    "choices": [
        {
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_token_ids": [1, 2],
            "token_ids": [4, 5],
            "logprobs": {"tokens": ["token_id:4", "token_id:5"], "token_logprobs": [-1.0, -2.0]},
        }
    ]
}
STOP_AT_5 = Sampling(max_new_tokens=4, stop_tokens=(5,))


def read_good_sglang(answer):
    return read_sglang(answer, vocab_size=8, most=4)


def read_good_vllm(answer):
    return read_vllm(answer, prompt(1, 2), STOP_AT_5, 8)


@pytest.mark.parametrize("read", [read_good_sglang, read_good_vllm])
def test_good_answers_are_read(read):
    reply = read(GOOD_SGLANG if read is read_good_sglang else GOOD_VLLM)
    assert reply.tokens.tolist() == [4, 5]
    assert reply.logprobs.tolist() == [-1.0, -2.0]
    assert reply.finish == "stop"
    assert reply.version == (12 if read is read_good_sglang else None)


def test_older_servers_name_tokens_by_id():
    choice = {k: v for k, v in GOOD_VLLM["choices"][0].items() if "token_ids" not in k}
    assert read_good_vllm({"choices": [choice]}).tokens.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("output_ids",), [4, 6]),
        (("meta_info",), None),
        (("meta_info", "finish_reason"), None),
        (("meta_info", "finish_reason"), {"type": "stop", "matched": "NaN happened"}),
        (("meta_info", "finish_reason"), {"type": "abort", "message": "full", "status_code": 503}),
        (("meta_info", "output_token_logprobs"), None),
        (("meta_info", "output_token_logprobs"), [[-1.0, 4, None]]),
        (("meta_info", "output_token_logprobs"), [4, 5]),
    ],
)
def test_bad_answers_of_sglang(path, value):
    answer = json.loads(json.dumps(GOOD_SGLANG))
    target = answer
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(CallError):
        read_good_sglang(answer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("finish_reason", None),
        ("prompt_token_ids", [1]),
        ("token_ids", [4, 6]),
        ("token_ids", "45"),
        ("logprobs", None),
        ("logprobs", {"tokens": ["token_id:4", "five"], "token_logprobs": [-1.0, -2.0]}),
        ("logprobs", {"tokens": ["token_id:4", "token_id:5"], "token_logprobs": [-1.0]}),
    ],
)
def test_bad_answers_of_vllm(field, value):
    with pytest.raises(CallError):
        read_good_vllm({"choices": [GOOD_VLLM["choices"][0] | {field: value}]})


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "logprobs", "tokens", "token_ids", "meta_info", "finish_reason"]),
                inner,
            )
        ),
        max_leaves=8,
    )
)
def test_any_other_json_is_a_failed_call(answer):
    for read in (read_good_sglang, read_good_vllm):
        with pytest.raises(CallError):
            read(answer)


def test_waiting_times_double_and_are_spread():
    rng = random.Random(0)
    for failures, whole in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 30.0), (5000, 30.0)):
        times = [Backoff(first=1.0, most=30.0).seconds(failures, rng) for _ in range(200)]
        assert whole / 2 <= min(times) < 0.6 * whole
        assert 0.9 * whole < max(times) <= whole


def test_replies_are_bounded(servers):
    fake = servers()

    async def run():
        client = JsonClient(fake.url, timeout=20, max_reply_bytes=100)
        fake.faults.append("long")
        with pytest.raises(CallError, match="more than 100 bytes") as caught:
            await client.json(
                "POST", "/v1/completions", {"prompt": [1], "max_tokens": 50, "stop_token_ids": []}
            )
        await client.close()
        assert caught.value.kind == "reply"

    asyncio.run(run())


def test_the_key_is_sent_and_never_shown(servers, connect, monkeypatch, caplog):
    """Not even where a server echoes it."""
    secret = "sk-3f9c-very-secret"
    monkeypatch.setenv("ENGINE_KEY", secret)
    fake = servers()

    async def run():
        async with connect(fake, api_key_env="ENGINE_KEY", retries=0) as engine:
            assert secret not in repr(engine) + repr(engine._settings)
            await engine.generate(prompt(1), SAMPLING, seed=0)
            client = engine._pool.servers[0].client
            with pytest.raises(CallError) as caught:
                await client.send("GET", f"/no-such-path/{secret}")
            return str(caught.value)

    with caplog.at_level(logging.DEBUG):
        message = asyncio.run(run())
    assert all(headers["authorization"] == f"Bearer {secret}" for _, _, headers in fake.requests)
    assert "404" in message
    assert secret not in message.partition(": status")[2]
    assert secret not in caplog.text


def test_prefix_routes():
    routes = PrefixRoutes(block=4, most=6)
    long, short = np.arange(12), np.arange(6)
    assert len(routes.keys(long)) == 3
    assert routes.keys(short) == routes.keys(long)[:1]
    assert routes.servers(routes.keys(long)) == ()
    routes.remember(routes.keys(short), 0)
    assert set(routes.servers(routes.keys(long))) == {0}
    routes.remember(routes.keys(long), 1)
    assert set(routes.servers(routes.keys(long))) == {1}
    assert set(routes.servers(routes.keys(short))) == {0, 1}
    routes.remember(routes.keys(np.arange(100, 124)), 2)
    assert routes.servers(routes.keys(long)) == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"urls": ()}, "at least one server"),
        ({"urls": ("http://a:1", "http://a:1")}, "each once"),
        ({"urls": ("a:1",)}, "http://host:port"),
        ({"urls": ("http://me:hunter2@a:1",)}, "credentials"),
        ({"urls": ("http://a:1/?x=1",)}, "http://host:port"),
        ({"urls": ("http://a:port",)}, "no URL"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
        ({"retries": -1}, "retries"),
        ({"max_running": 0}, "max_running"),
        ({"api_key_env": "sk-hunter2"}, "NAME of an environment variable"),
    ],
)
def test_settings_check_themselves(fields, words):
    with pytest.raises(InputError, match=words) as caught:
        Servers(**({"urls": ("http://localhost:1",)} | fields))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("kind", [SGLang, VLLM])
def test_settings_of_engines_check_themselves(kind):
    good = kind(urls=("http://localhost:1",), weights_dir="shared")
    for fields in ({"weights_dir": ""}, {"load_seconds": 0.0}, {"context_length": 1}):
        with pytest.raises(InputError, match=kind.__name__):
            dataclasses.replace(good, **fields)


@pytest.mark.parametrize("value", [None, "with blank", "line\nbreak"])
def test_a_key_that_cannot_be_sent_is_refused(monkeypatch, value):
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("ENGINE_KEY", value)
    settings = SGLang(urls=("http://localhost:1",), weights_dir="shared", api_key_env="ENGINE_KEY")
    with pytest.raises(InputError, match="ENGINE_KEY") as caught:
        sglang_generator(settings, MODEL)
    assert "blank" not in str(caught.value).replace("blanks", "")
