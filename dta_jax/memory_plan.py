"""Chooses chunk size and strategy for a memory budget, and says why, before anything is allocated.

    budget      given, or what the device says that it has
    candidates  the chunk sizes of `CHUNKS` that the batch can fill, with and without kept residuals
    fits        the predicted peak (`dta_jax.memory_predict`) with `HEADROOM` is within the budget
    chosen      of those that fit, the one whose schedule for the given trie costs least (`schedule_cost`);
                of equal ones, the one that needs least

Without a trie, one sequence of the longest length stands for the batch. Then keeping residuals always pays.
On a mesh the whole batch's schedule stands for those of the ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final

import jax
import numpy as np

from dta_jax.errors import InputError
from dta_jax.losses import NLL
from dta_jax.memory_predict import PREDICTED, Prediction, Setup, predict_memory
from dta_jax.model import DecoderModel
from dta_jax.planner import CostModel
from dta_jax.schedule import compile_schedule
from dta_jax.schedule_stats import schedule_cost
from dta_jax.sharding import MeshShape
from dta_jax.trie import build_trie
from dta_jax.types import Trie

AUTO: Final = "auto"
CHUNKS: Final = (256, 512, 1024, 2048, 4096, 8192)
HEADROOM: Final = 1.1  # over the predicted peak, which is right within 10 %
CPU_SHARE: Final = 0.5  # of the machine's memory, for all devices of a CPU together
GIB: Final = 2**30


@dataclass(frozen=True)
class Candidate:
    """One chunk size and strategy.

    Attributes:
      prediction: what it needs.
      cost: of its schedule, in forward passes of one row.
    """

    prediction: Prediction
    cost: float

    @property
    def needed(self) -> int:
        """Bytes that a budget must have for it."""
        return math.ceil(self.prediction.peak * HEADROOM)


@dataclass(frozen=True)
class MemoryPlan:
    """The choice, and everything that was considered.

    Attributes:
      budget: bytes per device.
      source: where the budget comes from.
      chosen: one of the candidates.
      candidates: by chunk size.
    """

    budget: int
    source: str
    chosen: Candidate
    candidates: tuple[Candidate, ...]

    @property
    def chunk_size(self) -> int:
        """C."""
        return self.chosen.prediction.chunk_size

    @property
    def strategy(self) -> str:
        """The planner's strategy."""
        return self.chosen.prediction.strategy

    def __str__(self) -> str:
        """The plan as text: the parts of the chosen one, then what the others need."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        found = self.chosen.prediction
        yield f"memory plan: chunk_size={found.chunk_size}, strategy={found.strategy}"
        for part in fields(found.parts):
            size = getattr(found.parts, part.name)
            if size:
                yield f"  {part.name.replace('_', ' '):18}{_size(size):>12}"
        yield f"  {'gradient':18}{_size(found.parts.total):>12}"
        if found.update:
            yield f"  {'optimizer update':18}{_size(found.update):>12}"
        yield f"  {'needed':18}{_size(self.chosen.needed):>12}  the larger one and {HEADROOM - 1:.0%} room"
        yield f"  {'budget':18}{_size(self.budget):>12}  {self.source}"
        for other in self.candidates:
            if other is not self.chosen:
                cost = other.cost / self.chosen.cost
                yield f"  {_name(other):26}{cost:5.2f} x the cost, {self._verdict(other)}"

    def _verdict(self, other: Candidate) -> str:
        missing = other.needed - self.budget
        if missing > 0:
            return f"needs {_size(missing).strip()} more than the budget"
        return f"needs {_size(other.needed).strip()}"


def choose_plan(
    setup: Setup,
    *,
    memory_budget: float | None = None,
    strategy: str = AUTO,
    trie: Trie | None = None,
    entry_row: np.ndarray | None = None,
    cost: CostModel | None = None,
    chunks: Sequence[int] = CHUNKS,
) -> MemoryPlan:
    """Chooses chunk size and, unless it is given, strategy.

    Args:
      setup: the run.
      memory_budget: GiB per device; None asks the device.
      strategy: `packed`, `packed+keep`, or "auto" for the better one.
      trie: of a typical batch, for the costs.
      entry_row: int[E], the row of each of its entries' tokens.
      cost: of operations; `CostModel()` if None.
      chunks: chunk sizes to choose from.

    Raises:
      InputError: nothing fits (the smallest budget that would do is named), a budget that is no positive
        number, an unknown strategy, or a device that does not say how much memory it has.
    """
    if strategy not in (AUTO, *PREDICTED):
        allowed = f"{AUTO}, {' or '.join(PREDICTED)} to choose chunk_size by memory"
        raise InputError("Planner", "strategy", expected=allowed, actual=repr(strategy))
    budget, source = _budget(memory_budget)
    if trie is None or entry_row is None:
        trie, entry_row = build_trie([np.arange(setup.longest, dtype=np.int32)]), np.zeros(0, np.int32)
    strategies = PREDICTED if strategy == AUTO else (strategy,)
    candidates = []
    for chunk in _useful(chunks, trie.num_rows):
        for name in strategies:
            schedule = compile_schedule(trie, entry_row, chunk_size=chunk, strategy=name, cost=cost)
            spent = schedule_cost(schedule, cost or CostModel())
            candidates.append(Candidate(predict_memory(setup, chunk, name), spent))
    fitting = [candidate for candidate in candidates if candidate.needed <= budget]
    if not fitting:
        raise _nothing_fits(candidates, budget, source)
    chosen = min(fitting, key=lambda candidate: (candidate.cost, candidate.needed))
    return MemoryPlan(budget, source, chosen, tuple(candidates))


def choose_for_trie(
    model: DecoderModel,
    dtype: str,
    trie: Trie,
    entry_row: np.ndarray,
    *,
    strategy: str = AUTO,
    memory_budget: float | None = None,
    mesh: MeshShape | None = None,
) -> MemoryPlan:
    """`choose_plan` for gradients of one batch without an optimizer, as `bench --chunk auto` runs them."""
    shape = MeshShape() if mesh is None else mesh
    setup = Setup(model, dtype, max(1, trie.longest_path), len(entry_row), shape, loss=NLL())
    return choose_plan(setup, memory_budget=memory_budget, strategy=strategy, trie=trie, entry_row=entry_row)


def device_budget(device: jax.Device) -> tuple[int, str]:
    """Bytes that a device says it can give, or, on a CPU, its part of half the machine's memory; and why.

    Raises:
      InputError: an accelerator that says nothing.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return int(limit), f"what {device.device_kind} offers"
    if device.platform != "cpu":
        raise InputError(
            device.device_kind,
            "bytes_limit",
            expected="a device that says how much memory it has",
            actual="none",
            hint="set Planner.memory_budget, in GiB",
        )
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    devices = jax.local_device_count()
    return int(machine * CPU_SHARE) // devices, f"{CPU_SHARE:.0%} of this machine's, over {devices} devices"


