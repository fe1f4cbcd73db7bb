"""Message logs to rollouts: what is a completion, what is shared, and what is refused."""

import json
import sys

import numpy as np
import pytest

from dta_jax.chat_template import compile_template, load_template
from dta_jax.convert import Chats, convert_logs, main, read_logs
from dta_jax.errors import InputError, run_command
from dta_jax.rollouts import load_rollouts, samples_from_rollouts
from dta_jax.tokenizer import load_tokenizer
from dta_jax.trie import build_trie
from tests.chat_folder import TEMPLATE, write_chat_folder

SYSTEM = {"role": "system", "content": "hello"}
ASK = {"role": "user", "content": "hello"}
AGAIN = {"role": "user", "content": "ok"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALLS = """\
    {%- set said = namespace(text=content) %}
    {%- for call in message.tool_calls or [] %}
      {%- set said.text = said.text + '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' %}
    {%- endfor %}
    {%- set content = said.text %}
    {{- '<|im_start|>assistant\\n'"""


def say(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer's folder whose template writes tool calls as Qwen3's does."""
    folder = write_chat_folder(tmp_path_factory.mktemp("chat"))
    template = TEMPLATE.replace("    {{- '<|im_start|>assistant\\n'", CALLS)
    assert template != TEMPLATE
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def convert(folder, tmp_path):
    """(rollouts, text of each sequence, what of it is the completion) of conversations."""
    tokenizer = load_tokenizer(folder)

    def converted(*logs, thinking="keep"):
        path = tmp_path / "log.jsonl"
        path.write_text("\n".join(map(json.dumps, logs)))
        chats = Chats(tokenizer, load_template(tokenizer), thinking)
        rollouts = convert_logs(read_logs(path), chats)
        samples = samples_from_rollouts(rollouts)
        texts = [tokenizer.decode(tokens) for tokens in samples.sequences]
        said = [
            tokenizer.decode(tokens[samples.position[samples.sequence == i]])
            for i, tokens in enumerate(samples.sequences)
        ]
        return rollouts, texts, said

    return converted


def test_a_conversation_is_one_row_with_a_completion_per_answer(convert):
    log = {"messages": [SYSTEM, ASK, say("one"), AGAIN, say("two"), AGAIN]}
    rollouts, texts, said = convert(log)
    assert said == ["one<|im_end|>", "two<|im_end|>"]
    assert texts[1] == (
        "<|im_start|>system\nhello<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "one<|im_end|>\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    assert texts[1].startswith(texts[0])
    assert rollouts.num_rollouts == 1
    for name in ("logprobs", "versions", "reward", "step_reward"):
        assert getattr(rollouts, name) is None


def test_parallel_tool_calls_and_their_results(convert):
    both = say(None, tool_calls=[call("f", '{"x": 1}'), call("g", "not json")])
    results = [{"role": "tool", "content": text, "tool_call_id": "1"} for text in ("a", "b")]
    rollouts, texts, said = convert({"messages": [ASK, both, *results, say("done")], "tools": TOOLS})
    assert said[0] == (
        '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "g", "arguments": "not json"}\n</tool_call><|im_end|>'
    )
    assert "<|im_start|>user\n[result] a\n[result] b<|im_end|>" in texts[1]
    assert '"name": "f", "parameters"' in texts[0].split("<|im_end|>")[0]
    assert rollouts.num_rollouts == 1


@pytest.mark.parametrize(("thinking", "rows"), [("keep", 1), ("strip", 2)])
def test_stripped_thinking_branches_and_still_shares(convert, thinking, rows):
    first, second = say("<think>\nhello\n</think>\n\none"), say("<think>\nok\n</think>\n\ntwo")
    rollouts, texts, said = convert({"messages": [ASK, first, AGAIN, second]}, thinking=thinking)
    assert said == [f"{first['content']}<|im_end|>", f"{second['content']}<|im_end|>"]
    assert rollouts.num_rollouts == rows
    assert np.unique(rollouts.episode).size == 1
    assert texts[0].split("<think>")[0] == texts[1].split("<think>" if rows == 1 else "one")[0]
    assert ("hello\n</think>" in texts[1]) == (thinking == "keep")


def test_sub_agents_are_rows_of_one_episode(convert):
    main_thread = {"messages": [SYSTEM, ASK, say("one")], "task_id": "a", "reward": 0.5, "episode": 1}
    helper = {"messages": [SYSTEM, AGAIN, say("two")], "task_id": "a", "reward": 0.5, "episode": 1}
    other = {"messages": [SYSTEM, ASK, say("three")], "task_id": "a", "reward": 1, "episode": 2}
    alone = {"messages": [SYSTEM, ASK, say("one")], "task_id": "b", "reward": 0}
    rollouts, texts, _ = convert(main_thread, other, helper, alone)
    assert rollouts.episode.tolist() == [0, 0, 1, 2]
    assert rollouts.task_id.tolist() == [0, 0, 0, 1]
    assert rollouts.trial.tolist() == [0, 0, 1, 0]
    assert rollouts.reward.tolist() == [0.5, 0.5, 1, 0]
    trie = build_trie(samples_from_rollouts(rollouts).sequences)
    assert trie.num_rows < rollouts.tokens.size
    assert texts[1].startswith(texts[0][: texts[0].index("user")])


def test_messages_of_weight_0_are_only_shown(convert):
    greeting, skipped = say("hello", weight=0), say("ok", weight=0)
    _, texts, said = convert(
        {"messages": [SYSTEM, greeting, ASK, say("one"), ASK, skipped, ASK, say("two", weight=1)]}
    )
    assert said == ["one<|im_end|>", "two<|im_end|>"]
    assert "assistant\nhello<|im_end|>" in texts[0]
    assert "assistant\nok<|im_end|>" in texts[1]
    assert "weight" not in texts[1]


def test_ids_are_kept_if_they_are_numbers(convert):
    logs = [{"messages": [ASK, say("one")], "task_id": task, "trial": 3} for task in ("7", 5, "7")]
    rollouts, _, _ = convert(*logs)
    assert rollouts.task_id.tolist() == [7, 5, 7]
    assert rollouts.trial.tolist() == [3, 3, 3]
    rollouts, _, _ = convert({"messages": [ASK, say("one")]}, {"messages": [ASK, say("one")]})
    assert rollouts.task_id.tolist() == [0, 1]


def test_content_in_parts_is_text(convert):
    parts = [{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}]
    assert convert({"messages": [ASK, say(parts)]})[2] == ["one<|im_end|>"]


def test_a_prompt_that_opens_thinking_does_not_count_as_said(folder):
    """With `enable_thinking=False` the prompt ends in an empty thinking block; history has none."""
    tokenizer = load_tokenizer(folder)
    template = load_template(tokenizer, enable_thinking=False)
    logs = read_logs_of(folder, {"messages": [ASK, say("one")]})
    samples = samples_from_rollouts(convert_logs(logs, Chats(tokenizer, template, "keep")))
    assert tokenizer.decode(samples.sequences[0]).endswith("<think>\n\n</think>\n\none<|im_end|>")
    assert tokenizer.decode(samples.sequences[0][samples.position]) == "one<|im_end|>"


def test_a_thinking_block_that_the_template_adds_counts_as_said(folder, tmp_path):
    """Qwen3's template shows the last answer with an empty block if it has no thinking of its own."""
    tokenizer = load_tokenizer(folder)
    header = "{{- '<|im_start|>assistant\\n' + content"
    text = TEMPLATE.replace(
        header,
        header.replace(
            "+ content", "+ ('' if '</think>' in content or not loop.last else '<think>') + content"
        ),
    )
    assert text != TEMPLATE
    template = compile_template(text, source="test", variables=tokenizer.special)
    (log,) = read_logs_of(tmp_path, {"messages": [ASK, say("one"), AGAIN, say("two")]})
    samples = samples_from_rollouts(convert_logs([log], Chats(tokenizer, template, "keep")))
    said = samples.sequences[1][samples.position[samples.sequence == 1]]
    assert tokenizer.decode(said) == "<think>two<|im_end|>"
    assert "assistant\n<think>one<|im_end|>" in tokenizer.decode(samples.sequences[1])


def read_logs_of(folder, *logs):
    path = folder / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, logs)))
    return read_logs(path)


