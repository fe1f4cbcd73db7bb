"""What the GPU suite measures: each case by its name, as a function that gives figures.

    correct/kernels/DTYPE       the attention kernels against plain JAX in float32
    correct/tree                tree gradients against the dense oracle's, float32
    correct/bfloat16            errors of bfloat16 gradients, of the tree and of the dense oracle
    rate/matmul                 the rate of a large bfloat16 product: what MFU is measured against
    attention/BACKEND           rate of attention, forward and backward: C rows behind a full context
    attention/cudnn             the same useful work as one causal sequence, by cuDNN
    back/MODEL/C                a BACK step behind a full context: seconds and useful FLOP/s
    methods/MODEL/METHOD        a whole gradient of rollouts by one method of the ablation

A correct/ case whose errors exceed its bounds fails. Weights are random. On devices other than GPUs the
kernels run in Pallas' interpreter.

`python -m dta_jax.gpu_cases NAME SCALE [ROLLOUTS.npz]` runs one case and prints its figures as JSON: the
suite starts it, so that a case's peak of memory and its crash are its own.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from dta_jax import reference, tree_grad, workload
from dta_jax.attention_backends import Problem, bind
from dta_jax.bench_methods import gradient_error, make_cases, nll_workload
from dta_jax.errors import InputError, RunError, run_command
from dta_jax.kernels.tiles import DTYPES
from dta_jax.losses import NLL
from dta_jax.qwen3 import PRESETS, Qwen3, Qwen3Config, preset
from dta_jax.rollouts import load_rollouts, samples_from_rollouts
from dta_jax.schedule import STRATEGIES, compile_schedule
from dta_jax.segment import num_keys
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.tree_inputs import prepare
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import BACK, Samples, Schedule

ABLATION: Final = ("dense", "dense_remat", "leafized", *STRATEGIES)
KERNEL_BOUNDS: Final = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 1e-4}  # max error over max value
TREE_BOUND: Final = 1e-3  # float32, max error over max value
BFLOAT16_BOUND: Final = 2.0  # errors of the tree over those of dense training
LOSS_EVERY: Final = 4  # in back/ cases, one token in so many has loss
HEADS: Final = (16, 8)  # of attention/ cases: queries, keys


class NotAvailable(RunError):
    """A case that this machine can't run, for a reason that is no failure."""


@dataclass(frozen=True)
class Scale:
    """How large the cases are.

    Attributes:
      models: those whose steps and methods are timed, by their presets' names.
      methods: of methods/ cases.
      chunks: C of back/ cases; the last one also of methods/ cases.
      dtypes: of correct/kernels/ cases.
      strategies: of the correct/tree case.
      attention_chunk: C of attention/ cases.
      context: tokens of context, and of the longest rollout.
      head_dim: d of attention/ cases.
      matmul: size of the square product.
      repeat: timed runs; the median counts.
      rollouts: what is generated where none are given.
      small, small_rollouts, small_chunk: model, rollouts and C of correct/ cases about gradients.
    """

    models: tuple[str, ...]
    methods: tuple[str, ...]
    chunks: tuple[int, ...]
    dtypes: tuple[str, ...]
    strategies: tuple[str, ...]
    attention_chunk: int
    context: int
    head_dim: int
    matmul: int
    repeat: int
    rollouts: SyntheticRollouts
    small: Qwen3Config
    small_rollouts: SyntheticRollouts
    small_chunk: int


_AGENTS: Final = SyntheticRollouts(
    vocab_size=32_768,
    tasks=2,
    trials=4,
    turns=10,
    system_tokens=4096,
    user_tokens=256,
    completion_tokens=400,
    tool_tokens=600,
)
FULL: Final = Scale(
    models=("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"),
    methods=ABLATION,
    chunks=(2048, 4096),
    dtypes=DTYPES,
    strategies=("packed", "packed+keep", "branch"),
    attention_chunk=2048,
    context=16_384,
    head_dim=128,
    matmul=8192,
    repeat=5,
    rollouts=_AGENTS,
    small=Qwen3Config(hidden_size=256, num_hidden_layers=4, head_dim=64, intermediate_size=512),
    small_rollouts=SyntheticRollouts(),
    small_chunk=128,
)
QUICK: Final = dataclasses.replace(
    FULL,
    models=FULL.models[:2],
    methods=("dense_remat", "leafized", "branch", "branch+cut_tail+order", "packed"),
    chunks=(4096,),
    repeat=2,
    rollouts=dataclasses.replace(_AGENTS, tasks=1),
)
_SHORT: Final = SyntheticRollouts(
    tasks=1, trials=2, turns=2, system_tokens=8, user_tokens=4, completion_tokens=4, tool_tokens=4
)
TINY: Final = Scale(
    models=("tiny",),
    methods=("dense_remat", "packed"),
    chunks=(16,),
    dtypes=("float32",),
    strategies=("packed",),
    attention_chunk=16,
    context=32,
    head_dim=16,
    matmul=32,
    repeat=1,
    rollouts=_SHORT,
    small=Qwen3Config(hidden_size=32, num_hidden_layers=1, intermediate_size=32),
    small_rollouts=_SHORT,
    small_chunk=16,
)
SCALES: Final = MappingProxyType({"full": FULL, "quick": QUICK, "tiny": TINY})


