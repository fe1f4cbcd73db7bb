"""Environments and reward functions on a Ray cluster of this machine: as without it, and what goes wrong."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
import ray

from dta_jax.collect.loop import Collector
from dta_jax.collect.rewards import RewardError, RewardFunction, RewardProcesses
from dta_jax.collect.settings import Collect
from dta_jax.envs.bandit import Bandit
from dta_jax.envs.imported import ImportedEnvironment
from dta_jax.envs.on_ray import OnRay
from dta_jax.envs.protocol import Answer, Observation, Step
from dta_jax.errors import InputError
from tests import reward_functions
from tests.collect_fakes import FakeGenerator

pytestmark = pytest.mark.filterwarnings("ignore")  # other packages warn while they are imported

ANSWER = Answer(np.array([1, 2], np.int32), None, truncated=False)


@dataclass
class Misbehaving:
    """Episodes that go wrong, by task; what happened is written to files of a folder."""

    folder: str
    num_tasks = 4

    def episode(self, task, seed):
        return MisbehavingEpisode(Path(self.folder), task)


class MisbehavingEpisode:
    def __init__(self, folder, task):
        self.folder, self.task = folder, task

    async def start(self):
        return Step(Observation(tokens=np.array([self.task], np.int32)))

    async def step(self, answer):
        if self.task == 0:
            raise LookupError("no such flight")
        if self.task == 1:
            raise InputError("Flights", "table", expected="a file", actual="none", hint="write one")
        if self.task == 2:
            try:
                await asyncio.sleep(60)
            finally:
                (self.folder / "cancelled").touch()
        if not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Step(None, final_reward=1.0, info={"pid": float(os.getpid())}, stop_reason="done")

    async def close(self):
        (self.folder / f"closed {self.task}").touch()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def misbehaving(tmp_path):
    options = f'{{"folder": "{tmp_path}"}}'
    name = "tests.ray.test_ray:Misbehaving"
    inner = ImportedEnvironment(name, options=options, speaks="tokens", vocab_size=96)
    return OnRay(inner, actors=1, cpus_per_actor=0.5)


def scores(function, *calls, **settings):
    """The results of some calls at a time; what they raised stands in their place."""

    async def all_of_them():
        how = RewardProcesses(ray_address="auto", workers=1, **settings)
        with contextlib.closing(RewardFunction(function, how)) as rewards:
            return await asyncio.gather(*(rewards.score(*call) for call in calls), return_exceptions=True)

    return asyncio.run(all_of_them())


def gone(pid: float) -> bool:
    for _ in range(200):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def collected(environment, task_batches=1, **changes):
    settings = Collect(**{"group_size": 2, "retry_delay": 0.0, "stuck_after": 60.0, **changes})
    with Collector(environment, FakeGenerator(), settings, seed=3, chat=None, batch_groups=2) as collector:
        return collector.batch(1)


def test_rewards_of_a_cluster_and_a_worker_that_ends_with_them():
    assert scores(reward_functions.length, ("abc",), ("",)) == [3.0, 0.0]
    first, second, third = scores(reward_functions.pid, (), (), (), calls_per_worker=2)
    assert first == second != third
    assert gone(first)
    assert gone(third)


def test_a_reward_process_is_an_actors_child_and_has_its_limits(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    assert scores(reward_functions.environment, ("API_TOKEN",), ("PATH",)) == [0, 1]
    calls = [("raise",), ("eat",), ("nan",), ("well",)]
    *failed, well = scores(reward_functions.behave, *calls, retries=0)
    assert well == 1.0
    for error, words in zip(failed, ("ValueError: no answer found", "MemoryError", "nan"), strict=True):
        assert isinstance(error, RewardError)
        assert words in str(error)
    (parent,) = scores(reward_functions.parent, ())
    assert parent != os.getpid()


def test_what_takes_too_long_is_killed_and_what_failed_is_made_again(tmp_path):
    (error,) = scores(reward_functions.behave, ("sleep",), timeout=0.2, retries=0)
    assert isinstance(error, RewardError)
    assert "not done after 0.2 s" in str(error)
    assert scores(reward_functions.fails_once, (str(tmp_path / "marker"),), retries=1) == [0.5]


def test_an_actor_that_dies_is_an_error_and_the_next_call_has_another():
    async def killed():
        with contextlib.closing(
            RewardFunction(reward_functions.behave, RewardProcesses(workers=1, retries=0, ray_address="auto"))
        ) as rewards:
            assert await rewards.score("well") == 1
            call = asyncio.ensure_future(rewards.score("sleep"))
            await asyncio.sleep(0.2)
            (worker,) = rewards._alive
            ray.kill(worker._host)
            with pytest.raises(RewardError, match="no reward from the cluster"):
                await call
            return await rewards.score("well")

    assert asyncio.run(killed()) == 1


def test_a_function_that_cannot_be_imported_is_bad_input():
    (error,) = scores("tests.reward_functions:none_such", ())
    assert isinstance(error, InputError)
    assert "none_such: expected a function; got AttributeError" in str(error)


def test_a_batch_is_the_same_on_the_cluster_and_here():
    bandit = Bandit(contexts=3)
    here, there = collected(bandit), collected(OnRay(bandit, actors=2, cpus_per_actor=0.5))
    for field in fields(here.rollouts):
        np.testing.assert_array_equal(
            getattr(here.rollouts, field.name), getattr(there.rollouts, field.name), field.name
        )


def test_what_an_episode_raises_is_raised_here_and_it_is_closed(misbehaving, tmp_path):
    async def failed(task):
        episode = misbehaving.episode(task, 0)
        await episode.start()
        try:
            await asyncio.wait_for(episode.step(ANSWER), 1)
        finally:
            await episode.close()

    with pytest.raises(LookupError, match="no such flight"):
        asyncio.run(failed(0))
    with pytest.raises(InputError) as caught:
        asyncio.run(failed(1))
    assert str(caught.value) == "Flights: table: expected a file; got none; write one"
    with pytest.raises(TimeoutError):
        asyncio.run(failed(2))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"closed 0", "closed 1", "closed 2", "cancelled"}


def test_an_actor_that_dies_is_started_again(misbehaving):
    async def play():
        episode = misbehaving.episode(3, 0)
        await episode.start()
        return await episode.step(ANSWER)

    with pytest.raises(RuntimeError, match="its actor was started again, and the episode is lost"):
        asyncio.run(play())
    step = asyncio.run(play())
    assert step.final_reward == 1.0
    assert step.info["pid"] != os.getpid()


def test_a_connected_program_still_decides_about_sigterm():
    program = """if True:
        import os, signal, sys, threading, time
        from dta_jax.envs.ray_cluster import connected
        signal.signal(signal.SIGTERM, lambda *_: print("saving"))
        connect = lambda: connected("OnRay", "address", sys.argv[2])
        if sys.argv[1] == "main":
            connect()
        else:
            thread = threading.Thread(target=connect)
            thread.start()
            thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(4)
    """
    address = ray.get_runtime_context().gcs_address
    for thread in ("main", "other"):
        command = [sys.executable, "-c", program, thread, address]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "saving\n", "")


def test_a_cluster_that_is_not_there():
    program = """if True:
        from dta_jax.envs.bandit import Bandit
        from dta_jax.envs.on_ray import OnRay
        from dta_jax.errors import run_command
        run_command(lambda: OnRay(Bandit(), address="127.0.0.1:1").episode(0, 0))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: OnRay: address: expected the address of a Ray cluster; got 127.0.0.1:1:"
    )
    assert len(done.stderr.splitlines()) == 1
