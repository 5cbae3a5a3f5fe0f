"""Dollars against hours of every choice, drawn: the choices as dots, the front as a line, ranges as crosses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from farthing.report.page import escape
from farthing.report.plan_words import has_price, say_cost
from farthing.units import plural, say_seconds

Row = Mapping[str, Any]
_N_LABELS = 12
_WIDTH, _HEIGHT = 860, 470
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 20, 18, 50
_LETTER, _LINE = 6.7, 15.0  # of a label, in the drawing's units

_TIMES = {
    **{"1 s": 1, "3 s": 3, "10 s": 10, "30 s": 30, "1 min": 60, "3 min": 180, "10 min": 600, "30 min": 1800},
    **{"1 h": 3600, "2 h": 7200, "5 h": 18000, "10 h": 36000, "1 day": 86400, "2 days": 172_800, "5 days": 432_000},
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
    """A place for the words of each point such that none overlap, and none hides another of the points.

    Tries the sides of the point, then farther away; of the places that are free it takes the one that hides fewest dots.
    Where none is free, the point has no label.
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
        right < other.box[0] - 4 or left > other.box[2] + 4 or bottom < other.box[1] or top > other.box[3]
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
    hours = [row["hours"] for row in shown] + [h for row in marked for h in row["hours_range"] if h > 0]
    usd = [row["total_usd"] for row in shown] + [u for row in marked for u in row["usd_range"] if u > 0]
    to_x, _ = _log_axis(hours, _LEFT, _WIDTH - _RIGHT)
    x_ticks = [(words, seconds / 3600) for words, seconds in _TIMES.items()]
    x_ticks = [tick for tick in x_ticks if _LEFT <= to_x(tick[1]) <= _WIDTH - _RIGHT]
    to_y, y_ticks = _log_axis(usd, _HEIGHT - _BOTTOM, _TOP)
    svg = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="cost-title cost-text">',
        '<title id="cost-title">Dollars against hours of every choice</title>',
        f'<desc id="cost-text">{escape(_front_words(front))}</desc>',
    ]
    svg += _axes(x_ticks, y_ticks, to_x, to_y)

    def at(row: Row) -> tuple[float, float]:
        return to_x(row["hours"]), to_y(row["total_usd"])

    if len(front) > 1:
        svg.append(f'<polyline class="front" points="{" ".join("{:.1f},{:.1f}".format(*at(row)) for row in front)}"/>')
    for row in marked:
        svg += _whiskers(row, to_x, to_y)
    for row in sorted(shown, key=lambda row: (row in marked, -row["rank"])):
        svg.append(_dot(row, at(row), is_marked=row in marked, is_best=row is best))
    first = [best] if best in shown else []
    named = [row for row in [*first, *front] if row in marked][: 2 * _N_LABELS]
    wanted = list({row["rank"]: (_label(row), *at(row)) for row in named}.values())[:_N_LABELS]
    dots = [at(row) for row in shown] + _along([at(row) for row in front])
    for label in place_labels(wanted, dots, (_LEFT + 2, _TOP, _WIDTH - 4, _HEIGHT - _BOTTOM)):
        svg += _label_words(label)
    svg.append("</svg>")
    n_hidden = len(rows) - len(shown)
    hidden = f" {plural(n_hidden, 'choice')} without a price is not drawn." if n_hidden else ""
    caption = (
        "Both axes are logarithmic. The line joins the choices that no other choice beats on both cost and time; crosses "
        f"are their ranges, which hold for 4 of 5 runs.{hidden}"
    )
    return (
        f'<h2>Cost against time</h2>\n<figure><div class="wide" tabindex="0" role="region" aria-label="Cost against time">'
        f"{''.join(svg)}</div><figcaption>{escape(caption)}</figcaption>{_scatter_key(shown)}</figure>"
    )


def _axes(
    x_ticks: Sequence[tuple[str, float]],
    y_ticks: Sequence[float],
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
) -> list[str]:
    """The grid with its figures, and what the axes are of."""
    svg: list[str] = []
    for words, hours_tick in x_ticks:
        x = to_x(hours_tick)
        svg.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        svg.append(f'<text class="axis" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{words}</text>')
    for usd_tick in y_ticks:
        y = to_y(usd_tick)
        svg.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        svg.append(f'<text class="axis" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">${usd_tick:g}</text>')
    svg.append(
        f'<text class="axis" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">time from now to the end</text>'
    )
    svg.append(f'<text class="axis" x="{_LEFT - 8}" y="{_TOP - 6}" text-anchor="end">dollars</text>')
    return svg


