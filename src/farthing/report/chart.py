"""Drawings for pages, as SVG that needs no script: columns stacked over time, curves over steps,
and what others consist of.

Each has a title and a description in words for those who can't see it, and a scale that fits its
values: what lies beyond is drawn at its edge. Refuses to compute what it draws.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from farthing.report.page import colours, escape, key, wide

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 860, 62, 14, 26, 40
_SIGNS = {"interruption": "✕", "out of memory": "!", "evaluation": "●", "checkpoint": "▾"}


@dataclass(frozen=True)
class Line:
    """A curve; `band` has (x, low, high), `dots` marks its points."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 1
    band: Sequence[tuple[float, float, float]] = ()
    dots: bool = False


@dataclass(frozen=True)
class Bars:
    """Columns from `begin` to `end` of the horizontal axis, each with its parts."""

    columns: Sequence[tuple[float, float, Mapping[str, float], str]]
    """(begin, end, parts, what is said of it)"""
    marks: Sequence[tuple[float, str, str]] = ()
    """(where, kind, what is said of it)"""


@dataclass(frozen=True)
class Axes:
    """The scales of a drawing; `is_log`: by powers of ten. Ticks that are not given are round
    values.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    say_x: Callable[[float], str]
    say_y: Callable[[float], str]
    x_ticks: Sequence[float] | None = None
    y_ticks: Sequence[float] | None = None
    height: int = 300
    is_log: bool = False

    def at(self, x: float, y: float) -> tuple[float, float]:
        """A point of the drawing."""
        return self.to_x(x), self.to_y(y)

    def to_x(self, x: float) -> float:
        """Where a value stands from the left."""
        return LEFT + self._share(x, *self.x) * (WIDTH - LEFT - RIGHT)

    def to_y(self, y: float) -> float:
        """Where a value stands from the top."""
        return self.height - BOTTOM - self._share(y, *self.y) * (self.height - BOTTOM - TOP)

    def _share(self, value: float, low: float, high: float) -> float:
        value = min(max(value, low), high)
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return (value - low) / ((high - low) or 1.0)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values between two: 1, 2 or 5 times a power of ten apart."""
    if not (high - low) / most >= sys.float_info.min:  # nor where no power of ten is so small
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    size = next(power * n for n in (1, 2, 5, 10, 20) if (high - low) / (power * n) <= most)
    return [
        round(size * i, 10)
        for i in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)
    ]


def time_ticks(seconds: float, most: int = 7) -> list[float]:
    """Round moments from 0 to `seconds`."""
    sizes = [
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
        1800,
        3600,
        7200,
        10800,
        21600,
        43200,
        86400,
    ]
    sizes += [86400 * n for n in (2, 5, 10, 20, 50, 100)]
    size = (
        next((size for size in sizes if seconds / size <= most), sizes[-1])
        if seconds > 2
        else seconds / 4
    )
    return [size * i for i in range(int(seconds / size) + 1)] if seconds else [0.0]


# ---- what drawings consist of; places are in the drawing's units ----


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line of a style."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def joined(kind: str, points: Iterable[tuple[float, float]], shape: str = "polyline") -> str:
    """A line through points, or a `polygon` with these corners."""
    return f'<{shape} class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def dot(kind: str, at: tuple[float, float], radius: float, said: str = "") -> str:
    """A point, and what is said of it."""
    circle = f'<circle class="{kind}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:g}"'
    return f"{circle}><title>{escape(said)}</title></circle>" if said else f"{circle}/>"


