"""What readers are asked and give: what a job says of a source, rows with their place, examples as
text, progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from farthing.units import say_bytes

MAX_ROW_BYTES = 10_000_000
Segments = tuple[tuple[str, bool], ...]
"""Parts of a text, and whether each is learned."""

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


@dataclass(frozen=True)
class Text:
    """One example before tokenization.

    `segments`: (text, is_target) in order. `label`: where the task has labels. `is_raw`: no
    template frames the text, so that the tokenizer's first token and an end-of-sequence token have
    to. `given`: what the row's owner wrote as input, before anything is rendered; rows that agree
    in it are one input. `n_unlearned`: assistant turns that are learned nowhere.
    `earlier`: further examples of the same row, which come before it. `beside`: the further
    sequences of the unit, as `segments`. `value`: its number, where the objective reads one.
    """

    segments: Segments
    label: Any = None
    is_raw: bool = True
    given: tuple[str, ...] = ()
    n_unlearned: int = 0
    earlier: tuple[Text, ...] = ()
    beside: tuple[Segments, ...] = ()
    value: float = 0.0

    @property
    def sequences(self) -> tuple[Text, ...]:
        """A text for each sequence of the unit."""
        return self, *(replace(self, segments=each, beside=()) for each in self.beside)

    @property
    def of_row(self) -> tuple[Text, ...]:
        """All examples of the row."""
        return *self.earlier, self


class Own(NamedTuple):
    """What a job says of one source alone."""

    columns: Any = None
    weight: float = 1.0
    split: str | None = None
    name: str | None = None
    """Configuration of a Hub data set."""


class Reading:
    """How far a source has been read, from 0 to 1; readers say how to tell."""

    def __init__(self) -> None:
        self.share: Callable[[], float] = lambda: 0.0


def too_large(n_bytes: int) -> str:
    """Why a row of so many bytes can't be used."""
    return f"a row of {say_bytes(n_bytes)}; the limit is {say_bytes(MAX_ROW_BYTES)}"
