"""What a checkpoint says beside its arrays: settings, data, model; and whether another run may go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax

from dta_jax.checkpoint import fingerprints
from dta_jax.config import changed_bindings
from dta_jax.errors import InputError
from dta_jax.hf_config import config_to_hf
from dta_jax.hf_weights import COMPANION_FILES
from dta_jax.learner import Learner
from dta_jax.model import Params
from dta_jax.recorded import RecordedSource
from dta_jax.settings import HuggingFaceModel, LiveRollouts

# What may differ when a run is taken up again: nothing here changes what a step computes, but for rounding.
# Guards change what becomes of a step, such as the one that the run was stopped at.
FREE_ON_RESUME: Final = ("Train.steps", "Train.guards", "Train.log", "Train.mesh", "Planner.attention")
FREE_CLASSES: Final = ("Checkpoints", "Guards", "Logging", "MeshShape")


@dataclass(frozen=True)
class RunRecord:
    """What a run is, as its checkpoints tell.

    Attributes:
      config: every binding, as `operative_config` writes them.
      seed: of initial weights and of the order of batches.
      rollouts: fingerprint of the recorded rollouts; None for a live run.
      rollouts_from: where they are, for messages.
      tokenizer: fingerprint of the tokenizer's folder; None where no text is spoken.
      tokenizer_from: where it is, for messages.
      model: the model's `config.json`.
      hf_folder: the absolute path of the folder that the model came from, None for random weights.
      rounding: what results depend on in their last bits, by name.
    """

    config: str
    seed: int
    rollouts: str | None
    rollouts_from: str
    tokenizer: str | None
    tokenizer_from: str
    model: dict[str, Any]
    hf_folder: str | None
    rounding: dict[str, Any]

    @classmethod
    def of(cls, learner: Learner, config: str, source: RecordedSource | LiveRollouts) -> RunRecord:
        """The record of a run.

        Args:
          learner: of the run.
          config: its settings as text.
          source: where its batches come from.
        """
        train, model = learner.train, learner.model.config
        recorded = source.rollouts if isinstance(source, RecordedSource) else None
        digest = None if recorded is None else recorded.digest()
        where = "Train.rollouts" if recorded is None else str(recorded.source)
        folder = str(Path(train.model.path).absolute()) if isinstance(train.model, HuggingFaceModel) else None
        tokenizer = source.tokenizer if isinstance(source, LiveRollouts) else None
        rounding = {
            "chunk_size": learner.engine.chunk_size,
            "strategy": learner.engine.strategy,
            "costs of operations": dataclasses.asdict(learner.engine.cost),
            "version of JAX": jax.__version__,
        }
        return cls(
            config,
            train.seed,
            digest,
            where,
            None if tokenizer is None else _digest_of_files(Path(tokenizer)),
            tokenizer or "",
            config_to_hf(model, dtype=model.dtype),
            folder,
            rounding,
        )

    def at(self, step: int, **state: Any) -> dict[str, Any]:
        """The JSON part of a checkpoint: all, beside the arrays, that the next step depends on.

        Args:
          step: steps done.
          **state: of what changes from step to step: the collector, guards, metrics.
        """
        return {
            "step": step,
            "seed": self.seed,
            "rollouts": self.rollouts,
            "tokenizer": self.tokenizer,
            "config": self.config,
            "model": self.model,
            "hf_folder": self.hf_folder,
            "rounding": self.rounding,
            **state,
        }

    def check(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Refuses to go on from a checkpoint with settings or data that compute something else.

        Args:
          folder: of the checkpoint.
          saved: its JSON part.

        Raises:
          InputError: names the first binding that differs, or the rollouts, or the tokenizer.
        """
        hint = "choose another --out, or allow it with --allow-changes"
        for name, (old, new) in changed_bindings(saved["config"], self.config).items():
            if name not in FREE_ON_RESUME and name.split(".")[0] not in FREE_CLASSES:
                raise InputError(folder, name, expected=f"{old}, as the run began", actual=new, hint=hint)
        expected = f"those that {folder} was trained on"
        if saved["rollouts"] != self.rollouts:
            raise InputError(self.rollouts_from, "contents", expected=expected, actual="others")
        if saved.get("tokenizer", self.tokenizer) != self.tokenizer:
            expected = f"the tokenizer that {folder} was trained with"
            raise InputError(self.tokenizer_from, "contents", expected=expected, actual="another", hint=hint)
        for name, began in saved.get("rounding", {}).items():
            if (now := self.rounding.get(name)) != began:
                warnings.warn(
                    f"{folder}: {name}: {began} when the run began, now {now}: from here on the run repeats "
                    "the uninterrupted one up to rounding only",
                    stacklevel=2,
                )


class FrozenWeights:
    """Fingerprints of weights that never change and are read again whenever the run goes on.

    Args:
      folder: of the checkpoint that the run goes on from.
      saved: its fingerprints by name; None for none.
      allow_changes: take other weights.
    """

    def __init__(self, folder: Path, saved: Mapping[str, str] | None, *, allow_changes: bool):
        self._folder, self._allow_changes = folder, allow_changes
        self.known: dict[str, str] = dict(saved or {})

    def check(self, name: str, source: str, params: Params) -> None:
        """Refuses weights that are not those that the run began with.

        Args:
          name: which.
          source: where they come from, for messages.
          params: the weights, as they are computed with.

        Raises:
          InputError: they have changed.
        """
        numbers = [int(x) for x in jax.tree.leaves(jax.device_get(fingerprints(params)))]
        digest = hashlib.sha256(json.dumps(numbers).encode()).hexdigest()
        if self.known.get(name, digest) != digest and not self._allow_changes:
            raise InputError(
                source,
                "weights",
                expected=f"the {name} weights that {self._folder} began with",
                actual="others",
                hint="choose another --out, or allow it with --allow-changes",
            )
        self.known[name] = digest


def _digest_of_files(folder: Path) -> str:
    """Of the small files of a model folder: tokenizer, template, their configs."""
    digest = hashlib.sha256()
    for name in sorted(COMPANION_FILES):
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()
