"""The Ray cluster on which environments and reward functions run, where one is named: package `ray`.

Every node of the cluster needs dta_jax, and the module of the environment or reward function, on its Python
path. A process is connected to one cluster at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

from dta_jax.envs.packages import require
from dta_jax.errors import InputError

_REACH_SECONDS: Final = 10.0
START_SECONDS: Final = 120.0
"""How long an actor may take until it is placed on a node and has imported what it needs."""


def ray_package(wanted_by: str) -> Any:
    """The module `ray`.

    Args:
      wanted_by: the settings class that names a cluster.

    Raises:
      InputError: it is not installed.
    """
    return require("ray", package="dta_jax[ray]", wanted_by=wanted_by)


def connected(source: str, field: str, address: str) -> Any:
    """The module `ray`, connected to a cluster.

    Args:
      source: the settings class that names the cluster.
      field: its field.
      address: "HOST:PORT" of the head node, "auto" for the cluster that this machine belongs to, or "local"
        for a new one on this machine alone. Where the process is connected already, that connection is used.

    Raises:
      InputError: `ray` is not installed, or there is no such cluster.
    """
    ray = ray_package(source)
    if not ray.is_initialized():
        try:
            _reach(address)
            with _own_sigterm():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            hint = "ray start --head starts a cluster on this machine"
            expected = "the address of a Ray cluster"
            raise InputError(
                source, field, expected=expected, actual=f"{address}: {error}", hint=hint
            ) from None
    return ray


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps this program's answer to SIGTERM: Ray's ends it three seconds later, saved or not."""
    python, c = signal.getsignal(signal.SIGTERM), ctypes.pythonapi
    c.PyOS_getsig.restype, c.PyOS_setsig.restype = ctypes.c_void_p, ctypes.c_void_p
    c.PyOS_setsig.argtypes = (ctypes.c_int, ctypes.c_void_p)
    handler = c.PyOS_getsig(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, python)
        c.PyOS_setsig(signal.SIGTERM, handler)


def _reach(address: str) -> None:
    """Raises an OSError where nobody answers at HOST:PORT: `ray.init` would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()
