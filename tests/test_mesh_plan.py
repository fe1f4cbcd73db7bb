"""A batch split over ranks: they are balanced by what their schedules cost under the planner's model."""

import jax
import numpy as np
import pytest

from dta_jax.balance import RowCost, ScheduleCost, balance, rank_trie
from dta_jax.errors import InputError
from dta_jax.mesh_plan import FEWEST_OPERATIONS, branches, plan_ranks, stack_operations, table_length
from dta_jax.planner import CostModel
from dta_jax.schedule_stats import schedule_cost
from dta_jax.tree_inputs import host_inputs
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples
from tests.trees import make_model


def uneven():
    """A long run, of which all but a chunk must be pushed and which has most entries, and 20 short ones."""
    sequences = [np.full(96, 1), *(np.full(8, 2 + i) for i in range(20))]
    position = np.concatenate([np.arange(36, 96), np.full(20, 5)]).astype(np.int32)
    sequence = np.repeat(np.arange(21), [60] + [1] * 20).astype(np.int32)
    return Samples([s.astype(np.int32) for s in sequences], sequence, position)


def plan_of(samples, ranks, cost=None, chunk_size=16, strategy="packed"):
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    options = {"chunk_size": chunk_size, "strategy": strategy, "cost": cost}
    return plan_ranks(trie, samples.sequence, rows, ranks, **options)


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


def test_where_residuals_are_kept_no_row_is_forwarded_twice():
    """Then a pushed row costs what any other does, and four short runs make the long one's rank even."""
    plan = plan_of(uneven(), 2, CostModel(launch=0.0), strategy="packed+keep")
    assert plan.keep_residuals
    assert [schedule.trie.num_rows for schedule in plan.schedules] == [128, 128]
    assert beside_the_long_run(plan) == 4
    assert plan.assignment.report.cost.tolist() == [3 * 128, 3 * 128]
    assert plan.forward_tokens_executed == plan.backward_tokens_executed == 256
    assert not plan_of(uneven(), 2).keep_residuals


def test_entries_and_context_count_as_the_model_says():
    for cost in (CostModel(launch=0.0, entry=50.0), CostModel(launch=0.0, attention=10.0)):
        assert beside_the_long_run(plan_of(uneven(), 2, cost)) == 0


def test_tables_come_in_powers_of_two():
    assert table_length(plan_of(uneven(), 8)) == FEWEST_OPERATIONS
    longer = plan_of(uneven(), 2, chunk_size=1)
    most = max(schedule.num_ops for schedule in longer.schedules)
    assert most <= table_length(longer) < 2 * most
    assert table_length(longer).bit_count() == 1


def test_tables_hold_the_operations_of_every_rank_and_nothing_else():
    model, params = make_model(vocab_size=32)
    samples = uneven()
    values = {"weight": np.arange(80, dtype=np.float32)}
    plan = plan_of(samples, 3)
    assert plan.num_entries == 80
    table, entries = stack_operations(model, params, plan, values, capacity=512)
    assert table.branch.shape == (3, table_length(plan))
    rows = {"push": 0, "back": 0}
    for k, (schedule, mine) in enumerate(zip(plan.schedules, plan.entries, strict=True)):
        own, ops = host_inputs(model, params, schedule, {"weight": values["weight"][mine]}, 512)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda leaf, k=k: leaf[k], entries), own)
        assert table.count[k] == schedule.num_ops
        for o, (kind, op) in enumerate(ops):
            width = len(op.rows.token)
            assert branches(plan.chunk_size)[table.branch[k, o]] == (kind, width)
            rows["back" if kind else "push"] += width
            for held, leaf in zip(jax.tree.leaves(table.op), jax.tree.leaves(op), strict=True):
                size = np.size(leaf)
                assert held[k, o].ravel()[:size].tolist() == np.ravel(leaf).tolist()
                assert not held[k, o].ravel()[size:].any()
        for held in jax.tree.leaves(table.op):
            assert not held[k, schedule.num_ops :].any()
    assert rows == {"push": plan.forward_tokens_executed, "back": plan.backward_tokens_executed}


def test_a_table_that_is_too_short_is_refused():
    model, params = make_model(vocab_size=32)
    plan = plan_of(uneven(), 2)
    most = max(schedule.num_ops for schedule in plan.schedules)
    values = {"weight": np.ones(80)}
    table, _ = stack_operations(model, params, plan, values, max_operations=most)
    assert table.branch.shape == (2, most)
    with pytest.raises(InputError, match=f"max_operations: expected at least {most}; got {most - 1}"):
        stack_operations(model, params, plan, values, max_operations=most - 1)
