"""Tables of facts: CSV files of the package, in which each row has its unit, source and date."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

FACTS = Path(__file__).parent / "facts"


@cache
def _text(name: str) -> str:
    return (FACTS / f"{name}.csv").read_text(encoding="utf-8")


def facts(name: str) -> list[dict[str, str]]:
    """The rows of a table."""
    return list(csv.DictReader(_text(name).splitlines()))
