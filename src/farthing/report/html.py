"""Reports as one HTML page that needs nothing else: no script, nothing that a browser would load.

Texts of others are escaped by the templates, which draw; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from farthing.printable import printable
from farthing.report.blocks import Section, Stack, bare, percent
from farthing.units import plural, say_bytes, say_count

TEMPLATES = Path(__file__).parent / "templates"
_COLOURS = {
    name: number
    for number, names in enumerate(
        (
            "weights, training, matmul, compute, forward and backward",
            "optimizer, setup, memory traffic, rounding",
            "activations, evaluation, attention",
            "gradients, lost work, restarts, dequantization, copies, other ranks",
            "logits, download, data, storage, waiting for data, reference, reference pass",
            "casts, checkpoints, launch, egress",
            "working, waiting, communication, start-up",
        ),
        1,
    )
    for name in names.split(", ")
}


def colour(name: str) -> int:
    return _COLOURS.get(name, 8)


def in_order(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda item: (colour(item[0]), item[0]))


def _stacks(rows: Iterable[Iterable[Any]]) -> dict[str, float]:
    """The parts of all bars of a table."""
    return {n: 1.0 for row in rows for cell in row if isinstance(cell, Stack) for n in cell.parts}


@cache
def environment() -> jinja2.Environment:
    """Templates that escape whatever they print, without characters that turn lines around."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    found.globals |= {"zip": zip, "colour": colour, "in_order": in_order, "percent": percent}
    found.globals["stacks"] = _stacks
    found.filters |= {"code": _code, "cell": _cell, "bare": bare, "plural": plural}
    found.filters |= {"count_of": say_count, "bytes_of": say_bytes}
    found.tests["stack"] = lambda value: isinstance(value, Stack)
    return found


def _code(text: str) -> Markup:
    """A text with what stands `between backticks` as code."""
    parts = printable(text).split("`")
    found = [Markup("<code>{}</code>" if n % 2 else "{}").format(p) for n, p in enumerate(parts)]
    return Markup("").join(found)


def _cell(text: object) -> Markup:
    """A name as a cell of a Markdown table: no column, no line and no tag of its own."""
    words = printable(" ".join(str(text).split()))
    return Markup(words.replace("|", "\\|").replace("<", "&lt;"))


def page(name: str, title: str, report: Iterable[Section], end: str) -> str:
    template = environment().get_template("page.html")
    return template.render(name=name, title=title, report=list(report), end=end)


def svg(name: str, **values: Any) -> str:
    return Markup(environment().get_template(name).render(**values))
