"""The printing edge of what rich draws: markup and control characters in texts of others are shown,
never obeyed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import markup
from rich.console import Console, JustifyMethod
from rich.segment import Segment
from rich.table import Table

from farthing.printable import printable, printable_lines


def escape(text: object) -> str:
    """A text of others as a part of rich markup, on one line."""
    return markup.escape(printable(text))


def escape_lines(text: object) -> str:
    """The same for a text of several lines."""
    return markup.escape(printable_lines(text))


def table_of(
    *heads: str,
    rows: Iterable[Iterable[str]] = (),
    title: str | None = None,
    flush_gap: int | None = None,
) -> Table:
    """A table without lines, of rich markup. Heads that begin with # are of numbers, with = of what
    is not broken.

    Set in by two columns; with `flush_gap` not, and that is the space between two columns.
    """
    padding, is_flush = (0, 2) if flush_gap is None else (0, flush_gap, 0, 0), flush_gap is not None
    table = Table(
        box=None,
        padding=padding,
        show_edge=False,
        pad_edge=not is_flush,
        title=title,
        title_justify="left",
    )
    for name in heads:
        justify: JustifyMethod = "right" if name.startswith("#") else "left"
        head = name[1:] if name[:1] in ("#", "=") else name
        table.add_column(head, justify=justify, no_wrap=name.startswith("="))
    for row in rows:
        table.add_row(*row)
    return table


def fitted_table(
    width: int, heads: Sequence[str], rows: Sequence[Sequence[str]], cuts: Mapping[str, int]
) -> Table:
    """A table of plain texts, no line of which is broken, with heads as `table_of` has them.

    `cuts`: how narrow columns may become. Where the terminal is too narrow the first is cut, or
    left out; then columns move together, then the others are cut in their order.
    """
    names = [head.lstrip("#=") or head[1:] for head in heads]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    first, least = next(iter(cuts.items()))
    at, gap = names.index(first) if first in names else None, 2
    if at is not None and sum(widths) - widths[at] + gap * (len(names) - 1) + least > width:
        heads, *rows = ([*row[:at], *row[at + 1 :]] for row in (heads, *rows))
        return fitted_table(width, heads, rows, cuts)
    for name, least in cuts.items():
        over = sum(widths) + gap * (len(names) - 1) - width
        if name in names:
            at = names.index(name)
            widths[at] -= max(0, min(over, widths[at] - least))
        if sum(widths) + gap * (len(names) - 1) > width:
            gap = 1
    table = table_of(flush_gap=gap)
    for head, name, wide in zip(heads, names, widths, strict=True):
        justify: JustifyMethod = "right" if head.startswith("#") else "left"
        table.add_column(name, justify=justify, no_wrap=True, width=wide)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


class SafeConsole(Console):
    """A console that spells out control characters in whatever it is given to print; its own
    colours stay.
    """

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """The segments of something to print, without what would steer the terminal."""
        for text, style, control in super().render(renderable, options):
            if not (control or (text.isascii() and text.isprintable())):
                text = "\n".join(map(printable, text.split("\n")))
            yield Segment(text, style, control)
