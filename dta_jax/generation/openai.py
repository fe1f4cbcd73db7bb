"""Any OpenAI-compatible server, with its own weights: for evaluation, judges and user simulators.

`generate` sends a prompt's text to `/v1/completions`; `chat` sends messages to `/v1/chat/completions` and
returns text. The interface speaks text, and the engine protocol ids. Ids are found in this order:

    token_ids in the answer            as vLLM and SGLang give them
    tokens named "token_id:N"          in the log-probabilities
    tokens as text                     in the log-probabilities: the one id that has this text. A part of a
                                       character, or a text that several ids have, stands for none.

What is found so counts as sampled only if the prompt's text also has the prompt's ids, and if a completion
that stopped ends with its stop token. Otherwise the answer is encoded anew, by `tokenizer`: these may be
other ids than were drawn, and there are no log-probabilities (NaN stands for them, so that no loss takes them
unseen). That is refused unless `allow_retokenized`. Written against OpenAI's API reference and `transformers
serve` of transformers 5.24, which takes text only and gives neither token ids nor log-probabilities.

Stop tokens are not sent: servers end at the model's own end tokens. Where the answer goes on after a stop
token, it is cut. There is no top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dta_jax.errors import InputError
from dta_jax.generation.http import JsonClient
from dta_jax.generation.pool import Servers
from dta_jax.generation.protocol import Sampling
from dta_jax.generation.remote import Failures, RemoteGenerator
from dta_jax.generation.replies import FINISHES, Reply, bad_reply, checked_reply, field
from dta_jax.tokenizer import Tokenizer

TOKEN_ID: Final = "token_id:"
_NO_LOGPROBS: Final = "no answer has token ids or tokens that map to ids, with log-probabilities"


@dataclass(frozen=True)
class OpenAIServer(Servers):
    """OpenAI-compatible servers. Attributes beside those of `Servers`:

    model: the name of the model on the servers.
    context_length: tokens of prompt and completion together, at most.
    logprobs: ask for log-probabilities; servers that know none may refuse the question.
    health_path: answers with 200 if calls are taken.
    allow_retokenized: encode text anew where ids are not to be had: for evaluation, not for training.
    """

    model: str = ""
    context_length: int = 32_768
    logprobs: bool = True
    health_path: str = "/v1/models"
    allow_retokenized: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("model", bool(self.model), "the model's name on the servers")
        self._check("context_length", self.context_length > 1, "above 1")
        self._check("health_path", self.health_path.startswith("/"), "a path, from / on")
        possible = self.logprobs or self.allow_retokenized
        self._check("logprobs", possible, "True, unless allow_retokenized is True")


class OpenAIApi:
    """The interface; see the module."""

    spare_tokens = 0

    def __init__(self, settings: OpenAIServer, tokenizer: Tokenizer, vocab_size: int):
        self._settings, self._tokenizer, self._vocab_size = settings, tokenizer, vocab_size
        self._ids_by_text: dict[str, int | None] | None = None

    def check_sampling(self, sampling: Sampling) -> None:
        if sampling.top_k:
            raise InputError(
                "OpenAIServer", "top_k", expected="0: the interface has none", actual=sampling.top_k
            )
        plain = sampling.temperature == 1 and sampling.top_p == 1
        if not (plain or self._settings.allow_retokenized):
            raise InputError(
                "OpenAIServer",
                "sampling",
                expected="temperature=1 and top_p=1, as servers differ in what log-probabilities include",
                actual=f"temperature={sampling.temperature}, top_p={sampling.top_p}",
                hint="allow_retokenized=True takes it, for evaluation",
            )

    async def generate(self, client: JsonClient, prompt: np.ndarray, sampling: Sampling, seed: int) -> Reply:
        text = self._tokenizer.decode(prompt)
        body = {
            "model": self._settings.model,
            "prompt": text,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
        }
        if self._settings.logprobs:
            body["logprobs"] = 1
        answer = await client.json("POST", "/v1/completions", body)
        choice = _only_choice(answer)
        seen = self._prompt_as_seen(answer, text)
        reply = self._sampled(choice, sampling) if np.array_equal(seen, prompt) else None
        if reply is not None:
            return reply
        if not self._settings.allow_retokenized:
            raise InputError(
                "OpenAIServer",
                "allow_retokenized",
                expected="ids and log-probabilities of what was sampled, for the prompt that was sent",
                actual=_NO_LOGPROBS if np.array_equal(seen, prompt) else "a prompt whose text has other ids",
                hint="set it to True for evaluation",
            )
        return self._retokenized(choice, sampling)

    async def chat(self, client: JsonClient, body: Mapping[str, Any]) -> str:
        """The text of the answer to `/v1/chat/completions`."""
        answer = await client.json("POST", "/v1/chat/completions", {"model": self._settings.model, **body})
        message = field(_only_choice(answer), "message", dict)
        return field(message, "content", str)

    async def health(self, client: JsonClient) -> None:
        await client.send("GET", self._settings.health_path, timeout=self._settings.probe_seconds)

    def _prompt_as_seen(self, answer: Any, text: str) -> np.ndarray:
        """The prompt's ids as the server read its text, as far as that can be known."""
        ids = self._tokenizer.encode(text)
        usage = answer.get("usage")
        counted = usage.get("prompt_tokens", len(ids)) if isinstance(usage, dict) else len(ids)
        return ids if counted == len(ids) else np.empty(0, np.int32)

    def _sampled(self, choice: Mapping[str, Any], sampling: Sampling) -> Reply | None:
        """The answer as it was sampled; None if that can't be known."""
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, dict):
            return None
        if isinstance(logprobs.get("content"), list):  # as in chat completions
            entries = [(field(e, "token", str), e.get("logprob")) for e in logprobs["content"]]
        else:
            named, values = field(logprobs, "tokens", list), field(logprobs, "token_logprobs", list)
            if len(named) != len(values):
                bad_reply("as many log-probabilities as tokens", f"{len(values)} and {len(named)}")
            entries = list(zip(named, values, strict=True))
        ids = choice.get("token_ids")
        if ids is None:
            ids = [self._id_of(token) for token, _ in entries]
        if None in ids:
            return None
        if len(ids) != len(entries):
            bad_reply("as many log-probabilities as tokens", f"{len(entries)} and {len(ids)}")
        values, finish = [value for _, value in entries], choice.get("finish_reason")
        ids, values, finish = _cut(ids, values, finish, sampling.stop_tokens)
        if finish == "stop" and (not ids or ids[-1] not in sampling.stop_tokens):
            return None  # the end token was drawn, and is not among the tokens
        return checked_reply(ids, values, finish, vocab_size=self._vocab_size, most=sampling.max_new_tokens)

    def _retokenized(self, choice: Mapping[str, Any], sampling: Sampling) -> Reply:
        ids = self._tokenizer.encode(field(choice, "text", str)).tolist()
        ids, _, finish = _cut(ids, ids, choice.get("finish_reason"), sampling.stop_tokens)
        ids = ids[: sampling.max_new_tokens]
        if not ids and finish == "stop" and sampling.stop_tokens:
            ids = [sampling.stop_tokens[0]]  # nothing was said: only an end token can have been drawn
        reply = checked_reply(ids, [0.0] * len(ids), finish, vocab_size=self._vocab_size, most=len(ids))
        return Reply(reply.tokens, np.full(len(ids), np.nan, np.float32), reply.finish)

    def _id_of(self, token: Any) -> int | None:
        if not isinstance(token, str):
            bad_reply("tokens as text", type(token).__name__)
        digits = token.removeprefix(TOKEN_ID)
        if digits != token and digits.isdecimal():
            return int(digits)
        if self._ids_by_text is None:
            self._ids_by_text = {}
            for i in range(self._vocab_size):
                text = self._tokenizer.decode([i])
                self._ids_by_text[text] = None if text in self._ids_by_text or "\ufffd" in text else i
        return self._ids_by_text.get(token)


