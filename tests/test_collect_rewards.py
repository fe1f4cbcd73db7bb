"""Reward functions in worker processes: what they return, and how they are stopped."""

import asyncio
import contextlib
import os
import sys

import pytest

from dta_jax.collect.rewards import RewardError, RewardFunction, RewardProcesses
from dta_jax.errors import InputError
from tests import reward_functions


def scores(function, *calls, **settings):
    """The results of some calls at a time; what they raised stands in their place."""

    async def all_of_them():
        with contextlib.closing(RewardFunction(function, RewardProcesses(**settings))) as rewards:
            return await asyncio.gather(*(rewards.score(*call) for call in calls), return_exceptions=True)

    return asyncio.run(all_of_them())


def alive(pid: float) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def test_a_function_by_name_or_as_it_is():
    assert scores("tests.reward_functions:length", ("abc",), ("",), workers=1) == [3.0, 0.0]
    assert scores(reward_functions.length, ("x" * 300_000,), workers=1) == [300_000.0]


def test_workers_inherit_no_secrets(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("TASK_DATA", "there")
    calls = [("API_TOKEN",), ("TASK_DATA",), ("PATH",)]
    assert scores(reward_functions.environment, *calls, workers=1, keep_environment=("TASK_DATA",)) == [
        0,
        1,
        1,
    ]


def test_failures_are_told_apart_and_the_next_call_has_a_fresh_process():
    calls = [("raise",), ("exit",), ("eat",), ("nan",), ("text",), ("well",)]
    *failed, well = scores(reward_functions.behave, *calls, workers=1, retries=0)
    assert well == 1.0
    assert all(isinstance(error, RewardError) for error in failed)
    for error, words in zip(
        failed,
        ("ValueError: no answer found", "the process ended", "MemoryError", "nan", "could not convert"),
        strict=True,
    ):
        assert words in str(error)


def test_what_takes_too_long_is_killed():
    (error,) = scores(reward_functions.behave, ("sleep",), timeout=0.2, retries=1)
    assert "not done after 0.2 s" in str(error)


def test_a_failed_call_is_made_again(tmp_path):
    marker = str(tmp_path / "marker")
    assert scores(reward_functions.fails_once, (marker,), retries=1) == [0.5]


def test_workers_are_replaced_after_some_calls_and_end_with_the_function():
    first, second, third = scores(reward_functions.pid, (), (), (), workers=1, calls_per_worker=2)
    assert first == second != third
    assert not alive(first)
    assert not alive(third)


def test_a_cancelled_call_kills_its_worker():
    async def cancelled():
        with contextlib.closing(
            RewardFunction(reward_functions.behave, RewardProcesses(workers=1))
        ) as rewards:
            assert await rewards.score("well") == 1
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(rewards.score("sleep"), 0.1)
            return await rewards.score("well")

    assert asyncio.run(cancelled()) == 1


def test_functions_and_arguments_that_cannot_be_sent():
    with pytest.raises(InputError, match=r"function: expected module:name; got .*<lambda>"):
        RewardFunction(lambda: 1.0, RewardProcesses())
    (error,) = scores("tests.reward_functions:none_such", ())
    assert isinstance(error, InputError)
    assert "none_such: expected a function; got AttributeError" in str(error)
    (error,) = scores(reward_functions.length, ({1},))
    assert isinstance(error, InputError)
    with pytest.raises(InputError, match="RewardProcesses: timeout: expected seconds, above 0; got 0"):
        RewardProcesses(timeout=0)


def test_a_cluster_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    message = (
        r"^RewardProcesses: package: expected dta_jax\[ray\], installed; got no module named ray; pip install"
    )
    with pytest.raises(InputError, match=message):
        RewardFunction(reward_functions.length, RewardProcesses(ray_address="auto"))