def words_at(kind: str, x: float, y: float, words: str, anchor: str = "start") -> str:
    """Words that begin, end or have their middle at a place."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"'
        f' text-anchor="{anchor}">{escape(words)}</text>'
    )


def _group(said: str, svg: str) -> str:
    return f"<g><title>{escape(said)}</title>{svg}</g>"


def figure(
    title: str, caption: str, svg: Sequence[str], axes: Axes, below: str, said: str = ""
) -> str:
    """A drawing in its frame, with what stands below; `said` to those who can't see it, where it is
    not the caption.
    """
    name = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    bottom, right = axes.height - BOTTOM, WIDTH - RIGHT
    grid = []
    for x in ticks(*axes.x, 7) if axes.x_ticks is None else axes.x_ticks:
        at = axes.to_x(x)
        grid += [
            words_at("axis", at, bottom + 18, axes.say_x(x), "middle"),
            line("grid", at, TOP, at, bottom),
        ]
    for y in ticks(*axes.y, 5) if axes.y_ticks is None else axes.y_ticks:
        at = axes.to_y(y)
        grid += [
            words_at("axis", LEFT - 8, at + 4, axes.say_y(y), "end"),
            line("grid", LEFT, at, right, at),
        ]
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {axes.height}" role="img" aria-labelledby="{name}-title'
        f' {name}-text">'
        f'<title id="{name}-title">{escape(title)}</title><desc'
        f' id="{name}-text">{escape(said or caption)}</desc>'
        f"{''.join(grid)}{''.join(svg)}</svg>"
    )
    return (
        f"<figure>{wide(title, drawing)}<figcaption>{escape(caption)}</figcaption>{below}</figure>"
    )


# ---- drawings ----


def curves(
    title: str,
    words: str,
    lines: Sequence[Line],
    axes: Axes,
    best: tuple[float, float, str] | None = None,
) -> str:
    """Curves over one axis, with a key where there are several; `best` is a point to mark, with its
    words.
    """
    svg = []
    for each in lines:
        points = [axes.at(x, y) for x, y in each.points]
        if each.band:
            above, below = (
                [axes.at(x, high) for x, _, high in each.band],
                [axes.at(x, low) for x, low, _ in each.band],
            )
            svg.append(joined(f"band f{each.colour}", [*above, *reversed(below)], "polygon"))
        if len(points) > 1:
            svg.append(joined(f"line s{each.colour}", points))
        if each.dots or len(points) == 1:
            said = [f"{each.name}, {axes.say_x(x)}: {axes.say_y(y)}" for x, y in each.points]
            svg += [
                dot(f"f{each.colour}", at, 3, words) for at, words in zip(points, said, strict=True)
            ]
    if best is not None:
        x, y = axes.at(*best[:2])
        anchor, side = ("end", -9) if x > WIDTH / 2 else ("start", 9)
        svg += [dot("best", (x, y), 6), words_at("halo", x + side, y - 9, best[2], anchor)]
    names = {each.name: f"c{each.colour}" for each in lines}
    return figure(title, words, svg, axes, key(names) if len(names) > 1 else "")


def stacked(title: str, words: str, bars: Bars, axes: Axes) -> str:
    """Columns of parts over time, with what happened above them, and a key."""
    svg, names = [], set[str]()
    for begin, end, parts, said in bars.columns:
        total = sum(parts.values())
        left, width = axes.to_x(begin), axes.to_x(end) - axes.to_x(begin)
        below, cells = 0.0, []
        for name, its_colour in colours(parts).items() if total > 0 else ():
            top, bottom = (
                axes.to_y(100 * (below + parts[name]) / total),
                axes.to_y(100 * below / total),
            )
            below += parts[name]
            names.add(name)
            height = bottom - top
            if height >= 0.05:
                where = (
                    f'x="{left:.2f}" y="{top:.2f}" width="{max(0.2, width + 0.15):.2f}"'
                    f' height="{height:.2f}"'
                )
                cells.append(f'<rect class="f{its_colour[1:]}" {where}/>')
        svg.append(_group(said, "".join(cells)))
    for at, kind, said in bars.marks:
        x = axes.to_x(at)
        stops = kind in ("interruption", "out of memory")
        sign = words_at("axis", x, TOP - 6, _SIGNS[kind], "middle")
        svg.append(
            _group(said, sign + (line("mark", x, TOP, x, axes.height - BOTTOM) if stops else ""))
        )
    happened = {mark[1] for mark in bars.marks}
    signs = "".join(f"<li>{sign} {kind}</li>" for kind, sign in _SIGNS.items() if kind in happened)
    return figure(title, words, svg, axes, key(colours(names), signs))
