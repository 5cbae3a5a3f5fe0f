"""How far off an estimate may be, in 4 of 5 cases: by what was measured here, else by what is known
of GPU and model.

The figures are rows of `facts/estimate_errors.csv`. They are errors of rows that did not take part
in the estimate: a range for a trainer that was not seen is made from the others, and
`bench/plan_accuracy.py` prints how many rows it holds.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from farthing.planner.speed import Device, StepTime
from farthing.planner.types import Place
from farthing.prices.gpus import facts

HUMBLE = (
    0.30  # the narrowest range of seconds until several runs of the same model on a machine agree
)
CPU_SPEED_ERROR = 0.60  # of a processor that nothing was measured on: by assumption
OLD_PRICE_ERROR = 0.30  # of a year, either way: by assumption
LINK_ERROR, KNOWN_LINK_ERROR = (
    0.5,
    0.2,
)  # of the seconds that GPUs send to each other; once measured: by assumption
FROM_PRICE_ERROR = 0.30  # upwards, of a marketplace's lowest price: by assumption


class _Row(NamedTuple):
    quantity: str
    gpus: tuple[str, ...]  # that it is for; empty: any
    families: tuple[str, ...]  # model types; empty: any
    error: float
    known: str  # in words


@cache
def _rows() -> tuple[_Row, ...]:
    return tuple(
        _Row(
            row["quantity"],
            tuple(filter(None, row["gpus"].split(";"))),
            tuple(filter(None, row["families"].split(";"))),
            float(row["error"]),
            row["known"],
        )
        for row in facts("estimate_errors")
    )


@cache
def _row_of(quantity: str, gpu: str, family: str) -> _Row:
    """The first row that is for them: those that know more come first."""
    return next(
        row
        for row in _rows()
        if row.quantity == quantity
        and (not row.gpus or gpu in row.gpus)
        and (not row.families or family in row.families)
    )


def memory_error(place: Place, family: str = "") -> float:
    """Relative error of the bytes that a place is predicted to need; `family` is the `model_type`."""  # noqa: E501
    if place.calibration.extra_bytes is None:
        return _row_of("memory", place.device.name, family).error
    return (
        0.05 if place.is_cuda else 0.08
    )  # a process keeps more than it needs: 4 and 6 % more than a shorter run's


def speed_error(place: Place, family: str = "") -> float:
    """Relative error of the seconds that a place is predicted to take: never under `HUMBLE` until
    runs of it agree.
    """
    if place.calibration.n_runs:
        return place.calibration.spread
    if not place.is_cuda:
        return CPU_SPEED_ERROR
    return max(HUMBLE, published_error(place, family))


def published_error(place: Place, family: str = "") -> float:
    """Relative error of tokens a second against published runs of others."""
    return _row_of("speed", place.device.name, family).error


def link_error(step: StepTime, device: Device) -> float:
    """What links between GPUs, and to the host, add to the error of the seconds: where not measured
    the rate may be half.
    """
    of_links = KNOWN_LINK_ERROR if device.knows_link else LINK_ERROR
    parts = step.parts
    unsure_s = of_links * parts.get("communication", 0.0) + LINK_ERROR * parts.get(
        "weights from the host", 0.0
    )
    return unsure_s / step.seconds


def price_error(place: Place) -> tuple[float, float]:
    """Relative error of a price, downwards and upwards: of old ones, and of the lowest price of a
    marketplace.
    """
    if place.has_firm_price:
        return 0.0, 0.0
    old = 0.0
    if place.has_old_price:
        old = min(0.9, OLD_PRICE_ERROR * place.price_age_days / 365)
    return old, old + (FROM_PRICE_ERROR if place.is_from_price else 0.0)


def how_sure(place: Place, family: str = "") -> str:
    """Where the ranges of a plan come from, in words."""
    speed, memory = speed_error(place, family), memory_error(place, family)
    known = place.calibration
    if known.n_runs:
        return f"calibrated by {known.source}: seconds within {speed:.0%} in 4 of 5 runs"
    if not place.is_cuda:
        return f"nothing was measured on this processor: {speed:.0%} either way is supposed"
    rows = [_row_of(name, place.device.name, family).known for name in ("speed", "memory")]
    if speed > (published := published_error(place, family)):
        rows[0] += f", which were within {published:.0%}, and none of yours"
    return (
        f"not measured by you; seconds within {speed:.0%} in 4 of 5 runs ({rows[0]}), "
        f"memory within {memory:.0%} ({rows[1]})"
    )
