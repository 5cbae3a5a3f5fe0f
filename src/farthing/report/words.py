"""Words of reports by templates of plain text, `templates/*.txt`. Each of their macros is a
sentence, or lines that stand below each other.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2

from farthing.printable import printable
from farthing.report.blocks import Cards, Pairs, percent
from farthing.report.html import TEMPLATES
from farthing.report.plan_words import (
    cost_range,
    say_cost,
    say_short,
    span,
    sparkline,
    time_range,
)
from farthing.units import digits_of, plural, say_bytes, say_count, say_seconds, say_usd


@cache
def _texts() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    known = (digits_of, plural, say_bytes, say_count, say_seconds, say_usd, percent, say)
    for function in (*known, cost_range, say_cost, say_short, span, sparkline, time_range):
        found.globals[function.__name__] = function
    return found


def lines(file: str, macro: str, *values: Any) -> list[str]:
    """The lines of a macro, those that are empty left out."""
    text = getattr(_texts().get_template(f"{file}.txt").module, macro)(*values)
    return [line.strip() for line in text.split("\n") if line.strip()]


def say(file: str, macro: str, *values: Any) -> str:
    """The sentence of a macro."""
    return " ".join(lines(file, macro, *values))


def pairs(file: str, macro: str, *values: Any) -> Pairs:
    """Lines of `name: words`; those without words are left out."""
    parts = (line.partition(":") for line in lines(file, macro, *values))
    return Pairs(tuple((name, words.strip()) for name, _, words in parts if words.strip()))


def cards(file: str, macro: str, *values: Any) -> Cards:
    """Lines of `name | value | more`."""
    rows = (line.split("|") for line in lines(file, macro, *values))
    return Cards(tuple((name.strip(), value.strip(), more.strip()) for name, value, more in rows))
