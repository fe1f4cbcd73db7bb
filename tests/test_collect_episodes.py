"""One episode at a time: limits, retries, and failures that are never a reward."""

import asyncio
import dataclasses

import numpy as np
import pytest

from dta_jax.collect.episodes import EpisodeFailure, EpisodeRunner
from dta_jax.collect.lockstep import Lockstep
from dta_jax.collect.order import derived_seed
from dta_jax.collect.records import EpisodeRecord
from dta_jax.collect.settings import Collect
from dta_jax.envs.protocol import Step
from dta_jax.errors import InputError
from dta_jax.generation.protocol import Completion, Sampling
from tests.collect_fakes import FakeEnvironment, FakeEpisode, FakeGenerator

QUICK = Collect(retry_delay=0.0, episode_timeout=5.0)


def run(environment=None, generator=None, settings=QUICK, *, oldest=0, retried=None, seed=1) -> EpisodeRecord:
    """One episode of task 3, trial 2."""
    generator = generator or FakeGenerator()
    environment = environment or FakeEnvironment()

    async def one():
        runner = EpisodeRunner(
            environment,
            generator,
            settings,
            chat=None,
            lockstep=Lockstep(on=True),
            newest_version=lambda: generator.version,
            oldest_version=lambda: oldest,
            progress=lambda: None,
            retried=(retried if retried is not None else []).append,
        )
        return await runner.run(3, 2, seed)

    try:
        return asyncio.run(one())
    finally:
        assert getattr(environment, "open", 0) == 0, "every episode is closed"


def test_an_episode_asks_and_is_judged():
    record = run(FakeEnvironment(turns=3))
    assert (record.task, record.trial) == (3, 2)
    first, second, third = record.calls
    assert first.prompt.tolist() == [1, 5], "seed and task"
    assert second.prompt.tolist() == [1, 5, *first.completion.tokens.tolist(), 1, 1]
    assert third.prompt.tolist() == [*second.prompt.tolist(), *second.completion.tokens.tolist(), 1, 2]
    assert [call.reward for call in record.calls] == [0.25, 0.25, 0]
    answered = sum(int(call.completion.tokens.sum()) for call in record.calls)
    assert record.reward == answered % 2
    assert (record.ending.stop_reason, record.ending.unfinished) == ("done", False)
    assert record.ending.info == {"answered": answered}


def test_the_same_seed_is_the_same_episode():
    one, again, other = run(seed=1), run(seed=1), run(seed=2)
    assert [c.completion.tokens.tolist() for c in one.calls] == [
        c.completion.tokens.tolist() for c in again.calls
    ]
    assert [c.completion.tokens.tolist() for c in one.calls] != [
        c.completion.tokens.tolist() for c in other.calls
    ]


def test_limits_end_an_episode_with_the_reward_that_was_set():
    settings = dataclasses.replace(QUICK, max_turns=2, unfinished_reward=-0.5)
    record = run(FakeEnvironment(turns=3), settings=settings)
    assert (len(record.calls), record.reward) == (2, -0.5)
    assert (record.ending.stop_reason, record.ending.unfinished) == ("max_turns", True)
    with pytest.raises(EpisodeFailure, match="unfinished: max_turns reached after 2 model calls"):
        run(FakeEnvironment(turns=3), settings=dataclasses.replace(settings, unfinished_reward=None))
    assert len(run(FakeEnvironment(turns=2), settings=settings).calls) == 2


@pytest.mark.parametrize(
    ("longest", "lengths", "reason"),
    [(12, [3, 3], "done"), (10, [3, 3], "done"), (9, [3, 2], "done"), (8, [3, 1], "done"),
     (7, [3], "max_context"), (4, [2], "max_context"), (2, [], "max_context")],
)  # fmt: skip
def test_completions_end_where_the_context_does(longest, lengths, reason):
    """Prompts of 2 and 7 tokens, completions of 3."""
    record = run(
        settings=dataclasses.replace(QUICK, max_context=longest, sampling=Sampling(max_new_tokens=3))
    )
    assert [len(call.completion.tokens) for call in record.calls] == lengths
    assert record.ending.stop_reason == reason


def fails(*faults: str):
    """What happens to the first tries, in order."""
    return lambda seed, count: faults[count] if count < len(faults) else ""


def test_a_failed_episode_is_tried_again_from_the_start_and_ends_as_if_nothing_had_been():
    retried: list[EpisodeFailure] = []
    environment = FakeEnvironment(fault=fails("raise", "raise"))
    record = run(environment, retried=retried)
    assert [failure.reason for failure in retried] == ["environment", "environment"]
    assert str(retried[0]) == "environment: LookupError: no such flight"
    plain = run()
    for call, expected in zip(record.calls, plain.calls, strict=True):
        np.testing.assert_array_equal(call.completion.tokens, expected.completion.tokens)
    assert record.reward == plain.reward
    assert environment.tasks == [3, 3, 3]


