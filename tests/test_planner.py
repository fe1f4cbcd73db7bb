import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.errors import InputError
from dta_jax.planner import CostModel, fit_width, next_rows, segments_of, widths, work_bound
from dta_jax.schedule import LARGE_CHUNK, STRATEGIES, check_schedule, compile_schedule
from dta_jax.schedule_stats import cost_terms, schedule_cost, schedule_stats, stack_heights
from dta_jax.trie import build_trie
from dta_jax.types import NO_PARENT, PUSH
from tests.naive import path_rows, random_sequences

NO_ENTRIES = np.zeros(0, np.int32)


def random_trie(seed, num_sequences=8, max_length=12):
    rng = np.random.default_rng(seed)
    return build_trie(random_sequences(rng, int(rng.integers(1, num_sequences + 1)), max_length))


def plan(trie, chunk_size, strategy="packed", **options):
    schedule = compile_schedule(trie, NO_ENTRIES, chunk_size=chunk_size, strategy=strategy, **options)
    check_schedule(schedule)
    return schedule


def operations(schedule):
    """(kind, rows, width) of every operation."""
    return [
        (
            "PUSH" if kind == PUSH else "BACK",
            schedule.row[schedule.offset[o] : schedule.offset[o + 1]].tolist(),
            int(schedule.width[o]),
        )
        for o, kind in enumerate(schedule.kind)
    ]


def tree(*lengths):
    """A trunk of `lengths[0]` rows and branches of the other lengths at its end."""
    trunk = [0] * lengths[0]
    return build_trie([trunk + [b] * size for b, size in enumerate(lengths[1:], 1)])


def short_branches(turns=17, trunk=1000, side=500, extension=200):
    """A conversation that leaves a side branch at every turn: 12,900 rows."""
    tokens = iter(range(10**6))
    path, sequences = list(itertools.islice(tokens, trunk)), []
    for _ in range(turns):
        sequences.append(np.array(path + list(itertools.islice(tokens, side))))
        path += itertools.islice(tokens, extension)
    return build_trie([*sequences, np.array(path)])


# Segments, widths, the bound


@given(st.integers(0, 10**6))
def test_segments_are_maximal_runs_without_a_branch(seed):
    trie = random_trie(seed)
    children = np.bincount(trie.parent[trie.parent >= 0], minlength=trie.num_rows)
    segments = segments_of(trie)
    starts = [r for r in range(trie.num_rows) if trie.parent[r] == NO_PARENT or children[trie.parent[r]] > 1]
    assert segments.start.tolist() == starts
    assert segments.stop.tolist() == [*starts[1:], trie.num_rows]
    assert segments.subtree_end.tolist() == trie.subtree_end[starts].tolist()
    for start, above in zip(starts, segments.parent, strict=True):
        parent = trie.parent[start]
        assert (above == NO_PARENT) == (parent == NO_PARENT)
        assert above == NO_PARENT or segments.start[above] <= parent < segments.stop[above]


def test_widths_are_eighths_rounded_up():
    assert widths(2048) == (2048, 1024, 512, 256)
    assert widths(5) == (5, 3, 2, 1)
    assert widths(1) == (1,)
    assert [fit_width(rows, 8) for rows in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("rows", "launch", "expected"),
    [
        (5000, 0, 2048),  # more than a chunk
        (1024, 0, 1024),  # a width
        (1100, 0, 1024),  # 1024 + 256 run, not 2048
        (1100, 767, 1024),
        (1100, 768, 1100),  # padding costs no more than a launch
        (1700, 0, 1700),  # 1024 + 1024 are no fewer than 2048
        (100, 0, 100),
    ],
)
def test_the_next_operation_is_full_where_padding_costs_more_than_a_launch(rows, launch, expected):
    assert next_rows(rows, 2048, launch) == expected


def test_the_bound_counts_rows_with_more_than_a_chunk_below():
    trie = tree(3, 5, 1)  # rows with subtrees of 9, 8, 7; 5, 4, 3, 2, 1; 1
    assert [work_bound(trie, c) for c in (1, 4, 5, 8, 9)] == [1 + n / 27 for n in (7, 4, 3, 1, 0)]
    assert work_bound(build_trie([]), 4) == 1


