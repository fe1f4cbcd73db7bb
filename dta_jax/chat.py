"""Conversations as token ids: what the model wrote is kept as it wrote it, and only what is new is encoded.

    begin(messages)                 context_0 = messages, opening
    extend(completion, messages)    context_1 = context_0, completion, closing, messages, opening

`opening` is what begins an assistant's message, `closing` what ends it (left out where the model wrote it
itself). Rendering a conversation anew from text would change tokens under the model: other splits, other
spacing, other log-probabilities, and prefixes that are not shared any more. Two policies for thinking:

    "keep"    Earlier thinking stays. Every context extends the one before and its completion.
    "strip"   As the template does it. Where new messages make it drop earlier thinking (Qwen3's does when the
              user speaks again, and not between results of tools), every assistant message loses what
              stands before its last `</think>` and the line breaks after it. Contexts branch there. Still
              no token is encoded anew: ids are cut out.

Not checked: that the template's control tokens keep the pieces apart. That is true of every template that
begins and ends messages with control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from dta_jax.chat_template import ChatTemplate, Message
from dta_jax.errors import InputError
from dta_jax.tokenizer import Tokenizer

Thinking: TypeAlias = Literal["keep", "strip"]
THINK_END: Final = "</think>"
_MARK: Final = "[[5a1c-assistant-content-7e93]]"  # stands for an assistant's content while rendering
_ASKED: Final = {"role": "user", "content": "-"}
_ANSWERED: Final = {"role": "assistant", "content": _MARK}
_THOUGHT: Final = {"role": "assistant", "content": f"<think>\n{_MARK}\n{THINK_END}\n\n-"}


@dataclass(frozen=True, eq=False)
class Turn:
    """One assistant message: int32 ids of what began it, what the model wrote, and what followed."""

    opening: np.ndarray
    completion: np.ndarray
    following: np.ndarray


@dataclass(frozen=True, eq=False)
class Conversation:
    """A conversation that waits for the model.

    Attributes:
      context: int32[n], what the model is shown next.
      reused: how many of them are the head of the context before and its completion: a cache holds them.
      settled: int32[m], the head of the context that will not change any more.
      turns: the turns behind `settled`, still with their thinking.
      opening: int32[k], the tail of the context, which begins the assistant's next message.
    """

    context: np.ndarray
    reused: int
    settled: np.ndarray
    turns: tuple[Turn, ...]
    opening: np.ndarray


class Chat:
    """Turns messages into contexts, incrementally.

    Args:
      tokenizer: the model's.
      template: the model's.
      tools: JSON schemas of the functions that the model may call.
      thinking: the policy for earlier thinking; see the module.

    Raises:
      InputError: the template does not render an assistant's content as it is, or "strip" is asked of a
        tokenizer without `</think>`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: Thinking = "keep",
    ):
        if thinking not in ("keep", "strip"):
            raise InputError("chat", "thinking", expected="keep or strip", actual=repr(thinking))
        self.tokenizer, self.template, self.thinking = tokenizer, template, thinking
        self.tools = None if tools is None else tuple(tools)
        before, _ = self._around_mark([_ASKED])
        asked = self._render([_ASKED])
        if not before.startswith(asked):
            raise InputError(
                template.source,
                "chat template",
                expected="one that renders a message in the same way whatever follows it",
                actual=f"{asked!r}, then {before!r}",
            )
        self._header = tokenizer.encode(before.removeprefix(asked))
        self._think_end = tokenizer.token_id(THINK_END) if thinking == "strip" else None

    def begin(self, messages: Sequence[Message]) -> Conversation:
        """The context of the model's first message.

        Args:
          messages: all that is said before, from the system's message on.
        """
        text = self._render(messages)
        settled = self.tokenizer.encode(text)
        opening = self._opening(messages, text)
        return Conversation(np.concatenate([settled, opening]), 0, settled, (), opening)

    def extend(
        self, conversation: Conversation, completion: Sequence[int] | np.ndarray, messages: Sequence[Message]
    ) -> Conversation:
        """The context of the model's next message.

        Args:
          conversation: what the model was shown.
          completion: int32[n], what it wrote, the token that ends its message included if it wrote that.
          messages: what follows, of the user or of tools; at least one.

        Raises:
          InputError: there is no message, or the template refuses them.
        """
        if not messages:
            raise InputError("chat", "messages", expected="at least one after a completion", actual="none")
        completion = np.asarray(completion, np.int32)
        _, text = self._around_mark(messages)
        following = self.tokenizer.encode(text)
        if len(completion) and len(following) and completion[-1] == following[0]:
            following = following[1:]
        opening = self._opening([_ASKED, _ANSWERED, *messages])
        settled = conversation.settled
        turns = (*conversation.turns, Turn(conversation.opening, completion, following))
        if self.thinking == "keep":
            settled, turns = _join(settled, turns), ()
        elif _MARK not in self._render([_ASKED, _THOUGHT, *messages]):
            settled, turns = _join(settled, tuple(map(self._stripped, turns))), ()
        context = np.concatenate([_join(settled, turns), opening])
        seen = np.concatenate([conversation.context, completion])
        return Conversation(context, _common_prefix(seen, context), settled, turns, opening)

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        return self.template.render(messages, tools=self.tools, **options)

    def _opening(self, messages: Sequence[Message], text: str | None = None) -> np.ndarray:
        text = self._render(messages) if text is None else text
        opened = self._render(messages, add_generation_prompt=True)
        if not opened.startswith(text):
            raise InputError(
                self.template.source,
                "add_generation_prompt",
                expected="only text behind the messages",
                actual=f"{text!r}, then {opened!r}",
            )
        return self.tokenizer.encode(opened.removeprefix(text))

    def _around_mark(self, messages: Sequence[Message]) -> tuple[str, str]:
        """What stands before an assistant's content that `messages` follow, and what behind it."""
        text = self._render([_ASKED, _ANSWERED, *messages])
        if text.count(_MARK) != 1:
            raise InputError(
                self.template.source,
                "chat template",
                expected="one that renders an assistant's content as it is, once",
                actual=f"{text.count(_MARK)} times",
            )
        before, behind = text.split(_MARK)
        return before, behind

    def _stripped(self, turn: Turn) -> Turn:
        """The turn as history shows it: the plain opening, and no thinking."""
        ends = np.flatnonzero(turn.completion == self._think_end)
        if not len(ends):
            return Turn(self._header, turn.completion, turn.following)
        start = ends[-1] + 1
        while start < len(turn.completion) and self._is_line_break(turn.completion[start]):
            start += 1
        return Turn(self._header, turn.completion[start:], turn.following)

    def _is_line_break(self, token: int) -> bool:
        text = self.tokenizer.decode([token])
        return bool(text) and not text.strip("\n")


def _join(settled: np.ndarray, turns: Sequence[Turn]) -> np.ndarray:
    parts = [part for turn in turns for part in (turn.opening, turn.completion, turn.following)]
    return np.concatenate([settled, *parts])


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
