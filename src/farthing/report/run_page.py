"""A run as one HTML page that needs nothing else, and several runs compared on one: what they cost,
and where it went.

Gets receipts and says what they say. A month-long run gives a page no larger than a short one:
curves are means of stretches with their range, exact at both ends.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import farthing
from farthing.report import chart
from farthing.report.blocks import (
    Cards,
    More,
    Section,
    Stack,
    Table,
    Text,
    listed,
    percent,
    sections,
)
from farthing.report.chart import Axes, Line, curves, stacked, ticks, time_ticks
from farthing.report.html import page
from farthing.report.receipt import Comparison
from farthing.report.receipt_report import diagnosis, estimate, spans
from farthing.report.receipt_rows import compared_rows
from farthing.report.receipt_types import Receipt
from farthing.report.timeline import Column, grouped
from farthing.run.folder import PAGE
from farthing.storage.files import write_text
from farthing.units import digits_of, plural, say_bytes, say_count, say_seconds, say_usd

_STATES = {
    "finished": "Finished",
    "limit": "Stopped at a limit",
    "interrupted": "Interrupted",
    "failed": "Failed",
}
_N_ATTEMPTS, _N_POINTS = 20, 400


def run_page(receipt: Receipt) -> str:
    """The page of one run."""
    head = Text(_headline(receipt), "answer"), Text(_what(receipt), "soft"), _facts(receipt)
    report = sections(
        Section("", head),
        diagnosis(receipt),
        _over_time(receipt),
        _loss(receipt),
        _answers(receipt),
        _metrics(receipt),
        _speed(receipt),
        Section("Where each second went", (spans(receipt),)),
        estimate(receipt),
        _attempts(receipt),
        *_settings(receipt),
    )
    end = f"farthing {farthing.__version__}, {receipt.written}"
    return page("farthing run", f"farthing run: {_name(receipt)}", report, end)


def leave_page(folder: Path, receipt: Receipt) -> None:
    """Write the page of a run into its folder. Raises `OSError`."""
    write_text(folder / PAGE, run_page(receipt))


def compared_page(receipts: Sequence[Receipt], comparisons: Sequence[Comparison]) -> str:
    """Several runs on one page, the first against each of the others."""
    first, baseline = receipts[0], comparisons[0]
    words = baseline.in_words(_name(first), _name(receipts[1]))
    words = words or f"{_name(first)} against {', '.join(_name(other) for other in receipts[1:])}"
    names = _distinct(receipts)
    notes = list(dict.fromkeys(note for each in comparisons for note in each.notes))
    heads = ("", *(f"#{name}" for name in names), "#first / second")
    table = Table(heads, tuple(compared_rows(comparisons)), "Side by side")
    report: list[Section | None] = [
        Section("", (Text(words[:1].upper() + words[1:], "answer"),)),
        Section("Side by side", (table,)),
        listed("What can't be compared", notes),
        _losses(receipts, names),
        _groups(receipts, names),
    ]
    for receipt, name in zip(receipts, names, strict=True):
        held_back = diagnosis(receipt)
        title = f"{name}: {_headline(receipt)}"
        report += [Section(title, (Text(held_back.title, "soft"), *held_back.blocks))]
    end = f"farthing {farthing.__version__}, {first.written}"
    return page("farthing runs compared", f"farthing: {words}", sections(*report), end)


# ---- the head ----


def _name(receipt: Receipt) -> str:
    return Path(receipt.run).name or receipt.run


def _cost(receipt: Receipt, usd: float) -> str:
    return digits_of(receipt.usd)(usd)


def _headline(receipt: Receipt) -> str:
    """`Finished: $1.24 in 20 min 04 s, 3 % less than estimated`."""
    words = say_seconds(receipt.wall_s)
    if receipt.usd_is_known:
        words = f"{say_usd(receipt.usd)} in {words}"
    pair = receipt.against_estimate
    if pair is not None and pair.ratio is not None:
        off = abs(pair.ratio - 1)
        words += (
            ", as estimated"
            if off < 0.005
            else f", {off:.0%} {'more' if pair.ratio > 1 else 'less'} than estimated"
        )
    return f"{_STATES.get(receipt.state, 'Not finished')}: {words}"


def _what(receipt: Receipt) -> str:
    job, machine = receipt.job or {}, receipt.machine or {}
    model = (job.get("model") or {}).get("model_name_or_path", "a model")
    data = ", ".join(Path(name).name for name in (job.get("data") or {}).get("train", []))
    method = (job.get("method") or {}).get("name", "")
    words = [
        f"{Path(model).name if Path(model).is_absolute() else model}, {method}",
        str(job.get("task", "")),
        data,
    ]
    words.append(f"{plural(receipt.steps, 'step')}, {say_count(receipt.tokens)} tokens")
    words.append(
        ", ".join(str(machine[name]) for name in ("device", "precision") if name in machine)
    )
    return "; ".join(word for word in words if word)


def _facts(receipt: Receipt) -> Cards:
    promised, rows = receipt.promised, []
    low_high = ""
    if receipt.usd_is_known:
        estimate = (
            f"estimated {say_usd(promised.usd.promised)}" if promised else "nothing was estimated"
        )
        rows.append(("Cost", say_usd(receipt.usd), estimate))
    if promised:
        low, _, high = promised.wall_range_s
        low_high = f"estimated {say_seconds(low)} to {say_seconds(high)}"
    rows.append(("Time", say_seconds(receipt.wall_s), low_high or "paid for, all attempts"))
    losses = receipt.curves.loss
    if losses and receipt.final_loss is not None:
        rows.append(("Training loss", f"{receipt.final_loss:.4g}", f"from {losses[0][1]:.4g}"))
    if receipt.metrics and isinstance(receipt.metrics.get("loss"), float):
        where = (
            f"best, after step {receipt.best_step:,}"
            if receipt.best_step is not None
            else "the last one"
        )
        rows.append(("Evaluation loss", f"{receipt.metrics['loss']:.4g}", where))
    if receipt.tokens_per_s:
        usd = receipt.usd_per_million_tokens
        price = (
            f"{say_usd(usd)} a million"
            if usd is not None and receipt.usd_is_known
            else "without padding"
        )
        rows.append(("Useful tokens", f"{say_count(receipt.tokens_per_s)}/s", price))
    if receipt.mfu:
        rows.append(("Utilisation", f"{receipt.mfu:.0%}", "of the device's peak FLOPs"))
    if receipt.peak_bytes:
        estimate = f"estimated {say_bytes(promised.peak_bytes.promised)}" if promised else ""
        rows.append(("Peak memory", say_bytes(receipt.peak_bytes), estimate))
    if receipt.interruptions:
        lost = receipt.redone_s + receipt.restart_s
        rows.append(
            (
                "Interruptions",
                str(receipt.interruptions),
                f"{say_seconds(lost)} for restarts and work done twice",
            )
        )
    return Cards(tuple(rows))


# ---- over time ----


def _over_time(receipt: Receipt) -> Section | None:
    columns = receipt.timeline.columns
    if not columns or columns[-1].end_s <= 0:
        return None
    end_s, usd_at = columns[-1].end_s, _usd_at(columns)

    def say_x(seconds: float) -> str:
        return say_short(seconds) + (
            f" · {say_usd(usd_at(seconds))}" if receipt.usd_is_known and seconds else ""
        )

    bars = [chart.Column(c.begin_s, c.end_s, c.seconds, _said(receipt, c)) for c in columns]
    marks = [(mark.at_s, mark.kind) for mark in receipt.timeline.marks]
    axes = Axes(
        (0, end_s),
        (0, 100),
        say_x,
        lambda y: f"{y:.0f} %",
        time_ticks(end_s, 6),
        [0, 25, 50, 75, 100],
    )
    words = "What each stretch of the paid time was spent on" + (
        ", with the dollars so far below." if receipt.usd_is_known else "."
    )
    drawing = stacked("Time over the run", words, bars, marks, axes)
    return Section("Where the time went", (drawing,))


def say_short(seconds: float) -> str:
    """A round moment of an axis: `90 s`, `5 min`, `2 h`, `3 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"


def _said(receipt: Receipt, column: Column) -> str:
    parts = sorted(column.seconds.items(), key=lambda item: -item[1])
    total = sum(column.seconds.values()) or 1.0
    shares = ", ".join(f"{name} {percent(seconds / total)}" for name, seconds in parts[:4])
    usd = f", {_cost(receipt, column.usd)}" if receipt.usd_is_known else ""
    return (
        f"{say_seconds(column.begin_s)} to {say_seconds(column.end_s)}, up to step"
        f" {column.step:,}{usd}: {shares}"
    )


def _usd_at(columns: Sequence[Column]) -> Callable[[float], float]:
    """Dollars that were spent until a moment."""

    def usd_at(seconds: float) -> float:
        spent = 0.0
        for column in columns:
            length = column.end_s - column.begin_s
            spent += column.usd * (
                min(1.0, max(0.0, (seconds - column.begin_s) / length)) if length else 1.0
            )
        return spent

    return usd_at


def _loss(receipt: Receipt) -> Section | None:
    bands = receipt.curves.loss_bands
    if not bands:
        return None
    steps = [(step, total / n) for step, n, total, *_ in bands]
    first, last = receipt.curves.loss_ends
    points = [(first[0], first[1]), *steps[1 if bands[0][1] == 1 else 0 : -1], (last[0], last[1])]
    band = [(step, low, high) for step, _, _, low, high in bands] if len(bands) > 1 else []
    lines = [
        Line(
            (
                "training loss, mean of a stretch and its range"
                if bands[0][1] > 1
                else "training loss"
            ),
            points,
            1,
            band,
        )
    ]
    rows = _evaluations(receipt, "loss")
    if rows:
        lines.append(Line("evaluation loss", rows, 2, dots=len(rows) <= 60))
    best = next(((s, y) for s, y in rows if s == receipt.best_step), None)
    marked = (*best, f"best: {best[1]:.4g}, step {best[0]:,.0f}") if best else None
    top = sorted(y for _, y in points)[-1 - len(points) // 50]
    top = top if 0 < 3 * top < max(high for *_, high in bands) else max(high for *_, high in bands)
    ys = (
        [y for _, y in [*points, *rows]]
        + [low for _, low, _ in band]
        + [min(high, top * 1.15) for *_, high in band]
    )
    words = (
        f"Training loss from {first[1]:.4g} after step {first[0]:,} to {last[1]:.4g} after step"
        f" {last[0]:,}."
    )
    # a few wild values would flatten all others
    axes = _step_axes([x for x, _ in points], [min(y, top * 1.3) if top > 0 else y for y in ys])
    return Section("Loss", (curves("Loss", words, lines, axes, marked),))


def _step_axes(
    xs: Sequence[float], ys: Sequence[float], say_y: Callable[[float], str] = lambda y: f"{y:.4g}"
) -> Axes:
    low, high = min(ys), max(ys)
    room = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    edges = (max(0.0, low - room) if low >= 0 else low - room, high + room)
    x_edges = (min(xs), max(max(xs), min(xs) + 1))
    whole = [x for x in ticks(*x_edges, 7) if x == int(x)]
    return Axes(x_edges, edges, lambda x: f"{x:,.0f}", say_y, whole)


def _evaluations(receipt: Receipt, name: str) -> list[tuple[float, float]]:
    """The values of a metric by step, thinned evenly, the best and both ends among them."""
    rows = [(row["step"], row[name]) for row in receipt.curves.evaluation if name in row]
    if len(rows) <= _N_POINTS:
        return rows
    picked = {round(i * (len(rows) - 1) / (_N_POINTS - 1)) for i in range(_N_POINTS)}
    picked |= {i for i, row in enumerate(rows) if row[0] == receipt.best_step}
    return [rows[i] for i in sorted(picked)]


def _metrics(receipt: Receipt) -> Section | None:
    """Metrics between 0 and 1 on one drawing."""
    last = receipt.curves.evaluation[-1] if receipt.curves.evaluation else {}
    others = ("step", "loss", "perplexity", "n_examples")
    far = ("logps/", "length/")  # of another scale
    names = [name for name in last if name not in others and not name.startswith(far)][:6]
    lines = [
        Line(name, rows, i + 1, dots=len(rows) <= 60)
        for i, name in enumerate(names)
        if (rows := _evaluations(receipt, name))
    ]
    if not lines:
        return None
    points = [point for line in lines for point in line.points]
    said = ", ".join(f"{name} {last[name]:.4g}" for name in names)
    axes = _step_axes([x for x, _ in points], [y for _, y in points])
    words = f"At the last evaluation: {said}."
    return Section("Metrics", (curves("Metrics", words, lines, axes),))


_SHOWN = (
    ("Rewards", ("rewards/chosen", "rewards/rejected", "rewards/margins")),
    ("Accuracy", ("rewards/accuracies", "accuracy")),
    ("Divergence from the reference", ("kl",)),
)


def _answers(receipt: Receipt) -> Section | None:
    """Rewards, accuracy and divergence by step, of a run that compares answers."""
    if receipt.answers is None:
        return None
    blocks: list[Any] = [Text(note) for note in receipt.answers.notes]
    for title, names in _SHOWN:
        found = {name: receipt.answers.figures.get(name, []) for name in names}
        lines = [
            Line(name, [(x, y) for x, y in points], number)
            for number, (name, points) in enumerate(found.items(), 1)
            if points
        ]
        points = [point for line in lines for point in line.points]
        if points:
            last = ", ".join(f"{line.name} {line.points[-1][1]:.3g}" for line in lines)
            axes = _step_axes([x for x, _ in points], [y for _, y in points])
            blocks.append(curves(title, f"At the last step: {last}.", lines, axes))
    return Section("Answers", tuple(blocks)) if blocks else None


def _speed(receipt: Receipt) -> Section | None:
    """Useful tokens per paid second, and how busy the device was."""
    columns, points, before = receipt.timeline.columns, [], 0
    for column in columns:
        seconds = column.end_s - column.begin_s
        if seconds > 0 and column.tokens >= before:
            points.append(((column.begin_s + column.end_s) / 2, (column.tokens - before) / seconds))
        before = max(before, column.tokens)
    if len(points) < 2 or not before:
        return None
    mean = before / columns[-1].end_s
    end_s, ys = columns[-1].end_s, [y for _, y in points]
    axes = Axes((0, end_s), (0, max(ys) * 1.08), say_short, say_count, time_ticks(end_s, 7))
    words = (
        "Useful tokens for each paid second, start, saves and evaluations counted:"
        f" {say_count(mean)} on average."
    )
    line = Line("useful tokens a second", points, 1)
    drawings = [curves("Useful tokens a second", words, [line], axes)]
    busy = receipt.curves.utilisation_percent
    if len(busy) > 1:
        axes = _step_axes([x for x, _ in busy], [0.0, 100.0], lambda y: f"{y:.0f} %")
        percent = sum(y for _, y in busy) / len(busy)
        line = Line("busy", [(x, y) for x, y in busy], 3)
        words = f"How busy the device was, by step: {percent:.0f} % on average."
        drawings.append(curves("Device busy", words, [line], axes))
    return Section("Speed", tuple(drawings))


# ---- tables ----


def _attempts(receipt: Receipt) -> Section | None:
    if len(receipt.attempts) < 2:
        return None
    rows = [
        (
            *(str(each["number"]), str(each["started_at"]).replace("T", " ")[:19], each["ended"]),
            f"{each['first_step']:,} to {each['last_step']:,}",
            *(say_seconds(each[name]) for name in ("wall_s", "redone_s")),
            *([_cost(receipt, each["usd"])] if receipt.usd_is_known else []),
        )
        for each in receipt.attempts[-_N_ATTEMPTS:]
    ]
    heads = ["attempt", "=began (UTC)", "=ended", "#steps", "#time", "#redone"]
    heads += ["#dollars"] if receipt.usd_is_known else []
    n_more = len(receipt.attempts) - len(rows)
    more = f"The newest; {n_more:,} earlier ones are in receipt.json."
    table = Table(tuple(heads), tuple(rows), "Attempts")
    return Section("Attempts", (table, Text(more, "soft")) if n_more else (table,))


def _settings(receipt: Receipt) -> list[Section]:
    run = receipt.run
    command = f"farthing train {shlex.quote(run + '/job.json')} --set"
    command += f" output_dir={shlex.quote(run + '-again')}"
    machine = [(str(name), str(value)) for name, value in (receipt.machine or {}).items()]
    settings = (*_flat(receipt.settings or {}), *machine, ("farthing", farthing.__version__))
    job, heads = _flat(receipt.job or {}), ("setting", "value")
    whole = More(f"The whole job, {plural(len(job), 'key')}", Table(heads, tuple(job), "Job"))
    return [
        Section("The same again", (Text(command, "code"),)),
        Section("How it was computed", (Table(heads, settings, "Settings"), whole)),
    ]


def _flat(values: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Keys with dots, and their values as text."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{before}{name}.")
        elif value is not None and name != "sha256":
            found.append(
                (f"{before}{name}", value if isinstance(value, str) else json.dumps(value)[:400])
            )
    return found


# ---- several runs ----


def _distinct(receipts: Sequence[Receipt]) -> list[str]:
    """Names of runs that tell them apart."""
    names = [_name(receipt) for receipt in receipts]
    return [
        name if names.count(name) == 1 else receipt.run
        for name, receipt in zip(names, receipts, strict=True)
    ]


def _losses(receipts: Sequence[Receipt], names: Sequence[str]) -> Section | None:
    lines = [
        Line(name, [(step, y) for step, y in receipt.curves.loss], i % 7 + 1)
        for i, (receipt, name) in enumerate(zip(receipts, names, strict=True))
        if receipt.curves.loss
    ]
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    axes = _step_axes([x for x, _ in points], [y for _, y in points])
    drawing = curves("Training loss", "Mean of each stretch, by step.", lines, axes)
    return Section("Training loss", (drawing,))


def _groups(receipts: Sequence[Receipt], names: Sequence[str]) -> Section:
    """Where each run's seconds went, on one scale."""
    longest, rows = max(receipt.wall_s for receipt in receipts) or 1.0, []
    for receipt, name in zip(receipts, names, strict=True):
        parts = grouped({span.name: span.seconds for span in receipt.spans})
        rows.append((name, Stack(parts, longest), say_seconds(receipt.wall_s)))
    title = "Where the time went"
    return Section(title, (Table(("run", "|", "#time"), tuple(rows), title, has_key=True),))