def test_a_cost_model_refuses_nonsense():
    with pytest.raises(InputError, match="CostModel: launch: expected finite, at least 0; got -1"):
        CostModel(launch=-1)
    with pytest.raises(InputError, match="CostModel: attention: expected finite, at least 0; got nan"):
        CostModel(attention=float("nan"))


# Statistics


def test_statistics_of_a_plan_counted_by_hand():
    schedule = plan(tree(2, 5, 3), 4)
    assert operations(schedule) == [
        ("PUSH", [0, 1, 2], 4),
        ("BACK", [3, 4, 5, 6], 4),
        ("BACK", [2, 7, 8, 9], 4),
        ("BACK", [0, 1], 2),
    ]
    stats = schedule_stats(schedule)
    assert (stats.tree_tokens, stats.backs, stats.pushes) == (10, 3, 1)
    assert (stats.backward_tokens_executed, stats.forward_tokens_executed) == (10, 4)
    assert stats.work == pytest.approx(34 / 30)
    assert stats.work_bound == pytest.approx(33 / 30)
    assert stats.backs_over_full == pytest.approx(3 / 2.5)
    assert stats.peak_stack_rows == 3
    assert stack_heights(schedule).tolist() == [3, 3, 2, 0]
    pairs = [1 + 2 + 3, 4 + 5 + 6 + 7, 3 + 3 + 4 + 5, 1 + 2]
    assert cost_terms(schedule).tolist() == [[1, w, p, 0] for w, p in zip([4, 4, 4, 2], pairs, strict=True)]
    cost = CostModel(backward=3, push=1, attention=0.5, launch=10)
    assert schedule_cost(schedule, cost) == (14 + 3) + 3 * (14 + 11) + 3 * (14 + 7.5) + 3 * (12 + 1.5)


# Every strategy


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 5, 16, 200]), st.sampled_from(STRATEGIES))
def test_every_strategy_is_a_valid_schedule(seed, chunk_size, strategy):
    trie = random_trie(seed)
    schedule = plan(trie, chunk_size, strategy)
    C = chunk_size * (LARGE_CHUNK if "large_chunk" in strategy else 1)
    assert (schedule.strategy, schedule.chunk_size) == (strategy, C)
    heights = stack_heights(schedule)
    assert heights.max(initial=0) <= trie.longest_path + (C if "packed" in strategy else 0)
    assert heights[-1] == 0
    stats = schedule_stats(schedule)
    assert stats.work >= stats.work_bound * (1 - 1e-12)


BRANCHY = [[0, 1, 2, 3, 4, 5], [0, 1, 6, 7, 8], [0, 9]]  # 0 {1 {2 3 4 5, 6 7 8}, 9}: leaves 5, 8, 9


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            "branch",
            [
                ("PUSH", [0, 1, 2], 3),
                ("PUSH", [3, 4, 5], 3),
                ("BACK", [3, 4, 5], 3),
                ("BACK", [2], 1),
                ("PUSH", [6, 7, 8], 3),
                ("BACK", [6, 7, 8], 3),
                ("BACK", [1], 1),
                ("PUSH", [9], 1),
                ("BACK", [0, 9], 2),
            ],
        ),
        (
            "branch+cut_tail",
            [
                ("PUSH", [0, 1, 2], 3),
                ("BACK", [3, 4, 5], 3),
                ("BACK", [2], 1),
                ("BACK", [6, 7, 8], 3),
                ("BACK", [1], 1),
                ("BACK", [0, 9], 2),
            ],
        ),
        (
            "branch+cut_tail+order+large_chunk",
            [
                ("PUSH", [0, 1], 2),
                ("BACK", [2, 3, 4, 5], 6),
                ("BACK", [1, 6, 7, 8], 6),
                ("BACK", [0, 9], 2),
            ],
        ),
    ],
)
def test_one_branch_at_a_time_drawn_by_hand(strategy, expected):
    assert operations(plan(build_trie(BRANCHY), 3, strategy)) == expected


