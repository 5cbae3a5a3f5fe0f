"""The prices to plan with: from the snapshot of the package, its refreshed copy, or a file of one's
own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from farthing.errors import InputError
from farthing.prices.formats import read_prices
from farthing.prices.gpus import did_you_mean, find_gpu, name_key
from farthing.prices.offers import Offer
from farthing.tables import FACTS

STALE_AFTER_DAYS = 30


class Catalog(NamedTuple):
    """Offers, where they were read, and how old they are on `today`."""

    offers: tuple[Offer, ...]
    where: str
    today: date
    skipped: Mapping[str, int]  # GPU names of a feed that are not known here, with their rows
    is_own: bool = False  # a file of the user's

    @property
    def providers(self) -> tuple[str, ...]:
        return tuple(sorted({offer.provider for offer in self.offers}))

    @property
    def ages_days(self) -> tuple[int, int, int]:
        """Days since the newest, the median and the oldest price was read."""
        ages = sorted(max(0, (self.today - offer.date).days) for offer in self.offers)
        return ages[0], ages[(len(ages) - 1) // 2], ages[-1]

    @property
    def is_stale(self) -> bool:
        """Whether more than half of the prices are older than a month."""
        return self.ages_days[1] > STALE_AFTER_DAYS


def cache_path() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "farthing" / "prices.csv"


def read_catalog(path: Path | str | None, today: date) -> Catalog:
    """The prices to plan with.

    A path is a file of one's own (columns of farthing, gpuhunt or SkyPilot) and is taken alone.
    Without one: the snapshot of the package, in which the refreshed copy replaces every provider of
    which it has newer prices. Raises `InputError` with file, line and column.
    """
    if path is not None:
        return _read(Path(path), today, is_own=True)
    shipped = _read(FACTS / "prices.csv", today)._replace(where="the snapshot of the package")
    refreshed = cache_path()
    if not refreshed.is_file():
        return shipped
    try:
        newer = _read(refreshed, today)
    except InputError as error:
        to_do = f"run `farthing prices update`, or delete {refreshed}"
        raise InputError(error.what, where=error.where, to_do=to_do) from None
    newest_here, newest_there = _newest(shipped.offers), _newest(newer.offers)
    replaced = {who for who, day in newest_there.items() if day >= newest_here.get(who, date.min)}
    kept = tuple(offer for offer in shipped.offers if (offer.provider, offer.unit) not in replaced)
    fresh = tuple(offer for offer in newer.offers if (offer.provider, offer.unit) in replaced)
    where = f"{refreshed} and the snapshot of the package"
    return Catalog(offers=fresh + kept, where=where, today=today, skipped=newer.skipped)


def _newest(offers: Iterable[Offer]) -> dict[tuple[str, str], date]:
    found: dict[tuple[str, str], date] = {}
    for offer in offers:
        who = (offer.provider, offer.unit)
        found[who] = max(found.get(who, date.min), offer.date)
    return found


def select(
    catalog: Catalog,
    gpu: Sequence[str] = (),
    provider: Sequence[str] = (),
    region: Sequence[str] = (),
    kind: str | None = None,
) -> list[Offer]:
    """Offers that have any of the names of each sort; a region may be the beginning of its name
    ("us-"). Raises `InputError` for names that nothing has, alone or together.
    """
    found, asked = list(catalog.offers), list[str]()
    known = {find_gpu(name).name for name in gpu}
    sellers = {_provider(catalog, name) for name in provider}
    regions = tuple(name.lower() for name in region)
    wishes: dict[str, tuple[Sequence[str], Callable[[Offer], bool]]] = {
        "gpu": (gpu, lambda offer: offer.gpu in known),
        "provider": (provider, lambda offer: offer.provider in sellers),
        "region": (region, lambda offer: offer.region.lower().startswith(regions)),
        "kind": ([kind] if kind else [], lambda offer: offer.kind == kind),
    }
    for what, (names, has) in wishes.items():
        if not names:
            continue
        found = [offer for offer in found if has(offer)]
        asked.append(f"{what} {' or '.join(names)}")
        if not found:
            to_do = "`farthing prices` lists all"
            if len(asked) > 1:
                to_do = f"leave out {asked[-1]}; {to_do}"
            elif what == "gpu":
                to_do = "the GPU is known, but no price of it is here: "
                to_do += "bring one with --prices FILE, or `farthing prices update`"
            raise InputError(f"no offer has {', '.join(asked)}", where=what, to_do=to_do)
    return found


def _provider(catalog: Catalog, text: str) -> str:
    for known in catalog.providers:
        if name_key(known) == name_key(text):
            return known
    to_do = f"{did_you_mean(text, catalog.providers)}known: {', '.join(catalog.providers)}"
    raise InputError(f"no prices of `{text}` are known", where="provider", to_do=to_do)


def sort_offers(offers: Iterable[Offer], by: str) -> list[Offer]:
    """By `usd` (of an hour), `usd-per-gpu` or `age`; those not paid by the hour come last."""
    if by == "age":
        return sorted(sort_offers(offers, "usd-per-gpu"), key=lambda o: -o.date.toordinal())
    hourly = {"usd": lambda o: o.usd_per_hour, "usd-per-gpu": lambda o: o.usd_per_gpu_hour}[by]
    return sorted(offers, key=lambda offer: (hourly(offer) or math.inf, offer.usd, offer[:7]))


def _read(path: Path, today: date, *, is_own: bool = False) -> Catalog:
    offers, skipped = read_prices(path, today, is_own=is_own)
    return Catalog(offers, str(path), today, skipped, is_own)