def _along(points: Sequence[tuple[float, float]], n: int = 12) -> list[tuple[float, float]]:
    """Points on the line that joins these."""
    pairs = itertools.pairwise(points)
    return [(a[0] + (b[0] - a[0]) * i / n, a[1] + (b[1] - a[1]) * i / n) for a, b in pairs for i in range(n)]


def _log_axis(values: Sequence[float], begin: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Where a value stands between two edges, and the round values in between: 1, 2 and 5 times powers of ten."""
    low, high = math.log10(min(values)) - 0.06, math.log10(max(values)) + 0.06
    if high - low < 0.4:
        low, high = low - 0.2, high + 0.2
    steps = (1, 2, 5) if high - low < 3.2 else (1,)
    ticks = [
        step * 10.0**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        for step in steps
        if low <= math.log10(step) + power <= high
    ]
    return (lambda value: begin + (math.log10(value) - low) / (high - low) * (end - begin)), ticks


def _whiskers(row: Row, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> list[str]:
    """The ranges of a plan as a cross."""
    x, y = to_x(row["hours"]), to_y(row["total_usd"])
    ends = [max(row["hours_range"][0], 1e-6), row["hours_range"][2]]
    left, right = (min(max(to_x(hours), _LEFT), _WIDTH - _RIGHT) for hours in ends)
    ends = [max(row["usd_range"][0], 1e-6), row["usd_range"][2]]
    bottom, top = (min(max(to_y(usd), _TOP), _HEIGHT - _BOTTOM) for usd in ends)
    return [
        f'<line class="whisker" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>',
    ]


def _dot(row: Row, at: tuple[float, float], *, is_marked: bool, is_best: bool) -> str:
    names = [{"spot": "spot", "on-demand": "demand"}.get(row["kind"], "own"), "marked" if is_marked else "dot"]
    radius = 6.5 if is_best else 4.5 if is_marked else 3
    words = f"{row['rank']}. {row['name']}: {say_cost(row['total_usd'])}, {say_seconds(row['wall_s'])}"
    low, _, high = row["usd_range"]
    words += f" ({say_cost(low)} to {say_cost(high)})"
    return (
        f'<circle class="{" ".join(names)}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius}">'
        f"<title>{escape(words)}</title></circle>"
    )


def _label(row: Row) -> str:
    several = f"{row['n_gpus']}x " if row["n_gpus"] > 1 else ""
    spot = " spot" if row["kind"] == "spot" else ""
    who = row["kind"] if row["kind"] in ("own", "here") else row["provider"]
    return f"{several}{row['gpu'][:24]}{spot}, {who[:16]}"


def _label_words(label: Label) -> list[str]:
    left, top, right, bottom = label.box
    near_x, near_y = min(max(label.x, left), right), min(max(label.y, top), bottom)
    found = []
    if math.hypot(near_x - label.x, near_y - label.y) > 14:
        found.append(
            f'<line class="leader" x1="{label.x:.1f}" y1="{label.y:.1f}" x2="{near_x:.1f}" y2="{near_y:.1f}"/>'
        )
    found.append(f'<text class="halo" x="{left:.1f}" y="{top + 11.5:.1f}">{escape(label.text)}</text>')
    return found


def _front_words(front: Sequence[Row]) -> str:
    words = "; ".join(f"{row['name']} {say_cost(row['total_usd'])} in {say_seconds(row['wall_s'])}" for row in front)
    return f"From the soonest to the cheapest: {words}."


def _scatter_key(shown: Sequence[Row]) -> str:
    kinds = {row["kind"] for row in shown}
    names = [("c1", "on demand")] if "on-demand" in kinds else []
    names += [("c2", "spot")] if "spot" in kinds else []
    names += [("c3", "your own")] if kinds & {"own", "here"} else []
    keys = [f'<li><i class="round {colour}"></i>{name}</li>' for colour, name in names]
    return f'<ul class="key">{"".join(keys)}</ul>'
