"""Packages that only one environment needs: imported when it is made, or named if they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from dta_jax.errors import InputError


def require(module: str, *, package: str, wanted_by: str) -> ModuleType:
    """The module.

    Args:
      module: its full name.
      package: what to install for it.
      wanted_by: the settings class that needs it.

    Raises:
      InputError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.split(".")[0]
        if error.name is None or error.name.split(".")[0] != top:
            raise  # it is there, and something that it needs is not
        raise InputError(
            wanted_by,
            "package",
            expected=f"{package}, installed",
            actual=f"no module named {top}",
            hint=f"pip install {package}",
        ) from None
