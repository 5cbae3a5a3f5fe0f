"""A run as one HTML page that needs nothing else, and several runs compared on one.

Curves are means of stretches with their range, exact at both ends: a month-long run gives a page no
larger than a short one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

import farthing
from farthing.config.values import flat
from farthing.report.blocks import (
    Block,
    Drawing,
    More,
    Paragraph,
    Section,
    Stack,
    Table,
    listed,
    sections,
)
from farthing.report.chart import Axes, Line, Points, Stretch, curves, stacked, ticks, time_ticks
from farthing.report.html import page
from farthing.report.receipt import MODEL_KEY, Comparison
from farthing.report.receipt_report import compared_rows, diagnosis, estimate, spans
from farthing.report.receipt_types import RunReceipt
from farthing.report.timeline import Column, evenly, grouped
from farthing.report.words import cards, lines, say, table
from farthing.run.folder import PAGE
from farthing.storage.files import write_text
from farthing.units import digits_of, plural, say_count, say_seconds, say_usd

_N_ATTEMPTS, _N_POINTS = 20, 400
_ANSWERS = (
    ("Rewards", ("rewards/chosen", "rewards/rejected", "rewards/margins")),
    ("Accuracy", ("rewards/accuracies", "accuracy")),
    ("Divergence from the reference", ("kl",)),
)
_APART, _FAR = ("step", "loss", "perplexity", "n_examples"), ("logps/", "length/")
"""Figures of an evaluation that are drawn elsewhere, and those of another scale."""


def run_page(receipt: RunReceipt) -> str:
    head = (
        Paragraph(_headline(receipt), "answer"),
        Paragraph(_what(receipt), "soft"),
        cards("receipt.txt", "cards", receipt),
    )
    report = (
        *(Section("", head), diagnosis(receipt), _over_time(receipt), _loss(receipt)),
        *(_answers(receipt), _metrics(receipt), _speed(receipt)),
        *(Section("Where each second went", (spans(receipt),)), estimate(receipt)),
        *(_attempts(receipt), *_settings(receipt)),
    )
    return _page("farthing run", f"farthing run: {_name(receipt)}", receipt, report)


def leave_page(folder: Path, receipt: RunReceipt) -> None:
    write_text(folder / PAGE, run_page(receipt))


def compared_page(receipts: Sequence[RunReceipt], comparisons: Sequence[Comparison]) -> str:
    """Several runs on one page, the first against each of the others."""
    names = [_name(receipt) for receipt in receipts]
    names = [n if names.count(n) == 1 else r.run for n, r in zip(names, receipts, strict=True)]
    words = comparisons[0].in_words(*names[:2]) or f"{names[0]} against {', '.join(names[1:])}"
    pairs = list(zip(names, receipts, strict=True))
    notes = dict.fromkeys(note for each in comparisons for note in each.notes)
    heads = ("", *(f"#{name}" for name in names), "#first / second")
    losses = [(name, receipt.curves.loss) for name, receipt in pairs]
    longest = max(receipt.wall_s for receipt in receipts) or 1.0
    went = tuple(
        (
            name,
            Stack(grouped({span.name: span.seconds for span in each.spans}), longest),
            say_seconds(each.wall_s),
        )
        for name, each in pairs
    )
    title = "Where the time went"
    report: list[Section | None] = [
        Section("", (Paragraph(words[:1].upper() + words[1:], "answer"),)),
        Section("Side by side", (Table(heads, tuple(compared_rows(comparisons)), "Side by side"),)),
        listed("What can't be compared", notes),
        _section(_by_step("Training loss", "Mean of each stretch, by step.", losses)),
        Section(title, (Table(("run", "|", "#time"), went, title, has_key=True),)),
    ]
    for name, receipt in pairs:
        held_back = diagnosis(receipt)
        blocks = Paragraph(held_back.title, "soft"), *held_back.blocks
        report.append(Section(f"{name}: {_headline(receipt)}", blocks))
    return _page("farthing runs compared", f"farthing: {words}", receipts[0], report)


def _page(name: str, title: str, receipt: RunReceipt, report: Iterable[Section | None]) -> str:
    end = f"farthing {farthing.__version__}, {receipt.written}"
    return page(name, title, sections(*report), end)


def _name(receipt: RunReceipt) -> str:
    return Path(receipt.run).name or receipt.run


def _headline(receipt: RunReceipt) -> str:
    """`Finished: $1.24 in 20 min 04 s, 3 % less than estimated`."""
    return say("receipt.txt", "headline", receipt, receipt.against_estimate)


def _what(receipt: RunReceipt) -> str:
    """`a-model, lora; causal-lm; chats.jsonl; 120 steps, 1.2 M tokens; L4, bf16`."""
    model = receipt.asked(*MODEL_KEY) or "a model"
    shown = Path(model).name if Path(model).is_absolute() else model
    data = [Path(name).name for name in receipt.asked("data", "train") or ()]
    return "; ".join(lines("receipt.txt", "what", receipt, shown, data))


def _over_time(receipt: RunReceipt) -> Section | None:
    columns, has_price = receipt.timeline.columns, receipt.usd_is_known
    if not columns or columns[-1].end_s <= 0:
        return None
    ends, spent = zip(*((c.end_s, c.usd) for c in columns), strict=True)
    usd = (0.0, *accumulate(spent))

    def say_x(seconds: float) -> str:
        so_far = say_usd(float(np.interp(seconds, (0.0, *ends), usd)))
        return _say_moment(seconds) + (f" · {so_far}" if has_price and seconds else "")

    bars = [Stretch(c.begin_s, c.end_s, c.seconds, _said(receipt, c)) for c in columns]
    marks = [(mark.at_s, mark.kind) for mark in receipt.timeline.marks]
    shares = [0, 25, 50, 75, 100]
    axes = Axes((0, ends[-1]), (0, 100), say_x, _say_percent, time_ticks(ends[-1], 6), shares)
    below = ", with the dollars so far below." if has_price else "."
    words = f"What each stretch of the paid time was spent on{below}"
    return _section(stacked("Time over the run", words, bars, marks, axes), "Where the time went")


def _section(drawing: Drawing | None, title: str = "") -> Section | None:
    return Section(title or drawing.title, (drawing,)) if drawing else None


def _say_percent(value: float) -> str:
    return f"{value:.0f} %"


def _say_moment(seconds: float) -> str:
    """A round moment of an axis: `90 s`, `5 min`, `2 h`, `3 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"


def _said(receipt: RunReceipt, column: Column) -> str:
    parts = sorted(column.seconds.items(), key=lambda item: -item[1])[:4]
    return say("receipt.txt", "column", receipt, column, parts, sum(column.seconds.values()) or 1.0)


def _loss(receipt: RunReceipt) -> Section | None:
    bands, ends = receipt.curves.loss_bands, receipt.curves.loss_ends
    if not bands:
        return None
    means, is_mean = [(step, total / n) for step, n, total, *_ in bands], bands[0][1] > 1
    (first, begun), (last, ended) = ends
    points = [(first, begun), *means[0 if is_mean else 1 : -1], (last, ended)]
    band = [(step, low, high) for step, _, _, low, high in bands] if len(bands) > 1 else []
    name = "training loss, mean of a stretch and its range" if is_mean else "training loss"
    lines, rows = [Line(name, points, 1, band)], _evaluations(receipt, "loss")
    if rows:
        lines.append(Line("evaluation loss", rows, 2, dots=len(rows) <= 60))
    best = next(((s, y) for s, y in rows if s == receipt.best_step), None)
    marked = (*best, f"best: {best[1]:.4g}, step {best[0]:,.0f}") if best else None
    highest = max(high for *_, high in bands)
    top = sorted(y for _, y in points)[-1 - len(points) // 50]
    top = top if 0 < 3 * top < highest else highest
    ys = [y for _, y in (*points, *rows)]
    ys += [y for _, low, high in band for y in (low, min(high, top * 1.15))]
    # a few wild values would flatten all others
    axes = _step_axes([x for x, _ in points], [min(y, top * 1.3) if top > 0 else y for y in ys])
    words = f"Training loss from {begun:.4g} after step {first:,} to {ended:.4g} after step"
    return _section(curves("Loss", f"{words} {last:,}.", lines, axes, marked))


def _by_step(
    title: str, words: str, named: Iterable[tuple[str, Points]], *, dots: bool = False
) -> Drawing | None:
    """A curve a name; few points have `dots`."""
    lines = [
        Line(name, points, i % 7 + 1, dots=dots and len(points) <= 60)
        for i, (name, points) in enumerate(named)
        if points
    ]
    if not lines:
        return None
    xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
    return curves(title, words, lines, _step_axes(xs, ys))


def _step_axes(
    xs: Sequence[float], ys: Sequence[float], say_y: Callable[[float], str] = "{:.4g}".format
) -> Axes:
    low, high = min(ys), max(ys)
    room = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    edges = (max(0.0, low - room) if low >= 0 else low - room, high + room)
    x_edges = (min(xs), max(max(xs), min(xs) + 1))
    whole = [x for x in ticks(*x_edges, 7) if x == int(x)]
    return Axes(x_edges, edges, "{:,.0f}".format, say_y, whole)


def _evaluations(receipt: RunReceipt, name: str) -> list[tuple[float, float]]:
    """The values of a metric by step, thinned evenly, the best and both ends among them."""
    rows = [(row["step"], row[name]) for row in receipt.curves.evaluation if name in row]
    kept = {*evenly(rows, _N_POINTS), *(row for row in rows if row[0] == receipt.best_step)}
    return [row for row in rows if row in kept]


def _metrics(receipt: RunReceipt) -> Section | None:
    last = receipt.curves.evaluation[-1] if receipt.curves.evaluation else {}
    names = [name for name in last if name not in _APART and not name.startswith(_FAR)][:6]
    named = [(name, _evaluations(receipt, name)) for name in names]
    said = ", ".join(f"{name} {last[name]:.4g}" for name in names)
    return _section(_by_step("Metrics", f"At the last evaluation: {said}.", named, dots=True))


def _answers(receipt: RunReceipt) -> Section | None:
    if receipt.answers is None:
        return None
    blocks: list[Block] = [Paragraph(note) for note in receipt.answers.notes]
    for title, names in _ANSWERS:
        found = {name: receipt.answers.figures.get(name, ()) for name in names}
        last = ", ".join(f"{name} {rows[-1][1]:.3g}" for name, rows in found.items() if rows)
        if drawing := _by_step(title, f"At the last step: {last}.", found.items()):
            blocks.append(drawing)
    return Section("Answers", tuple(blocks))


def _speed(receipt: RunReceipt) -> Section | None:
    columns, points, before = receipt.timeline.columns, [], 0
    for column in columns:
        seconds = column.end_s - column.begin_s
        if seconds > 0 and column.tokens >= before:
            points.append(((column.begin_s + column.end_s) / 2, (column.tokens - before) / seconds))
        before = max(before, column.tokens)
    if len(points) < 2 or not before:
        return None
    end_s, top = columns[-1].end_s, max(y for _, y in points) * 1.08
    axes = Axes((0, end_s), (0, top), _say_moment, say_count, time_ticks(end_s, 7))
    words = "Useful tokens for each paid second, start, saves and evaluations counted:"
    words += f" {say_count(before / end_s)} on average."
    line = Line("useful tokens a second", points)
    drawings = [curves("Useful tokens a second", words, [line], axes)]
    busy = receipt.curves.utilisation_percent
    if len(busy) > 1:
        axes = _step_axes([x for x, _ in busy], [0.0, 100.0], _say_percent)
        mean = _say_percent(sum(y for _, y in busy) / len(busy))
        words = f"How busy the device was, by step: {mean} on average."
        drawings.append(curves("Device busy", words, [Line("busy", busy, 3)], axes))
    return Section("Speed", tuple(drawings))


def _attempts(receipt: RunReceipt) -> Section | None:
    if len(receipt.attempts) < 2:
        return None
    shown, dollars = receipt.attempts[-_N_ATTEMPTS:], digits_of(receipt.usd)
    found = shown, dollars if receipt.usd_is_known else None
    rows = table("receipt.txt", "attempts_table", *found)._replace(title="Attempts")
    n_more = len(receipt.attempts) - len(shown)
    more = f"The newest; {n_more:,} earlier ones are in receipt.json."
    return Section("Attempts", (rows, Paragraph(more, "soft")) if n_more else (rows,))


def _settings(receipt: RunReceipt) -> list[Section]:
    run, heads = receipt.run, ("setting", "value")
    command = f"farthing train {shlex.quote(run + '/job.json')} --set"
    command += f" output_dir={shlex.quote(run + '-again')}"
    machine = [(str(name), str(value)) for name, value in (receipt.machine or {}).items()]
    settings = dict((*_flat(receipt.settings or {}), *machine, ("farthing", farthing.__version__)))
    job = tuple(_flat(receipt.job or {}))
    whole = More(f"The whole job, {plural(len(job), 'key')}", Table(heads, job, "Job"))
    return [
        Section("The same again", (Paragraph(command, "code"),)),
        Section("How it was computed", (Table(heads, (*settings.items(),), "Settings"), whole)),
    ]


def _flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Keys with dots, and their values as text."""
    return [
        (key, value if isinstance(value, str) else json.dumps(value)[:400])
        for key, value in flat(values)
        if value is not None and key.rpartition(".")[2] != "sha256"
    ]
