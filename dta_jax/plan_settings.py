"""What the settings leave to us: chunk size and strategy by memory, costs by measurement."""

from __future__ import annotations

from dataclasses import replace

import jax

from dta_jax.cost_fit import saved_fit
from dta_jax.memory_plan import CHUNKS, MemoryPlan, choose_plan
from dta_jax.memory_predict import Setup
from dta_jax.model import cast
from dta_jax.planner import DEFAULT_COST, CostModel
from dta_jax.settings import Planner
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples


def settle(
    planner: Planner, setup: Setup, example: Samples | None
) -> tuple[Planner, CostModel, MemoryPlan | None]:
    """The settings with numbers in the place of "auto", what operations cost, and the plan if one was chosen.

    Costs are measured with random weights, which cost what others do.

    Args:
      planner: as the user wrote it.
      setup: what memory depends on.
      example: a typical batch, to weigh plans with; None for one sequence of the longest length.

    Raises:
      InputError: no plan fits the memory; or a cost file that cannot be written.
    """
    plan = None
    if "auto" in (planner.chunk_size, planner.strategy):
        plan = _chosen(planner, setup, example)
        planner = replace(planner, chunk_size=plan.chunk_size, strategy=plan.strategy, memory_budget=None)
    if planner.cost_file is None:
        return planner, DEFAULT_COST, plan
    assert isinstance(planner.chunk_size, int)
    params = cast(jax.jit(setup.model.init)(jax.random.key(0)), setup.dtype)
    fit = saved_fit(
        planner.cost_file,
        setup.model,
        params,
        chunk_size=planner.chunk_size,
        longest=setup.longest,
        refit=True,
    )
    return planner, fit.cost, plan


def _chosen(planner: Planner, setup: Setup, example: Samples | None) -> MemoryPlan:
    trie = rows = None
    if example is not None:
        trie = build_trie(example.sequences)
        rows = entry_rows(trie, example.sequence, example.position)
    return choose_plan(
        setup,
        memory_budget=planner.memory_budget,
        strategy=planner.strategy,
        trie=trie,
        entry_row=rows,
        chunks=CHUNKS if isinstance(planner.chunk_size, str) else (planner.chunk_size,),
    )
