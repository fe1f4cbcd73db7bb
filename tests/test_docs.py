"""The documentation holds together: links lead somewhere, and what is generated is what the code says."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dta_jax.config import BUILDERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FENCES = {"bash", "python", "py", "text", "json"}  # what .ci/run_docs.py knows, and what is only shown


def load(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def markdown(path):
    """A page's text, or that of a notebook's Markdown cells, without code."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"`[^`\n]*`", "", re.sub(r"(?ms)^```.*?^```", "", text))


def anchors(path):
    """What a page's headings are called in links."""
    text = re.sub(r"(?ms)^```.*?^```", "", path.read_text())
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)|<(https?:[^>]*)>", markdown(page))
    for target in (inside or outside for inside, outside in targets):
        address = urlsplit(target)
        if address.scheme:
            assert address.scheme == "https", target
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", address.netloc), target
            continue
        found = page if not address.path else (page.parent / address.path).resolve()
        assert found.exists(), target
        assert not address.fragment or address.fragment in anchors(found), target


def test_pictures_say_what_they_show():
    for page in PAGES:
        assert not re.search(r"!\[\]\(", page.read_text()), page.name


def test_code_blocks_are_of_known_kinds():
    for page in PAGES:
        opened = re.findall(r"(?m)^```(\w+)", page.read_text())
        assert set(opened) <= FENCES, page.name
        assert page.read_text().count("\n```") == 2 * len(opened), f"{page.name}: a block without a kind"


def test_every_page_is_in_the_sites_contents():
    listed = re.findall(r"(?m)^ +- .+: ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text())
    here = [page.name for page in PAGES if page.parent.name == "docs"]
    assert sorted(listed) == sorted([*here, "index.md"])  # index.md is README.md


def test_the_configuration_reference_is_the_codes():
    script = load(ROOT / ".ci" / "config_reference.py")
    written = script.PAGE.read_text() == script.page()
    assert written, "docs/configuration.md is old: python .ci/config_reference.py"


def test_every_field_of_every_builder_says_what_it_is():
    script = load(ROOT / ".ci" / "config_reference.py")
    for name, cls in BUILDERS.items():
        fields = {field.name for field in dataclasses.fields(cls)}
        assert fields <= script.described_fields(cls).keys(), name
        assert script.about(cls), name


def test_the_reference_reads_fields_of_classes_above_and_over_several_lines():
    @dataclasses.dataclass
    class Above:
        """Above.

        Attributes:
          a, b: of both,
            on two lines.
        """

        a: int = 1
        b: int = 2

    @dataclasses.dataclass
    class Below(Above):
        """Below.

        Attributes:
          c: of its own.

        Source: a book.
        """

        c: int | None = None

    script = load(ROOT / ".ci" / "config_reference.py")
    assert script.described_fields(Below) == {
        "a": "of both, on two lines.",
        "b": "of both, on two lines.",
        "c": "of its own.",
    }
    assert script.about(Below) == "Below.\n\nSource: a book."
    assert "| `c` | int or None | `None` | of its own. |" in script.section("Below", Below)


def test_pictures_of_the_concepts_are_the_codes():
    script = load(ROOT / "docs" / "pictures" / "concepts.py")
    for name, picture in script.pictures().items():
        drawn = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
        assert drawn == picture.svg(), f"{name} is old: python docs/pictures/concepts.py"


def test_every_benchmark_is_told():
    told = re.findall(r"(?m)^\| `(\w+\.py)[ `]", (ROOT / "docs" / "benchmarks.md").read_text())
    assert {path.name for path in (ROOT / "benchmarks").glob("*.py")} <= set(told)


def test_notebooks_are_committed_without_outputs():
    assert len(NOTEBOOKS) >= 5
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs"), path.name
            assert cell.get("execution_count") is None, path.name
