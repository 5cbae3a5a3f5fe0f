"""What readers are asked and give: what a job says of a source, rows with their place, how far a file has been read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from farthing.units import say_bytes

MAX_ROW_BYTES = 10_000_000


RowValue = dict[str, Any]
"""A row as its file has it: whatever its columns hold."""


class Row(NamedTuple):
    """One usable row: where it stands (line, or index for files without lines; from 1) and its columns."""

    line: int
    value: RowValue


class BadRow(NamedTuple):
    """One unusable row and why."""

    line: int
    reason: str


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