def test_the_command(folder, tmp_path, capsys):
    log, out = tmp_path / "log.jsonl", tmp_path / "rollouts.npz"
    log.write_text(json.dumps({"messages": [ASK, say("one")], "reward": 1}) + "\n\n")
    main([str(log), "--tokenizer", str(folder), "--out", str(out)])
    told = capsys.readouterr()
    assert told.out.startswith(f"{out}: 1 conversations, 1 tasks, 1 rollouts, 1 completions, ")
    assert told.out.count("\n") == 1
    assert told.err.startswith("warning: text was tokenized anew")
    assert load_rollouts(out).reward.tolist() == [1.0]


GOOD = {"messages": [ASK, say("one")]}


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["{"], "log.jsonl, line 1: line: expected a JSON object; got Expecting"),
        ([GOOD, "[]"], "log.jsonl, line 2: line: expected a JSON object; got list"),
        ([GOOD, "", {}], "log.jsonl, line 3: messages: expected a list of messages; got None"),
        ([GOOD | {"reward": True}], "log.jsonl, line 1: reward: expected a number; got True"),
        ([GOOD | {"reward": 1}, GOOD], "log.jsonl, line 2: reward: expected a reward, as in"),
        ([GOOD | {"trial": -1}], "log.jsonl, line 1: trial: expected 0 to"),
        ([{"messages": [ASK, 3]}], "log.jsonl, line 1: messages[1].role: expected one of system, developer"),
        ([{"messages": [{"role": "cat"}]}], "messages[0].role: expected one of system, developer, user"),
        ([{"messages": [{"role": "user", "content": 3}]}], "messages[0].content: expected text; got 3"),
        ([{"messages": [ASK, say("", tool_calls=[{}])]}], "messages[1].tool_calls[0]: expected an object"),
        ([{"messages": [ASK, say("", tool_calls={"a": 1})]}], "messages[1].tool_calls: expected a list"),
        ([{"messages": [ASK]}], "messages: expected a message of the assistant that answers"),
        ([{"messages": [say("one"), ASK]}], "messages: expected a message of the assistant that answers"),
        (
            [{"messages": [ASK, say("a"), say("b")]}],
            "messages[2]: expected a message of the user or of a tool",
        ),
        (
            [GOOD | {"episode": 1, "task_id": 1, "trial": trial} for trial in (0, 1)],
            "line 2: episode: expected the reward and trial of its episode",
        ),
        ([""], "log.jsonl: file: expected at least one conversation; got none"),
    ],
)
def test_bad_logs_are_refused_in_one_line(folder, tmp_path, capsys, monkeypatch, lines, text):
    log, out = tmp_path / "log.jsonl", tmp_path / "rollouts.npz"
    log.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    monkeypatch.setattr(sys, "argv", ["convert", str(log), "--tokenizer", str(folder), "--out", str(out)])
    with pytest.raises(SystemExit) as stop:
        run_command(main)
    told = capsys.readouterr().err
    assert stop.value.code == 2
    assert told.count("\n") == 1
    assert text in told
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "contents", "text"),
    [
        ("none.jsonl", None, "expected a message log; got no such file"),
        ("bytes.jsonl", b"\xff\xfe", "expected text in UTF-8"),
        ("log.txt", b"", "expected a .jsonl log or a .json of tau2's results; got log.txt"),
        ("results.json", b"[", "file: expected JSON; got"),
        ("results.json", b"[]", "info.environment_info.domain_name: expected text, as in tau2's results"),
        ("results.json", b'{"info": {"environment_info": {"domain_name": 3}}}', "expected text, as in tau2"),
    ],
)
def test_bad_files(tmp_path, name, contents, text):
    path = tmp_path / name
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(InputError) as error:
        read_logs(path)
    assert text in str(error.value)
    assert name in str(error.value)
