"""What readers are asked and give: what a job says of a source, rows with their place, examples as
text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from farthing.units import say_bytes

if TYPE_CHECKING:
    from farthing.arrays import Ints

MAX_ROW_BYTES = 10_000_000
Segments = tuple[tuple[str, bool], ...]
"""Parts of a text, and whether each is learned."""

START, STOP = "\ufdd0", "\ufdd1"
"""Around what a chat template marks as generated: code points that are no characters."""

RowValue = dict[str, Any]
"""A row as its file has it: whatever its columns hold."""


class Row(NamedTuple):
    """One usable row: where it stands (line, or index for files without lines; from 1) and its
    columns.
    """

    line: int
    value: RowValue


class BadRow(NamedTuple):
    """One unusable row and why."""

    line: int
    reason: str


class RowBlock(NamedTuple):
    """Neighbouring rows of a source, of which none is parsed yet."""

    sizes: Ints
    """Bytes of each row, about [n]."""
    read: Callable[[Sequence[int]], Iterable[Row | BadRow]]
    """Parse the rows at these places, in this order."""
    share: float
    """Of the source, that has been read where the block ends; 1 at the end of a whole one."""

    def rows(self) -> Iterable[Row | BadRow]:
        """All of them."""
        return self.read(range(len(self.sizes)))


@dataclass(frozen=True)
class Layout:
    """How files are written, where the job says it and nothing is guessed."""

    encoding: str | None = None
    separator: str | None = None
    field: str | None = None
    text_unit: Literal["document", "line"] = "document"

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Layout:
        """What the section `data` of a job says."""
        return cls(**{each.name: data[each.name] for each in fields(cls)})


AS_GUESSED = Layout()


@dataclass(frozen=True)
class Example:
    """One example before tokenization.

    `segments`: (text, is_target) in order. `label`: where the task has labels. `is_raw`: no
    template frames the text, so that the tokenizer's first token and an end-of-sequence token have
    to. `given`: what the row's owner wrote as input, before anything is rendered; rows that agree
    in it are one input. `n_unlearned`: assistant turns that are learned nowhere.
    `earlier`: further examples of the same row, which come before it. `beside`: the further
    sequences of the unit, as `segments`. `value`: its number, where the objective reads one.
    `words`: where each has a label.
    """

    segments: Segments
    label: Any = None
    is_raw: bool = True
    given: tuple[str, ...] = ()
    n_unlearned: int = 0
    earlier: tuple[Example, ...] = ()
    beside: tuple[Segments, ...] = ()
    value: float = 0.0
    words: tuple[str, ...] = ()

    @property
    def sequences(self) -> tuple[Example, ...]:
        """A text for each sequence of the unit."""
        return self, *(replace(self, segments=each, beside=()) for each in self.beside)

    @property
    def of_row(self) -> tuple[Example, ...]:
        """All examples of the row."""
        return *self.earlier, self


class Own(NamedTuple):
    """What a job says of one source alone."""

    columns: Any = None
    weight: float = 1.0
    split: str | None = None
    name: str | None = None
    """Configuration of a Hub data set."""


def too_large(n_bytes: int) -> str:
    """Why a row of so many bytes can't be used."""
    return f"a row of {say_bytes(n_bytes)}; the limit is {say_bytes(MAX_ROW_BYTES)}"
