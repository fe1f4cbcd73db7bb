"""Which groups start and which are trained on, without a clock: order, bound, replacements, staleness."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.collect.admission import Admission
from dta_jax.collect.order import Place, TaskOrder, derived_seed
from dta_jax.collect.records import Call, Ending, EpisodeRecord, Group, group_of_episodes
from dta_jax.generation.protocol import Completion


def group(place: Place, version: int = 0) -> Group:
    made = Completion(np.array([1], np.int32), np.zeros(1, np.float32), np.array([version], np.int32), "stop")
    call = Call("main", np.array([5], np.int32), made, 0.0)
    return group_of_episodes(place, [EpisodeRecord(0, 0, (call,), 0.0, Ending("done", False, {}))])


def admission(batch=2, staleness=0, resampled=2) -> Admission:
    return Admission(batch, max_staleness=staleness, max_resampled=resampled)


def start_all(a: Admission) -> list[Place]:
    started = []
    while a.capacity > 0:
        started.append(a.start())
    return started


def test_every_epoch_goes_through_all_tasks_in_an_order_of_its_own():
    order = TaskOrder(num_tasks=6, batch_groups=4, seed=0)
    tasks = [order.task(Place(step, number)) for step in range(1, 7) for number in range(4)]
    epochs = [tasks[i : i + 6] for i in range(0, 24, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert tasks != [TaskOrder(6, 4, seed=1).task(Place(s, n)) for s in range(1, 7) for n in range(4)]


def test_replacements_are_tasks_that_the_step_does_not_have():
    order = TaskOrder(num_tasks=6, batch_groups=4, seed=0)
    for step in range(1, 10):
        planned = {order.task(Place(step, number)) for number in range(4)}
        others = [order.task(Place(step, 4 + j)) for j in range(6 - len(planned))]
        assert sorted(others) == sorted(set(range(6)) - planned)
        assert order.task(Place(step, 4 + len(others))) == others[0]
    assert TaskOrder(num_tasks=2, batch_groups=4, seed=0).task(Place(1, 9)) in (0, 1)


def test_seeds_differ_between_steps_numbers_tasks_and_trials():
    order = TaskOrder(num_tasks=2, batch_groups=4, seed=0)
    seeds = [order.episode_seed(Place(s, n), k) for s in range(1, 9) for n in range(6) for k in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [
        order.episode_seed(Place(s, n), k) for s in range(1, 9) for n in range(6) for k in range(4)
    ]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derived_seed(0) != derived_seed(0, 0)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_nobody_runs_further_ahead_than_allowed(staleness):
    a = admission(batch=3, staleness=staleness)
    assert len(start_all(a)) == (staleness + 1) * 3
    for place in sorted(a.running)[:3]:
        a.accept(group(place))
    assert a.capacity == 0
    assert [g.place for g in a.take(1)] == [Place(1, 0), Place(1, 1), Place(1, 2)]
    assert a.capacity == 0, "the trainer has the batch, but its weights are not there"
    a.version = 1
    assert a.capacity == 3


def test_synchronous_groups_start_when_their_weights_are_there():
    a = admission()
    assert start_all(a) == [Place(1, 0), Place(1, 1)]
    for place in sorted(a.running):
        a.accept(group(place))
    assert a.take(1) is not None
    assert start_all(a) == []
    a.version = 1
    assert start_all(a) == [Place(2, 0), Place(2, 1)]


def test_the_oldest_groups_are_trained_on_first():
    a = admission(staleness=1)
    places = start_all(a)
    assert places == [Place(1, 0), Place(1, 1), Place(2, 0), Place(2, 1)]
    for place in reversed(places[1:]):
        a.accept(group(place))
    assert [g.place for g in a.take(1)] == [Place(1, 1), Place(2, 0)]
    a.accept(group(places[0]))
    assert [g.place for g in a.take(2)] == [Place(1, 0), Place(2, 1)]


def test_a_batch_can_wait_for_all_that_was_meant_for_it():
    a = admission(staleness=1)
    places = start_all(a)
    for place in places[1:]:
        a.accept(group(place))
    assert a.take(1, wait=True) is None
    a.reject(places[0])
    assert a.take(1, wait=True) is None
    assert start_all(a) == [Place(1, 2)]
    a.accept(group(Place(1, 2)))
    assert [g.place for g in a.take(1, wait=True)] == [Place(1, 1), Place(1, 2)]
    assert a.take(3, wait=True) is None, "the groups of step 3 did not even start"
    assert [g.place for g in a.take(2, wait=True)] == [Place(2, 0), Place(2, 1)]


def test_a_rejected_group_is_replaced_in_its_own_step():
    a = admission(staleness=1)
    start_all(a)
    a.reject(Place(1, 1))
    assert a.capacity == 1
    assert start_all(a) == [Place(1, 2)]
    a.reject(Place(1, 2))
    a.reject(Place(2, 0))
    assert start_all(a) == [Place(1, 3), Place(2, 2)]


def test_groups_with_a_token_beyond_the_bound_are_stale():
    a = admission(staleness=1)
    for place, version in zip(start_all(a), (0, 3, 2, 1), strict=True):
        a.accept(group(place, version))
    assert a.stale(2) == []
    assert a.stale(3) == [Place(1, 0)]
    assert a.stale(4) == [Place(1, 0), Place(2, 1)]
    a.drop(Place(1, 0))
    assert start_all(a) == [Place(1, 2)]


def test_equal_groups_are_replaced_until_the_bound_and_then_the_first_of_them_fill_the_batch():
    a = admission(batch=2, resampled=1)
    start_all(a)
    assert a.set_equal(group(Place(1, 1)))
    assert start_all(a) == [Place(1, 2)]
    assert not a.set_equal(group(Place(1, 2)))
    assert (a.capacity, a.take(1)) == (0, None)
    a.accept(group(Place(1, 0)))
    assert [g.place for g in a.take(1)] == [Place(1, 0), Place(1, 1)]
    a.version = 1
    assert start_all(a) == [Place(2, 0), Place(2, 1)]


def synchronous_batch(fates: list[str], resampled: int, order: list[int]) -> list[Place]:
    """The batch of step 1 when groups end in an order drawn as they run; their fates are by number."""
    a, picks = admission(batch=3, resampled=resampled), iter(order)
    start_all(a)
    while (batch := a.take(1)) is None:
        place = sorted(a.running)[next(picks) % len(a.running)]
        if fates[place.number] == "equal":
            a.set_equal(group(place))
        else:
            a.accept(group(place))
        start_all(a)
    assert not a.running
    return [g.place for g in batch]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["equal", "good"]), min_size=12, max_size=12),
    st.integers(0, 6),
    st.lists(st.integers(0, 5), min_size=20, max_size=20),
)
def test_a_synchronous_batch_does_not_depend_on_who_finishes_first(fates, resampled, order):
    expected = synchronous_batch(fates, resampled, [0] * 20)
    assert synchronous_batch(fates, resampled, order) == expected
    good = [n for n in range(3 + resampled) if fates[n] == "good"]
    equal = [n for n in range(3 + resampled) if fates[n] == "equal"]
    assert [place.number for place in expected] == sorted((good[:3] + equal)[:3])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2), st.booleans(), st.integers(0, 2**32))
def test_whatever_happens_no_group_is_lost_or_doubled(batch, staleness, resampled, wait, seed):
    """A run of random events, broken off and taken up again: every step gets its groups, none comes twice."""
    rng = np.random.default_rng(seed)
    a = admission(batch, staleness, resampled)
    first_version: dict[Place, int] = {}
    trained: list[Place] = []
    for step in range(1, 5):
        while True:
            first_version |= dict.fromkeys(start_all(a), step - 1)
            assert len(a.running) + len(a.ready) + (step - 1) * batch <= (staleness + step) * batch
            assert not (wait and a.stale(step))
            for place in a.stale(step):
                a.drop(place)
            first_version |= dict.fromkeys(start_all(a), step - 1)
            taken = a.take(step, wait=wait)
            if taken is not None:
                break
            place = sorted(a.running)[rng.integers(len(a.running))]
            event = rng.choice(["accept", "equal", "reject"])
            if event == "reject":
                a.reject(place)
            elif event == "equal":
                a.set_equal(group(place, first_version[place]))
            else:
                a.accept(group(place, first_version[place]))
        assert len(taken) == batch
        assert all(g.oldest_version >= step - 1 - staleness for g in taken)
        assert not wait or all(g.place.step == step for g in taken)
        trained += [g.place for g in taken]
        a.version = step
        if rng.random() < 0.5:
            state = json.loads(json.dumps(a.state()))
            kept = list(a.ready.values()) if rng.random() < 0.5 else []
            a = admission(batch, staleness, resampled)
            a.restore(state, kept)
    assert len(set(trained)) == 4 * batch


def test_a_state_restarts_what_ran_and_keeps_what_was_accepted():
    a = admission(batch=2, staleness=1)
    start_all(a)
    a.accept(group(Place(2, 0)))
    a.reject(Place(1, 0))
    state = json.loads(json.dumps(a.state()))
    assert (state["accepted"], state["restart"], state["next"]) == (
        [[2, 0]],
        [[1, 1], [1, 2], [2, 1]],
        [3, 0],
    )
    again = admission(batch=2, staleness=1)
    again.restore(state, [group(Place(2, 0))])
    assert start_all(again) == [Place(1, 1), Place(1, 2), Place(2, 1)]
    without = admission(batch=2, staleness=1)
    without.restore(state, [])
    assert start_all(without) == [Place(1, 1), Place(1, 2), Place(2, 0), Place(2, 1)]
    without.reject(Place(1, 1))
    assert start_all(without) == [Place(1, 3)]


def test_counts_of_old_steps_are_forgotten():
    a = admission(batch=1)
    for step in range(1, 30):
        start_all(a)
        a.reject(Place(step, 0))
        start_all(a)
        a.accept(group(Place(step, 1), step - 1))
        assert a.take(step) is not None
        a.version = step
    assert a.state()["replacements"] == {}
