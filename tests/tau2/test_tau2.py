"""Agents in tau2's own environments, offline. A CI job of its own: `pip install -e '.[tau2,test]'`."""

import asyncio
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from dta_jax.envs.protocol import Answer, Environment
from dta_jax.envs.tau2 import Tau2
from dta_jax.envs.tool_calls import render_call
from dta_jax.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # other packages warn while they are imported
DONE = render_call("done", {})


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Whoever opens a connection that leaves this machine fails the test."""
    connect = socket.socket.connect

    def local_only(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost"):
            raise AssertionError(f"a connection to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(scope="module")
def mock():
    return Tau2("mock")


def task_named(environment, name):
    return [environment.task_name(task) for task in range(environment.num_tasks)].index(name)


async def converse(environment, task, answers, seed=0):
    """The steps of an episode in which the agent says `answers`."""
    episode = environment.episode(task, seed)
    steps = [await episode.start()]
    for text in answers:
        assert steps[-1].observation is not None
        steps.append(await episode.step(Answer(np.zeros(1, np.int32), text, truncated=False)))
    await episode.close()
    return steps


def play(environment, task, answers):
    return asyncio.run(converse(environment, task, answers))


def shown(step):
    return [(message["role"], message["content"]) for message in step.observation.messages]


def test_reference_actions_solve_every_task_that_solo_mode_allows(mock):
    assert isinstance(mock, Environment)
    assert mock.num_tasks == 6
    for task in range(mock.num_tasks):
        last = play(mock, task, mock.reference_answers(task))[-1]
        assert (last.observation, last.final_reward, last.stop_reason) == (None, 1.0, "agent_stop")
        assert last.info["success"] == 1
        assert last.info["tool_errors"] == 0


def test_reference_actions_solve_telecom():
    environment = Tau2("telecom", split="small")
    assert environment.num_tasks == 20
    for task in range(0, 20, 7):
        assert play(environment, task, environment.reference_answers(task))[-1].final_reward == 1


def test_doing_nothing_or_something_else_is_no_success(mock):
    task = task_named(mock, "create_task_1")
    other = render_call("create_task", {"user_id": "user_1", "title": "Another Meeting"})
    for answers in ([DONE], [other, DONE]):
        last = play(mock, task, answers)[-1]
        assert (last.final_reward, last.stop_reason) == (0.0, "agent_stop")


def test_an_assertion_about_what_was_never_made_has_failed(mock):
    """tau2's raises; a failed episode would be rejected, and nobody learnt from it."""
    last = play(mock, task_named(mock, "create_task_1_with_env_assertions"), [DONE])[-1]
    assert (last.final_reward, last.stop_reason) == (0.0, "agent_stop")


def test_brief_leaves_only_the_ticket():
    brief = Tau2("mock", brief=True)
    first = play(brief, 0, brief.reference_answers(0))
    assert [message["role"] for message in first[0].observation.messages] == ["user"]
    assert first[0].observation.tools is None
    assert first[-1].final_reward == 1


def test_tasks_share_everything_up_to_the_ticket(mock):
    first = [play(mock, task, [])[0].observation for task in range(mock.num_tasks)]
    assert all(observation.messages[0] == first[0].messages[0] for observation in first)
    assert [message["role"] for message in first[0].messages] == ["system", "user"]
    assert len({observation.messages[1]["content"] for observation in first}) > 1
    names = [tool["function"]["name"] for tool in first[0].tools]
    assert names[-1] == "done"
    assert "create_task" in names
    json.dumps(first[0].tools)


def test_errors_come_back_to_the_agent_in_the_order_of_its_calls(mock):
    task = task_named(mock, "create_task_1")
    mixed = "\n".join(
        [
            "<tool_call>{oops</tool_call>",
            render_call("get_users", {}),
            render_call("no_such_tool", {"tool_name": 1, "requestor": 2}),
        ]
    )
    _, step, last = play(mock, task, [mixed, *mock.reference_answers(task)])[:3]
    (_, unread), (_, users), (_, unknown) = shown(step)
    assert unread.startswith("Error: the tool call is not valid JSON")
    assert "user_1" in users
    assert unknown.startswith("Error: ")
    assert len({message["tool_call_id"] for message in step.observation.messages}) == 3
    steps = play(mock, task, [mixed, *mock.reference_answers(task)])
    assert steps[-1].final_reward == 1
    assert steps[-1].info == {"success": 1.0, "tool_calls": 4.0, "tool_errors": 2.0}
    assert last.observation is not None


