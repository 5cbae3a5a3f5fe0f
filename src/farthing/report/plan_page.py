"""A plan as one HTML page that needs nothing else: styles and drawings are in it, no script, nothing is loaded.

Gets the view of `plan_view` and draws it; every word of it is escaped. Refuses to compute figures of its own, to write
files, and to name an address that a browser would open by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from farthing.report.page_text import escape
from farthing.report.plan_savings import methods_in_words
from farthing.report.plan_scatter import cost_against_time
from farthing.report.plan_serving import COLUMNS, serving_cells, shown
from farthing.report.plan_words import (
    break_even_words,
    has_price,
    limits_in_words,
    micro_batches_in_words,
    say_cost,
    summary,
    ways_out,
)
from farthing.units import plural, say_bytes, say_count, say_seconds, say_usd

Row = Mapping[str, Any]
_NOT_YET = "need several GPUs: farthing was not run on any so far, and cannot train on those with fsdp yet"
_N_SHOWN, _N_MEMORY = 20, 14

_COLOURS = {
    **{"weights": 1, "optimizer": 2, "activations": 3, "gradients": 4, "logits": 5, "casts": 6, "working": 7},
    **{"training": 1, "setup": 2, "evaluation": 3, "lost work": 4, "restarts": 4, "download": 5, "checkpoints": 6},
    **{"waiting": 7, "matmul": 1, "attention": 3, "memory traffic": 2, "dequantization": 4, "communication": 7},
    **{"launch": 6, "data": 5, "compute": 1, "rounding": 2, "storage": 5, "egress": 6},
}
_STYLE = """
:root{color-scheme:light dark;--page:#fbfaf7;--card:#fff;--ink:#1d2125;--soft:#5b636d;--line:#d9d6ce;--grid:#e9e6de;
--c1:#3566ad;--c2:#cf7f1f;--c3:#2f8f6d;--c4:#b04a86;--c5:#7c5fc0;--c6:#6c8a22;--c7:#bf4740;--c8:#8b919a;--free:#ece9e1}
@media (prefers-color-scheme:dark){:root{--page:#15181b;--card:#1d2125;--ink:#e7e9ec;--soft:#a3abb5;--line:#363c43;
--grid:#2a2f35;--c1:#78a9e8;--c2:#eaae5c;--c3:#63c7a2;--c4:#de8abd;--c5:#b29cee;--c6:#a6c65d;--c7:#ec8781;--c8:#9aa1aa;
--free:#2a2f35}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:76rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1rem;font-weight:600;color:var(--soft);margin:0 0 .4rem}
h2{font-size:1.2rem;margin:2.4rem 0 .6rem}
p{margin:.4rem 0}
.answer{font-size:1.45rem;line-height:1.3;font-weight:600;margin:0 0 .6rem;overflow-wrap:anywhere}
.soft,figcaption,caption{color:var(--soft);font-size:.9rem}
caption{text-align:left;padding:0 0 .4rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;margin:1.2rem 0;padding:0}
.facts div{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}
.facts dt{color:var(--soft);font-size:.85rem}
.facts dd{margin:0;font-size:1.25rem;font-weight:600}
.facts small{display:block;font-size:.85rem;font-weight:400;color:var(--soft)}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}
.wide:focus-visible{outline:2px solid var(--c1)}
figure{margin:0}
figcaption{margin-top:.4rem}
svg{display:block;width:100%;min-width:40rem;height:auto}
svg text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--ink)}
svg .axis{fill:var(--soft)}
svg .grid{stroke:var(--grid)}
svg .front{fill:none;stroke:var(--c1);stroke-width:1.5}
svg .later{fill:none;stroke:var(--c8);stroke-width:1.2;stroke-dasharray:5 4}
svg .whisker{stroke:var(--soft);stroke-width:1;opacity:.75}
svg .leader{stroke:var(--soft);stroke-width:.8}
svg .halo{stroke:var(--card);stroke-width:4;paint-order:stroke;stroke-linejoin:round}
svg .demand{fill:var(--c1);stroke:var(--c1)}
svg .spot{fill:var(--c2);stroke:var(--c2)}
svg .own{fill:var(--c3);stroke:var(--c3)}
svg .several{fill:var(--card)}
svg .dot{opacity:.6}
svg .marked{opacity:1}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.28rem .75rem .28rem 0;vertical-align:top;border-bottom:1px solid var(--grid)}
th{font-weight:600}
thead th{color:var(--soft);font-size:.85rem;white-space:nowrap}
.n{text-align:right;white-space:nowrap}
.k{white-space:nowrap}
.words{min-width:13rem}
.not-yet td{color:var(--soft)}
.bar{width:45%;min-width:9rem;vertical-align:middle}
.stack{display:flex;height:.95rem;border-radius:.2rem;overflow:hidden;background:var(--free)}
.stack i{display:block;height:100%}
.c1{background:var(--c1)}.c2{background:var(--c2)}.c3{background:var(--c3)}.c4{background:var(--c4)}
.c5{background:var(--c5)}.c6{background:var(--c6)}.c7{background:var(--c7)}.c8{background:var(--c8)}
.free{background:var(--free);border:1px solid var(--line)}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;margin:.6rem 0 0;padding:0;font-size:.9rem}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:.15rem;margin-right:.35rem;vertical-align:-.05rem}
.key i.round{border-radius:50%}
.key i.hollow{background:none;border:2px solid var(--c8)}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:1rem;align-items:start}
details{margin-top:.6rem}
summary{cursor:pointer;color:var(--soft)}
ul,ol{padding-left:1.2rem}
li{overflow-wrap:anywhere}
@media (max-width:40rem){.answer{font-size:1.2rem}main{padding-top:1rem}.bar{min-width:6rem}th,td{padding-right:.6rem}}
@media print{.wide{overflow:visible}}
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
    if best is not None:
        parts += [_facts(best), cost_against_time(rows, best), _memory(rows), _components(best)]
        parts.append(_plans(rows))
    if view["best"] is None:
        parts.append(_list("The nearest ways", ways_out(view), "ol"))
    parts += [_also(view), _savings(view), _own(view), _serving(view), _why_not(view), _sources(view, best)]
    title = f"farthing plan: {view['job']['model']}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f'\n<p class="soft">farthing {escape(view["version"])}, {escape(view["date"])}</p>'
        + "\n</main>\n</body>\n</html>\n"
    )


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
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in facts
    )
    return f'<dl class="facts">{cells}</dl>'


