"""What the site has beside the pages in docs/: the API reference, and links that stay right on it.

- One page of reference per group of modules in the table of docs/design.md, made of their docstrings.
- Links to a module's source become links to its place in the reference; links to other files outside docs/
  become plain text, since the site does not hold them.
- README.md is the site's first page.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
GROUP = re.compile(r"^\| \*\*(.+?)\*\* \| \|$")
MODULE = re.compile(r"^\| `([\w.]+)` \| (.*) \|$")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def groups(design: str) -> dict[str, list[tuple[str, str]]]:
    """Modules and what they are, by group, as docs/design.md lists them."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in design.splitlines():
        if match := GROUP.match(line):
            found[match[1]] = []
        elif found and (match := MODULE.match(line)):
            next(reversed(found.values())).append((match[1], match[2]))
    return found


def reference_pages() -> dict[str, str]:
    """Markdown of each page of the reference, by its path below docs/."""
    pages, index = {}, ["# API reference", "", "All modules, by what they are for; their docstrings.", ""]
    for name, modules in groups((ROOT / "docs" / "design.md").read_text()).items():
        path = f"reference/{re.sub(r'[^a-z]+', '_', name.lower()).strip('_')}.md"
        pages[path] = "\n\n".join([f"# {name}", *(f"::: dta_jax.{module}" for module, _ in modules)])
        index += [f"## {name}", "", "| | |", "|---|---|"]
        index += [f"| [`{m}`]({Path(path).name}#dta_jax.{m}) | {line} |" for m, line in modules] + [""]
    return {"reference/index.md": "\n".join(index), **pages}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The reference's pages come last."""
    names = [{"API": path} if path.endswith("index.md") else path for path in reference_pages()]
    assert config.nav is not None
    config.nav[-1]["Reference"].append({"API of all modules": names})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the reference and the first page."""
    for path, text in {**reference_pages(), "index.md": first_page()}.items():
        files.append(File.generated(config, path, content=text))
    return files


def first_page() -> str:
    """README.md, seen from docs/."""
    text = (ROOT / "README.md").read_text()
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", lambda m: f"]({from_docs(m[1])})", text)


def from_docs(target: str) -> str:
    """A path from the root, as one from docs/."""
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/ lead to the reference."""
    where = {
        f"dta_jax/{module.replace('.', '/')}.py": f"{path}#dta_jax.{module}"
        for path, text in reference_pages().items()
        for module in re.findall(r"^::: dta_jax\.([\w.]+)$", text, re.MULTILINE)
    }

    def inside(match: re.Match[str]) -> str:
        return f"[{match[1]}]({where[match[2]]})" if match[2] in where else match[1]

    return markdown if page.file.src_uri.startswith("reference/") else OUTSIDE.sub(inside, markdown)
