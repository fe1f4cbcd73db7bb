"""SGLang servers: the native `/generate` with token ids, and weights that follow the trainer's.

Written against SGLang 0.5: the documentation pages "SGLang for RL Systems" (of 0.5.11) and "Sampling
Parameters", the request structures in `managers/io_struct.py`, and, for versions of weights, pull request
8795 of August 2025.

    POST /generate                    input_ids, sampling_params, return_logprob, rid
    POST /abort_request               {"abort_all": true}: running generations answer with what they have
    POST /update_weights_from_disk    model_path, weight_version, flush_cache
    POST /flush_cache                 forgets keys and values, also where loading has not
    GET  /health                      200 if calls are taken
    GET  /model_info                  weight_version; older servers: /get_model_info, or no version at all

`/pause_generation` is not used: no call of ours runs while a server loads (see `weight_updates`), and its
other modes go on with keys and values of the old weights. A server belongs to one run; calls of others are
cut short too.

Log-probabilities are those after the temperature and before top-p and top-k, so truncated sampling is refused
unless `allow_inexact_logprobs`. Seeds reproduce tokens on servers started with
`--enable-deterministic-inference`; others ignore them. SGLang always ends at the model's own end tokens too,
which then stay in the completion.
"""

from __future__ import annotations

import uuid
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

_NOT_FOUND: Final = 404


@dataclass(frozen=True)
class SGLang(Servers):
    """SGLang servers of the policy. Attributes beside those of `Servers`:

    weights_dir: a directory that trainer and servers see under the same path.
    load_seconds: how long a server may take to load weights.
    context_length: the servers' `--context-length`; None for the model's.
    allow_inexact_logprobs: take top-p and top-k although log-probabilities are of the whole distribution: for
      evaluation, not for training.
    """

    weights_dir: str = ""
    load_seconds: float = 600.0
    context_length: int | None = None
    allow_inexact_logprobs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("weights_dir", bool(self.weights_dir), "a directory that trainer and servers share")
        self._check("load_seconds", 0 < self.load_seconds <= 1e6, "a positive number of seconds")
        self._check(
            "context_length", self.context_length is None or self.context_length > 2, "None, or above 2"
        )


class SGLangApi:
    """The interface; see the module."""

    spare_tokens = 1  # a prompt and its budget must stay below the context length

    def __init__(self, settings: SGLang, vocab_size: int):
        self._settings, self._vocab_size = settings, vocab_size

    def check_sampling(self, sampling: Sampling) -> None:
        truncated = sampling.top_p < 1 or sampling.top_k > 0
        if truncated and not self._settings.allow_inexact_logprobs:
            raise InputError(
                "SGLang",
                "allow_inexact_logprobs",
                expected="top_p=1 and top_k=0, as SGLang's log-probabilities are those before truncation",
                actual=f"top_p={sampling.top_p}, top_k={sampling.top_k}",
                hint="set it to True for evaluation",
            )

    async def generate(self, client: JsonClient, prompt: np.ndarray, sampling: Sampling, seed: int) -> Reply:
        request_id = uuid.uuid4().hex
        body = {
            "rid": request_id,
            "input_ids": prompt.tolist(),
            "sampling_params": _sampling_params(sampling, seed),
            "return_logprob": True,
            "stream": False,
        }
        answer = await client.json("POST", "/generate", body)
        return read_answer(answer, vocab_size=self._vocab_size, most=sampling.max_new_tokens)

    async def health(self, client: JsonClient) -> None:
        await client.send("GET", "/health", timeout=self._settings.probe_seconds)

    async def reported_version(self, client: JsonClient) -> int | None:
        seconds = self._settings.probe_seconds
        try:
            info = await client.json("GET", "/model_info", timeout=seconds)
        except CallError as error:
            if error.status != _NOT_FOUND:
                raise
            info = await client.json("GET", "/get_model_info", timeout=seconds)
        return _version(info)

    async def abort_all(self, client: JsonClient) -> None:
        body = {"rid": "", "abort_all": True}
        await client.send("POST", "/abort_request", body, timeout=self._settings.probe_seconds)

    async def load_weights(self, client: JsonClient, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        seconds = self._settings.load_seconds
        answer = await client.json("POST", "/update_weights_from_disk", body, timeout=seconds)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            words = answer.get("message") if isinstance(answer, dict) else answer
            bad_reply("weights loaded", words)
        await client.send("POST", "/flush_cache", {}, timeout=seconds)


def read_answer(answer: Any, *, vocab_size: int, most: int) -> Reply:
    """The answer of `/generate`: tokens from `meta_info.output_token_logprobs`, checked against `output_ids`.

    Raises:
      CallError: it is not what was asked for; see `checked_reply`.
    """
    meta = field(answer, "meta_info", dict)
    finish = field(meta, "finish_reason", dict)
    kind = finish.get("type")
    if kind == "abort" and finish.get("status_code") is not None:
        raise CallError("server", f"reply: aborted with status {finish['status_code']}")
    entries = meta.get("output_token_logprobs")
    if entries is None and kind == "abort":
        entries = []  # cut short while it waited
    if not isinstance(entries, list) or not all(isinstance(e, list) and len(e) >= 2 for e in entries):
        bad_reply("a list of [logprob, id, text]", type(entries).__name__)
    tokens = [entry[1] for entry in entries]
    if answer.get("output_ids", tokens) != tokens:
        bad_reply("output_ids that agree with output_token_logprobs", "others")
    if kind == "stop" and (not tokens or finish.get("matched") != tokens[-1]):
        # "NaN happened", a stop string nobody asked for, or the end token cut off
        bad_reply("a completion that ends with the token it stopped at", repr(finish.get("matched")))
    return checked_reply(
        tokens,
        [entry[0] for entry in entries],
        kind,
        vocab_size=vocab_size,
        most=most,
        version=_version(meta),
    )


def sglang_generator(
    settings: SGLang, model: Qwen3Config, *, companions: Path | None = None, version: int = 0, seed: int = 0
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
        SGLangApi(settings, model.vocab_size),
        settings,
        model,
        weights_dir=Path(settings.weights_dir),
        context_length=settings.context_length,
        companions=companions,
        version=version,
        seed=seed,
    )


def _sampling_params(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Every parameter, also those that we never change: servers take defaults from the model's folder."""
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_tokens),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": seed,
    }


def _version(info: Any) -> int | None:
    said = info.get("weight_version") if isinstance(info, dict) else None
    return int(said) if isinstance(said, str) and said.isdecimal() else None
