"""A run as one HTML page that needs nothing else, and several runs compared on one: what they cost, and where it went.

Gets receipts and draws them; every word of others is escaped. A month-long run gives a page no larger than a short one: curves
are means of stretches with their range, exact at both ends. Refuses to read files, and to compute what a receipt does not say.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import farthing
from farthing.durability.files import write_text
from farthing.durability.run_folder import PAGE
from farthing.report import page
from farthing.report.chart import Axes, Bars, Line, curves, stacked, ticks, time_ticks
from farthing.report.page import escape
from farthing.report.receipt import ROW_NAMES, Comparison
from farthing.report.receipt_types import Diagnosis, Pair, Receipt
from farthing.report.timeline import Column, grouped
from farthing.units import digits_of, plural, say_bytes, say_count, say_seconds, say_usd

_STYLE = (Path(__file__).parent / "run_page.css").read_text(encoding="utf-8")
_STATES = {"finished": "Finished", "limit": "Stopped at a limit", "interrupted": "Interrupted", "failed": "Failed"}
_N_ATTEMPTS, _N_POINTS = 20, 400


def run_page(receipt: Receipt) -> str:
    """The page of one run."""
    parts = [
        "<h1>farthing run</h1>",
        f'<p class="answer">{escape(_headline(receipt))}</p>',
        f'<p class="soft">{escape(_what(receipt))}</p>',
        _facts(receipt),
        _diagnosis(receipt),
        _over_time(receipt),
        _loss(receipt),
        _metrics(receipt),
        _speed(receipt),
        _spans(receipt),
        _estimate(receipt),
        _attempts(receipt),
        _settings(receipt),
    ]
    end = f"farthing {farthing.__version__}, {receipt.written}"
    return page.document(f"farthing run: {_name(receipt)}", parts, end, _STYLE)


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
    parts = [
        "<h1>farthing runs compared</h1>",
        f'<p class="answer">{escape(words[:1].upper() + words[1:])}</p>',
        _side_by_side(names, comparisons),
        page.listed("What can't be compared", notes),
        _losses(receipts, names),
        _groups(receipts, names),
    ]
    for receipt, name in zip(receipts, names, strict=True):
        parts += [f"<h2>{escape(name)}: {escape(_headline(receipt))}</h2>", _diagnosis(receipt, level=3)]
    end = f"farthing {farthing.__version__}, {first.written}"
    return page.document(f"farthing: {words}", parts, end, _STYLE)


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
            ", as estimated" if off < 0.005 else f", {off:.0%} {'more' if pair.ratio > 1 else 'less'} than estimated"
        )
    return f"{_STATES.get(receipt.state, 'Not finished')}: {words}"


def _what(receipt: Receipt) -> str:
    job, machine = receipt.job or {}, receipt.machine or {}
    model = (job.get("model") or {}).get("model_name_or_path", "a model")
    data = ", ".join(Path(name).name for name in (job.get("data") or {}).get("train", []))
    method = (job.get("method") or {}).get("name", "")
    words = [f"{Path(model).name if Path(model).is_absolute() else model}, {method}", str(job.get("task", "")), data]
    words.append(f"{plural(receipt.steps, 'step')}, {say_count(receipt.tokens)} tokens")
    words.append(", ".join(str(machine[name]) for name in ("device", "precision") if name in machine))
    return "; ".join(word for word in words if word)


def _facts(receipt: Receipt) -> str:
    promised, rows = receipt.promised, []
    low_high = ""
    if receipt.usd_is_known:
        estimate = f"estimated {say_usd(promised.usd.promised)}" if promised else "nothing was estimated"
        rows.append(("Cost", say_usd(receipt.usd), estimate))
    if promised:
        low, _, high = promised.wall_range_s
        low_high = f"estimated {say_seconds(low)} to {say_seconds(high)}"
    rows.append(("Time", say_seconds(receipt.wall_s), low_high or "paid for, all attempts"))
    losses = receipt.curves.loss
    if losses and receipt.final_loss is not None:
        rows.append(("Training loss", f"{receipt.final_loss:.4g}", f"from {losses[0][1]:.4g}"))
    if receipt.metrics and isinstance(receipt.metrics.get("loss"), float):
        where = f"best, after step {receipt.best_step:,}" if receipt.best_step is not None else "the last one"
        rows.append(("Evaluation loss", f"{receipt.metrics['loss']:.4g}", where))
    if receipt.tokens_per_s:
        usd = receipt.usd_per_million_tokens
        price = f"{say_usd(usd)} a million" if usd is not None and receipt.usd_is_known else "without padding"
        rows.append(("Useful tokens", f"{say_count(receipt.tokens_per_s)}/s", price))
    if receipt.mfu:
        rows.append(("Utilisation", f"{receipt.mfu:.0%}", "of the device's peak FLOPs"))
    if receipt.peak_bytes:
        estimate = f"estimated {say_bytes(promised.peak_bytes.promised)}" if promised else ""
        rows.append(("Peak memory", say_bytes(receipt.peak_bytes), estimate))
    if receipt.interruptions:
        lost = receipt.redone_s + receipt.restart_s
        rows.append(
            ("Interruptions", str(receipt.interruptions), f"{say_seconds(lost)} for restarts and work done twice")
        )
    return page.facts(rows)


def _diagnosis(receipt: Receipt, level: int = 2) -> str:
    found = receipt.diagnosis or Diagnosis([], "", [])
    parts = [f"<h{level}>What held it back</h{level}>"]
    for finding in found.findings:
        first = " first" if finding.cause == found.largest else ""
        fix = f"<code>--set {escape(finding.fix)}</code> " if "=" in finding.fix else ""
        fix = fix or (f"<code>{escape(finding.fix)}</code>: " if finding.fix else "")
        saves = _saves(receipt, finding.saves_s, finding.saves_usd) + " in a run like this one"
        if finding.rest_s:
            saves += f", {_saves(receipt, finding.rest_s, finding.rest_usd)} in what is left of this one"
        name = finding.area if finding.cause == finding.area else f"{finding.area}: {finding.cause}"
        to_do = re.sub("`([^`]+)`", r"<code>\1</code>", escape(finding.to_do))
        parts.append(
            f'<div class="finding{first}"><p><strong>{escape(name)}</strong>, worth {escape(saves)}</p>'
            f"<p>{escape(finding.evidence)}.</p><p>{fix}{to_do}</p></div>"
        )
    for advice in found.advice:
        command = f"<p><code>{escape(advice.command)}</code></p>" if advice.command else ""
        parts.append(f'<div class="finding"><p>{escape(advice.words)}</p>{command}</div>')
    if len(parts) == 1:
        parts.append('<p class="soft">Nothing stands out: no single cause takes 3 % of the time.</p>')
    return "\n".join(parts)


def _saves(receipt: Receipt, seconds: float, usd: float) -> str:
    return f"{_cost(receipt, usd)} ({say_seconds(seconds)})" if receipt.usd_is_known else say_seconds(seconds)


# ---- over time ----


def _over_time(receipt: Receipt) -> str:
    columns = receipt.timeline.columns
    if not columns or columns[-1].end_s <= 0:
        return ""
    end_s, usd_at = columns[-1].end_s, _usd_at(columns)

    def say_x(seconds: float) -> str:
        return say_short(seconds) + (f" · {say_usd(usd_at(seconds))}" if receipt.usd_is_known and seconds else "")

    bars = [(c.begin_s, c.end_s, c.seconds, _said(receipt, c)) for c in columns]
    marks = [(m.at_s, m.kind, f"{m.kind}, step {m.step:,}, {say_seconds(m.at_s)}") for m in receipt.timeline.marks]
    axes = Axes((0, end_s), (0, 100), say_x, lambda y: f"{y:.0f} %", time_ticks(end_s, 6), [0, 25, 50, 75, 100])
    words = "What each stretch of the paid time was spent on" + (
        ", with the dollars so far below." if receipt.usd_is_known else "."
    )
    return f"<h2>Where the time went</h2>\n{stacked('Time over the run', words, Bars(bars, marks), axes)}"


def say_short(seconds: float) -> str:
    """A round moment of an axis: `90 s`, `5 min`, `2 h`, `3 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"


def _said(receipt: Receipt, column: Column) -> str:
    parts = sorted(column.seconds.items(), key=lambda item: -item[1])
    total = sum(column.seconds.values()) or 1.0
    shares = ", ".join(f"{name} {page.percent(seconds / total)}" for name, seconds in parts[:4])
    usd = f", {_cost(receipt, column.usd)}" if receipt.usd_is_known else ""
    return f"{say_seconds(column.begin_s)} to {say_seconds(column.end_s)}, up to step {column.step:,}{usd}: {shares}"


def _usd_at(columns: Sequence[Column]) -> Callable[[float], float]:
    """Dollars that were spent until a moment."""

    def usd_at(seconds: float) -> float:
        spent = 0.0
        for column in columns:
            length = column.end_s - column.begin_s
            spent += column.usd * (min(1.0, max(0.0, (seconds - column.begin_s) / length)) if length else 1.0)
        return spent

    return usd_at


def _loss(receipt: Receipt) -> str:
    bands = receipt.curves.loss_bands
    if not bands:
        return ""
    steps = [(step, total / n) for step, n, total, *_ in bands]
    first, last = receipt.curves.loss_ends
    points = [(first[0], first[1]), *steps[1 if bands[0][1] == 1 else 0 : -1], (last[0], last[1])]
    band = [(step, low, high) for step, _, _, low, high in bands] if len(bands) > 1 else []
    lines = [
        Line("training loss, mean of a stretch and its range" if bands[0][1] > 1 else "training loss", points, 1, band)
    ]
    rows = _evaluations(receipt, "loss")
    if rows:
        lines.append(Line("evaluation loss", rows, 2, dots=len(rows) <= 60))
    best = next(((s, y) for s, y in rows if s == receipt.best_step), None)
    marked = (*best, f"best: {best[1]:.4g}, step {best[0]:,.0f}") if best else None
    top = sorted(y for _, y in points)[-1 - len(points) // 50]
    top = top if 0 < 3 * top < max(high for *_, high in bands) else max(high for *_, high in bands)
    ys = [y for _, y in [*points, *rows]] + [low for _, low, _ in band] + [min(high, top * 1.15) for *_, high in band]
    words = f"Training loss from {first[1]:.4g} after step {first[0]:,} to {last[1]:.4g} after step {last[0]:,}."
    axes = _step_axes([x for x, _ in points], [min(y, top * 1.3) if top > 0 else y for y in ys])
    clipped = [
        Line(line.name, _clipped(line.points, axes.y), line.colour, _clipped(line.band, axes.y), line.dots)
        for line in lines
    ]
    return f"<h2>Loss</h2>\n{curves('Loss', words, clipped, axes, marked)}"


def _clipped(points: Sequence[Any], edges: tuple[float, float]) -> list[Any]:
    """Points whose values stay within the drawing: a few wild ones would flatten all others."""
    return [(x, *(min(max(y, edges[0]), edges[1]) for y in ys)) for x, *ys in points]


def _step_axes(xs: Sequence[float], ys: Sequence[float], say_y: Callable[[float], str] = lambda y: f"{y:.4g}") -> Axes:
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


def _metrics(receipt: Receipt) -> str:
    """Metrics between 0 and 1 on one drawing."""
    last = receipt.curves.evaluation[-1] if receipt.curves.evaluation else {}
    names = [name for name in last if name not in ("step", "loss", "perplexity", "n_examples")][:6]
    lines = [
        Line(name, rows, i + 1, dots=len(rows) <= 60)
        for i, name in enumerate(names)
        if (rows := _evaluations(receipt, name))
    ]
    if not lines:
        return ""
    points = [point for line in lines for point in line.points]
    said = ", ".join(f"{name} {last[name]:.4g}" for name in names)
    axes = _step_axes([x for x, _ in points], [y for _, y in points])
    return f"<h2>Metrics</h2>\n{curves('Metrics', f'At the last evaluation: {said}.', lines, axes)}"


def _speed(receipt: Receipt) -> str:
    """Useful tokens per paid second, and how busy the device was."""
    columns, points, before = receipt.timeline.columns, [], 0
    for column in columns:
        seconds = column.end_s - column.begin_s
        if seconds > 0 and column.tokens >= before:
            points.append(((column.begin_s + column.end_s) / 2, (column.tokens - before) / seconds))
        before = max(before, column.tokens)
    if len(points) < 2 or not before:
        return ""
    mean = before / columns[-1].end_s
    end_s, ys = columns[-1].end_s, [y for _, y in points]
    axes = Axes((0, end_s), (0, max(ys) * 1.08), say_short, say_count, time_ticks(end_s, 7))
    words = f"Useful tokens for each paid second, start, saves and evaluations counted: {say_count(mean)} on average."
    text = (
        f"<h2>Speed</h2>\n{curves('Useful tokens a second', words, [Line('useful tokens a second', points, 1)], axes)}"
    )
    busy = receipt.curves.utilisation_percent
    if len(busy) > 1:
        axes = _step_axes([x for x, _ in busy], [0.0, 100.0], lambda y: f"{y:.0f} %")
        percent = sum(y for _, y in busy) / len(busy)
        line = Line("busy", [(x, y) for x, y in busy], 3)
        text += "\n" + curves(
            "Device busy", f"How busy the device was, by step: {percent:.0f} % on average.", [line], axes
        )
    return text


# ---- tables ----


def _spans(receipt: Receipt) -> str:
    rows = []
    for span in sorted(receipt.spans, key=lambda span: -span.seconds):
        if span.seconds >= 0.005:
            bar = f'<td class="bar">{page.stack({_group_of(span.name): span.seconds}, receipt.wall_s)}</td>'
            usd = [_cost(receipt, span.usd)] if receipt.usd_is_known else []
            figures = page.cells("n", f"{span.seconds:,.1f} s", page.percent(span.share), *usd)
            rows.append(page.row(span.what, bar, figures))
    heads = ["part", "", "#seconds", "#share", *(["#dollars"] if receipt.usd_is_known else [])]
    return f"<h2>Where each second went</h2>\n{page.table('Parts of the bill', heads, rows)}"


def _group_of(span: str) -> str:
    return next(iter(grouped({span: 1.0})))


def _estimate(receipt: Receipt) -> str:
    if receipt.promised is None:
        return ""
    promised, rows = receipt.promised, []

    def row(name: str, pair: Pair, say: Callable[[Any], str]) -> None:
        ratio = "" if pair.ratio is None else f"{pair.ratio:.2f}"
        rows.append(page.row(name, page.cells("n", say(pair.promised), say(pair.happened), ratio)))

    if receipt.usd_is_known:
        row("dollars", promised.usd, digits_of(receipt.usd))
    row("time", promised.wall_s, say_seconds)
    for name, pair in promised.seconds.items():
        row(f"· {name}", pair, say_seconds)
    row("peak memory", promised.peak_bytes, say_bytes)
    if receipt.forecast:
        row(f"time, forecast after step {receipt.forecast.made_after_step:,}", receipt.forecast.wall_s, say_seconds)
    table = page.table("Estimated and happened", ("", "#estimated", "#happened", "#ratio"), rows)
    words = f'<p class="soft">The estimate is based on: {escape(promised.calibration)}</p>'
    return f"<h2>Estimated and happened</h2>\n{table}\n{words}"


def _attempts(receipt: Receipt) -> str:
    if len(receipt.attempts) < 2:
        return ""
    rows = []
    for each in receipt.attempts[-_N_ATTEMPTS:]:
        steps = f"{each['first_step']:,} to {each['last_step']:,}"
        usd = [_cost(receipt, each["usd"])] if receipt.usd_is_known else []
        figures = page.cells("n", steps, say_seconds(each["wall_s"]), say_seconds(each["redone_s"]), *usd)
        began = str(each["started_at"]).replace("T", " ")[:19]
        rows.append(page.row(str(each["number"]), page.cells("k", began, each["ended"]), figures))
    heads = ["attempt", "began (UTC)", "ended", "#steps", "#time", "#redone"]
    heads += ["#dollars"] if receipt.usd_is_known else []
    n_more = len(receipt.attempts) - len(rows)
    more = f'<p class="soft">The newest; {n_more:,} earlier ones are in receipt.json.</p>' if n_more else ""
    return f"<h2>Attempts</h2>\n{page.table('Attempts', heads, rows)}{more}"


def _settings(receipt: Receipt) -> str:
    command = f"farthing train {shlex.quote(receipt.run + '/job.json')} --set output_dir={shlex.quote(receipt.run + '-again')}"
    machine = [(str(name), str(value)) for name, value in (receipt.machine or {}).items()]
    settings = [*_flat(receipt.settings or {}), *machine, ("farthing", farthing.__version__)]
    job = _flat(receipt.job or {})
    return (
        f"<h2>The same again</h2>\n{page.wide('Command', f'<pre>{escape(command)}</pre>')}"
        f"<h2>How it was computed</h2>\n{_values('Settings', settings)}"
        f"<details><summary>The whole job, {plural(len(job), 'key')}</summary>{_values('Job', job)}</details>"
    )


def _values(name: str, values: Sequence[tuple[str, str]]) -> str:
    rows = [page.row(key, page.cells("words", value)) for key, value in values]
    return page.table(name, ("setting", "value"), rows)


def _flat(values: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Keys with dots, and their values as text."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{before}{name}.")
        elif value is not None and name != "sha256":
            found.append((f"{before}{name}", value if isinstance(value, str) else json.dumps(value)[:400]))
    return found


# ---- several runs ----


def _distinct(receipts: Sequence[Receipt]) -> list[str]:
    """Names of runs that tell them apart."""
    names = [_name(receipt) for receipt in receipts]
    return [name if names.count(name) == 1 else receipt.run for name, receipt in zip(names, receipts, strict=True)]


def _side_by_side(names: Sequence[str], comparisons: Sequence[Comparison]) -> str:
    says: dict[str, Callable[[Any], str]] = {"wall_s": say_seconds, "peak_bytes": say_bytes}
    rows = []
    for name, row in comparisons[0].rows.items():
        say = says.get(name, say_usd if "usd" in name else _say_number)
        values = [row.run, *(each.rows[name].baseline if name in each.rows else None for each in comparisons)]
        texts = ["not known" if value is None else say(value) for value in values]
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        rows.append(page.row(ROW_NAMES.get(name, name.replace("_", " ")), page.cells("n", *texts, ratio)))
    heads = ("", *(f"#{name}" for name in names), "#first / second")
    return f"<h2>Side by side</h2>\n{page.table('Side by side', heads, rows)}"


def _say_number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _losses(receipts: Sequence[Receipt], names: Sequence[str]) -> str:
    lines = [
        Line(name, [(step, y) for step, y in receipt.curves.loss], i % 7 + 1)
        for i, (receipt, name) in enumerate(zip(receipts, names, strict=True))
        if receipt.curves.loss
    ]
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    axes = _step_axes([x for x, _ in points], [y for _, y in points])
    return f"<h2>Training loss</h2>\n{curves('Training loss', 'Mean of each stretch, by step.', lines, axes)}"


def _groups(receipts: Sequence[Receipt], names: Sequence[str]) -> str:
    """Where each run's seconds went, on one scale."""
    longest = max(receipt.wall_s for receipt in receipts) or 1.0
    rows, seen = [], set[str]()
    for receipt, name in zip(receipts, names, strict=True):
        parts = grouped({span.name: span.seconds for span in receipt.spans})
        seen |= set(parts)
        bar = f'<td class="bar">{page.stack(parts, longest)}</td>'
        rows.append(page.row(name, bar, page.cells("n", say_seconds(receipt.wall_s))))
    table = page.table("Where the time went", ("run", "", "#time"), rows)
    return f"<h2>Where the time went</h2>\n{table}{page.key(page.in_order(seen))}"
