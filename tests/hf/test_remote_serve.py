"""A real server: `transformers serve` on a tiny checkpoint, behind the engine for OpenAI-compatible servers.

What it cannot give is tested too, so that we notice when it can: it knows neither token ids nor
log-probabilities, so its answers are good for evaluation and user simulators, and refused for training.
"""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dta_jax.errors import InputError
from dta_jax.generation.http import CallError, JsonClient
from dta_jax.generation.openai import OpenAIGenerator, OpenAIServer
from dta_jax.generation.protocol import GenerationError, Sampling
from dta_jax.tokenizer import load_tokenizer
from tests.chat_folder import write_chat_folder
from tests.hf import peer

VOCAB = 300
START_SECONDS = 240.0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Of the served checkpoint, in whose folder it is."""
    folder = write_chat_folder(tmp_path_factory.mktemp("served"))
    found = load_tokenizer(folder, VOCAB)
    end = found.token_id("<|im_end|>")
    model = peer.random_model(
        "qwen3",
        0,
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        max_position_embeddings=256,
        eos_token_id=end,
    )
    peer.save(model, folder)
    return found


@pytest.fixture(scope="module")
def url(tokenizer, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).parent / "transformers", "serve", tokenizer.folder, "--device", "cpu"]
    log = (tmp_path_factory.mktemp("log") / "serve.txt").open("w+")
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log, env=offline
    )
    found = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(wait_for(found, server))
        yield found
    finally:
        server.terminate()
        server.wait()
        log.close()


async def wait_for(url: str, server: subprocess.Popen) -> None:
    client = JsonClient(url, timeout=5, max_reply_bytes=10**6)
    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                assert server.poll() is None, "the server ended"
                try:
                    await client.send("GET", "/health")
                    return
                except CallError:
                    await asyncio.sleep(0.2)
    finally:
        await client.close()


def engine(url, tokenizer, **fields):
    fields = {"allow_retokenized": True, "retries": 0, "timeout": 120.0, "health_path": "/health"} | fields
    settings = OpenAIServer(**({"urls": (url,), "model": str(tokenizer.folder)} | fields))
    return OpenAIGenerator(settings, tokenizer, VOCAB, version=3)


def run(url, tokenizer, calls, **fields):
    """The results of `calls(engine)`, an async function."""

    async def inside():
        generator = engine(url, tokenizer, **fields)
        try:
            return await calls(generator)
        finally:
            await generator.close()

    return asyncio.run(inside())


def test_text_is_generated_and_encoded_anew(url, tokenizer):
    greedy = Sampling(max_new_tokens=12, temperature=0.0, stop_tokens=(tokenizer.token_id("<|im_end|>"),))
    prompts = [tokenizer.encode(text) for text in ("hello", "ok, hello")]

    async def calls(generator):
        once = await asyncio.gather(*(generator.generate(p, greedy, seed=1) for p in prompts))
        again = await asyncio.gather(*(generator.generate(p, greedy, seed=2) for p in prompts))
        return once, again

    once, again = run(url, tokenizer, calls)
    for one, other in zip(once, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert 1 <= len(one.tokens) <= 12
        assert set(one.versions.tolist()) == {3}
        assert np.isnan(one.logprobs).all()


def test_its_answers_are_refused_for_training(url, tokenizer):
    async def calls(generator):
        return await generator.generate(tokenizer.encode("hello"), Sampling(max_new_tokens=4), seed=1)

    with pytest.raises(InputError, match="allow_retokenized"):
        run(url, tokenizer, calls, allow_retokenized=False)


def test_what_it_does_not_give(url, tokenizer):
    """Neither log-probabilities (asked for) nor ids (of a prompt or an answer)."""

    async def ask() -> tuple[dict, CallError]:
        client = JsonClient(url, timeout=120, max_reply_bytes=10**6)
        body = {"model": str(tokenizer.folder), "prompt": "hello", "max_tokens": 3, "logprobs": 1}
        try:
            answer = await client.json("POST", "/v1/completions", body)
            with pytest.raises(CallError) as caught:
                await client.json("POST", "/v1/completions", body | {"prompt": [1, 2]})
            return answer, caught.value
        finally:
            await client.close()

    answer, error = asyncio.run(ask())
    (choice,) = answer["choices"]
    assert choice.get("logprobs") is None
    assert "token_ids" not in choice
    assert error.kind == "refused"


def test_messages_are_answered(url, tokenizer):
    async def calls(generator):
        messages = [{"role": "user", "content": "hello"}]
        return await generator.chat(messages, Sampling(max_new_tokens=8), seed=1)

    assert isinstance(run(url, tokenizer, calls), str)


def test_a_call_that_the_server_finds_wrong_ends_at_once(url, tokenizer):
    async def calls(generator):
        return await generator.generate(tokenizer.encode("hello"), Sampling(max_new_tokens=4), seed=1)

    with pytest.raises(GenerationError, match="status 400"):
        run(url, tokenizer, calls, model="another-model")
