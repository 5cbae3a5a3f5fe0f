"""Tables for a terminal: the receipt of a run, two of them compared, the trials of a probe. Draws;
computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from farthing.report.receipt import Comparison
from farthing.report.receipt_rows import (
    CLASSES,
    ESTIMATE,
    class_rows,
    compared_rows,
    estimate_rows,
    time_and_price,
)
from farthing.report.receipt_types import Receipt
from farthing.report.safe import escape, table_of
from farthing.settings import Settings
from farthing.storage.files import Json
from farthing.units import digits_of, plural, say_bytes, say_count, say_seconds, say_usd

_BLOCKS, _MOST_BLOCKS = "▁▂▃▄▅▆▇█", 36


def draw_probe(console: Console, found: dict[str, Any]) -> None:
    """What a probe has tried, the best first."""
    has_price = any(trial["usd_per_million_tokens"] for trial in found["trials"] if trial["fits"])
    table = table_of(
        "settings", "#useful tok/s", "#useful", "#peak", *(["#$ a million"] if has_price else [])
    )
    for number, trial in enumerate(found["trials"]):
        words = escape(Settings.from_json(trial).in_words())
        speed = f"{trial['tokens_per_s']:,.0f}" if trial["fits"] else "out of memory"
        cells = [
            f"[bold]{words}[/]" if number == 0 else words,
            speed,
            f"{trial['useful_share']:.1%}",
        ]
        cells.append(say_bytes(trial["peak_bytes"]) if trial["peak_bytes"] else "not known")
        if has_price:
            cells.append(say_usd(trial["usd_per_million_tokens"]) if trial["fits"] else "")
        table.add_row(*cells)
    console.print(table)
    words = f"chosen: {Settings.from_json(found['settings']).in_words()}"
    if found["tokens_per_s"]:
        words += (
            f"; {found['steps']} whole steps went at {found['tokens_per_s']:,.0f} useful tokens/s"
        )
    if found["usd_per_million_tokens"]:
        words += f", {say_usd(found['usd_per_million_tokens'])} a million"
    console.print(
        f"{words}\n`farthing train` uses it from now on, and `farthing plan` uses the measurement",
        soft_wrap=True,
    )


def draw_receipt(console: Console, receipt: Receipt) -> None:
    """The receipt on a terminal."""
    title = {
        "finished": "finished",
        "limit": "stopped at a limit",
        "interrupted": "interrupted, can be continued",
    }.get(receipt.state, "not finished, can be continued")
    console.print()
    console.print(
        f"[bold]Receipt[/] {escape(receipt.run)} ({title})", highlight=False, soft_wrap=True
    )
    _draw_spans(console, receipt)
    if ancestor := receipt.ancestor:
        console.print(
            f"begun from step {ancestor['step']} of {escape(ancestor['run'])}, which had cost"
            f" {say_usd(ancestor['usd'])}: {say_usd(receipt.usd_with_ancestor)} in all",
            soft_wrap=True,
        )
    if not receipt.usd_is_known:
        console.print(
            "[dim]no price was given: set where.usd_per_hour, or power_watts and usd_per_kwh[/]"
        )
    if receipt.machines:
        _draw_machines(console, receipt.machines)
    facts = Table.grid(padding=(0, 2))
    for name, words in {**_of_training(receipt), **_of_trouble(receipt)}.items():
        if words:
            facts.add_row(f"[dim]{name}[/]", words)
    console.print(facts)
    _draw_estimate(console, receipt)
    _draw_metrics(console, receipt)
    for measured in (receipt.evaluation, receipt.standard_tasks):
        if measured is not None:
            console.print(evaluation_table(measured))
    draw_diagnosis(console, receipt)
    for one in receipt.published:
        state = (
            f"commit {one['commit']}"
            if one["commit"]
            else "not sent yet: run the same command again"
        )
        console.print(
            f"[dim]published[/] {escape(one['form'])} at hub:{escape(one['to'])}, {escape(state)}",
            soft_wrap=True,
        )
    if receipt.serving is not None:
        console.print(f"[dim]serving[/] {escape(receipt.serving.in_words())}", soft_wrap=True)


def draw_diagnosis(console: Console, receipt: Receipt) -> None:
    """What holds the run back, what to set, and what that saves; nothing where nothing stands out."""  # noqa: E501
    found = receipt.diagnosis
    if found is None:
        return
    for finding in found.findings:
        colour = "red" if finding.cause == found.largest else "yellow"
        saves = time_and_price(receipt, finding.saves_s, finding.saves_usd) + " in a run like this"
        if finding.rest_s:
            saves += (
                f", {time_and_price(receipt, finding.rest_s, finding.rest_usd)} in the rest of"
                " this one"
            )
        fix = f"{finding.fix}: " if finding.fix else ""
        cause = "" if finding.cause == finding.area else f"{finding.cause}: "
        console.print(
            f"[{colour}]{finding.area}[/] {escape(cause + finding.evidence)}", soft_wrap=True
        )
        console.print(
            f"  {escape(fix + finding.to_do)}; saves about {escape(saves)}", soft_wrap=True
        )
    for advice in found.advice:
        console.print(f"[dim]advice[/] {escape(advice.words)}", soft_wrap=True)
        if advice.command:
            console.print(f"  {escape(advice.command)}", soft_wrap=True)


def evaluation_table(found: Json) -> Table:
    """What `farthing eval` has measured: the model, what it began with, the gain and what a
    hundredth of it has cost.
    """
    sides = [side for side in ("base", "tuned") if side in found]
    gains = found.get("gains") or {}
    heads = [f"#{name}" for name in (*sides, *(["gain", "dollars a point"] if gains else []))]
    table = table_of("metric", *heads, title=escape(found["examples"]))
    for name, value in found.get("tuned", {}).items():
        if not isinstance(value, float):
            continue
        cells = [f"{found[side].get(name, math.nan):.4f}" for side in sides]
        if gains:
            gain = gains.get(name) or {}
            usd = gain.get("usd_per_point")
            cells += [f"{gain['gain']:+.4f}" if gain else "", say_usd(usd) if usd else ""]
        table.add_row(escape(name), *cells)
    return table


def _draw_spans(console: Console, receipt: Receipt) -> None:
    """Where seconds and dollars went, the largest part first."""
    table = table_of(
        "where the time went", "#seconds", "#share", *(["#dollars"] if receipt.usd_is_known else [])
    )
    dollars = digits_of(receipt.usd)
    for span in sorted(receipt.spans, key=lambda span: -span.seconds):
        if span.seconds >= 0.005:
            cells = [span.what, f"{span.seconds:.1f}", f"{span.share:.1%}", dollars(span.usd)]
            table.add_row(*cells[: len(table.columns)])
    cells = ["total", f"{receipt.wall_s:.1f}", f"{1:.1%}", dollars(receipt.usd)]
    table.add_row(*(f"[bold]{cell}[/]" for cell in cells[: len(table.columns)]))
    console.print(table)


def _draw_machines(console: Console, machines: list[Json]) -> None:
    """What was paid for each rented machine, from the request to the confirmed deletion; training
    is a part of it.
    """
    total = sum(row["usd"] for row in machines)
    dollars = digits_of(total)
    table = table_of("machine", "#boot", "#train", "#idle", "#teardown", "#dollars")
    for row in machines:
        where = f"{row['provider']} {row['instance'] or row['gpu']}" + (
            "" if row["gone_at"] else ", not confirmed gone"
        )
        cells = [dollars(row["usd_of"][name]) for name in ("boot", "train", "idle", "teardown")]
        table.add_row(escape(where), *cells, dollars(row["usd"]))
    table.add_row("[bold]all machines[/]", "", "", "", "", f"[bold]{dollars(total)}[/]")
    console.print(table)


def _of_training(receipt: Receipt) -> dict[str, str]:
    """Name -> what there is to say; empty where there is nothing."""
    trained = f"{plural(receipt.steps, 'step')}, {say_count(receipt.tokens)} tokens"
    if receipt.final_loss is not None:
        trained += f", loss of the last step {receipt.final_loss:.4f}"
    has_price = receipt.usd_per_million_tokens is not None and receipt.usd_is_known
    losses, busy = (
        [y for _, y in getattr(receipt.curves, name)] for name in ("loss", "utilisation_percent")
    )
    facts = {
        "trained": trained,
        "a million tokens": say_usd(receipt.usd_per_million_tokens) if has_price else "",
        "loss": (
            f"{sparkline(losses)}  {losses[0]:.3f} to {losses[-1]:.3f}" if len(losses) > 1 else ""
        ),
        "device busy": (
            f"{sparkline(busy, 0, 100)}  mean {sum(busy) / len(busy):.0f}%" if len(busy) > 1 else ""
        ),
    }
    if (saves := receipt.checkpoints).n:
        every = (
            ""
            if saves.interval_s is None
            else f", every {say_seconds(saves.interval_s)} or at a new best"
        )
        waited = (
            f"training waited {say_seconds(saves.held_up_s)} for them ({saves.share:.2%} of the"
            " time)"
        )
        facts["checkpoints"] = f"{saves.n}{every}; {waited}"
    if answers := receipt.answers:
        saved = {
            f"shared prompts ({answers.shared_share:.0%} of the tokens)": answers.shared_s,
            "cached references": answers.reference_s,
        }
        usd = dict(zip(saved, (answers.shared_usd, answers.reference_usd), strict=True))
        facts["saved about"] = ", ".join(
            f"{time_and_price(receipt, seconds, usd[by])} by {by}"
            for by, seconds in saved.items()
            if seconds > 0
        )
        facts["answers"] = " ".join(answers.notes)
    if fit := receipt.schedule:
        words = f"fitted to the limits: {fit['n_steps']:,} of {fit['asked_steps']:,} steps"
        facts["schedule"] = words + ("" if fit["settled"] else ", may still change")
    return facts


def _of_trouble(receipt: Receipt) -> dict[str, str]:
    """Name -> what went wrong; only what did."""
    facts: dict[str, str] = {}
    if receipt.interruptions:
        facts["interruptions"] = (
            f"{receipt.interruptions}; restarting took"
            f" {time_and_price(receipt, receipt.restart_s, receipt.restart_usd)}, work done twice"
            f" {time_and_price(receipt, receipt.redone_s, receipt.redone_usd)}"
        )
    if told := [notice for notice in receipt.notices if notice["is_certain"]]:
        grace = (
            ""
            if told[-1]["grace_s"] is None
            else f" of {say_seconds(max(0.0, told[-1]['grace_s']))}"
        )
        facts["last notice"] = (
            f"{escape(told[-1]['what'])}; saved and left after"
            f" {say_seconds(told[-1]['left_after_s'])}{grace}"
        )
    if events := receipt.out_of_memory:
        now = Settings.from_json(events[-1]).in_words()
        facts["out of memory"] = f"{plural(len(events), 'time')}; training went on with {now}"
    if values := receipt.settings:
        facts["computed"] = f"{values['precision']}, {Settings.from_json(values).in_words()}"
    if trust := receipt.ledger:
        lost = "no money is missing"
        if trust.lost_s:
            lost = (
                f"only the sum of {time_and_price(receipt, trust.lost_s, trust.lost_usd)} is known"
            )
        facts["ledger"] = (
            f"[yellow]damaged[/], {plural(trust.n_broken_lines, 'broken line')}; {lost}"
        )
    if receipt.damaged_log_lines:
        facts["log"] = f"[yellow]{plural(receipt.damaged_log_lines, 'damaged line')}[/], left out"
    if receipt.skipped_steps:
        facts["skipped"] = (
            f"{plural(receipt.skipped_steps, 'step')} whose loss or gradient was not a number"
        )
    return facts


def draw_comparison(console: Console, comparison: Comparison) -> None:
    """Two runs side by side."""
    table = table_of("", "#run", "#baseline", "#ratio", rows=compared_rows([comparison]))
    console.print(f"[bold]run[/]       {escape(comparison.run)}", soft_wrap=True)
    console.print(f"[bold]baseline[/]  {escape(comparison.baseline)}", soft_wrap=True)
    console.print(table)
    if words := comparison.in_words():
        console.print(words)
    for note in comparison.notes:
        console.print(f"[yellow]note[/] {escape(note)}", highlight=False, soft_wrap=True)


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """A block a value from `low` to `high`; of more than `_MOST_BLOCKS` values, a block for each
    stretch.
    """
    size = -(-len(values) // _MOST_BLOCKS) or 1
    values = [
        sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)
    ]
    low, high = min(values) if low is None else low, max(values) if high is None else high
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, max(0, int((value - low) / span * 7.999)))] for value in values)


def _draw_estimate(console: Console, receipt: Receipt) -> None:
    """What the plan said before the start, part by part, and what the first steps said."""
    rows, promised = estimate_rows(receipt, 0.005 * receipt.wall_s), receipt.promised
    if rows:
        console.print(
            table_of("estimated before the start" if promised else "", *ESTIMATE, rows=rows)
        )
    if promised:
        console.print(
            f"[dim]the estimate is based on: {escape(promised.calibration)}[/]", highlight=False
        )


def _draw_metrics(console: Console, receipt: Receipt) -> None:
    metrics = receipt.metrics
    if not metrics:
        return
    numbers = ", ".join(
        f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, float)
    )
    of = f"best, step {receipt.best_step:,}" if receipt.best_step is not None else "last"
    on = plural(metrics.get("n_examples", 0), "example")
    line = Table.grid(padding=(0, 2))
    line.add_row("[dim]evaluation[/]", escape(f"{numbers} ({of}, {on})"))
    console.print(line)
    rows = class_rows(metrics)
    if 0 < len(rows) <= 30:
        console.print(
            table_of(*CLASSES, rows=[(escape(name), *figures) for name, *figures in rows])
        )
