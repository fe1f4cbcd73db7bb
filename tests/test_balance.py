import itertools
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.balance import AUTO, METHODS, RowCost, ScheduleCost, balance, compare_methods, rank_trie
from dta_jax.balance_baselines import dfs_contiguous, ffd_tokens, ffd_tree
from dta_jax.balance_search import Effort, Partition, descend, place_subtrees, refine, search
from dta_jax.balance_tree import cost_tree, leaf_of_sequences
from dta_jax.errors import InputError
from dta_jax.planner import CostModel
from dta_jax.rollouts import samples_from_rollouts
from dta_jax.schedule import compile_schedule
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.trie import build_trie
from tests.naive import naive_trie, random_sequences

ALL = [AUTO, *METHODS]
tries = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)
ranks = st.integers(1, 5)


def prefixes(sequences):
    return {tuple(map(int, s[: i + 1])) for s in sequences for i in range(len(s))}


def largest_part(sequences, rank, num_ranks):
    """Naive tree tokens of the largest rank."""
    parts = [[s for s, r in zip(sequences, rank, strict=True) if r == k] for k in range(num_ranks)]
    return max(len(prefixes(part)) for part in parts)


def brute_force(sequences, num_ranks):
    """The smallest largest rank over all K^N assignments of sequences."""
    every = itertools.product(range(num_ranks), repeat=len(sequences))
    return min(largest_part(sequences, rank, num_ranks) for rank in every)


def unit_tree(trie):
    return cost_tree(trie, np.ones(trie.num_rows))


def deep_sharing(tasks, seed=0):
    """Groups of eight rollouts; at each turn a rollout stays with the one that it follows 4 times in 5."""
    spec = SyntheticRollouts(
        tasks=tasks, trials=8, turns=8, branching=0.2, system_tokens=60, user_tokens=40, seed=seed
    )
    return build_trie(samples_from_rollouts(generate_rollouts(spec)).sequences)


@pytest.mark.parametrize("method", ALL)
@given(sequences=tries, num_ranks=ranks)
@settings(max_examples=40)
def test_every_sequence_on_one_rank_and_tokens_as_counted_naively(method, sequences, num_ranks):
    assignment = balance(build_trie(sequences), num_ranks, method=method)
    parts = assignment.sequences()
    assert assignment.rank.dtype == np.int32
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(sequences)))
    naive = [len(prefixes([sequences[i] for i in part])) for part in parts]
    report = assignment.report
    assert report.tree_tokens.tolist() == naive
    assert report.cost.tolist() == naive
    assert report.sequences.tolist() == [len(part) for part in parts]
    assert report.flat_tokens.tolist() == [sum(len(sequences[i]) for i in part) for part in parts]


@pytest.mark.parametrize("method", ALL)
@given(sequences=tries, num_ranks=ranks, random=st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_permuting_the_sequences_permutes_the_ranks(method, sequences, num_ranks, random):
    order = list(range(len(sequences)))
    random.shuffle(order)
    rank = balance(build_trie(sequences), num_ranks, method=method).rank
    permuted = balance(build_trie([sequences[i] for i in order]), num_ranks, method=method).rank
    np.testing.assert_array_equal(permuted, rank[order])


@given(
    sequences=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=6),
    num_ranks=st.integers(1, 3),
)
@settings(max_examples=60)
def test_lower_bounds_hold_for_the_best_of_all_assignments(sequences, num_ranks):
    trie = build_trie(sequences)
    best = brute_force(sequences, num_ranks)
    report = balance(trie, num_ranks).report
    assert report.lower_bound <= best <= report.max_tree_tokens
    assert unit_tree(trie).lower_bound(num_ranks) <= best


@pytest.mark.parametrize("seed", range(12))
def test_small_tries_are_balanced_optimally(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, 7, 12)
    for num_ranks in (2, 3):
        got = balance(build_trie(sequences), num_ranks).report.max_tree_tokens
        assert got == brute_force(sequences, num_ranks)


@given(sequences=tries, num_ranks=ranks)
@settings(max_examples=40)
def test_auto_is_as_good_as_every_method(sequences, num_ranks):
    trie = build_trie(sequences)
    auto = balance(trie, num_ranks).report
    others = {m: balance(trie, num_ranks, method=m).report.max_tree_tokens for m in METHODS}
    assert auto.max_tree_tokens == min(others.values()) == others[auto.winner]
    assert auto.method == AUTO