def _budget(gibibytes: float | None) -> tuple[int, str]:
    if gibibytes is None:
        return device_budget(jax.local_devices()[0])
    if not 0 < gibibytes < math.inf:
        raise InputError("Planner", "memory_budget", expected="GiB, above 0, or None", actual=gibibytes)
    return int(gibibytes * GIB), "memory_budget"


def _useful(chunks: Sequence[int], rows: int) -> list[int]:
    """The chunk sizes up to the first that holds all rows."""
    ordered = sorted(chunks)
    return [chunk for chunk, below in zip(ordered, [0, *ordered], strict=False) if below < max(1, rows)]


def _nothing_fits(candidates: Sequence[Candidate], budget: int, source: str) -> InputError:
    least = min(candidates, key=lambda candidate: candidate.needed)
    enough = math.ceil(least.needed / GIB * 1000) / 1000
    return InputError(
        "Planner",
        "memory_budget",
        expected=f"at least {enough:g} GiB ({_name(least)})",
        actual=f"{budget / GIB:.3g} GiB ({source})",
        hint=f"set Planner.memory_budget = {enough:g} if the device has it, shorten sequences, "
        "use more devices or a smaller model",
    )


def _name(candidate: Candidate) -> str:
    return f"{candidate.prediction.strategy} C={candidate.prediction.chunk_size}"


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
