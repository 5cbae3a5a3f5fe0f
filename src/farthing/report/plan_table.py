"""A plan in the terminal, at 80 columns: the answer, the choices, why not elsewhere. Draws;
computes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from farthing.report.plan_brief import draw_choices
from farthing.report.plan_savings import methods_in_words
from farthing.report.plan_serving import COLUMNS as SERVING_COLUMNS
from farthing.report.plan_serving import serving_cells, shown
from farthing.report.plan_words import (
    YEARS,
    break_even_words,
    cause_of,
    comparison_names,
    has_price,
    hours_in_words,
    limits_in_words,
    micro_batches_in_words,
    must_buy_more,
    other_ways,
    say_cost,
    say_short,
    summary,
    usd_in_words,
    year_rows,
)
from farthing.report.safe import escape, table_of
from farthing.units import plural, say_bytes, say_count, say_seconds, say_usd

_N_SHOWN, _N_WHY_NOT = 10, 6
_WIDE, _N_NAMED = 100, 5
_LEFT_OUT = ("#GB", "#streams", "#answer")
"""Columns of serving that a narrower terminal has no room for."""
_LEGEND = (
    "By dollars, within 5 % or a cent the sooner first; the first can be had at its price. * no"
    " other choice is both cheaper and sooner. Ranges hold for 4 of 5 runs. wait: for spot"
    " capacity, not paid for. price: `from` is the lowest of a marketplace, `buy` what has to be"
    " bought"
)
_BAR, _BAR_WIDTH = "█", 24
Row = Mapping[str, Any]


def draw_plan(console: Console, view: Row, limit: int | None = None) -> None:
    """The whole answer: what to do first, then the choices, then the reasons."""
    draw_header(console, view)
    n_shown = limit or _N_SHOWN
    console.print()
    draw_choices(console, view["plans"][:n_shown])
    _draw_rest(console, len(view["plans"]) - n_shown, view["plans"][:n_shown])
    console.print(f"[dim]{_LEGEND}[/]")
    others = other_ways(view)
    if others:
        console.print()
    for name, words in others.items():
        console.print(f"[bold]{escape(name)}[/]: {escape(words)}")
    _draw_why_not(console, view)
    if view["runs"] is None:
        _draw_savings(console, view)
    draw_beside(console, view)
    _draw_sources(console, view)


def draw_nothing(console: Console, view: Row) -> None:
    """Why nothing can do the job, when nothing can; the ways out are the error's business."""
    draw_header(console, view)
    _draw_why_not(console, view)


def draw_header(console: Console, view: Row) -> None:
    """The answer in a sentence, and the question in a few lines."""
    console.print(f"[bold]{escape(view['answer'])}[/]")
    console.print(f"[dim]{escape(summary(view))}[/]")
    console.print(f"[dim]lengths: {escape(view['job']['lengths_source'])}[/]")
    words = limits_in_words(view)
    if words:
        best = view["best"]
        chance = (
            f"; in time with {best['chance']:.0%}" if best and best["chance"] is not None else ""
        )
        console.print(f"[dim]limits: {escape(words)}{chance}[/]")


def draw_components(console: Console, row: Row) -> None:
    """What one plan is made of: recipe, memory, step, whole run, dollars, spot."""
    console.print(f"\n[bold]Plan {row['rank']}: {escape(row['name'])}[/], {escape(row['why'])}")
    recipe, memory, step = row["recipe"], row["memory"], row["step"]
    each = f" on each of {row['n_gpus']} GPUs" if row["n_gpus"] > 1 else ""
    facts = {
        "recipe": f"{recipe['method']}, {recipe['precision']}, {recipe['optimizer']}",
        "step": f"{recipe['global_batch']} examples: {micro_batches_in_words(recipe)}{each}",
        "checkpointing": (
            f"activations of {recipe['checkpointing']} recomputed"
            if recipe["checkpoint_every"]
            else "none"
        ),
        "sharding": recipe["sharding"],
        "speed": (
            f"{say_count(step['tokens_per_s'])} useful tokens/s, {step['useful_share']:.0%} of the"
            f" computed tokens; {step['flops_per_s'] / 1e12:,.3g} TFLOP/s"
        ),
        "price": _price_words(row),
        "confidence": row["confidence"],
    }
    if memory["host_bytes"]:
        facts["main memory"] = (
            f"{say_bytes(memory['host_bytes'])} for weights or an optimizer's state that stay there"
        )
    if row["recipe"]["to_set"]:
        facts["to set"] = ", ".join(row["recipe"]["to_set"])
    _draw_pairs(console, facts)
    low, needed, high = memory["range_bytes"]
    words = (
        f"{say_bytes(needed)} ({_gib(low)} to {_gib(high)}) of"
        f" {say_bytes(memory['capacity_bytes'])}"
    )
    of_one = "" if row["is_cpu"] else " of one GPU"
    console.print(f"\n[bold]Memory[/]{of_one}: {words}, at its peak in the {memory['moment']}")
    free = {"free": max(0.0, memory["spare_bytes"])}
    _draw_bars(console, memory["parts"] | free, say_bytes, memory["capacity_bytes"])
    console.print(f"\n[bold]One step[/]: {say_short(step['seconds'])}")
    _draw_bars(console, step["parts"], say_short, step["seconds"])
    console.print(f"\n[bold]The whole run[/]: {hours_in_words(row)}")
    _draw_bars(console, row["seconds"], say_seconds, row["wall_s"])
    console.print(f"\n[bold]Dollars[/]: {usd_in_words(row)}")
    _draw_bars(console, row["usd"], say_usd, row["total_usd"])
    if must_buy_more(row):
        console.print(f"  to be paid before: {say_cost(row['up_front_usd'])}")
    for words in row["price_notes"]:
        console.print(f"  {words}")
    spot = row["spot"]
    if spot:
        console.print(
            f"\n[bold]Spot[/]: {spot['n_interruptions']:.2g} expected interruptions, by"
            f" {escape(spot['law'])}"
        )
        facts = {
            "lost work": say_seconds(spot["lost_s"]),
            "restarts": say_seconds(spot["restart_s"]),
            "waiting": f"{say_seconds(spot['waiting_s'])} for capacity, not paid for",
            "checkpoints": (
                f"every {say_seconds(spot['save_every_s'])}, {say_seconds(spot['checkpoint_s'])}"
                " in all"
            ),
        }
        _draw_pairs(console, facts)
    if row["chance"] is not None:
        console.print(f"\nin time for the deadline: {row['chance']:.0%}")


