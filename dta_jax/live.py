"""Rollouts made while training as a source of batches: environment, engine and collector of one run.

batch(step)   episodes of the weights of step - 1, or older ones within `Collect.max_staleness`
publish       the weights of a step, to the engine
snapshot      what a checkpoint needs beside the weights
keep          its accepted rollouts, in OUT/accepted/STEP.npz
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree

from dta_jax.advantages import informative
from dta_jax.chat import Chat
from dta_jax.chat_template import load_template
from dta_jax.collect.evaluation import Evaluate
from dta_jax.collect.loop import Collector
from dta_jax.collect.stream import Snapshot
from dta_jax.episode_rows import episode_returns, episodes_of
from dta_jax.errors import InputError, writing
from dta_jax.generation.local import LocalSampler
from dta_jax.generation.openai import OpenAIGenerator, OpenAIServer
from dta_jax.generation.protocol import Generator
from dta_jax.generation.sglang import SGLang, sglang_generator
from dta_jax.generation.spread import SpreadGenerator
from dta_jax.generation.vllm import VLLM, vllm_generator
from dta_jax.learner import Learner, TrainState
from dta_jax.model import Params
from dta_jax.objective import PreferencePairs, make_batch
from dta_jax.phases import note, phase
from dta_jax.placement import sampling_devices
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.rollouts import Rollouts, load_rollouts, save_rollouts
from dta_jax.settings import LiveRollouts
from dta_jax.step_work import Nothing, Planned
from dta_jax.tokenizer import load_tokenizer


class LiveFeed:
    """The batches of a run whose rollouts are made on the way. A context manager.

    Args:
      learner: of the run.
      settings: environment, engine and how rollouts are collected.
      params: the weights that the first episodes are answered with; see `sampling_params`.
      start: their version, the step that the run goes on from.
      out: the run's folder.
      saved: what the snapshot of that step said; None at the start.
    """

    def __init__(
        self,
        learner: Learner,
        settings: LiveRollouts,
        params: Params,
        *,
        start: int,
        out: Path,
        saved: Mapping[str, Any] | None,
    ):
        self._learner, self._out, self._save_every = learner, out, settings.save_every
        for name in ("accepted", "rollouts") if settings.save_every else ("accepted",):
            try:
                (out / name).mkdir(exist_ok=True)
            except OSError as error:
                raise InputError(out / name, "folder", expected="a folder", actual=error.strerror) from None
        self._collector = Collector(
            settings.environment,
            make_generator(settings, learner.model, params, version=start, seed=learner.train.seed),
            # An engine refuses a context that leaves no room; the collector ends the episode before.
            replace(settings.collect, max_context=learner.longest),
            seed=learner.train.seed,
            chat=load_chat(settings, learner.model.config.vocab_size),
            batch_groups=learner.train.batch_groups,
        )
        try:
            if isinstance(settings.generator, SGLang | VLLM):
                self._collector.publish(params, start)
            if saved is not None:
                accepted = _load_accepted(_accepted(out, start)) if saved["accepted"] else None
                self._collector.restore(saved, accepted)
        except BaseException:
            self._collector.close()
            raise

    def __enter__(self) -> LiveFeed:
        return self

    def __exit__(self, *error: object) -> None:
        self._collector.close()

    def get(self, step: int) -> Planned | Nothing:
        """The batch of a step, planned; blocks until its episodes are over."""
        with phase("rollouts"):
            found = self._collector.batch(step)
            note("environment", found.metrics["environment_seconds"])
        # A batch that reaches into the next epoch may have a task twice, in two groups.
        rollouts = replace(found.rollouts, task_id=found.group)
        if self._save_every is not None and step % self._save_every == 0:
            file = self._out / "rollouts" / f"{step}.npz"
            with writing(file):
                save_rollouts(file, rollouts)
        useless = self._why_useless(rollouts)
        if useless is not None:
            return Nothing(useless, found.metrics)
        with phase("plan"):
            batch = make_batch(rollouts, self._learner.train.objective)
            return self._learner.plan(batch, found.metrics)

    def _why_useless(self, rollouts: Rollouts) -> str | None:
        """Why a batch has no token with loss; None if it has."""
        spans = rollouts.completion_spans
        if not (spans[:, 2] > spans[:, 1]).any():
            return (
                "no episode has an answer: every first prompt fills the context of "
                f"{self._learner.longest} tokens, or nothing is answered"
            )
        if isinstance(self._learner.train.advantages, PreferencePairs):
            group = rollouts.require("task_id")[episodes_of(rollouts)[0]]
            if not informative(episode_returns(rollouts), group).any():
                return (
                    "there is no pair to prefer: rewards are equal within every group; "
                    "Collect.skip_equal = True replaces such groups, as far as Collect.max_resampled allows"
                )
        return None

    def publish(self, state: TrainState, step: int) -> None:
        """Hands the weights of a step to the engine."""
        self._collector.publish(sampling_params(self._learner, state), step)

    def evaluate(self, how: Evaluate, step: int) -> dict[str, float]:
        """Numbers of episodes that are not trained on, under names that begin with `eval_`."""
        found = self._collector.evaluate(how, seed=self._learner.train.seed)
        numbers = {name: x for name, x in found.items() if isinstance(x, int | float)}
        return {f"eval_{name}": float(x) for name, x in numbers.items()}

    def snapshot(self) -> Snapshot:
        """What a resumed run needs beside the weights; take it between `publish` and the next `get`."""
        return self._collector.state()

    def keep(self, step: int, snapshot: Snapshot, steps: Sequence[int], newest: int) -> None:
        """Keeps accepted rollouts for a checkpoint that is about to be saved.

        Args:
          step: of the checkpoint.
          snapshot: of that step.
          steps: of the checkpoints that are there; their rollouts stay.
          newest: so many of the newest stay in any case, as the disk may lag behind.
        """
        file = _accepted(self._out, step)
        if snapshot.accepted is not None:
            with writing(file):
                save_rollouts(file, snapshot.accepted)
        older = sorted((int(path.stem), path) for path in file.parent.glob("[0-9]*.npz"))
        for number, path in older[: -newest - 1]:
            if number not in steps:
                path.unlink()


def sampling_params(learner: Learner, state: TrainState) -> Params:
    """The policy's weights for an engine: a copy, where the next update would donate them."""
    params = learner.decoder_params(state)
    masters = {id(leaf) for leaf in tree.leaves(state.policy.params)}
    shared = any(id(leaf) in masters for leaf in tree.leaves(params))
    return tree.map(jnp.copy, params) if shared else params


