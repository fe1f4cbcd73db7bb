"""What a training run is made of: frozen dataclasses that check themselves. `config` builds them from gin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from dta_jax.advantages import SCOPES, Scope
from dta_jax.aggregation import AGGREGATIONS, Aggregation
from dta_jax.composite_losses import OffPolicy, Sum
from dta_jax.errors import InputError
from dta_jax.losses import CISPO, NLL, SAPO, PolicyGradient, PPOClip
from dta_jax.qwen3 import Qwen3Config
from dta_jax.sequence_losses import SequenceRatio, SequenceSum
from dta_jax.sharding import MeshShape
from dta_jax.synthetic import SyntheticRollouts
from dta_jax.tree_inputs import CHUNK_MULTIPLE, MAX_ODD_CHUNK

Unit: TypeAlias = Literal["completion", "rollout"]

RUN_DTYPES: Final = ("float32", "bfloat16")  # of computation; master weights are float32
_INT32_MAX: Final = 2**31 - 1
_READABLE: Final = {"weight", "advantage", "old_logp", "prox_logp", "ref_logp"}  # what a run can tell a loss


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
class GroupNormalized:
    """How rewards become advantages: `dta_jax.advantages.group_normalized`, groups are tasks.

    A "batch" is all rollouts of the run: they are all there before the first step.

    Attributes:
      mean, std, leave_one_out, unbiased, eps: see there.
      skip_equal: leave out groups whose advantages are all 0; they have no gradient.
    """

    mean: Scope = "group"
    std: Scope = "group"
    leave_one_out: bool = False
    unbiased: bool = False
    eps: float = 1e-6
    skip_equal: bool = True

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            _check(self, name, getattr(self, name) in SCOPES, f"one of {', '.join(SCOPES)}")
        _check(self, "eps", self.eps >= 0, "at least 0")


@dataclass(frozen=True)
class Aggregate:
    """How the entries' losses become one number: `dta_jax.aggregation.aggregation_weights`.

    Attributes:
      kind: which mean.
      unit: what counts as one sequence in it, a completion or a whole rollout.
      divisor: tokens, for kind "constant" only.
    """

    kind: Aggregation = "token_mean"
    unit: Unit = "completion"
    divisor: float | None = None

    def __post_init__(self) -> None:
        _check(self, "kind", self.kind in AGGREGATIONS, f"one of {', '.join(AGGREGATIONS)}")
        _check(self, "unit", self.unit in ("completion", "rollout"), "completion or rollout")
        constant = self.kind == "constant"
        right = self.divisor is not None and self.divisor > 0 if constant else self.divisor is None
        _check(self, "divisor", right, "a positive number of tokens" if constant else f"None for {self.kind}")


@dataclass(frozen=True)
class Planner:
    """How a batch's trie becomes a schedule: `dta_jax.schedule.compile_schedule`.

    Attributes:
      chunk_size: C, the most tree tokens run together.
      strategy: the planner's strategy.
    """

    chunk_size: int = 1024
    strategy: str = "packed"

    def __post_init__(self) -> None:
        fits = 1 <= self.chunk_size <= MAX_ODD_CHUNK or (
            self.chunk_size > 0 and self.chunk_size % CHUNK_MULTIPLE == 0
        )
        allowed = f"1 to {MAX_ODD_CHUNK}, or a multiple of {CHUNK_MULTIPLE}"
        _check(self, "chunk_size", fits, allowed)


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
class Checkpoints:
    """When the state is saved.

    Attributes:
      every: steps between two checkpoints; the last step is always saved.
      keep: how many of the newest stay.
    """

    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            _check(self, name, getattr(self, name) >= 1, "at least 1")


@dataclass(frozen=True)
class Train:
    """One training run.

    Attributes:
      rollouts: the data.
      model: its shape (random weights) or its folder.
      loss: of one entry, or of a batch. `old_logp` is the rollouts' own log-probability, or the starting
        weights' where they bring none; `ref_logp` is the starting weights'; `prox_logp` is recomputed with
        the current weights in each step.
      advantages: how rewards become advantages; None for a loss that reads none.
      aggregate: how entries' losses become the batch's.
      optimizer, planner, checkpoints: see there.
      mesh: the devices to run on, `data x tensor` of them.
      steps: optimizer updates in all.
      max_groups: only the first so many groups (tasks) that have a gradient; None for all.
      batch_groups: groups per update; always whole groups.
      max_length: longest sequence allowed, tokens.
      temperature: at which the policy sampled; log-probabilities are of `softmax(logits / temperature)`.
      seed: of initial weights and of the order of batches.
    """

    rollouts: SyntheticRollouts | RecordedRollouts
    model: Qwen3Config | HuggingFaceModel
    loss: NLL | PolicyGradient | PPOClip | CISPO | SAPO | OffPolicy | Sum | SequenceRatio | SequenceSum
    advantages: GroupNormalized | None = None
    aggregate: Aggregate = field(default_factory=Aggregate)
    optimizer: AdamW = field(default_factory=AdamW)
    planner: Planner = field(default_factory=Planner)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    mesh: MeshShape = field(default_factory=MeshShape)
    steps: int = 100
    max_groups: int | None = None
    batch_groups: int = 1
    max_length: int = 32_768
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_groups"):
            _check(self, name, getattr(self, name) >= 1, "at least 1")
        _check(self, "max_groups", self.max_groups is None or self.max_groups >= 1, "None or at least 1")
        _check(self, "max_length", self.max_length >= 2, "at least 2")
        _check(self, "temperature", 0 < self.temperature < math.inf, "a finite number above 0")
        _check(self, "seed", 0 <= self.seed < 2**32, "0 to 2^32 - 1")
        dtype = self.model.dtype
        if dtype not in RUN_DTYPES:
            name, expected = f"a model of dtype {dtype}", f"one of dtype {' or '.join(RUN_DTYPES)}"
            raise InputError("Train", "model", expected=expected, actual=name)
        unknown = set(self.loss.required) - _READABLE
        _check(self, "loss", not unknown, f"a loss that reads only {', '.join(sorted(_READABLE))}")
        if ("advantage" in self.loss.required) != (self.advantages is not None):
            reads = "reads" if self.advantages is None else "does not read"
            expected = "a way to make them" if self.advantages is None else "None"
            loss = type(self.loss).__name__
            _check(self, "advantages", False, f"{expected}, because {loss} {reads} advantages")


def _check(settings: object, name: str, good: bool, expected: str) -> None:
    if not good:
        raise InputError(
            type(settings).__name__, name, expected=expected, actual=repr(getattr(settings, name))
        )
