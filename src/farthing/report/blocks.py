"""What a report consists of: sections of texts, pairs, tables and bars.

A report is built once, from values; `draw` puts it on a terminal, `html` on a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple


class Paragraph(NamedTuple):
    """A paragraph; `kind` is answer, soft, warn, plain or code."""

    words: str
    kind: str = "plain"


class Pairs(NamedTuple):
    rows: tuple[tuple[str, str], ...]


class Cards(NamedTuple):
    """Figures at a glance: name, value, what more there is to say. On a page only."""

    rows: tuple[tuple[str, ...], ...]


class Listed(NamedTuple):
    items: tuple[str, ...]


class Stack(NamedTuple):
    """A cell of a table: parts of a whole as a bar."""

    parts: Mapping[str, float]
    whole: float


Cell = str | Stack


class Table(NamedTuple):
    """Heads begin with # for numbers, = for unbroken words, | for bars; the first names rows."""

    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    caption: str = ""
    n_open: int = 0  # rows that are shown at once on a page; 0: all
    cuts: Mapping[str, int] | None = None  # least widths on a terminal, which breaks no cell
    has_key: bool = False  # a page explains the colours of its bars


class More(NamedTuple):
    """A table that a page opens when asked."""

    words: str
    table: Table


class Bars(NamedTuple):
    """Parts of a whole, each with its amount and share."""

    title: str
    parts: Mapping[str, float]
    whole: float
    say: Callable[[float], str]
    free: float = 0.0

    @property
    def rows(self) -> list[tuple[str, float, str]]:
        named = sorted(self.parts.items(), key=lambda item: -item[1])
        named += [("free", self.free)] if self.free else []
        return [(name, v / self.whole if self.whole else 0.0, self.say(v)) for name, v in named]


class Drawing(NamedTuple):
    """An SVG, on a page only, with its caption and the classes of its key."""

    title: str
    svg: str
    caption: str
    key: Mapping[str, str] = {}
    signs: Sequence[tuple[str, str]] = ()


class FindingBlock(NamedTuple):
    """What a diagnosis found; `between backticks` is code."""

    name: str
    worth: str
    paragraphs: tuple[str, ...]
    is_first: bool = False


Block = Paragraph | Pairs | Cards | Listed | Table | More | Bars | Drawing | FindingBlock


class Section(NamedTuple):
    """Blocks under a heading; without words at the head of a page."""

    title: str
    blocks: tuple[Block, ...]


def bare(head: str) -> str:
    """A head of a table without the sign of its kind."""
    return head[1:] if head[:1] in ("#", "=", "|") else head


def sections(*found: Section | None) -> list[Section]:
    """Those that have something to say."""
    return [one for one in found if one is not None and one.blocks]


def listed(title: str, items: Iterable[str]) -> Section | None:
    items = tuple(items)
    return Section(title, (Listed(items),)) if items else None


def percent(share: float) -> str:
    """`12 %`, `<1 %`."""
    return f"{share * 100:.0f} %" if share >= 0.005 else "<1 %"
