"""What the pages of plans and runs have in common: their frame and style, tables, bars, keys and
figures.

A page is one HTML file that needs nothing else: no script, nothing that a browser would load. Texts
of others are escaped here, at the edge. Refuses to know what a page is about.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farthing.printable import printable

_COLOURS = {
    **{
        "weights": 1,
        "optimizer": 2,
        "activations": 3,
        "gradients": 4,
        "logits": 5,
        "casts": 6,
        "working": 7,
    },
    **{
        "training": 1,
        "setup": 2,
        "evaluation": 3,
        "lost work": 4,
        "restarts": 4,
        "download": 5,
        "checkpoints": 6,
    },
    **{
        "waiting": 7,
        "matmul": 1,
        "attention": 3,
        "memory traffic": 2,
        "dequantization": 4,
        "communication": 7,
    },
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
_KINDS = {"#": "n", "=": "k", "|": "bar"}


def escape(text: str) -> str:
    """A text of others within a page: no tag, no entity, nothing that turns lines around."""
    return html.escape(printable(text))


def document(title: str, parts: Iterable[str], end: str, style: str) -> str:
    """The whole page; `end` is its last line, `style` the file of what only such pages need. Empty
    `parts` are left out.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
        " 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{_css('page.css')}{_css(style)}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f'\n<p class="soft">{escape(end)}</p>\n</main>\n</body>\n</html>\n'
    )


def _css(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


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


def colours(names: Iterable[str]) -> dict[str, str]:
    """The classes of the colours of parts, by their names and in their order."""
    return {
        name: colour(name) for name in sorted(names, key=lambda name: (_COLOURS.get(name, 8), name))
    }


def stack(parts: Mapping[str, float], whole: float) -> str:
    """Parts side by side; what they leave of the whole stays free."""
    cells = "".join(
        f'<i class="{its_colour}" style="width:{100 * parts[name] / whole:.3f}%"></i>'
        for name, its_colour in colours(parts).items()
        if parts[name] > 0 and whole > 0
    )
    return f'<div class="stack" aria-hidden="true">{cells}</div>'


def key(classes: Mapping[str, str], signs: str = "") -> str:
    """What the colours mean, by name; `signs` are further items."""
    items = "".join(
        f'<li><i class="{its_class}"></i>{escape(name)}</li>' for name, its_class in classes.items()
    )
    return f'<ul class="key">{items}{signs}</ul>'


def percent(share: float) -> str:
    """`12 %`, `<1 %`."""
    return f"{share * 100:.0f} %" if share >= 0.005 else "<1 %"


def listed(title: str, words: Sequence[str], kind: str = "ul") -> str:
    """A list under its heading; nothing where it is empty."""
    if not words:
        return ""
    items = "".join(f"<li>{escape(word)}</li>" for word in words)
    return f"{heading(title)}\n<{kind}>{items}</{kind}>"


def heading(words: str, level: int = 2) -> str:
    """The heading of a section."""
    return f"<h{level}>{escape(words)}</h{level}>"


def paragraph(words: str, kind: str = "soft") -> str:
    """A sentence or two; nothing where there are none."""
    return f"<p{_class(kind)}>{escape(words)}</p>" if words else ""


def table(name: str, heads: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """A table that scrolls by itself; the first column names the rows.

    The first sign of a head says what is in its column: `#` numbers, `=` what is not broken, `|`
    bars as (parts, whole).
    """
    kinds = [_KINDS.get(head[:1], "words") for head in heads]
    titles = [head.lstrip("".join(_KINDS)) for head in heads]
    cells = [
        (
            f'<th scope="col"{_class("n" if kind == "n" else "")}>{escape(title)}</th>'
            if title
            else "<td></td>"
        )
        for kind, title in zip(kinds, titles, strict=True)
    ]
    body = [
        "".join(
            _cell(kind, cell, is_first=number == 0)
            for number, (kind, cell) in enumerate(zip(kinds, row, strict=True))
        )
        for row in rows
    ]
    head = (
        f"<caption>{escape(caption)}</caption>" if caption else ""
    ) + f"<thead><tr>{''.join(cells)}</tr></thead>"
    return wide(
        name, f"<table>{head}<tbody>{''.join(f'<tr>{row}</tr>' for row in body)}</tbody></table>"
    )


def _cell(kind: str, cell: Any, *, is_first: bool) -> str:
    if is_first and kind != "n":
        return f'<th scope="row"{_class("k" if kind == "k" else "")}>{escape(cell)}</th>'
    return f"<td{_class(kind)}>{stack(*cell) if kind == 'bar' else escape(cell)}</td>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def wide(name: str, content: str) -> str:
    """What may be wider than a phone scrolls by itself."""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}">{content}</div>'
    )
