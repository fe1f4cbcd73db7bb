"""From episodes to rows: contexts that grow, are rewritten or belong to sub-agents; messages and ids."""

import json

import numpy as np
import pytest

from dta_jax.chat import Chat
from dta_jax.chat_template import load_template
from dta_jax.collect.order import Place
from dta_jax.collect.records import (
    Call,
    Ending,
    EpisodeRecord,
    episode_returns,
    group_of_episodes,
    groups_from_json,
    rollouts_from_episodes,
)
from dta_jax.collect.report import episode_metrics, staleness_metrics
from dta_jax.collect.threads import Speaker, Threads
from dta_jax.envs.protocol import Observation
from dta_jax.errors import InputError
from dta_jax.generation.protocol import Completion
from dta_jax.rollouts import concatenate_rollouts
from dta_jax.tokenizer import load_tokenizer
from tests.chat_folder import write_chat_folder


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def call(prompt, tokens, thread="main", reward=0.0, version=0):
    made = Completion(
        ids(*tokens), -ids(*tokens).astype(np.float32), np.full(len(tokens), version, np.int32), "stop"
    )
    return Call(thread, ids(*prompt), made, reward)


def record(*calls, task=3, trial=0, reward=0.0, ending=None):
    return EpisodeRecord(task, trial, calls, reward, ending or Ending("done", False, {}))


def rows(rollouts):
    return [
        rollouts.tokens[a:b].tolist() for a, b in zip(rollouts.offsets, rollouts.offsets[1:], strict=False)
    ]


def test_prompts_that_extend_the_thread_make_one_row():
    made = rollouts_from_episodes(
        [record(call([1, 2], [3], reward=0.5, version=4), call([1, 2, 3, 4], [5, 6], version=5), reward=2)]
    )
    assert rows(made) == [[1, 2, 3, 4, 5, 6]]
    assert made.completion_spans.tolist() == [[0, 2, 3], [0, 4, 6]]
    assert made.logprobs.tolist() == [0, 0, -3, 0, -5, -6]
    assert made.versions.tolist() == [0, 0, 4, 0, 5, 5]
    assert made.step_reward.tolist() == [0.5, 0]
    assert (made.task_id.tolist(), made.trial.tolist(), made.reward.tolist()) == ([3], [0], [2])
    assert episode_returns(made).tolist() == [2.5]


def test_a_prompt_may_be_shown_again_without_an_addition():
    assert rows(rollouts_from_episodes([record(call([1], [2]), call([1, 2], [3]))])) == [[1, 2, 3]]


@pytest.mark.parametrize("rewritten", [[1, 9, 3, 4], [1, 2], [7]])
def test_a_rewritten_context_is_another_row(rewritten):
    made = rollouts_from_episodes([record(call([1, 2], [3]), call(rewritten, [5]), reward=1)])
    assert rows(made) == [[1, 2, 3], [*rewritten, 5]]
    assert made.episode.tolist() == [0, 0]
    assert made.reward.tolist() == [1, 1]
    assert episode_returns(made).tolist() == [1]


def test_threads_interleave_without_breaking_each_others_rows():
    made = rollouts_from_episodes(
        [
            record(
                call([1], [2]),
                call([8], [9], thread="helper", reward=0.25),
                call([1, 2, 3], [4]),
                call([8, 9, 7], [6], thread="helper"),
            ),
            record(trial=1),
            record(call([1], [5], reward=1), trial=2),
        ]
    )
    assert rows(made) == [[1, 2, 3, 4], [8, 9, 7, 6], [], [1, 5]]
    assert made.completion_spans.tolist() == [[0, 1, 2], [0, 3, 4], [1, 1, 2], [1, 3, 4], [3, 1, 2]]
    assert made.step_reward.tolist() == [0, 0, 0.25, 0, 1]
    assert made.episode.tolist() == [0, 0, 1, 2]
    assert episode_returns(made).tolist() == [0.25, 0, 1]


def test_groups_are_ordered_by_trial_and_survive_json():
    told = Ending("max_turns", True, {"correct": 0.5})
    one = group_of_episodes(
        Place(2, 1),
        [record(call([1], [4]), call([7], [8]), trial=1, ending=told), record(call([1], [2], version=3))],
    )
    two = group_of_episodes(Place(2, 2), [record(call([1], [5], version=2)), record(trial=1)])
    assert one.rollouts.trial.tolist() == [0, 1, 1]
    assert one.endings[1] is told
    assert (one.oldest_version, two.oldest_version) == (0, 2)
    assert group_of_episodes(Place(1, 0), [record()]).oldest_version is None
    described = json.loads(json.dumps([one.to_json(), two.to_json()]))
    whole = concatenate_rollouts([one.rollouts, two.rollouts])
    back = groups_from_json(described, whole)
    assert [group.place for group in back] == [Place(2, 1), Place(2, 2)]
    assert concatenate_rollouts([group.rollouts for group in back]).digest() == whole.digest()
    assert vars(back[0].endings[1]) == vars(told)
    with pytest.raises(InputError, match="rows: expected 5; got 3"):
        groups_from_json(described, one.rollouts)