# ---- bars ----


def _colour(name: str) -> str:
    return f"c{_COLOURS.get(name, 8)}"


def _stack(parts: Mapping[str, float], whole: float) -> str:
    """Parts side by side; what they leave of the whole stays free."""
    cells = "".join(
        f'<i class="{_colour(name)}" style="width:{100 * value / whole:.3f}%"></i>'
        for name, value in _in_order(parts)
        if value > 0 and whole > 0
    )
    return f'<div class="stack" aria-hidden="true">{cells}</div>'


def _in_order(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda item: (_COLOURS.get(item[0], 8), item[0]))


def _key(names: Iterable[str], free: bool = False) -> str:
    keys = [f'<li><i class="{_colour(name)}"></i>{escape(name)}</li>' for name in names]
    keys += ['<li><i class="free"></i>free</li>'] if free else []
    return f'<ul class="key">{"".join(keys)}</ul>'


def _memory(rows: Sequence[Row]) -> str:
    """The memory of the best plan of each GPU, against what the GPU has."""
    first: dict[tuple[str, int], Row] = {}
    for row in rows:
        first.setdefault((row["gpu"], row["n_gpus"]), row)
    shown = [row for row in first.values() if row["is_runnable"]][:_N_MEMORY] or list(first.values())[:_N_MEMORY]
    names = sorted({name for row in shown for name in row["memory"]["parts"]}, key=lambda n: (_COLOURS.get(n, 8), n))
    body = []
    for row in shown:
        memory = row["memory"]
        capacity = memory["capacity_bytes"]
        low, needed, high = memory["range_bytes"]
        several = f"{row['n_gpus']}x " if row["n_gpus"] > 1 else ""
        recipe = f"{row['recipe']['micro_batch_tokens']:,} tokens, {row['recipe']['checkpointing']}"
        figures = (say_bytes(needed), f"{say_bytes(low)} to {say_bytes(high)}", say_bytes(capacity))
        bar = f'<td class="bar">{_stack(memory["parts"], capacity)}</td>'
        name = f'<th scope="row" class="k">{escape(several + row["gpu"])}</th>'
        body.append(f"<tr>{name}{bar}{_cells('n', *figures)}{_cells('k', recipe)}</tr>")
    head = _head("GPU", "", "#needed", "#range", "#there", "micro-batch, checkpointing")
    caption = (
        "Each bar is the whole memory of its GPU, grey where free. Of the recipes that fit, the quickest is taken."
    )
    return (
        f"<h2>Memory of one GPU</h2>\n{_wide('Memory', f'<table><caption>{caption}</caption>{head}{_body(body)}</table>')}"
        + _key(names, free=True)
    )