@given(sequences=tries, pair=st.floats(0, 4), num_ranks=ranks)
@settings(max_examples=40)
def test_cost_with_attention_is_the_sum_of_visible_pairs(sequences, pair, num_ranks):
    trie = build_trie(sequences)
    extra = np.arange(trie.num_rows) % 3
    assignment = balance(trie, num_ranks, RowCost(token=2.0, pair=pair, rows=extra))
    row_of = {}
    for sequence, tail in zip(sequences, trie.tail, strict=True):
        row = int(tail)
        for length in range(len(sequence), 0, -1):
            row_of[tuple(sequence[:length])] = row
            row = int(trie.parent[row])
    for part, cost in zip(assignment.sequences(), assignment.report.cost, strict=True):
        naive = sum(2.0 + pair * len(p) + extra[row_of[p]] for p in prefixes([sequences[i] for i in part]))
        assert cost == pytest.approx(naive, rel=1e-12)


def test_no_sequences():
    assignment = balance(build_trie([]), 3)
    assert [part.tolist() for part in assignment.sequences()] == [[], [], []]
    assert assignment.report.imbalance == 1.0
    assert assignment.report.efficiency == 1.0


@pytest.mark.parametrize("method", ALL)
def test_more_ranks_than_sequences_leaves_ranks_empty(method):
    assignment = balance(build_trie([[1, 2], [1, 3]]), 4, method=method)
    assert sorted(assignment.report.sequences.tolist()) == [0, 0, 1, 1]
    assert sorted(assignment.report.tree_tokens.tolist()) == [0, 0, 2, 2]
    assert assignment.report.lower_bound == (3 + 3 * 1) / 4


@pytest.mark.parametrize("method", ALL)
def test_duplicates_and_prefixes_follow_the_longest(method):
    assignment = balance(build_trie([[1, 2, 3], [1], [1, 2, 3], [1, 2], [1, 4], [1, 4]]), 2, method=method)
    assert len(set(assignment.rank[[0, 2, 3]].tolist())) == 1
    assert assignment.rank[4] == assignment.rank[5] != assignment.rank[0]


def test_common_tokens_end_where_a_sequence_does():
    assert balance(build_trie([[1, 2, 3, 4], [1, 2]]), 2).report.lower_bound == (4 + 2) / 2
    assert balance(build_trie([[1, 2], [3]]), 2).report.lower_bound == 3 / 2
    assert balance(build_trie([[1, 2]] * 3), 5).report.lower_bound == 2


# Root of 2 tokens; under it leaves of 6, 5, and a fork of 3 tokens into leaves of 2 and 1.
HAND = [[0, 0, 1, *[1] * 5], [0, 0, 2, *[2] * 4], [0, 0, 3, 3, 3, 4, 4], [0, 0, 3, 3, 3, 5]]


def test_published_methods_drawn_by_hand():
    tree = unit_tree(build_trie(HAND))
    assert tree.path_cost[tree.leaf].tolist() == [8, 7, 7, 6]
    # Longest first: 8 | 7, then 7 to the second (8 | 14), then 6 to the first.
    assert ffd_tokens(tree, 2).tolist() == [0, 1, 1, 0]
    # In order: 8 | 7, then 5 to the second (8 | 12), then 4 to the first (12 | 12).
    assert ffd_tree(tree, 2).tolist() == [0, 1, 1, 0]
    # Parts 13 | 8, 8 | 13 and 17 | 6: the largest is 13 in the first two; the greedy pass fills the first.
    assert dfs_contiguous(tree, 2).tolist() == [0, 0, 1, 1]
    assert tree.loads(dfs_contiguous(tree, 2), 2).tolist() == [13, 8]
    # Nothing contiguous is better than [8, 13], and mixing loses 3 tokens: {6, 1} | {5, 2} is 12 | 12.
    assert tree.loads(search(tree, 2), 2).max() == 12


def test_pieces_are_the_largest_subtrees_below_the_limit():
    tree = unit_tree(build_trie(HAND))
    assert place_subtrees(tree, 2, 100.0, Effort()).tolist() == [0, 0, 0, 0]
    # Pieces 6, 6 (the fork), 5: 8 | 8, then 5 to the first.
    assert place_subtrees(tree, 2, 6.0, Effort()).tolist() == [0, 0, 1, 1]


