import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.errors import InputError
from dta_jax.schedule import (
    STRATEGIES,
    ScheduleError,
    check_schedule,
    compile_forward_schedule,
    compile_schedule,
    operands,
    round_slots,
)
from dta_jax.schedule_stats import stack_heights
from dta_jax.slots import assign_slots
from dta_jax.trie import build_trie
from dta_jax.types import BACK, NO_PARENT, NO_SLOT, PUSH
from tests.naive import naive_slots, path_rows, random_sequences

FORK = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 7]]  # rows: 0 -> {1 -> 2 -> {3, 4}, 5 -> 6}

tries = st.builds(
    lambda seed, n, length: build_trie(random_sequences(np.random.default_rng(seed), n, length)),
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(1, 12),
)
chunk_sizes = st.sampled_from([1, 2, 3, 5, 8, 200])


def random_entries(trie, seed):
    """Any rows but roots, some of them several times, in no order."""
    candidates = np.flatnonzero(trie.parent != NO_PARENT)
    if not len(candidates):
        return np.zeros(0, np.int32)
    return np.random.default_rng(seed).choice(candidates, size=len(candidates) + 3).astype(np.int32)


def table(schedule):
    """(kind, rows, slots, entries) of every operation."""
    return [
        (
            "PUSH" if schedule.kind[o] == PUSH else "BACK",
            schedule.row[schedule.offset[o] : schedule.offset[o + 1]].tolist(),
            schedule.slot[schedule.offset[o] : schedule.offset[o + 1]].tolist(),
            schedule.entry[schedule.entry_offset[o] : schedule.entry_offset[o + 1]].tolist(),
        )
        for o in range(schedule.num_ops)
    ]


@settings(deadline=None)
@given(tries, chunk_sizes, st.integers(0, 9))
def test_every_rule_holds(trie, chunk_size, seed):
    entry_row = random_entries(trie, seed)
    check_schedule(compile_schedule(trie, entry_row, chunk_size=chunk_size))
    check_schedule(compile_forward_schedule(trie, entry_row, chunk_size=chunk_size))


@settings(deadline=None)
@given(tries, chunk_sizes, st.integers(0, 9), st.booleans())
def test_operands_say_what_the_table_says(trie, chunk_size, seed, forward):
    compile_ = compile_forward_schedule if forward else compile_schedule
    schedule = compile_(trie, random_entries(trie, seed), chunk_size=chunk_size)
    ancestors = [set(path_rows(trie, row)) for row in range(trie.num_rows)]
    S = schedule.stack_slots
    owner: dict[int, int] = {}
    for op, (kind, rows, slots, entries) in zip(operands(schedule), table(schedule), strict=True):
        W, n = op.width, len(rows)
        assert (op.kind, op.count, len(op.token)) == ({"PUSH": PUSH, "BACK": BACK}[kind], n, W)
        assert op.token.tolist() == trie.token[rows].tolist() + [0] * (W - n)
        assert op.position.tolist() == trie.depth[rows].tolist() + [0] * (W - n)
        assert op.slot.tolist() == slots + [NO_SLOT] * (W - n)
        for array in (op.token, op.position, op.slot, op.q_start, op.q_end, op.entry_source):
            assert array.dtype == np.int32
        queries = np.arange(W)[:, None]
        got = (op.q_start <= queries) & (queries < op.q_end)
        if kind == "BACK":
            owner = {slot: row for slot, row in owner.items() if row not in rows}
        keys = [owner.get(slot, NO_PARENT) for slot in range(S)] + rows
        want = np.zeros((W, S + W), bool)
        for q, row in enumerate(rows):
            want[q, : S + n] = [k in ancestors[row] for k in keys]
        want[range(n, W), range(S + n, S + W)] = True
        np.testing.assert_array_equal(got, want)
        assert (op.q_start[op.q_start >= op.q_end] == 0).all()
        assert (op.q_end[op.q_start >= op.q_end] == 0).all()
        assert schedule.entry[op.entry_start : op.entry_stop].tolist() == entries
        sources = [keys[k] for k in op.entry_source]
        assert sources == trie.parent[schedule.entry_row[entries]].tolist()
        if kind == "PUSH":
            owner |= {slot: row for row, slot in zip(rows, slots, strict=True) if slot != NO_SLOT}


