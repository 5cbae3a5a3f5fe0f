"""Offers that are made up."""

from __future__ import annotations

from datetime import date
from typing import Any

from farthing.prices.offers import Billing, Offer

TODAY = date(2026, 11, 21)


def offer_of(
    gpu: str, usd: float, n_gpus: int = 1, *, provider: str = "A", spot: bool = False, **more: Any
) -> Offer:
    """Machines by the hour, whole, without other terms; `more` are fields of `Offer`."""
    plain = Offer(
        provider,
        "",
        gpu,
        n_gpus,
        "here",
        "",
        spot,
        "machine_hour",
        usd,
        "made",
        TODAY,
        Billing(provider),
    )
    return plain._replace(**more)
