"""A batch split over ranks: they are balanced by what their schedules cost under the planner's model."""

import numpy as np

from dta_jax.balance import RowCost, ScheduleCost, balance, rank_trie
from dta_jax.mesh_plan import FEWEST_OPERATIONS, plan_ranks, table_length
from dta_jax.planner import CostModel
from dta_jax.schedule_stats import schedule_cost
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples


def uneven():
    """A long run, of which all but a chunk must be pushed and which has most entries, and 20 short ones."""
    sequences = [np.full(96, 1), *(np.full(8, 2 + i) for i in range(20))]
    position = np.concatenate([np.arange(36, 96), np.full(20, 5)]).astype(np.int32)
    sequence = np.repeat(np.arange(21), [60] + [1] * 20).astype(np.int32)
    return Samples([s.astype(np.int32) for s in sequences], sequence, position)


def plan_of(samples, ranks, cost=None, chunk_size=16):
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    return plan_ranks(trie, samples.sequence, rows, ranks, chunk_size=chunk_size, cost=cost)


def beside_the_long_run(plan):
    """How many sequences are on its rank."""
    rank = plan.assignment.rank
    return int((rank[1:] == rank[0]).sum())


def test_ranks_are_balanced_by_what_they_run_not_by_tokens():
    samples, cost = uneven(), CostModel(launch=0.0)
    plan = plan_of(samples, 2, cost)
    loads = [schedule_cost(schedule, cost) for schedule in plan.schedules]
    np.testing.assert_allclose(plan.assignment.report.cost, loads)
    compiled, by_tokens = ScheduleCost(16, cost=cost), balance(plan.trie, 2, RowCost())
    parts = [rank_trie(plan.trie, part)[0] for part in by_tokens.sequences()]
    assert max(part.num_rows for part in parts) == 128
    assert max(loads) < 0.95 * max(compiled.of(part, np.ones(part.num_rows)) for part in parts)
    assert beside_the_long_run(plan) > 0


def test_entries_and_context_count_as_the_model_says():
    for cost in (CostModel(launch=0.0, entry=50.0), CostModel(launch=0.0, attention=10.0)):
        assert beside_the_long_run(plan_of(uneven(), 2, cost)) == 0


def test_tables_come_in_powers_of_two():
    assert table_length(plan_of(uneven(), 8)) == FEWEST_OPERATIONS
    longer = plan_of(uneven(), 2, chunk_size=1)
    most = max(schedule.num_ops for schedule in longer.schedules)
    assert most <= table_length(longer) < 2 * most
    assert table_length(longer).bit_count() == 1
