"""How long a machine takes from the request until farthing runs there: facts by provider, from `facts/boot.csv`.

A row says when there is a shell; installing farthing and its libraries comes on top, by assumption.
"""

from __future__ import annotations

import csv
from functools import cache
from typing import NamedTuple

from farthing.prices.gpus import FACTS

INSTALL_S = 120.0
"""For pip to bring farthing and torch, or to pull an image that has them."""


class Boot(NamedTuple):
    """Seconds until farthing runs, and who says so."""

    seconds: float
    source: str
    date: str
    is_known: bool = True
    """Whether there is a row for the provider."""


@cache
def _boots() -> dict[str, Boot]:
    with open(FACTS / "boot.csv", encoding="utf-8", newline="") as file:
        return {
            row["provider"]: Boot(float(row["seconds"]) + INSTALL_S, row["source"], row["date"])
            for row in csv.DictReader(file)
        }


def boot_of(provider: str) -> Boot:
    """Of a provider; of one about whom nothing is known, the row without a name."""
    return _boots().get(provider) or _boots()[""]._replace(is_known=False)