@pytest.mark.parametrize("retries", [0, 2])
def test_retries_are_bounded(retries):
    environment, retried = FakeEnvironment(fault=lambda seed, count: "raise"), []
    with pytest.raises(EpisodeFailure, match="LookupError"):
        run(environment, settings=dataclasses.replace(QUICK, retries=retries), retried=retried)
    assert (len(environment.tasks), len(retried)) == (retries + 1, retries)


def test_failures_of_the_engine_are_told_apart():
    def reason(fault, **settings):
        with pytest.raises(EpisodeFailure) as caught:
            run(
                generator=FakeGenerator(fault=fault),
                settings=dataclasses.replace(QUICK, retries=0, **settings),
            )
        return caught.value.reason

    assert reason(fails("fail")) == "generation"
    assert reason(fails("garbage")) == "garbage"
    assert reason(fails("hang"), episode_timeout=0.05) == "timeout"


GOOD = {"tokens": [4, 5], "logprobs": [-1.0, -2.0], "versions": [0, 0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [], "logprobs": [], "versions": []}, "0 tokens of 1 to 4"),
        ({"tokens": [1] * 5, "logprobs": [0] * 5, "versions": [0] * 5}, "5 tokens of 1 to 4"),
        ({"tokens": [4, -1]}, "token id -1"),
        ({"logprobs": [-1.0]}, r"logprobs are float32\[1\], for 2 tokens"),
        ({"logprobs": [-1.0, np.nan]}, "log-probabilities that are none"),
        ({"logprobs": [-1.0, 0.5]}, "log-probabilities that are none"),
        ({"versions": [0, 1]}, "versions 0 to 1, the newest is 0"),
        ({"versions": [-1, 0]}, "versions -1 to 0"),
        ({"tokens": "ab"}, "tokens are str"),
    ],
)
def test_garbage_never_becomes_training_data(changes, message):
    kinds = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
    parts = {**GOOD, **changes}
    parts = {n: p if isinstance(p, str) else np.array(p, kinds[n]) for n, p in parts.items()}

    class Garbage(FakeGenerator):
        async def generate(self, prompt, sampling, *, seed):
            return Completion(parts["tokens"], parts["logprobs"], parts["versions"], "stop")

    settings = dataclasses.replace(QUICK, retries=0, sampling=Sampling(max_new_tokens=4))
    with pytest.raises(EpisodeFailure, match=f"garbage: {message}"):
        run(generator=Garbage(), settings=settings)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e39])
def test_rewards_that_are_no_numbers_reject_the_episode(reward):
    with pytest.raises(EpisodeFailure, match="reward: final_reward is"):
        run(FakeEnvironment(reward=lambda *_: reward), settings=dataclasses.replace(QUICK, retries=0))


def test_bad_input_goes_through_at_once():
    class Refusing(FakeEnvironment):
        def episode(self, task, seed):
            self.tasks.append(task)
            raise InputError("environment", "task", expected="one with data", actual=task)

    environment = Refusing()
    with pytest.raises(InputError, match="task: expected one with data; got 3"):
        run(environment)
    assert environment.tasks == [3]


def test_a_stale_episode_is_given_up_and_not_tried_again():
    generator, retried = FakeGenerator(), []
    generator.version = 4
    with pytest.raises(EpisodeFailure, match="stale: its first token is of version 4"):
        run(generator=generator, oldest=5, retried=retried)
    assert not retried
    assert run(generator=generator, oldest=4).calls


def test_an_episode_that_cannot_be_closed_keeps_its_result(caplog):
    class Unclosed(FakeEpisode):
        async def close(self):
            await super().close()
            raise OSError("socket is gone")

    class Environment(FakeEnvironment):
        def episode(self, task, seed):
            self.open += 1
            return Unclosed(self, task, seed, "")

    assert run(Environment()).calls
    assert "an episode could not be closed: OSError: socket is gone" in caplog.text


def test_an_episode_may_be_over_before_a_word_is_said():
    class Silent(FakeEpisode):
        async def start(self):
            return Step(None, final_reward=0.5, stop_reason="nothing to do")

    class Environment(FakeEnvironment):
        def episode(self, task, seed):
            self.open += 1
            return Silent(self, task, seed, "")

    record = run(Environment())
    assert (record.calls, record.reward, record.ending.stop_reason) == ((), 0.5, "nothing to do")


def test_call_seeds_differ():
    seen = FakeGenerator()
    run(generator=seen, seed=7)
    assert list(seen.seen) == [derived_seed(7, 0), derived_seed(7, 1)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("group_size", 0), ("max_staleness", -1), ("on_stale", "ignore"), ("episode_timeout", 0.0),
     ("retries", -1), ("retry_delay", -1.0), ("max_context", 1), ("unfinished_reward", float("nan")),
     ("stuck_after", float("inf"))],
)  # fmt: skip
def test_settings_are_checked(field, value):
    with pytest.raises(InputError, match=f"Collect: {field}: expected "):
        Collect(**{field: value})
    with pytest.raises(InputError, match="skip_equal: expected False for groups of 1"):
        Collect(group_size=1, skip_equal=True)
