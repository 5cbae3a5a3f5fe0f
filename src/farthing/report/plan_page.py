"""A plan as one HTML page that needs nothing else: styles and drawings are in it, no script, nothing is loaded.

Gets the view of `plan_view` and draws it; every word of it is escaped. Refuses to compute figures of its own, to write
files, and to name an address that a browser would open by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from farthing.report.plan_view import (
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
_NOT_YET = "need several GPUs, which farthing cannot train on yet"
_N_SHOWN, _N_MEMORY, _N_LABELS = 20, 14, 12
_WIDTH, _HEIGHT = 860, 470
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 20, 18, 50
_LETTER, _LINE = 6.7, 15.0  # of a label, in the drawing's units

_TIMES = {
    **{"1 s": 1, "3 s": 3, "10 s": 10, "30 s": 30, "1 min": 60, "3 min": 180, "10 min": 600, "30 min": 1800},
    **{"1 h": 3600, "2 h": 7200, "5 h": 18000, "10 h": 36000, "1 day": 86400, "2 days": 172_800, "5 days": 432_000},
    **{"2 weeks": 1_209_600, "5 weeks": 3_024_000, "3 months": 7_884_000, "1 year": 31_536_000},
    **{"3 years": 94_608_000, "10 years": 315_360_000},
}

# Colours are of what a component is, so that a bar here and a bar there say the same.
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
        parts += [_facts(best), _scatter(rows, best), _memory(rows), _components(best)]
        parts.append(_plans(rows))
    if view["best"] is None:
        parts.append(_list("The nearest ways", ways_out(view), "ol"))
    parts += [_also(view), _own(view), _why_not(view), _sources(view, best)]
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


# ---- dollars against hours ----


class Label(NamedTuple):
    """Words in the drawing, at the point that they belong to."""

    text: str
    x: float
    y: float
    left: float
    top: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """left, top, right, bottom."""
        return self.left, self.top, self.left + _LETTER * len(self.text), self.top + _LINE


def place_labels(
    points: Sequence[tuple[str, float, float]],
    dots: Sequence[tuple[float, float]],
    edges: tuple[float, float, float, float],
) -> list[Label]:
    """A place for the words of each point such that none overlap, and none hides another of the points.

    Tries the sides of the point, then farther away; of the places that are free it takes the one that hides fewest dots.
    Where none is free, the point has no label.
    """
    placed: list[Label] = []
    for text, x, y in points:
        wide = _LETTER * len(text)
        free: list[tuple[float, int, Label]] = []
        for far in (7.0, 20.0, 38.0, 58.0):
            for order, (left, top) in enumerate(
                (
                    (x + far, y - _LINE / 2),
                    (x + far, y - _LINE - far / 2),
                    (x + far, y + far / 2),
                    (x - far - wide, y - _LINE / 2),
                    (x - wide / 2, y - _LINE - far),
                    (x - wide / 2, y + far),
                    (x - far - wide, y + far / 2),
                    (x - far - wide, y - _LINE - far / 2),
                )
            ):
                label = Label(text, x, y, left, top)
                if _is_free(label, placed, points, edges):
                    hidden = sum(_is_in(label.box, dot) for dot in dots)
                    free.append((hidden + far / 12, order, label))
        if free:
            placed.append(min(free, key=lambda one: one[:2])[2])
    return placed


def _is_free(
    label: Label,
    placed: Iterable[Label],
    points: Sequence[tuple[str, float, float]],
    edges: tuple[float, float, float, float],
) -> bool:
    left, top, right, bottom = label.box
    if left < edges[0] or top < edges[1] or right > edges[2] or bottom > edges[3]:
        return False
    if any(_is_in(label.box, (x, y)) for _, x, y in points):
        return False
    return all(
        right < other.box[0] - 4 or left > other.box[2] + 4 or bottom < other.box[1] or top > other.box[3]
        for other in placed
    )


def _is_in(box: tuple[float, float, float, float], dot: tuple[float, float]) -> bool:
    return box[0] - 4 < dot[0] < box[2] + 4 and box[1] - 4 < dot[1] < box[3] + 4


def _scatter(rows: Sequence[Row], best: Row) -> str:
    shown = [row for row in rows if has_price(row) and row["total_usd"] > 0 and row["hours"] > 0]
    if not shown:
        return ""
    front = sorted((row for row in shown if row["on_runnable_front"]), key=lambda row: row["hours"])
    later = sorted((row for row in shown if row["on_front"]), key=lambda row: row["hours"])
    marked = list({row["rank"]: row for row in [best, *front, *later] if row in shown}.values())
    hours = [row["hours"] for row in shown] + [h for row in marked for h in row["hours_range"] if h > 0]
    usd = [row["total_usd"] for row in shown] + [u for row in marked for u in row["usd_range"] if u > 0]
    to_x, _ = _log_axis(hours, _LEFT, _WIDTH - _RIGHT)
    x_ticks = [(words, seconds / 3600) for words, seconds in _TIMES.items()]
    x_ticks = [tick for tick in x_ticks if _LEFT <= to_x(tick[1]) <= _WIDTH - _RIGHT]
    to_y, y_ticks = _log_axis(usd, _HEIGHT - _BOTTOM, _TOP)
    svg = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="cost-title cost-text">',
        '<title id="cost-title">Dollars against hours of every choice</title>',
        f'<desc id="cost-text">{escape(_front_words(front))}</desc>',
    ]
    for words, hours_tick in x_ticks:
        x = to_x(hours_tick)
        svg.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        svg.append(f'<text class="axis" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{words}</text>')
    for usd_tick in y_ticks:
        y = to_y(usd_tick)
        svg.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        svg.append(f'<text class="axis" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">${usd_tick:g}</text>')
    svg.append(
        f'<text class="axis" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">time from now to the end</text>'
    )
    svg.append(f'<text class="axis" x="{_LEFT - 8}" y="{_TOP - 6}" text-anchor="end">dollars</text>')

    def at(row: Row) -> tuple[float, float]:
        return to_x(row["hours"]), to_y(row["total_usd"])

    for ones, name in ((later, "later"), (front, "front")):
        if len(ones) > 1:
            svg.append(
                f'<polyline class="{name}" points="{" ".join("{:.1f},{:.1f}".format(*at(row)) for row in ones)}"/>'
            )
    for row in marked:
        svg += _whiskers(row, to_x, to_y)
    for row in sorted(shown, key=lambda row: (row in marked, -row["rank"])):
        svg.append(_dot(row, at(row), is_marked=row in marked, is_best=row is best))
    first = [best] if best in shown else []
    named = [row for row in [*first, *front, *later] if row in marked][: 2 * _N_LABELS]
    wanted = list({row["rank"]: (_label(row), *at(row)) for row in named}.values())[:_N_LABELS]
    dots = [at(row) for row in shown] + _along([at(row) for row in front]) + _along([at(row) for row in later])
    for label in place_labels(wanted, dots, (_LEFT + 2, _TOP, _WIDTH - 4, _HEIGHT - _BOTTOM)):
        svg += _label_words(label)
    svg.append("</svg>")
    n_hidden = len(rows) - len(shown)
    hidden = f" {plural(n_hidden, 'choice')} without a price is not drawn." if n_hidden else ""
    caption = (
        "Both axes are logarithmic. The line joins the choices of which none is both cheaper and sooner; their ranges, where "
        f"4 of 5 cases will be, are drawn as crosses.{hidden} {_key_words(shown)}"
    )
    return (
        f'<h2>Cost against time</h2>\n<figure><div class="wide" tabindex="0" role="region" aria-label="Cost against time">'
        f"{''.join(svg)}</div><figcaption>{escape(caption)}</figcaption>{_scatter_key(shown, later)}</figure>"
    )


def _along(points: Sequence[tuple[float, float]], n: int = 12) -> list[tuple[float, float]]:
    """Points on the line that joins these."""
    pairs = itertools.pairwise(points)
    return [(a[0] + (b[0] - a[0]) * i / n, a[1] + (b[1] - a[1]) * i / n) for a, b in pairs for i in range(n)]


def _log_axis(values: Sequence[float], begin: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Where a value stands between two edges, and the round values in between: 1, 2 and 5 times powers of ten."""
    low, high = math.log10(min(values)) - 0.06, math.log10(max(values)) + 0.06
    if high - low < 0.4:
        low, high = low - 0.2, high + 0.2
    steps = (1, 2, 5) if high - low < 3.2 else (1,)
    ticks = [
        step * 10.0**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        for step in steps
        if low <= math.log10(step) + power <= high
    ]
    return (lambda value: begin + (math.log10(value) - low) / (high - low) * (end - begin)), ticks


