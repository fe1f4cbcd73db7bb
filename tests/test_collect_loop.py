"""The collector: deterministic when synchronous, bounded when ahead; nothing lost or doubled; no hang."""

import asyncio
import json
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.collect.evaluation import Evaluate, pass_rates
from dta_jax.collect.loop import Collected, Collector
from dta_jax.collect.order import Place, TaskOrder
from dta_jax.collect.settings import Collect
from dta_jax.collect.stream import CollectError
from dta_jax.envs.game import Hunt, TreasureHunt
from dta_jax.envs.protocol import Answer, Step
from dta_jax.errors import InputError
from dta_jax.generation.local import LocalSampler
from dta_jax.generation.protocol import Sampling
from tests.collect_fakes import FakeEnvironment, FakeGenerator, Seconds, log_normal
from tests.trees import make_model

SEED, BATCH, SIZE = 3, 2, 3


def settings(**changes) -> Collect:
    return Collect(**{"group_size": SIZE, "retry_delay": 0.0, "stuck_after": 20.0, **changes})


def collector(environment=None, generator=None, **changes) -> Collector:
    return Collector(
        environment or FakeEnvironment(),
        generator or FakeGenerator(),
        settings(**changes),
        seed=SEED,
        chat=None,
        batch_groups=BATCH,
    )


def run(steps, *, first=1, **parts) -> list[Collected]:
    """The batches of some steps, with new weights after each."""
    batches = []
    with collector(**parts) as c:
        for step in range(first, first + steps):
            batches.append(c.batch(step))
            c.publish(f"weights {step}", step)
    return batches


def seeds(batch: Collected) -> list[int]:
    """The seed of each episode: the environment shows it first."""
    return batch.rollouts.tokens[batch.rollouts.offsets[:-1]].tolist()


def planned_seeds(steps: range, numbers: range = range(BATCH), tasks: int = 5) -> list[int]:
    order = TaskOrder(tasks, BATCH, SEED)
    return [order.episode_seed(Place(s, n), k) for s in steps for n in numbers for k in range(SIZE)]


def check_groups(batch: Collected) -> None:
    """Whole groups, of one task each, in order."""
    rollouts = batch.rollouts
    assert batch.group.tolist() == np.repeat(np.arange(BATCH), SIZE).tolist()
    assert rollouts.trial.tolist() == list(range(SIZE)) * BATCH
    assert rollouts.episode.tolist() == list(range(SIZE * BATCH))
    assert all(len(set(rollouts.task_id[batch.group == g].tolist())) == 1 for g in range(BATCH))


def slow(salt: int) -> Seconds:
    return lambda seed: log_normal(0.003)(seed + salt)


@pytest.mark.parametrize("skip_equal", [False, True])
def test_a_synchronous_run_does_not_depend_on_who_finishes_first(skip_equal):
    def digests(salt: int) -> list[tuple[str, float]]:
        environment, generator = FakeEnvironment(seconds=slow(salt)), FakeGenerator(slow(salt + 1))
        batches = run(4, environment=environment, generator=generator, skip_equal=skip_equal, max_resampled=2)
        for batch in batches:
            check_groups(batch)
        return [(batch.rollouts.digest(), batch.metrics["groups_resampled"]) for batch in batches]

    expected = digests(0)
    assert len(set(expected)) == 4
    assert all(digests(salt) == expected for salt in (100, 200))
    assert any(resampled for _, resampled in expected) == skip_equal


@pytest.mark.parametrize("changes", [{}, {"max_concurrent": 4}, {"skip_equal": True, "max_resampled": 2}])
def test_in_lockstep_the_engine_is_asked_in_one_order(changes):
    def asked(salt: int, *, lockstep: bool) -> list[tuple[int, int]]:
        generator = FakeGenerator(slow(salt + 1))
        run(
            4,
            environment=FakeEnvironment(seconds=slow(salt)),
            generator=generator,
            lockstep=lockstep,
            **changes,
        )
        return generator.asked

    expected = asked(0, lockstep=True)
    assert all(asked(salt, lockstep=True) == expected for salt in (100, 200, 300))
    assert asked(100, lockstep=False) != asked(0, lockstep=False)
    together = [1 + running for _, running in expected]
    assert max(together) == min(BATCH * SIZE, changes.get("max_concurrent", BATCH * SIZE))