def _components(best: Row) -> str:
    """Where the seconds, the dollars and the time of a step of a plan go."""
    tables = [
        ("Time", best["seconds"], say_seconds, best["wall_s"]),
        ("Dollars", best["usd"], say_usd, best["total_usd"]),
        ("One step", best["step"]["parts"], _say_short, best["step"]["seconds"]),
        ("Memory", best["memory"]["parts"], say_bytes, best["memory"]["needed_bytes"]),
    ]
    if not has_price(best):
        del tables[1]
    cells = []
    for title, parts, say, whole in tables:
        body = []
        for name, value in sorted(parts.items(), key=lambda item: -item[1]):
            share = value / whole if whole else 0.0
            bar = _stack({name: value}, whole)
            cells_of = _cells("n", say(value), _percent(share))
            body.append(f'<tr><th scope="row">{escape(name)}</th><td class="bar">{bar}</td>{cells_of}</tr>')
        words = f"{title}: {say(whole)}"
        head = _head("part", "", "#amount", "#share")
        cells.append(_wide(title, f"<table><caption>{escape(words)}</caption>{head}{_body(body)}</table>"))
    recipe = best["recipe"]
    words = (
        f"{recipe['words']}; {recipe['optimizer']}; a step is {micro_batches_in_words(recipe)}; a checkpoint "
        f"every {say_seconds(best['save_every_s'])}. {best['confidence'][:1].upper()}{best['confidence'][1:]}."
    )
    return (
        f'<h2>Where it goes: {escape(best["name"])}</h2>\n<p class="soft">{escape(words)}</p>\n'
        f'<div class="two">{"".join(cells)}</div>'
    )


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.005 else "<1 %"


def _say_short(seconds: float) -> str:
    return say_seconds(seconds) if seconds >= 1 else f"{seconds * 1000:,.1f} ms"


# ---- tables ----


def _plans(rows: Sequence[Row]) -> str:
    head = _head("#rank", "where", "GPU", "kind", "#dollars", "#range", "#time", "#GiB", "#tokens/s", "why this rank")
    first = _wide("Choices", f"<table>{head}{_body(_plan_row(row) for row in rows[:_N_SHOWN])}</table>")
    more = ""
    if len(rows) > _N_SHOWN:
        rest = _wide("More choices", f"<table>{head}{_body(_plan_row(row) for row in rows[_N_SHOWN:])}</table>")
        more = f"<details><summary>{plural(len(rows) - _N_SHOWN, 'more choice')}</summary>{rest}</details>"
    note = '<p class="soft">* no other choice is both cheaper and sooner. (+n): n more offers that differ only in their place. '
    note += f"Grey ones {escape(_NOT_YET)}.</p>" if any(not row["is_runnable"] for row in rows) else "</p>"
    return f"<h2>Choices</h2>\n{note}\n{first}{more}"


def _plan_row(row: Row) -> str:
    low, usd, high = row["usd_range"]
    memory = row["memory"]
    several = f"{row['n_gpus']}x " if row["n_gpus"] > 1 else ""
    kind = row["kind"] if not row["spot"] else f"spot, {row['spot']['n_interruptions']:.1f} stops"
    dollars, between = (say_cost(usd), f"{say_cost(low)[1:]} to {say_cost(high)[1:]}") if has_price(row) else ("?", "")
    also = f" (+{len(row['also_at'])})" if row["also_at"] else ""
    place = ", ".join(dict.fromkeys(word for word in (row["provider"], row["zone"] or row["region"]) if word)) + also
    not_yet = "" if row["is_runnable"] else ' class="not-yet"'
    star = "*" if row["on_front"] or row["on_runnable_front"] else ""
    gib = f"{memory['needed_bytes'] / 2**30:.1f} of {memory['capacity_bytes'] / 2**30:.0f}"
    speed = say_count(row["step"]["tokens_per_s"])
    return (
        f"<tr{not_yet}>{_cells('n', str(row['rank']) + star)}{_cells('k', place, several + row['gpu'], kind)}"
        f"{_cells('n', dollars, between, say_seconds(row['wall_s']), gib, speed)}{_cells('words', row['why'])}</tr>"
    )


