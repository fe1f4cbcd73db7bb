"""Weights as folders that servers load: `version-N` below one directory that trainer and servers share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from dta_jax.errors import InputError
from dta_jax.hf_weights import save_folder
from dta_jax.model import Params
from dta_jax.qwen3 import Qwen3Config

PREFIX: Final = "version-"
KEPT: Final = 2  # a server may still read the one before the newest


class WeightFolders:
    """Writes versions, each complete or invisible, and removes old ones.

    Args:
      folder: the directory; made if it is not there. Servers must see it under the same path.
      config: the model.
      companions: a folder whose tokenizer goes along; None for none.
    """

    def __init__(self, folder: Path, config: Qwen3Config, companions: Path | None = None):
        self._folder, self._config, self._companions = folder.absolute(), config, companions

    def write(self, params: Params, version: int) -> Path:
        """Writes a Hugging Face folder in the model's dtype. The same version of an earlier run gives way.

        Raises:
          InputError: the directory cannot be written to.
        """
        target = self._folder / f"{PREFIX}{version}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if target.exists():
                shutil.rmtree(target)
        except OSError as error:
            expected = "a directory to write to"
            raise InputError(self._folder, "weights_dir", expected=expected, actual=error.strerror) from None
        save_folder(target, self._config, params, dtype=self._config.dtype, companions=self._companions)
        return target

    def prune(self, newest: int) -> None:
        """Removes all but the `KEPT` newest versions up to `newest`; later ones are another run's."""
        versions = sorted((v for v in self._versions() if v <= newest), reverse=True)
        for version in versions[KEPT:]:
            shutil.rmtree(self._folder / f"{PREFIX}{version}", ignore_errors=True)

    def _versions(self) -> list[int]:
        names = [path.name.removeprefix(PREFIX) for path in self._folder.glob(f"{PREFIX}*")]
        return [int(name) for name in names if name.isdigit()]
