"""Spells README, CHANGELOG, docs, notebooks and docstrings: python .ci/check_spelling.py [--write]

Words are looked up in pyspellchecker's English dictionary, then in .ci/words.txt, which holds the project's
names and terms, in lower case. `--write` adds what is unknown to that list: read the difference before you
commit it. Code, links, quoted text and names with capitals inside are left out.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from spellchecker import SpellChecker

ROOT = Path(__file__).resolve().parent.parent
WORDS = Path(__file__).with_name("words.txt")
NOT_PROSE = re.compile(
    r"^( *)```.*?^\1```|`[^`\n]*`|<?https?://\S+|\]\([^)]*\)|^    .*?$|\"[^\"\n]*\"|</?\w+[^>\n]*>",
    re.DOTALL | re.MULTILINE,
)
WORD = re.compile(r"(?<![\w./$-])[A-Za-z][a-z']*[a-z](?![\w/])")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def texts() -> Iterator[tuple[str, str]]:
    """Everything that is read: (where it is, Markdown)."""
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]:
        yield str(path.relative_to(ROOT)), path.read_text()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                yield str(path.relative_to(ROOT)), "".join(cell["source"])
    for path in sorted((ROOT / "dta_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, DOCUMENTED) and (said := ast.get_docstring(node)):
                yield str(path.relative_to(ROOT)), said


def words_of(text: str) -> set[str]:
    """The words of its prose, in lower case; a possessive counts as its noun."""
    return {word.lower().removesuffix("'s").rstrip("'") for word in WORD.findall(NOT_PROSE.sub(" ", text))}


def main() -> int:
    found: dict[str, str] = {}
    for where, text in texts():
        for word in words_of(text):
            found.setdefault(word, where)
    known = set(WORDS.read_text().split()) if WORDS.exists() else set()
    unknown = sorted(SpellChecker(language="en").unknown(found) - known)
    if "--write" in sys.argv[1:]:
        WORDS.write_text("\n".join(sorted((known & found.keys()) | set(unknown))) + "\n")
        return 0
    for word in unknown:
        print(f"{found[word]}: {word}: not in the dictionary or in {WORDS.relative_to(ROOT)}")
    print(f"{len(found)} words")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
