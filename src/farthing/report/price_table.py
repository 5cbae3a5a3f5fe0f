"""What a person sees of prices in the terminal. Draws; computes nothing, and reads no file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

from rich.console import Console

from farthing.prices.catalog import Catalog
from farthing.prices.formats import COLUMNS
from farthing.prices.offers import Offer
from farthing.report.draw import draw_block
from farthing.report.words import lines, say, table

if TYPE_CHECKING:
    from farthing.prices.feeds import PriceUpdate

_OF_OFFER = (*(name for name in COLUMNS if name != "date"), "usd_per_hour", "usd_per_gpu_hour")
_CUTS = {"machine": 30, "provider": 10, "where": 5, "GPUs": 20}


def draw_prices(console: Console, catalog: Catalog, offers: Sequence[Offer], n_found: int) -> None:
    """Offers, their age, and their sources. Fits 80 columns; wider ones show the machine."""
    rows = table("prices.txt", "offers", offers, catalog.today, console.width >= 110)
    draw_block(console, rows._replace(cuts=_CUTS))
    for line in lines("data.rich", "prices", catalog, n_found - len(offers), _sources(offers)):
        console.print(line, soft_wrap=True)


def draw_update(console: Console, update: PriceUpdate) -> None:
    for line in lines("data.rich", "update", update):
        console.print(line, soft_wrap=True)


def prices_as_json(catalog: Catalog, offers: Sequence[Offer], n_found: int) -> dict[str, object]:
    return {
        "where": catalog.where,
        "today": catalog.today.isoformat(),
        "words": say("prices.txt", "words", catalog),
        "age_days": dict(zip(("newest", "median", "oldest"), catalog.ages_days, strict=True)),
        "is_stale": catalog.is_stale,
        "not_known": dict(catalog.skipped),
        "n_found": n_found,
        "offers": [
            {name: getattr(offer, name) for name in _OF_OFFER}
            | {
                "date": offer.date.isoformat(),
                "age_days": max(0, (catalog.today - offer.date).days),
            }
            for offer in offers
        ],
    }


def update_as_json(update: PriceUpdate) -> dict[str, object]:
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


def _sources(offers: Sequence[Offer]) -> dict[str, date]:
    """Sources with their newest date, each once."""
    return {offer.source: offer.date for offer in sorted(offers, key=lambda offer: offer.date)}