def case_names(scale: Scale) -> Iterator[str]:
    """All cases, in the order in which they are run: what decides about the others comes first."""
    yield from (f"correct/kernels/{dtype}" for dtype in scale.dtypes)
    yield from ("correct/tree", "correct/bfloat16", "rate/matmul")
    yield from (f"attention/{backend}" for backend in ("pallas", "xla", "cudnn"))
    for model in scale.models:
        yield from (f"back/{model}/{chunk}" for chunk in scale.chunks)
        yield from (f"methods/{model}/{method}" for method in scale.methods)


def run_case(name: str, scale: Scale, rollouts: str | None) -> dict[str, Any]:
    """A case's figures, with the device's peak of memory where it tells one.

    Raises:
      NotAvailable: this machine can't run it.
      RunError: errors above the bounds.
    """
    kind, *rest = name.split("/")
    found = _methods(scale, rollouts, *rest) if kind == "methods" else _KINDS[kind](scale, *rest)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return found | {"device_peak_bytes": peak}


def _correct(scale: Scale, what: str, dtype: str = "") -> dict[str, Any]:
    with jax.default_matmul_precision("highest"):
        if what == "kernels":
            return _kernel_errors(scale, dtype)
        return _tree_errors(scale) if what == "tree" else _bfloat16_errors(scale)


def _kernel_errors(scale: Scale, dtype: str) -> dict[str, Any]:
    """Errors of out, dq, dk and dv on a chunk of a trie behind a context."""
    C, S, (heads, kv_heads) = scale.attention_chunk, scale.context, HEADS
    q_start, q_end = (jnp.asarray(bound) for bound in _tree_mask(C, S))
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.dtype(dtype))

    q, do = (draw(C, heads, scale.head_dim) for _ in range(2))
    k, v = (draw(1, kv_heads, len(q_start), scale.head_dim) for _ in range(2))

    def all_of(backend: str, as_dtype: str) -> dict[str, jax.Array]:
        attention = _attention(backend, scale, as_dtype, q_start, q_end)
        wide = [x.astype(as_dtype) for x in (do, q, k, v)]
        return jax.jit(lambda *given: _forward_backward(attention, *given))(*wide)

    want, got = all_of("xla", "float32"), all_of(_kernels(), dtype)
    errors = {n: gradient_error({n: got[n].astype(jnp.float32)}, {n: want[n]}) for n in want}
    return _within(errors, KERNEL_BOUNDS[dtype])


def _forward_backward(attention: Any, do: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    out, lse = attention.forward(q, k, v, 0)
    zeros = jnp.zeros(k.shape, jnp.float32)
    dq, dk, dv = attention.backward(do, q, out, lse, k, v, zeros, zeros, 0)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def _tree_errors(scale: Scale) -> dict[str, Any]:
    """Errors of gradients by kernels and by plain JAX, of the ways to run a tree."""
    want = _small_gradient(scale, "float32", "dense")
    ways = [(strategy, _kernels()) for strategy in scale.strategies] + [("packed", "xla")]
    errors = {
        f"{strategy}, {backend}": gradient_error(_small_gradient(scale, "float32", strategy, backend), want)
        for strategy, backend in ways
    }
    return _within(errors, TREE_BOUND)


def _bfloat16_errors(scale: Scale) -> dict[str, Any]:
    """Errors against float32 gradients of the same weights: rounding should cost a tree no more."""
    want = _small_gradient(scale, "float32", "dense")
    dense = gradient_error(_small_gradient(scale, "bfloat16", "dense"), want)
    tree = gradient_error(_small_gradient(scale, "bfloat16", "packed", _kernels()), want)
    return {"dense": dense} | _within({"tree": tree}, BFLOAT16_BOUND * dense)


def _small_gradient(scale: Scale, dtype: str, method: str, backend: str = "xla") -> Any:
    """A gradient of the small model, whose weights are bfloat16 numbers in either dtype."""
    model = Qwen3(dataclasses.replace(scale.small, dtype=dtype), attention_backend=backend)
    narrow = Qwen3(dataclasses.replace(scale.small, dtype="bfloat16")).init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), narrow)
    work = nll_workload(model, params, samples_from_rollouts(generate_rollouts(scale.small_rollouts)))
    if method == "dense":
        return reference.dense_value_and_grad(model, params, work.samples, NLL(), pad_to=64).grads
    rows = entry_rows(work.trie, work.samples.sequence, work.samples.position)
    schedule = compile_schedule(work.trie, rows, chunk_size=scale.small_chunk, strategy=method)
    return tree_grad.tree_value_and_grad(model, params, schedule, work.samples.values, NLL()).grads


