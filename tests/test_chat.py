"""Tokenizer, chat templates, and conversations that never encode anew what the model wrote."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.chat import Chat
from dta_jax.chat_template import compile_template, load_template
from dta_jax.errors import InputError
from dta_jax.tokenizer import load_tokenizer
from tests.chat_folder import TEMPLATE, write_chat_folder

USER = {"role": "user", "content": "hello"}
AGAIN = {"role": "user", "content": "ok"}
TOOL = {"role": "tool", "content": "7"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def template(tokenizer):
    return load_template(tokenizer)


def message(error):
    assert "\n" not in str(error.value)
    return str(error.value)


# --- tokenizer


def test_encoding_adds_nothing_and_knows_control_tokens(tokenizer):
    ids = tokenizer.encode("<|im_start|>hello</think>")
    assert ids.dtype == np.int32
    assert ids.tolist() == [tokenizer.token_id(t) for t in ("<|im_start|>", "hello", "</think>")]
    assert tokenizer.decode(ids) == "<|im_start|>hello</think>"
    assert tokenizer.decode(ids, skip_special=True) == "hello</think>"
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.special == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_text_survives(tokenizer):
    text = "Größe: 3 €\n\n  def f(x):\n\treturn '✓'"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bad_tokenizers(folder, tmp_path):
    ids = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    highest = max(map(int, ids))
    load_tokenizer(folder, highest + 1)
    with pytest.raises(InputError) as error:
        load_tokenizer(folder, highest)
    wanted = (
        f"{folder}: tokenizer.json: expected ids below the model's vocab_size={highest}; got id {highest}"
    )
    assert message(error) == wanted
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path)
    assert message(error) == f"{tmp_path}: tokenizer.json: expected a tokenizer; got no such file"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path)
    assert message(error).startswith(f"{tmp_path}: tokenizer.json: expected a tokenizer; got EOF")
    write_chat_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3": {"content": "<think>"}}}')
    with pytest.raises(
        InputError, match=r"'<think>': expected id 3, as in tokenizer_config.json; got id 2\d\d$"
    ):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"tokenizer.json: <x>: expected a token; got no such token$"):
        load_tokenizer(folder).token_id("<x>")


# --- templates


def test_rendering(template):
    call = {"role": "assistant", "content": "<think>\nhm\n</think>\n\ncall", "tool_calls": None}
    text = template.render([USER, call, TOOL, TOOL, call, AGAIN, call], add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\ncall<|im_end|>\n"
        "<|im_start|>user\n[result] 7\n[result] 7<|im_end|>\n"
        "<|im_start|>assistant\ncall<|im_end|>\n"
        "<|im_start|>user\nok<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\ncall<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_are_plain_json(template):
    tool = {"name": "größe", "parameters": {"a": ["<b>", 1, None]}}
    text = template.render([USER], tools=[tool])
    assert text.startswith(f"<|im_start|>system\n{json.dumps(tool, ensure_ascii=False)}\n<|im_end|>\n")


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{{ bos }}|{{ eos_token }}", "B|<|im_end|>"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello"),
        ("{{ {'b': 1, 'a': '<ü>'} | tojson(indent=1, sort_keys=True) }}", '{\n "a": "<ü>",\n "b": 1\n}'),
        ("{{ strftime_now('%d')[2:] }}.", "."),
        ("{{ messages[0].name is defined }}", "False"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
    ],
)
def test_environment(text, rendered):
    template = compile_template(text, source="t", variables={"bos": "B", "eos_token": "<|im_end|>"})
    assert template.render([USER | {"name": None}, AGAIN]) == rendered


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('only tools') }}", "only tools"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
        ("{{ messages[0].content + 1 }}", 'can only concatenate str (not "int") to str'),
    ],
)
def test_templates_that_fail(text, reason):
    with pytest.raises(InputError) as error:
        compile_template(text, source="t").render([USER])
    assert message(error) == f"t: messages: expected messages that the template renders; got {reason}"


def test_bad_templates(folder, tmp_path):
    with pytest.raises(InputError, match=r"^t: chat template: expected a jinja2 template; got "):
        compile_template("{% if %}", source="t")
    with pytest.raises(InputError, match="Object of type object is not JSON serializable"):
        compile_template("", source="t").render([USER | {"content": object()}])
    tokenizer = load_tokenizer(write_chat_folder(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InputError) as error:
        load_template(tokenizer)
    assert message(error) == (
        f"{tmp_path}: chat template 'default': "
        "expected in chat_template.jinja or tokenizer_config.json; got none"
    )


def test_templates_in_older_places(tmp_path):
    tokenizer = load_tokenizer(write_chat_folder(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "one"}')
    assert load_template(tokenizer).render([USER]) == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_template(tokenizer).render([USER]) == "two"
    assert load_template(tokenizer, name="tool_use").render([USER]) == "three"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "four"}')
    assert load_template(tokenizer).render([USER]) == "four"


# --- conversations


def written(tokenizer, *pieces):
    """Ids of pieces that are encoded one by one: splits that encoding the whole text would not make."""
    return np.concatenate([tokenizer.encode(piece) for piece in pieces])


def test_a_context_extends_the_one_before_token_by_token(tokenizer, template):
    chat = Chat(tokenizer, template)
    first = chat.begin([USER])
    assert first.reused == 0
    np.testing.assert_array_equal(
        first.context, tokenizer.encode(template.render([USER], add_generation_prompt=True))
    )
    odd = written(tokenizer, "<think>", "\n", "\n", "</think>", "h", "e", "llo", "<|im_end|>")
    assert len(odd) == len(tokenizer.encode(tokenizer.decode(odd))) + 4  # not how the text would be split
    second = chat.extend(first, odd, [AGAIN])
    np.testing.assert_array_equal(
        second.context,
        np.concatenate(
            [
                first.context,
                odd,
                tokenizer.encode("\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"),
            ]
        ),
    )
    assert second.reused == len(first.context) + len(odd)


def test_a_message_that_was_cut_off_is_closed(tokenizer, template):
    chat = Chat(tokenizer, template)
    first = chat.begin([USER])
    second = chat.extend(first, tokenizer.encode("hell"), [TOOL])
    assert tokenizer.decode(second.context[len(first.context) :]) == (
        "hell<|im_end|>\n<|im_start|>user\n[result] 7<|im_end|>\n<|im_start|>assistant\n"
    )
    third = chat.extend(second, [], [AGAIN])
    assert tokenizer.decode(third.context[len(second.context) :]) == (
        "<|im_end|>\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    )


def test_stripped_thinking_branches_where_it_was(tokenizer, template):
    chat = Chat(tokenizer, template, thinking="strip")
    first = chat.begin([USER])
    call = written(tokenizer, "<think>\nhm\n</think>\n\n", "h", "e", "<|im_end|>")
    second = chat.extend(first, call, [TOOL, TOOL])
    assert second.reused == len(first.context) + len(call)  # between results of tools, nothing is stripped
    answer = written(tokenizer, "<think>", "\n", "</think>", "\n", "\n\n", "l", "lo", "<|im_end|>")
    third = chat.extend(second, answer, [AGAIN])
    assert third.reused == len(first.context)
    between = "\n<|im_start|>user\n[result] 7\n[result] 7<|im_end|>\n<|im_start|>assistant\n"
    np.testing.assert_array_equal(
        third.context,
        np.concatenate(
            [
                first.context,
                written(tokenizer, "h", "e", "<|im_end|>"),
                tokenizer.encode(between),
                written(tokenizer, "l", "lo", "<|im_end|>"),
                tokenizer.encode("\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"),
            ]
        ),
    )


def test_an_empty_thought_that_the_opening_brings_is_stripped_too(tokenizer):
    template = load_template(tokenizer, enable_thinking=False)
    chat = Chat(tokenizer, template, thinking="strip")
    first = chat.begin([USER])
    assert tokenizer.decode(first.context).endswith("assistant\n<think>\n\n</think>\n\n")
    second = chat.extend(first, tokenizer.encode("ok<|im_end|>"), [AGAIN])
    history = [USER, {"role": "assistant", "content": "ok"}, AGAIN]
    assert tokenizer.decode(second.context) == template.render(history, add_generation_prompt=True)


def test_stripping_follows_the_template(tokenizer):
    template = compile_template(TEMPLATE.replace("loop.index0 < ns.asked", "false"), source="keeps")
    chat = Chat(tokenizer, template, thinking="strip")
    first = chat.begin([USER])
    thought = tokenizer.encode("<think>\nhm\n</think>\n\nok<|im_end|>")
    assert chat.extend(first, thought, [AGAIN]).reused == len(first.context) + len(thought)


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n", "</think>"]),
        st.text("helo \nüx", max_size=6).map(lambda text: text.strip("\n")),
        st.sampled_from([[USER], [AGAIN], [TOOL], [TOOL, TOOL], [TOOL, USER]]),
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(TURNS, st.sampled_from([None, [{"name": "f"}]]))
def test_contexts_read_as_the_template_renders(tokenizer, template, turns, tools):
    """ "strip" reads as the template renders; "keep" extends every context token by token."""
    strip, keep = (Chat(tokenizer, template, tools=tools, thinking=t) for t in ("strip", "keep"))
    a, b, history = strip.begin([USER]), keep.begin([USER]), [USER]
    for thought, answer, messages in turns:
        completion = written(tokenizer, thought, *answer, "<|im_end|>")
        before = np.concatenate([b.context, completion])
        a, b = strip.extend(a, completion, messages), keep.extend(b, completion, messages)
        history += [{"role": "assistant", "content": thought + answer}, *messages]
        rendered = template.render(history, tools=tools, add_generation_prompt=True)
        assert tokenizer.decode(a.context) == rendered
        np.testing.assert_array_equal(b.context[: len(before)], before)
        assert b.reused == len(before)
        assert (b.turns, len(b.settled) + len(b.opening)) == ((), len(b.context))


def test_bad_chats(tokenizer, template, tmp_path):
    def refused(text=None, **options):
        chosen = template if text is None else compile_template(text, source="t")
        with pytest.raises(InputError) as error:
            Chat(tokenizer, chosen, **options).begin([USER])
        return message(error)

    assert refused(thinking="drop") == "chat: thinking: expected keep or strip; got 'drop'"
    upper = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    wanted = "t: chat template: expected one that renders an assistant's content as it is, once; got 0 times"
    assert refused(upper) == wanted
    counted = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert refused(counted).startswith(
        "t: chat template: expected one that renders a message in the same way whatever follows it; got '1-'"
    )
    fickle = "{{ add_generation_prompt }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert refused(fickle) == (
        "t: add_generation_prompt: expected only text behind the messages; got 'Falsehello', then 'Truehello'"
    )
    chat = Chat(tokenizer, template)
    with pytest.raises(
        InputError, match=r"^chat: messages: expected at least one after a completion; got none$"
    ):
        chat.extend(chat.begin([USER]), [1], [])
    plain = write_chat_folder(tmp_path)
    values = json.loads((plain / "tokenizer.json").read_text())
    values["added_tokens"] = [t for t in values["added_tokens"] if t["content"] != "</think>"]
    (plain / "tokenizer.json").write_text(json.dumps(values))
    (plain / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer.json: </think>: expected a token; got no such token$"):
        Chat(load_tokenizer(plain), compile_template(TEMPLATE, source="t"), thinking="strip")
