"""OpenAI-compatible servers: ids where they are the sampled ones, and text only if that is allowed."""

import asyncio
import math

import numpy as np
import pytest

from dta_jax.errors import InputError
from dta_jax.generation.openai import OpenAIGenerator, OpenAIServer
from dta_jax.generation.protocol import GenerationError, Generator, Sampling
from dta_jax.tokenizer import load_tokenizer
from tests.chat_folder import write_chat_folder
from tests.fake_server import FakeServer

VOCAB = 300
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_chat_folder(tmp_path_factory.mktemp("chat")))


@pytest.fixture
def fake():
    with FakeServer() as server:
        yield server


def connect(fake, tokenizer, **fields):
    fields = {"model": "m", "backoff": 0.01, "retries": 1, "timeout": 20.0} | fields
    return OpenAIGenerator(OpenAIServer(urls=(fake.url,), **fields), tokenizer, VOCAB, version=4)


def ask(fake, tokenizer, text, *, sampling=None, **fields):
    """The completion of `text` by an engine with these settings."""

    async def run():
        engine = connect(fake, tokenizer, **fields)
        assert isinstance(engine, Generator)
        default = Sampling(max_new_tokens=8, stop_tokens=(tokenizer.token_id(END),))
        try:
            return await engine.generate(tokenizer.encode(text), sampling or default, seed=1)
        finally:
            await engine.close()

    return asyncio.run(run())


def choice(text, *, finish="stop", **more):
    return lambda *_: {"text": text, "finish_reason": finish, **more}


def legacy(*tokens):
    return {"logprobs": {"tokens": list(tokens), "token_logprobs": [-1.0] * len(tokens)}}


def chat_like(*tokens):
    return {"logprobs": {"content": [{"token": token, "logprob": -1.0, "bytes": None} for token in tokens]}}


@pytest.mark.parametrize("form", [legacy, chat_like])
def test_tokens_as_text_become_the_ids_that_have_it(fake, tokenizer, form):
    fake.answer = choice("hello ok", **form("hello", " ", "ok", END))
    completion = ask(fake, tokenizer, "hello")
    assert completion.tokens.tolist() == [tokenizer.token_id(t) for t in ("hello", "Ġ", "ok", END)]
    assert completion.logprobs.tolist() == [-1.0] * 4
    assert completion.versions.tolist() == [4] * 4
    assert completion.stop_reason == "stop"
    ((path, body, _),) = fake.requests
    assert path == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": body["seed"],
        "logprobs": 1,
    }


def test_ids_are_taken_where_they_are_given(fake, tokenizer):
    end = tokenizer.token_id(END)
    fake.answer = choice("??", token_ids=[7, 200, end], **legacy("?", "\ufffd", END))
    assert ask(fake, tokenizer, "hello").tokens.tolist() == [7, 200, end]
    fake.answer = choice("??", **legacy("token_id:7", "token_id:200", f"token_id:{end}"))
    assert ask(fake, tokenizer, "hello").tokens.tolist() == [7, 200, end]


def test_what_follows_a_stop_token_is_cut(fake, tokenizer):
    fake.answer = choice("", finish="length", **legacy("ok", END, "ok"))
    completion = ask(fake, tokenizer, "hello")
    assert completion.tokens.tolist() == [tokenizer.token_id("ok"), tokenizer.token_id(END)]
    assert completion.stop_reason == "stop"


@pytest.mark.parametrize(
    "answer",
    [
        choice("ok"),  # no log-probabilities
        choice("ok", **legacy("ok")),  # it stopped, and the end token is not there
        choice("ok", **legacy("\ufffd", END)),  # a part of a character
        choice("ok", **legacy("nosuchtoken", END)),
    ],
)
def test_text_is_refused_unless_it_is_allowed(fake, tokenizer, answer):
    fake.answer = answer
    with pytest.raises(InputError, match="allow_retokenized"):
        ask(fake, tokenizer, "hello")
    completion = ask(fake, tokenizer, "hello", allow_retokenized=True)
    assert completion.tokens.tolist() == [tokenizer.token_id("ok")]
    assert np.isnan(completion.logprobs).all()