def test_in_lockstep_the_local_sampler_repeats_a_run_bit_for_bit(monkeypatch):
    model, params = make_model(vocab_size=64)

    def digests(salt: int) -> list[str]:
        rng, step = np.random.default_rng(salt), Hunt.step

        async def thinking(hunt: Hunt, answer: Answer) -> Step:
            await asyncio.sleep(rng.exponential(0.003))
            return await step(hunt, answer)

        with monkeypatch.context() as patch:
            patch.setattr(Hunt, "step", thinking)
            sampler = LocalSampler(rows=4, max_context=128, prefill_chunk=32, decode_steps=2)
            drawing = {"lockstep": True, "sampling": Sampling(max_new_tokens=5), "stuck_after": 200.0}
            with collector(TreasureHunt(tasks=3), sampler.make(model, params), **drawing) as c:
                first = c.batch(1).rollouts
                c.publish(jax.tree.map(lambda leaf: leaf * jnp.float32(1.05), params), 1)
                return [first.digest(), c.batch(2).rollouts.digest()]

    expected = digests(0)
    assert all(digests(salt) == expected for salt in (1, 2))


def test_in_lockstep_failures_hold_nobody_up_for_good():
    environment = FakeEnvironment(fault=lambda seed, count: "raise" if seed % 3 == 0 and count < 2 else "")
    generator = FakeGenerator(fault=lambda seed, count: "hang" if seed % 5 == 0 and not count else "")
    batches = run(3, environment=environment, generator=generator, lockstep=True, episode_timeout=0.3)
    assert sum(batch.metrics["episodes_retried"] for batch in batches) > 0
    for batch in batches:
        check_groups(batch)


def test_a_synchronous_run_goes_through_the_tasks_as_planned():
    batches = run(3)
    assert [seeds(batch) for batch in batches] == [planned_seeds(range(s, s + 1)) for s in (1, 2, 3)]
    assert all(
        (batch.rollouts.versions[batch.rollouts.chosen()] == s).all() for s, batch in enumerate(batches)
    )
    assert batches[0].metrics.keys() >= {
        "episodes", "episodes_rejected", "reward_mean", "reward_min", "reward_max", "info_answered",
        "turns_mean", "completion_tokens", "wait_seconds", "staleness_max", "groups_stale_dropped",
        "groups_resampled",
    }  # fmt: skip
    json.dumps([batch.metrics for batch in batches], allow_nan=False)


def test_a_run_that_is_taken_up_again_repeats_the_uninterrupted_one():
    whole = run(4)
    generator = FakeGenerator()
    generator.version = 2
    again = run(2, first=3, generator=generator)
    assert [b.rollouts.digest() for b in again] == [b.rollouts.digest() for b in whole[2:]]


def test_failures_that_pass_leave_no_trace_in_a_synchronous_batch():
    def once(seed: int, count: int) -> str:
        return ("fail", "garbage", "")[seed % 3] if count == 0 else ""

    faulty = run(3, generator=FakeGenerator(fault=once), retries=4)
    assert [b.rollouts.digest() for b in faulty] == [b.rollouts.digest() for b in run(3)]
    assert sum(b.metrics["episodes_retried"] for b in faulty) > 5
    assert sum(b.metrics["episodes_rejected"] for b in faulty) == 0


def wait_until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


@pytest.mark.parametrize("staleness", [0, 2])
def test_generation_goes_ahead_while_the_trainer_works_and_no_further_than_allowed(staleness):
    environment = FakeEnvironment()
    with collector(environment, max_staleness=staleness) as c:
        for step in (1, 2):
            c.batch(step)
            allowed = (staleness + step) * BATCH * SIZE
            wait_until(lambda allowed=allowed: len(environment.tasks) >= allowed and not environment.open)
            time.sleep(0.02)
            assert len(environment.tasks) == allowed
            c.publish(None, step)
            if staleness == 0:
                time.sleep(0.02)
                assert len(environment.tasks) == allowed, "the next batch was not asked for yet"


def faults(share: float):
    """A share of all calls fails, hangs or returns garbage, whatever happened before."""

    def fault(seed: int, count: int) -> str:
        rng = np.random.default_rng([seed, count])
        return str(rng.choice(["fail", "hang", "garbage"])) if rng.random() < share else ""

    return fault


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_fifth_of_all_calls_fails_and_no_episode_is_lost_or_doubled(staleness):
    environment = FakeEnvironment(seconds=log_normal(0.002))
    generator = FakeGenerator(log_normal(0.002), faults(0.2))
    batches = run(
        5,
        environment=environment,
        generator=generator,
        max_staleness=staleness,
        retries=2,
        episode_timeout=0.4,
    )
    for step, batch in enumerate(batches, start=1):
        check_groups(batch)
        versions = batch.rollouts.versions[batch.rollouts.chosen()]
        assert ((step - 1 - versions >= 0) & (step - 1 - versions <= staleness)).all()
        assert len(batch.rollouts.completion_spans) == 2 * SIZE * BATCH
    trained = [seed for batch in batches for seed in seeds(batch)]
    assert len(set(trained)) == len(trained) == 5 * SIZE * BATCH
    assert set(trained) <= set(planned_seeds(range(1, 6 + staleness), range(BATCH + 64)))
    assert sum(batch.metrics["episodes_retried"] for batch in batches) > 5
    assert environment.open == 0


