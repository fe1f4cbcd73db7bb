"""What one step does to the weights: scores, credit, gradients over the batch's tree, updates.

    Planned          a batch, cut into minibatches, with a schedule for each (host only)
      -> score       log-probabilities under the weights before the step, the reference's, critic's values
      -> credit      rewards become advantages, over the whole batch (`dta_jax.objective`)
      -> gradients   minibatch after minibatch, epoch after epoch, each followed by its update
      -> a row       of metrics

Scores run the very operations of the gradient, so the first ratio is exactly 1.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from dta_jax.composite_losses import AtProximal
from dta_jax.guards import Watch
from dta_jax.hf_config import read_config
from dta_jax.hf_weights import load_params
from dta_jax.losses import TokenLoss
from dta_jax.memory_plan import MemoryPlan
from dta_jax.memory_predict import Setup
from dta_jax.minibatches import split_along_trie
from dta_jax.model import Numbers, Params, cast
from dta_jax.objective import Batch, PreferencePairs, credited
from dta_jax.optimizer import learning_rate, make_optimizer, updates_made
from dta_jax.phases import phase
from dta_jax.placement import training_devices
from dta_jax.plan_settings import settle
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.sequence_losses import Injected, SequenceLoss
from dta_jax.settings import HuggingFaceModel, LiveRollouts, Train
from dta_jax.sharding import DATA
from dta_jax.step_work import Planned, StepWork
from dta_jax.tree_engine import TreeEngine
from dta_jax.types import Samples
from dta_jax.value_model import ValueModel
from dta_jax.zero import ShardedOptimizer, State, bytes_on_a_device


class TrainState(NamedTuple):
    """What a step changes: the policy's master weights and optimizer, and the critic's if there is one."""

    policy: State
    critic: State | None

    def as_tree(self) -> dict[str, Any]:
        """The layout of a checkpoint: `params`, `opt_state` and, with a critic, the same under `critic`."""
        return self.policy._asdict() | ({} if self.critic is None else {"critic": self.critic._asdict()})

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> TrainState:
        """The inverse of `as_tree`."""
        critic = State(**tree["critic"]) if "critic" in tree else None
        return cls(State(tree["params"], tree["opt_state"]), critic)


@dataclass(frozen=True, eq=False)
class Critic:
    """A value model with weights of its own, its engine and its optimizer."""

    model: ValueModel
    engine: TreeEngine
    optimizer: ShardedOptimizer


@dataclass(frozen=True, eq=False)
class Learner:
    """Everything that stays the same from step to step.

    Attributes:
      train: the settings.
      model: the policy's decoder.
      policy: what is trained: the decoder, with a value head where the loss reads values.
      engine: with buckets that hold every batch.
      optimizer: of the float32 master weights, which it keeps on the mesh.
      critic: of `Train.critic`.
      longest: the most tokens of a sequence.
      setup: what the policy's memory depends on.
      memory: why chunk size and strategy are what they are, where that was left to us.
    """

    train: Train
    model: Qwen3
    policy: Qwen3 | ValueModel
    engine: TreeEngine
    optimizer: ShardedOptimizer
    critic: Critic | None
    longest: int
    setup: Setup
    memory: MemoryPlan | None

    @classmethod
    def build(
        cls, train: Train, model: Qwen3, *, longest: int, entries: int, example: Samples | None = None
    ) -> Learner:
        """A learner for batches of about `entries` entries in sequences of at most `longest` tokens.

        Args:
          train: the settings.
          model: the policy's decoder.
          longest: tokens.
          entries: room for that many is made at once.
          example: a typical batch, to weigh plans with.

        Raises:
          InputError: no plan fits the memory, or see `ShardedOptimizer.on`.
        """
        mesh = train.mesh.make(training_devices(train))
        policy = ValueModel(model, with_policy=True) if train.trains_values else model
        optimizer = ShardedOptimizer.on(mesh, policy, make_optimizer(train.optimizer))
        critic_model, own, resident = ValueModel(model), None, 0
        if train.critic is not None:
            own = ShardedOptimizer.on(mesh, critic_model, make_optimizer(train.critic.optimizer))
            resident += bytes_on_a_device(own.like)
        if "ref_logp" in train.reads and isinstance(train.rollouts, LiveRollouts):
            resident += bytes_on_a_device(optimizer.like.params) * mesh.shape[DATA]
        setup = Setup(
            policy,
            model.config.dtype,
            longest,
            entries,
            train.mesh,
            make_optimizer(train.optimizer),
            loss=train.loss if isinstance(train.loss, TokenLoss) else Injected(),
            resident=resident,
        )
        planner, cost, memory = settle(train.planner, setup, example)
        assert isinstance(planner.chunk_size, int)
        engine = functools.partial(
            TreeEngine.for_batches,
            chunk_size=planner.chunk_size,
            strategy=planner.strategy,
            longest=longest,
            entries=entries,
            mesh=mesh if mesh.size > 1 else None,
            cost=cost,
        )
        critic = None if own is None else Critic(critic_model, engine(critic_model), own)
        return cls(train, model, policy, engine(policy), optimizer, critic, longest, setup, memory)

    @property
    def like(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of the state, in the layout of a checkpoint."""
        return TrainState(
            self.optimizer.like, None if self.critic is None else self.critic.optimizer.like
        ).as_tree()

    @property
    def updates_per_step(self) -> int:
        """The most optimizer updates that one step makes."""
        return self.train.minibatches * self.train.epochs

    def starting_params(self) -> Params:
        """The policy's master weights before the first step; a value head on them begins as 0."""
        source = self.train.model
        if isinstance(source, HuggingFaceModel):
            return self._load(source)
        places = jax.tree.map(lambda leaf: leaf.sharding, self.optimizer.like.params)
        params = jax.jit(self.policy.init, out_shardings=places)(jax.random.key(self.train.seed))
        return cast(params, "float32")

    def starting_state(self) -> TrainState:
        """The state before the first step; a critic starts from the policy's layers."""
        params = self.starting_params()
        critic = None
        if self.critic is not None:
            values = self.critic.optimizer.place(self.critic.model.from_policy(params))
            critic = State(values, self.critic.optimizer.init(values))
        return TrainState(State(params, self.optimizer.init(params)), critic)

    def compute_params(self, state: TrainState) -> Params:
        """The weights of `policy` as they are computed with. The next update may donate them."""
        return self.optimizer.gather(state.policy.params, self.model.config.dtype)

    def decoder_params(self, state: TrainState) -> Params:
        """The weights of `model`, to generate with. The next update may donate them."""
        params = self.compute_params(state)
        return self.policy.policy_params(params) if isinstance(self.policy, ValueModel) else params

    def reference_params(self) -> Params:
        """The reference's weights: those of `Train.reference`, or the starting weights."""
        source = self.train.reference
        if source is None:
            return self.optimizer.gather(self.starting_params(), self.model.config.dtype)
        return self.optimizer.gather(self._load(source), self.model.config.dtype)

    def _load(self, source: HuggingFaceModel) -> Params:
        """Float32 weights of a folder, where the optimizer wants them."""
        config = read_config(source.path, dtype=self.model.config.dtype, param_dtype="float32")
        places = jax.tree.map(lambda leaf: leaf.sharding, self.optimizer.like.params)
        value = places.pop("value", None)
        params = cast(load_params(source.path, config, sharding=places), "float32")
        if isinstance(self.policy, ValueModel):
            params = self.policy.from_policy(params)
            params["value"] = jax.device_put(params["value"], value)
        return params

    def plan(self, batch: Batch, metrics: Mapping[str, Any] | None = None) -> Planned:
        """Cuts a batch into minibatches and plans each; touches the host only."""
        pairs = isinstance(self.train.advantages, PreferencePairs)
        whole_episodes = batch.unit if pairs else batch.episode
        unit = whole_episodes if self.train.aggregate.unit == "rollout" or pairs else batch.completion
        parts = split_along_trie(batch.samples, unit, self.train.minibatches)
        parts = [replace(part, unit=batch.unit[part.entry]) for part in parts]
        return Planned(batch, parts, [self.engine.plan(part.samples) for part in parts], metrics or {})

    def update(
        self,
        state: TrainState,
        step: int,
        planned: Planned,
        reference: Params | None,
        watch: Watch,
        *,
        warm_up: bool = False,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Step `step` (from 1).

        Args:
          state: its arrays are donated to the first update that is made.
          step: for metrics and messages.
          planned: the batch.
          reference: weights for `ref_logp`, where the loss reads it and the batch has none.
          watch: the run's guards.
          warm_up: compile first whatever later steps can need.

        Returns:
          The new state and the step's row of metrics.

        Raises:
          GuardStop: before the optimizer is applied.
        """
        began = time.perf_counter()
        watch.begin(step)
        rate = float(learning_rate(self.train.optimizer)(updates_made(state.policy.opt_state)))
        params = self.compute_params(state)
        work = self._prepared(step, planned, params, state, reference, watch)
        if not work.is_skipped():
            if warm_up:
                self.engine.warm_up(params, work.samples_of(planned.parts[0]), work.loss)
            for epoch, part in itertools.product(range(self.train.epochs), range(len(planned.parts))):
                if epoch or part:
                    params = self.compute_params(state)
                state = self._update_part(state, params, work, part)
        seconds = {"seconds": time.perf_counter() - began}
        row = {"step": step} | work.row() | {"learning_rate": rate} | seconds | dict(planned.metrics)
        return state, row

    def score(self, params: Params, batch: Batch) -> np.ndarray:
        """Log-probabilities of a batch's entries under some weights, float32[E], computed as in an update."""
        return self._numbers(self.engine, params, self.plan(batch)).logp

    def _prepared(
        self,
        step: int,
        planned: Planned,
        params: Params,
        state: TrainState,
        reference: Params | None,
        watch: Watch,
    ) -> StepWork:
        """A step before its first update: everything that the loss reads is known."""
        values, first_pass = self._informed(planned, params, state, reference)
        loss: TokenLoss | SequenceLoss = self.train.loss
        if "prox_logp" in loss.required and "prox_logp" not in values:
            assert isinstance(loss, TokenLoss)
            loss = AtProximal(loss)
        return StepWork(self.train, step, planned, values, loss, first_pass, watch)

    def _informed(
        self, planned: Planned, params: Params, state: TrainState, reference: Params | None
    ) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, np.ndarray] | None]:
        """Everything that the loss reads, [E] by name; and (logp, entropy) under `params`, if scored."""
        train, batch = self.train, planned.batch
        values = dict(batch.samples.values)
        reads, found = train.reads, None
        shared = self.updates_per_step == 1 and isinstance(train.loss, TokenLoss)
        recomputes = not shared or train.sequence_correction is not None
        if ("prox_logp" in reads and recomputes) or train.trains_values:
            found = self._numbers(self.engine, params, planned)
            if "prox_logp" in reads:
                values["prox_logp"] = found.logp
        if "ref_logp" in reads and "ref_logp" not in values:
            assert reference is not None, "the loss reads ref_logp"
            values["ref_logp"] = self._numbers(self.engine, reference, planned).logp
        value = None if found is None else found.value
        if self.critic is not None and state.critic is not None:
            weights = self.critic.optimizer.gather(state.critic.params, self.model.config.dtype)
            value = self._numbers(self.critic.engine, weights, planned).value
        informed = replace(batch, samples=replace(batch.samples, values=values))
        with phase("credit"):
            values |= credited(informed, train.objective, value)
        correction = train.sequence_correction
        if correction is not None:
            unit = batch.episode if correction.unit == "rollout" else batch.completion
            distance = values["prox_logp"] - values["old_logp"]
            weight = correction.weight.sequence_weights(distance, unit, reduce=correction.reduce)
            values["advantage"] = (values["advantage"] * weight).astype(np.float32)
        return values, None if found is None else (found.logp, found.entropy)

    def _numbers(self, engine: TreeEngine, params: Params, planned: Planned) -> Numbers:
        """What a head says of the batch's entries, float32[E] each."""
        with phase("score"):
            found = [
                engine.forward(params, part.samples, schedule)
                for part, schedule in zip(planned.parts, planned.schedules, strict=True)
            ]
        entry = np.argsort(np.concatenate([part.entry for part in planned.parts]))
        joined = (None if x[0] is None else np.concatenate(x)[entry] for x in zip(*found, strict=True))
        return Numbers(*joined)

    def _update_part(self, state: TrainState, params: Params, work: StepWork, number: int) -> TrainState:
        """The update, policy's and critic's, on one minibatch."""
        samples = work.samples_of(work.planned.parts[number])
        policy, of_policy = self._update_policy(state.policy, params, samples, work, number)
        critic, of_critic = self._update_critic(state.critic, samples, work, number)
        work.rows.append(of_policy | of_critic)
        work.updates += policy is not state.policy or critic is not state.critic
        return TrainState(policy, critic)

    def _update_policy(
        self, state: State, params: Params, samples: Samples, work: StepWork, number: int
    ) -> tuple[State, dict[str, float]]:
        part, schedule = work.planned.parts[number], work.planned.schedules[number]
        if self.train.critic is not None and work.step <= self.train.critic.warmup_steps:
            # Its gradient would be thrown away; where it stands is told all the same.
            if not work.knows(part):
                work.note(part, *self.engine.logprobs(params, samples, schedule))
            return state, {}
        with phase("gradient"):
            found = self.engine.value_and_grad(
                params,
                samples,
                work.loss,
                part.unit,
                schedule=schedule,
                first_pass=work.first_pass if self.updates_per_step == 1 else None,
            )
            work.note(part, found.logp, found.entropy)
            norm = gradient_norm(found.grads)
        if work.watch.allows(found, norm, samples, part.unit, self.train.loss):
            with phase("update"), jax.transfer_guard("disallow"):
                state = jax.block_until_ready(self.optimizer.update(state, found.grads))
        return state, {"loss": found.loss, "grad_norm": norm}

    def _update_critic(
        self, state: State | None, samples: Samples, work: StepWork, number: int
    ) -> tuple[State | None, dict[str, float]]:
        if self.critic is None or state is None:
            return None, {}
        assert self.train.critic is not None
        part, schedule = work.planned.parts[number], work.planned.schedules[number]
        params = self.critic.optimizer.gather(state.params, self.model.config.dtype)
        with phase("gradient"):
            found = self.critic.engine.value_and_grad(
                params, samples, self.train.critic.loss, part.unit, schedule=schedule
            )
            norm = gradient_norm(found.grads)
        if work.watch.is_finite(found, norm, samples, of="critic_"):
            with phase("update"), jax.transfer_guard("disallow"):
                state = jax.block_until_ready(self.critic.optimizer.update(state, found.grads))
        return state, {"critic_loss": found.loss, "critic_grad_norm": norm}


def source_of(model: HuggingFaceModel | Qwen3Config | None) -> str:
    """Where weights come from, as the user named it; None is the starting weights' model."""
    return str(model.path) if isinstance(model, HuggingFaceModel) else "Train.seed"


def model_config(train: Train) -> Qwen3Config:
    """The policy's shape: the settings' own, or its folder's.

    Raises:
      InputError: the folder's `config.json` cannot be used.
    """
    if isinstance(train.model, HuggingFaceModel):
        return read_config(train.model.path, dtype=train.model.dtype, param_dtype="float32")
    return train.model


_global_norm = jax.jit(optax.tree.norm)


def gradient_norm(grads: Params) -> float:
    """The global norm of a gradient, the same on every process."""
    return float(jax.device_get(_global_norm(grads)))
