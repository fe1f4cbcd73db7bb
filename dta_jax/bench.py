"""`python -m dta_jax.bench`: the same gradient by several methods, timed in one run.

Methods are the dense baselines of `dta_jax.reference` (`dense`, `dense_remat`, and `leafized`: remat over
the leaves only) and every strategy of the planner (`packed`, ...). One JSON object per method and chunk
goes to stdout; see `docs/benchmarks.md` for its fields. Methods take turns, so that a machine's slow
minutes hit all of them.

With `--mesh` the tree methods run on a mesh of devices, the dense ones on the first. `--balance` runs
nothing: it compares the ways to split the sequences over ranks (`dta_jax.balance`). `--suite gpu` is another
command, with options of its own (`dta_jax.gpu_suite`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from dta_jax import gpu_suite, reference, workload
from dta_jax.balance import AUTO, METHODS, compare_methods
from dta_jax.bench_methods import (
    DENSE,
    PAD_TO,
    SMALL,
    Case,
    Workload,
    gradient_error,
    make_cases,
    make_model,
    nll_workload,
)
from dta_jax.errors import InputError, run_command
from dta_jax.losses import NLL
from dta_jax.memory_plan import choose_for_trie
from dta_jax.rollouts import load_rollouts, samples_from_rollouts
from dta_jax.schedule import STRATEGIES
from dta_jax.sharding import MeshShape
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.trie import entry_rows


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
    if not len(samples.sequence):
        raise InputError(rollouts.source, "completion_spans", expected="tokens with loss", actual="none")
    model, params = make_model(args.model, vocab_size, args.dtype, shapes_only=args.plan_only or args.balance)
    return nll_workload(model, params, samples)


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
    add("--suite", choices=(gpu_suite.NAME,), help="what a GPU can do; --suite gpu --help has its options")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if gpu_suite.is_meant(arguments):
        gpu_suite.main(arguments)
        return
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
