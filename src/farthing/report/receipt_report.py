"""A receipt as sections, two receipts compared, the trials of a probe. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from farthing.report.blocks import (
    Block,
    Cell,
    FindingBlock,
    Pairs,
    Paragraph,
    Section,
    Stack,
    Table,
    percent,
    sections,
)
from farthing.report.receipt import Comparison
from farthing.report.receipt_types import Diagnosis, Pair, RunReceipt
from farthing.report.timeline import group_of
from farthing.report.words import pairs, report, say, table
from farthing.settings import Settings
from farthing.storage.files import Json
from farthing.units import digits_of, say_bytes, say_seconds, say_usd

_MOST_CLASSES = 30
_ROW_NAMES = {
    "usd": "cost",
    "wall_s": "time",
    "tokens_per_s": "useful tokens/s",
    "usd_per_million_tokens": "a million tokens",
    "peak_bytes": "peak memory",
    "final_loss": "last training loss",
    "loss": "evaluation loss",
}
"""Of a comparison; the others are called as they are."""


def receipt_report(receipt: RunReceipt) -> list[Section]:
    computed = receipt.settings and Settings.from_json(receipt.settings)
    now = receipt.out_of_memory and Settings.from_json(receipt.out_of_memory[-1])
    blocks: dict[str, Block] = {
        "spans": spans(receipt),
        "facts": pairs("receipt.txt", "facts", receipt, computed, now),
    }
    if receipt.machines:
        total = sum(row["usd"] for row in receipt.machines)
        costs = receipt.machines, total, digits_of(total)
        blocks["machines"] = table("receipt.txt", "machines_table", *costs)
    metrics = [] if receipt.metrics is None else [classes_table(receipt.metrics)]
    measured = (receipt.evaluation, receipt.standard_tasks)
    metrics = [found for found in metrics if 0 < len(found.rows) <= _MOST_CLASSES]
    metrics += [evaluation_table(found) for found in measured if found is not None]
    found = receipt.diagnosis
    is_held = found is not None and (found.findings or found.advice)
    return sections(
        *report("receipt.txt", "receipt", receipt, **blocks),
        Section("", tuple(metrics)),
        estimate(receipt, 0.005 * receipt.wall_s),
        diagnosis(receipt) if is_held else None,
    )


def spans(receipt: RunReceipt) -> Table:
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


def estimate(receipt: RunReceipt, least_s: float = 0.05) -> Section | None:
    """What the plan and the first steps said; of the parts, those of at least `least_s`."""
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
        blocks.append(Paragraph(f"The estimate is based on: {promised.calibration}", "soft"))
    return Section(title, tuple(blocks))


def diagnosis(receipt: RunReceipt) -> Section:
    found, blocks = receipt.diagnosis or Diagnosis([], "", []), list[Block]()
    for one in found.findings:
        fix = f"`--set {one.fix}` " if "=" in one.fix else f"`{one.fix}`: " if one.fix else ""
        name = one.area if one.cause == one.area else f"{one.area}: {one.cause}"
        worth, words = say("receipt.txt", "worth", receipt, one), f"{fix}{one.to_do}"
        is_first = one.cause == found.largest
        blocks.append(FindingBlock(name, worth, (f"{one.evidence}.", words), is_first))
    for advice in found.advice:
        command = (f"`{advice.command}`",) if advice.command else ()
        blocks.append(FindingBlock("", "", (advice.words, *command)))
    if not blocks:
        blocks = [Paragraph("Nothing stands out: no single cause takes 3 % of the time.", "soft")]
    return Section("What held it back", tuple(blocks))


def classes_table(metrics: Json) -> Table:
    """Precision, recall, F1 and the number of examples of each class; empty for other tasks."""
    return table("receipt.txt", "classes_table", metrics.get("per_class") or {})


def evaluation_table(found: Json) -> Table:
    """What `farthing eval` measured: before, after, the gain, and the price of a hundredth."""
    sides = [side for side in ("base", "tuned") if found.get(side)]
    rows = table("receipt.txt", "measured_table", found, sides, found.get("gains"))
    return rows._replace(title=found["examples"])


def compared_rows(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, ...]]:
    """A figure of the first run and of each other, and the ratio to the first of those."""
    for name, row in comparisons[0].rows.items():
        say, unknown = {"wall_s": say_seconds, "peak_bytes": say_bytes}.get(name, _number), "-"
        if "usd" in name:
            say, unknown = say_usd, "no price"
        others = [each.rows[name].baseline if name in each.rows else None for each in comparisons]
        texts = [unknown if value is None else say(value) for value in (row.run, *others)]
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        yield _ROW_NAMES.get(name, name.replace("_", " ")), *texts, ratio


def _number(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:,.4g}"


def comparison_report(found: Comparison) -> list[Section]:
    rows = Table(("", "#run", "#baseline", "#ratio"), tuple(compared_rows([found])))
    runs = Pairs((("run", found.run), ("baseline", found.baseline)))
    return report("receipt.txt", "comparison", found, found.in_words(), runs=runs, rows=rows)


def probe_report(found: dict[str, Any]) -> list[Section]:
    trials = [(Settings.from_json(one).in_words(), one) for one in found["trials"]]
    has_price = any(one["usd_per_million_tokens"] for _, one in trials if one["fits"])
    rows = table("receipt.txt", "probe_table", trials, has_price)
    settings = Settings.from_json(found["settings"]).in_words()
    return report("receipt.txt", "probe", found, settings, trials=rows)