class OpenAIGenerator(RemoteGenerator):
    """A `Generator` that can also be spoken to in messages.

    Args:
      settings: the servers.
      tokenizer: the model's.
      vocab_size: the model's.
      version: what completions are stamped with.
      seed: of the spread of waiting times.

    Raises:
      InputError: the API key's variable is not set.
    """

    def __init__(
        self,
        settings: OpenAIServer,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        version: int = 0,
        seed: int = 0,
    ):
        api = OpenAIApi(settings, tokenizer, vocab_size)
        super().__init__(
            api,
            settings,
            vocab_size=vocab_size,
            context_length=settings.context_length,
            version=version,
            seed=seed,
        )
        self._chat_api = api

    async def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, *, seed: int) -> str:
        """The assistant's next message, as text.

        Args:
          messages: of the conversation, as the interface takes them: `role`, `content`, ...
          sampling: `top_k` and `stop_tokens` are not sent.
          seed: sent along.

        Raises:
          GenerationError: the engine gave up.
        """
        body = {
            "messages": list(messages),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
        }
        return await self._answer(lambda server: self._chat_api.chat(server.client, body), (), Failures())


def _only_choice(answer: Any) -> dict[str, Any]:
    choices = field(answer, "choices", list)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        bad_reply("one choice", len(choices))
    return choices[0]


def _cut(
    ids: list[Any], values: list[Any], finish: Any, stop_tokens: Sequence[int]
) -> tuple[list[Any], list[Any], Any]:
    """Everything up to the first stop token, if there is one; the reason to finish is checked."""
    if finish not in FINISHES:
        bad_reply(f"a finish reason among {', '.join(FINISHES)}", repr(finish))
    end = next((i for i, token in enumerate(ids) if token in stop_tokens), None)
    return (ids, values, finish) if end is None else (ids[: end + 1], values[: end + 1], "stop")
