"""Dollars against hours of every choice: the choices as dots, the front as a line, ranges as
crosses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from farthing.report import chart
from farthing.report.blocks import Drawing
from farthing.report.plan_types import Choice, machine_name
from farthing.report.plan_words import say_cost
from farthing.units import plural, say_seconds

_N_LABELS, _HEIGHT = 12, 470
_LETTER, _LINE = 6.7, 15.0  # of a label, in the drawing's units
_TIMES = (
    "1 s=1, 3 s=3, 10 s=10, 30 s=30, 1 min=60, 3 min=180, 10 min=600, 30 min=1800, 1 h=3600, "
    "2 h=7200, 5 h=18000, 10 h=36000, 1 day=86400, 2 days=172800, 5 days=432000, 2 weeks=1209600, "
    "5 weeks=3024000, 3 months=7884000, 1 year=31536000, 3 years=94608000, 10 years=315360000"
)
_KEY = {"on-demand": ("on demand", "round c1"), "spot": ("spot", "round c2")}
_SIDES = ((1, 0), (1, -1), (1, 1), (-1, 0), (0, -1), (0, 1), (-1, 1), (-1, -1))


class Label(NamedTuple):
    """Words in the drawing, at the point that they belong to."""

    text: str
    x: float
    y: float
    left: float
    top: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """left, top, right, bottom."""
        return self.left, self.top, self.left + _LETTER * len(self.text), self.top + _LINE


def place_labels(
    points: Sequence[tuple[str, float, float]],
    dots: Sequence[chart.Point],
    edges: tuple[float, float, float, float],
) -> list[Label]:
    """A place for the words of each point such that none overlap, and none hides another of the
    points: of the free places at its sides the one that hides fewest dots, or none.
    """
    placed: list[Label] = []
    for text, x, y in points:
        wide = _LETTER * len(text)
        free: list[tuple[float, int, Label]] = []
        for far in (7.0, 20.0, 38.0, 58.0):
            for order, (across, down) in enumerate(_SIDES):
                left = {1: x + far, -1: x - far - wide, 0: x - wide / 2}[across]
                away = far if across == 0 else far / 2
                top = {0: y - _LINE / 2, -1: y - _LINE - away, 1: y + away}[down]
                label = Label(text, x, y, left, top)
                if _is_free(label, placed, points, edges):
                    hidden = sum(_is_in(label.box, dot) for dot in dots)
                    free.append((hidden + far / 12, order, label))
        if free:
            placed.append(min(free, key=lambda one: one[:2])[2])
    return placed


def _is_free(
    label: Label,
    placed: Iterable[Label],
    points: Sequence[tuple[str, float, float]],
    edges: tuple[float, float, float, float],
) -> bool:
    left, top, right, bottom = label.box
    if left < edges[0] or top < edges[1] or right > edges[2] or bottom > edges[3]:
        return False
    if any(_is_in(label.box, (x, y)) for _, x, y in points):
        return False
    boxes = [other.box for other in placed]
    return all(right < a - 4 or left > c + 4 or bottom < b or top > d for a, b, c, d in boxes)


def _is_in(box: tuple[float, float, float, float], dot: chart.Point) -> bool:
    return box[0] - 4 < dot[0] < box[2] + 4 and box[1] - 4 < dot[1] < box[3] + 4


def cost_against_time(rows: Sequence[Choice], best: Choice) -> Drawing | None:
    """Nothing where no choice has a price."""
    shown = [row for row in rows if row.is_priced and row.total_usd > 0 and row.hours > 0]
    if not shown:
        return None
    front = sorted((row for row in shown if row.on_front), key=lambda row: row.hours)
    marked = list({row.rank: row for row in [best, *front] if row in shown}.values())
    hours = [row.hours for row in shown] + [h for row in marked for h in row.hours_range if h > 0]
    usd = [row.total_usd for row in shown] + [u for row in marked for u in row.usd_range if u > 0]
    axes = _axes(hours, usd)

    def at(row: Choice) -> chart.Point:
        return axes.at(row.hours, row.total_usd)

    shapes: list[chart.Shape] = [
        chart.Word("axis", (axes.right, _HEIGHT - 6), "time from now to the end", "end"),
        chart.Word("axis", (chart.LEFT - 8, chart.TOP - 14), "dollars", "end"),
    ]
    if len(front) > 1:
        shapes.append(chart.Path("front", [at(row) for row in front]))
    for row in marked:
        (x, y), (left, top) = at(row), axes.at(row.hours_range.low, row.usd_range.high)
        end, low = axes.at(row.hours_range.high, row.usd_range.low)
        shapes += [chart.Path("whisker", [(left, y), (end, y)])]
        shapes += [chart.Path("whisker", [(x, top), (x, low)])]
    numbers = {row.rank for row in marked}
    for row in sorted(shown, key=lambda row: (row.rank in numbers, -row.rank)):
        kind = {"spot": "spot", "on-demand": "demand"}.get(row.kind, "own")
        size = 6.5 if row is best else 4.5 if row.rank in numbers else 3
        low_usd, _, high_usd = (say_cost(x) for x in row.usd_range)
        words = f"{row.rank}. {row.name}: {say_cost(row.total_usd)}, {say_seconds(row.wall_s)}"
        look = "marked" if row.rank in numbers else "dot"
        shapes.append(
            chart.Dot(f"{kind} {look}", at(row), size, f"{words} ({low_usd} to {high_usd})")
        )
    named = [(_label(row), *at(row)) for row in marked][:_N_LABELS]
    dots = [at(row) for row in shown] + _along([at(row) for row in front])
    for label in place_labels(named, dots, (chart.LEFT + 2, chart.TOP, axes.right, axes.bottom)):
        left, top, right, bottom = label.box
        near = min(max(label.x, left), right), min(max(label.y, top), bottom)
        if math.dist(near, (label.x, label.y)) > 14:
            shapes.append(chart.Path("leader", [(label.x, label.y), near]))
        shapes.append(chart.Word("halo", (left, top + 11.5), label.text))
    n = len(rows) - len(shown)
    hidden = (
        f" {plural(n, 'choice')} without a price {'is' if n == 1 else 'are'} not drawn."
        if n
        else ""
    )
    caption = (
        "Both axes are logarithmic. The line joins the choices that no other choice beats on both "
        f"cost and time; crosses are their ranges, which hold for 4 of 5 runs.{hidden}"
    )
    pairs = {_KEY.get(row.kind, ("your own", "round c3")) for row in shown}
    key = dict(sorted(pairs, key=lambda one: one[1]))
    ends = [f"{r.name} {say_cost(r.total_usd)} in {say_seconds(r.wall_s)}" for r in front]
    said = f"From the soonest to the cheapest: {'; '.join(ends)}."
    return chart.figure("Dollars against hours of every choice", caption, shapes, axes, key, said)


def _axes(hours: Sequence[float], usd: Sequence[float]) -> chart.Axes:
    """Both by powers of ten, with times and amounts that people name."""
    x, y = _edges(hours), _edges(usd)
    named = (pair.partition("=") for pair in _TIMES.split(", "))
    times = {int(seconds) / 3600: words for words, _, seconds in named}
    times = {at: words for at, words in times.items() if x[0] <= at <= x[1]}
    steps = (1, 2, 5) if math.log10(y[1] / y[0]) < 3.2 else (1,)
    powers = range(math.floor(math.log10(y[0])), math.ceil(math.log10(y[1])) + 1)
    amounts = [step * 10.0**power for power in powers for step in steps]
    amounts = [amount for amount in amounts if y[0] <= amount <= y[1]]
    return chart.Axes(
        x, y, times.__getitem__, lambda usd: f"${usd:g}", list(times), amounts, _HEIGHT, is_log=True
    )


def _edges(values: Sequence[float]) -> chart.Point:
    """From a little below the least to a little above the largest, and far enough apart."""
    low, high = math.log10(min(values)) - 0.06, math.log10(max(values)) + 0.06
    apart = 0.2 if high - low < 0.4 else 0.0
    return 10 ** (low - apart), 10 ** (high + apart)


def _along(points: Sequence[chart.Point], n: int = 12) -> list[chart.Point]:
    """Points on the line that joins these."""
    pairs = itertools.pairwise(points)
    return [
        (a[0] + (b[0] - a[0]) * i / n, a[1] + (b[1] - a[1]) * i / n)
        for a, b in pairs
        for i in range(n)
    ]


def _label(row: Choice) -> str:
    spot = " spot" if row.kind == "spot" else ""
    who = row.provider if row.is_rented else row.kind
    return f"{machine_name(row.n_gpus, row.gpu[:24])}{spot}, {who[:16]}"
