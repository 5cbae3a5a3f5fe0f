"""A receipt as sections, of which the terminal draws all and the page takes some; two receipts
compared; the trials of a probe. Computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from farthing.report.blocks import (
    Block,
    Cell,
    Finding,
    Pairs,
    Section,
    Stack,
    Table,
    Text,
    percent,
    sections,
)
from farthing.report.receipt import ROW_NAMES, Comparison
from farthing.report.receipt_types import Diagnosis, Pair, Receipt
from farthing.report.timeline import group_of
from farthing.report.words import pairs, say
from farthing.settings import Settings
from farthing.storage.files import Json
from farthing.units import digits_of, say_bytes, say_seconds, say_usd

_MOST_CLASSES = 30
_STATES = {
    "finished": "finished",
    "limit": "stopped at a limit",
    "interrupted": "interrupted, can be continued",
}


CLASSES = ("class", "#precision", "#recall", "#F1", "#examples")


def receipt_report(receipt: Receipt) -> list[Section]:
    """The receipt for a terminal."""
    state = _STATES.get(receipt.state, "not finished, can be continued")
    head: list[Block] = [Text(f"Receipt {receipt.run} ({state})", "answer"), spans(receipt)]
    if receipt.ancestor:
        head.append(Text(say("receipt.txt", "ancestor", receipt, receipt.ancestor)))
    if not receipt.usd_is_known:
        words = "no price was given: set where.usd_per_hour, or power_watts and usd_per_kwh"
        head.append(Text(words, "soft"))
    head += [_machines(receipt.machines)] if receipt.machines else []
    computed = receipt.settings and Settings.from_json(receipt.settings)
    now = receipt.out_of_memory and Settings.from_json(receipt.out_of_memory[-1])
    head.append(pairs("receipt.txt", "facts", receipt, computed, now))
    metrics: list[Block] = []
    rows = class_rows(receipt.metrics or {})
    if 0 < len(rows) <= _MOST_CLASSES:
        metrics.append(Table(CLASSES, tuple(rows)))
    measured = (receipt.evaluation, receipt.standard_tasks)
    metrics += [evaluation_table(found) for found in measured if found is not None]
    found = receipt.diagnosis
    is_held = found is not None and (found.findings or found.advice)
    return sections(
        Section("", tuple(head)),
        Section("", tuple(metrics)),
        estimate(receipt, 0.005 * receipt.wall_s),
        diagnosis(receipt) if is_held else None,
    )


def _worth(receipt: Receipt, seconds: float, usd: float) -> str:
    return say("receipt.txt", "time_and_price", receipt, seconds, usd)


def spans(receipt: Receipt) -> Table:
    """Where seconds and dollars went, the largest part first."""
    dollars, n = digits_of(receipt.usd), 5 if receipt.usd_is_known else 4
    rows: list[tuple[Cell, ...]] = [
        (
            span.what,
            Stack({group_of(span.name): span.seconds}, receipt.wall_s),
            f"{span.seconds:,.1f}",
            percent(span.share),
            dollars(span.usd),
        )
        for span in sorted(receipt.spans, key=lambda span: -span.seconds)
        if span.seconds >= 0.005
    ]
    rows.append(("total", "", f"{receipt.wall_s:,.1f}", "100 %", dollars(receipt.usd)))
    heads = "where the time went", "|", "#seconds", "#share", "#dollars"
    return Table(heads[:n], tuple(row[:n] for row in rows), caption="Parts of the bill")


def _machines(machines: list[Json]) -> Table:
    """What was paid for each rented machine, from the request to the confirmed deletion; training
    is a part of it.
    """
    total = sum(row["usd"] for row in machines)
    dollars, parts = digits_of(total), ("boot", "train", "idle", "teardown")
    rows = []
    for row in machines:
        gone = "" if row["gone_at"] else ", not confirmed gone"
        where = f"{row['provider']} {row['instance'] or row['gpu']}{gone}"
        rows.append((where, *(dollars(row["usd_of"][x]) for x in parts), dollars(row["usd"])))
    rows.append(("all machines", "", "", "", "", dollars(total)))
    return Table(("machine", *(f"#{name}" for name in parts), "#dollars"), tuple(rows))


def estimate(receipt: Receipt, least_s: float = 0.0) -> Section | None:
    """What the plan said before the start, part by part, and what the first steps said. Of the
    parts those that were to take, or took, `least_s`.
    """
    rows, promised, forecast = [], receipt.promised, receipt.forecast

    def add(name: str, pair: Pair, say: Callable[[Any], str]) -> None:
        ratio = "" if pair.ratio is None else f"{pair.ratio:.2f}"
        rows.append((name, say(pair.promised), say(pair.happened), ratio))

    if promised:
        add("time", promised.wall_s, say_seconds)
        for name, pair in promised.seconds.items():
            if max(pair.promised, pair.happened or 0.0) >= least_s:
                add(f"· {name}", pair, say_seconds)
        if receipt.usd_is_known:
            add("dollars", promised.usd, digits_of(receipt.usd))
        add("peak memory", promised.peak_bytes, say_bytes)
    if forecast:
        after = f"time, forecast after step {forecast.made_after_step:,}"
        add(after, forecast.wall_s, say_seconds)
    if not rows:
        return None
    title = "Estimated before the start, and happened" if promised else "Estimated"
    heads = "", "#estimated", "#happened", "#ratio"
    blocks: list[Block] = [Table(heads, tuple(rows), caption=title)]
    if promised:
        blocks.append(Text(f"The estimate is based on: {promised.calibration}", "soft"))
    return Section(title, tuple(blocks))


def diagnosis(receipt: Receipt) -> Section:
    """What holds the run back, what to set, and what that saves."""
    found, blocks = receipt.diagnosis or Diagnosis([], "", []), list[Block]()
    for one in found.findings:
        fix = f"`--set {one.fix}` " if "=" in one.fix else f"`{one.fix}`: " if one.fix else ""
        worth = _worth(receipt, one.saves_s, one.saves_usd) + " in a run like this one"
        if one.rest_s:
            rest = _worth(receipt, one.rest_s, one.rest_usd)
            worth += f", {rest} in the rest of this one"
        name = one.area if one.cause == one.area else f"{one.area}: {one.cause}"
        words = f", worth {worth}" if one.saves_s else ""
        is_first = one.cause == found.largest
        blocks.append(Finding(name, words, (f"{one.evidence}.", f"{fix}{one.to_do}"), is_first))
    for advice in found.advice:
        command = (f"`{advice.command}`",) if advice.command else ()
        blocks.append(Finding("", "", (advice.words, *command)))
    if not blocks:
        blocks = [Text("Nothing stands out: no single cause takes 3 % of the time.", "soft")]
    return Section("What held it back", tuple(blocks))


def class_rows(metrics: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Precision, recall, F1 and the number of examples of each class; empty for other tasks."""
    return [
        (name, *(f"{row[key]:.3f}" for key in ("precision", "recall", "f1")), str(row["n"]))
        for name, row in (metrics.get("per_class") or {}).items()
    ]


