"""Planning in the background: the same plans, one ahead at most, errors where they belong, no hanging."""

import threading
import traceback

import numpy as np
import pytest

from dta_jax.errors import InputError
from dta_jax.plan_ahead import PlanAhead
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.tree_engine import TreeEngine
from tests.trees import SHAPE, random_samples

WAIT = 30  # seconds until a thread that does not come is a failure
ENGINE = TreeEngine.for_batches(
    Qwen3(Qwen3Config(**SHAPE)), chunk_size=4, strategy="packed", longest=12, entries=128
)


class Recorder:
    """A `make` that says when it begins and waits until it may go on."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.threads: set[str] = set()
        self.has_begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def __call__(self, step: int) -> int:
        self.begun.append(step)
        self.threads.add(threading.current_thread().name)
        self.has_begun.release()
        assert self.may_end.acquire(timeout=WAIT)
        return step * step


def test_plans_are_those_of_the_foreground():
    def make(step):
        samples = random_samples(step)
        return samples, ENGINE.plan(samples)

    with PlanAhead(make, last=6) as plans:
        for step in range(1, 7):
            (samples, got), (want_samples, want) = plans.get(step), make(step)
            for name in ("kind", "width", "offset", "row", "slot", "entry", "entry_offset", "entry_row"):
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
            np.testing.assert_array_equal(got.trie.token, want.trie.token)
            np.testing.assert_array_equal(samples.values["weight"], want_samples.values["weight"])


def test_the_next_step_is_planned_without_being_asked_for_and_no_step_after_it():
    make = Recorder()
    with PlanAhead(make, last=3) as plans:
        make.may_end.release()
        assert plans.get(1) == 1
        for _ in (1, 2):
            assert make.has_begun.acquire(timeout=WAIT)
        make.may_end.release()
        assert make.begun == [1, 2]
        make.may_end.release()
        assert plans.get(2) == 4
        assert plans.get(3) == 9
        assert make.begun == [1, 2, 3]  # nothing behind the last step, and nothing twice
    assert make.threads.isdisjoint({threading.current_thread().name})


def test_steps_in_another_order_are_planned_when_asked_for():
    calls = []

    def make(step):
        calls.append(step)
        return -step

    with PlanAhead(make, last=9) as plans:
        assert [plans.get(step) for step in (5, 9, 2, 3, 3)] == [-5, -9, -2, -3, -3]
    assert calls[:3] == [5, 6, 9]


def test_errors_come_at_the_step_that_needs_the_plan():
    def fails_at_two(step):
        if step == 2:
            raise InputError("ROLLOUTS.npz", "tokens", expected="ids", actual="none")
        return step

    with PlanAhead(fails_at_two, last=4) as plans:
        assert plans.get(1) == 1
        with pytest.raises(InputError, match="tokens: expected ids; got none") as error:
            plans.get(2)
        assert "fails_at_two" in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
        assert plans.get(3) == 3


def test_an_error_that_nobody_needs_is_not_heard():
    def make(step):
        return 1 // (2 - step)

    with PlanAhead(make, last=2) as plans:
        assert plans.get(1) == 1


def test_arithmetic_is_checked_as_in_the_foreground():
    def make(step):
        return np.ones(1) / np.zeros(1)

    with np.errstate(divide="raise"), PlanAhead(make, last=1) as plans, pytest.raises(FloatingPointError):
        plans.get(1)


def test_closing_waits_for_nothing():
    make = Recorder()
    plans = PlanAhead(make, last=9)
    make.may_end.release()
    plans.get(1)
    for _ in (1, 2):
        assert make.has_begun.acquire(timeout=WAIT)
    plans.close()  # step 2 is being planned, and will not end before the next line
    make.may_end.release()
    plans.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        plans.get(2)