def test_the_run_that_goes_on_upwards_comes_from_the_shallowest_leaf():
    trie = build_trie([[0, 1], [0, 2, 3], [0, 4, 5, 6]])  # children 1; 2 3; 4 5 6
    assert operations(plan(trie, 4, "branch+cut_tail"))[-1] == ("BACK", [0, 4, 5, 6], 4)
    assert operations(plan(trie, 4, "branch+cut_tail+order"))[-1] == ("BACK", [0, 1], 2)
    inner = build_trie([[0, 1, 2], [0, 1, 3], [0, 4, 5, 6]])  # a leaf goes before a fork, even if deeper
    assert operations(plan(inner, 4, "branch+cut_tail+order"))[-1] == ("BACK", [0, 4, 5, 6], 4)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 5, 16]))
def test_each_refinement_runs_no_more_than_the_one_before(seed, chunk_size):
    trie = random_trie(seed)
    whole, cut = plan(trie, chunk_size, "branch"), plan(trie, chunk_size, "branch+cut_tail")
    assert cut.forward_tokens_executed <= whole.forward_tokens_executed
    assert cut.backward_tokens_executed == whole.backward_tokens_executed
    segments = segments_of(trie)
    leaf = (segments.stop - segments.start)[segments.stop == segments.subtree_end]
    assert len(whole.row) - trie.num_rows == trie.num_rows
    assert len(cut.row) - trie.num_rows == trie.num_rows - np.minimum(leaf, chunk_size).sum()


# Packed


def test_leftovers_of_several_branches_share_a_chunk():
    schedule = plan(tree(2, 6, 6, 6), 5)  # branches 2-7, 8-13, 14-19: one row more than a chunk each
    assert operations(schedule) == [
        ("PUSH", [0, 1, 2, 8, 14], 5),
        ("BACK", [3, 4, 5, 6, 7], 5),
        ("BACK", [9, 10, 11, 12, 13], 5),
        ("BACK", [15, 16, 17, 18, 19], 5),
        ("BACK", [0, 1, 2, 8, 14], 5),
    ]


def test_a_gap_is_closed_by_the_top_of_a_split_branch():
    """Branches of 3 in chunks of 4: each chunk takes one and the end of another, whose top was pushed."""
    schedule = plan(tree(1, 3, 3, 3, 3), 4, cost=CostModel(launch=0))
    stats = schedule_stats(schedule)
    assert stats.backs == 4
    assert stats.work <= (3 * 13 + 1 + 4) / 39


def test_padding_is_kept_where_a_launch_costs_more():
    cheap = plan(tree(1, 3, 3, 3, 3), 4, cost=CostModel(launch=0))
    dear = plan(tree(1, 3, 3, 3, 3), 4, cost=CostModel(push=1000, launch=0))
    assert len(dear.row) - 13 == 1  # only the trunk
    assert len(cheap.row) - 13 > 1


