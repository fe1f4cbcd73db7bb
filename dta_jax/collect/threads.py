"""The contexts of one episode: what each thread was shown and wrote, as token ids.

An environment that speaks token ids needs nothing else; one that speaks chat messages needs a `Chat`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dta_jax.chat import Chat, Conversation
from dta_jax.envs.protocol import Observation
from dta_jax.errors import InputError

_SOURCE: Final = "environment"


class Speaker:
    """Turns messages into token ids and completions into text, for all episodes of a run.

    Args:
      chat: the model's; None where the environment speaks token ids only.
      stop_tokens: ids that end a completion and are no part of its text.
    """

    def __init__(self, chat: Chat | None, stop_tokens: Collection[int]):
        self._chat = chat
        self._with_tools: dict[str, Chat] = {}
        self._control = set(stop_tokens)
        if chat is not None:
            self._control |= {chat.tokenizer.token_id(text) for text in chat.tokenizer.special.values()}

    def chat(self, tools: Sequence[Mapping[str, Any]] | None) -> Chat:
        """The chat with these tools, or with the model's own where the observation names none.

        Raises:
          InputError: there is no chat.
        """
        if self._chat is None:
            raise InputError(
                _SOURCE,
                "observation",
                expected="token ids, since the run has no tokenizer",
                actual="chat messages",
                hint="messages need a model with a tokenizer and a chat template",
            )
        if tools is None:
            return self._chat
        key = json.dumps(tools, sort_keys=True)
        if key not in self._with_tools:
            base = self._chat
            self._with_tools[key] = Chat(base.tokenizer, base.template, tools=tools, thinking=base.thinking)
        return self._with_tools[key]

    def text(self, tokens: np.ndarray) -> str | None:
        """A completion as text, without control tokens at its end; None without a tokenizer."""
        if self._chat is None:
            return None
        end = len(tokens)
        while end and int(tokens[end - 1]) in self._control:
            end -= 1
        return self._chat.tokenizer.decode(tokens[:end])


@dataclass(eq=False)
class _Thread:
    """What a thread was shown, by tokens or by messages, and what it wrote since."""

    context: np.ndarray
    chat: Chat | None = None
    conversation: Conversation | None = None
    completion: np.ndarray | None = None


class Threads:
    """The threads of one episode."""

    def __init__(self, speaker: Speaker):
        self._speaker = speaker
        self._threads: dict[str, _Thread] = {}

    def observe(self, observation: Observation) -> np.ndarray:
        """Adds an observation to its thread.

        Returns:
          int32[p], p >= 1: the whole context, the prompt of the thread's next completion.

        Raises:
          InputError: the observation is neither tokens nor messages, or not what the thread is made of; or
            the context is empty; or the chat template refuses the messages.
        """
        name, tokens, messages = observation.thread, observation.tokens, observation.messages
        if (tokens is None) == (messages is None):
            actual = "neither" if tokens is None else "both"
            raise InputError(_SOURCE, "observation", expected="either tokens or messages", actual=actual)
        before = None if observation.restart else self._threads.get(name)
        if before is not None and (before.chat is None) != (messages is None):
            kind, other = ("tokens", "messages") if before.chat is None else ("messages", "tokens")
            raise InputError(_SOURCE, f"thread {name!r}", expected=f"{kind}, as it began", actual=other)
        if messages is not None:
            thread = self._said(before, messages, observation.tools)
        else:
            shown = [np.zeros(0, np.int32), *_parts(before), np.asarray(tokens, np.int32)]
            thread = _Thread(np.concatenate(shown))
        if not len(thread.context):
            raise InputError(_SOURCE, f"thread {name!r}", expected="at least one token", actual="no token")
        self._threads[name] = thread
        return thread.context

    def answered(self, thread: str, completion: np.ndarray) -> None:
        """Notes what a thread wrote."""
        self._threads[thread].completion = completion

    def _said(
        self,
        before: _Thread | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> _Thread:
        if before is None or before.chat is None or before.conversation is None or before.completion is None:
            chat = self._speaker.chat(tools)
            conversation = chat.begin(messages)
        else:
            chat = before.chat
            conversation = chat.extend(before.conversation, before.completion, messages)
        return _Thread(conversation.context, chat, conversation)


def _parts(thread: _Thread | None) -> list[np.ndarray]:
    """What a thread has so far."""
    if thread is None:
        return []
    return [thread.context] if thread.completion is None else [thread.context, thread.completion]
