"""Drawings for pages, as SVG that needs no script: columns stacked over time, and curves over
steps.

Each has a title and a description for those who can't see it, and a scale that fits its values:
what lies beyond is drawn at its edge. `templates/chart.svg` draws.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farthing.report.blocks import Drawing
from farthing.report.html import colour, svg

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 860, 62, 14, 26, 46
_SIGNS = {"interruption": "✕", "out of memory": "!", "evaluation": "●", "checkpoint": "▾"}
Point = tuple[float, float]


class Path(NamedTuple):
    """A line through points, or a polygon with these corners."""

    kind: str
    points: Sequence[Point]
    is_closed: bool = False


class Dot(NamedTuple):
    kind: str
    at: Point
    radius: float
    said: str = ""


class Word(NamedTuple):
    kind: str
    at: Point
    words: str
    anchor: str = "start"


class Bar(NamedTuple):
    """Rectangles that stand on each other: x, y, width, height, colour."""

    said: str
    cells: Sequence[tuple[float, float, float, float, int]]


Shape = Path | Dot | Word | Bar


class Line(NamedTuple):
    """A curve; `band` has (x, low, high), `dots` marks its points."""

    name: str
    points: Sequence[Point]
    colour: int = 1
    band: Sequence[tuple[float, float, float]] = ()
    dots: bool = False


class Bars(NamedTuple):
    """Columns from `begin` to `end` of the horizontal axis, each with its parts."""

    columns: Sequence[tuple[float, float, Mapping[str, float], str]]
    """Begin, end, parts, what is said of it."""
    marks: Sequence[tuple[float, str, str]] = ()
    """Where, kind, what is said of it."""


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
        """A point of the drawing."""
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


def time_ticks(seconds: float, most: int = 7) -> list[float]:
    """Round moments from 0 to `seconds`."""
    sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200]
    sizes += [86400 * n for n in (1, 2, 5, 10, 20, 50, 100)]
    size = seconds / 4
    if seconds > 2:
        size = next((size for size in sizes if seconds / size <= most), sizes[-1])
    return [size * i for i in range(int(seconds / size) + 1)] if seconds else [0.0]


def figure(
    title: str,
    caption: str,
    shapes: Sequence[Shape],
    axes: Axes,
    key: Mapping[str, str] | None = None,
    said: str = "",
    signs: Sequence[tuple[str, str]] = (),
) -> Drawing:
    """A drawing in its frame; `said` to those who can't see it, where it is not the caption."""
    name = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    values = {"id": name, "title": title, "said": said or caption, "axes": axes, "shapes": shapes}
    values |= {"x_marks": axes.x_marks, "y_marks": axes.y_marks}
    return Drawing(title, svg("chart.svg", **values), caption, said, key or {}, signs)


def curves(
    title: str,
    words: str,
    lines: Sequence[Line],
    axes: Axes,
    best: tuple[float, float, str] | None = None,
) -> Drawing:
    """Curves over one axis, with a key where there are several; `best` is a point to mark."""
    shapes: list[Shape] = []
    for each in lines:
        points = [axes.at(x, y) for x, y in each.points]
        if each.band:
            above = [axes.at(x, high) for x, _, high in each.band]
            below = [axes.at(x, low) for x, low, _ in each.band]
            shapes.append(Path(f"band f{each.colour}", [*above, *reversed(below)], True))
        if len(points) > 1:
            shapes.append(Path(f"line s{each.colour}", points))
        if each.dots or len(points) == 1:
            said = [f"{each.name}, {axes.say_x(x)}: {axes.say_y(y)}" for x, y in each.points]
            kind = f"f{each.colour}"
            shapes += [Dot(kind, at, 3, text) for at, text in zip(points, said, strict=True)]
    if best is not None:
        x, y = axes.at(*best[:2])
        anchor, side = ("end", -9) if x > WIDTH / 2 else ("start", 9)
        shapes += [Dot("best", (x, y), 6), Word("halo", (x + side, y - 9), best[2], anchor)]
    names = {each.name: f"c{each.colour}" for each in lines}
    return figure(title, words, shapes, axes, names if len(names) > 1 else None)


def stacked(title: str, words: str, bars: Bars, axes: Axes) -> Drawing:
    """Columns of parts over time, with what happened above them, and a key."""
    shapes: list[Shape] = []
    names: set[str] = set()
    for begin, end, parts, said in bars.columns:
        total, below, cells = sum(parts.values()), 0.0, []
        left, width = axes.to_x(begin), axes.to_x(end) - axes.to_x(begin)
        for name in sorted(parts, key=lambda part: (colour(part), part)) if total > 0 else ():
            top, bottom = (axes.to_y(100 * x / total) for x in (below + parts[name], below))
            below += parts[name]
            names.add(name)
            if bottom - top >= 0.05:
                cells.append((left, top, max(0.2, width + 0.15), bottom - top, colour(name)))
        shapes.append(Bar(said, cells))
    for at, kind, _said in bars.marks:
        x = axes.to_x(at)
        shapes.append(Word("axis", (x, TOP - 6), _SIGNS[kind], "middle"))
        if kind in ("interruption", "out of memory"):
            shapes.append(Path("mark", [(x, TOP), (x, axes.bottom)]))
    happened = {mark[1] for mark in bars.marks}
    signs = [(sign, kind) for kind, sign in _SIGNS.items() if kind in happened]
    key = {name: f"c{colour(name)}" for name in sorted(names, key=lambda n: (colour(n), n))}
    return figure(title, words, shapes, axes, key, signs=signs)
