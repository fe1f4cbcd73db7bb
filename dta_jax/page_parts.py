"""What the HTML pages are put together from: their own files, templates, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources


def page_file(name: str) -> str:
    """The text of a file in `dta_jax/pages`."""
    return resources.files("dta_jax").joinpath("pages", name).read_text(encoding="utf-8")


def fill(template: str, parts: Mapping[str, str]) -> str:
    """The template with every `<!--NAME-->` replaced by its part."""
    pieces = template.split("<!--")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("-->", 1)
        filled += [parts[name], rest]
    return "".join(filled)


def table(heads: Sequence[str], rows: Sequence[str], last_head: str = "") -> str:
    """A table of `table_row`s; `last_head` is HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f"<table><tr>{head}{last_head}</tr>{''.join(rows)}</table>"


def table_row(cells: Sequence[str], shown: bool, last_cell: str = "") -> str:
    """A row of texts, highlighted if `shown`; `last_cell` is HTML."""
    row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f"<tr{' class=shown' if shown else ''}>{row}{last_cell}</tr>"
