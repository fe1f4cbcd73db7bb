import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_jax.errors import InputError
from dta_jax.trie import build_trie, entry_rows, leafize
from dta_jax.types import NO_PARENT, Samples
from tests.naive import naive_trie, path_rows

FIELDS = ("token", "parent", "depth", "subtree_end", "tail")


def assert_same(got, want):
    for name in FIELDS:
        assert getattr(got, name).dtype == np.int32, name
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


def test_branch_inside_a_path():
    trie = build_trie([[1, 2, 3, 4], [1, 2, 5]])
    assert trie.token.tolist() == [1, 2, 3, 4, 5]
    assert trie.depth.tolist() == [0, 1, 2, 3, 2]
    assert trie.parent.tolist() == [NO_PARENT, 0, 1, 2, 1]


def test_three_sequences_drawn_by_hand():
    trie = build_trie([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 7]])
    assert trie.token.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert trie.depth.tolist() == [0, 1, 2, 3, 3, 1, 2]
    assert trie.subtree_end.tolist() == [7, 5, 5, 4, 5, 7, 7]
    rows = [entry_rows(trie, np.full(n, i), np.arange(n)).tolist() for i, n in enumerate((4, 4, 3))]
    assert rows == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6]]


def test_parent_of_a_late_insertion():
    trie = build_trie([[1, 2], [1, 3], [1, 2, 4]])
    row = int(np.flatnonzero(trie.token == 4)[0])
    assert trie.token[trie.parent[row]] == 2


@pytest.mark.parametrize(
    "sequences",
    [
        [[1]],
        [[1], [2], [3]],
        [[1, 2], [1, 2], [1, 2]],
        [[1, 2], [1, 2, 3]],
        [[1, 2, 3], [1, 2], [1]],
        [[7, 7, 7, 1], [7, 7, 7, 2], [7, 7, 8], [9]],
        [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]],
        [[256, 1], [1, 256], [65536], [255]],
    ],
)
def test_odd_shapes(sequences):
    assert_same(build_trie(sequences), naive_trie(sequences))


def test_no_sequences_make_an_empty_trie():
    trie = build_trie([])
    assert (trie.num_rows, trie.longest_path, len(trie.tail)) == (0, 0, 0)


sequences_strategy = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=12)


@given(sequences_strategy)
def test_equals_the_naive_trie(sequences):
    trie = build_trie(sequences)
    assert_same(trie, naive_trie(sequences))
    for i, sequence in enumerate(sequences):
        rows = entry_rows(trie, np.full(len(sequence), i), np.arange(len(sequence)))
        assert rows.tolist() == path_rows(trie, trie.tail[i])
        assert trie.token[rows].tolist() == list(sequence)


@given(sequences_strategy, st.randoms(use_true_random=False))
def test_the_order_of_sequences_only_permutes_tail(sequences, random):
    order = list(range(len(sequences)))
    random.shuffle(order)
    trie, shuffled = build_trie(sequences), build_trie([sequences[i] for i in order])
    for name in FIELDS[:-1]:
        np.testing.assert_array_equal(getattr(trie, name), getattr(shuffled, name))
    assert shuffled.tail.tolist() == trie.tail[order].tolist()


@given(sequences_strategy)
def test_ancestors_are_intervals(sequences):
    trie = build_trie(sequences)
    for q in range(trie.num_rows):
        inside = np.flatnonzero((np.arange(trie.num_rows) <= q) & (q < trie.subtree_end))
        assert inside.tolist() == path_rows(trie, q)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([], "sequences: sequence 1: expected at least one token; got an empty sequence"),
        ([3, -1], "sequences: sequence 1: expected ids in 0 .. 2147483647; got -1"),
        ([2**31], "sequences: sequence 1: expected ids in 0 .. 2147483647; got 2147483648"),
        ([0.5], "sequences: sequence 1: expected a vector of integer ids; got float64[1]"),
        ([[1]], "sequences: sequence 1: expected a vector of integer ids; got int64[1, 1]"),
    ],
)
def test_bad_sequences_are_one_clear_line(sequence, message):
    with pytest.raises(InputError) as error:
        build_trie([[1, 2], sequence])
    assert str(error.value) == message


@pytest.mark.parametrize("position", [-1, 2])
def test_positions_outside_their_sequence_are_refused(position):
    with pytest.raises(InputError, match=r"position of entry 1: expected 0 <= position <= 1; got "):
        entry_rows(build_trie([[1, 2], [1, 3, 4]]), np.array([1, 0]), np.array([2, position]))


@given(sequences_strategy)
def test_leaves_carry_the_entries_of_their_prefixes(sequences):
    arrays = [np.array(s, np.int32) for s in sequences]
    pairs = [(i, p) for i, s in enumerate(arrays) for p in range(1, len(s))]
    sequence, position = np.array(pairs, np.int32).reshape(-1, 2).T
    trie = build_trie(arrays)
    leaves = leafize(trie, Samples(arrays, sequence, position, {"n": np.arange(len(pairs))}))
    as_tuples = {tuple(s.tolist()) for s in arrays}
    want = {s for s in as_tuples if not any(o != s and o[: len(s)] == s for o in as_tuples)}
    assert sorted(tuple(s.tolist()) for s in leaves.sequences) == sorted(want)
    assert leaves.values["n"].tolist() == list(range(len(pairs)))
    for (i, p), leaf, at in zip(pairs, leaves.sequence, leaves.position, strict=True):
        assert leaves.sequences[leaf][: at + 1].tolist() == arrays[i][: p + 1].tolist()
