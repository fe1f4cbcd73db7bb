"""What the benchmark compares: the same gradient by several methods, each as a case that can be run.

Methods are the dense baselines of `dta_jax.reference` (`dense`, `dense_remat`, and `leafized`: remat over
the leaves only) and every strategy of the planner, on one device or on a mesh.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from dta_jax import memory, mesh_grad, reference, tree_grad, workload
from dta_jax.errors import InputError
from dta_jax.hf_config import read_config
from dta_jax.hf_weights import load_params
from dta_jax.losses import NLL
from dta_jax.mesh_plan import plan_ranks
from dta_jax.model import DecoderModel, Params
from dta_jax.qwen3 import PRESETS, Qwen3, Qwen3Config, preset
from dta_jax.schedule import compile_schedule
from dta_jax.sharding import MeshShape, place_params
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


def nll_workload(model: DecoderModel, params: Params, samples: Samples) -> Workload:
    """Samples under the mean of -logp, with their trie."""
    count = len(samples.sequence)
    values = {"weight": np.full(count, 1 / count)}
    samples = Samples(samples.sequences, samples.sequence, samples.position, values)
    return Workload(model, params, samples, build_trie(samples.sequences))


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
