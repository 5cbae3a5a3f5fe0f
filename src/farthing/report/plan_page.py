"""A plan as one HTML page that needs nothing else: styles and drawings are in it, no script, nothing is loaded.

Gets the view of `plan_view` and draws it; every word of it is escaped. Refuses to compute figures of its own, to write
files, and to name an address that a browser would open by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farthing.report import page
from farthing.report.page import escape
from farthing.report.plan_savings import methods_in_words
from farthing.report.plan_scatter import cost_against_time
from farthing.report.plan_services import service_lines
from farthing.report.plan_serving import COLUMNS, serving_cells, shown
from farthing.report.plan_words import (
    break_even_words,
    comparison_names,
    has_price,
    limits_in_words,
    micro_batches_in_words,
    saved_in_words,
    say_cost,
    say_short,
    summary,
    ways_out,
)
from farthing.units import plural, say_bytes, say_count, say_seconds, say_usd

Row = Mapping[str, Any]
_N_SHOWN, _N_MEMORY = 20, 14
_STYLE = """
svg .front{fill:none;stroke:var(--c1);stroke-width:1.5}
svg .whisker{stroke:var(--soft);stroke-width:1;opacity:.75}
svg .leader{stroke:var(--soft);stroke-width:.8}
svg .demand{fill:var(--c1);stroke:var(--c1)}
svg .spot{fill:var(--c2);stroke:var(--c2)}
svg .own{fill:var(--c3);stroke:var(--c3)}
svg .dot{opacity:.6}
svg .marked{opacity:1}
.key i.round{border-radius:50%}
"""


def plan_page(view: Row) -> str:
    """The whole page."""
    rows = view["plans"]
    best = view["best"] or (rows[0] if rows else None)
    parts = [
        "<h1>farthing plan</h1>",
        f'<p class="answer">{escape(view["answer"])}</p>',
        f'<p class="soft">{escape(summary(view))}</p>',
        f'<p class="soft">Lengths: {escape(view["job"]["lengths_source"])}.{_limits(view)}</p>',
    ]
    parts.append(_compared(view))
    if best is not None:
        parts += [_facts(best), cost_against_time(rows, best), _memory(rows), _components(best)]
        parts.append(_plans(rows))
    if view["best"] is None:
        parts.append(page.listed("The nearest ways", ways_out(view), "ol"))
    parts += [_also(view), _savings(view), _own(view), _serving(view), _why_not(view), _sources(view, best)]
    title = f"farthing plan: {view['job']['model']}"
    return page.document(title, parts, f"farthing {view['version']}, {view['date']}", _STYLE)


# ---- the best in figures ----


def _limits(view: Row) -> str:
    words = limits_in_words(view)
    return f" Limits: {escape(words)}." if words else ""


def _facts(best: Row) -> str:
    low, usd, high = best["usd_range"]
    from_h, _, to_h = best["hours_range"]
    memory, spot = best["memory"], best["spot"]
    cost = (say_cost(usd), f"{say_cost(low)} to {say_cost(high)}") if has_price(best) else ("?", "no price is given")
    facts = [
        ("Cost", *cost),
        ("Time", say_seconds(best["wall_s"]), f"{say_seconds(from_h * 3600)} to {say_seconds(to_h * 3600)}"),
        ("Memory", say_bytes(memory["needed_bytes"]), f"of {say_bytes(memory['capacity_bytes'])}"),
        ("Speed", f"{say_count(best['step']['tokens_per_s'])} tokens/s", "of the data, without padding"),
    ]
    if spot:
        facts.append(
            ("Interruptions", f"{spot['n_interruptions']:.1f}", f"saved every {say_seconds(spot['save_every_s'])}")
        )
    if best["chance"] is not None:
        facts.append(("In time", f"{best['chance']:.0%}", "chance to meet the deadline"))
    return page.facts(facts)


# ---- bars ----


def _memory(rows: Sequence[Row]) -> str:
    """The memory of the best plan of each GPU, against what the GPU has."""
    first: dict[tuple[str, int], Row] = {}
    for row in rows:
        first.setdefault((row["gpu"], row["n_gpus"]), row)
    shown = list(first.values())[:_N_MEMORY]
    names = page.in_order({name for row in shown for name in row["memory"]["parts"]})
    body = []
    for row in shown:
        memory = row["memory"]
        capacity = memory["capacity_bytes"]
        low, needed, high = memory["range_bytes"]
        several = f"{row['n_gpus']}x " if row["n_gpus"] > 1 else ""
        recipe = f"{row['recipe']['micro_batch_tokens']:,} tokens, {row['recipe']['checkpointing']}"
        figures = (say_bytes(needed), f"{say_bytes(low)} to {say_bytes(high)}", say_bytes(capacity))
        bar = f'<td class="bar">{page.stack(memory["parts"], capacity)}</td>'
        name = f'<th scope="row" class="k">{escape(several + row["gpu"])}</th>'
        body.append(f"<tr>{name}{bar}{page.cells('n', *figures)}{page.cells('k', recipe)}</tr>")
    head = page.head("GPU", "", "#needed", "#range", "#there", "micro-batch, checkpointing")
    caption = (
        "Each bar is the whole memory of its GPU, grey where free. Of the recipes that fit, the quickest is taken."
    )
    return (
        "<h2>Memory of one GPU</h2>\n"
        + page.wide("Memory", f"<table><caption>{caption}</caption>{head}{page.body(body)}</table>")
        + page.key(names, free=True)
    )


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
    cells = []
    for title, parts, say, whole in tables:
        body = []
        for name, value in sorted(parts.items(), key=lambda item: -item[1]):
            share = value / whole if whole else 0.0
            bar = page.stack({name: value}, whole)
            cells_of = page.cells("n", say(value), page.percent(share))
            body.append(f'<tr><th scope="row">{escape(name)}</th><td class="bar">{bar}</td>{cells_of}</tr>')
        words = f"{title}: {say(whole)}"
        head = page.head("part", "", "#amount", "#share")
        cells.append(page.wide(title, f"<table><caption>{escape(words)}</caption>{head}{page.body(body)}</table>"))
    recipe = best["recipe"]
    words = (
        f"{recipe['words']}; {recipe['optimizer']}; a step is {micro_batches_in_words(recipe)}; a checkpoint "
        f"every {say_seconds(best['save_every_s'])}. {best['confidence'][:1].upper()}{best['confidence'][1:]}."
    )
    return (
        f'<h2>Where it goes: {escape(best["name"])}</h2>\n<p class="soft">{escape(words)}</p>\n'
        f'<div class="two">{"".join(cells)}</div>'
    )


# ---- tables ----


def _plans(rows: Sequence[Row]) -> str:
    head = page.head(
        "#rank", "where", "GPU", "kind", "#dollars", "#range", "#time", "#GiB", "#tokens/s", "why this rank"
    )
    first = page.wide("Choices", f"<table>{head}{page.body(_plan_row(row) for row in rows[:_N_SHOWN])}</table>")
    more = ""
    if len(rows) > _N_SHOWN:
        rest = page.wide("More choices", f"<table>{head}{page.body(_plan_row(row) for row in rows[_N_SHOWN:])}</table>")
        more = f"<details><summary>{plural(len(rows) - _N_SHOWN, 'more choice')}</summary>{rest}</details>"
    note = '<p class="soft">* no other choice is both cheaper and sooner. (+n): n more offers elsewhere.</p>'
    return f"<h2>Choices</h2>\n{note}\n{first}{more}"


def _plan_row(row: Row) -> str:
    low, usd, high = row["usd_range"]
    memory = row["memory"]
    several = f"{row['n_gpus']}x " if row["n_gpus"] > 1 else ""
    kind = row["kind"] if not row["spot"] else f"spot, {row['spot']['n_interruptions']:.1f} stops"
    dollars, between = (say_cost(usd), f"{say_cost(low)[1:]} to {say_cost(high)[1:]}") if has_price(row) else ("?", "")
    also = f" (+{len(row['also_at'])})" if row["also_at"] else ""
    place = ", ".join(dict.fromkeys(word for word in (row["provider"], row["zone"] or row["region"]) if word)) + also
    star = "*" if row["on_front"] else ""
    gib = f"{memory['needed_bytes'] / 2**30:.1f} of {memory['capacity_bytes'] / 2**30:.0f}"
    speed = say_count(row["step"]["tokens_per_s"])
    return (
        f"<tr>{page.cells('n', str(row['rank']) + star)}{page.cells('k', place, several + row['gpu'], kind)}"
        f"{page.cells('n', dollars, between, say_seconds(row['wall_s']), gib, speed)}{page.cells('words', row['why'])}</tr>"
    )


def _why_not(view: Row) -> str:
    if not view["rejected"]:
        return ""
    body = []
    for one in view["rejected"]:
        several = f"{one['n_gpus']}x " if one["n_gpus"] > 1 else ""
        price = "" if one["usd_per_hour"] is None else say_usd(one["usd_per_hour"])
        name = f'<th scope="row">{escape(several + one["gpu"])}</th>'
        figures = page.cells("n", f"{one['n_offers']:,}", price)
        body.append(
            f"<tr>{name}{page.cells('words', one['reason'], one['change'])}{page.cells('k', one['kind'])}{figures}</tr>"
        )
    head = page.head("GPU", "why not", "what would let it in", "kind", "#offers", "#from, an hour")
    n = sum(one["n_offers"] for one in view["rejected"])
    return f"<h2>Why not the other {plural(n, 'offer')}</h2>\n" + page.wide(
        "Why not", f"<table>{head}{page.body(body)}</table>"
    )


def _also(view: Row) -> str:
    words = []
    if view["here"]:
        words.append(f"{view['here']['name']}: {view['here']['words']}")
    if view["sooner"]:
        words.append(f"sooner: {view['sooner']['words']}")
    if view["spot_or_not"]:
        words.append(f"spot or not: {view['spot_or_not']['words']}")
    if view["two_or_one"]:
        words.append(f"two cheap or one dear: {view['two_or_one']['words']}")
    lines = service_lines(view)
    return page.listed("Other ways", words) + (page.listed(lines[0], lines[1:]) if lines else "")


def _compared(view: Row) -> str:
    comparison = view.get("comparison")
    if comparison is None:
        return ""
    body = [
        f'<tr><th scope="row">{escape(cells[0])}</th>{page.cells("n", *cells[1:])}</tr>'
        for cells in comparison["table"]
    ]
    head = page.head("", *(f"#{name}" for name in comparison_names(comparison)), "#ratio")
    table = page.wide("Side by side", f"<table>{head}{page.body(body)}</table>")
    return f"<h2>Side by side</h2>\n<p>{escape(comparison['words'])}</p>\n{table}"


def _own(view: Row) -> str:
    words = []
    for own in view["own"]:
        words.append(f"{own['name']}: {own['words']}")
        if own["price_usd"] and own["total_usd"] is not None:
            words += [break_even_words(own, one) for one in own["against"]]
    text = page.listed("Own or buy", words)
    years = view["years"]
    if years:
        later = years["three_years_usd"]
        body = [
            f'<tr><th scope="row">{escape(name)}</th>'
            f"{page.cells('n', say_cost(usd), say_cost(later[name]), saved_in_words(years, name))}</tr>"
            for name, usd in years["one_year_usd"].items()
        ]
        caption = f"{years['runs_per_month']:g} runs a month"
        head = page.head("way", "#a year", "#three years", "#saved in a year")
        text += "\n<h2>A project</h2>\n" + page.wide(
            "A project", f"<table><caption>{caption}</caption>{head}{page.body(body)}</table>"
        )
        text += "".join(f'<p class="soft">{escape(note)}</p>' for note in years["notes"])
    return text


def _savings(view: Row) -> str:
    savings = view["savings"]
    words = [] if savings is None else [savings["words"], *(one["words"] for one in savings["rungs"])]
    if view["methods"]:
        words.append(f"by method: {methods_in_words(view['methods'])}")
    if view["runs"] is not None:
        words.append(f"{plural(view['runs']['n_runs'], 'run')}: {'; '.join(view['runs']['words'])}")
    return page.listed("What each choice saves", words)


def _serving(view: Row) -> str:
    serving = view["serving"]
    if serving is None:
        return ""
    body = []
    for row in shown(serving):
        first, *rest = serving_cells(row)
        body.append(
            f'<tr><th scope="row">{escape(first)}</th>{page.cells("k", rest[0])}{page.cells("n", *rest[1:])}</tr>'
        )
    table = page.wide("Serving", f"<table>{page.head(*COLUMNS)}{page.body(body)}</table>") if body else ""
    notes = "".join(f'<p class="soft">{escape(words)}</p>' for words in serving["assumptions"])
    return f"<h2>Serving</h2>\n<p>{escape(serving['answer'])}</p>\n{table}{notes}"


def _sources(view: Row, best: Row | None) -> str:
    words = [view["prices"]["words"]]
    if best is not None and best["kind"] in ("spot", "on-demand"):
        words.append(f"the price of {best['name']}: {best['price_source']}, {best['price_date']}")
    words += list(view["notes"])
    return page.listed("Assumptions", view["assumptions"]) + "\n" + page.listed("Sources", words)
