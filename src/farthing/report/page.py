"""What the pages of plans and runs have in common: their frame and style, tables, bars, keys and figures.

A page is one HTML file that needs nothing else: no script, nothing that a browser would load. Texts of others are escaped
here, at the edge. Refuses to know what a page is about.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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
STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


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


def row(name: str, *cells: str) -> str:
    """A row of a table: its head, then its cells."""
    return f"<tr>{row_head(name)}{''.join(cells)}</tr>"


def table(name: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    """A whole table, which scrolls by itself."""
    return wide(name, f"<table>{head(*heads)}{body(rows)}</table>")


def wide(name: str, table: str) -> str:
    """What may be wider than a phone scrolls by itself."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}">{table}</div>'
