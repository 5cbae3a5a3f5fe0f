"""Own or rent: what a run costs on a GPU of one's own, when buying one pays back, what a year of
runs comes to.

Plain arithmetic on plain values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from farthing.errors import InputError
from farthing.prices.gpus import did_you_mean, find_gpu
from farthing.prices.offers import HOURS_PER_MONTH
from farthing.units import parse_hours, parse_in, parse_share, parse_usd

MONTHS_PER_YEAR = 12


class Owned(NamedTuple):
    """GPUs of one's own. Price and power are of all of them together, with the machine around them
    if it counts.

    Electricity at 0.15 dollars a kWh, a life of 36 months and nothing left at its end are
    assumptions, there to be replaced by one's own figures.
    """

    gpu: str  # a name of the catalog
    n_gpus: int = 1
    price_usd: float = 0.0
    power_kw: float = 0.0  # under load
    usd_per_kwh: float = 0.15
    resale_share: float = 0.0  # of the price, got back at the end
    life_months: float = 36.0
    other_usd_per_h: float = 0.0  # cooling, a seat in a rack
    hours_per_month: float = HOURS_PER_MONTH  # of use: the wear of a month is shared by these

    @property
    def lost_usd(self) -> float:
        return self.price_usd * (1 - self.resale_share)

    @property
    def running_usd_per_h(self) -> float:
        return self.power_kw * self.usd_per_kwh + self.other_usd_per_h

    @property
    def wear_usd_per_h(self) -> float:
        """Loss of value in an hour of use, evenly over its life and the hours it is used."""
        return self.lost_usd / (self.life_months * self.hours_per_month)


def run_on_own(owned: Owned, hours: float) -> dict[str, float]:
    """Dollars for one run by part: electricity, wear, other. They add up to its cost."""
    return {
        "electricity": hours * owned.power_kw * owned.usd_per_kwh,
        "wear": hours * owned.wear_usd_per_h,
        "other": hours * owned.other_usd_per_h,
    }


# ---- when buying pays back ----


def break_even_months(
    owned: Owned, rent_usd_per_month: float, hours_per_month: float
) -> float | None:
    """Months of so many hours of use after which owning is cheaper than a rent; None: never.

    (price - resale) / (rent - hours x (kW x price of a kWh + other per hour))
    """
    saved_per_month = rent_usd_per_month - owned.running_usd_per_h * hours_per_month
    return owned.lost_usd / saved_per_month if saved_per_month > 0 else None


# ---- years and savings ----


class Way(NamedTuple):
    """A way to have runs done: so much at the start, such as the price of GPUs less what they are
    sold for, and so much a run.
    """

    usd_per_run: float
    up_front_usd: float = 0.0


def yearly_usd(
    ways: Mapping[str, Way], n_runs_per_month: float, n_years: int = 1
) -> dict[str, float]:
    """Over years of a project with so many runs a month, the cheapest first."""
    n_runs = n_years * MONTHS_PER_YEAR * n_runs_per_month
    totals = {name: way.up_front_usd + n_runs * way.usd_per_run for name, way in ways.items()}
    return dict(sorted(totals.items(), key=lambda item: item[1]))


class Saving(NamedTuple):
    usd: float
    share: float | None  # of the dearer; None where it costs nothing


def saving(usd: float, against_usd: float) -> Saving:
    """What is saved by paying `usd` instead of `against_usd`; negative where it costs more."""
    return Saving(against_usd - usd, (against_usd - usd) / against_usd if against_usd else None)


# ---- how fast it has to be ----


def needed_samples_per_min(
    n_samples: float, n_epochs: float, gpu_hours: float, n_gpus: int = 1
) -> float:
    """The throughput of all GPUs together that a cap on GPU-hours asks for."""
    return n_samples * n_epochs / (gpu_hours / n_gpus * 60)


# ---- what people write ----


_WATTS = {"kw": 1.0, **dict.fromkeys(("w", "watt", "watts"), 1000.0)}
_MONTHS = dict.fromkeys(("", "mo", "month", "months"), 1.0)
_KEYS: dict[str, tuple[str, Callable[[str], float]]] = {
    "price": ("price_usd", parse_usd),
    "power": ("power_kw", lambda x: parse_in(x, _WATTS, 'a power such as "0.45kW" or "450W"')),
    "kwh": ("usd_per_kwh", parse_usd),
    "resale": ("resale_share", parse_share),
    "life": ("life_months", lambda x: parse_in(x, _MONTHS, "a number of months")),
    "other": ("other_usd_per_h", parse_usd),
    "use": ("hours_per_month", parse_hours),
}
"""By what people write: the field, and how its text is read."""
_EXAMPLE = '"RTX 4090:1600usd:0.45kW" or '
_EXAMPLE += '"2x RTX 3090:1400usd:0.7kW:kwh=0.30usd:resale=30%:life=36:use=100h"'


def parse_owned(text: str) -> Owned:
    """`"RTX 4090:1600usd:0.45kW"`: the GPU, what was paid, its power, then `key=value` for the
    rest.

    Keys: kwh (dollars a kWh), resale (share or percent), life (months), other (dollars an hour),
    use (hours a month). The power is the GPU's own by default; the price is nothing for
    what is paid off. Raises `InputError`.
    """
    name, *parts = (part.strip() for part in text.split(":"))
    count = re.fullmatch(r"(\d+)\s*x\s*(.+)", name, re.IGNORECASE)
    n_gpus = int(count[1]) if count else 1
    if not 1 <= n_gpus <= 1024:
        raise _mistake(text, f"{n_gpus} GPUs")
    try:
        gpu = find_gpu(count[2] if count else name)
    except InputError as error:
        raise InputError(error.what, where=f"own: {text}", to_do=error.to_do) from None
    found: dict[str, float] = {}
    for part in parts:
        word, is_named, value = part.partition("=")
        if not is_named:
            word, value = "power" if re.search(r"k?w$|watts?$", part.lower()) else "price", part
        key, parse = _key(text, word.strip())
        if key in found:
            raise _mistake(text, f"{part!r} says {key} once more")
        try:
            found[key] = number = parse(value.strip())
        except ValueError as error:
            raise _mistake(text, str(error)) from None
        most = 744.0 if key == "hours_per_month" else 1e7
        if not 0 <= number <= most or (number == 0 and key in ("life_months", "hours_per_month")):
            raise _mistake(text, f"{part!r} is not above 0 and at most {most:g}")
    found.setdefault("power_kw", gpu.power_watts * n_gpus / 1000)
    return Owned(gpu=gpu.name, n_gpus=n_gpus, **found)


def _key(text: str, word: str) -> tuple[str, Callable[[str], float]]:
    if word.lower() not in _KEYS:
        near = did_you_mean(word, _KEYS) or f"known: {', '.join(_KEYS)}"
        raise _mistake(text, f"no key `{word}` is known, {near}")
    return _KEYS[word.lower()]


def _mistake(text: str, what: str) -> InputError:
    return InputError(what, where=f"own: {text}", to_do=f"write {_EXAMPLE}")
