"""What a training run is made of: frozen dataclasses that check themselves. `config` builds them from gin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from dta_jax.attention_backends import CHOICES
from dta_jax.chat import Thinking
from dta_jax.collect.evaluation import Evaluate
from dta_jax.collect.settings import Collect
from dta_jax.composite_losses import BehaviourWeight, OffPolicy, Sum
from dta_jax.envs.bandit import Bandit
from dta_jax.envs.game import TreasureHunt
from dta_jax.envs.imported import ImportedEnvironment
from dta_jax.envs.on_ray import OnRay
from dta_jax.envs.reasoning import ReasoningGym
from dta_jax.envs.tau2 import Tau2
from dta_jax.errors import InputError
from dta_jax.generation.local import LocalSampler
from dta_jax.generation.openai import OpenAIServer
from dta_jax.generation.sglang import SGLang
from dta_jax.generation.vllm import VLLM
from dta_jax.guard_settings import Guards
from dta_jax.losses import CISPO, NLL, SAPO, PolicyGradient, PPOClip, ValueClip
from dta_jax.objective import (
    GAE,
    Aggregate,
    GroupNormalized,
    Objective,
    PreferencePairs,
    Returns,
    Rewards,
    Unit,
)
from dta_jax.qwen3 import Qwen3Config
from dta_jax.schedule import STRATEGIES
from dta_jax.sequence_losses import DPO, SequenceRatio, SequenceSum
from dta_jax.sharding import MeshShape
from dta_jax.synthetic import SyntheticRollouts
from dta_jax.tree_inputs import CHUNK_MULTIPLE, MAX_ODD_CHUNK

RUN_DTYPES: Final = ("float32", "bfloat16")  # of computation; master weights are float32
_INT32_MAX: Final = 2**31 - 1
LOGPROBS: Final = frozenset({"old_logp", "prox_logp", "ref_logp"})
_READABLE: Final = LOGPROBS | {
    "weight",
    "advantage",
    "preference",
    "return",
    "old_value",
}  # what a run can tell a loss


@dataclass(frozen=True)
class RecordedRollouts:
    """Rollouts from a file.

    Attributes:
      path: the `.npz` (see `dta_jax.rollouts`).
      tasks: only rollouts of these tasks; None for all.
      min_reward: only rollouts with at least this reward; None for all.
      vocab_mod: take token ids modulo this; None to leave them alone.
    """

    path: str
    tasks: tuple[int, ...] | None = None
    min_reward: float | None = None
    vocab_mod: int | None = None

    def __post_init__(self) -> None:
        _check(self, "path", bool(self.path), "the path of an .npz file")
        fits = all(0 <= task <= _INT32_MAX for task in self.tasks or (0,)) and self.tasks != ()
        _check(self, "tasks", fits, f"None or task ids, 0 to {_INT32_MAX}")
        positive = self.vocab_mod is None or 1 <= self.vocab_mod <= _INT32_MAX
        _check(self, "vocab_mod", positive, f"None or 1 to {_INT32_MAX}")


@dataclass(frozen=True)
class LiveRollouts:
    """Rollouts that are made while the run trains.

    Attributes:
      environment: whose tasks; a task's episodes are one group.
      generator: the engine that answers: the local sampler, or servers.
      collect: how many episodes, how stale, and how tokens are drawn.
      tokenizer: folder with the tokenizer and chat template, for environments that speak messages; None for
        those that speak tokens.
      thinking: what becomes of earlier thinking in a conversation; see `dta_jax.chat`.
      save_every: steps between two batches that are written to OUT/rollouts/STEP.npz; None for none.
    """

    environment: Bandit | TreasureHunt | ReasoningGym | Tau2 | ImportedEnvironment | OnRay
    generator: LocalSampler | SGLang | VLLM | OpenAIServer = field(default_factory=LocalSampler)
    collect: Collect = field(default_factory=Collect)
    tokenizer: str | None = None
    thinking: Thinking = "keep"
    save_every: int | None = None

    def __post_init__(self) -> None:
        _check(self, "save_every", self.save_every is None or self.save_every >= 1, "None or at least 1")
        _check(self, "thinking", self.thinking in ("keep", "strip"), "keep or strip")
        speaks_tokens = self.tokens_below is not None
        right = "None: the environment speaks tokens" if speaks_tokens else "a folder: it speaks messages"
        _check(self, "tokenizer", (self.tokenizer is None) == speaks_tokens, right)

    @property
    def tokens_below(self) -> int | None:
        """The vocabulary of an environment that speaks tokens; None for one that speaks messages."""
        environment = self.environment
        if isinstance(environment, OnRay):
            environment = environment.environment
        if isinstance(environment, Bandit | TreasureHunt | ImportedEnvironment):
            return environment.vocab_size
        return None


@dataclass(frozen=True)
class HuggingFaceModel:
    """Weights and shape from a local folder with `config.json` and safetensors.

    Attributes:
      path: the folder.
      dtype: of matrix products and activations; master weights are float32.
    """

    path: str
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _check(self, "path", bool(self.path), "the path of a model folder")
        _check(self, "dtype", self.dtype in RUN_DTYPES, " or ".join(RUN_DTYPES))


@dataclass(frozen=True)
class Planner:
    """How a batch's trie becomes a schedule: `dta_jax.schedule.compile_schedule`.

    Attributes:
      chunk_size: C, the most tree tokens run together; "auto" takes the cheapest that fits `memory_budget`.
      strategy: the planner's strategy; "auto" keeps residuals where the budget has room for them.
      memory_budget: GiB per device for "auto"; None for the device's own memory (on a CPU, half of it).
      cost_file: keeps what operations cost on this machine: read if it is of this machine, model and chunk
        size, measured and written otherwise. None for the documented cost model.
      warm_up: compile all widths of operations in the first step, so that no later step compiles.
      attention: who computes it: "xla", "pallas" (kernels for NVIDIA GPUs), or "auto" for the kernels where
        they can run.
    """

    chunk_size: int | Literal["auto"] = 1024
    strategy: str = "packed"
    memory_budget: float | None = None
    cost_file: str | None = None
    warm_up: bool = False
    attention: str = "auto"

    def __post_init__(self) -> None:
        C = self.chunk_size
        fits = isinstance(C, str) or 1 <= C <= MAX_ODD_CHUNK or (C > 0 and C % CHUNK_MULTIPLE == 0)
        allowed = f"'auto', 1 to {MAX_ODD_CHUNK}, or a multiple of {CHUNK_MULTIPLE}"
        _check(self, "chunk_size", fits, allowed)
        known = "auto", *STRATEGIES
        _check(self, "strategy", self.strategy in known, f"one of {', '.join(known)}")
        automatic = "auto" in (C, self.strategy)
        budget = self.memory_budget
        _check(self, "memory_budget", budget is None or budget > 0, "None or GiB, above 0")
        _check(self, "memory_budget", budget is None or automatic, "None without 'auto'")
        _check(self, "cost_file", self.cost_file != "", "None or a path")
        _check(self, "attention", self.attention in CHOICES, f"one of {', '.join(CHOICES)}")


@dataclass(frozen=True)
class AdamW:
    """AdamW with a clipped gradient, a linear warm-up and a cosine decay.

    Attributes:
      learning_rate: its peak.
      warmup_steps: updates that rise to the peak.
      decay_steps: updates from the first until the rate has fallen to `final_fraction` of its peak; None
        stays at the peak. It does not follow `Train.steps`, so a longer run begins as a shorter one did.
      final_fraction: last learning rate over the peak.
      b1, b2, eps: of Adam.
      weight_decay: decoupled, on matrices only (norms and biases are left alone).
      clip_norm: largest global norm of the gradient; None does not clip.
    """

    learning_rate: float = 1e-5
    warmup_steps: int = 0
    decay_steps: int | None = None
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        _check(self, "learning_rate", 0 < self.learning_rate < math.inf, "a finite number above 0")
        _check(self, "warmup_steps", self.warmup_steps >= 0, "at least 0")
        above = self.decay_steps is None or self.decay_steps > self.warmup_steps
        _check(self, "decay_steps", above, f"None or above warmup_steps={self.warmup_steps}")
        _check(self, "final_fraction", 0 <= self.final_fraction <= 1, "within 0 .. 1")
        for name in ("b1", "b2"):
            _check(self, name, 0 <= getattr(self, name) < 1, "at least 0, below 1")
        _check(self, "eps", self.eps > 0, "above 0")
        _check(self, "weight_decay", self.weight_decay >= 0, "at least 0")
        _check(self, "clip_norm", self.clip_norm is None or self.clip_norm > 0, "None or above 0")


@dataclass(frozen=True)
class Critic:
    """A value model of the policy's shape with weights of its own; it starts from the policy's layers.

    Attributes:
      optimizer: of its weights.
      loss: of one value.
      warmup_steps: only the critic learns in the first so many steps.
    """

    optimizer: AdamW = field(default_factory=AdamW)
    loss: ValueClip = field(default_factory=ValueClip)
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check(self, "warmup_steps", self.warmup_steps >= 0, "at least 0")


@dataclass(frozen=True)
class SequenceCorrection:
    """An importance weight `prox / old` per sequence that multiplies advantages.

    Attributes:
      weight: how it is bounded: `BehaviourWeight.sequence_weights`.
      unit: the sequence, a completion or a whole rollout (an episode).
      reduce: "mean" for the geometric mean of the tokens' ratios, "sum" for their product.
    """

    weight: BehaviourWeight = field(default_factory=BehaviourWeight)
    unit: Unit = "completion"
    reduce: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        _check(self, "unit", self.unit in ("completion", "rollout"), "completion or rollout")
        _check(self, "reduce", self.reduce in ("mean", "sum"), "mean or sum")


@dataclass(frozen=True)
class Checkpoints:
    """When the state is saved, and which states stay.

    Attributes:
      every: steps between two checkpoints; the last step is always saved.
      every_minutes: one is also made at the end of the first step after so many minutes without one; None for
        steps alone.
      keep: how many of the newest stay.
      keep_best: how many of the best stay besides, by `best_metric`; of equal ones, the newest.
      best_metric: a number of the step's row of metrics. `eval_*` are of the weights that are saved, and
        every evaluated step is saved then; `reward_mean` is of those that made the step's rollouts.
      best_mode: "max" or "min", what is best.
    """

    every: int = 100
    every_minutes: float | None = None
    keep: int = 2
    keep_best: int = 0
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            _check(self, name, getattr(self, name) >= 1, "at least 1")
        minutes = self.every_minutes
        _check(self, "every_minutes", minutes is None or 0 < minutes < math.inf, "None or minutes, above 0")
        _check(self, "keep_best", self.keep_best >= 0, "at least 0")
        named = (self.best_metric is not None and self.best_metric != "") == (self.keep_best > 0)
        wanted = "a name in metrics.jsonl, to rank by" if self.keep_best else "None without keep_best"
        _check(self, "best_metric", named, wanted)
        _check(self, "best_mode", self.best_mode in ("max", "min"), "max or min")

    @property
    def best_is_evaluated(self) -> bool:
        """Whether an evaluation says which checkpoints are best."""
        return self.best_metric is not None and self.best_metric.startswith("eval_")


@dataclass(frozen=True)
class Logging:
    """Where a run's metrics go beside `metrics.jsonl`.

    Attributes:
      tensorboard: event files in OUT/tensorboard.
      wandb_project: of Weights & Biases (needs `dta_jax[wandb]`); None for no run there.
      wandb_name: of the run there; None for the name of OUT.
      wandb_mode: "online", or "offline" for files that `wandb sync` uploads later.
    """

    tensorboard: bool = True
    wandb_project: str | None = None
    wandb_name: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"

    def __post_init__(self) -> None:
        _check(self, "wandb_project", self.wandb_project != "", "None or a name")
        _check(self, "wandb_name", self.wandb_name != "", "None or a name")
        _check(self, "wandb_mode", self.wandb_mode in ("online", "offline"), "online or offline")


@dataclass(frozen=True)
class Train:
    """One training run.

    Attributes:
      rollouts: the data, recorded or made on the way.
      model: its shape (random weights) or its folder.
      loss: of one entry, or of a batch. `old_logp` is the rollouts' own log-probability, or the starting
        weights' where they bring none; `ref_logp` is the reference's; `prox_logp` is that of the weights
        before the step.
      advantages: how rewards become advantages or preferences; None for a loss that reads neither.
      rewards: how they are shaped before that.
      aggregate: how entries' losses become the batch's.
      critic: for `GAE`: a model of its own. None with `ValueClip` among the loss's terms, which puts a value
        head on the policy.
      reference: the model of `ref_logp`; None for the starting weights.
      sequence_correction: a bounded importance weight per sequence; None for none.
      optimizer, planner, checkpoints, guards: see there.
      log: where metrics go.
      mesh: the devices to run on, `data x tensor` of them.
      steps: batches in all; each makes up to `minibatches * epochs` optimizer updates.
      minibatches: parts of a batch that are trained on one after the other.
      epochs: how often the same batch is gone through.
      max_groups: of recorded rollouts, only the first so many groups that have a gradient; None for all.
      batch_groups: groups per batch; always whole groups.
      max_length: longest sequence allowed, tokens.
      temperature: at which the policy sampled; log-probabilities are of `softmax(logits / temperature)`.
      evaluate: episodes that are played every `evaluate_every` steps and not trained on; None for none.
      evaluate_every: steps between two evaluations; the last step's weights are evaluated too.
      seed: of initial weights and of the order of batches.
    """

    rollouts: SyntheticRollouts | RecordedRollouts | LiveRollouts
    model: Qwen3Config | HuggingFaceModel
    loss: NLL | PolicyGradient | PPOClip | CISPO | SAPO | OffPolicy | Sum | SequenceRatio | SequenceSum | DPO
    advantages: GroupNormalized | Returns | GAE | PreferencePairs | None = None
    rewards: Rewards = field(default_factory=Rewards)
    aggregate: Aggregate = field(default_factory=Aggregate)
    critic: Critic | None = None
    reference: HuggingFaceModel | None = None
    sequence_correction: SequenceCorrection | None = None
    optimizer: AdamW = field(default_factory=AdamW)
    planner: Planner = field(default_factory=Planner)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    guards: Guards = field(default_factory=Guards)
    log: Logging = field(default_factory=Logging)
    mesh: MeshShape = field(default_factory=MeshShape)
    steps: int = 100
    minibatches: int = 1
    epochs: int = 1
    max_groups: int | None = None
    batch_groups: int = 1
    max_length: int = 32_768
    temperature: float = 1.0
    evaluate: Evaluate | None = None
    evaluate_every: int = 50
    seed: int = 0

    @property
    def objective(self) -> Objective:
        """How rollouts become what the loss reads."""
        return Objective(self.rewards, self.advantages, self.aggregate, self.temperature)

    @property
    def trains_values(self) -> bool:
        """Whether the policy has a value head that the loss trains (`ValueClip`)."""
        return "return" in self.loss.required

    @property
    def reads(self) -> frozenset[str]:
        """The log-probabilities that a step reads: `old_logp`, `prox_logp`, `ref_logp`."""
        names = {*self.loss.required} & LOGPROBS
        if self.rewards.kl_coef:
            names |= {"old_logp", "ref_logp"}
        if self.sequence_correction is not None:
            names |= {"old_logp", "prox_logp"}
        return frozenset(names)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_groups", "minibatches", "epochs", "evaluate_every"):
            _check(self, name, getattr(self, name) >= 1, "at least 1")
        _check(self, "max_groups", self.max_groups is None or self.max_groups >= 1, "None or at least 1")
        _check(self, "max_length", self.max_length >= 2, "at least 2")
        _check(self, "temperature", 0 < self.temperature < math.inf, "a finite number above 0")
        _check(self, "seed", 0 <= self.seed < 2**32, "0 to 2^32 - 1")
        dtype = self.model.dtype
        if dtype not in RUN_DTYPES:
            name, expected = f"a model of dtype {dtype}", f"one of dtype {' or '.join(RUN_DTYPES)}"
            raise InputError("Train", "model", expected=expected, actual=name)
        live = self.rollouts if isinstance(self.rollouts, LiveRollouts) else None
        _check(
            self,
            "evaluate",
            self.evaluate is None or live is not None,
            "None: recorded rollouts have no tasks",
        )
        if live is not None:
            drawn = live.collect.sampling.temperature
            expected = f"{drawn}, the Sampling.temperature of its rollouts"
            _check(self, "temperature", self.temperature == drawn, expected)
            _check(self, "max_groups", self.max_groups is None, "None: rollouts are made on the way")
            alone = live.collect.group_size == 1
            of_groups = isinstance(self.advantages, PreferencePairs) or (
                isinstance(self.advantages, GroupNormalized) and self.advantages.mean == "group"
            )
            if alone and of_groups:
                kind = type(self.advantages).__name__
                expected = f"Collect.group_size of at least 2, because {kind} compares a group's episodes"
                raise InputError("Train", "rollouts", expected=expected, actual=1)
        unknown = set(self.loss.required) - _READABLE
        _check(self, "loss", not unknown, f"a loss that reads only {', '.join(sorted(_READABLE))}")
        credit, required = self.advantages, set(self.loss.required)
        kinds: tuple[type, ...] = (type(None),)
        expected, reads = "None", "does not read advantages"
        if "advantage" in required:
            kinds = GroupNormalized, Returns, GAE
            expected, reads = "a way to make them (GroupNormalized, Returns or GAE)", "reads advantages"
        elif "preference" in required:
            kinds = (PreferencePairs,)
            expected, reads = "PreferencePairs", "reads preferences"
        because = f"{expected}, because {type(self.loss).__name__} {reads}"
        _check(self, "advantages", isinstance(credit, kinds), because)
        wanted = "a critic, or ValueClip in the loss" if isinstance(credit, GAE) else "None without GAE"
        critics = (self.critic is not None) + self.trains_values
        _check(self, "critic", critics == isinstance(credit, GAE), f"{wanted}, not both")
        weighs = isinstance(credit, GroupNormalized | Returns | GAE)
        _check(
            self, "sequence_correction", self.sequence_correction is None or weighs, "None without advantages"
        )
        if self.checkpoints.best_is_evaluated and self.evaluate is None:
            expected = "Train.evaluate, which makes it"
            raise InputError(
                "Checkpoints", "best_metric", expected=expected, actual=self.checkpoints.best_metric
            )
        if self.guards.max_kl_reference is not None and "ref_logp" not in self.reads:
            expected = "None: neither the loss nor Rewards.kl_coef reads a reference"
            actual = self.guards.max_kl_reference
            raise InputError("Guards", "max_kl_reference", expected=expected, actual=actual)
        _check(self, "reference", self.reference is None or "ref_logp" in self.reads,
               "None: neither the loss nor Rewards.kl_coef reads it")  # fmt: skip


def _check(settings: object, name: str, good: bool, expected: str) -> None:
    if not good:
        raise InputError(
            type(settings).__name__, name, expected=expected, actual=repr(getattr(settings, name))
        )
