"""Writes docs/configuration.md from the classes that a config can name (`dta_jax.config.BUILDERS`).

    python .ci/config_reference.py            writes the page
    python .ci/config_reference.py --check    fails if the page is not what would be written

What a field means is said in its class's docstring, under "Attributes:", or in that of a class above it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from pathlib import Path

from dta_jax.config import BUILDERS, type_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
FIELDS = re.compile(r"^((?:[a-z]\w*)(?:, [a-z]\w*)*): (.*)$")
HEAD = """# Configuration

Every class that a config can name, with its fields. This page is generated from the code
(`python .ci/config_reference.py`); a test says when it is old.

A binding is `Class.field = value`, in a `.gin` file or after `--gin`. Values are Python literals; a class is
put into a field as `@Class()`, and its own fields are bound by its name. Several fields of a class can be
bound in a block:

```text
Train.rollouts = @LiveRollouts()
LiveRollouts.environment = @TreasureHunt()
Collect:
  group_size = 8
  max_staleness = 2
```

`operative_config.gin` in a run's folder has all bindings that were in force, defaults included. How configs
are read: [training.md](training.md#configs).
"""


def described_fields(cls: type) -> dict[str, str]:
    """What the docstrings of a class and of those above it say of fields, one line each."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        name = ""
        for line in map(str.strip, inspect.cleandoc(owner.__doc__ or "").splitlines()):
            match = FIELDS.match(line)
            if match and set(match[1].split(", ")) <= set(inspect.signature(cls).parameters):
                name = match[1]
                found |= dict.fromkeys(name.split(", "), match[2])
            elif not line or line.startswith(("Source:", "Attributes")):
                name = ""
            elif name:
                found |= {each: f"{found[each]} {line}" for each in name.split(", ")}
    return found


def about(cls: type) -> str:
    """A class's docstring without its fields."""
    text = inspect.cleandoc(cls.__doc__ or "")
    text = re.sub(r"(?m)^Attributes:\n(?:  .*\n?|\n(?=  ))*", "", text)
    text = re.sub(r"Attributes beside those of `\w+`:\n\n(?:.+\n?)*", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def default_of(field: dataclasses.Field) -> str:
    """A field's default, as a config would write it."""
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is dataclasses.MISSING:
        return "**required**"
    made = next((name for name, cls in BUILDERS.items() if cls is field.default_factory), None)
    return f"`@{made}()`" if made else f"`{field.default_factory()!r}`"


def section(name: str, cls: type) -> str:
    """One class: what it is, and a table of its fields."""
    hints, said, rows = typing.get_type_hints(cls), described_fields(cls), []
    for field in dataclasses.fields(cls):
        kind = re.sub(r"@(\w+)\(\)", lambda m: f"[@{m[1]}()](#{m[1].lower()})", type_name(hints[field.name]))
        cells = [f"`{field.name}`", kind, default_of(field), said.get(field.name, "")]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    table = ["| field | type | default | |", "|---|---|---|---|", *rows] if rows else ["No fields."]
    return "\n".join([f"## {name}", "", about(cls), "", *table, ""])


def page() -> str:
    """The whole page."""
    links = ", ".join(f"[{name}](#{name.lower()})" for name in BUILDERS)
    return "\n".join([HEAD, f"All classes: {links}.", "", *(section(n, c) for n, c in BUILDERS.items())])


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        print(f"{PAGE.name} is old: python .ci/config_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
