"""What a person sees of prices in the terminal. Draws; computes nothing, and reads no file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

from rich.console import Console

from farthing.prices.catalog import Catalog
from farthing.prices.formats import COLUMNS
from farthing.prices.offers import Offer
from farthing.report.safe import fitted_table
from farthing.report.words import lines
from farthing.units import say_usd

if TYPE_CHECKING:
    from farthing.prices.feeds import Update

_UNITS = {"gb_hour": "a GB-hour", "run": "a run", "million_tokens": "/M tokens"}
_COLUMNS = ("GPUs", "provider", "machine", "where", "kind", "an hour", "per GPU", "age")
_OF_OFFER = (*(name for name in COLUMNS if name != "date"), "usd_per_hour", "usd_per_gpu_hour")
_CUTS = {"machine": 30, "provider": 10, "where": 5, "GPUs": 20}


def draw_prices(console: Console, catalog: Catalog, offers: Sequence[Offer], n_found: int) -> None:
    """A table of offers, how old they are, and where they were read. Fits 80 columns; wider ones
    show the machine.
    """
    names = [name for name in _COLUMNS if name != "machine" or console.width >= 110]
    rows = [_cells(offer, catalog.today) for offer in offers]
    console.print(fitted_table(console.width, names, rows, ("an hour", "per GPU", "age"), _CUTS))
    for line in lines("data.rich", "prices", catalog, n_found - len(offers), _sources(offers)):
        console.print(line, soft_wrap=True)


def draw_update(console: Console, update: Update) -> None:
    """What came of refreshing: which providers have new prices, which feeds failed and why."""
    for line in lines("data.rich", "update", update):
        console.print(line, soft_wrap=True)


def prices_as_json(catalog: Catalog, offers: Sequence[Offer], n_found: int) -> dict[str, object]:
    """The same for `--json`."""
    newest, median, oldest = catalog.ages_days
    return {
        "where": catalog.where,
        "today": catalog.today.isoformat(),
        "words": catalog.words,
        "age_days": {"newest": newest, "median": median, "oldest": oldest},
        "is_stale": catalog.is_stale,
        "not_known": dict(catalog.skipped),
        "n_found": n_found,
        "offers": [_row(offer, catalog.today) for offer in offers],
    }


def update_as_json(update: Update) -> dict[str, object]:
    """What came of refreshing, for `--json`."""
    return {
        "path": str(update.path),
        "n_offers": update.n_offers,
        "refreshed": list(update.refreshed),
        "kept": list(update.kept),
        "feeds": [
            {
                "provider": outcome.feed.provider,
                "layout": outcome.feed.layout,
                "n_offers": len(outcome.offers),
                "n_skipped": outcome.n_skipped,
                "problem": outcome.problem,
                "was_asked": not outcome.is_absent,
            }
            for outcome in update.outcomes
        ],
    }


def _row(offer: Offer, today: date) -> dict[str, object]:
    said = {name: getattr(offer, name) for name in _OF_OFFER}
    return {**said, "date": offer.date.isoformat(), "age_days": max(0, (today - offer.date).days)}


def _cells(offer: Offer, today: date) -> dict[str, str]:
    """One row of the table. What is not paid by the hour has its price under the hour and its unit
    beside.
    """
    usd, usd_per_gpu = offer.usd_per_hour, offer.usd_per_gpu_hour
    return {
        "GPUs": f"{offer.n_gpus}x {offer.gpu}" if offer.gpu else offer.instance[:20],
        "provider": offer.provider,
        "machine": offer.instance,
        "where": offer.zone or offer.region,
        "kind": "spot" if offer.is_spot else "demand",
        "an hour": say_usd(offer.usd if usd is None else usd),
        "per GPU": _UNITS[offer.unit] if usd_per_gpu is None else say_usd(usd_per_gpu),
        "age": f"{max(0, (today - offer.date).days)} d",
    }


def _sources(offers: Sequence[Offer]) -> dict[str, date]:
    """Sources with their newest date, each once, in the order of the table."""
    newest: dict[str, date] = {}
    for offer in offers:
        newest[offer.source] = max(newest.get(offer.source, date.min), offer.date)
    return newest