def test_a_group_that_fails_for_good_is_replaced_whole():
    victim = planned_seeds(range(1, 2))[1]
    environment = FakeEnvironment(fault=lambda seed, count: "raise" if seed == victim else "")
    (batch,) = run(1, environment=environment, retries=1)
    assert seeds(batch) == planned_seeds(range(1, 2), range(1, 3))
    assert batch.metrics["rejected_environment"] == batch.metrics["groups_rejected"] == 1
    assert batch.metrics["retried_environment"] == 1


class Late(FakeEnvironment):
    """The first group that starts ends when weights of version 3 are there; the engine tells."""

    generator: FakeGenerator

    def episode(self, task, seed):
        episode = super().episode(task, seed)
        if seed in planned_seeds(range(1, 2), range(1)):
            episode.step = self.late(episode.step)
        return episode

    def late(self, step):
        async def wait_and_step(answer):
            while self.generator.version < 3:
                await self.generator.moment()
            return await step(answer)

        return wait_and_step


@pytest.mark.parametrize("turns", [1, 2])
def test_what_is_too_old_when_it_is_used_is_dropped_kept_or_fails(turns):
    def late(on_stale: str) -> list[Collected]:
        environment = Late(turns=turns)
        environment.generator = FakeGenerator(log_normal(0.001))
        return run(
            7, environment=environment, generator=environment.generator, max_staleness=1, on_stale=on_stale
        )

    dropped, kept, first = late("drop"), late("keep"), set(planned_seeds(range(1, 2), range(1)))
    assert sum(batch.metrics["groups_stale_dropped"] for batch in dropped) >= 1
    assert max(batch.metrics["staleness_max"] for batch in dropped) <= 1
    assert not any(first & set(seeds(batch)) for batch in dropped)
    assert sum(batch.metrics["groups_stale_dropped"] for batch in kept) == 0
    assert max(batch.metrics["staleness_max"] for batch in kept) >= 3
    assert sum(first <= set(seeds(batch)) for batch in kept) == 1
    with pytest.raises(
        CollectError, match="group 0 of step 1: a token of version 0 is more than max_staleness = 1"
    ):
        late("fail")


def test_a_batch_that_waits_has_what_was_meant_for_it_and_nothing_stale():
    generator = FakeGenerator(log_normal(0.003, sigma=1.5))
    batches = run(6, generator=generator, max_staleness=2, on_stale="wait")
    assert [seeds(batch) for batch in batches] == [planned_seeds(range(s, s + 1)) for s in range(1, 7)]
    assert max(batch.metrics["staleness_max"] for batch in batches) <= 2
    assert sum(batch.metrics["groups_stale_dropped"] for batch in batches) == 0


@pytest.mark.parametrize("on_stale", ["drop", "wait"])
def test_what_is_seen_ahead_is_what_is_trained_on(on_stale):
    """The next batch is there before the weights that it is trained with; until then it is only accepted."""
    trained = []
    with collector(generator=FakeGenerator(log_normal(0.003)), max_staleness=1, on_stale=on_stale) as c:
        for step in range(1, 5):
            rollouts, group = c.ahead(step)
            found = c.batch(step)
            np.testing.assert_array_equal(rollouts.tokens, found.rollouts.tokens)
            np.testing.assert_array_equal(group, found.group)
            assert found.metrics["staleness_max"] <= 1
            trained += seeds(found)
            ahead, _ = c.ahead(step + 1)
            state, accepted = c.state()
            assert state["step"] == step
            waiting = accepted.tokens[accepted.offsets[:-1]].tolist()
            assert set(ahead.tokens[ahead.offsets[:-1]].tolist()) <= set(waiting)
            assert not set(trained) & set(waiting)
            with pytest.raises(InputError, match=f"weights for step {step + 1}: expected version {step}"):
                c.batch(step + 1)
            c.publish(None, step)