def _within(errors: dict[str, float], bound: float) -> dict[str, Any]:
    """Refuses errors above the bound, and what is no number."""
    if not all(error <= bound for error in errors.values()):
        raise RunError(f"errors {errors} above {bound:.2g}")
    return {"errors": errors, "bound": bound}


def _rate(scale: Scale, what: str) -> dict[str, Any]:
    del what  # there is one
    a = jax.random.normal(jax.random.key(0), (scale.matmul, scale.matmul), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b)
    seconds = _seconds(lambda: product(a, a), 5 * scale.repeat)
    return {"size": scale.matmul, "seconds": seconds, "flops_per_second": 2 * scale.matmul**3 / seconds}


def _attention_rate(scale: Scale, backend: str) -> dict[str, Any]:
    """Rates over useful work: 4 x heads x d per visible pair forward, and 10 x backward."""
    C, S = scale.attention_chunk, scale.context
    pairs = C * S + C * (C + 1) // 2
    if backend == "cudnn":
        length = -(-round((2 * pairs) ** 0.5) // 128) * 128
        pairs = length * (length + 1) // 2
        forward, backward = _cudnn_seconds(scale, length)
    else:
        forward, backward = _engine_seconds(scale, _kernels() if backend == "pallas" else backend)
    work = HEADS[0] * scale.head_dim * pairs
    return {
        "pairs": pairs,
        "forward": {"seconds": forward, "flops_per_second": 4 * work / forward},
        "backward": {"seconds": backward, "flops_per_second": 10 * work / backward},
    }


def _engine_seconds(scale: Scale, backend: str) -> tuple[float, float]:
    """Forward and backward attention of a chunk at the end of one path."""
    C, S, d, (heads, kv_heads) = scale.attention_chunk, scale.context, scale.head_dim, HEADS
    own, N = np.arange(C), num_keys(S, C)
    q_start, q_end = np.zeros(N, np.int32), np.zeros(N, np.int32)
    q_end[: S + C], q_start[S : S + C] = C, own
    attention = _attention(backend, scale, "bfloat16", jnp.asarray(q_start), jnp.asarray(q_end))
    q, k, v = _normal((C, heads, d), (1, kv_heads, N, d), (1, kv_heads, N, d))
    forward = jax.jit(lambda q, k, v: attention.forward(q, k, v, 0))
    pull = jax.jit(
        lambda q, out, lse, k, v, dk, dv: attention.backward(q, q, out, lse, k, v, dk, dv, 0),
        donate_argnums=(5, 6),
    )
    out, lse = forward(q, k, v)
    sums = [jnp.zeros(k.shape, jnp.float32) for _ in range(2)]

    def backward() -> jax.Array:
        dq, *sums[:] = pull(q, out, lse, k, v, *sums)
        return dq

    return _seconds(lambda: forward(q, k, v), scale.repeat), _seconds(backward, scale.repeat)


def _cudnn_seconds(scale: Scale, length: int) -> tuple[float, float]:
    """Forward and backward attention of one causal sequence."""
    if jax.default_backend() != "gpu":
        raise NotAvailable(f"cuDNN: not on {jax.default_backend()}")
    d, (heads, kv_heads) = scale.head_dim, HEADS
    q, k, v = _normal((1, length, heads, d), (1, length, kv_heads, d), (1, length, kv_heads, d))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    forward = jax.jit(attend)
    out, pull = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v))(q, k, v)
    backward = jax.jit(lambda pull, do: pull(do))
    return _seconds(lambda: forward(q, k, v), scale.repeat), _seconds(
        lambda: backward(pull, out), scale.repeat
    )


def _back(scale: Scale, name: str, chunk: str) -> dict[str, Any]:
    """The BACK step of the last C tokens of one sequence."""
    model, params = _model(scale, name)
    C, length = int(chunk), scale.context + int(chunk)
    trie = build_trie([np.arange(length, dtype=np.int32) % model.vocab_size])
    rows = np.arange(LOSS_EVERY - 1, length, LOSS_EVERY, dtype=np.int32)
    schedule = compile_schedule(trie, rows, chunk_size=C, strategy="packed")
    values = {"weight": np.full(len(rows), 1 / len(rows))}
    seconds = _seconds_of_first_back(model, params, schedule, values, scale.repeat)
    loss_tokens = int((rows >= scale.context).sum())
    pairs = C * scale.context + C * (C + 1) // 2
    flops = workload.model_flops(model, params, C, pairs, loss_tokens)
    return {"seconds": seconds, "model_flops": flops, "flops_per_second": flops / seconds}


