"""Line charts as pictures: values over steps, several lines, axes with round numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dta_jax.picture import GRID, Line, Picture, Rect, Text, blend, compact, ticks

WIDTH: Final = 600
HEIGHT: Final = 300
LEFT, RIGHT, TOP, FLOOR = 62, 16, 52, 262  # of the plot inside the chart, pixels
MOST_POINTS: Final = 800  # of a line; of more, each stretch's mean is drawn
SMOOTHED: Final = 30  # running means are over this part of a line's points
_SOFT: Final = "#5b6b7a"


@dataclass(frozen=True, eq=False)
class Series:
    """One line.

    Attributes:
      label: its name.
      x, y: float64[n], ascending steps and finite values, n at least 1.
      colour: `#rrggbb`.
      dash: pixels drawn and left out, in turns; empty for a solid line.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    dash: tuple[float, ...] = ()

    def thinned(self) -> tuple[np.ndarray, np.ndarray]:
        """At most `MOST_POINTS` points, means of equally long stretches."""
        if len(self.x) <= MOST_POINTS:
            return self.x, self.y
        bounds = np.linspace(0, len(self.x), MOST_POINTS + 1).astype(int)
        count = np.diff(bounds)
        return np.add.reduceat(self.x, bounds[:-1]) / count, np.add.reduceat(self.y, bounds[:-1]) / count

    def smoothed(self) -> np.ndarray:
        """float64, per point of `thinned` the mean of its neighbourhood, a `SMOOTHED`th of the line."""
        _, y = self.thinned()
        half = len(y) // SMOOTHED // 2
        total = np.concatenate([[0.0], np.cumsum(y)])
        at = np.arange(len(y))
        low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(y))
        return (total[high] - total[low]) / (high - low)


@dataclass(frozen=True)
class Key:
    """An entry of a chart's key."""

    label: str
    colour: str
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Scale:
    """The ranges that a chart shows: x from `x0` to `x1`, y from `y0` to `y1`."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def of(cls, series: Sequence[Series]) -> Scale:
        """Holds all points; a flat line gets room above and below."""
        x = np.concatenate([one.x for one in series])
        y = np.concatenate([one.y for one in series])
        low, high = float(y.min()), float(y.max())
        room = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
        low, high = (0.0 if 0 <= low < 0.3 * high else low - room), high + room
        first, last = float(x.min()), float(x.max())
        return cls(first, last if last > first else first + 1, low, high)

    def pixel_x(self, x: float) -> float:
        """Where a step is in the picture."""
        return LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def pixel_y(self, y: float) -> float:
        """Where a value is in the picture."""
        return FLOOR - (y - self.y0) / (self.y1 - self.y0) * (FLOOR - TOP)


def chart(title: str, unit: str, series: Sequence[Series], key: Sequence[Key]) -> Picture:
    """Lines over steps; long ones pale, with their running mean on top.

    Args:
      title: what is shown.
      unit: of the values.
      series: at least one.
      key: what colours and dashes mean.
    """
    scale = Scale.of(series)
    picture = Picture(WIDTH, HEIGHT, title)
    picture.shapes.append(Text(LEFT, 18, f"{title}, {unit}" if unit else title, 13, bold=True))
    marks = ticks(scale.y0, scale.y1, 5)
    for value, label in zip(marks, tick_labels(marks), strict=True):
        y = scale.pixel_y(value)
        picture.shapes += [
            Rect(LEFT, y, WIDTH - LEFT - RIGHT, 1, GRID),
            Text(LEFT - 7, y + 4, label, 11, "end", _SOFT),
        ]
    marks = [mark for mark in ticks(scale.x0, scale.x1, 6) if mark == int(mark)]
    for step in marks:
        x = scale.pixel_x(step)
        picture.shapes += [
            Rect(x, FLOOR, 1, 4, _SOFT),
            Text(x, FLOOR + 17, f"{step:,.0f}", 11, "middle", _SOFT),
        ]
    picture.shapes.append(Text(WIDTH - RIGHT, FLOOR + 32, "step", 11, "end", _SOFT))
    picture.shapes += _key(key)
    pale, bold = [], []
    for one in series:
        steps, values = one.thinned()
        points = _points(scale, steps, values)
        if len(points) == 1:
            picture.shapes.append(Rect(points[0][0] - 2, points[0][1] - 2, 4, 4, one.colour))
        elif len(points) >= 2 * SMOOTHED:
            smooth = _points(scale, steps, one.smoothed())
            pale.append(Line(points, blend([one.colour, "#ffffff"], 0.7), 1, one.dash))
            bold.append(Line(smooth, one.colour, 1.8, one.dash, one.label))
        else:
            bold.append(Line(points, one.colour, 1.6, one.dash, one.label))
    picture.shapes += [*pale, *bold]
    return picture


def _points(scale: Scale, x: np.ndarray, y: np.ndarray) -> tuple[tuple[float, float], ...]:
    return tuple((scale.pixel_x(a), scale.pixel_y(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True))


def tick_labels(marks: Sequence[float]) -> list[str]:
    """Short labels that differ from each other."""
    short = [compact(mark) for mark in marks]
    digits = 3
    while len(set(short)) < len(marks) and digits < 12:
        digits += 1
        short = [f"{mark:.{digits}g}" for mark in marks]
    return short


def _key(key: Sequence[Key]) -> list[Line | Text]:
    """Names in a row; those that do not fit are left out."""
    shapes: list[Line | Text] = []
    x = float(LEFT)
    for one in key:
        width = 30 + 6.2 * len(one.label)
        if x + width > WIDTH:
            break
        shapes += [
            Line(((x, 34), (x + 22, 34)), one.colour, 2, one.dash),
            Text(x + 27, 38, one.label, 11, fill=_SOFT),
        ]
        x += width + 10
    return shapes
