"""Machines that can be had for a price, the terms of those who sell them, and what using one comes
to, part by part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import date
from functools import cache
from typing import NamedTuple

from farthing.prices.gpus import gpus
from farthing.tables import facts, typed

UNITS = ("machine_hour", "gb_hour", "run", "million_tokens")
KINDS = ("on-demand", "spot")
HOURS_PER_MONTH = 730.0
# where a provider's terms say nothing: block storage and traffic of the large clouds, by assumption
ASSUMED_STORAGE_USD_PER_GB_MONTH, ASSUMED_EGRESS_USD_PER_GB = 0.10, 0.09


class Billing(NamedTuple):
    """A provider's terms. A month of storage is 730 hours."""

    provider: str
    minimum_s: float = 0.0
    increment_s: float = 1.0
    storage_usd_per_gb_month: float | None = None  # not known; 0: in the price
    egress_usd_per_gb: float | None = None
    minimum_usd: float = 0.0  # of one managed run
    pack_usd: float = 0.0  # credits are sold in packs of this price; 0: no packs
    notes: str = ""
    source: str = ""
    date: date | None = None
    deposit_usd: float = 0.0  # paid before the first hour, and used up by later ones
    prices_are: str = ""  # `from` where the listed price is the lowest of many hosts'
    most_hours: float = math.inf  # after which a machine is taken back


class Offer(NamedTuple):
    """A machine by the hour, memory by the hour, a run, or training by the token."""

    provider: str
    instance: str
    # a name of `gpus`; empty for managed training, where the GPU is the provider's business
    gpu: str
    n_gpus: int
    region: str
    zone: str
    is_spot: bool
    unit: str  # one of UNITS
    usd: float  # of one unit; of a machine_hour, the whole machine
    source: str
    date: date
    billing: Billing
    vcpus: float | None = None
    ram_gib: float | None = None

    @property
    def kind(self) -> str:
        return "spot" if self.is_spot else "on-demand"

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars for an hour of the whole machine; None where hours are not what is paid for."""
        if self.unit == "machine_hour":
            return self.usd
        if self.unit == "gb_hour":
            return self.usd * self.n_gpus * gpus()[self.gpu].memory_gib
        return None

    @property
    def usd_per_gpu_hour(self) -> float | None:
        usd = self.usd_per_hour
        return None if usd is None else usd / self.n_gpus


def bill(
    offer: Offer,
    hours: float = 0.0,
    *,
    n_starts: int = 1,
    n_tokens: float = 0.0,
    storage_gb: float = 0.0,
    storage_hours: float | None = None,
    egress_gb: float = 0.0,
) -> dict[str, float]:
    """What using an offer comes to, in dollars by part; the parts add up to the bill. Parts of
    nothing are left out.

    `rounding` is what the provider's minimum and increments add; `n_starts` machines share the
    hours evenly, as when spot capacity is taken away and comes back. Storage is paid for
    `storage_hours` (the hours, unless said). What terms do not say of storage and egress is
    assumed.
    """
    terms = offer.billing
    usd_per_hour = offer.usd_per_hour
    parts: dict[str, float] = {}
    if usd_per_hour is not None:
        parts["compute"] = hours * usd_per_hour
        each_s = hours * 3600 / max(1, n_starts)
        rounded_s = math.ceil(each_s / terms.increment_s - 1e-9) * terms.increment_s
        more_s = max(1, n_starts) * max(terms.minimum_s, rounded_s) - hours * 3600
        parts["rounding"] = max(0.0, more_s) / 3600 * usd_per_hour if hours else 0.0
    else:
        n_units = 1.0 if offer.unit == "run" else n_tokens / 1e6
        parts["compute"] = n_units * offer.usd
        if n_units:
            parts["minimum"] = max(0.0, terms.minimum_usd - parts["compute"])
    held_hours = hours if storage_hours is None else storage_hours
    for_gb_month, for_gb = terms.storage_usd_per_gb_month, terms.egress_usd_per_gb
    for_gb_month = ASSUMED_STORAGE_USD_PER_GB_MONTH if for_gb_month is None else for_gb_month
    parts["storage"] = storage_gb * held_hours / HOURS_PER_MONTH * for_gb_month
    parts["egress"] = egress_gb * (ASSUMED_EGRESS_USD_PER_GB if for_gb is None else for_gb)
    return {name: usd for name, usd in parts.items() if usd or name == "compute"}


def cheapest_firm(offers: Iterable[Offer]) -> dict[tuple[str, int], Offer]:
    """The cheapest offer on demand of each machine, without packs, not the lowest of many hosts."""
    found: dict[tuple[str, int], Offer] = {}
    for offer in offers:
        usd, terms = offer.usd_per_hour, offer.billing
        if usd is None or offer.is_spot or terms.prices_are == "from" or terms.pack_usd:
            continue
        known = found.setdefault((offer.gpu, offer.n_gpus), offer)
        if usd < (known.usd_per_hour or 0.0):
            found[offer.gpu, offer.n_gpus] = offer
    return found


def up_front_usd(offer: Offer, usd: float) -> float:
    """Paid before: whole packs where credits are sold in packs, or a deposit."""
    pack = offer.billing.pack_usd
    return max(offer.billing.deposit_usd, math.ceil(usd / pack - 1e-9) * pack if pack else usd)


@cache
def billings() -> dict[str, Billing]:
    return {one.provider: one for one in typed("billing", Billing)}


def billing_of(provider: str) -> Billing:
    return billings().get(provider) or Billing(provider)


# ---- how long a machine takes ----

INSTALL_S = 120.0
"""For pip to bring farthing and torch, or to pull an image that has them: by assumption, after
there is a shell.
"""


class Boot(NamedTuple):
    """Seconds from the request for a machine until farthing runs there, and the source."""

    seconds: float
    source: str
    date: str
    is_known: bool = True  # whether there is a row for the provider


@cache
def boot_of(provider: str) -> Boot:
    rows = {row["provider"]: row for row in facts("boot")}
    row = rows.get(provider, rows[""])
    return Boot(float(row["seconds"]) + INSTALL_S, row["source"], row["date"], provider in rows)
