"""The planner's cost model, fitted to the machine from measured operations; saved and reused.

    fit = saved_fit("cost.json", model, params, chunk_size=1024, longest=8192, refit=True)
    engine = TreeEngine.for_batches(..., cost=fit.cost)
    fit.seconds(engine.plan(samples))          what the plan will take

`calibration` makes plans of one long sequence, one plan per width: PUSH and BACK at growing context, entries
in every other operation. Each operation is timed on its own (`time_operations`), and the seconds are fitted
by the model's own form (`CostModel`), with relative errors, so that small operations count like large ones:

    seconds = row_seconds * weight(kind) * (launch + W + attention * pairs + entry * entries)

Limits: attention runs in whole blocks and so do entries, the model counts pairs and entries one by one. What
operations gain by being dispatched without a wait between them is not seen: on a GPU, launches look up to
one dispatch dearer than they are. Kept residuals are not fitted; BACK is then taken to save a PUSH.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import jax
import numpy as np
from scipy.optimize import nnls

from dta_jax.errors import InputError, writing
from dta_jax.losses import NLL, TokenLoss
from dta_jax.model import DecoderModel, Params
from dta_jax.planner import CostModel, widths
from dta_jax.schedule import compile_schedule, round_slots
from dta_jax.schedule_stats import cost_terms, operation_costs, schedule_cost
from dta_jax.segment import num_keys
from dta_jax.tree_grad import back_step, push_step, start
from dta_jax.tree_inputs import prepare
from dta_jax.trie import build_trie
from dta_jax.types import BACK, PUSH, Schedule

_ROUNDS: Final = 200  # of alternating fits; far more than they need to settle
_HELD_OUT: Final = 3  # every third operation is predicted from the others


@dataclass(frozen=True)
class Fingerprint:
    """What a fit holds for.

    Attributes:
      device: kind of the device; of a CPU, with its number of cores.
      jax: version.
      model: the model with its whole shape, as it prints itself.
      dtype: of the parameters.
      chunk_size: C.
    """

    device: str
    jax: str
    model: str
    dtype: str
    chunk_size: int

    @classmethod
    def of(cls, model: DecoderModel, params: Params, chunk_size: int) -> Fingerprint:
        """That of this machine."""
        device = jax.devices()[0]
        cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
        return cls(
            device.device_kind + cores, jax.__version__, str(model), str(params["embed"].dtype), chunk_size
        )


class OtherFingerprintError(InputError):
    """A fit that holds for another machine, model or chunk size."""


@dataclass(frozen=True)
class CostFit:
    """A cost model in forward passes of one row, and what such a pass takes.

    Attributes:
      cost: for planner and balancer.
      row_seconds: a forward pass of one row.
      error: median of |predicted - measured| / measured over operations that the fit did not see.
      operations: how many were measured.
      fingerprint: what it holds for.
    """

    cost: CostModel
    row_seconds: float
    error: float
    operations: int
    fingerprint: Fingerprint

    def seconds(self, schedule: Schedule) -> float:
        """What the operations of a schedule take, one after the other."""
        return self.row_seconds * schedule_cost(schedule, self.cost)

    def save(self, file: Path | str) -> None:
        """Writes a JSON file, whole or not at all."""
        partial = Path(file).with_name(f".{Path(file).name}.partial")
        with writing(file):
            partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            os.replace(partial, file)


def load_fit(file: Path | str, fingerprint: Fingerprint) -> CostFit:
    """Reads what `CostFit.save` wrote.

    Raises:
      OtherFingerprintError: a fit for another machine, model or chunk size.
      InputError: no such file, or not a fit.
    """
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        saved = Fingerprint(**found.pop("fingerprint"))
        fit = CostFit(cost=CostModel(**found.pop("cost")), fingerprint=saved, **found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(file, "file", expected="a saved fit of the cost model", actual=error) from None
    for name, value in asdict(fingerprint).items():
        if getattr(saved, name) != value:
            hint = "measure anew on this machine with refit=True"
            raise OtherFingerprintError(file, name, expected=value, actual=getattr(saved, name), hint=hint)
    return fit


def saved_fit(
    file: Path | str,
    model: DecoderModel,
    params: Params,
    *,
    chunk_size: int,
    longest: int,
    refit: bool,
    repeat: int = 3,
) -> CostFit:
    """The fit in `file` if it is this machine's, else a new one, written there.

    Args:
      file: JSON.
      model, params, chunk_size, longest, repeat: as in `fit_cost`.
      refit: whether to measure where the file is missing or for something else.

    Raises:
      InputError: it is, and `refit` is False; or it is no fit at all, or there is no folder to write it to.
    """
    file = Path(file)
    if file.exists() or not refit:
        try:
            return load_fit(file, Fingerprint.of(model, params, chunk_size))
        except OtherFingerprintError:
            if not refit:
                raise
    elif not file.parent.is_dir():
        raise InputError(file, "folder", expected="one that exists", actual="no such folder")
    fit = fit_cost(model, params, chunk_size=chunk_size, longest=longest, repeat=repeat)
    fit.save(file)
    return fit


def fit_cost(
    model: DecoderModel,
    params: Params,
    *,
    chunk_size: int,
    longest: int,
    loss: TokenLoss | None = None,
    repeat: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> CostFit:
    """Measures operations of every width on this machine and fits the model to them.

    Takes as long as a forward pass of some 8 x repeat x `longest` tokens, and what compiling the steps takes.

    Args:
      model, params: what will be trained; parameters in the dtype that they are computed with.
      chunk_size: C of the plans to come.
      longest: their longest sequence, tokens.
      loss: of one entry, reading nothing but `weight`; `NLL()` if None.
      repeat: times that each operation is measured; the least counts.
      clock: seconds; `time.process_time` counts processor time, which on a busy CPU says more.

    Raises:
      InputError: `repeat` below 1, or measurements that no cost model fits.
    """
    if repeat < 1:
        raise InputError("fit_cost", "repeat", expected="at least 1", actual=repeat)
    terms, kind, seconds = [], [], []
    for schedule in calibration(chunk_size, longest):
        values = {"weight": np.ones(len(schedule.entry))}
        terms.append(cost_terms(schedule))
        kind.append(schedule.kind)
        seconds.append(
            time_operations(model, params, schedule, values, loss or NLL(), repeat=repeat, clock=clock)
        )
    measured = np.concatenate(terms), np.concatenate(kind), np.concatenate(seconds)
    held_out = np.arange(len(measured[1])) % _HELD_OUT == 0
    cost, row_seconds = fit_terms(*(array[~held_out] for array in measured))
    predicted = row_seconds * operation_costs(measured[0], measured[1], cost)
    error = np.median(np.abs(predicted / measured[2] - 1)[held_out])
    cost, row_seconds = fit_terms(*measured)
    fingerprint = Fingerprint.of(model, params, chunk_size)
    return CostFit(cost, row_seconds, float(error), len(measured[1]), fingerprint)


def calibration(chunk_size: int, longest: int) -> list[Schedule]:
    """Plans of one sequence, one for every width: all rows pushed, then all run backward, at full width.

    The widest has about `longest` rows, the others as many operations. Every other operation has entries.
    """
    operations = max(2, longest // chunk_size)
    slots = round_slots(operations * chunk_size + chunk_size)
    plans = []
    for width in widths(chunk_size):
        row = np.arange(operations * width, dtype=np.int32)
        trie = build_trie([np.zeros_like(row)])
        plan = compile_schedule(
            trie, row[row // width % 2 == 1], chunk_size=width, strategy="branch", stack_slots=slots
        )
        plans.append(replace(plan, chunk_size=chunk_size))
    return plans


def time_operations(
    model: DecoderModel,
    params: Params,
    schedule: Schedule,
    values: Mapping[str, np.ndarray],
    loss: TokenLoss,
    *,
    entry_capacity: int = 0,
    repeat: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> np.ndarray:
    """float64[O], seconds of each operation of a backward schedule, waited for one by one: the least of all.

    Args: as in `tree_value_and_grad` and `fit_cost`. Residuals are not kept. A first run only compiles.
    """
    entries, prepared = prepare(model, params, schedule, values, entry_capacity)
    ops = jax.block_until_ready(list(prepared))
    keys, S = num_keys(schedule.stack_slots, schedule.chunk_size), schedule.stack_slots
    least = np.full(len(ops), np.inf)
    for run in range(repeat + 1):
        carry = jax.block_until_ready(start(model, params, len(entries.token), keys))
        for o, (kind, op) in enumerate(ops):
            began = clock()
            if kind == PUSH:
                state = carry.stack, carry.outputs
                stack, outputs = jax.block_until_ready(push_step(model, params, state, op, entries, S))
                carry = carry._replace(stack=stack, outputs=outputs)
            else:
                carry = jax.block_until_ready(back_step(model, loss, params, carry, op, entries, S))
            elapsed = clock() - began
            if run:
                least[o] = min(least[o], elapsed)
    return least


def fit_terms(terms: np.ndarray, kind: np.ndarray, seconds: np.ndarray) -> tuple[CostModel, float]:
    """The cost model, and the seconds of a row's forward pass, with the least squares of relative errors.

    The weight of BACK multiplies all terms, so it is fitted in turns with them; no coefficient is negative.

    Args:
      terms: float64[O, 4], `cost_terms`.
      kind: int[O], PUSH or BACK, some of each.
      seconds: float64[O], above 0.

    Raises:
      InputError: operations that tell no cost of a row, such as all of one width and kind.
    """
    back = kind == BACK
    relative = terms / seconds[:, None]
    backward = 3.0
    for _ in range(_ROUNDS):
        theta, _ = nnls(relative * np.where(back, backward, 1.0)[:, None], np.ones(len(seconds)))
        unweighted = relative[back] @ theta
        backward = float(unweighted.sum() / max(unweighted @ unweighted, np.finfo(float).tiny))
    launch, row, attention, entry = theta.tolist()
    if not (row > 0 and 0 < backward < np.inf and back.any() and not back.all()):
        raise InputError(
            "measured operations",
            "seconds",
            expected="PUSH and BACK of several widths, dearer the wider they are",
            actual=f"{row} s per row, BACK {backward:.3g} times PUSH",
            hint="measure on a machine that does nothing else, or do without: no Planner.cost_file",
        )
    return CostModel(backward, 1.0, attention / row, launch / row, entry / row), row
