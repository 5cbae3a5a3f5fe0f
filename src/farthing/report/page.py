"""What the pages of plans and runs have in common: their frame and style, tables, bars, keys and figures.

A page is one HTML file that needs nothing else: no script, nothing that a browser would load. Texts of others are escaped
here, at the edge. Refuses to know what a page is about.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from farthing.printable import printable

_COLOURS = {
    **{"weights": 1, "optimizer": 2, "activations": 3, "gradients": 4, "logits": 5, "casts": 6, "working": 7},
    **{"training": 1, "setup": 2, "evaluation": 3, "lost work": 4, "restarts": 4, "download": 5, "checkpoints": 6},
    **{"waiting": 7, "matmul": 1, "attention": 3, "memory traffic": 2, "dequantization": 4, "communication": 7},
    **{"launch": 6, "data": 5, "compute": 1, "rounding": 2, "storage": 5, "egress": 6},
    **{
        "forward and backward": 1,
        "waiting for data": 5,
        "start-up": 7,
        "copies": 4,
        "other ranks": 4,
        "everything else": 8,
    },
}
STYLE = """
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
svg .halo{stroke:var(--card);stroke-width:4;paint-order:stroke;stroke-linejoin:round}
svg .grid{stroke:var(--grid)}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.28rem .75rem .28rem 0;vertical-align:top;border-bottom:1px solid var(--grid)}
th{font-weight:600}
thead th{color:var(--soft);font-size:.85rem;white-space:nowrap}
.n{text-align:right;white-space:nowrap}
.k{white-space:nowrap}
.words{min-width:13rem}
.bar{width:45%;min-width:9rem;vertical-align:middle}
.stack{display:flex;height:.95rem;border-radius:.2rem;overflow:hidden;background:var(--free)}
.stack i{display:block;height:100%}
.c1{background:var(--c1)}.c2{background:var(--c2)}.c3{background:var(--c3)}.c4{background:var(--c4)}
.c5{background:var(--c5)}.c6{background:var(--c6)}.c7{background:var(--c7)}.c8{background:var(--c8)}
.free{background:var(--free);border:1px solid var(--line)}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;margin:.6rem 0 0;padding:0;font-size:.9rem}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:.15rem;margin-right:.35rem;vertical-align:-.05rem}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:1rem;align-items:start}
details{margin-top:.6rem}
summary{cursor:pointer;color:var(--soft)}
ul,ol{padding-left:1.2rem}
li{overflow-wrap:anywhere}
@media (max-width:40rem){.answer{font-size:1.2rem}main{padding-top:1rem}.bar{min-width:6rem}th,td{padding-right:.6rem}}
@media print{:root{color-scheme:light;--page:#fff;--ink:#000}main{max-width:none;padding:0}.wide{overflow:visible}
.wide,.facts div,figure,tr{break-inside:avoid}h2{break-after:avoid}svg{min-width:0}details:not([open])>*{display:block}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}@page{size:A4;margin:14mm}}
"""


def escape(text: str) -> str:
    """A text of others within a page: no tag, no entity, nothing that turns lines around."""
    return html.escape(printable(text))


def document(title: str, parts: Iterable[str], end: str, style: str = "") -> str:
    """The whole page; `end` is its last line, `style` what only this kind of page needs. Empty `parts` are left out."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f'\n<p class="soft">{escape(end)}</p>\n</main>\n</body>\n</html>\n'
    )


def facts(rows: Iterable[tuple[str, str, str]]) -> str:
    """Figures as cards: (name, value, what more there is to say)."""
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in rows
    )
    return f'<dl class="facts">{cards}</dl>'


def colour(name: str) -> str:
    """The class of a part's colour."""
    return f"c{_COLOURS.get(name, 8)}"


def in_order(names: Iterable[str]) -> list[str]:
    """Names of parts in the order of their colours."""
    return sorted(names, key=lambda name: (_COLOURS.get(name, 8), name))


def stack(parts: Mapping[str, float], whole: float) -> str:
    """Parts side by side; what they leave of the whole stays free."""
    cells = "".join(
        f'<i class="{colour(name)}" style="width:{100 * parts[name] / whole:.3f}%"></i>'
        for name in in_order(parts)
        if parts[name] > 0 and whole > 0
    )
    return f'<div class="stack" aria-hidden="true">{cells}</div>'


def key(names: Iterable[str], free: bool = False) -> str:
    """What the colours mean."""
    keys = [f'<li><i class="{colour(name)}"></i>{escape(name)}</li>' for name in names]
    keys += ['<li><i class="free"></i>free</li>'] if free else []
    return f'<ul class="key">{"".join(keys)}</ul>'


def percent(share: float) -> str:
    """`12 %`, `<1 %`."""
    return f"{share * 100:.0f} %" if share >= 0.005 else "<1 %"


def listed(title: str, words: Sequence[str], kind: str = "ul") -> str:
    """A list under its heading; nothing where it is empty."""
    if not words:
        return ""
    items = "".join(f"<li>{escape(word)}</li>" for word in words)
    return f"<h2>{escape(title)}</h2>\n<{kind}>{items}</{kind}>"


def head(*names: str) -> str:
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


def row_head(name: str) -> str:
    """The first cell of a row."""
    return f'<th scope="row">{escape(name)}</th>'


def cells(kind: str, *texts: str) -> str:
    """Cells of one kind: n for numbers, k for what is not broken, words for sentences."""
    of_kind = f' class="{kind}"' if kind else ""
    return "".join(f"<td{of_kind}>{escape(text)}</td>" for text in texts)


def body(rows: Iterable[str]) -> str:
    """The rows of a table."""
    return f"<tbody>{''.join(rows)}</tbody>"


def wide(name: str, table: str) -> str:
    """What may be wider than a phone scrolls by itself."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}">{table}</div>'
