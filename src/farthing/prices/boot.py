"""How long a machine takes from the request until farthing runs there: facts by provider, from `facts/boot.csv`."""

from __future__ import annotations

import csv
from functools import cache
from typing import NamedTuple

from farthing.prices.gpus import FACTS


class Boot(NamedTuple):
    """Seconds until a machine is there and set up, and who says so."""

    seconds: float
    source: str
    date: str


@cache
def _boots() -> dict[str, Boot]:
    with open(FACTS / "boot.csv", encoding="utf-8", newline="") as file:
        return {
            row["provider"]: Boot(float(row["seconds"]), row["source"], row["date"]) for row in csv.DictReader(file)
        }


def boot_of(provider: str) -> Boot:
    """Of a provider; of one about whom nothing is known, the row without a name."""
    return _boots().get(provider) or _boots()[""]