def draw_compared(console: Console, comparison: Row) -> None:
    """Two choices side by side, with ratios."""
    console.print(f"[bold]{escape(comparison['words'])}[/]\n")
    heads = ("", *(f"#{escape(name)}" for name in comparison_names(comparison)), "#ratio")
    console.print(
        table_of(*heads, rows=(map(escape, cells) for cells in comparison["table"]), flush_gap=2)
    )


def draw_beside(console: Console, view: Row) -> None:
    """What was asked for beside the choices: figures of one's own, so many runs, own machines,
    serving.
    """
    if view["runs"] is not None:
        _draw_savings(console, view)
    _draw_by_hand(console, view)
    _draw_own(console, view)
    if view["serving"] is not None:
        _draw_serving(console, view["serving"])


# ---- the table of choices ----


def _draw_rest(console: Console, n_rest: int, shown: Sequence[Row]) -> None:
    n_also = sum(len(row["also_at"]) for row in shown)
    words = []
    if n_rest > 0:
        words.append(f"{plural(n_rest, 'more choice')} (--limit N)")
    if n_also:
        words.append(
            f"{plural(n_also, 'offer')} like these in other places, at the same price or more"
        )
    if words:
        console.print(f"[dim]and {'; '.join(words)}[/]")


# ---- below the table ----


