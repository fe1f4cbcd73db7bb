"""One HTML page of runs' figures, with everything in it: no network, no library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

import dta_jax
from dta_jax.curves import FLOOR, LEFT, RIGHT, TOP, WIDTH, Scale, Series
from dta_jax.page_parts import fill, page_file, table, table_row
from dta_jax.picture import Picture


def report_page(
    rows: Sequence[Mapping[str, str]],
    charts: Sequence[tuple[Picture, Sequence[Series]]],
    colours: Sequence[str] | None,
) -> str:
    """The page.

    Args:
      rows: one per run, what its table says; the same columns in all.
      charts: pictures with the lines in them.
      colours: of the runs, where there are several.
    """
    names = [row["run"] for row in rows]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    body = [table_row([row[name] for name in columns], False) for row in rows]
    keys = zip(names, colours or (), strict=False)
    parts = {
        "TITLE": escape(names[0] if len(names) == 1 else f"{len(names)} runs"),
        "STYLE": page_file("style.css"),
        "TABLE": table(columns, body),
        "KEY": "".join(f'<span><i style="background:{c}"></i>{escape(n)}</span>' for n, c in keys),
        "CHARTS": "".join(f'<div class="chart">{picture.svg()}</div>' for picture, _ in charts),
        "DATA": json.dumps([_chart_data(series) for _, series in charts]).replace("<", "\\u003c"),
        "SCRIPT": page_file("report.js"),
        "VERSION": escape(dta_jax.__version__),
    }
    return fill(page_file("report.html"), parts)


def _chart_data(series: Sequence[Series]) -> dict[str, object]:
    """What the page's script needs to say which values are under the pointer."""
    scale = Scale.of(series)
    lines = []
    for one in series:
        x, y = one.thinned()
        lines.append({"label": one.label, "colour": one.colour, "x": x.tolist(), "y": y.tolist()})
    return {
        "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "floor": FLOOR,
        "x0": scale.x0, "x1": scale.x1, "y0": scale.y0, "y1": scale.y1,
        "lines": lines,
    }  # fmt: skip
