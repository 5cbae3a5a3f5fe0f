"""Drawings for pages, as SVG without a script, with a title and a description for those who can't
see it. What lies beyond a scale is drawn at its edge. `templates/chart.svg` draws.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from farthing.report.blocks import Drawing
from farthing.report.html import colour, in_order, svg

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 860, 62, 14, 26, 46
_SIGNS = {"interruption": "✕", "out of memory": "!", "evaluation": "●", "checkpoint": "▾"}
Point = tuple[float, float]
Points = Sequence[Sequence[float]]


class Line(NamedTuple):
    """A curve; `band` has (x, low, high), `dots` marks its points."""

    name: str
    points: Points
    colour: int = 1
    band: Sequence[tuple[float, float, float]] = ()
    dots: bool = False


class Stretch(NamedTuple):
    """From `begin` to `end` of the horizontal axis, as high as the drawing."""

    begin: float
    end: float
    parts: Mapping[str, float]
    said: str


@dataclass(frozen=True)
class Axes:
    """The scales of a drawing; `is_log`: by powers of ten. Ticks that are not given are round."""

    x: Point
    y: Point
    say_x: Callable[[float], str]
    say_y: Callable[[float], str]
    x_ticks: Sequence[float] | None = None
    y_ticks: Sequence[float] | None = None
    height: int = 300
    is_log: bool = False

    width, left, top, right = WIDTH, LEFT, TOP, WIDTH - RIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def at(self, x: float, y: float) -> Point:
        return self.to_x(x), self.to_y(y)

    def to_x(self, x: float) -> float:
        return LEFT + self._share(x, *self.x) * (WIDTH - LEFT - RIGHT)

    def to_y(self, y: float) -> float:
        return self.bottom - self._share(y, *self.y) * (self.bottom - TOP)

    def _share(self, value: float, low: float, high: float) -> float:
        value = min(max(value, low), high)
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return (value - low) / ((high - low) or 1.0)

    @property
    def x_marks(self) -> list[tuple[float, str]]:
        values = ticks(*self.x, 7) if self.x_ticks is None else self.x_ticks
        return [(self.to_x(x), self.say_x(x)) for x in values]

    @property
    def y_marks(self) -> list[tuple[float, str]]:
        values = ticks(*self.y, 5) if self.y_ticks is None else self.y_ticks
        return [(self.to_y(y), self.say_y(y)) for y in values]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values between two: 1, 2 or 5 times a power of ten apart."""
    if not (high - low) / most >= sys.float_info.min:  # nor where no power of ten is so small
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    size = next(power * n for n in (1, 2, 5, 10, 20) if (high - low) / (power * n) <= most)
    numbers = range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)
    return [round(size * i, 10) for i in numbers]


def time_ticks(seconds: float, most: int) -> list[float]:
    """Round numbers of days, hours, minutes or seconds."""
    unit = next((size for size in (86400, 3600, 60) if seconds >= 2 * size), 1)
    return [unit * number for number in ticks(0.0, seconds / unit, most)]


def figure(
    title: str,
    caption: str,
    axes: Axes,
    *,
    said: str = "",
    key: Mapping[str, str] | None = None,
    signs: Sequence[tuple[str, str]] = (),
    **shapes: Sequence[Any],
) -> Drawing:
    """A drawing in its frame; `said` to those who can't see it, where it is not the caption.

    `shapes`, by the names of the template: lines, columns with their rectangles, marks, paths
    (class, points), dots (class, point, radius, title) and words (class, place, text, anchor).
    """
    name = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    picture = svg("chart.svg", id=name, title=title, said=said or caption, axes=axes, **shapes)
    return Drawing(title, picture, caption, key or {}, signs)


def curves(
    title: str,
    caption: str,
    lines: Sequence[Line],
    axes: Axes,
    best: tuple[float, float, str] | None = None,
) -> Drawing:
    dots, words = [], []
    if best is not None:
        x, y = axes.at(*best[:2])
        anchor, side = ("end", -9) if x > WIDTH / 2 else ("start", 9)
        dots = [("best", best[:2], 6, "")]
        words = [("halo", (x + side, y - 9), best[2], anchor)]
    key = {each.name: f"c{each.colour}" for each in lines} if len(lines) > 1 else None
    return figure(title, caption, axes, key=key, lines=lines, dots=dots, words=words)


def stacked(
    title: str,
    caption: str,
    stretches: Sequence[Stretch],
    marks: Sequence[tuple[float, str]],
    axes: Axes,
) -> Drawing:
    """Columns of parts over time, with what happened (when, what) above them, and a key."""
    drawn = []
    for column in stretches:
        total, below, cells = sum(column.parts.values()), 0.0, []
        left, right = axes.to_x(column.begin), axes.to_x(column.end)
        for name, part in in_order(column.parts) if total > 0 else ():
            top, bottom = (axes.to_y(100 * x / total) for x in (below + part, below))
            below += part
            if bottom - top >= 0.05:
                cells.append((left, top, max(0.2, right - left + 0.15), bottom - top, colour(name)))
        drawn.append((column, cells))
    kinds = {kind for _, kind in marks}
    signs = [(sign, kind) for kind, sign in _SIGNS.items() if kind in kinds]
    lined = [(at, _SIGNS[kind], kind in ("interruption", "out of memory")) for at, kind in marks]
    names = {name: 1.0 for column in stretches for name in column.parts}
    key = {name: f"c{colour(name)}" for name, _ in in_order(names)}
    return figure(title, caption, axes, key=key, signs=signs, columns=drawn, marks=lined)
