"""Drawings for pages, as SVG that needs no script: columns stacked over time, and curves over steps.

Each has a title and a description in words for those who can't see it, and a scale that fits its values. Refuses to compute
what it draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from farthing.report.page import colour, escape, in_order, key, wide

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 300, 62, 14, 26, 40
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


@dataclass
class Axes:
    """The scales of a drawing."""

    x: tuple[float, float]
    y: tuple[float, float]
    say_x: Callable[[float], str]
    say_y: Callable[[float], str]
    x_ticks: Sequence[float] = ()
    y_ticks: Sequence[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x_ticks = self.x_ticks or ticks(*self.x, 7)
        self.y_ticks = self.y_ticks or ticks(*self.y, 5)

    def at(self, x: float, y: float) -> str:
        """A point of the drawing."""
        return f"{self.to_x(x):.1f},{self.to_y(y):.1f}"

    def to_x(self, x: float) -> float:
        """Where a value stands from the left."""
        low, high = self.x
        return LEFT + (x - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def to_y(self, y: float) -> float:
        """Where a value stands from the top."""
        low, high = self.y
        return HEIGHT - BOTTOM - (y - low) / ((high - low) or 1.0) * (HEIGHT - BOTTOM - TOP)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values between two: 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    size = next(power * n for n in (1, 2, 5, 10, 20) if (high - low) / (power * n) <= most)
    return [round(size * i, 10) for i in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


def time_ticks(seconds: float, most: int = 7) -> list[float]:
    """Round moments from 0 to `seconds`."""
    sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400]
    sizes += [86400 * n for n in (2, 5, 10, 20, 50, 100)]
    size = next((size for size in sizes if seconds / size <= most), sizes[-1]) if seconds > 2 else seconds / 4
    return [size * i for i in range(int(seconds / size) + 1)] if seconds else [0.0]


def curves(
    title: str, words: str, lines: Sequence[Line], axes: Axes, best: tuple[float, float, str] | None = None
) -> str:
    """Curves over one axis, with a key where there are several; `best` is a point to mark, with its words."""
    svg = []
    for line in lines:
        if line.band:
            edge = [axes.at(x, high) for x, _, high in line.band] + [
                axes.at(x, low) for x, low, _ in reversed(line.band)
            ]
            svg.append(f'<polygon class="band f{line.colour}" points="{" ".join(edge)}"/>')
        if len(line.points) > 1:
            svg.append(
                f'<polyline class="line s{line.colour}" points="{" ".join(axes.at(x, y) for x, y in line.points)}"/>'
            )
        if line.dots or len(line.points) == 1:
            said = [(x, y, f"{line.name}, {axes.say_x(x)}: {axes.say_y(y)}") for x, y in line.points]
            svg += [
                f'<circle class="f{line.colour}" cx="{axes.to_x(x):.1f}" cy="{axes.to_y(y):.1f}" r="3">'
                f"<title>{escape(text)}</title></circle>"
                for x, y, text in said
            ]
    if best is not None:
        x, y = axes.to_x(best[0]), axes.to_y(best[1])
        anchor = "end" if x > WIDTH / 2 else "start"
        side = -9 if anchor == "end" else 9
        svg.append(f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
        svg.append(
            f'<text class="halo" x="{x + side:.1f}" y="{y - 9:.1f}" text-anchor="{anchor}">{escape(best[2])}</text>'
        )
    names = [f'<li><i class="c{line.colour}"></i>{escape(line.name)}</li>' for line in lines]
    return _figure(title, words, svg, axes, f'<ul class="key">{"".join(names)}</ul>' if len(names) > 1 else "")


def stacked(title: str, words: str, bars: Bars, axes: Axes) -> str:
    """Columns of parts over time, with what happened above them, and a key."""
    svg, names = [], set[str]()
    for begin, end, parts, said in bars.columns:
        total = sum(parts.values())
        left, width = axes.to_x(begin), axes.to_x(end) - axes.to_x(begin)
        below, cells = 0.0, []
        for name in in_order(parts) if total > 0 else ():
            top, bottom = axes.to_y(100 * (below + parts[name]) / total), axes.to_y(100 * below / total)
            below += parts[name]
            names.add(name)
            height = bottom - top
            if height >= 0.05:
                where = f'x="{left:.2f}" y="{top:.2f}" width="{max(0.2, width + 0.15):.2f}" height="{height:.2f}"'
                cells.append(f'<rect class="f{colour(name)[1:]}" {where}/>')
        svg.append(f"<g><title>{escape(said)}</title>{''.join(cells)}</g>")
    kinds = [kind for kind in _SIGNS if any(mark[1] == kind for mark in bars.marks)]
    for at, kind, said in bars.marks:
        x = axes.to_x(at)
        sign = f'<text class="axis" x="{x:.1f}" y="{TOP - 6}" text-anchor="middle">{_SIGNS[kind]}</text>'
        line = ""
        if kind in ("interruption", "out of memory"):
            line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        svg.append(f"<g><title>{escape(said)}</title>{sign}{line}</g>")
    signs = "".join(f"<li>{_SIGNS[kind]} {kind}</li>" for kind in kinds)
    return _figure(title, words, svg, axes, key(in_order(names)).replace("</ul>", f"{signs}</ul>"))


def _figure(title: str, words: str, svg: Sequence[str], axes: Axes, below: str) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    grid = []
    for x in axes.x_ticks:
        at = axes.to_x(x)
        grid.append(
            f'<text class="axis" x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{axes.say_x(x)}</text>'
        )
        grid.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for y in axes.y_ticks:
        at = axes.to_y(y)
        grid.append(f'<text class="axis" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{axes.say_y(y)}</text>')
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-text">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-text">{escape(words)}</desc>'
        f"{''.join(grid)}{''.join(svg)}</svg>"
    )
    return f"<figure>{wide(title, drawing)}<figcaption>{escape(words)}</figcaption>{below}</figure>"
