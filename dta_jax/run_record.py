"""What a checkpoint says beside its arrays: settings, data, model; and whether another run may go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dta_jax.config import changed_bindings
from dta_jax.errors import InputError
from dta_jax.hf_config import config_to_hf
from dta_jax.qwen3 import Qwen3Config
from dta_jax.recorded import RecordedSource
from dta_jax.settings import HuggingFaceModel, LiveRollouts, Train

# What may differ when a run is taken up again: nothing here changes what a step computes, but for rounding.
FREE_ON_RESUME: Final = (
    "Train.steps",
    "Checkpoints.every",
    "Checkpoints.keep",
    "Train.log",
    "Logging.tensorboard",
    "Logging.wandb_project",
    "Logging.wandb_name",
    "Logging.wandb_mode",
    "Train.mesh",
    "MeshShape.data",
    "MeshShape.tensor",
)


@dataclass(frozen=True)
class RunRecord:
    """What a run is, as its checkpoints tell.

    Attributes:
      config: every binding, as `operative_config` writes them.
      seed: of initial weights and of the order of batches.
      rollouts: fingerprint of the recorded rollouts; None for a live run.
      rollouts_from: where they are, for messages.
      model: the model's `config.json`.
      hf_folder: the absolute path of the folder that the model came from, None for random weights.
    """

    config: str
    seed: int
    rollouts: str | None
    rollouts_from: str
    model: dict[str, Any]
    hf_folder: str | None

    @classmethod
    def of(
        cls, train: Train, config: str, source: RecordedSource | LiveRollouts, model: Qwen3Config
    ) -> RunRecord:
        """The record of a run.

        Args:
          train: its settings.
          config: the same as text.
          source: where its batches come from.
          model: the policy's shape.
        """
        recorded = source.rollouts if isinstance(source, RecordedSource) else None
        digest = None if recorded is None else recorded.digest()
        where = "Train.rollouts" if recorded is None else str(recorded.source)
        folder = str(Path(train.model.path).absolute()) if isinstance(train.model, HuggingFaceModel) else None
        described = config_to_hf(model, dtype=model.dtype)
        return cls(config, train.seed, digest, where, described, folder)

    def at(self, step: int, collector: Mapping[str, Any] | None) -> dict[str, Any]:
        """The JSON part of a checkpoint: all, beside the arrays, that the next batch depends on.

        Args:
          step: optimizer steps done.
          collector: the state of a live run's collector.
        """
        return {
            "step": step,
            "seed": self.seed,
            "rollouts": self.rollouts,
            "config": self.config,
            "collector": collector,
            "model": self.model,
            "hf_folder": self.hf_folder,
        }

    def check(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Refuses to go on from a checkpoint with settings or data that compute something else.

        Args:
          folder: of the checkpoint.
          saved: its JSON part.

        Raises:
          InputError: names the first binding that differs, or the rollouts.
        """
        for name, (old, new) in changed_bindings(saved["config"], self.config).items():
            if name not in FREE_ON_RESUME:
                hint = "choose another --out, or allow it with --allow-changes"
                raise InputError(folder, name, expected=f"{old}, as the run began", actual=new, hint=hint)
        if saved["rollouts"] != self.rollouts:
            expected = f"those that {folder} was trained on"
            raise InputError(self.rollouts_from, "contents", expected=expected, actual="others")
