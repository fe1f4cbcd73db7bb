"""vLLM servers: `/v1/completions` with token ids, and weights that follow the trainer's.

Written against vLLM 0.25: the documentation page "Async Reinforcement Learning", the request structure in
`openai/completion/protocol.py`, the development routes in `serve/dev/rlhf` and `serve/rpc`, and pull requests
28037 and 32351 (pause, of November 2025 and January 2026) and 48284 (a path for `reload_weights`). Start
servers with

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs

    POST /v1/completions         prompt as ids, logprobs, return_token_ids (before: tokens named "token_id:N")
    POST /pause?mode=abort       running generations answer with what they have; then POST /resume
    POST /collective_rpc         reload_weights with weights_path
    POST /reset_prefix_cache     forgets keys and values
    POST /update_weight_version, GET /weight_info    where they exist: to know a server that was started anew
    GET  /health                 200 if calls are taken

A server of the development mode trusts whoever reaches it: keep it off open networks. It belongs to one run;
calls of others are cut short too. A server that does not report its version, and is started anew while it
runs no call, may answer with the weights it was started with unless a look at it failed meanwhile: set
`probe_seconds` below half the time that a start takes.

Log-probabilities are the sampled distribution's if the server was started as above. Set `processed_logprobs =
False` if it was not; then only plain sampling, temperature 1 without truncation, is exact, and other sampling
is refused. Cancelled calls are aborted by closing their connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dta_jax.errors import InputError
from dta_jax.generation.http import CallError, JsonClient
from dta_jax.generation.pool import Servers
from dta_jax.generation.protocol import Sampling
from dta_jax.generation.replies import Reply, bad_reply, checked_reply, field
from dta_jax.generation.weight_updates import UpdatableGenerator
from dta_jax.qwen3 import Qwen3Config

TOKEN_ID: Final = "token_id:"
_NOT_FOUND: Final = 404


@dataclass(frozen=True)
class VLLM(Servers):
    """vLLM servers of the policy. Attributes beside those of `Servers`:

    weights_dir: a directory that trainer and servers see under the same path.
    model: the name that the servers serve the model by; None for their only one.
    load_seconds: how long a server may take to load weights.
    context_length: the servers' `--max-model-len`; None for the model's.
    processed_logprobs: the servers run with `--logprobs-mode processed_logprobs`.
    allow_inexact_logprobs: take sampling whose log-probabilities the servers don't give: for evaluation, not
      for training.
    """

    weights_dir: str = ""
    model: str | None = None
    load_seconds: float = 600.0
    context_length: int | None = None
    processed_logprobs: bool = True
    allow_inexact_logprobs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("weights_dir", bool(self.weights_dir), "a directory that trainer and servers share")
        self._check("model", self.model is None or bool(self.model), "None, or a name")
        self._check("load_seconds", 0 < self.load_seconds <= 1e6, "a positive number of seconds")
        self._check(
            "context_length", self.context_length is None or self.context_length > 1, "None, or above 1"
        )


class VLLMApi:
    """The interface; see the module."""

    spare_tokens = 0

    def __init__(self, settings: VLLM, vocab_size: int):
        self._settings, self._vocab_size = settings, vocab_size

    def check_sampling(self, sampling: Sampling) -> None:
        plain = sampling.temperature == 1 and sampling.top_p == 1 and not sampling.top_k
        if not (plain or self._settings.processed_logprobs or self._settings.allow_inexact_logprobs):
            raise InputError(
                "VLLM",
                "processed_logprobs",
                expected="temperature=1, top_p=1 and top_k=0, as the servers give raw log-probabilities",
                actual=f"temperature={sampling.temperature}, top_p={sampling.top_p}, top_k={sampling.top_k}",
                hint="start them with --logprobs-mode processed_logprobs",
            )

    async def generate(self, client: JsonClient, prompt: np.ndarray, sampling: Sampling, seed: int) -> Reply:
        body = {
            "prompt": prompt.tolist(),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "seed": seed,
            "stop_token_ids": list(sampling.stop_tokens),
            "ignore_eos": True,  # only `stop_tokens` end a completion
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if self._settings.model is not None:
            body["model"] = self._settings.model
        answer = await client.json("POST", "/v1/completions", body)
        return read_answer(answer, prompt, sampling, self._vocab_size)

    async def health(self, client: JsonClient) -> None:
        await client.send("GET", "/health", timeout=self._settings.probe_seconds)

    async def reported_version(self, client: JsonClient) -> int | None:
        try:
            info = await client.json("GET", "/weight_info", timeout=self._settings.probe_seconds)
        except CallError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        said = info.get("weight_version") if isinstance(info, dict) else None
        return int(said) if isinstance(said, str) and said.isdecimal() else None

    async def abort_all(self, client: JsonClient) -> None:
        seconds = self._settings.probe_seconds
        await client.send("POST", "/pause?mode=abort", {}, timeout=seconds)
        await client.send("POST", "/resume", {}, timeout=seconds)

    async def load_weights(self, client: JsonClient, folder: Path, version: int) -> None:
        seconds = self._settings.load_seconds
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": seconds}
        await client.send("POST", "/collective_rpc", body, timeout=seconds)
        await client.send("POST", "/reset_prefix_cache", {}, timeout=seconds)
        try:
            await client.send(
                "POST", "/update_weight_version", {"new_version": str(version)}, timeout=seconds
            )
        except CallError as error:
            if error.status != _NOT_FOUND:
                raise


def read_answer(answer: Any, prompt: np.ndarray, sampling: Sampling, vocab_size: int) -> Reply:
    """The answer of `/v1/completions`: ids from `token_ids` or from tokens named "token_id:N".

    Raises:
      CallError: it is not what was asked for, or the server saw another prompt; see also `checked_reply`.
    """
    stop_tokens, most = sampling.stop_tokens, sampling.max_new_tokens
    choices = field(answer, "choices", list)
    if len(choices) != 1:
        bad_reply("one choice", len(choices))
    choice = choices[0]
    finish = field(choice, "finish_reason", str)
    if choice.get("prompt_token_ids") not in (None, prompt.tolist()):
        bad_reply("the prompt as it was sent", "another prompt")
    logprobs = choice.get("logprobs")
    if logprobs is None and finish == "abort":
        return checked_reply([], [], finish, vocab_size=vocab_size, most=most)  # cut short while it waited
    named = [_token_id(token) for token in field(logprobs, "tokens", list)]
    tokens = choice.get("token_ids")
    if tokens is None:
        tokens = named
    if tokens != named:
        bad_reply("token_ids that agree with the tokens of logprobs", "others")
    stops = (*stop_tokens, choice.get("stop_reason"))
    if finish == "stop" and (not tokens or tokens[-1] not in stops):
        bad_reply("a completion that ends with the token it stopped at", repr(choice.get("stop_reason")))
    return checked_reply(
        tokens, field(logprobs, "token_logprobs", list), finish, vocab_size=vocab_size, most=most
    )


def vllm_generator(
    settings: VLLM, model: Qwen3Config, *, companions: Path | None = None, version: int = 0, seed: int = 0
) -> UpdatableGenerator:
    """The engine: `settings`' servers for the policy `model`.

    Args:
      settings: the servers.
      model: the policy.
      companions: a folder whose tokenizer goes along with the weights.
      version: of the weights that the servers were started with.
      seed: of the spread of waiting times.

    Raises:
      InputError: the API key's variable is not set.
    """
    return UpdatableGenerator(
        VLLMApi(settings, model.vocab_size),
        settings,
        model,
        weights_dir=Path(settings.weights_dir),
        context_length=settings.context_length,
        companions=companions,
        version=version,
        seed=seed,
    )


def _token_id(token: Any) -> Any:
    digits = token.removeprefix(TOKEN_ID) if isinstance(token, str) else ""
    return int(digits) if digits.isdecimal() and digits != token else token
