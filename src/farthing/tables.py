"""Tables of facts: CSV files of the package, in which each row has its unit, source and date."""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Row = TypeVar("Row")

FACTS = Path(__file__).parent / "facts"


@cache
def _text(name: str) -> str:
    return (FACTS / f"{name}.csv").read_text(encoding="utf-8")


def facts(name: str) -> list[dict[str, str]]:
    """The rows of a table."""
    return list(csv.DictReader(_text(name).splitlines()))


@cache
def numbers(name: str, key: str, value: str) -> dict[str, float]:
    """A column of a table as numbers, by another."""
    return {row[key]: float(row[value]) for row in facts(name)}


def typed(name: str, kind: Callable[..., Row]) -> list[Row]:
    """The rows of a table as values of a `NamedTuple`, each cell by the type of its field; those of
    a tuple stand between semicolons. An empty cell is the field's default; where there is none,
    None if it may be, else "", 0, False or ().
    """
    parsers: dict[Any, Any] = {bool: bool, date: date.fromisoformat}
    parse, empty = {}, {}
    for field, hint in get_type_hints(kind).items():
        of = next(iter(get_args(hint)), hint)
        parse[field] = _parts if get_origin(hint) is tuple else parsers.get(of, of)
        empty[field] = None if NoneType in get_args(hint) or of is date else parse[field]()
    empty |= getattr(kind, "_field_defaults", {})
    return [
        kind(**{f: parse[f](row[f]) if row[f] else empty[f] for f in parse}) for row in facts(name)
    ]


def _parts(cell: str = "") -> tuple[str, ...]:
    return tuple(cell.split(";")) if cell else ()
