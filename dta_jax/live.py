"""Rollouts made while training as a source of batches: environment, engine and collector of one run.

batch(step)   episodes of the weights of step - 1, or older ones within `Collect.max_staleness`
publish       the weights of a step, to the engine
snapshot      what a checkpoint needs beside the weights
keep          its accepted rollouts, in OUT/accepted/STEP.npz

Where episodes may run ahead, the next batch is planned in a thread as soon as they are over, while the device
works on the one before. Of several processes the first collects, and all plan and train on what it got.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree
from jax.sharding import NamedSharding, PartitionSpec

from dta_jax.chat import Chat
from dta_jax.chat_template import load_template
from dta_jax.collect.evaluation import Evaluate
from dta_jax.collect.loop import Collected, Collector
from dta_jax.collect.stream import Snapshot
from dta_jax.errors import InputError, writing
from dta_jax.first_process import on_first
from dta_jax.generation.local import LocalSampler
from dta_jax.generation.openai import OpenAIGenerator, OpenAIServer
from dta_jax.generation.protocol import Generator
from dta_jax.generation.sglang import SGLang, sglang_generator
from dta_jax.generation.spread import SpreadGenerator
from dta_jax.generation.vllm import VLLM, vllm_generator
from dta_jax.learner import Learner, TrainState
from dta_jax.model import Params
from dta_jax.objective import PreferencePairs, has_differences, make_batch
from dta_jax.phases import note, phase
from dta_jax.placement import sampling_devices
from dta_jax.plan_ahead import PlanAhead
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
        self._collector: Collector | None = None
        self._plans: PlanAhead[Planned | Nothing] | None = None
        on_first(lambda: self._open(settings, params, start, saved))
        # Several processes are told of a batch together, and not from another thread.
        if settings.collect.max_staleness > 0 and jax.process_count() == 1:
            self._plans = PlanAhead(self._plan_ahead, last=learner.train.steps)

    def _open(
        self, settings: LiveRollouts, params: Params, start: int, saved: Mapping[str, Any] | None
    ) -> None:
        learner, out = self._learner, self._out
        collector = Collector(
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
                collector.publish(params, start)
            if saved is not None:
                accepted = _load_accepted(_accepted(out, start)) if saved["accepted"] else None
                collector.restore(saved, accepted)
        except BaseException:
            collector.close()
            raise
        self._collector = collector

    def __enter__(self) -> LiveFeed:
        return self

    def __exit__(self, *error: object) -> None:
        if self._plans is not None:
            self._plans.close()
        if self._collector is not None:
            self._collector.close()

    @property
    def _first(self) -> Collector:
        """The collector, where there is one: inside `on_first`."""
        assert self._collector is not None
        return self._collector

    def get(self, step: int) -> Planned | Nothing:
        """The batch of a step, planned; blocks until its episodes are over."""
        began = time.perf_counter()
        planned: Planned | Nothing | None = None
        with phase("rollouts"):
            if self._plans is not None:
                planned = self._plans.get(step)
            found = on_first(lambda: _plain(self._first.batch(step)))
            note("environment", found["metrics"]["environment_seconds"])
        metrics = found["metrics"] | {"wait_seconds": time.perf_counter() - began}
        rollouts = _by_group(Rollouts(**found["rollouts"]), found["group"])
        if self._save_every is not None and step % self._save_every == 0 and self._collector is not None:
            file = self._out / "rollouts" / f"{step}.npz"
            with writing(file):
                save_rollouts(file, rollouts)
        with phase("plan"):
            return replace(planned or self._plan(rollouts), metrics=metrics)

    def _plan_ahead(self, step: int) -> Planned | Nothing:
        """In the thread of `PlanAhead`."""
        return self._plan(_by_group(*self._first.ahead(step)))

    def _plan(self, rollouts: Rollouts) -> Planned | Nothing:
        useless = self._why_useless(rollouts)
        if useless is not None:
            return Nothing(useless, {})
        return self._learner.plan(make_batch(rollouts, self._learner.train.objective))

    def _why_useless(self, rollouts: Rollouts) -> str | None:
        """Why a batch has no token with loss; None if it has."""
        spans = rollouts.completion_spans
        if not (spans[:, 2] > spans[:, 1]).any():
            return (
                "no episode has an answer: every first prompt fills the context of "
                f"{self._learner.longest} tokens, or nothing is answered"
            )
        objective = self._learner.train.objective
        if isinstance(objective.credit, PreferencePairs) and not has_differences(rollouts, objective):
            return (
                f"there is no pair to prefer: there are no {objective.credit.needs}; "
                "Collect.skip_equal = True replaces groups of equal rewards, as far as Collect.max_resampled "
                "allows"
            )
        return None

    def publish(self, state: TrainState, step: int) -> None:
        """Hands the weights of a step to the engine."""
        params = sampling_params(self._learner, state)
        on_first(lambda: self._first.publish(params, step))

    def evaluate(self, how: Evaluate, step: int) -> dict[str, float]:
        """Numbers of episodes that are not trained on, under names that begin with `eval_`."""
        found = on_first(lambda: self._first.evaluate(how, seed=self._learner.train.seed))
        numbers = {name: x for name, x in found.items() if isinstance(x, int | float)}
        return {f"eval_{name}": float(x) for name, x in numbers.items()}

    def snapshot(self) -> Snapshot:
        """What a resumed run needs beside the weights; take it between `publish` and the next `get`."""
        taken: Snapshot | None = None

        def take() -> dict[str, Any]:
            nonlocal taken
            taken = self._first.state()
            return taken.state

        state = on_first(take)
        return taken or Snapshot(state, None)  # accepted rollouts are the first process's to keep

    def keep(self, step: int, snapshot: Snapshot, steps: Sequence[int], newest: int) -> None:
        """Keeps accepted rollouts for a checkpoint that is about to be saved.

        Args:
          step: of the checkpoint.
          snapshot: of that step.
          steps: of the checkpoints that are there; their rollouts stay.
          newest: so many of the newest stay in any case, as the disk may lag behind.
        """
        if self._collector is None:
            return
        file = _accepted(self._out, step)
        if snapshot.accepted is not None:
            with writing(file):
                save_rollouts(file, snapshot.accepted)
        older = sorted((int(path.stem), path) for path in file.parent.glob("[0-9]*.npz"))
        for number, path in older[: -newest - 1]:
            if number not in steps:
                path.unlink()


def _plain(found: Collected) -> dict[str, Any]:
    """A batch in the form that `on_first` sends."""
    return {"rollouts": vars(found.rollouts), "group": found.group, "metrics": found.metrics}


def sampling_params(learner: Learner, state: TrainState) -> Params:
    """The policy's weights for an engine: a copy, where the next update would donate them.

    With several processes each gets all of them, on a device of its own; they have to call it together.
    """
    params = learner.decoder_params(state)
    if jax.process_count() > 1:
        mesh = tree.leaves(params)[0].sharding.mesh
        whole = _copies(params, NamedSharding(mesh, PartitionSpec()))
        return tree.map(lambda leaf: leaf.addressable_data(0), whole)
    masters = {id(leaf) for leaf in tree.leaves(state.policy.params)}
    shared = any(id(leaf) in masters for leaf in tree.leaves(params))
    return tree.map(jnp.copy, params) if shared else params


@functools.partial(jax.jit, static_argnames="place")
def _copies(params: Params, place: NamedSharding) -> Params:
    return tree.map(lambda leaf: jax.lax.with_sharding_constraint(jnp.copy(leaf), place), params)


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
      InputError: the environment has ids beyond the vocabulary.
    """
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


def _by_group(rollouts: Rollouts, group: np.ndarray) -> Rollouts:
    """With groups for tasks: a batch of two epochs may have a task twice, in two groups."""
    return replace(rollouts, task_id=group)


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
