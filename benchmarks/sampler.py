"""How fast the local sampler decodes, and what its cache saves.

    python benchmarks/sampler.py [--rows 1,4,16,64] [--repeat 5] [--out FILE]   about a minute

A Qwen3 of 2 layers, width 64, 64 tokens of vocabulary, float32. One JSON object per line:

    kind "decode"   every row decodes NEW tokens after a prompt of PROMPT: `tokens_per_second` of the sampler,
                    from the calls to their completions, and `tokens_per_cpu_second`, by the processor time
                    of the whole process; `naive_tokens_per_second` of a loop that runs the
                    whole padded sequences for every token, all rows at once, over its first NAIVE tokens
                    (all of them take it as long); `speedup`, the median over repeats of the ratio, both
                    timed in turns; `same_tokens`, in what share of those tokens both agree
    kind "turns"    GROUPS groups of GROUP conversations; in a group all begin with the same prompt, then
                    turns follow one after the other, a few tokens each: tokens of all contexts, how many of
                    them were prefilled and how many reused, and calls per second

Expected: `prefilled_tokens` of "turns" is one prompt per group, and per later turn and conversation what is
new in it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dta_jax.errors import run_command
from dta_jax.generation.local import LocalGenerator, LocalSampler, generate_all
from dta_jax.generation.protocol import Sampling
from dta_jax.generation.sampling import draw, seed_words
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.reference import dense_hidden

MODEL = Qwen3(Qwen3Config(vocab_size=64, hidden_size=64, num_hidden_layers=2, initializer_range=0.2))
CONTEXT, PROMPT, NEW, NAIVE = 256, 16, 112, 8
GROUPS, GROUP, TURNS, TURN_PROMPT, OBSERVED, ANSWER = 8, 8, 6, 48, 5, 4


@functools.partial(jax.jit, donate_argnums=1)
def naive_step(params: Any, tokens: jax.Array, length: jax.Array, seeds: jax.Array) -> jax.Array:
    """Draws the token at `length` of every row, [R, n], from a forward pass over whole rows."""
    rows = len(tokens)
    h = jax.vmap(lambda row: dense_hidden(MODEL, params, row))(tokens)
    h = jax.lax.dynamic_index_in_dim(h, length - 1, 1, keepdims=False)
    one, none = jnp.ones(rows, jnp.float32), jnp.zeros(rows, jnp.int32)
    index = jnp.full(rows, length - PROMPT, jnp.int32)
    token, _ = draw(h @ params["embed"].T, seeds, index, one, none, one)
    return jax.lax.dynamic_update_index_in_dim(tokens, token, length, 1)


def decode_naively(params: Any, prompts: np.ndarray) -> np.ndarray:
    tokens = jnp.asarray(np.pad(prompts, ((0, 0), (0, NEW))))
    seeds = jnp.asarray(np.stack([seed_words(seed) for seed in range(len(prompts))]))
    for length in range(PROMPT, PROMPT + NAIVE):
        tokens = naive_step(params, tokens, jnp.int32(length), seeds)
    return np.asarray(tokens)[:, PROMPT : PROMPT + NAIVE]


def measure_decoding(params: Any, rows: int, repeat: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    generator = LocalSampler(rows=rows, max_context=CONTEXT).make(MODEL, params)
    sampler, naive, cpu, agree = [], [], [], []
    for turn in range(repeat + 1):  # the first compiles
        prompts = rng.integers(0, 64, (rows, PROMPT)).astype(np.int32)
        start, cpu_start = time.perf_counter(), time.process_time()
        found = generate_all(generator, list(prompts), Sampling(max_new_tokens=NEW), range(rows))
        middle, cpu_middle = time.perf_counter(), time.process_time()
        want = decode_naively(params, prompts)
        end = time.perf_counter()
        agree.append(np.mean(np.stack([c.tokens[:NAIVE] for c in found]) == want))
        if turn:
            sampler.append(middle - start)
            naive.append(end - middle)
            cpu.append(cpu_middle - cpu_start)
    asyncio.run(generator.close())
    return {
        "kind": "decode",
        "rows": rows,
        "tokens_per_second": rows * NEW / statistics.median(sampler),
        "tokens_per_cpu_second": rows * NEW / statistics.median(cpu),
        "naive_tokens_per_second": rows * NAIVE / statistics.median(naive),
        "speedup": statistics.median(b / a * NEW / NAIVE for a, b in zip(sampler, naive, strict=True)),
        "same_tokens": float(np.mean(agree)),
    }


async def converse(generator: LocalGenerator, prompt: np.ndarray, seed: int) -> int:
    """One conversation; the tokens of all contexts that it asked about."""
    rng, context, asked = np.random.default_rng(seed), prompt, 0
    for turn in range(TURNS):
        asked += len(context)
        answer = await generator.generate(context, Sampling(max_new_tokens=ANSWER), seed=seed * TURNS + turn)
        observed = rng.integers(0, 64, OBSERVED).astype(np.int32)
        context = np.concatenate([context, answer.tokens, observed])
    return asked


async def converse_all(generator: LocalGenerator, seed: int) -> int:
    prompts = np.random.default_rng(seed).integers(0, 64, (GROUPS, TURN_PROMPT)).astype(np.int32)
    numbers = range(GROUPS * GROUP)
    talks = (converse(generator, prompts[i // GROUP], seed * len(numbers) + i) for i in numbers)
    return sum(await asyncio.gather(*talks))


def measure_turns(params: Any, repeat: int) -> dict[str, Any]:
    generator = LocalSampler(rows=GROUPS * GROUP, max_context=CONTEXT).make(MODEL, params)
    seconds = []
    for turn in range(repeat + 1):
        before, start = generator.counters, time.perf_counter()
        asked = asyncio.run(converse_all(generator, turn))
        if turn:
            seconds.append(time.perf_counter() - start)
    after = generator.counters
    asyncio.run(generator.close())
    return {
        "kind": "turns",
        "groups": GROUPS,
        "group": GROUP,
        "turns": TURNS,
        "context_tokens": asked,
        "prefilled_tokens": after.prefilled_tokens - before.prefilled_tokens,
        "reused_tokens": after.reused_tokens - before.reused_tokens,
        "calls_per_second": (after.completions - before.completions) / statistics.median(seconds),
    }


def measure(rows: list[int], repeat: int) -> Iterator[dict[str, Any]]:
    params = MODEL.init(jax.random.key(0))
    for count in rows:
        yield measure_decoding(params, count, repeat)
    yield measure_turns(params, repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="keep the figures as a JSON list")
    arguments = parser.parse_args()
    lines = []
    for row in measure([int(count) for count in arguments.rows.split(",")], arguments.repeat):
        lines.append(json.dumps(row))
        print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    run_command(main)
