"""Phases: whose time is counted, where, and that nothing is waited for unless it is asked for."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from dta_jax import phases
from dta_jax.phases import current, dispatch, note, phase, recording


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(phases, "time", found)
    return found


def test_time_is_that_of_the_innermost_phase(clock):
    told: list[str] = []
    with recording(told.append) as record:
        clock.now += 1
        with phase("gradient"):
            clock.now += 2
            for _ in range(2):
                with phase("back"):
                    clock.now += 4
            clock.now += 8
        with phase("update"):
            clock.now += 16
    assert record.seconds == {"gradient": 10.0, "back": 8.0, "update": 16.0}
    assert told == ["gradient", "update"]


def test_a_row_has_what_was_added_since_the_last(clock):
    with recording() as record:
        with phase("plan"):
            clock.now += 1
        assert record.take() == {"seconds_plan": 1.0, "compile_seconds": 0.0}
        with phase("save"):
            clock.now += 2
        note("environment", 5.0)
        assert record.take() == {"seconds_save": 2.0, "compile_seconds": 0.0}
    assert record.within == {"compile": 0.0, "environment": 5.0}


def test_a_phase_that_fails_is_counted_and_left(clock):
    def fail() -> None:
        with phase("a"):
            clock.now += 1
            raise LookupError

    with recording() as record:
        with pytest.raises(LookupError):
            fail()
        with phase("b"):
            clock.now += 2
    assert record.seconds == {"a": 1.0, "b": 2.0}


def test_without_a_record_and_in_other_threads_nothing_is_recorded():
    def elsewhere() -> None:
        with phase("plan"):
            seen.append(current())

    seen: list[object] = []
    elsewhere()
    with recording() as record:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == [None, None]
    assert record.seconds == {}
    assert current() is None


def test_compilation_is_told_whatever_thread_asked_for_it():
    with recording() as record:
        size = time.time_ns() % 1000 + 3  # of no program in the cache
        jax.jit(lambda x: jnp.cumsum(x) * size)(jnp.ones(size))
        thread = threading.Thread(target=lambda: jax.jit(lambda x: x - size)(jnp.ones(size)))
        before = record.within["compile"]
        thread.start()
        thread.join()
    assert 0 < before < record.within["compile"]


def test_the_device_is_waited_for_only_where_it_is_asked_for(monkeypatch):
    waited: list[object] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(x) or x)
    assert dispatch("back", lambda x, y: x + y, 1, y=2) == 3
    with recording() as record:
        assert dispatch("back", lambda x: x, 4) == 4
        assert (waited, record.seconds) == ([], {})
        record.waits = True
        assert dispatch("back", lambda x: x, 5) == 5
    assert waited == [5]
    assert record.seconds.keys() == {"back"}