@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
@settings(max_examples=60)
def test_predicted_loads_of_exchanges_are_exact(seed, num_ranks):
    rng = np.random.default_rng(seed)
    tree = unit_tree(build_trie(random_sequences(rng, 12, 20)))
    partition = Partition(tree, rng.integers(0, num_ranks, len(tree.leaf)), num_ranks)
    for _ in range(6):
        exchanges = partition.exchanges(partition.heaviest)
        if not exchanges:
            break
        before = partition.load.copy()
        best = exchanges[0]
        partition.apply(best)
        assert partition.load[[best.a, best.b]].max() == best.worst < before[best.a]
        np.testing.assert_array_equal(partition.load, tree.loads(partition.owner, num_ranks))
        untouched = np.setdiff1d(np.arange(num_ranks), [best.a, best.b])
        np.testing.assert_array_equal(partition.load[untouched], before[untouched])


def test_no_single_exchange_is_overlooked(rng):
    """After `descend`, trying every pair of subtrees from scratch finds nothing better."""
    tree = unit_tree(build_trie(random_sequences(rng, 14, 30)))
    partition = Partition(tree, rng.integers(0, 3, len(tree.leaf)), 3)
    descend(partition, bound=0.0)
    a, largest = partition.heaviest, partition.load.max()
    for b in range(3):
        for give, take in itertools.product(range(len(tree.cost)), [None, *range(len(tree.cost))]):
            owner = partition.owner.copy()
            given = partition.leaves_under(a, give)
            taken = partition.leaves_under(b, take) if take is not None else given[:0]
            inside = set(given.tolist()) & set(taken.tolist())
            if a == b or inside or not len(given):
                continue
            owner[given], owner[taken] = b, a
            apart = take is None or not nested(tree, give, take)
            assert not apart or tree.loads(owner, 3)[[a, b]].max() >= largest * (1 - 1e-9)


def nested(tree, m, n):
    return m <= n < tree.end[m] or n <= m < tree.end[n]


def test_a_search_without_effort_left_still_distributes_everything():
    trie = deep_sharing(4)
    tree = unit_tree(trie)
    effort = Effort(0)
    partition = Partition(tree, np.zeros(len(tree.leaf), np.int64), 4, effort)
    assert effort.spent
    descend(partition, tree.lower_bound(4))
    assert partition.load.tolist() == [tree.cost.sum(), 0, 0, 0]


@pytest.mark.parametrize("num_ranks", [8, 16])
def test_deep_sharing_is_kept(num_ranks):
    trie = deep_sharing(16)
    got = {m: balance(trie, num_ranks, method=m).report for m in ALL}
    assert got["ffd_tokens"].max_tree_tokens >= 1.3 * got[AUTO].max_tree_tokens
    assert got[AUTO].max_tree_tokens <= got["dfs_contiguous"].max_tree_tokens
    assert got[AUTO].imbalance <= 1.05
    assert got[AUTO].lost_sharing < got["ffd_tokens"].lost_sharing / 4


def test_wide_tries_are_balanced_to_the_bound(rng):
    sizes = rng.lognormal(3, 0.7, 64).astype(int) + 1
    sequences = [[0] * 50 + [i + 1] * int(n) for i, n in enumerate(sizes)]
    for num_ranks in (2, 4, 8):
        assert balance(build_trie(sequences), num_ranks).report.imbalance <= 1.005


@given(sequences=tries, data=st.data())
@settings(max_examples=40)
def test_trie_of_a_rank_is_built_from_its_sequences(sequences, data):
    chosen = data.draw(st.lists(st.integers(0, len(sequences) - 1), unique=True))
    trie = build_trie(sequences)
    part, row = rank_trie(trie, np.array(chosen, np.int64))
    want = naive_trie([sequences[i] for i in chosen])
    for name in ("token", "parent", "depth", "subtree_end", "tail"):
        assert getattr(part, name).dtype == np.int32, name
        np.testing.assert_array_equal(getattr(part, name), getattr(want, name), err_msg=name)
    np.testing.assert_array_equal(trie.token[row], part.token)


def test_schedule_cost_counts_padding_and_three_times_backward():
    trie = build_trie([[1, 2, 3, 4, 5], [1, 2, 6]])
    table = compile_schedule(trie, np.zeros(0, np.int32), chunk_size=4)
    cost = ScheduleCost(chunk_size=4)
    want = 3.0 * table.backward_tokens_executed + table.forward_tokens_executed
    want += CostModel().launch * (1 + 2 * table.kind).sum()
    assert cost.of(trie, np.ones(6)) == want
    # Every row once more for each visible pair: by hand over the table.
    weight = np.repeat(np.where(table.kind == 1, 3.0, 1.0), np.diff(table.offset))
    pairs = float(weight @ (trie.depth[table.row] + 1.0))
    assert ScheduleCost(4, row=RowCost(pair=0.5)).of(trie, 1 + 0.5 * (trie.depth + 1.0)) == want + 0.5 * pairs