def _seconds_of_first_back(
    model: Qwen3, params: Any, schedule: Schedule, values: dict[str, np.ndarray], repeat: int
) -> float:
    entries, ops = prepare(model, params, schedule, values, 0)
    S = schedule.stack_slots
    carry = tree_grad.start(model, params, len(entries.token), num_keys(S, schedule.chunk_size))
    for kind, op in ops:
        if kind == BACK:
            break
        own = carry.stack, carry.outputs
        stack, outputs = tree_grad.push_step(model, params, own, op, entries, S)
        carry = carry._replace(stack=stack, outputs=outputs)
    state = [carry]

    def back() -> jax.Array:
        state[0] = tree_grad.back_step(model, NLL(), params, state[0], op, entries, S)
        return state[0].outputs.loss

    return _seconds(back, repeat)


def _methods(scale: Scale, rollouts: str | None, name: str, method: str) -> dict[str, Any]:
    """A whole gradient, as `python -m dta_jax.bench` times it."""
    given = generate_rollouts(scale.rollouts) if rollouts is None else load_rollouts(rollouts)
    model, params = _model(scale, name)
    samples = _no_longer_than(scale.context, samples_from_rollouts(given.modulo(model.vocab_size)))
    if not len(samples.sequence):
        raise InputError(given.source, "length", expected=f"some up to {scale.context}", actual="none")
    (case,) = make_cases(nll_workload(model, params, samples), [method], scale.chunks[-1:])
    case.warm_up()
    seconds = _seconds(lambda: case.run().grads, scale.repeat, warm_up=False)
    return case.report | {"seconds": seconds, "flops_per_second": case.report["model_flops"] / seconds}


def _no_longer_than(longest: int, samples: Samples) -> Samples:
    """The sequences up to a length, with their entries; without values."""
    fits = np.array([len(tokens) <= longest for tokens in samples.sequences])
    number, mine = np.cumsum(fits) - 1, fits[samples.sequence]
    return Samples(
        [tokens for tokens, fit in zip(samples.sequences, fits, strict=True) if fit],
        number[samples.sequence[mine]].astype(np.int32),
        samples.position[mine],
    )


def _model(scale: Scale, name: str) -> tuple[Qwen3, Any]:
    """A model of a preset's shape, with random weights in bfloat16."""
    if name not in PRESETS or name not in scale.models:
        raise InputError("case", "model", expected=f"one of {', '.join(scale.models)}", actual=repr(name))
    model = Qwen3(preset(name, dtype="bfloat16"))
    return model, jax.jit(model.init)(jax.random.key(0))


def _kernels() -> str:
    """The backend that is our kernels on this device."""
    return "pallas" if jax.default_backend() == "gpu" else "interpret"


def _attention(backend: str, scale: Scale, dtype: str, q_start: jax.Array, q_end: jax.Array) -> Any:
    problem = Problem(scale.attention_chunk, len(q_start), scale.head_dim, dtype, scale.head_dim**-0.5)
    return bind(backend, problem, q_start, q_end)


def _tree_mask(C: int, S: int) -> tuple[np.ndarray, np.ndarray]:
    """Intervals of S slots, of which a quarter is dead, and of a chunk of many branches, C rows."""
    rng = np.random.default_rng(0)
    trie = build_trie([rng.integers(0, 2, rng.integers(1, 24), np.int32) for _ in range(C)])
    end = np.minimum(np.resize(trie.subtree_end, C), C)
    live, N = S - S // 4, num_keys(S, C)
    q_start, q_end = np.zeros(N, np.int32), np.zeros(N, np.int32)
    q_end[:live] = np.sort(rng.integers(0, C + 1, live))[::-1]
    q_start[S : S + C], q_end[S : S + C] = np.arange(C), np.maximum(end, np.arange(C) + 1)
    return q_start, q_end


def _normal(*shapes: tuple[int, ...]) -> Iterator[jax.Array]:
    for i, shape in enumerate(shapes):
        yield jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)


def _seconds(run: Callable[[], Any], repeat: int, *, warm_up: bool = True) -> float:
    """The median of some runs, waited for one by one."""
    if warm_up:
        jax.block_until_ready(run())
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


_KINDS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "correct": _correct,
    "rate": _rate,
    "attention": _attention_rate,
    "back": _back,
}


def main() -> None:
    """The command."""
    name, scale, *rollouts = sys.argv[1:]
    print(json.dumps(run_case(name, SCALES[scale], rollouts[0] if rollouts else None)))


if __name__ == "__main__":
    run_command(main)
