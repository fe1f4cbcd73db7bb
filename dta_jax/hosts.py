"""Several processes as one run: who they are, and what happens when one is lost.

    DTA_COORDINATOR=host:port DTA_PROCESSES=N DTA_PROCESS=I python -m dta_jax.train ...

Every process runs the same command. `connect` joins them before the first use of a device; afterwards
`jax.devices()` lists the devices of all. Every process reads and plans the same, deterministically, and
places only what its own devices hold.

A lost process is noticed in two ways: the collective that waits for it fails, or its heartbeat stops and
JAX ends the others. `guarded` turns the first into a last line and an exit status; the second is limited to
`HEARTBEAT_SECONDS`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax._src import distributed  # the only way to the key-value store that all processes share
from jax.experimental import multihost_utils

from dta_jax.errors import EXIT_INTERRUPTED, InputError

COORDINATOR, PROCESSES, PROCESS = "DTA_COORDINATOR", "DTA_PROCESSES", "DTA_PROCESS"
HEARTBEAT_SECONDS: Final = 20
CONNECT_SECONDS: Final = 120
EXIT_LOST_PROCESS: Final = 3
_LOOPBACK: Final = ("127.", "localhost:", "[::1]:")


@dataclass(frozen=True)
class Hosts:
    """The processes of a run.

    Attributes:
      coordinator: host:port of process 0.
      processes: how many there are.
      process: which of them this is, from 0.
    """

    coordinator: str
    processes: int
    process: int

    def __post_init__(self) -> None:
        host, colon, port = self.coordinator.rpartition(":")
        if not (host and colon and port.isdecimal()):
            raise InputError(COORDINATOR, "value", expected="host:port", actual=repr(self.coordinator))
        if self.processes < 1:
            raise InputError(PROCESSES, "value", expected="at least 1", actual=self.processes)
        if not 0 <= self.process < self.processes:
            raise InputError(PROCESS, "value", expected=f"0 .. {self.processes - 1}", actual=self.process)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Hosts | None:
        """The processes that the variables name; None if none of them is set.

        Raises:
          InputError: some are missing, or not numbers.
        """
        found = {name: environment[name] for name in (COORDINATOR, PROCESSES, PROCESS) if name in environment}
        if not found:
            return None
        for name in (COORDINATOR, PROCESSES, PROCESS):
            if name not in found:
                raise InputError(
                    name, "value", expected=f"to be set beside {', '.join(found)}", actual="unset"
                )
        for name in (PROCESSES, PROCESS):
            if not found[name].isdecimal():
                raise InputError(name, "value", expected="a number", actual=repr(found[name]))
        return cls(found[COORDINATOR], int(found[PROCESSES]), int(found[PROCESS]))


def connect(hosts: Hosts | None) -> None:
    """Joins the processes; call it before anything asks for devices. Does nothing for None.

    Raises:
      InputError: the others do not come within `CONNECT_SECONDS`.
    """
    if hosts is None:
        return
    # JAX's own answer to SIGTERM is to take note and to go on; `dta_jax.signals` has ours.
    jax.config.update("jax_enable_preemption_service", False)
    # JAX listens on every interface unless it is told one; those of one machine need none but loopback.
    alone = hosts.coordinator.startswith(_LOOPBACK)
    try:
        jax.distributed.initialize(
            hosts.coordinator,
            coordinator_bind_address=hosts.coordinator if alone else None,
            num_processes=hosts.processes,
            process_id=hosts.process,
            initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        expected = f"{hosts.processes} processes within {CONNECT_SECONDS} s"
        raise InputError(COORDINATOR, hosts.coordinator, expected=expected, actual=reason) from None


def answer_of_process_0(answer: bool) -> bool:
    """What process 0 says, on all of them, which have to ask together."""
    return bool(number_of_process_0(answer))


def number_of_process_0(number: int) -> int:
    """The number, below 2^31, that process 0 says, on all of them, which have to ask together."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.array(number, np.int32)))


def tell_process_0(key: str, number: int) -> None:
    """Leaves a number where process 0 finds it, from any thread and without waiting for anyone."""
    _shared().key_value_set(key, str(number), allow_overwrite=True)


def told_process_0(key: str) -> int | None:
    """The number that `tell_process_0` left; None before."""
    try:
        return int(_shared().key_value_try_get(key))
    except jax.errors.JaxRuntimeError:  # not found
        return None


def _shared() -> Any:
    """The key-value store of the processes."""
    return distributed.global_state.client


def guarded(main: Callable[[], Any]) -> None:
    """Runs a command; if a collective fails for want of another process: traceback, a line, exit status 3.

    Ends the process at once: closing down in order would wait for the one that is lost, or, after Ctrl-C, for
    those that know nothing of it.
    """
    try:
        main()
    except KeyboardInterrupt:
        if not jax.distributed.is_initialized():
            raise
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        reason = str(error).splitlines()[0]
        traceback.print_exc()
        print(
            f"error: process {jax.process_index()}: a step failed; is another process lost? {reason}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_LOST_PROCESS)
