"""Small pictures: rectangles, lines and texts in pixels, written as SVG, and as PNG with matplotlib.

A picture is laid out once; both files show the same. Nothing here knows what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from dta_jax.errors import InputError

Anchor = Literal["start", "middle", "end"]
FONT: Final = "DejaVu Sans, Verdana, sans-serif"
INK: Final = "#22303c"
GRID: Final = "#dde3ea"
_DPI: Final = 100
_SCALE: Final = 2  # pixels of a PNG per pixel of the picture
_HORIZONTAL: Final[dict[str, Literal["left", "center", "right"]]] = {
    "start": "left",
    "middle": "center",
    "end": "right",
}


@dataclass(frozen=True)
class Rect:
    """A filled rectangle; `label` is shown by browsers when the pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    label: str = ""


@dataclass(frozen=True)
class Line:
    """A polyline through points (x, y)."""

    points: tuple[tuple[float, float], ...]
    stroke: str
    width: float = 1.5
    dash: tuple[float, ...] = ()  # pixels drawn and left out, in turns
    label: str = ""


@dataclass(frozen=True)
class Text:
    """One line of text; (x, y) is on its baseline."""

    x: float
    y: float
    text: str
    size: float = 12
    anchor: Anchor = "start"
    fill: str = INK
    bold: bool = False


_LAYERS: Final = (Rect, Line, Text)


@dataclass
class Picture:
    """What is drawn: rectangles below, then lines, then texts. (0, 0) is the top left corner.

    Attributes:
      width, height: pixels.
      title: what a screen reader says of it.
      shapes: what is drawn.
    """

    width: int
    height: int
    title: str
    shapes: list[Rect | Line | Text] = field(default_factory=list)

    def svg(self) -> str:
        """The picture as an SVG element that also stands as a file of its own."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}" role="img" '
            f'aria-label="{escape(self.title)}">'
        )
        ground = f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        layers = sorted(self.shapes, key=lambda shape: _LAYERS.index(type(shape)))
        return "\n".join([head, ground, *map(_svg, layers), "</svg>", ""])

    def write(self, stem: Path) -> list[Path]:
        """Writes `stem.svg` and, where matplotlib is installed, `stem.png`; returns what was written."""
        svg = stem.with_suffix(".svg")
        svg.write_text(self.svg(), encoding="utf-8")
        if not can_write_png():
            return [svg]
        png = stem.with_suffix(".png")
        self.write_png(png)
        return [svg, png]

    def write_png(self, path: Path) -> None:
        """Writes the picture as PNG, two pixels for each of its own.

        Raises:
          InputError: matplotlib is not installed.
        """
        if not can_write_png():
            raise InputError(
                path,
                "PNG",
                expected="matplotlib",
                actual="not installed",
                hint="pip install 'dta_jax[plots]'",
            )
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width / _DPI, self.height / _DPI), dpi=_DPI * _SCALE)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.set_axis_off()
        points = 72 / _DPI  # per pixel
        _draw_rects(axes, [shape for shape in self.shapes if isinstance(shape, Rect)])
        for shape in self.shapes:
            if isinstance(shape, Line):
                x, y = zip(*shape.points, strict=True)
                axes.plot(
                    x,
                    y,
                    linestyle=(0, [d / shape.width for d in shape.dash]) if shape.dash else "-",
                    color=shape.stroke,
                    linewidth=shape.width * points,
                )
            elif isinstance(shape, Text):
                axes.text(
                    shape.x,
                    shape.y,
                    shape.text.replace("$", r"\$"),
                    fontsize=shape.size * points,
                    color=shape.fill,
                    weight="bold" if shape.bold else "normal",
                    ha=_HORIZONTAL[shape.anchor],
                    va="baseline",
                )
        figure.savefig(path, format="png")


def can_write_png() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within `low` and `high` (above it), about `count` of them."""
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def compact(number: float) -> str:
    """A number in few characters: 14198 is 14.2k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def blend(colours: Sequence[str], share: float) -> str:
    """The colour at `share` (0 to 1) of a scale given by equally spaced colours, `#rrggbb`."""
    at = min(max(share, 0.0), 1.0) * (len(colours) - 1)
    i = min(int(at), len(colours) - 2)
    low, high = ([int(c[k : k + 2], 16) for k in (1, 3, 5)] for c in colours[i : i + 2])
    return "#" + "".join(f"{round(a + (at - i) * (b - a)):02x}" for a, b in zip(low, high, strict=True))


def _draw_rects(axes, rects: list[Rect]) -> None:  # type: ignore[no-untyped-def]
    """All rectangles in one collection: there can be tens of thousands."""
    from matplotlib.collections import PolyCollection

    corners = [
        [(r.x, r.y), (r.x + r.width, r.y), (r.x + r.width, r.y + r.height), (r.x, r.y + r.height)]
        for r in rects
    ]
    axes.add_collection(PolyCollection(corners, facecolors=[r.fill for r in rects], linewidths=0))


def _svg(shape: Rect | Line | Text) -> str:
    if isinstance(shape, Text):
        weight = ' font-weight="bold"' if shape.bold else ""
        return (
            f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}" fill="{shape.fill}" '
            f'text-anchor="{shape.anchor}"{weight}>{escape(shape.text)}</text>'
        )
    title = f"<title>{escape(shape.label)}</title>" if shape.label else ""
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        dash = f' stroke-dasharray="{" ".join(map(str, shape.dash))}"' if shape.dash else ""
        return (
            f'<polyline points="{points}" fill="none" stroke="{shape.stroke}" '
            f'stroke-width="{shape.width:g}"{dash}>{title}</polyline>'
        )
    return (
        f'<rect x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}" '
        f'fill="{shape.fill}">{title}</rect>'
    )