def test_metrics_count_episodes_and_not_rows():
    made = rollouts_from_episodes(
        [
            record(
                call([1], [4]),
                call([7], [8, 9], reward=0.5),
                reward=1,
                ending=Ending("done", False, {"won": 1}),
            ),
            record(call([1], [2], version=2), trial=1, ending=Ending("max_turns", True, {})),
        ]
    )
    row = episode_metrics(made, [Ending("done", False, {"won": 1}), Ending("max_turns", True, {})])
    assert row == {
        "reward_mean": 0.75, "reward_min": 0, "reward_max": 1.5, "turns_mean": 1.5, "turns_max": 2,
        "completion_tokens": 4, "unfinished_max_turns": 1, "info_won": 1,
    }  # fmt: skip
    assert staleness_metrics(made, step=4) == {
        "staleness_mean": 2.5, "staleness_max": 3, "staleness_1": 1, "staleness_3": 3,
    }  # fmt: skip
    json.dumps(row, allow_nan=False)


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Chat:
    tokenizer = load_tokenizer(write_chat_folder(tmp_path_factory.mktemp("chat")))
    return Chat(tokenizer, load_template(tokenizer))


def test_token_threads_grow_restart_and_stay_apart():
    threads = Threads(Speaker(None, ()))
    assert threads.observe(Observation(ids(1, 2))).tolist() == [1, 2]
    threads.answered("main", ids(3))
    assert threads.observe(Observation(ids(8), thread="helper")).tolist() == [8]
    threads.answered("helper", ids(9))
    assert threads.observe(Observation(ids(4))).tolist() == [1, 2, 3, 4]
    threads.answered("main", ids(5))
    assert threads.observe(Observation(ids(), thread="helper")).tolist() == [8, 9]
    assert threads.observe(Observation(ids(6), restart=True)).tolist() == [6]
    threads.answered("main", ids(7))
    assert threads.observe(Observation(ids(1))).tolist() == [6, 7, 1]


def test_messages_go_through_the_chat_and_text_loses_its_end(chat):
    speaker = Speaker(chat, ())
    threads = Threads(speaker)
    asked, more = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "ok"}]
    begun = chat.begin(asked)
    np.testing.assert_array_equal(threads.observe(Observation(messages=asked)), begun.context)
    answer = chat.tokenizer.encode("hello<|im_end|>")
    threads.answered("main", answer)
    expected = chat.extend(begun, answer, more).context
    np.testing.assert_array_equal(threads.observe(Observation(messages=more)), expected)
    assert speaker.text(answer) == "hello"
    assert speaker.text(answer[-1:]) == ""
    assert speaker.text(chat.tokenizer.encode("hello ok")) == "hello ok"
    stop = chat.tokenizer.token_id("ok")
    assert Speaker(chat, [stop]).text(chat.tokenizer.encode("hello ok")) == "hello "
    assert Speaker(None, [stop]).text(answer) is None


def test_tools_are_those_that_the_thread_began_with(chat):
    tool = {"type": "function", "function": {"name": "look_up"}}
    asked = [{"role": "user", "content": "hello"}]
    with_tools = Chat(chat.tokenizer, chat.template, tools=[tool])
    prompt = Threads(Speaker(chat, ())).observe(Observation(messages=asked, tools=[tool]))
    np.testing.assert_array_equal(prompt, with_tools.begin(asked).context)
    assert len(prompt) > len(chat.begin(asked).context)


def test_observations_that_are_wrong(chat):
    asked = [{"role": "user", "content": "hello"}]
    for observation, message in (
        (Observation(), "either tokens or messages; got neither"),
        (Observation(ids(1), messages=asked), "either tokens or messages; got both"),
        (Observation(ids()), "thread 'main': expected at least one token; got no token"),
    ):
        with pytest.raises(InputError, match=message):
            Threads(Speaker(chat, ())).observe(observation)
    with pytest.raises(InputError, match="token ids, since the run has no tokenizer; got chat messages"):
        Threads(Speaker(None, ())).observe(Observation(messages=asked))
    threads = Threads(Speaker(chat, ()))
    threads.observe(Observation(ids(1)))
    threads.answered("main", ids(2))
    with pytest.raises(InputError, match="thread 'main': expected tokens, as it began; got messages"):
        threads.observe(Observation(messages=asked))
