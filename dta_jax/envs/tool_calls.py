"""Tool calls in the text of an answer, as Qwen and Hermes models write them.

    <think>...</think>I'll look it up.
    <tool_call>
    {"name": "get_user", "arguments": {"id": "u1"}}
    </tool_call>

A call that can't be read is a call all the same: it comes back with what is wrong, to be told to the agent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

THINK_END: Final = "</think>"
_THINK: Final = "<think>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL: Final = re.compile(rf"{_OPEN}(.*?)(?:{_CLOSE}|(?={_OPEN})|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call.

    Attributes:
      name: of the function; "" if it can't be read.
      arguments: by name.
      error: what is wrong with it, a sentence for the agent; "" if nothing is.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def parse_answer(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """What an answer says to the user, and the calls that it makes, in order. Never raises.

    Args:
      text: an answer without its stop token. What stands before the last `</think>`, or behind a
        `<think>` that isn't closed, is thinking and counts for nothing.

    Returns:
      (what is left of the text without thinking and calls, stripped; the calls).
    """
    text = without_thinking(text)
    calls = tuple(_parse_call(match.group(1).strip()) for match in _CALL.finditer(text))
    return _CALL.sub("", text).strip(), calls


def render_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a call, as `parse_answer` reads it."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"{_OPEN}\n{call}\n{_CLOSE}"


def without_thinking(text: str) -> str:
    """What a text says behind its thinking."""
    said = text.rpartition(THINK_END)[2]
    return said.partition(_THINK)[0]


def _parse_call(body: str) -> ToolCall:
    try:
        call = json.loads(body)
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no half characters
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"the tool call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return ToolCall("", error='a tool call must be a JSON object with a "name"')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # an object inside a string, as some APIs have it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], error='the "arguments" of a tool call must be a JSON object')
    return ToolCall(call["name"], arguments)
