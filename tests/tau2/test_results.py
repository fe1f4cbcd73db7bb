"""tau2's result files, converted: prompt and tools are those that the environment gives the agent."""

import asyncio
import json

import pytest

from dta_jax.chat import Chat
from dta_jax.chat_template import load_template
from dta_jax.convert import Chats, convert_logs, read_logs
from dta_jax.envs.tau2 import Tau2
from dta_jax.errors import InputError
from dta_jax.rollouts import samples_from_rollouts
from dta_jax.tokenizer import load_tokenizer
from tests.chat_folder import write_chat_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # other packages warn while they are imported
CREATE = {"id": "c", "name": "create_task", "arguments": {"user_id": "user_1", "title": "Important Meeting"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_chat_folder(tmp_path_factory.mktemp("chat")))


def results(tmp_path, agent, policy, *simulations):
    """A file of tau2's, as far as it is read."""
    path = tmp_path / "results.json"
    info = {"environment_info": {"domain_name": "mock", "policy": policy}}
    tasks = [{"id": "create_task_1", "ticket": Tau2("mock")._task(0).ticket}]
    info["agent_info"] = {"implementation": agent}
    path.write_text(json.dumps({"info": info, "tasks": tasks, "simulations": simulations}))
    return path


def simulation(messages, **more):
    return {
        "task_id": "create_task_1",
        "trial": 0,
        "reward_info": {"reward": 1.0},
        "messages": messages,
    } | more


SOLO = (
    {"role": "assistant", "content": None, "tool_calls": [CREATE]},
    {"role": "tool", "id": "c", "content": "made"},
    {"role": "assistant", "content": "###STOP###", "tool_calls": None},
)


def test_solo_results_begin_as_the_environment_does(tokenizer, tmp_path):
    observation = asyncio.run(Tau2("mock").episode(0, 0).start()).observation
    policy = observation.messages[0]["content"].split("<policy>\n")[1].split("\n</policy>")[0]
    path = results(tmp_path, "llm_agent_solo", policy, simulation(SOLO), simulation(SOLO, skipped=True))
    (log,) = read_logs(path)
    assert log.messages[:2] == list(observation.messages)
    assert log.tools == list(observation.tools)
    assert log.messages[-1]["tool_calls"][0]["function"] == {"name": "done", "arguments": {}}
    template = load_template(tokenizer)
    rollouts = convert_logs([log], Chats(tokenizer, template, "keep"))
    assert rollouts.reward.tolist() == [1.0]
    sequences = samples_from_rollouts(rollouts).sequences
    begun = Chat(tokenizer, template, tools=observation.tools).begin(observation.messages).context
    assert sequences[0][: len(begun)].tolist() == begun.tolist()
    assert sequences[1][: len(sequences[0])].tolist() == sequences[0].tolist()


def test_results_with_a_user_show_the_agent_what_it_saw(tokenizer, tmp_path):
    messages = [
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "make it"},
        {"role": "user", "tool_calls": [CREATE | {"requestor": "user"}]},
        {"role": "tool", "id": "c", "content": "hidden", "requestor": "user"},
        *SOLO[:2],
        {"role": "assistant", "content": "It is made."},
        {"role": "user", "content": "###STOP###"},
    ]
    (log,) = read_logs(results(tmp_path, "llm_agent", "Be kind.", simulation(messages, trial=2)))
    roles = [message["role"] for message in log.messages]
    assert roles == ["system", "assistant", "user", "assistant", "tool", "assistant", "user"]
    assert "Be kind." in log.messages[0]["content"]
    assert "hidden" not in str(log.messages)
    rollouts = convert_logs([log], Chats(tokenizer, load_template(tokenizer), "keep"))
    assert len(rollouts.completion_spans) == 2
    assert rollouts.trial.tolist() == [2]


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (simulation([{"role": "cat"}]), "simulations[0]: messages[0]: expected a message of tau2; got 'cat'"),
        (simulation([3]), "simulations[0]: messages[0]: expected a message of tau2"),
        (simulation(None), "simulations[0]: messages: expected a list, as in tau2's results; got None"),
        (simulation([], reward_info=None), "simulations[0]: reward_info.reward: expected a number"),
        (3, "simulations[0]: task_id: expected text, as in tau2's results; got None"),
    ],
)
def test_bad_results_are_named(tmp_path, run, text):
    with pytest.raises(InputError) as error:
        read_logs(results(tmp_path, "llm_agent", "Be kind.", run))
    assert text in str(error.value)


def test_unknown_domains_are_named(tmp_path):
    path = results(tmp_path, "llm_agent_solo", "Be kind.")
    path.write_text(path.read_text().replace('"mock"', '"airline"'))
    with pytest.raises(InputError, match="tau2: domain: expected one that allows the mode; got Airline"):
        read_logs(path)
