"""Reports on a terminal. Draws; computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table as Grid

from farthing.report.blocks import (
    Bars,
    Block,
    FindingBlock,
    Listed,
    Pairs,
    Paragraph,
    Section,
    Table,
    bare,
    percent,
)
from farthing.report.safe import escape

_STYLES = {"answer": "bold", "soft": "dim", "warn": "yellow", "plain": "", "code": ""}
_BAR_WIDTH = 24


def draw(console: Console, report: Iterable[Section]) -> None:
    """Sections, each after an empty line but the first."""
    for number, section in enumerate(report):
        if number:
            console.print()
        blocks, title = section.blocks, f"[bold]{escape(section.title)}[/]"
        if section.title and isinstance(blocks[0], Paragraph):  # on the line of its heading
            first = blocks[0]
            console.print(f"{title}: {_styled(first)}")
            blocks = blocks[1:]
        elif section.title:
            console.print(title + (":" if isinstance(blocks[0], Listed) else ""))
        for block in blocks:
            draw_block(console, block)


def _styled(text: Paragraph) -> str:
    style = _STYLES[text.kind]
    return f"[{style}]{escape(text.words)}[/]" if style else escape(text.words)


def draw_block(console: Console, block: Block) -> None:
    """Cards, drawings and what opens are for a page alone."""
    if isinstance(block, Paragraph):
        console.print(_styled(block), soft_wrap=block.kind == "code")
    elif isinstance(block, Pairs):
        grid = Grid.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        for name, words in block.rows:
            grid.add_row(f"[bold]{escape(name)}[/]", escape(words))
        console.print(grid)
    elif isinstance(block, Listed):
        for words in block.items:
            console.print(Padding(escape(words), (0, 0, 0, 2)))
    elif isinstance(block, Bars):
        if block.title:
            console.print(f"[bold]{escape(block.title)}[/]: {escape(block.say(block.whole))}")
        console.print(_bars(block))
    elif isinstance(block, Table):
        console.print(_table(console.width, block))
    elif isinstance(block, FindingBlock):
        colour, paragraphs = "red" if block.is_first else "yellow", block.paragraphs
        if block.name:
            console.print(f"[{colour}]{escape(block.name)}[/]{escape(block.worth)}")
        else:
            console.print(f"[dim]advice[/] {escape(paragraphs[0])}", soft_wrap=True)
            paragraphs = paragraphs[1:]
        for words in paragraphs:  # commands in them are to be copied: they stay on one line
            console.print(f"  {escape(words.replace('`', ''))}", soft_wrap=True)


def _table(width: int, block: Table) -> Grid:
    """What bars show stands on a page alone."""
    if block.cuts is not None:
        rows = [[str(cell) for cell in row] for row in block.rows]
        return _fitted(width, block.heads, rows, block.cuts)
    kept = [i for i, head in enumerate(block.heads) if not head.startswith("|")]
    table = _columns([block.heads[i] for i in kept], [None] * len(kept), title=block.title)
    for row in block.rows:
        table.add_row(*(escape(row[i]) for i in kept))
    return table


def _columns(
    heads: Sequence[str], widths: Sequence[int | None], gap: int = 2, title: str = ""
) -> Grid:
    """A table without lines and rows; a column of a given width is not broken."""
    table = Grid(
        box=None,
        padding=(0, gap, 0, 0),
        pad_edge=False,
        title=escape(title) or None,
        title_justify="left",
    )
    for head, width in zip(heads, widths, strict=True):
        is_whole = width is not None or head.startswith("=")
        justify: JustifyMethod = "right" if head.startswith("#") else "left"
        table.add_column(escape(bare(head)), justify=justify, no_wrap=is_whole, width=width)
    return table


def _fitted(
    width: int, heads: Sequence[str], rows: Sequence[Sequence[str]], cuts: Mapping[str, int]
) -> Grid:
    """A table of which no line is broken. `cuts`: how narrow columns may become. Where the terminal
    is too narrow the first is cut, or left out; then columns move together, then the others are cut
    in their order.
    """
    names = [bare(head) for head in heads]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    first, least = next(iter(cuts.items()))
    at, gap = names.index(first) if first in names else None, 2
    if at is not None and sum(widths) - widths[at] + gap * (len(names) - 1) + least > width:
        heads, *rows = ([*row[:at], *row[at + 1 :]] for row in (heads, *rows))
        return _fitted(width, heads, rows, cuts)
    for name, least in cuts.items():
        over = sum(widths) + gap * (len(names) - 1) - width
        if name in names:
            at = names.index(name)
            widths[at] -= max(0, min(over, widths[at] - least))
        if sum(widths) + gap * (len(names) - 1) > width:
            gap = 1
    table = _columns(heads, widths, gap)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _bars(block: Bars) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=16)
    for least in (11, 4):
        grid.add_column(no_wrap=True, justify="right", min_width=least)
    for name, share, amount in block.rows:
        bar = "█" * round(share * _BAR_WIDTH) or "·"
        colour = "dim" if name == "free" else "cyan"
        grid.add_row(f"  {escape(name)}", amount, percent(share), f"[{colour}]{bar}[/]")
    return grid