def make_generator(
    settings: LiveRollouts, model: Qwen3, params: Params, *, version: int, seed: int
) -> Generator:
    """The engine of a run. Servers have to be given `params` first: they begin at the version before.

    Raises:
      InputError: a server's API key is not set; no tokenizer for a server that speaks text.
    """
    how, config = settings.generator, model.config
    if isinstance(how, LocalSampler):
        apart = sampling_devices(how)
        if len(apart) > 1:
            samplers = [how.make(model, params, version=version, device=device) for device in apart]
            return SpreadGenerator(samplers, how.rows)
        return how.make(model, params, version=version, device=apart[0] if apart else None)
    if isinstance(how, OpenAIServer):
        if settings.tokenizer is None:
            raise InputError(
                "LiveRollouts", "tokenizer", expected="a folder, for OpenAIServer", actual="None"
            )
        tokenizer = load_tokenizer(settings.tokenizer, config.vocab_size)
        return OpenAIGenerator(how, tokenizer, config.vocab_size, version=version, seed=seed)
    options: Any = {
        "companions": None if settings.tokenizer is None else Path(settings.tokenizer),
        "version": version - 1,
        "seed": seed,
    }
    if isinstance(how, SGLang):
        return sglang_generator(how, config, **options)
    return vllm_generator(how, config, **options)


def load_chat(settings: LiveRollouts, vocab_size: int) -> Chat | None:
    """How messages become tokens; None for environments that speak tokens.

    Raises:
      InputError: the folder has no tokenizer or chat template that can be used.
    """
    if settings.tokenizer is None:
        return None
    tokenizer = load_tokenizer(settings.tokenizer, vocab_size)
    return Chat(tokenizer, load_template(tokenizer), thinking=settings.thinking)


def check_fits(settings: LiveRollouts, model: Qwen3Config, max_length: int) -> int:
    """The longest context that a run can make, tokens; `max_length` is `Train.max_length`.

    Raises:
      InputError: the environment has ids beyond the vocabulary; or several processes train together.
    """
    if jax.process_count() > 1:
        expected = "one process: episodes of several would differ"
        raise InputError("Train", "rollouts", expected=expected, actual=f"{jax.process_count()} processes")
    limits = [settings.collect.max_context, model.max_position_embeddings, max_length]
    if isinstance(settings.generator, LocalSampler):
        limits.append(settings.generator.max_context)
    else:
        limits.append(settings.generator.context_length)
    needed = settings.tokens_below
    if needed is not None and needed > model.vocab_size:
        expected = f"at least {needed}, for {type(settings.environment).__name__}"
        raise InputError("model config", "vocab_size", expected=expected, actual=model.vocab_size)
    return min(limit for limit in limits if limit is not None)


def _load_accepted(file: Path) -> Rollouts | None:
    """Rollouts that were accepted and not trained on; None, with a warning, if their file is gone."""
    if not file.exists():
        warnings.warn(f"{file}: no such file; its episodes are played again", stacklevel=3)
        return None
    try:
        return load_rollouts(file)
    except InputError as error:
        raise InputError(
            file,
            error.field,
            expected=error.expected,
            actual=error.actual,
            hint="remove the file to have its episodes played again",
        ) from None


def _accepted(out: Path, step: int) -> Path:
    return out / "accepted" / f"{step}.npz"
