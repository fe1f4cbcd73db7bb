"""Checks the built site: python .ci/check_site.py FOLDER

- Nothing on a page is fetched from the network.
- Every public name and every class that a config can name is in the API reference.
"""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path

import dta_jax
from dta_jax.config import BUILDERS

FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?https?:[^>]*>"
    r"|<link\b[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect)[^>]*https?:[^>]*>"
)


def documented(inventory: Path) -> set[str]:
    """Names in a Sphinx inventory: four lines of text, then one name a line, compressed."""
    data = inventory.read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(data).decode().splitlines()}


def main() -> int:
    site = Path(sys.argv[1])
    pages = sorted(site.rglob("*.html"))
    faults = [
        f"{page.relative_to(site)}: {tag}" for page in pages for tag in FETCHED.findall(page.read_text())
    ]
    names = documented(site / "objects.inv")
    for thing in {*BUILDERS.values(), *(getattr(dta_jax, name) for name in dta_jax.__all__)}:
        name = f"{thing.__module__}.{thing.__qualname__}"
        if name not in names:
            faults.append(f"{name}: not in the API reference")
    print(*faults, f"{len(pages)} pages, {len(names)} names", sep="\n")
    return 1 if faults or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
