"""The one exception that users cause: bad input.

Every command turns an `InputError` into one line on stderr and exit status 2; everything else that
is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

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


def run_command(main: Callable[[], Any]) -> None:
    """Runs a command's `main()`; an `InputError` becomes one line on stderr and exit status 2, Ctrl-C 130."""
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
