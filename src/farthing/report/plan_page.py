"""A plan as one HTML page that needs nothing else: styles and drawings are in it, no script,
nothing is loaded.

Gets the view of `plan_view` and draws it; every word of it is escaped. Refuses to compute figures
of its own, to write files, and to name an address that a browser would open by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farthing.report import page
from farthing.report.plan_savings import methods_in_words
from farthing.report.plan_scatter import cost_against_time
from farthing.report.plan_services import service_lines
from farthing.report.plan_serving import COLUMNS, serving_cells, shown
from farthing.report.plan_words import (
    YEARS,
    break_even_words,
    comparison_names,
    has_price,
    limits_in_words,
    machine_of,
    micro_batches_in_words,
    other_ways,
    say_cost,
    say_short,
    summary,
    ways_out,
    year_rows,
)
from farthing.units import plural, say_bytes, say_count, say_seconds, say_usd

Row = Mapping[str, Any]
_N_SHOWN, _N_MEMORY = 20, 14


def plan_page(view: Row) -> str:
    """The whole page."""
    rows, limits = view["plans"], limits_in_words(view)
    best = view["best"] or (rows[0] if rows else None)
    parts = [
        "<h1>farthing plan</h1>",
        page.paragraph(view["answer"], "answer"),
        page.paragraph(summary(view)),
        page.paragraph(
            f"Lengths: {view['job']['lengths_source']}." + (f" Limits: {limits}." if limits else "")
        ),
        _compared(view),
    ]
    if best is not None:
        parts += [
            _facts(best),
            cost_against_time(rows, best),
            _memory(rows),
            _components(best),
            _plans(rows),
        ]
    if view["best"] is None:
        parts.append(page.listed("The nearest ways", ways_out(view), "ol"))
    lines = service_lines(view)
    parts.append(
        page.listed("Other ways", [f"{name}: {words}" for name, words in other_ways(view).items()])
    )
    parts.append(page.listed(lines[0], lines[1:]) if lines else "")
    parts += [_savings(view), _own(view), _serving(view), _why_not(view), _sources(view, best)]
    title = f"farthing plan: {view['job']['model']}"
    return page.document(
        title, parts, f"farthing {view['version']}, {view['date']}", "plan_page.css"
    )


# ---- the best in figures ----


def _facts(best: Row) -> str:
    low, usd, high = best["usd_range"]
    from_h, _, to_h = best["hours_range"]
    memory, spot = best["memory"], best["spot"]
    cost = (
        (say_cost(usd), f"{say_cost(low)} to {say_cost(high)}")
        if has_price(best)
        else ("?", "no price is given")
    )
    facts = [
        ("Cost", *cost),
        (
            "Time",
            say_seconds(best["wall_s"]),
            f"{say_seconds(from_h * 3600)} to {say_seconds(to_h * 3600)}",
        ),
        ("Memory", say_bytes(memory["needed_bytes"]), f"of {say_bytes(memory['capacity_bytes'])}"),
        (
            "Speed",
            f"{say_count(best['step']['tokens_per_s'])} tokens/s",
            "of the data, without padding",
        ),
    ]
    if spot:
        saved = f"saved every {say_seconds(spot['save_every_s'])}"
        facts.append(("Interruptions", f"{spot['n_interruptions']:.1f}", saved))
    if best["chance"] is not None:
        facts.append(("In time", f"{best['chance']:.0%}", "chance to meet the deadline"))
    return page.facts(facts)


# ---- bars ----


def _memory(rows: Sequence[Row]) -> str:
    """The memory of the best plan of each GPU, against what the GPU has."""
    first: dict[tuple[str, int], Row] = {}
    for row in rows:
        first.setdefault((row["gpu"], row["n_gpus"]), row)
    best_of = list(first.values())[:_N_MEMORY]
    cells = []
    for row in best_of:
        memory, recipe = row["memory"], row["recipe"]
        capacity, (low, needed, high) = memory["capacity_bytes"], memory["range_bytes"]
        figures = (say_bytes(needed), f"{say_bytes(low)} to {say_bytes(high)}", say_bytes(capacity))
        computed = f"{recipe['micro_batch_tokens']:,} tokens, {recipe['checkpointing']}"
        cells.append(
            (machine_of(row["n_gpus"], row["gpu"]), (memory["parts"], capacity), *figures, computed)
        )
    heads = ("=GPU", "|", "#needed", "#range", "#there", "=micro-batch, checkpointing")
    words = (
        "Each bar is the whole memory of its GPU, grey where free. Of the recipes that fit, the"
        " quickest is taken."
    )
    names = page.colours({name for row in best_of for name in row["memory"]["parts"]})
    table = page.table("Memory", heads, cells, words)
    return page.heading("Memory of one GPU") + table + page.key(names | {"free": "free"})


def _components(best: Row) -> str:
    """Where the seconds, the dollars and the time of a step of a plan go."""
    tables = [
        ("Time", best["seconds"], say_seconds, best["wall_s"]),
        ("Dollars", best["usd"], say_usd, best["total_usd"]),
        ("One step", best["step"]["parts"], say_short, best["step"]["seconds"]),
        ("Memory", best["memory"]["parts"], say_bytes, best["memory"]["needed_bytes"]),
    ]
    if not has_price(best):
        del tables[1]
    drawn = []
    for title, parts, say, whole in tables:
        rows = [
            (
                name,
                ({name: value}, whole),
                say(value),
                page.percent(value / whole if whole else 0.0),
            )
            for name, value in sorted(parts.items(), key=lambda item: -item[1])
        ]
        drawn.append(
            page.table(title, ("part", "|", "#amount", "#share"), rows, f"{title}: {say(whole)}")
        )
    recipe = best["recipe"]
    words = (
        f"{recipe['words']}; {recipe['optimizer']}; a step is {micro_batches_in_words(recipe)}; a"
        f" checkpoint every {say_seconds(best['save_every_s'])}."
        f" {best['confidence'][:1].upper()}{best['confidence'][1:]}."
    )
    where = page.heading(f"Where it goes: {best['name']}") + page.paragraph(words)
    return f'{where}<div class="two">{"".join(drawn)}</div>'


# ---- tables ----


def _plans(rows: Sequence[Row]) -> str:
    heads = (
        *("#rank", "=where", "=GPU", "=kind", "#dollars", "#range", "#time", "#GiB", "#tokens/s"),
        "why this rank",
    )
    first, rest = (
        page.table(name, heads, map(_plan_cells, some))
        for name, some in (("Choices", rows[:_N_SHOWN]), ("More choices", rows[_N_SHOWN:]))
    )
    more = (
        f"<details><summary>{plural(len(rows) - _N_SHOWN, 'more choice')}</summary>{rest}</details>"
    )
    note = "* no other choice is both cheaper and sooner. (+n): n more offers elsewhere."
    return (
        page.heading("Choices")
        + page.paragraph(note)
        + first
        + (more if len(rows) > _N_SHOWN else "")
    )


def _plan_cells(row: Row) -> tuple[str, ...]:
    low, usd, high = row["usd_range"]
    memory = row["memory"]
    kind = row["kind"] if not row["spot"] else f"spot, {row['spot']['n_interruptions']:.1f} stops"
    dollars, between = (
        (say_cost(usd), f"{say_cost(low)[1:]} to {say_cost(high)[1:]}")
        if has_price(row)
        else ("?", "")
    )
    also = f" (+{len(row['also_at'])})" if row["also_at"] else ""
    place = (
        ", ".join(
            dict.fromkeys(word for word in (row["provider"], row["zone"] or row["region"]) if word)
        )
        + also
    )
    gib = f"{memory['needed_bytes'] / 2**30:.1f} of {memory['capacity_bytes'] / 2**30:.0f}"
    rank, speed = (
        f"{row['rank']}{'*' if row['on_front'] else ''}",
        say_count(row["step"]["tokens_per_s"]),
    )
    machine, time = machine_of(row["n_gpus"], row["gpu"]), say_seconds(row["wall_s"])
    return rank, place, machine, kind, dollars, between, time, gib, speed, row["why"]


def _why_not(view: Row) -> str:
    if not view["rejected"]:
        return ""
    rows = [
        (
            machine_of(one["n_gpus"], one["gpu"]),
            *(one["reason"], one["change"], one["kind"], f"{one['n_offers']:,}"),
            "" if one["usd_per_hour"] is None else say_usd(one["usd_per_hour"]),
        )
        for one in view["rejected"]
    ]
    heads = ("GPU", "why not", "what would let it in", "=kind", "#offers", "#from, an hour")
    n = sum(one["n_offers"] for one in view["rejected"])
    return page.heading(f"Why not the other {plural(n, 'offer')}") + page.table(
        "Why not", heads, rows
    )


def _compared(view: Row) -> str:
    comparison = view.get("comparison")
    if comparison is None:
        return ""
    heads = ("", *(f"#{name}" for name in comparison_names(comparison)), "#ratio")
    table = page.table("Side by side", heads, comparison["table"])
    return page.heading("Side by side") + page.paragraph(comparison["words"], "") + table


def _own(view: Row) -> str:
    words = []
    for own in view["own"]:
        words.append(f"{own['name']}: {own['words']}")
        if own["price_usd"] and own["total_usd"] is not None:
            words += [break_even_words(own, one) for one in own["against"]]
    text, years = page.listed("Own or buy", words), view["years"]
    if years:
        caption = f"{years['runs_per_month']:g} runs a month"
        text += page.heading("A project") + page.table(
            "A project", YEARS, year_rows(years), caption
        )
        text += "".join(map(page.paragraph, years["notes"]))
    return text


def _savings(view: Row) -> str:
    savings = view["savings"]
    words = (
        [] if savings is None else [savings["words"], *(one["words"] for one in savings["rungs"])]
    )
    if view["methods"]:
        words.append(f"by method: {methods_in_words(view['methods'])}")
    if view["runs"] is not None:
        words.append(f"{plural(view['runs']['n_runs'], 'run')}: {'; '.join(view['runs']['words'])}")
    return page.listed("What each choice saves", words)


def _serving(view: Row) -> str:
    serving = view["serving"]
    if serving is None:
        return ""
    rows = [serving_cells(row) for row in shown(serving)]
    table = page.table("Serving", COLUMNS, rows) if rows else ""
    answer = page.heading("Serving") + page.paragraph(serving["answer"], "")
    return answer + table + "".join(map(page.paragraph, serving["assumptions"]))


def _sources(view: Row, best: Row | None) -> str:
    words = [view["prices"]["words"]]
    if best is not None and best["kind"] in ("spot", "on-demand"):
        words.append(f"the price of {best['name']}: {best['price_source']}, {best['price_date']}")
    words += list(view["notes"])
    return page.listed("Assumptions", view["assumptions"]) + "\n" + page.listed("Sources", words)