@settings(deadline=None)
@given(tries, chunk_sizes)
def test_forward_runs_each_row_once_in_full_chunks(trie, chunk_size):
    schedule = compile_forward_schedule(trie, np.zeros(0, np.int32), chunk_size=chunk_size)
    assert schedule.row.tolist() == list(range(trie.num_rows))
    assert schedule.num_ops == -(-trie.num_rows // chunk_size)
    assert (schedule.slot < trie.longest_path).all()


def test_forward_table_drawn_by_hand():
    schedule = compile_forward_schedule(build_trie(FORK), np.array([6, 3, 3, 1]), chunk_size=3)
    assert table(schedule) == [
        ("PUSH", [0, 1, 2], [0, 1, 2], [3]),
        ("PUSH", [3, 4, 5], [-1, -1, 1], [1, 2]),
        ("PUSH", [6], [-1], [0]),
    ]


def test_mask_of_the_docstring():
    trie = build_trie([[1, 2, 3], [1, 4]])
    schedule = dataclasses.replace(
        compile_schedule(trie, np.zeros(0, np.int32), chunk_size=4),
        kind=np.array([PUSH, BACK, BACK]),
        width=np.array([1, 4, 1]),
        offset=np.array([0, 1, 4, 5]),
        row=np.array([0, 1, 2, 3, 0]),
        slot=np.array([1, -1, -1, -1, 1]),
        entry_offset=np.zeros(4, np.int64),
        stack_slots=3,
    )
    check_schedule(schedule)
    back = list(operands(schedule))[1]
    queries = np.arange(4)[:, None]
    mask = (back.q_start <= queries) & (queries < back.q_end)
    drawn = """
        .x. x...
        .x. xx..
        .x. ..x.
        ... ...x
    """
    assert ["".join(".x"[int(v)] for v in r) for r in mask] == [
        r.replace(" ", "") for r in drawn.split("\n")[1:-1]
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        back.kind = PUSH


@settings(deadline=None)
@given(tries, chunk_sizes, st.sampled_from(STRATEGIES), st.integers(0, 4))
def test_slots_are_where_the_rule_puts_them(trie, chunk_size, strategy, spare):
    """On a stack as low as can be, too: the fewer slots are spare, the more they lie about."""
    schedule = compile_schedule(trie, np.zeros(0, np.int32), chunk_size=chunk_size, strategy=strategy)
    assert schedule.slot.tolist() == naive_slots(schedule, schedule.stack_slots)
    low = int(stack_heights(schedule).max()) + spare
    got = assign_slots(trie, schedule.kind, schedule.offset, schedule.row, low)
    assert got.tolist() == naive_slots(schedule, low)


def test_a_piece_that_fits_nowhere_lies_in_the_longest_runs():
    """Six rows fill the stack; 0, 3, 4 leave. A path of 2 lies in the run of 2, a path of 3 everywhere."""
    trie = build_trie([[t] for t in range(6)] + [[6, 7, 8]])
    kind, offset = np.array([PUSH, BACK, PUSH]), np.array([0, 6, 9, 12])
    row = np.array([0, 1, 2, 3, 4, 5, 0, 3, 4, 6, 7, 8])
    assert assign_slots(trie, kind, offset, row, 6).tolist()[-3:] == [0, 3, 4]
    assert assign_slots(trie, kind, np.array([0, 6, 9, 11]), row[:11], 6).tolist()[-2:] == [3, 4]
    row[6:9] = [0, 2, 5]
    more = np.insert(row, 8, 4)  # 0, 2, 4, 5 leave: the run of 2, then the lowest of the others
    assert assign_slots(trie, kind, np.array([0, 6, 10, 13]), more, 6).tolist()[-3:] == [0, 4, 5]
    with pytest.raises(AssertionError, match="the plan needs more than 5 stack slots"):
        assign_slots(trie, kind, offset, row, 5)


def test_no_rows_make_an_empty_table():
    trie, none = build_trie([]), np.zeros(0, np.int32)
    for schedule in (
        compile_schedule(trie, none, chunk_size=4),
        compile_forward_schedule(trie, none, chunk_size=4),
    ):
        assert schedule.num_ops == 0
        check_schedule(schedule)
        assert list(operands(schedule)) == []
    assert schedule.stack_slots == 1  # no program has a stack of nothing


def test_rounded_slots_are_few_and_close():
    for slots in range(1, 300):
        rounded = round_slots(slots)
        assert slots <= rounded <= max(slots, 9 * slots / 8)
        assert rounded == round_slots(rounded)
    assert len({round_slots(s) for s in range(1024, 2049)}) == 9


def test_a_given_stack_is_kept_or_refused():
    trie, none = build_trie(FORK), np.zeros(0, np.int32)
    for slots in (6, 40):
        assert compile_schedule(trie, none, chunk_size=2, stack_slots=slots).stack_slots == slots
    with pytest.raises(InputError, match="stack_slots: expected at least 6; got 5"):
        compile_schedule(trie, none, chunk_size=2, stack_slots=5)
    with pytest.raises(InputError, match="stack_slots: expected at least 4; got 3"):
        compile_forward_schedule(trie, none, chunk_size=2, stack_slots=3)
    with pytest.raises(InputError, match="chunk_size: expected at least 1; got 0"):
        compile_schedule(trie, none, chunk_size=0)


# One table that is right, and every way to break it.


def right():
    """Rows 0 -> {1 -> 2 -> {3, 4}, 5 -> 6} in chunks of 3, entries on rows 3, 4, 6, 6."""
    schedule = compile_schedule(build_trie(FORK), np.array([6, 3, 4, 6]), chunk_size=3)
    return dataclasses.replace(
        schedule,
        kind=np.array([PUSH, BACK, BACK, BACK]),
        width=np.array([3, 3, 3, 2]),
        offset=np.array([0, 3, 5, 8, 10]),
        row=np.array([0, 1, 2, 3, 4, 2, 5, 6, 0, 1]),
        slot=np.array([0, 1, 2, -1, -1, 2, -1, -1, 0, 1]),
        entry_offset=np.array([0, 0, 2, 4, 4]),
        entry=np.array([1, 2, 0, 3]),
    )


def test_the_right_table_is_accepted():
    check_schedule(right())
    assert table(right()) == [
        ("PUSH", [0, 1, 2], [0, 1, 2], []),
        ("BACK", [3, 4], [-1, -1], [1, 2]),
        ("BACK", [2, 5, 6], [2, -1, -1], [0, 3]),
        ("BACK", [0, 1], [0, 1], []),
    ]


def edited(field, index, value):
    array = getattr(right(), field).copy()
    array[index] = value
    return {field: array}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (edited("row", 5, 5), "do not ascend"),
        (edited("row", 7, 7), "outside the trie"),
        (edited("kind", 0, 2), "unknown kind"),
        (edited("kind", 0, BACK), "backward before its descendants"),
        (edited("kind", 3, PUSH), "row 0 is pushed twice"),
        (edited("kind", 1, PUSH), "row 3 is pushed but not kept"),
        (edited("width", 1, 4), "width 4 is not one of"),
        (edited("width", 0, 2), "3 rows in a width of 2"),
        (edited("offset", 1, 2), "row 2 is said to be in slot 2, but is in -1"),
        (edited("offset", 4, 9), "offset must ascend from 0 to 10"),
        (edited("slot", 2, 1), "slot 1 still belongs to row 1"),
        (edited("slot", 2, NO_SLOT), "row 2 is pushed but not kept"),
        (edited("slot", 2, 99), "slot outside the stack"),
        (edited("slot", 5, 1), "row 2 is said to be in slot 1, but is in 2"),
        (edited("slot", 5, NO_SLOT), "row 2 is said to be in slot -1, but is in 2"),
        (edited("slot", 6, 3), "row 5 is said to be in slot 3, but is in -1"),
        (edited("entry", 0, 2), "exactly once"),
        (edited("entry", [0, 1], [2, 1]), "order of their rows"),
        (edited("entry", [1, 2], [0, 2]), "entry of row 6, which it does not run"),
        (edited("entry_offset", 1, 2), "a PUSH evaluates entries"),
        (edited("entry_offset", 2, 1), "entry of row 4, which it does not run"),
        (edited("entry_offset", 4, 5), "entry_offset must ascend from 0 to 4"),
        (edited("entry_row", 1, 0), "entry of row 0, which it does not run"),
        ({"stack_slots": 2}, "slot outside the stack"),
        ({"keep_residuals": True}, "row 4 was not pushed, so has no residuals"),
    ],
)
def test_a_corrupted_table_is_refused(changes, message):
    with pytest.raises(ScheduleError, match=message):
        check_schedule(dataclasses.replace(right(), **changes))