@pytest.mark.parametrize("num_ranks", [3, 5])
def test_balancing_compiled_costs(num_ranks):
    trie = deep_sharing(5, seed=1)
    cost = ScheduleCost(chunk_size=64)
    auto = balance(trie, num_ranks, cost)
    for part, load in zip(auto.sequences(), auto.report.cost, strict=True):
        own, row = rank_trie(trie, part)
        assert load == cost.of(own, np.ones(len(row)))
    assert auto.report.total_cost == cost.of(trie, np.ones(trie.num_rows))
    for method in METHODS:
        assert auto.report.cost.max() <= balance(trie, num_ranks, cost, method).report.cost.max()


def test_refinement_follows_the_measured_cost():
    """Each leaf costs 40 more than its rows: an even split of rows is no longer even."""
    tree = unit_tree(deep_sharing(6))

    def measure(leaves):
        return float(tree.loads(np.where(leaves, 0, 1), 2)[0] + 40 * leaves.sum())

    owner = search(tree, 4)
    cost = np.array([measure(owner == r) for r in range(4)])
    refined, refined_cost = refine(tree, owner, cost, measure)
    assert refined_cost.tolist() == [measure(refined == r) for r in range(4)]
    assert refined_cost.max() / refined_cost.mean() < 1.03 < cost.max() / cost.mean()
    assert refined_cost.max() < cost.max()


def test_compiled_cost_of_empty_ranks_is_zero():
    report = balance(build_trie([[1, 2, 3]]), 3, ScheduleCost(chunk_size=2)).report
    assert sorted(report.cost.tolist())[:2] == [0.0, 0.0]
    assert report.tree_tokens.sum() == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "balance: num_ranks: expected at least 1; got 0"),
        ((2, None, "best"), "got 'best'"),
        ((2, RowCost(token=-1.0)), "RowCost: cost of row 0: expected finite, not negative; got -1.0"),
        ((2, RowCost(rows=np.array([0.0, np.nan, 0.0]))), "cost of row 1"),
        ((2, RowCost(rows=np.zeros(2))), "RowCost: rows: expected shape (3,); got (2,)"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(InputError) as error:
        balance(build_trie([[1, 2], [1, 3]]), *arguments)
    assert message in str(error.value)


def test_report_as_text_json_and_picture():
    report = balance(build_trie(HAND), 2, method="dfs_contiguous").report
    lines = report.text().splitlines()
    assert lines[1].split() == ["0", "2", "15", "13", "13", "#" * 32]
    assert lines[2].split() == ["1", "2", "13", "8", "8", "#" * 20]
    assert lines[3] == (
        "dfs_contiguous: largest rank 13 tree tokens, 1.2381 x the lower bound 10.5; "
        "lost sharing 2 tree tokens; predicted efficiency 0.731"
    )
    figures = json.loads(json.dumps(report.to_json()))
    assert figures["per_rank"] == {
        "sequences": [2, 2],
        "flat_tokens": [15, 13],
        "tree_tokens": [13, 8],
        "cost": [13.0, 8.0],
    }
    assert (figures["max_tree_tokens"], figures["sum_tree_tokens"]) == (13, 21)
    assert (figures["lower_bound"], figures["lost_sharing"]) == (10.5, 2)
    bars = ET.fromstring(report.svg()).findall("{http://www.w3.org/2000/svg}rect")
    assert float(bars[1].get("width")) / float(bars[0].get("width")) == pytest.approx(8 / 13, abs=1e-3)


def test_comparison_of_methods_has_the_figures_that_scripts_read():
    rows = list(compare_methods(build_trie(HAND), [2, 3], ["ffd_tokens", AUTO]))
    assert [(row["ranks"], row["method"]) for row in rows] == list(
        itertools.product([2, 3], ["ffd_tokens", AUTO])
    )
    for row in rows:
        assert {"max_tree_tokens", "sum_tree_tokens", "lower_bound", "imbalance", "seconds"} <= row.keys()
        assert row["imbalance"] == row["max_tree_tokens"] / row["lower_bound"] >= 1
        assert row["seconds"] > 0


def test_leaves_of_inner_sequences():
    trie = build_trie([[1], [1, 2], [1, 3], [1, 3, 4], [1, 3, 5]])
    assert leaf_of_sequences(trie).tolist() == [0, 0, 1, 1, 2]
