"""How a command ends that cannot go on: one line on stderr, and a status that says whose turn it is.

    2           InputError: the user's: bad input
    1           RunError, or OSError: the run's or the machine's: not finite, a server down, a full disk
    130, 143    stopped by Ctrl-C, by SIGTERM

Everything else that is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class InputError(ValueError):
    """Input that cannot be used, said in one line.

    Args:
      source: the file, argument or object at fault, as the user named it.
      field: the field, key or index inside `source`.
      expected: what would have been right.
      actual: what was found.
      hint: what the user can do about it, if that is not obvious.
    """

    def __init__(self, source: object, field: str, *, expected: object, actual: object, hint: str = ""):
        self.source, self.field, self.expected, self.actual = source, field, expected, actual
        self.hint = hint
        message = f"{source}: {field}: expected {expected}; got {actual}"
        super().__init__(" ".join((f"{message}; {hint}" if hint else message).split()))

    def __reduce__(self) -> tuple[Callable[[], InputError], tuple[()]]:  # sent between processes
        said = {"expected": str(self.expected), "actual": str(self.actual), "hint": self.hint}
        return functools.partial(InputError, str(self.source), self.field, **said), ()


class RunError(RuntimeError):
    """A run that cannot go on although its input was right, said in one line."""


@contextlib.contextmanager
def writing(path: object) -> Iterator[None]:
    """Inside, an OSError becomes a RunError that names the path: most errors of writing don't.

    Args:
      path: what is written.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error


class Interrupted(Exception):
    """A run that a signal stopped; everything is saved.

    Args:
      by: the signal.
      step: the last step, which is saved; 0 if none was made.
    """

    def __init__(self, by: signal.Signals, step: int):
        self.by, self.step = by, step
        done = f"after step {step}, which is saved; the same command goes on"
        super().__init__(f"stopped by {by.name} {done if step else 'before the first step'}")


class Terminated(BaseException):
    """SIGTERM came for the second time: nothing is waited for any more."""


def run_command(main: Callable[[], Any]) -> None:
    """Runs a command's `main()`; what stops it becomes one line on stderr.

    Exit status: see the module.
    """
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except (RunError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(128 + stopped.by)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Terminated:
        print("terminated", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