def rebuilt(ops, entries=()):
    """A table from (kind, rows, slots) over the same trie."""
    rows, slots = [r for _, r, _ in ops], [s for _, _, s in ops]
    entry_row = np.array(entries, np.int32)
    op_of = {row: o for o, (kind, rows_, _) in enumerate(ops) if kind == BACK for row in rows_}
    order = sorted(range(len(entries)), key=lambda e: (op_of[entries[e]], entries[e]))
    counts = np.bincount([op_of[row] for row in entries], minlength=len(ops))
    return dataclasses.replace(
        right(),
        kind=np.array([kind for kind, _, _ in ops]),
        width=np.full(len(ops), 3),
        offset=np.cumsum([0] + [len(r) for r in rows]),
        row=np.concatenate(rows),
        slot=np.concatenate(slots),
        entry_offset=np.append(0, np.cumsum(counts)),
        entry=np.array(order, np.int64),
        entry_row=entry_row,
    )


N = NO_SLOT


@pytest.mark.parametrize(
    ("ops", "entries", "message"),
    [
        # a row never run backward; one run twice; a parent before its child
        ([(PUSH, [0], [0]), (BACK, [5, 6], [N, N])], (), "row 0 was never run backward"),
        ([(PUSH, [0, 5], [0, 1]), (BACK, [6], [N]), (BACK, [6], [N])], (), "row 6 is run backward twice"),
        ([(PUSH, [0], [0]), (BACK, [5], [N])], (), "row 5 is run backward before its descendants"),
        # context: never pushed; pushed too late; gone already
        ([(BACK, [3, 4], [N, N])], (), "row 3 needs its ancestor 2"),
        ([(PUSH, [1, 2], [0, 1])], (), "row 1 needs its ancestor 0"),
        ([(PUSH, [0], [0]), (BACK, [5, 6], [N, N]), (PUSH, [0], [1])], (), "row 0 is pushed twice"),
        # a slot given away before its owner's BACK; a row pushed after its BACK
        (
            [(PUSH, [0, 5], [0, 1]), (BACK, [6], [N]), (PUSH, [1, 2], [1, 2])],
            (),
            "slot 1 still belongs to row 5",
        ),
        ([(PUSH, [0], [0]), (BACK, [5, 6], [N, N]), (PUSH, [5], [1])], (), "row 5 is pushed after its BACK"),
        # loss on a first token
        (
            [
                (PUSH, [0], [0]),
                (BACK, [5, 6], [N, N]),
                (PUSH, [1], [1]),
                (BACK, [2, 3, 4], [N, N, N]),
                (BACK, [0, 1], [0, 1]),
            ],
            (0,),
            "entry of row 0, which has no parent",
        ),
    ],
)
def test_an_order_that_breaks_a_rule_is_refused(ops, entries, message):
    with pytest.raises(ScheduleError, match=message):
        check_schedule(rebuilt(ops, entries))


