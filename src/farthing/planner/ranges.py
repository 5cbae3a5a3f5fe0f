"""How far off an estimate may be, in 4 of 5 cases: by what runs here measured, else by farthing's
own runs on such a GPU, else by how far off it was on published runs of that class, of trainers that
had no say in it.

All but the first are rows of `facts/estimate_errors.csv`; `bench/plan_accuracy.py --write` makes
those of published runs.
Of memory they are of all but weights, gradients and an optimizer's state, which are certain.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from farthing.models.blocks import block_of
from farthing.models.shapes import Shape
from farthing.planner.speed import LINK_ERROR, StepTime
from farthing.planner.types import Machine, Spread, is_from_price
from farthing.prices.offers import Offer
from farthing.tables import typed

NARROWEST = 0.30  # of seconds, until several runs of the same model on a machine agree
CPU_SPREAD = Spread(0.45, 1.7, "no run was measured on this processor")
UNTRACED = 1.15  # wider where no model of the family was held against code that runs
LAUNCH_ERROR = 0.6  # of seconds that wait for the host: processors differ that much
OLD_PRICE_ERROR = 0.30  # of a year, either way: by assumption
FROM_PRICE_ERROR = 0.30  # upwards, of a marketplace's lowest price: by assumption
COUNTED_HIGH = 1.2  # of 47 cases on simulated GPUs 9 of 10 took at most 1.1 times what was counted
SMALL = 1e9  # parameters under which the host is often slower than the GPU


class ErrorClass(NamedTuple):
    """A row: models and GPUs, and the middle 80 % of happened over predicted."""

    quantity: str
    gpus: str  # recent, old, or one GPU on which farthing itself ran
    kind: str
    precision: str
    low: float
    high: float
    known: str


@cache
def error_classes() -> tuple[ErrorClass, ...]:
    """Those that know more come first, and of these farthing's own runs."""
    found = typed("estimate_errors", ErrorClass)
    return tuple(
        sorted(found, key=lambda x: (-sum(map(bool, x[1:4])), x.gpus in ("recent", "old")))
    )


def class_of(shape: Shape, architecture: str, precision: str) -> tuple[str, str, str]:
    """(era, kind, precision): what errors are alike for."""
    era = "old" if architecture in ("Kepler", "Pascal", "Volta", "Turing") else "recent"
    if shape.n_active:
        kind = "experts"
    elif shape.n_decoder_layers:
        kind = "pair"
    elif shape.attention != "causal":
        kind = "encoder"
    else:
        kind = "causal" if shape.n_parameters >= SMALL else "small"
    return era, kind, "fp32" if precision == "fp32" else "16"


def spread_of(quantity: str, shape: Shape, architecture: str, precision: str, gpu: str) -> Spread:
    """Happened over predicted, of memory or seconds (speed): of farthing's own runs on a GPU, else
    of published runs of a class. Without a `gpu`: of these alone.
    """
    era, *of = class_of(shape, architecture, precision)
    is_traced = block_of(shape).is_traced
    places = ("", era, gpu) if is_traced else ("", era)
    row = next(
        row
        for row in error_classes()
        if row.quantity == quantity
        and row.gpus in places
        and all(a in ("", b) for a, b in zip(row[2:4], of, strict=True))
    )
    wider = 1.0 if is_traced else UNTRACED
    known = row.known if is_traced else f"{row.known}; no model of its family was traced"
    return Spread(row.low / wider, row.high * wider, known, row.gpus not in ("", era))


def _spread(quantity: str, machine: Machine, shape: Shape) -> Spread:
    return spread_of(quantity, shape, machine.architecture, machine.precision, machine.gpu)


def memory_spread(machine: Machine, shape: Shape) -> Spread:
    known = machine.calibration
    if known.extra_bytes is not None:  # a longer process keeps 4 to 6 % more than a shorter one
        error = 0.05 if machine.is_cuda else 0.08
        return Spread(1 - error, 1 + error, known.source)
    if not machine.is_cuda:
        return Spread(0.8, 1.2, CPU_SPREAD.known)
    return _spread("memory", machine, shape)


def surely_high(machine: Machine, shape: Shape, spread: Spread) -> float:
    """Times the memory that is not certain, with which a recipe must fit. Ranges are of trainers
    whose code is not known; farthing's own is, where its kernels were run on simulated GPUs.
    """
    era, kind, precision = class_of(shape, machine.architecture, machine.precision)
    is_counted = machine.is_cuda and block_of(shape).is_traced
    is_counted &= era == "recent" and precision == "16" and kind in ("causal", "small")
    return min(spread.high, COUNTED_HIGH) if is_counted else spread.high


def speed_spread(machine: Machine, shape: Shape, step: StepTime) -> Spread:
    """Of the seconds. What GPUs send, and what waits for the host, has an error of its own."""
    known, parts = machine.calibration, step.parts
    sending_s, hauling_s = (parts.get(x, 0.0) for x in ("communication", "weights from the host"))
    waiting_s = 0.0
    if not known.n_runs and machine.is_cuda:
        waiting_s = LAUNCH_ERROR * parts.get("launch", 0.0)
    less = min(LINK_ERROR, machine.device.link_error) * sending_s + LINK_ERROR * hauling_s
    more = machine.device.link_error * sending_s + LINK_ERROR * hauling_s
    less, more = ((one + waiting_s) / step.seconds for one in (less, more))
    if known.n_runs:
        found = Spread(1 - known.spread, 1 + known.spread, known.source)
    elif not machine.is_cuda:
        found = CPU_SPREAD
    else:
        found = _spread("speed", machine, shape)
    return found._replace(low=max(0.1, found.low - less), high=found.high + more)


def price_error(offer: Offer, old_days: int) -> tuple[float, float]:
    """Relative error of a price, down and up: of old ones, and of a marketplace's lowest."""
    old = min(0.9, OLD_PRICE_ERROR * old_days / 365)
    return old, old + (FROM_PRICE_ERROR if is_from_price(offer) else 0.0)
