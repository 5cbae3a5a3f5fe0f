"""Dollars against hours of every choice: dots, the front as a line, ranges as crosses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from farthing.report import chart
from farthing.report.blocks import Drawing
from farthing.report.plan_types import Choice
from farthing.report.plan_words import cost_range, said
from farthing.report.words import say

_HEIGHT = 470
_LETTER, _LINE = 6.7, 15.0  # of a number, in the drawing's units
_TIMES = (
    "1 s=1, 3 s=3, 10 s=10, 30 s=30, 1 min=60, 3 min=180, 10 min=600, 30 min=1800, 1 h=3600, "
    "2 h=7200, 5 h=18000, 10 h=36000, 1 day=86400, 2 days=172800, 5 days=432000, 2 weeks=1209600, "
    "5 weeks=3024000, 3 months=7884000, 1 year=31536000, 3 years=94608000, 10 years=315360000"
)
_LOOKS = {"on-demand": ("on demand", "round c1", "demand"), "spot": ("spot", "round c2", "spot")}
_OWN = ("your own", "round c3", "own")


def cost_against_time(rows: Sequence[Choice], best: Choice) -> Drawing | None:
    """Nothing where no choice has a price."""
    shown = [row for row in rows if row.is_priced and row.total_usd > 0 and row.hours > 0]
    if not shown:
        return None
    front = sorted((row for row in shown if row.on_front), key=lambda row: row.hours)
    marked = list({row.rank: row for row in [best, *front] if row in shown}.values())
    ranges = [(row.hours_range, row.usd_range) for row in marked]
    hours = [row.hours for row in shown] + [h for one, _ in ranges for h in one if h > 0]
    usd = [row.total_usd for row in shown] + [u for _, one in ranges for u in one if u > 0]
    axes = _axes(hours, usd)

    paths = [("front", [(row.hours, row.total_usd) for row in front])] if len(front) > 1 else []
    for row in marked:
        (soon, _, late), (low, _, high) = row.hours_range, row.usd_range
        paths.append(("whisker", [(soon, row.total_usd), (late, row.total_usd)]))
        paths.append(("whisker", [(row.hours, high), (row.hours, low)]))
    numbers = {row.rank for row in marked}
    dots = []
    for row in sorted(shown, key=lambda row: (row.rank in numbers, -row.rank)):
        is_marked, kind = row.rank in numbers, _LOOKS.get(row.kind, _OWN)[2]
        size = 6.5 if row is best else 4.5 if is_marked else 3
        title = f"{row.rank}. {said(row)} ({cost_range(row).partition(' (')[2]}"
        at = row.hours, row.total_usd
        dots.append((f"{kind} {'marked' if is_marked else 'dot'}", at, size, title))
    words: list[Any] = [
        ("axis", (axes.right, _HEIGHT - 6), "time from now to the end", "end"),
        ("axis", (chart.LEFT - 8, chart.TOP - 14), "dollars", "end"),
    ]
    numbered: list[chart.Point] = []
    for row in marked:  # those that take best come first; a number over another says nothing
        x, y = axes.at(row.hours, row.total_usd)
        if all(abs(x - a) > 2 * _LETTER or abs(y - b) > _LINE for a, b in numbered):
            numbered.append((x, y))
            words.append(("halo", (x + 8, y - 7), str(row.rank), "start"))
    caption = say("plan.txt", "scatter", len(rows) - len(shown))
    looks = sorted({_LOOKS.get(row.kind, _OWN) for row in shown}, key=lambda one: one[1])
    key = {words: colour for words, colour, _ in looks}
    blind = f"From the soonest to the cheapest: {'; '.join(map(said, front))}."
    title = "Dollars against hours of every choice"
    return chart.figure(
        title, caption, axes, said=blind, key=key, paths=paths, dots=dots, words=words
    )


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
