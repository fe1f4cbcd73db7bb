"""What only the first of several processes can do, such as collecting rollouts: the others get its result.

    batch = on_first(lambda: collector.batch(step))      # called in process 0 only; returned in all

All processes have to call it, in the same order as their other collective work. Those that wait do so at a
barrier, since collectives of devices give up after some time. With one process it is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from dta_jax.errors import InputError, RunError
from dta_jax.signals import Stopped, waiting

T = TypeVar("T")
_SMALLEST: Final = 4096  # bytes; sent in few sizes, since each one is compiled
_LONGEST_WAIT_MS: Final = 7 * 24 * 3600 * 1000  # when process 0 is lost, the others end by themselves


def on_first(call: Callable[[], T]) -> T:
    """The result of a call that process 0 makes, in every process.

    Args:
      call: returns numbers, text, None and numpy arrays, in dicts and lists.

    Raises:
      InputError, RunError: what the call raised; in the other processes a RunError with its text. Whatever
        else it raises ends process 0, and the others with it.
      Stopped: a signal came while process 0 was at it, inside `StopSignals.interrupting`; in all.
    """
    if jax.process_count() == 1:
        return call()
    if jax.process_index() > 0:
        answer = msgpack_restore(_sent(b""))
        if answer["stopped"]:
            raise Stopped
        if answer["failure"] is not None:
            raise RunError(f"process 0: {answer['failure']}")
        return answer["value"]
    try:
        with waiting():
            value = call()
    except (InputError, RunError, Stopped) as error:
        stopped = isinstance(error, Stopped)
        _sent(msgpack_serialize({"value": None, "failure": str(error), "stopped": stopped}))
        raise
    _sent(msgpack_serialize({"value": value, "failure": None, "stopped": False}))
    return value


def _sent(data: bytes) -> bytes:
    """The bytes of process 0; the others' are ignored."""
    multihost.get_barrier_sync_fn()(key="first_process", timeout_ms=_LONGEST_WAIT_MS)
    size = int(_broadcast(np.array(len(data), np.int32)))
    room = np.zeros(max(_SMALLEST, 1 << (size - 1).bit_length()), np.uint8)
    if jax.process_index() == 0:
        room[:size] = np.frombuffer(data, np.uint8)
    return _broadcast(room)[:size].tobytes()


def _broadcast(array: Any) -> np.ndarray:
    return np.asarray(multihost_utils.broadcast_one_to_all(array))