@pytest.mark.parametrize("with_rollouts", [True, False])
def test_a_snapshot_loses_no_accepted_rollout_and_trains_none_twice(with_rollouts):
    trained, generator = [], FakeGenerator(log_normal(0.003))
    with collector(generator=generator, max_staleness=2, on_stale="wait") as c:
        for step in (1, 2, 3):
            trained += seeds(c.batch(step))
            c.publish(None, step)
        wait_until(lambda: c.state().accepted is not None)
        state, accepted = c.state()
    state = json.loads(json.dumps(state))
    waiting = accepted.tokens[accepted.offsets[:-1]].tolist()
    resumed = FakeGenerator()
    environment = FakeEnvironment()
    with collector(environment, resumed, max_staleness=2, on_stale="wait") as c:
        c.restore(state, accepted if with_rollouts else None)
        c.publish(None, 3)
        for step in (4, 5, 6):
            batch = c.batch(step)
            check_groups(batch)
            trained += seeds(batch)
            c.publish(None, step)
        c.batch(7)
    assert sorted(trained) == sorted(planned_seeds(range(1, 7)))
    assert set(waiting) <= set(trained)
    begun = set(environment.began)
    assert (set(waiting) <= begun) == (not with_rollouts)


def test_a_snapshot_of_another_run_is_refused():
    with collector() as c:
        c.batch(1)
        c.publish(None, 1)
        state, accepted = c.state()
        assert accepted is None
        with pytest.raises(InputError, match="restore: expected a call before the first batch"):
            c.restore(state, None)
    with (
        collector(FakeEnvironment(num_tasks=4)) as c,
        pytest.raises(InputError, match="num_tasks: expected 5, as the run began; got 4"),
    ):
        c.restore(state, None)
    generator = FakeGenerator()
    generator.version = 3
    with collector(generator=generator) as c:
        c.restore(state, None)
        with pytest.raises(InputError, match="step: expected 2; got 4"):
            c.batch(4)


def test_steps_and_versions_come_in_order():
    with collector() as c:
        with pytest.raises(InputError, match="step: expected at least 1; got 0"):
            c.batch(0)
        with pytest.raises(InputError, match="weights for step 3: expected version 2; got version 0"):
            c.batch(3)
        c.batch(1)
        with pytest.raises(InputError, match="step: expected 2; got 1"):
            c.batch(1)
        with pytest.raises(
            InputError, match="weights for step 2: expected version 1; got version 0; publish"
        ):
            c.batch(2)
        c.publish(None, 1)
        with pytest.raises(InputError, match="version: expected above 1; got 1"):
            c.publish(None, 1)
    with pytest.raises(InputError, match=r"environment\.num_tasks: expected at least 1; got 0"):
        collector(FakeEnvironment(num_tasks=0))


def hanging() -> FakeGenerator:
    return FakeGenerator(fault=lambda seed, count: "hang")


def no_collector_threads() -> bool:
    return not any(thread.name == "collector" for thread in threading.enumerate())


def test_when_nothing_moves_it_says_so_with_numbers():
    environment = FakeEnvironment()
    with collector(environment, hanging(), stuck_after=0.3) as c, pytest.raises(CollectError) as caught:
        c.batch(1)
    message = str(caught.value)
    assert message.startswith("batch 1: no model call and no step of an environment was completed for 0.")
    assert "0 of 2 groups accepted, 2 running, room for 0 more" in message
    assert environment.open == 0
    assert no_collector_threads()


def test_an_environment_that_blocks_the_loop_is_noticed():
    free = threading.Event()

    class Blocking(FakeEnvironment):
        def episode(self, task, seed):
            free.wait(20)
            return super().episode(task, seed)

    with collector(Blocking(), stuck_after=0.3) as c:
        with pytest.raises(CollectError, match="no model call and no step of an environment was completed"):
            c.batch(1)
        free.set()
    assert no_collector_threads()


def test_when_everything_is_rejected_it_stops_with_the_reason():
    broken = FakeEnvironment(fault=lambda seed, count: "raise")
    with (
        collector(broken, max_rejected=3, retries=0) as c,
        pytest.raises(
            CollectError, match=r"3 groups rejected in a row, none accepted; .* LookupError: no such"
        ),
    ):
        c.batch(1)


def test_bad_input_and_bugs_of_an_engine_end_the_run_as_they_are():
    for error in (
        InputError("prompt", "tokens", expected="ids below 90", actual=91),
        ZeroDivisionError("a bug"),
    ):

        class Broken(FakeGenerator):
            async def generate(self, prompt, sampling, *, seed, error=error):
                raise error

        environment = FakeEnvironment()
        with collector(environment, Broken()) as c, pytest.raises(type(error), match=str(error)):
            c.batch(1)
        assert environment.open == 0


