"""Dollars against hours of every choice, drawn: the choices as dots, the front as a line, ranges as
crosses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from farthing.report import chart, page
from farthing.report.plan_words import has_price, machine_of, say_cost
from farthing.units import plural, say_seconds

Row = Mapping[str, Any]
_N_LABELS = 12
_HEIGHT = 470
_LETTER, _LINE = 6.7, 15.0  # of a label, in the drawing's units

_TIMES: dict[str, int] = {
    **{
        "1 s": 1,
        "3 s": 3,
        "10 s": 10,
        "30 s": 30,
        "1 min": 60,
        "3 min": 180,
        "10 min": 600,
        "30 min": 1800,
    },
    **{
        "1 h": 3600,
        "2 h": 7200,
        "5 h": 18000,
        "10 h": 36000,
        "1 day": 86400,
        "2 days": 172_800,
        "5 days": 432_000,
    },
    **{"2 weeks": 1_209_600, "5 weeks": 3_024_000, "3 months": 7_884_000, "1 year": 31_536_000},
    **{"3 years": 94_608_000, "10 years": 315_360_000},
}


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
    dots: Sequence[tuple[float, float]],
    edges: tuple[float, float, float, float],
) -> list[Label]:
    """A place for the words of each point such that none overlap, and none hides another of the
    points.

    Tries the sides of the point, then farther away; of the places that are free it takes the one
    that hides fewest dots. Where none is free, the point has no label.
    """
    placed: list[Label] = []
    for text, x, y in points:
        wide = _LETTER * len(text)
        free: list[tuple[float, int, Label]] = []
        for far in (7.0, 20.0, 38.0, 58.0):
            for order, (left, top) in enumerate(
                (
                    (x + far, y - _LINE / 2),
                    (x + far, y - _LINE - far / 2),
                    (x + far, y + far / 2),
                    (x - far - wide, y - _LINE / 2),
                    (x - wide / 2, y - _LINE - far),
                    (x - wide / 2, y + far),
                    (x - far - wide, y + far / 2),
                    (x - far - wide, y - _LINE - far / 2),
                )
            ):
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
    return all(
        right < other.box[0] - 4
        or left > other.box[2] + 4
        or bottom < other.box[1]
        or top > other.box[3]
        for other in placed
    )


def _is_in(box: tuple[float, float, float, float], dot: tuple[float, float]) -> bool:
    return box[0] - 4 < dot[0] < box[2] + 4 and box[1] - 4 < dot[1] < box[3] + 4


def cost_against_time(rows: Sequence[Row], best: Row) -> str:
    """The drawing with its caption and key, as HTML; nothing where no choice has a price."""
    shown = [row for row in rows if has_price(row) and row["total_usd"] > 0 and row["hours"] > 0]
    if not shown:
        return ""
    front = sorted((row for row in shown if row["on_front"]), key=lambda row: row["hours"])
    marked = list({row["rank"]: row for row in [best, *front] if row in shown}.values())
    hours = [row["hours"] for row in shown] + [
        h for row in marked for h in row["hours_range"] if h > 0
    ]
    usd = [row["total_usd"] for row in shown] + [
        u for row in marked for u in row["usd_range"] if u > 0
    ]
    axes = _axes(hours, usd)

    def at(row: Row) -> tuple[float, float]:
        return axes.at(row["hours"], row["total_usd"])

    right, bottom = chart.WIDTH - chart.RIGHT, _HEIGHT - chart.BOTTOM
    svg = [chart.words_at("axis", right, _HEIGHT - 6, "time from now to the end", "end")]
    svg.append(chart.words_at("axis", chart.LEFT - 8, chart.TOP - 14, "dollars", "end"))
    if len(front) > 1:
        svg.append(chart.joined("front", map(at, front)))
    for row in marked:
        (x, y), (left, top) = at(row), axes.at(row["hours_range"][0], row["usd_range"][2])
        end, low = axes.at(row["hours_range"][2], row["usd_range"][0])
        svg += [chart.line("whisker", left, y, end, y), chart.line("whisker", x, top, x, low)]
    for row in sorted(shown, key=lambda row: (row in marked, -row["rank"])):
        svg.append(_dot(row, at(row), is_marked=row in marked, is_best=row is best))
    first = [best] if best in shown else []
    named = [row for row in [*first, *front] if row in marked][: 2 * _N_LABELS]
    wanted = list({row["rank"]: (_label(row), *at(row)) for row in named}.values())[:_N_LABELS]
    dots = [at(row) for row in shown] + _along([at(row) for row in front])
    for label in place_labels(wanted, dots, (chart.LEFT + 2, chart.TOP, right, bottom)):
        svg += _label_words(label)
    n_hidden = len(rows) - len(shown)
    are = "is" if n_hidden == 1 else "are"
    hidden = f" {plural(n_hidden, 'choice')} without a price {are} not drawn." if n_hidden else ""
    caption = (
        "Both axes are logarithmic. The line joins the choices that no other choice beats on both"
        f" cost and time; crosses are their ranges, which hold for 4 of 5 runs.{hidden}"
    )
    kinds = {"on-demand": ("on demand", "round c1"), "spot": ("spot", "round c2")}
    own = ("your own", "round c3")
    key = page.key(
        dict(sorted({kinds.get(row["kind"], own) for row in shown}, key=lambda one: one[1]))
    )
    drawing = chart.figure(
        "Dollars against hours of every choice", caption, svg, axes, key, _front_words(front)
    )
    return page.heading("Cost against time") + drawing


def _axes(hours: Sequence[float], usd: Sequence[float]) -> chart.Axes:
    """Both by powers of ten, with times and amounts that people name."""
    x, y = _edges(hours), _edges(usd)
    times = {
        seconds / 3600: words for words, seconds in _TIMES.items() if x[0] <= seconds / 3600 <= x[1]
    }
    steps = (1, 2, 5) if math.log10(y[1] / y[0]) < 3.2 else (1,)
    powers = range(math.floor(math.log10(y[0])), math.ceil(math.log10(y[1])) + 1)
    amounts = [
        amount
        for power in powers
        for step in steps
        if y[0] <= (amount := step * 10.0**power) <= y[1]
    ]
    return chart.Axes(
        x,
        y,
        times.__getitem__,
        lambda amount: f"${amount:g}",
        list(times),
        amounts,
        _HEIGHT,
        is_log=True,
    )


def _edges(values: Sequence[float]) -> tuple[float, float]:
    """From a little below the least to a little above the largest, and far enough apart for a
    scale.
    """
    low, high = math.log10(min(values)) - 0.06, math.log10(max(values)) + 0.06
    apart = 0.2 if high - low < 0.4 else 0.0
    return 10 ** (low - apart), 10 ** (high + apart)


def _along(points: Sequence[tuple[float, float]], n: int = 12) -> list[tuple[float, float]]:
    """Points on the line that joins these."""
    pairs = itertools.pairwise(points)
    return [
        (a[0] + (b[0] - a[0]) * i / n, a[1] + (b[1] - a[1]) * i / n)
        for a, b in pairs
        for i in range(n)
    ]


def _dot(row: Row, at: tuple[float, float], *, is_marked: bool, is_best: bool) -> str:
    names = [
        {"spot": "spot", "on-demand": "demand"}.get(row["kind"], "own"),
        "marked" if is_marked else "dot",
    ]
    radius = 6.5 if is_best else 4.5 if is_marked else 3
    words = (
        f"{row['rank']}. {row['name']}: {say_cost(row['total_usd'])}, {say_seconds(row['wall_s'])}"
    )
    low, _, high = row["usd_range"]
    words += f" ({say_cost(low)} to {say_cost(high)})"
    return chart.dot(" ".join(names), at, radius, words)


def _label(row: Row) -> str:
    spot = " spot" if row["kind"] == "spot" else ""
    who = row["kind"] if row["kind"] in ("own", "here") else row["provider"]
    return f"{machine_of(row['n_gpus'], row['gpu'][:24])}{spot}, {who[:16]}"


def _label_words(label: Label) -> list[str]:
    left, top, right, bottom = label.box
    near_x, near_y = min(max(label.x, left), right), min(max(label.y, top), bottom)
    found = []
    if math.hypot(near_x - label.x, near_y - label.y) > 14:
        found.append(chart.line("leader", label.x, label.y, near_x, near_y))
    return [*found, chart.words_at("halo", left, top + 11.5, label.text)]


def _front_words(front: Sequence[Row]) -> str:
    words = "; ".join(
        f"{row['name']} {say_cost(row['total_usd'])} in {say_seconds(row['wall_s'])}"
        for row in front
    )
    return f"From the soonest to the cheapest: {words}."