def evaluation_table(found: Json) -> Table:
    """What `farthing eval` has measured: the model, what it began with, the gain and what a
    hundredth of it has cost.
    """
    sides = [side for side in ("base", "tuned") if side in found]
    gains = found.get("gains") or {}
    rows = []
    for name, value in found.get("tuned", {}).items():
        if not isinstance(value, float):
            continue
        cells = [f"{found[side].get(name, math.nan):.4f}" for side in sides]
        if gains:
            gain = gains.get(name) or {}
            usd = gain.get("usd_per_point")
            cells += [f"{gain['gain']:+.4f}" if gain else "", say_usd(usd) if usd else ""]
        rows.append((name, *cells))
    heads = (*sides, *(["gain", "dollars a point"] if gains else []))
    return Table(("metric", *(f"#{head}" for head in heads)), tuple(rows), found["examples"])


def compared_rows(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, ...]]:
    """A figure of the first run, of each that it is compared with, and the ratio to the first of
    these.
    """
    for name, row in comparisons[0].rows.items():
        say = (
            say_usd
            if "usd" in name
            else {"wall_s": say_seconds, "peak_bytes": say_bytes}.get(name, _number)
        )
        values = [
            row.run,
            *(each.rows[name].baseline if name in each.rows else None for each in comparisons),
        ]
        unknown = "no price" if "usd" in name else "-"
        texts = [unknown if value is None else say(value) for value in values]
        yield (
            ROW_NAMES.get(name, name.replace("_", " ")),
            *texts,
            "" if row.ratio is None else f"{row.ratio:.3f}",
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:,.4g}"


def comparison_report(found: Comparison) -> list[Section]:
    """Two runs side by side."""
    table = Table(("", "#run", "#baseline", "#ratio"), tuple(compared_rows([found])))
    runs = Pairs((("run", found.run), ("baseline", found.baseline)))
    words = [Text(words) for words in (found.in_words(),) if words]
    notes = [Text(f"note: {note}", "warn") for note in found.notes]
    return [Section("", (runs, table, *words, *notes))]


def probe_report(found: dict[str, Any]) -> list[Section]:
    """What a probe has tried, the best first."""
    trials = found["trials"]
    n = 5 if any(trial["usd_per_million_tokens"] for trial in trials if trial["fits"]) else 4
    rows = []
    for trial in trials:
        usd, fits = trial["usd_per_million_tokens"], trial["fits"]
        cells = (
            Settings.from_json(trial).in_words(),
            f"{trial['tokens_per_s']:,.0f}" if fits else "out of memory",
            f"{trial['useful_share']:.1%}",
            say_bytes(trial["peak_bytes"]) if trial["peak_bytes"] else "not known",
            say_usd(usd) if fits and usd else "",
        )
        rows.append(cells[:n])
    heads = "settings", "#useful tok/s", "#useful", "#peak", "#$ a million"
    words = f"chosen: {Settings.from_json(found['settings']).in_words()}"
    if found["tokens_per_s"]:
        speed = f"{found['tokens_per_s']:,.0f} useful tokens/s"
        words += f"; {found['steps']} whole steps went at {speed}"
    if found["usd_per_million_tokens"]:
        words += f", {say_usd(found['usd_per_million_tokens'])} a million"
    used = "`farthing train` uses it from now on, and `farthing plan` uses the measurement"
    return [Section("", (Table(heads[:n], tuple(rows)), Text(words), Text(used)))]