def test_a_stack_higher_than_a_path_and_a_chunk_is_refused():
    spider = build_trie([[1, 2, b, 4] for b in range(3)])  # root path of 2 and three legs of 2
    good = compile_schedule(spider, np.zeros(0, np.int32), chunk_size=1)
    hoard = dataclasses.replace(
        good,
        kind=np.array([PUSH] * 5 + [BACK] * 8),
        width=np.full(13, 1),
        offset=np.arange(14),
        row=np.array([0, 1, 2, 4, 6, 7, 6, 5, 4, 3, 2, 1, 0]),
        slot=np.array([0, 1, 2, 3, 4, N, 4, N, 3, N, 2, 1, 0]),
        entry_offset=np.zeros(14, np.int64),
        stack_slots=8,
    )
    check_schedule(hoard)  # 5 rows = a path of 4 and a chunk of 1
    with pytest.raises(ScheduleError, match="5 rows on the stack, at most 4 allowed"):
        check_schedule(
            dataclasses.replace(hoard, trie=dataclasses.replace(spider, depth=spider.depth // 2 + 1))
        )


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("slot", 0, NO_SLOT, "row 3 needs its ancestor 0"),
        ("slot", 5, 0, "slot 0 still belongs to row 0"),
        ("row", 6, 5, "row 5 is pushed twice"),
    ],
)
def test_a_corrupted_forward_table_is_refused(field, index, value, message):
    good = compile_forward_schedule(build_trie(FORK), np.zeros(0, np.int32), chunk_size=3)
    array = getattr(good, field).copy()
    array[index] = value
    with pytest.raises(ScheduleError, match=message):
        check_schedule(dataclasses.replace(good, **{field: array}))
