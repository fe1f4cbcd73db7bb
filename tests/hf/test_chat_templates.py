"""Tokenizer and chat template against transformers' own, on one folder."""

import pytest
from transformers import AutoTokenizer

from dta_jax.chat import Chat
from dta_jax.chat_template import load_template
from dta_jax.tokenizer import load_tokenizer
from tests.chat_folder import write_chat_folder

USER = {"role": "user", "content": "hello\n\nüber <|im_end|> 12"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<größe>", "parameters": {}}}]
CALL = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello", "tool_calls": None}
HISTORIES = [
    [USER],
    [{"role": "system", "content": "be brief"}, USER],
    [USER, CALL, {"role": "tool", "content": "7"}, {"role": "tool", "content": "8"}],
    [USER, CALL, {"role": "tool", "content": "7"}, CALL, USER],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_prompts_are_those_of_transformers(folder, history, tools, variables):
    theirs = AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    template = load_template(tokenizer, **variables)
    options = {"tools": tools, "add_generation_prompt": True, **variables}
    text = theirs.apply_chat_template(history, tokenize=False, **options)
    ids = theirs.apply_chat_template(history, **options)["input_ids"]
    assert template.render(history, tools=tools, add_generation_prompt=True) == text
    assert Chat(tokenizer, template, tools=tools).begin(history).context.tolist() == ids
    assert tokenizer.decode(ids) == theirs.decode(ids)