def test_a_prompt_that_its_text_does_not_give_is_refused(fake, tokenizer):
    """The server would see other ids, and draw from another distribution."""
    fake.answer = choice("ok", **legacy("ok", END))
    split = [tokenizer.token_id("h"), tokenizer.token_id("e")]  # the tokenizer joins them

    async def run(**fields):
        engine = connect(fake, tokenizer, **fields)
        try:
            return await engine.generate(
                np.array(split), Sampling(max_new_tokens=8, stop_tokens=(tokenizer.token_id(END),)), seed=0
            )
        finally:
            await engine.close()

    with pytest.raises(InputError, match="other ids"):
        asyncio.run(run())
    assert np.isnan(asyncio.run(run(allow_retokenized=True)).logprobs).all()


def test_a_server_that_counts_other_prompt_tokens_is_refused(fake, tokenizer):
    """It has put a token in front, or split the text in its own way."""
    fake.answer = choice("ok", **legacy("ok", END))
    fake.usage = {"prompt_tokens": 2}
    with pytest.raises(InputError, match="other ids"):
        ask(fake, tokenizer, "hello")
    fake.usage = {"prompt_tokens": 1}
    ask(fake, tokenizer, "hello")


def test_an_empty_answer_is_an_end_token(fake, tokenizer):
    fake.answer = choice("")
    completion = ask(fake, tokenizer, "hello", allow_retokenized=True, logprobs=False)
    assert completion.tokens.tolist() == [tokenizer.token_id(END)]
    assert "logprobs" not in fake.requests[0][1]


@pytest.mark.parametrize(
    "answer",
    [
        choice("ok", **legacy("ok", END) | {"token_ids": [1]}),
        choice("ok", finish="tired", **legacy("ok", END)),
        choice("ok", **legacy(1, 2)),
        choice("ok", logprobs={"tokens": ["ok", END], "token_logprobs": [-1.0, math.nan]}),
        choice("ok", logprobs={"tokens": ["ok", END], "token_logprobs": [-1.0]}),
    ],
)
def test_bad_answers_are_failed_calls(fake, tokenizer, answer):
    fake.answer = answer
    with pytest.raises(GenerationError, match="2 attempts failed"):
        ask(fake, tokenizer, "hello")


def test_sampling_that_the_interface_cannot_say_is_refused(fake, tokenizer):
    with pytest.raises(InputError, match="top_k"):
        ask(fake, tokenizer, "hello", sampling=Sampling(top_k=3))
    with pytest.raises(InputError, match="temperature=1"):
        ask(fake, tokenizer, "hello", sampling=Sampling(temperature=0.5))
    fake.answer = choice("ok")
    ask(fake, tokenizer, "hello", sampling=Sampling(temperature=0.5), allow_retokenized=True)
    assert fake.requests[0][1]["temperature"] == 0.5


def test_messages_are_answered_as_text(fake, tokenizer):
    fake.answer = lambda *_: {"message": {"role": "assistant", "content": "hi"}}
    fake.faults.extend(["500", None])
    messages = [{"role": "user", "content": "hello"}]

    async def run():
        engine = connect(fake, tokenizer)
        try:
            return await engine.chat(messages, Sampling(max_new_tokens=8), seed=1)
        finally:
            await engine.close()

    assert asyncio.run(run()) == "hi"
    path, body, _ = fake.requests[-1]
    assert path == "/v1/chat/completions"
    assert body["messages"] == messages


def test_its_weights_stay(fake, tokenizer):
    async def run():
        engine = connect(fake, tokenizer)
        try:
            with pytest.raises(InputError, match="SGLang or VLLM"):
                await engine.update_weights({}, 5)
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"context_length": 1},
        {"health_path": "health"},
        {"logprobs": False},
    ],
)
def test_settings_check_themselves(fields):
    with pytest.raises(InputError, match="OpenAIServer"):
        OpenAIServer(**({"urls": ("http://localhost:1",), "model": "m"} | fields))