def _why_not(view: Row) -> str:
    if not view["rejected"]:
        return ""
    body = []
    for one in view["rejected"]:
        several = f"{one['n_gpus']}x " if one["n_gpus"] > 1 else ""
        price = "" if one["usd_per_hour"] is None else say_usd(one["usd_per_hour"])
        name = f'<th scope="row">{escape(several + one["gpu"])}</th>'
        figures = _cells("n", f"{one['n_offers']:,}", price)
        body.append(
            f"<tr>{name}{_cells('words', one['reason'], one['change'])}{_cells('k', one['kind'])}{figures}</tr>"
        )
    head = _head("GPU", "why not", "what would let it in", "kind", "#offers", "#from, an hour")
    n = sum(one["n_offers"] for one in view["rejected"])
    return f"<h2>Why not the other {plural(n, 'offer')}</h2>\n" + _wide(
        "Why not", f"<table>{head}{_body(body)}</table>"
    )


def _also(view: Row) -> str:
    words = []
    if view["here"]:
        words.append(f"{view['here']['name']}: {view['here']['words']}")
    if view["sooner"]:
        words.append(f"sooner: {view['sooner']['words']}")
    if view["spot_or_not"]:
        words.append(f"spot or not: {view['spot_or_not']['words']}")
    for service in view["managed"]:
        if service["takes_the_model"]:
            words.append(
                f"{service['provider']}, {service['what']}: {say_cost(service['usd'])}, with its own recipe "
                f"(read {service['price_date']} from {service['price_source']})"
            )
    return _list("Other ways", words)


def _own(view: Row) -> str:
    words = []
    for own in view["own"]:
        words.append(f"{own['name']}: {own['words']}")
        if own["price_usd"] and own["total_usd"] is not None:
            words += [break_even_words(own, one) for one in own["against"]]
    text = _list("Own or buy", words)
    years = view["years"]
    if years:
        later = years["three_years_usd"]
        body = [
            f'<tr><th scope="row">{escape(name)}</th>{_cells("n", say_cost(usd), say_cost(later[name]))}</tr>'
            for name, usd in years["one_year_usd"].items()
        ]
        caption = f"{years['runs_per_month']:g} runs a month"
        head = _head("way", "#a year", "#three years")
        text += "\n<h2>A project</h2>\n" + _wide(
            "A project", f"<table><caption>{caption}</caption>{head}{_body(body)}</table>"
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
    return _list("What each choice saves", words)


def _serving(view: Row) -> str:
    serving = view["serving"]
    if serving is None:
        return ""
    body = []
    for row in shown(serving):
        first, *rest = serving_cells(row)
        body.append(f'<tr><th scope="row">{escape(first)}</th>{_cells("k", rest[0])}{_cells("n", *rest[1:])}</tr>')
    table = _wide("Serving", f"<table>{_head(*COLUMNS)}{_body(body)}</table>") if body else ""
    notes = "".join(f'<p class="soft">{escape(words)}</p>' for words in serving["assumptions"])
    return f"<h2>Serving</h2>\n<p>{escape(serving['answer'])}</p>\n{table}{notes}"


def _sources(view: Row, best: Row | None) -> str:
    words = [view["prices"]["words"]]
    if best is not None and best["kind"] in ("spot", "on-demand"):
        words.append(f"the price of {best['name']}: {best['price_source']}, {best['price_date']}")
    words += list(view["notes"])
    return _list("It supposes", view["assumptions"]) + "\n" + _list("Sources", words)


def _list(title: str, words: Sequence[str], kind: str = "ul") -> str:
    if not words:
        return ""
    items = "".join(f"<li>{escape(word)}</li>" for word in words)
    return f"<h2>{escape(title)}</h2>\n<{kind}>{items}</{kind}>"


def _head(*names: str) -> str:
    """Column heads; those that begin with # are of numbers."""
    cells = "".join(
        f'<th scope="col" class="n">{escape(name[1:])}</th>'
        if name.startswith("#")
        else f'<th scope="col">{escape(name)}</th>'
        if name
        else "<td></td>"
        for name in names
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _cells(kind: str, *texts: str) -> str:
    """Cells of one kind: n for numbers, k for what is not broken, words for sentences."""
    of_kind = f' class="{kind}"' if kind else ""
    return "".join(f"<td{of_kind}>{escape(text)}</td>" for text in texts)


def _body(rows: Iterable[str]) -> str:
    return f"<tbody>{''.join(rows)}</tbody>"


def _wide(name: str, table: str) -> str:
    """What may be wider than a phone scrolls by itself."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}">{table}</div>'