def test_closing_in_the_middle_cancels_what_runs():
    environment, generator = FakeEnvironment(), hanging()
    c = collector(environment, generator, max_staleness=3)
    waiting = threading.Thread(target=give_up, args=(c,))
    waiting.start()
    wait_until(lambda: generator.running == 4 * BATCH * SIZE)
    c.close()
    c.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert (generator.running, environment.open, generator.closed) == (0, 0, True)
    assert no_collector_threads()


def give_up(c: Collector) -> None:
    with pytest.raises(CollectError, match="closed"):
        c.batch(1)


@pytest.fixture
def interruptible():
    """Shells start what runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_run_at_once():
    environment, generator = FakeEnvironment(), hanging()

    def interrupt() -> None:
        wait_until(lambda: generator.running == BATCH * SIZE)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), collector(environment, generator) as c:
        c.batch(1)
    thread.join(10)
    assert (generator.running, environment.open, generator.closed) == (0, 0, True)
    assert no_collector_threads()


def test_no_more_episodes_run_than_allowed():
    generator = FakeGenerator(log_normal(0.002))
    run(2, generator=generator, max_concurrent=4, max_staleness=3)
    assert generator.most_running == 4


def test_evaluation_measures_and_leaves_the_training_alone():
    how = Evaluate(tasks=4, trials=3, sampling=Sampling(max_new_tokens=2), success=1.25)
    plain = run(2)
    with collector() as c:
        first = c.batch(1)
        row = c.evaluate(how, seed=SEED)
        assert c.evaluate(how, seed=SEED) == row
        c.publish("weights 1", 1)
        second = c.batch(2)
    assert [b.rollouts.digest() for b in (first, second)] == [b.rollouts.digest() for b in plain]
    assert (row["episodes"], row["episodes_rejected"], row["completion_tokens"]) == (12, 0, 12 * 2 * 2)
    assert [t["task"] for t in row["per_task"]] == [0, 1, 2, 3]
    for task in row["per_task"]:
        assert task["trials"] == 3
        assert task["reward_mean"] == pytest.approx(task["successes"] / 3 + 0.25)
    assert 0 < row["pass@1"] < 1
    assert row["pass@1"] == pytest.approx(row["pass^1"])
    assert row["pass@1"] == pytest.approx(row["reward_mean"] - 0.25)
    assert row["pass@3"] == np.mean([t["successes"] > 0 for t in row["per_task"]])
    assert row["pass^3"] == np.mean([t["successes"] == 3 for t in row["per_task"]])
    json.dumps(row, allow_nan=False)


def test_evaluation_counts_what_failed_and_lets_it_into_no_mean():
    broken = FakeEnvironment(num_tasks=2, fault=lambda seed, count: "raise" if seed % 2 else "")
    with collector(broken, retries=0) as c:
        row = c.evaluate(Evaluate(trials=6), seed=0)
        assert row["episodes"] + row["rejected_environment"] == 12
        assert 0 < row["episodes"] < 12
        with pytest.raises(InputError, match="Evaluate: tasks: expected at most 2; got 3"):
            c.evaluate(Evaluate(tasks=3), seed=0)
        nothing = c.evaluate(
            Evaluate(), seed=0, environment=FakeEnvironment(num_tasks=1, fault=lambda seed, count: "raise")
        )
        assert nothing == {
            "episodes": 0, "episodes_rejected": 1, "rejected_environment": 1,
            "per_task": [{"task": 0, "trials": 0, "successes": 0, "reward_mean": None}],
        }  # fmt: skip


def test_rewards_that_add_up_to_a_little_less_still_succeed():
    for missing, expected in ((1e-9, 1.0), (1e-3, 0.0)):
        reward = 0.75 - missing
        with collector(FakeEnvironment(reward=lambda *_, reward=reward: reward)) as c:
            assert c.evaluate(Evaluate(), seed=0)["pass@1"] == expected


def test_pass_rates_by_hand():
    """Of 4 trials 2 succeed, of 2 trials 1: pairs with a success 5/6 and 1, pairs of successes 1/6 and 0."""
    row = pass_rates([(4, 2), (2, 1), (0, 0)])
    assert row["pass@1"] == row["pass^1"] == 0.5
    assert row["pass@2"] == pytest.approx((5 / 6 + 1) / 2)
    assert row["pass^2"] == pytest.approx((1 / 6) / 2)
    assert (row["pass@3"], row["pass^3"]) == (1, 0)
    assert "pass@5" not in row
