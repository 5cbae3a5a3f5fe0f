"""Words of reports, by the macros of `templates/*.txt` and `*.rich`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jinja2

from farthing.printable import printable
from farthing.report.blocks import (
    Block,
    Cards,
    Listed,
    Pairs,
    Paragraph,
    Section,
    Table,
    percent,
    sections,
)
from farthing.report.html import TEMPLATES
from farthing.report.plan_words import cost_range, say_cost, say_short, span, time_range
from farthing.units import digits_of, plural, say_bytes, say_count, say_seconds, say_usd

_KINDS = {"!": "answer", ".": "plain", "~": "soft", "?": "warn", "$": "code"}
_BAR = "\ue000"  # a | of a value, while cells are told apart
_BLOCKS, _MOST_BLOCKS = "▁▂▃▄▅▆▇█", 36


@cache
def _texts(is_markup: bool) -> jinja2.Environment:
    """Of templates whose values are shown as they are, or as a part of rich markup."""
    from farthing.report.safe import escape  # brings in rich

    shown = escape if is_markup else printable
    found = jinja2.Environment(
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: shown(value).replace("|", _BAR) if type(value) is str else value,
    )
    known = (digits_of, lines, plural, say_bytes, say_count, say_seconds, say_usd, percent, say)
    for function in (*known, cost_range, say_cost, say_short, span, sparkline, time_range):
        found.globals[function.__name__] = function
    return found


@cache
def _macro(file: str, name: str) -> Callable[..., str]:
    """Compiled alone: a command needs few of the macros of a file."""
    text = (TEMPLATES / file).read_text(encoding="utf-8")
    begin = text.index(f"{{% macro {name}(")
    end = text.index("{% endmacro %}", begin)
    source = text[begin:end] + "{% endmacro %}"
    found = _texts(file.endswith(".rich")).from_string(source)
    return getattr(found.module, name)


def lines(file: str, macro: str, *values: Any) -> list[str]:
    """The lines of a macro without empty ones; values of `.rich` files are escaped markup."""
    return [line.replace(_BAR, "|") for line in _lines(file, macro, *values)]


def _lines(file: str, macro: str, *values: Any) -> list[str]:
    text = _macro(file, macro)(*values)
    return [line.rstrip() for line in text.split("\n") if line.strip()]


def say(file: str, macro: str, *values: Any) -> str:
    return " ".join(line.strip() for line in lines(file, macro, *values))


def report(file: str, macro: str, *values: Any, **blocks: Block) -> list[Section]:
    """The sections of a macro, of which each line begins with its kind: `#` a heading, `!` the
    answer, `.` a paragraph, `~` soft words, `$` a command, `-` an item of a list, `*` the block of
    this name.
    """
    found: list[tuple[str, list[Block]]] = [("", [])]
    for line in lines(file, macro, *values):
        kind, words = line[0], line[2:].strip()
        into = found[-1][1]
        if kind == "#":
            found.append((words, []))
        elif kind == "*":
            into.append(blocks[words])
        elif kind == "-" and into and isinstance(into[-1], Listed):
            into[-1] = Listed((*into[-1].items, words))
        else:
            into.append(Listed((words,)) if kind == "-" else Paragraph(words, _KINDS[kind]))
    return sections(*(Section(title, tuple(blocks)) for title, blocks in found))


def pairs(file: str, macro: str, *values: Any) -> Pairs:
    """Lines of `name: words`; those without words are left out."""
    parts = (line.partition(":") for line in lines(file, macro, *values))
    return Pairs(tuple((name.strip(), words.strip()) for name, _, words in parts if words.strip()))


def _rows(file: str, macro: str, *values: Any) -> list[tuple[str, ...]]:
    rows = (line.split("|") for line in _lines(file, macro, *values))
    return [tuple(cell.strip().replace(_BAR, "|") for cell in row) for row in rows]


def cards(file: str, macro: str, *values: Any) -> Cards:
    return Cards(tuple(_rows(file, macro, *values)))


def table(file: str, macro: str, *values: Any) -> Table:
    """Lines of `cell | cell`, of which the first has the heads."""
    heads, *rows = _rows(file, macro, *values)
    return Table(heads, tuple(rows))


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """A block a value, or a stretch where there are more than `_MOST_BLOCKS`."""
    size = -(-len(values) // _MOST_BLOCKS) or 1
    stretches = [values[i : i + size] for i in range(0, len(values), size)]
    values = [sum(stretch) / len(stretch) for stretch in stretches]
    low, high = min(values) if low is None else low, max(values) if high is None else high
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, max(0, int((value - low) / span * 7.999)))] for value in values)
