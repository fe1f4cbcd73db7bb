"""The one exception that users cause: bad input.

Every command turns an `InputError` into one line on stderr and exit status 2; everything else that
is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
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


class RunError(RuntimeError):
    """A run that cannot go on although its input was right, said in one line."""


class Interrupted(Exception):
    """A run that a signal stopped; everything is saved.

    Args:
      by: the signal.
      step: the last step, which is saved.
    """

    def __init__(self, by: signal.Signals, step: int):
        self.by, self.step = by, step
        super().__init__(f"stopped by {by.name} after step {step}, which is saved; the same command goes on")


def run_command(main: Callable[[], Any]) -> None:
    """Runs a command's `main()`; what stops it becomes one line on stderr.

    Exit status: 2 for `InputError`, 1 for `RunError`, 130 for Ctrl-C, 143 for SIGTERM.
    """
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(128 + stopped.by)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
