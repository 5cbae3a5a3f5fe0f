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
from farthing.settings import Settings
from farthing.storage.files import Json
from farthing.units import digits_of, plural, say_bytes, say_count, say_seconds, say_usd

_BLOCKS, _MOST_BLOCKS = "▁▂▃▄▅▆▇█", 36
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
    if ancestor := receipt.ancestor:
        words = f"begun from step {ancestor['step']} of {ancestor['run']}, which had cost"
        total = say_usd(receipt.usd_with_ancestor)
        head.append(Text(f"{words} {say_usd(ancestor['usd'])}: {total} in all"))
    if not receipt.usd_is_known:
        words = "no price was given: set where.usd_per_hour, or power_watts and usd_per_kwh"
        head.append(Text(words, "soft"))
    head += [_machines(receipt.machines)] if receipt.machines else []
    facts = _of_training(receipt) | _of_trouble(receipt) | _afterwards(receipt)
    head.append(Pairs(tuple((name, words) for name, words in facts.items() if words)))
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


def time_and_price(receipt: Receipt, seconds: float, usd: float) -> str:
    """`20 s ($0.012)`, in the digits of the run's bill; without dollars where there is no price."""
    return say_seconds(seconds) + (
        f" ({digits_of(receipt.usd)(usd)})" if receipt.usd_is_known else ""
    )


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


def _of_training(receipt: Receipt) -> dict[str, str]:
    """Name -> what there is to say; empty where there is nothing."""
    trained = f"{plural(receipt.steps, 'step')}, {say_count(receipt.tokens)} tokens"
    if receipt.final_loss is not None:
        trained += f", loss of the last step {receipt.final_loss:.4f}"
    has_price = receipt.usd_per_million_tokens is not None and receipt.usd_is_known
    facts = {
        "trained": trained,
        "a million tokens": say_usd(receipt.usd_per_million_tokens) if has_price else "",
    }
    losses = [y for _, y in receipt.curves.loss]
    if len(losses) > 1:
        facts["loss"] = f"{sparkline(losses)}  {losses[0]:.3f} to {losses[-1]:.3f}"
    busy = [y for _, y in receipt.curves.utilisation_percent]
    if len(busy) > 1:
        facts["device busy"] = f"{sparkline(busy, 0, 100)}  mean {sum(busy) / len(busy):.0f}%"
    if (saves := receipt.checkpoints).n:
        every = f", every {say_seconds(saves.interval_s)} or at a new best"
        waited = f"training waited {say_seconds(saves.held_up_s)} for them"
        every = "" if saves.interval_s is None else every
        facts["checkpoints"] = f"{saves.n}{every}; {waited} ({saves.share:.2%} of the time)"
    if answers := receipt.answers:
        prompts = f"shared prompts ({answers.shared_share:.0%} of the tokens)"
        saved = (
            (prompts, answers.shared_s, answers.shared_usd),
            ("cached references", answers.reference_s, answers.reference_usd),
        )
        facts["saved about"] = ", ".join(
            f"{time_and_price(receipt, s, usd)} by {by}" for by, s, usd in saved if s > 0
        )
        facts["answers"] = " ".join(answers.notes)
    if fit := receipt.schedule:
        words = f"fitted to the limits: {fit['n_steps']:,} of {fit['asked_steps']:,} steps"
        facts["schedule"] = words + ("" if fit["settled"] else ", may still change")
    if metrics := receipt.metrics:
        values = [f"{n} {value:.4g}" for n, value in metrics.items() if isinstance(value, float)]
        of = "last" if receipt.best_step is None else f"best, step {receipt.best_step:,}"
        on = plural(metrics.get("n_examples", 0), "example")
        facts["evaluation"] = f"{', '.join(values)} ({of}, {on})"
    return facts


def _of_trouble(receipt: Receipt) -> dict[str, str]:
    """Name -> what went wrong; only what did."""
    facts: dict[str, str] = {}
    if receipt.interruptions:
        again = time_and_price(receipt, receipt.restart_s, receipt.restart_usd)
        twice = time_and_price(receipt, receipt.redone_s, receipt.redone_usd)
        words = f"{receipt.interruptions}; restarting took {again}, work done twice {twice}"
        facts["interruptions"] = words
    if told := [notice for notice in receipt.notices if notice["is_certain"]]:
        last = told[-1]
        left, grace_s = say_seconds(last["left_after_s"]), last["grace_s"]
        grace = "" if grace_s is None else f" of {say_seconds(max(0.0, grace_s))}"
        facts["last notice"] = f"{last['what']}; saved and left after {left}{grace}"
    if events := receipt.out_of_memory:
        now = Settings.from_json(events[-1]).in_words()
        facts["out of memory"] = f"{plural(len(events), 'time')}; training continued with {now}"
    if values := receipt.settings:
        facts["computed"] = f"{values['precision']}, {Settings.from_json(values).in_words()}"
    if trust := receipt.ledger:
        lost = "no money is missing"
        if trust.lost_s:
            known = time_and_price(receipt, trust.lost_s, trust.lost_usd)
            lost = f"only the sum of {known} is known"
        facts["ledger"] = f"damaged, {plural(trust.n_broken_lines, 'broken line')}; {lost}"
    if receipt.damaged_log_lines:
        facts["log"] = f"{plural(receipt.damaged_log_lines, 'damaged line')}, left out"
    if receipt.skipped_steps:
        n = plural(receipt.skipped_steps, "step")
        facts["skipped"] = f"{n} whose loss or gradient was not a number"
    return facts


def _afterwards(receipt: Receipt) -> dict[str, str]:
    facts = {}
    for one in receipt.published:
        commit = one["commit"]
        state = f"commit {commit}" if commit else "not sent yet: run the same command again"
        facts[f"published {one['form']}"] = f"hub:{one['to']}, {state}"
    for n, each in enumerate(receipt.still_billed, 1):
        facts[f"still billed {n}"] = f"{each['what']}; ends with: {each['ends']}"
    return facts | {"serving": receipt.serving.in_words() if receipt.serving else ""}


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
        worth = time_and_price(receipt, one.saves_s, one.saves_usd) + " in a run like this one"
        if one.rest_s:
            rest = time_and_price(receipt, one.rest_s, one.rest_usd)
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


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """A block a value from `low` to `high`; of more than `_MOST_BLOCKS` values, a block for each
    stretch.
    """
    size = -(-len(values) // _MOST_BLOCKS) or 1
    stretches = [values[i : i + size] for i in range(0, len(values), size)]
    values = [sum(stretch) / len(stretch) for stretch in stretches]
    low, high = min(values) if low is None else low, max(values) if high is None else high
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, max(0, int((value - low) / span * 7.999)))] for value in values)
