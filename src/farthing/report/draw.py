"""Reports on a terminal. Draws; computes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid

from farthing.report.blocks import (
    Bars,
    Block,
    Finding,
    Listed,
    Pairs,
    Section,
    Stack,
    Table,
    Text,
    percent,
)
from farthing.report.safe import escape, fitted_table, table_of

_STYLES = {"answer": "bold", "soft": "dim", "warn": "yellow", "plain": "", "code": ""}
_BAR_WIDTH = 24


def draw(console: Console, report: Iterable[Section]) -> None:
    """Sections, each after an empty line but the first."""
    for number, section in enumerate(report):
        if number:
            console.print()
        blocks, title = section.blocks, f"[bold]{escape(section.title)}[/]"
        if section.title and isinstance(blocks[0], Text):  # on the line of its heading
            first = blocks[0]
            console.print(f"{title}: {_styled(first)}")
            blocks = blocks[1:]
        elif section.title:
            console.print(title + (":" if isinstance(blocks[0], Listed) else ""))
        for block in blocks:
            draw_block(console, block)


def _styled(text: Text) -> str:
    style = _STYLES[text.kind]
    return f"[{style}]{escape(text.words)}[/]" if style else escape(text.words)


def draw_block(console: Console, block: Block) -> None:
    """Cards, drawings and what opens are for a page alone."""
    if isinstance(block, Text):
        console.print(_styled(block), soft_wrap=block.kind == "code")
    elif isinstance(block, Pairs):
        grid = Grid.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        for name, words in block.rows:
            grid.add_row(f"[bold]{escape(name)}[/]", escape(words))
        console.print(grid)
    elif isinstance(block, Listed):
        for number, words in enumerate(block.items, 1):
            sign = f"{number}. " if block.is_ordered else ""
            console.print(Padding(escape(sign + words), (0, 0, 0, 2)))
    elif isinstance(block, Bars):
        if block.title:
            console.print(f"[bold]{escape(block.title)}[/]: {escape(block.say(block.whole))}")
        console.print(_bars(block))
    elif isinstance(block, Table):
        console.print(_table(console, block))
    elif isinstance(block, Finding):
        colour, paragraphs = "red" if block.is_first else "yellow", block.paragraphs
        if block.name:
            console.print(f"[{colour}]{escape(block.name)}[/]{escape(block.worth)}")
        else:
            console.print(f"[dim]advice[/] {escape(paragraphs[0])}", soft_wrap=True)
            paragraphs = paragraphs[1:]
        for words in paragraphs:  # commands in them are to be copied: they stay on one line
            console.print(f"  {escape(words.replace('`', ''))}", soft_wrap=True)


def _table(console: Console, block: Table) -> Grid:
    if block.cuts is not None:
        rows = [[str(cell) for cell in row] for row in block.rows]
        return fitted_table(console.width, block.heads, rows, block.cuts)
    kept = [i for i, head in enumerate(block.heads) if not head.startswith("|")]
    rows = [[escape(row[i]) for i in kept if not isinstance(row[i], Stack)] for row in block.rows]
    title = escape(block.title) if block.title else None
    heads = (block.heads[i][:1] + escape(block.heads[i][1:]) for i in kept)
    return table_of(*heads, rows=rows, title=title, flush_gap=2)


def _bars(block: Bars) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=16)
    grid.add_column(no_wrap=True, justify="right", min_width=11)
    grid.add_column(no_wrap=True, justify="right", min_width=4)
    grid.add_column(no_wrap=True)
    for name, share, amount in block.rows:
        bar = "█" * round(share * _BAR_WIDTH) or "·"
        colour = "dim" if name == "free" else "cyan"
        grid.add_row(f"  {escape(name)}", amount, percent(share), f"[{colour}]{bar}[/]")
    return grid