def _whiskers(row: Row, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> list[str]:
    """The ranges of a plan as a cross."""
    x, y = to_x(row["hours"]), to_y(row["total_usd"])
    ends = [max(row["hours_range"][0], 1e-6), row["hours_range"][2]]
    left, right = (min(max(to_x(hours), _LEFT), _WIDTH - _RIGHT) for hours in ends)
    ends = [max(row["usd_range"][0], 1e-6), row["usd_range"][2]]
    bottom, top = (min(max(to_y(usd), _TOP), _HEIGHT - _BOTTOM) for usd in ends)
    return [
        f'<line class="whisker" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>',
    ]


def _dot(row: Row, at: tuple[float, float], *, is_marked: bool, is_best: bool) -> str:
    names = [{"spot": "spot", "on-demand": "demand"}.get(row["kind"], "own"), "marked" if is_marked else "dot"]
    if not row["is_runnable"]:
        names.append("several")
    radius = 6.5 if is_best else 4.5 if is_marked else 3
    words = f"{row['rank']}. {row['name']}: {say_cost(row['total_usd'])}, {say_seconds(row['wall_s'])}"
    low, _, high = row["usd_range"]
    words += f" ({say_cost(low)} to {say_cost(high)})"
    return (
        f'<circle class="{" ".join(names)}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius}">'
        f"<title>{escape(words)}</title></circle>"
    )


def _label(row: Row) -> str:
    several = f"{row['n_gpus']}x " if row["n_gpus"] > 1 else ""
    spot = " spot" if row["kind"] == "spot" else ""
    who = row["kind"] if row["kind"] in ("own", "here") else row["provider"]
    return f"{several}{row['gpu'][:24]}{spot}, {who[:16]}"


def _label_words(label: Label) -> list[str]:
    left, top, right, bottom = label.box
    near_x, near_y = min(max(label.x, left), right), min(max(label.y, top), bottom)
    found = []
    if math.hypot(near_x - label.x, near_y - label.y) > 14:
        found.append(
            f'<line class="leader" x1="{label.x:.1f}" y1="{label.y:.1f}" x2="{near_x:.1f}" y2="{near_y:.1f}"/>'
        )
    found.append(f'<text class="halo" x="{left:.1f}" y="{top + 11.5:.1f}">{escape(label.text)}</text>')
    return found


def _front_words(front: Sequence[Row]) -> str:
    if not front:
        return "No choice can be run on one GPU."
    words = "; ".join(f"{row['name']} {say_cost(row['total_usd'])} in {say_seconds(row['wall_s'])}" for row in front)
    return f"From the soonest to the cheapest: {words}."


def _key_words(shown: Sequence[Row]) -> str:
    return "Hollow points need several GPUs." if any(not row["is_runnable"] for row in shown) else ""


def _scatter_key(shown: Sequence[Row], later: Sequence[Row]) -> str:
    kinds = {row["kind"] for row in shown}
    names = [("c1", "on demand")] if "on-demand" in kinds else []
    names += [("c2", "spot")] if "spot" in kinds else []
    names += [("c3", "your own")] if kinds & {"own", "here"} else []
    keys = [f'<li><i class="round {colour}"></i>{name}</li>' for colour, name in names]
    if any(not row["is_runnable"] for row in shown):
        keys.append('<li><i class="round hollow"></i>several GPUs, which farthing cannot train on yet</li>')
    return f'<ul class="key">{"".join(keys)}</ul>'


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
        f"every {say_seconds(best['save_every_s'])}. {best['sure'][:1].upper()}{best['sure'][1:]}."
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
    head = _head(
        "#rank", "where", "GPU", "kind", "#dollars", "#range", "#time", "#GiB", "#tokens/s", "why it stands here"
    )
    first = _wide("Choices", f"<table>{head}{_body(_plan_row(row) for row in rows[:_N_SHOWN])}</table>")
    more = ""
    if len(rows) > _N_SHOWN:
        rest = _wide("More choices", f"<table>{head}{_body(_plan_row(row) for row in rows[_N_SHOWN:])}</table>")
        more = f"<details><summary>{plural(len(rows) - _N_SHOWN, 'more choice')}</summary>{rest}</details>"
    note = '<p class="soft">* none is both cheaper and sooner. (+n): as many offers more that differ in place alone. '
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
