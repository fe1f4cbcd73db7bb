"""`python -m dta_jax.bench`: the same gradient by several methods, timed in one run.

Methods are the dense baselines of `dta_jax.reference` (`dense`, `dense_remat`, and `leafized`: remat over
the leaves only) and every strategy of the planner (`packed`, ...). One JSON object per method and chunk
goes to stdout; see `docs/benchmarks.md` for its fields. Methods take turns, so that a machine's slow
minutes hit all of them.

With `--mesh` the tree methods run on a mesh of devices, the dense ones on the first. `--balance` runs
nothing: it compares the ways to split the sequences over ranks (`dta_jax.balance`).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from dta_jax import memory, mesh_grad, reference, tree_grad, workload
from dta_jax.balance import AUTO, METHODS, compare_methods
from dta_jax.errors import InputError, run_command
from dta_jax.hf_config import read_config
from dta_jax.hf_weights import load_params
from dta_jax.losses import NLL
from dta_jax.memory_plan import choose_for_trie
from dta_jax.mesh_plan import plan_ranks
from dta_jax.model import DecoderModel, Params
from dta_jax.qwen3 import PRESETS, Qwen3, Qwen3Config, preset
from dta_jax.rollouts import load_rollouts, samples_from_rollouts
from dta_jax.schedule import STRATEGIES, compile_schedule
from dta_jax.sharding import MeshShape, place_params
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.trie import build_trie, entry_rows, leafize
from dta_jax.types import BACK, PUSH, Samples, Schedule, Trie

DENSE: Final = ("dense", "dense_remat", "leafized")
PAD_TO: Final = 512  # lengths of dense sequences are padded to multiples of it
SMALL: Final = 64  # ... or of this, when no sequence is longer than PAD_TO


@dataclass(frozen=True)
class Workload:
    """Samples with their trie, and the model that runs them (`params` are shapes only to plan)."""

    model: DecoderModel
    params: Params
    samples: Samples
    trie: Trie

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(s) for s in self.samples.sequences], np.int64)


@dataclass(frozen=True)
class Case:
    """One method at one chunk size: what it is to report, how to run it, and how much memory it takes."""

    report: dict[str, Any]
    run: Callable[[], Any]
    warm_up: Callable[[], Any]
    peak_bytes: Callable[[], int]


def make_cases(
    work: Workload, methods: Sequence[str], chunks: Sequence[int], mesh: MeshShape | None = None
) -> list[Case]:
    """Every method; those with a schedule at every chunk size, on the mesh if there is one."""
    cases = []
    for method in methods:
        if method in DENSE:
            cases.append(_dense_case(work, method))
        elif mesh is None:
            cases += [_tree_case(work, method, chunk) for chunk in chunks]
        else:
            cases += [_mesh_case(work, method, chunk, mesh) for chunk in chunks]
    return cases


def _dense_case(work: Workload, method: str) -> Case:
    samples = leafize(work.trie, work.samples) if method == "leafized" else work.samples
    lengths = np.array([len(s) for s in samples.sequences], np.int64)
    pad_to = PAD_TO if lengths.max(initial=0) > PAD_TO else SMALL
    padded = -(-lengths // pad_to) * pad_to
    options: Any = {"attention": "blockwise", "remat": method != "dense", "pad_to": pad_to}

    def run(samples: Samples) -> reference.DenseResult:
        return reference.dense_value_and_grad(work.model, work.params, samples, NLL(), **options)

    entries = -(-np.bincount(samples.sequence, minlength=len(lengths)) // pad_to)
    _, one_per_shape = np.unique(np.stack([padded, entries]), axis=1, return_index=True)
    report = _report(work, method, None, workload.sequence_work(lengths)) | {
        "backward_tokens_executed": int(padded.sum()),
        "forward_tokens_executed": 0,
        "backs": len(lengths),
        "pushes": 0,
    }
    return Case(
        report,
        run=lambda: run(samples),
        warm_up=lambda: run(_only(samples, one_per_shape)),
        peak_bytes=lambda: reference.peak_bytes(
            work.model, work.params, _only(samples, np.argmax(lengths, keepdims=True)), NLL(), **options
        ),
    )


def _tree_case(work: Workload, strategy: str, chunk_size: int) -> Case:
    rows = entry_rows(work.trie, work.samples.sequence, work.samples.position)
    schedule = compile_schedule(work.trie, rows, chunk_size=chunk_size, strategy=strategy)
    report = _report(work, strategy, chunk_size, workload.tree_work(work.trie)) | {
        "backward_tokens_executed": schedule.backward_tokens_executed,
        "forward_tokens_executed": schedule.forward_tokens_executed,
        "backs": int((schedule.kind == BACK).sum()),
        "pushes": int((schedule.kind == PUSH).sum()),
    }

    def run() -> tree_grad.TreeResult:
        return tree_grad.tree_value_and_grad(work.model, work.params, schedule, work.samples.values, NLL())

    return Case(report, run=run, warm_up=run, peak_bytes=lambda: _tree_peak_bytes(work, schedule))


def _tree_peak_bytes(work: Workload, schedule: Schedule) -> int:
    return max(memory.step_memory(work.model, work.params, schedule, work.samples.values, NLL()).values())


def _mesh_case(work: Workload, strategy: str, chunk_size: int, shape: MeshShape) -> Case:
    samples = work.samples
    rows = entry_rows(work.trie, samples.sequence, samples.position)
    plan = plan_ranks(work.trie, samples.sequence, rows, shape.data, chunk_size=chunk_size, strategy=strategy)
    kinds = np.concatenate([schedule.kind for schedule in plan.schedules])
    report = _report(work, strategy, chunk_size, workload.tree_work(work.trie)) | {
        "backward_tokens_executed": plan.backward_tokens_executed,
        "forward_tokens_executed": plan.forward_tokens_executed,
        "backs": int((kinds == BACK).sum()),
        "pushes": int((kinds == PUSH).sum()),
        "mesh": f"data={shape.data},tensor={shape.tensor}",
        "max_tree_tokens": plan.assignment.report.max_tree_tokens,
    }

    @functools.cache
    def arguments() -> tuple[Any, ...]:
        mesh = shape.make()
        params = place_params(mesh, work.model, work.params)
        return mesh, work.model, params, plan, samples.values, NLL()

    def run() -> mesh_grad.MeshResult:
        return mesh_grad.mesh_value_and_grad(*arguments())

    def peak_bytes() -> int:
        return memory.peak_bytes(mesh_grad.lower_value_and_grad(*arguments()).compile())

    return Case(report, run=run, warm_up=run, peak_bytes=peak_bytes)


def _report(work: Workload, method: str, chunk: int | None, useful: tuple[int, int]) -> dict[str, Any]:
    loss_tokens = len(work.samples.sequence)
    return {
        "method": method,
        "chunk": chunk,
        "seconds": None,
        "model_flops": workload.model_flops(work.model, work.params, *useful, loss_tokens),
        "sequences": len(work.samples.sequences),
        "flat_tokens": int(work.lengths.sum()),
        "tree_tokens": work.trie.num_rows,
        "loss_tokens": loss_tokens,
    }


def _only(samples: Samples, which: np.ndarray) -> Samples:
    """The given sequences with their entries."""
    number = np.full(len(samples.sequences), -1)
    number[which] = np.arange(len(which))
    mine = number[samples.sequence] >= 0
    return Samples(
        [samples.sequences[i] for i in which],
        number[samples.sequence[mine]].astype(np.int32),
        samples.position[mine],
        {name: value[mine] for name, value in samples.values.items()},
    )


def measure(work: Workload, cases: Sequence[Case], repeat: int, check: bool) -> Iterator[dict[str, Any]]:
    """Warms every case up, runs them in turns, and gives each its median time."""
    seconds: list[list[float]] = [[] for _ in cases]
    for case in cases:
        case.warm_up()
    for _ in range(repeat):
        for case, times in zip(cases, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(case.run().grads)
            times.append(time.perf_counter() - start)
    want = None
    if check:
        blockwise = work.lengths.max(initial=0) > PAD_TO
        want = reference.dense_value_and_grad(
            work.model,
            work.params,
            work.samples,
            NLL(),
            attention="blockwise" if blockwise else "dense",
            pad_to=PAD_TO if blockwise else SMALL,
        ).grads
    for case, times in zip(cases, seconds, strict=True):
        found = {"seconds": statistics.median(times), "peak_bytes": case.peak_bytes()}
        if want is not None:
            found["grad_rel_err"] = gradient_error(jax.device_get(case.run().grads), want)
        yield case.report | found


def gradient_error(got: Params, want: Params) -> float:
    """Largest over tensors of `max |got - want| / max |want|`."""

    def error(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), jnp.finfo(b.dtype).tiny)

    return float(jnp.stack(jax.tree.leaves(jax.tree.map(error, got, want))).max())


def make_model(spec: str, vocab_size: int, dtype: str | None, *, shapes_only: bool) -> tuple[Qwen3, Params]:
    """A preset's name, a Hugging Face folder, or a JSON object of config fields.

    Presets and JSON objects get random weights, and room for `vocab_size` ids.
    """
    changes: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    folder = bool(spec) and Path(spec).is_dir()
    if folder:
        config = read_config(spec, **changes)
    elif spec.startswith("{"):
        try:
            config = Qwen3Config(**({"vocab_size": vocab_size} | json.loads(spec) | changes))
        except (TypeError, json.JSONDecodeError) as error:
            raise InputError(
                "--model", "JSON", expected="config fields as in config.json", actual=error
            ) from None
    elif spec.lower() in PRESETS:
        config = preset(spec, vocab_size=max(vocab_size, PRESETS[spec.lower()].vocab_size), **changes)
    else:
        expected = f"a folder, a JSON object, or one of {', '.join(PRESETS)}"
        raise InputError("--model", "value", expected=expected, actual=repr(spec))
    if config.vocab_size < vocab_size:
        raise InputError("--model", "vocab_size", expected=f"at least {vocab_size}", actual=config.vocab_size)
    if folder:
        return Qwen3(config), load_params(spec, config)
    model, key = Qwen3(config), jax.random.key(0)
    return model, jax.eval_shape(model.init, key) if shapes_only else jax.jit(model.init)(key)


def make_workload(args: argparse.Namespace) -> Workload:
    """Rollouts (a file's or generated ones) as samples with NLL over all completion tokens."""
    if args.rollouts is None:
        rollouts = generate_rollouts(SyntheticRollouts())
    else:
        rollouts = load_rollouts(args.rollouts)
    if args.tasks is not None:
        rollouts = rollouts.select(task_range(args.tasks))
    if args.vocab_mod is not None:
        rollouts = rollouts.modulo(args.vocab_mod)
    samples, vocab_size = samples_from_rollouts(rollouts), workload.rollouts_vocab(rollouts)
    if args.thinking is not None:
        samples = workload.with_thinking(samples, args.thinking, first_id=vocab_size)
        vocab_size += workload.RESERVED_IDS
    count = len(samples.sequence)
    if not count:
        raise InputError(rollouts.source, "completion_spans", expected="tokens with loss", actual="none")
    samples = Samples(
        samples.sequences, samples.sequence, samples.position, {"weight": np.full(count, 1 / count)}
    )
    model, params = make_model(args.model, vocab_size, args.dtype, shapes_only=args.plan_only or args.balance)
    return Workload(model, params, samples, build_trie(samples.sequences))


def task_range(text: str) -> list[int]:
    """ "0-3" or "0,2,5" as a list."""
    try:
        if "-" in text:
            first, last = text.split("-")
            return list(range(int(first), int(last) + 1))
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError("--tasks", "value", expected="like 0-3 or 0,2,5", actual=repr(text)) from None


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in (*DENSE, *STRATEGIES):
            raise InputError(
                "--methods", "name", expected=f"one of {', '.join((*DENSE, *STRATEGIES))}", actual=repr(name)
            )
    return names


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(option, "value", expected="integers with commas", actual=repr(text)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dta_jax.bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rollouts", metavar="FILE.npz", help="recorded rollouts; without it, an embedded generator's")
    add("--tasks", metavar="0-3", help="only these task ids")
    add("--model", default="tiny", help="a preset, a Hugging Face folder, or a JSON object of config fields")
    add("--vocab-mod", type=int, metavar="N", help="take token ids modulo N")
    add("--methods", help="with commas (dense,dense_remat,leafized,packed; with --balance, all)")
    add("--chunk", default="256", metavar="N,...|auto", help="chunk sizes of the tree methods, or by memory")
    add("--memory-budget", type=float, metavar="GIB", help="per device, for --chunk auto; default: its own")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="of parameters and activations")
    add("--repeat", type=int, default=3, help="timed runs of each method; the median is reported")
    add("--thinking", type=float, metavar="MEAN", help="insert a run of ids before each completion")
    add("--plan-only", action="store_true", help="count, run nothing")
    add("--check", action="store_true", help="compare each gradient with the dense oracle's")
    add("--mesh", metavar="data=4,tensor=2", help="run the tree methods on a mesh of devices")
    add("--balance", action="store_true", help="compare the ways to split the sequences over ranks")
    add("--ranks", default="2,4,8", metavar="K,...", help="numbers of ranks, for --balance")
    add("--json", action="store_true", help="JSON lines (the default is a table)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    args = _parser().parse_args(arguments)
    if args.repeat < 1:
        raise InputError("--repeat", "value", expected="at least 1", actual=args.repeat)
    if args.balance:
        for row in balance_rows(args):
            print(json.dumps(row) if args.json else _balance_line(row), flush=True)
        return
    methods = _names("dense,dense_remat,leafized,packed" if args.methods is None else args.methods)
    chunks = None if args.chunk == "auto" else _numbers("--chunk", args.chunk)
    if args.memory_budget is not None and chunks is not None:
        raise InputError(
            "--memory-budget", "value", expected="none without --chunk auto", actual=args.memory_budget
        )
    mesh = None if args.mesh is None else MeshShape.parse(args.mesh)
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    work = make_workload(args)
    if chunks is None:
        chunks = [_affordable_chunk(work, args.memory_budget, mesh)]
    cases = make_cases(work, methods, chunks, mesh)
    if args.plan_only:
        rows: Any = (case.report | {"peak_bytes": None} for case in cases)
    else:
        rows = measure(work, cases, args.repeat, args.check)
    for row in rows:
        print(json.dumps(row) if args.json else _line(row), flush=True)


def _affordable_chunk(work: Workload, memory_budget: float | None, mesh: MeshShape | None) -> int:
    """The cheapest chunk size whose memory fits; the plan goes to stderr."""
    rows = entry_rows(work.trie, work.samples.sequence, work.samples.position)
    dtype = str(work.params["embed"].dtype)
    plan = choose_for_trie(work.model, dtype, work.trie, rows, memory_budget=memory_budget, mesh=mesh)
    print(plan, file=sys.stderr)
    return plan.chunk_size


def balance_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The balancer's methods for every number of ranks: `BalanceReport.to_json()` and the seconds taken."""
    methods = (AUTO, *METHODS) if args.methods is None else args.methods.split(",")
    return compare_methods(make_workload(args).trie, _numbers("--ranks", args.ranks), methods)


def _balance_line(row: dict[str, Any]) -> str:
    loads = f"largest rank {row['max_tree_tokens']:>9,} of {row['sum_tree_tokens']:>10,} tree tokens"
    found = f"imbalance {row['imbalance']:.4f}  {row['seconds']:.2f} s"
    return f"{row['method']:16}{row['ranks']:>4} ranks  {loads}  {found}"


def _line(row: dict[str, Any]) -> str:
    name = row["method"] + ("" if row["chunk"] is None else f" C={row['chunk']}")
    seconds = "" if row["seconds"] is None else f"{row['seconds']:9.3f} s"
    memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:9.1f} MiB"
    error = f"  gradient error {row['grad_rel_err']:.1e}" if "grad_rel_err" in row else ""
    work = f"{row['model_flops'] / 1e9:10.1f} GFLOP"
    tokens = f"{row['backward_tokens_executed']:>9,} + {row['forward_tokens_executed']:>8,} tokens"
    return f"{name:32}{seconds}{work}{tokens}{memory}{error}"


if __name__ == "__main__":
    run_command(main)