def _draw_why_not(console: Console, view: Row) -> None:
    """Refusals for one reason, of whatever GPUs, in two lines; the commonest first, or the nearest
    where nothing can.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    rejected = [one for one in view["rejected"] if one["kind"] not in ("here", "own")]
    for one in rejected:
        alike = (
            re.sub(r"\d[\d.,]*", "#", cause_of(one["reason"])),
            re.sub(r"\d[\d.,]*", "#", one["change"]),
        )
        groups.setdefault(alike, []).append(one)
    if not groups:
        return
    n_all = sum(one["n_offers"] for one in rejected)
    console.print(f"\n[bold]Why not[/] the other {plural(n_all, 'offer')}")
    ordered = list(groups.values())  # the nearest first
    if view["plans"]:
        ordered.sort(key=lambda ones: -sum(one["n_offers"] for one in ones))
    for ones in ordered[:_N_WHY_NOT]:
        names = list(
            dict.fromkeys(f"{one['n_gpus']}x {one['gpu']}".removeprefix("1x ") for one in ones)
        )
        more = f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else ""
        n = sum(one["n_offers"] for one in ones)
        console.print(
            Padding(
                escape(f"{plural(n, 'offer')}: {', '.join(names[:_N_NAMED])}{more}"), (0, 0, 0, 2)
            )
        )
        such = "" if len(names) == 1 else f"{names[0]}: "
        words = escape(f"{such}{cause_of(ones[0]['reason'])}; try {ones[0]['change']}")
        console.print(Padding(f"[dim]{words}[/]", (0, 0, 0, 4)))
    if len(groups) > _N_WHY_NOT:
        console.print(
            f"[dim]and {plural(len(groups) - _N_WHY_NOT, 'more reason')}: --json has all[/]"
        )


def _draw_by_hand(console: Console, view: Row) -> None:
    if view["by_hand"] is not None:
        console.print("\n[bold]By your own figures[/] (P: the price of an hour)")
        for words in view["by_hand"]["words"]:
            console.print(f"  {escape(words)}")


def _draw_savings(console: Console, view: Row) -> None:
    savings = view["savings"]
    if savings is not None:
        console.print(f"\n[bold]What each choice saves[/]: {escape(savings['words'])}")
        for one in savings["rungs"]:
            console.print(Padding(escape(one["words"]), (0, 0, 0, 2)))
    if view["methods"]:
        console.print(f"[bold]By method[/]: {escape(methods_in_words(view['methods']))}")
    if view["runs"] is not None:
        console.print(
            f"[bold]{plural(view['runs']['n_runs'], 'run')}[/]:"
            f" {escape('; '.join(view['runs']['words']))}"
        )


def _draw_own(console: Console, view: Row) -> None:
    for own in view["own"]:
        console.print(f"\n[bold]Own {escape(own['name'])}[/]: {escape(own['words'])}")
        if own["total_usd"] is None:
            continue
        parts = " + ".join(f"{name} {say_usd(usd)}" for name, usd in own["usd"].items())
        shared = (
            f" (wear shared by {own['hours_per_month']:,.0f} h of use a month)"
            if own["price_usd"]
            else ""
        )
        console.print(Padding(f"[dim]{parts}{shared}[/]", (0, 0, 0, 2)))
        for one in own["against"]:
            if own["price_usd"]:
                console.print(Padding(escape(break_even_words(own, one)), (0, 0, 0, 2)))
    years = view["years"]
    if years:
        console.print(f"\n[bold]{years['runs_per_month']:g} runs a month[/]")
        rows = ((escape(name), *figures) for name, *figures in year_rows(years))
        console.print(table_of(*YEARS, rows=rows, flush_gap=2))
        for note in years["notes"]:
            console.print(f"[dim]{escape(note)}[/]")


def _draw_serving(console: Console, serving: Row) -> None:
    """The answer and the cheapest choices."""
    console.print(f"\n[bold]{escape(serving['answer'])}[/]")
    if not serving["rows"]:
        for one in serving["refused"][:_N_WHY_NOT]:
            console.print(
                f"  {one['n_gpus']}x {escape(one['gpu'])} in {one['precision']}:"
                f" {escape(one['why'])}"
            )
        return
    names = [name for name in SERVING_COLUMNS if console.width >= _WIDE or name not in _LEFT_OUT]
    cells = [dict(zip(SERVING_COLUMNS, serving_cells(row), strict=True)) for row in shown(serving)]
    console.print(
        table_of(*names, rows=((escape(row[name]) for name in names) for row in cells), flush_gap=1)
    )
    rest = len(serving["rows"]) - len(shown(serving))
    more = f"and {rest} more (--json has all); " if rest > 0 else ""
    left_out = (
        ""
        if len(names) == len(SERVING_COLUMNS)
        else f"; {_WIDE} columns or more show memory and streams too"
    )
    console.print(
        f"[dim]{more}$/M: a million tokens at this traffic, always on; GB: weights"
        f" alone{left_out}[/]"
    )
    for words in serving["assumptions"]:
        console.print(f"[dim]{escape(words)}[/]")


def _draw_sources(console: Console, view: Row) -> None:
    console.print(f"\n[bold]Prices[/]: {escape(view['prices']['words'])}")
    best = view["best"]
    if best:
        if best["kind"] in ("spot", "on-demand"):
            console.print(f"[dim]the one above: {escape(_price_words(best))}[/]")
        console.print(f"[bold]Confidence[/]: {escape(best['confidence'])}")
    for note in view["notes"]:
        if note.endswith(view["job"]["lengths_source"]):
            continue
        console.print(f"[dim]{escape(note)}[/]")
    console.print(f"[bold]Assumptions[/]: {escape('; '.join(view['assumptions']))}")


def _price_words(row: Row) -> str:
    if not has_price(row):
        return "none is given (where.usd_per_hour)"
    price = "" if row["usd_per_hour"] is None else f"{say_usd(row['usd_per_hour'])} an hour, "
    if row["kind"] in ("here", "own"):
        return f"{price}{row['price_source']}"
    where = " ".join(
        dict.fromkeys(word for word in (row["zone"] or row["region"], row["instance"]) if word)
    )
    return f"{price}{where}, read {row['price_date']} from {row['price_source']}"


# ---- small drawings ----


def _draw_pairs(console: Console, facts: Mapping[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, words in facts.items():
        table.add_row(f"  [dim]{name}[/]", escape(words))
    console.print(table)


def _draw_bars(
    console: Console, parts: Mapping[str, float], say: Callable[[float], str], whole: float
) -> None:
    """A bar for each part, as long as its share."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=16)
    table.add_column(no_wrap=True, justify="right", min_width=11)
    table.add_column(no_wrap=True, justify="right", min_width=4)
    table.add_column(no_wrap=True)
    for name, value in sorted(parts.items(), key=lambda item: (item[0] == "free", -item[1])):
        share = value / whole if whole else 0.0
        bar = _BAR * round(share * _BAR_WIDTH)
        colour = "dim" if name == "free" else "cyan"
        percent = f"{share * 100:.0f} %" if share >= 0.005 else "<1 %"
        table.add_row(f"  {escape(name)}", say(value), percent, f"[{colour}]{bar or '·'}[/]")
    console.print(table)


def _gib(n_bytes: float) -> str:
    gib = n_bytes / 2**30
    return f"{gib:.0f}" if gib >= 9.95 else f"{gib:.1f}"