def chunks_too_many(seed, chunk_size):
    """How many more chunks `packed` takes than rows need, where padding and launches cost most."""
    trie = random_trie(seed, num_sequences=20, max_length=30)
    schedule = plan(trie, chunk_size, cost=CostModel(backward=1e6, launch=1e6))
    return schedule_stats(schedule).backs - -(-trie.num_rows // chunk_size)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**6), st.sampled_from([2, 3, 5, 16]))
def test_packed_needs_at_most_one_chunk_more_than_there_can_be(seed, chunk_size):
    assert chunks_too_many(seed, chunk_size) in (0, 1)


@pytest.mark.parametrize("chunk_size", [2, 3, 5, 16])
def test_packed_almost_always_needs_as_few_chunks_as_there_can_be(chunk_size):
    """One more comes where the stack has no room for the top of the branch that would close a gap."""
    assert sum(chunks_too_many(seed, chunk_size) for seed in range(200)) <= 4


@pytest.mark.parametrize(("chunk_size", "most", "by_branch"), [(2048, 7, 18), (1024, 14, 19)])
def test_many_short_branches_need_few_chunks(chunk_size, most, by_branch):
    trie = short_branches()
    assert trie.num_rows == 12_900
    assert schedule_stats(plan(trie, chunk_size)).backs <= most
    assert schedule_stats(plan(trie, chunk_size, "branch+cut_tail+order")).backs == by_branch


def test_packed_is_close_to_the_bound_on_trees_of_a_thousand_branches():
    rng = np.random.default_rng(0)
    trie = build_trie(random_sequences(rng, 1000, 300, vocab=1000))
    for chunk_size in (64, 128, 256):
        stats = schedule_stats(plan(trie, chunk_size, cost=CostModel(launch=0)))
        assert stats.work <= stats.work_bound + 0.02
        assert stats.backs_over_full <= 1.02


def test_work_is_linear_in_the_number_of_branches():
    one, two = (
        schedule_stats(plan(build_trie(random_sequences(np.random.default_rng(1), n, 200, vocab=1000)), 64))
        for n in (500, 1000)
    )
    ratio = two.tree_tokens / one.tree_tokens
    executed = [3 * s.backward_tokens_executed + s.forward_tokens_executed for s in (one, two)]
    assert executed[1] / executed[0] == pytest.approx(ratio, rel=0.02)


def test_large_subtrees_come_first():
    """Branches of 2, 9 and 4 rows: a small one is not on the stack beside a large one."""
    assert operations(plan(tree(3, 2, 9, 4), 4, "packed+keep")) == [
        ("PUSH", [0, 1, 2, 5], 4),
        ("PUSH", [6, 7, 8, 9], 4),
        ("PUSH", [10, 11, 12, 13], 4),
        ("BACK", [10, 11, 12, 13], 4),
        ("BACK", [6, 7, 8, 9], 4),
        ("PUSH", [14, 15, 16, 17], 4),
        ("BACK", [14, 15, 16, 17], 4),
        ("PUSH", [3, 4], 2),
        ("BACK", [2, 3, 4, 5], 4),
        ("BACK", [0, 1], 2),
    ]


def test_kept_residuals_leave_nothing_to_run_twice():
    trie = short_branches()
    for chunk_size in (512, 1024, 2048):
        schedule = plan(trie, chunk_size, "packed+keep")
        assert schedule.keep_residuals
        assert sorted(schedule.row) == sorted([*range(trie.num_rows)] * 2)
        stats = schedule_stats(schedule)
        assert stats.backs <= -(-trie.num_rows // chunk_size) + 1
        assert (stats.work_bound, stats.work) == (1, pytest.approx(1, abs=0.04))
    cost = CostModel(launch=0)
    assert schedule_cost(schedule, cost) == pytest.approx(3 * trie.num_rows * stats.work)


# Against the best of all plans


def best_cost(trie, chunk_size, cost):
    """The least cost of any valid schedule: shortest path over (rows run backward, rows on the stack)."""
    T = trie.num_rows
    above = [sum(1 << r for r in path_rows(trie, q)[:-1]) for q in range(T)]
    below = [sum(1 << r for r in range(q + 1, int(trie.subtree_end[q]))) for q in range(T)]
    moves = []
    for size in range(1, chunk_size + 1):
        for rows in itertools.combinations(range(T), size):
            own = sum(1 << r for r in rows)
            context = int(np.bitwise_or.reduce([above[r] for r in rows])) & ~own
            under = int(np.bitwise_or.reduce([below[r] for r in rows])) & ~own
            moves.append((own, context, under, cost.launch + fit_width(size, chunk_size)))
    least = {(0, 0): 0.0}
    queue = [(0.0, 0, 0)]
    while queue:
        spent, done, stack = heapq.heappop(queue)
        if done == (1 << T) - 1:
            return spent
        if spent > least[done, stack]:
            continue
        for own, context, under, price in moves:
            if own & done or context & ~stack:
                continue
            after = []
            if not under & ~done:
                after.append((spent + cost.backward * price, done | own, stack & ~own))
            if not own & stack and (stack | own).bit_count() <= trie.longest_path + chunk_size:
                after.append((spent + cost.push * price, done, stack | own))
            for total, *state in after:
                if total < least.get(tuple(state), np.inf):
                    least[tuple(state)] = total
                    heapq.heappush(queue, (total, *state))
    raise AssertionError("no schedule")


@pytest.mark.parametrize("launch", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4])
def test_packed_against_brute_force(chunk_size, launch):
    cost = CostModel(launch=launch)
    ratios = []
    for seed in range(60):
        trie = random_trie(seed, num_sequences=5, max_length=6)
        if trie.num_rows > 9:
            continue
        packed = schedule_cost(plan(trie, chunk_size, cost=cost), cost)
        ratios.append(packed / best_cost(trie, chunk_size, cost))
    assert len(ratios) >= 20
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 1.1
    assert np.mean(ratios) <= 1.01
    assert np.mean(np.array(ratios) < 1 + 1e-12) >= 0.9
