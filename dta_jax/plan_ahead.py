"""Plans the next batch in a thread of the host while the device works on this one.

    with PlanAhead(make, last=train.steps) as plans:
        for step in range(first, train.steps + 1):
            batch, plan = plans.get(step)        # waits for the plan, and begins the one of step + 1
            ...                                  # the device works

`make(step)` must be a function of the step alone (batches are: `dta_jax.batches`) and touch the host only.
What it gives is then the same as without a thread, bit for bit. At most one step is planned ahead, so the
memory of one more batch is needed.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Plan = TypeVar("Plan")


class PlanAhead(Generic[Plan]):
    """Calls `make` for one step after the other, one step ahead; a context manager.

    Args:
      make: (step) -> whatever the step needs.
      last: the last step; nothing is planned beyond it.
    """

    def __init__(self, make: Callable[[int], Plan], *, last: int):
        self._make, self._last = make, last
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan-ahead")
        self._ahead: tuple[int, Future[Plan]] | None = None  # the step that the thread plans or has planned

    def get(self, step: int) -> Plan:
        """What `make(step)` gives, and in the background the next step is begun.

        Steps may be asked for in any order; only one that follows the last is there already.

        Raises:
          RuntimeError: closed.
          Whatever `make(step)` raised, with its own traceback. Other steps can be asked for afterwards.
        """
        ahead, self._ahead = self._ahead, None
        plan = ahead[1] if ahead is not None and ahead[0] == step else self._begin(step)
        result = plan.result()
        if step < self._last:
            self._ahead = step + 1, self._begin(step + 1)
        return result

    def _begin(self, step: int) -> Future[Plan]:
        """In the caller's context: numpy's handling of floating-point errors, for one, is the same."""
        return self._thread.submit(contextvars.copy_context().run, self._make, step)

    def close(self) -> None:
        """Drops what is planned. Waits for nothing: a `make` that is running ends by itself, unheard."""
        self._ahead = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> PlanAhead[Plan]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
