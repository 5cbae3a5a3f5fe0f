"""What a throughput comes to, by hand: hours and price-hours, spot with its interruptions, a cap on
GPU-hours, a quicker step.

For those who bring figures of their own (samples a minute, a discount, how often they are
interrupted). First-order: an interruption loses half of the interval between checkpoints, and the
restart; P is the price of an hour on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from farthing.errors import InputError
from farthing.planner.ownership import needed_samples_per_min
from farthing.planner.price import LONGEST_INTERVAL_S
from farthing.units import parse_hours, parse_share

MUCH_FASTER = 1.5  # than the plan expects: from here on a notice tells


class OwnFigures(NamedTuple):
    """What somebody knows of a run from elsewhere. Shares are of 1."""

    samples_per_min: float | None = None
    tokens_per_s: float | None = None
    spot_discount: float | None = None
    spot_overhead: float | None = None  # of the hours; None: from the interruptions
    interrupted_every_s: float | None = None
    restart_s: float = 0.0
    step_s: tuple[float, float] | None = None  # seconds of a step before and after


def _seconds(text: str) -> float:
    seconds = 3600 * parse_hours(text)
    if seconds and text.strip()[-1].isdigit():
        raise ValueError(f'{text!r} has no unit: write it as "200ms", "3min" or "8h"')
    return seconds


_PARSERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "samples_per_min": ("samples_per_min", float),
    "tokens_per_s": ("tokens_per_s", float),
    "spot_discount": ("spot_discount", parse_share),
    "spot_overhead": ("spot_overhead", parse_share),
    "interrupted_every": ("interrupted_every_s", _seconds),
    "restart": ("restart_s", _seconds),
    "step_time": ("step_s", lambda both: tuple(map(_seconds, both))),
}
"""By the names of the options: the figure, and how its text is read."""


def parse_figures(says: Mapping[str, Any]) -> OwnFigures:
    """Figures as people write them, by option: "50%", "8h", "3min", "200ms". Raises `InputError`
    for those that can't be, and for those that lack their throughput.
    """
    found: dict[str, Any] = {}
    for option, (name, parse) in _PARSERS.items():
        flag = f"--{option.replace('_', '-')}"
        if says.get(option) is None:
            continue
        try:
            found[name] = value = parse(says[option])
        except ValueError as error:
            to_do = f"see `farthing plan --help-all` for {flag}"
            raise InputError(str(error), where=flag, to_do=to_do) from None
        least = min(value) if isinstance(value, tuple) else value
        is_share = parse is parse_share or option == "restart"
        if not (is_share or 0 < least < 1e12):
            raise InputError(f"{least:g} is not above 0", where=flag, to_do="give more")
    figures = OwnFigures(**found)
    rates = found.keys() & {"samples_per_min", "tokens_per_s"}
    if len(rates) > 1:
        where = "--samples-per-min, --tokens-per-s"
        raise InputError("one throughput is enough", where=where, to_do="leave one out")
    if not rates and found.keys() & {"spot_discount", "spot_overhead", "interrupted_every_s"}:
        what = "a discount or interruptions need a throughput"
        raise InputError(what, where="plan", to_do="add --samples-per-min N")
    if figures.restart_s and figures.interrupted_every_s is None:
        what = "a restart comes after an interruption"
        raise InputError(what, where="--restart", to_do="add --interrupted-every 8h")
    return figures


@dataclass(frozen=True)
class Known:
    """What the plan knows of a run that somebody's figures are reckoned with."""

    n_samples: int
    n_epochs: float
    tokens_per_sample: float
    save_every_s: float | None = None
    max_gpu_hours: float | None = None  # the job's cap
    usd_per_hour: float | None = None  # of the first choice, where it is rented
    paid_gb: float | None = None  # the memory that an hour is paid by, where it is paid by that
    machine: str = ""  # the first choice, with
    n_gpus: int = 1  # ... so many GPUs,
    samples_per_min: float = 0.0  # ... the throughput that the plan expects there, and
    share_of_peak: float = 0.0  # ... the share of its GPUs' peak rate that this is


def by_hand(figures: OwnFigures, known: Known) -> dict[str, Any]:
    """What somebody's figures come to, by name."""
    found: dict[str, Any] = {}
    rate, cap = figures.samples_per_min, known.max_gpu_hours
    if rate is None and figures.tokens_per_s is not None:
        rate = figures.tokens_per_s * 60 / max(1.0, known.tokens_per_sample)
    if cap is not None:
        needed = needed_samples_per_min(known.n_samples, known.n_epochs, cap, known.n_gpus)
        found["needed_samples_per_min"] = needed
    if rate is not None:
        hours = known.n_samples * known.n_epochs / rate / 60
        found |= {"samples_per_min": rate, "hours": hours, "price_hours": hours}
        if known.usd_per_hour:
            found["usd"] = known.usd_per_hour * hours
        if known.paid_gb:
            found["units"] = known.paid_gb * hours
        if known.samples_per_min and rate >= MUCH_FASTER * known.samples_per_min:
            found["share_of_peak"] = known.share_of_peak * rate / known.samples_per_min
        if cap is not None:
            found["fits_the_cap"] = hours * known.n_gpus <= cap
        found |= _on_spot(figures, hours, known.save_every_s)
    if figures.step_s is not None:
        before_s, after_s = figures.step_s
        found |= {"times_as_fast": before_s / after_s, "saved_share": 1 - after_s / before_s}
    return found


def _on_spot(figures: OwnFigures, hours: float, save_every_s: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    overhead, discount = figures.spot_overhead or 0.0, figures.spot_discount
    if figures.interrupted_every_s is not None:
        interval_s = LONGEST_INTERVAL_S if save_every_s is None else save_every_s
        n = hours * 3600 / figures.interrupted_every_s
        each_s = interval_s / 2 + figures.restart_s
        if figures.spot_overhead is None:
            overhead = n * each_s / (hours * 3600)
        found |= {"n_interruptions": n, "lost_s_each": each_s, "lost_s": n * each_s}
    if discount is not None:
        longer = hours * (1 + overhead)
        price_hours = (1 - discount) * longer
        found["spot"] = {"hours": longer, "overhead": overhead, "price_hours": price_hours}
        found["spot"]["saved_share"] = 1 - price_hours / hours
    return found
