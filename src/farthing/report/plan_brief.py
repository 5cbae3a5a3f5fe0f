"""The short answer of `farthing plan`, at 80 columns: what to take, what it costs, what to check,
what to do next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from farthing.planner.ranking import TIE
from farthing.planner.types import AGED_PRICE_DAYS, OLD_PRICE_DAYS
from farthing.report.plan_beside import UNTRIED_ALONE
from farthing.report.plan_words import (
    has_price,
    hours_in_words,
    limits_in_words,
    machine_of,
    must_buy_more,
    say_cost,
    usd_in_words,
    what_to_do,
)
from farthing.report.safe import escape, fitted_table, widest
from farthing.units import plural, say_bytes, say_count

Row = Mapping[str, Any]
N_SHOWN = 5
ON_COMMAND_LINE = "given on the command line: "
_NUMBERS, _WHY = ("#", "$", "time", "wait"), "why this rank"
_CUTS = {_WHY: 40, "at": 6, "machine": 12}
"""Columns that are cut where the terminal is narrow, and to what; the first is left out where it
has no room.
"""


def draw_brief(
    console: Console, view: Row, next_step: str = "", n_shown: int | None = None
) -> None:
    """The answer, the first choices, what was supposed, what to check, and the command that is
    `next_step`.
    """
    best, job, n_shown = view["best"], view["job"], n_shown or N_SHOWN
    headline = view["answer"] if best is None else f"{what_to_do(best)}: {usd_in_words(best)}"
    console.print(f"[bold]{escape(headline)}[/]")
    if best is not None:
        console.print(escape(_time_and_memory(best)))
    console.print(f"[dim]{escape(_job_words(job))}[/]")
    if limits := limits_in_words(view):
        chance = f"; chance {best['chance']:.0%}" if best and best["chance"] is not None else ""
        console.print(f"[dim]limits: {escape(limits + chance)}[/]")
    if best is None:
        return
    shown = view["plans"][:n_shown]
    here = next((one for one in view["plans"] if one["kind"] == "here"), None)
    console.print()
    draw_choices(console, shown if here is None or here in shown else [*shown, here])
    for words in (_order(view), _the_rest(view, shown)):
        console.print(f"[dim]{escape(words)}[/]")
    console.print()
    facts = Table.grid(padding=(0, 2))
    supposed = re.sub(r" \([^()]*\)", "", best["confidence"])
    facts.add_row(
        "[bold]supposed[/]",
        escape(f"{job['lengths_source'].removeprefix(ON_COMMAND_LINE)}; {supposed}"),
    )
    for note in view["data_notes"]:
        facts.add_row("[bold]data[/]", escape(note))
    if best["recipe"]["to_set"]:
        what_it_does = (
            ": several GPUs share the run"
            if best["n_gpus"] > 1
            else ": weights stay in main memory"
        )
        facts.add_row("[bold]set[/]", escape(" and ".join(best["recipe"]["to_set"]) + what_it_does))
    if best["recipe"]["precision_note"]:
        facts.add_row("[bold]precision[/]", escape(best["recipe"]["precision_note"]))
    facts.add_row("[bold]check[/]", escape(to_check(best, job)))
    oldest = max(one["price_age_days"] for one in shown)
    if oldest > OLD_PRICE_DAYS:
        words = f"up to {oldest} days old: `farthing prices update` reads newer ones"
        facts.add_row("[bold]prices[/]", escape(words))
    console.print(facts)
    if next_step:
        console.print(f"[bold]next[/]      {escape(next_step)}", soft_wrap=True)


def _time_and_memory(best: Row) -> str:
    waiting_s, memory = best["seconds"].get("waiting", 0.0), best["memory"]
    waiting = f", {span(waiting_s, waiting_s)} of it waiting" if waiting_s >= 60 else ""
    needed, there = (say_bytes(memory[name]) for name in ("needed_bytes", "capacity_bytes"))
    unit = f" {there.rpartition(' ')[2]}"
    kept = f", {say_bytes(memory['host_bytes'])} of main memory" if memory["host_bytes"] else ""
    return f"{hours_in_words(best)}{waiting}; {needed.removesuffix(unit)} of {there}{kept}"


def _job_words(job: Row) -> str:
    model = job["model"].rstrip("/").rpartition("/")[2]
    steps = f"{plural(job['n_steps'], 'step')} of {job['global_batch']}"
    examples = plural(job["n_examples"], "example")
    return (
        f"{model}, {job['method']}, {job['task']}: {examples}, {steps},"
        f" {say_count(job['n_tokens'])} tokens"
    )


def _order(view: Row) -> str:
    rows = view["plans"]
    cheapest = min(one["total_usd"] for one in rows if has_price(one) or one is rows[0])
    first = view["best"]["total_usd"] if view["best"] else cheapest
    but = (
        "; 1 is the first to be had at its price"
        if first > cheapest
        else f", within {TIE:.0%} or a cent by time"
    )
    return f"By dollars{but}. Ranges: 4 of 5 runs."


def _the_rest(view: Row, shown: Sequence[Row]) -> str:
    n_rest = len(view["plans"]) - len(shown)
    n_refused = sum(one["n_offers"] for one in view["rejected"])
    parts = [f"{plural(n_rest, 'more choice')}"] if n_rest else []
    parts += [f"{plural(n_refused, 'offer')} refused"] if n_refused else []
    return f"{', '.join(parts)}: --all" if parts else ""


def to_check(best: Row, job: Row) -> str:
    """The one thing that is most likely to make the plan wrong."""
    cap, high_usd = job["limits"]["max_usd"], best["usd_range"][2]
    if cap is not None and high_usd > cap:
        return (
            f"the cap: it may come to {say_cost(high_usd)}; at {say_cost(cap)} the run saves and"
            " stops"
        )
    if best["memory"]["is_tight"]:
        return (
            f"memory: up to {say_bytes(best['memory']['range_bytes'][2])} may be needed; `farthing"
            " probe` measures it"
        )
    if best["recipe"]["to_set"]:
        return (
            UNTRIED_ALONE
            if best["n_gpus"] == 1
            else "several GPUs: farthing was not run on several real ones so far"
        )
    if not job["lengths_are_exact"] and "tokenized" not in job["lengths_source"]:
        are_given = job["lengths_source"].startswith(ON_COMMAND_LINE)
        return "the lengths of your examples: plan with the data" + (
            "" if are_given else ", or --mean-tokens"
        )
    if must_buy_more(best):
        usd = say_cost(best["total_usd"])
        return f"the price: you have to buy {say_cost(best['up_front_usd'])}; the run uses {usd}"
    if best["price_is"]:
        return "the price: the lowest of a marketplace; that machine may be taken"
    if best["spot"]:
        return (
            f"spot: about {best['spot']['n_interruptions']:.1f} interruptions; set output_store to"
            " keep checkpoints"
        )
    if not has_price(best):
        return "the price of this machine: none is given (where.usd_per_hour)"
    return "the speed: `farthing probe` measures it in a minute on the machine"


# ---- the table of choices ----


def draw_choices(console: Console, choices: Sequence[Row]) -> None:
    """A line a choice; a column that says nothing is left out."""
    rows = [_cells(one) for one in choices]
    if not rows:
        return
    names = [name for name in rows[0] if name != _WHY and any(row[name] for row in rows)]
    if sum(widest(name, rows) + 2 for name in names) + _CUTS[_WHY] <= console.width:
        names.append(_WHY)
    console.print(fitted_table(console.width, names, rows, _NUMBERS, _CUTS))


def _cells(one: Row) -> dict[str, str]:
    low, usd, high = (_bare_usd(value) for value in one["usd_range"])
    soon, hours, late = (value * 3600 for value in one["hours_range"])
    waiting_s = one["seconds"].get("waiting", 0.0)
    machine = "CPU" if one["is_cpu"] else machine_of(one["n_gpus"], one["gpu"])
    return {
        "#": f"{one['rank']}{'*' if one['on_front'] else ''}",
        "machine": machine + (" spot" if one["spot"] else ""),
        "at": one["provider"] if one["kind"] != "here" else "here",
        "$": usd if has_price(one) else "?",
        "range": f"{low}-{high}" if has_price(one) else "",
        "time": span(hours, hours),
        "range ": span(soon, late),
        "wait": span(waiting_s, waiting_s) if waiting_s >= 60 else "",
        "price, age": _price_words(one),
        _WHY: one["why"],
    }


def _price_words(one: Row) -> str:
    """`from`, `389d`, `buy $9.99`: whose price it is, its age where it is old, what has to be
    bought.
    """
    words = [one["price_is"]] if one["price_is"] else []
    if one["price_age_days"] >= AGED_PRICE_DAYS:
        words.append(f"{one['price_age_days']}d")
    if must_buy_more(one):
        words.append(f"buy {say_cost(one['up_front_usd'])}")
    return " ".join(words)


def _bare_usd(usd: float) -> str:
    return say_cost(usd).removeprefix("$")


def span(low_s: float, high_s: float) -> str:
    """`27 s`, `19-36 min`, `2.6-3.3 h`, `1.3-12 h`: one unit for both ends, that of the later one."""  # noqa: E501
    unit, size = next(
        (each for each in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)) if high_s >= 2 * each[1]),
        ("s", 1.0),
    )
    low, high = (
        f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"
        for value in (low_s / size, high_s / size)
    )
    return f"{high} {unit}" if low == high else f"{low}-{high} {unit}"