def test_limits_end_an_episode_without_reward(mock):
    task = task_named(mock, "create_task_1")
    right = mock.reference_answers(task)[0]
    for settings, answers, reason in (
        (dict(max_errors=2), ["<tool_call>x", "<tool_call>x"], "too_many_errors"),
        (dict(max_messages=2), [right], "max_steps"),
        ({}, ["I have done it."], "agent_error"),
        ({}, [""], "agent_error"),
    ):
        last = play(Tau2("mock", **settings), task, answers)[-1]
        assert (last.observation, last.final_reward, last.stop_reason) == (None, 0.0, reason)


def test_parallel_episodes_share_no_state(mock):
    """Each creates `task_2`; in a shared database the second would create `task_3`."""
    task = task_named(mock, "create_task_1")

    async def both():
        return await asyncio.gather(*(converse(mock, task, mock.reference_answers(task)) for _ in range(4)))

    for steps in asyncio.run(both()):
        assert "task_2" in shown(steps[1])[0][1]
        assert steps[-1].final_reward == 1
    by_data = task_named(mock, "update_task_with_initialization_data")
    for _ in range(2):  # what a task holds is not changed by an episode either
        assert play(mock, by_data, [DONE])[-1].final_reward == 0
        assert play(mock, by_data, mock.reference_answers(by_data))[-1].final_reward == 1


# --- with a user


class User(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint: a user with one wish, who leaves when it is done."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        if self.server.broken:
            self.send_error(400)
            return
        fulfilled = request["messages"][-1]["content"] == "Done."
        message = {"role": "assistant", "content": "Bye. ###STOP###" if fulfilled else "I have a wish."}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        body = json.dumps(reply | {"usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), User)
    server.requests, server.broken = [], False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def with_user(server, domain="mock"):
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return Tau2(domain, solo=False, user_model="openai/m", user_url=url)


def test_a_model_plays_the_user(server):
    environment = with_user(server)
    assert environment.num_tasks == 9
    task = task_named(environment, "create_task_1")
    steps = play(environment, task, environment.reference_answers(task))
    roles = [message["role"] for message in steps[0].observation.messages]
    assert roles == ["system", "assistant", "user"]
    assert shown(steps[0])[-1] == ("user", "I have a wish.")
    assert "done" not in [tool["function"]["name"] for tool in steps[0].observation.tools]
    assert (steps[-1].final_reward, steps[-1].stop_reason) == (1.0, "user_stop")
    assert server.requests[0]["seed"] == 0
    assert server.requests[0]["model"] == "m"
    assert "Important Meeting" in server.requests[0]["messages"][0]["content"]


def test_a_conversation_that_has_begun_goes_on(server):
    environment = with_user(server)
    task = task_named(environment, "update_task_with_message_history")
    steps = play(environment, task, environment.reference_answers(task))
    roles = [message["role"] for message in steps[0].observation.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert steps[0].observation.messages[2]["tool_calls"][0]["function"]["name"] == "create_task"
    assert steps[-1].final_reward == 1


def test_an_endpoint_that_fails_is_not_a_reward_of_0(server):
    server.broken = True
    with pytest.raises(Exception, match="400"):
        play(with_user(server), 0, ["hello"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (dict(domain="bank"), "domain: expected one of mock, airline"),
        (dict(domain="airline"), "solo: expected False (only mock, telecom"),
        (dict(split="easy"), "split: expected a split of mock; got Invalid task split name: easy"),
        (dict(solo=False), "user_model: expected a model that plays the user"),
        (dict(max_errors=0), "max_errors: expected at least 1; got 0"),
    ],
)
def test_bad_settings(settings, text):
    with pytest.raises(InputError) as error:
        Tau2(**settings)
    assert str(error.value).startswith(f"Tau2: {text}")


def test_there_are_so_many_tasks(mock):
    with pytest.raises(InputError, match="Tau2: task: expected 0 to 5; got 6"):
        mock.episode(6, 0)
