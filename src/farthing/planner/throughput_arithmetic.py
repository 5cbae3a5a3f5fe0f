"""What a throughput comes to, by hand: hours and price-hours, spot with its interruptions, a cap on
GPU-hours, a quicker step.

For those who bring figures of their own (samples a minute, a discount, how often they are
interrupted). First-order: an interruption loses half of the interval between checkpoints, and the
restart; P is the price of an hour on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from farthing.errors import InputError
from farthing.planner.ownership import faster, hours_of, needed_samples_per_min
from farthing.planner.price import LONGEST_INTERVAL_S
from farthing.units import parse_hours, parse_share, say_seconds, say_usd

MUCH_FASTER = 1.5  # than the plan expects: from here on it is said
REACHED = 0.75  # of a GPU's peak: more than the best published runs, recomputation included


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
    return 3600 * parse_hours(text)


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


@dataclass(frozen=True)
class ByHand:
    """What somebody's figures come to: a line of words for each, and the numbers by name."""

    words: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {"words": self.words, **self.numbers}


def by_hand(figures: OwnFigures, known: Known) -> ByHand:
    found = ByHand()
    words, numbers = found.words, found.numbers
    rate, cap = figures.samples_per_min, known.max_gpu_hours
    if rate is None and figures.tokens_per_s is not None:
        rate = figures.tokens_per_s * 60 / max(1.0, known.tokens_per_sample)
    if cap is not None:
        needed = needed_samples_per_min(known.n_samples, known.n_epochs, cap, known.n_gpus)
        of_several = f" with {known.n_gpus} GPUs" if known.n_gpus > 1 else ""
        words.append(f"{cap:g} GPU-hours are enough at {needed:,.0f} samples/min{of_several}")
        numbers["needed_samples_per_min"] = needed
    if rate is not None:
        hours = hours_of(known.n_samples, known.n_epochs, rate)
        numbers |= {"samples_per_min": rate, "hours": hours, "price_hours": hours}
        words.append(_with_bill(numbers, known, rate, hours))
        if known.samples_per_min and rate >= MUCH_FASTER * known.samples_per_min:
            words.append(_with_peak(numbers, known, rate))
        if cap is not None:
            numbers["fits_the_cap"] = hours * known.n_gpus <= cap
        words += _with_spot(numbers, figures, hours, known.save_every_s)
    if figures.step_s is not None:
        times, saved = faster(*figures.step_s)
        before, after = (f"{1000 * s:g} ms" for s in figures.step_s)
        step = f"a step of {after} instead of {before}"
        words.append(f"{step}: {times:.2f} x as fast, {saved:.0%} fewer dollars")
        numbers |= {"times_as_fast": times, "saved_share": saved}
    return found


def _with_bill(numbers: dict[str, Any], known: Known, rate: float, hours: float) -> str:
    what = f"{known.n_samples:,} samples x {known.n_epochs:g} at {rate:,.0f} a minute"
    text = f"{what}: {hours:.2f} h, {hours:.2f} P on demand"
    if known.usd_per_hour:
        numbers["usd"] = usd = known.usd_per_hour * hours
        text += f", {say_usd(usd)} at {say_usd(known.usd_per_hour)} an hour"
    if known.paid_gb:
        numbers["units"] = units = known.paid_gb * hours
        text += f" ({known.paid_gb:g} GB x {hours:.2f} h = {units:.1f} units)"
    return text


def _with_peak(numbers: dict[str, Any], known: Known, rate: float) -> str:
    """Against what the plan expects of the first choice, and against its peak."""
    numbers["share_of_peak"] = share = known.share_of_peak * rate / known.samples_per_min
    verdict = "more than training reaches" if share > REACHED else "ask how it was measured"
    verdict = "more than it has" if share > 1 else verdict
    expected = f"{known.samples_per_min:,.0f} samples/min of {known.tokens_per_sample:,.0f} tokens"
    taken = f"{rate:,.0f} would take {share:.0%} of its peak FLOP/s, {verdict}"
    return f"{known.machine}: the plan expects {expected} there; {taken}"


def _with_spot(
    numbers: dict[str, Any], figures: OwnFigures, hours: float, save_every_s: float | None
) -> list[str]:
    overhead, words, discount = figures.spot_overhead or 0.0, list[str](), figures.spot_discount
    if figures.interrupted_every_s is not None:
        interval_s = save_every_s if save_every_s is not None else LONGEST_INTERVAL_S
        n = hours * 3600 / figures.interrupted_every_s
        each_s = interval_s / 2 + figures.restart_s
        if figures.spot_overhead is None:
            overhead = n * each_s / (hours * 3600)
        why = f"half of the {say_seconds(interval_s)} between checkpoints, and the restart"
        lost = f"{say_seconds(each_s)} lost each ({why}): {say_seconds(n * each_s)} in all"
        words.append(f"{n:.2g} expected interruptions, {lost}")
        numbers |= {"n_interruptions": n, "lost_s_each": each_s, "lost_s": n * each_s}
    if discount is not None:
        longer = hours * (1 + overhead)
        price_hours = (1 - discount) * longer
        saved = 1 - price_hours / hours
        less = f"{abs(saved):.0%} {'less' if saved > 0 else 'more'} than on demand"
        how = f"on spot, {discount:.0%} cheaper with {overhead:.1%} more hours"
        words.append(f"{how}: {price_hours:.2g} P, {less}")
        numbers["spot"] = {"hours": longer, "overhead": overhead}
        numbers["spot"] |= {"price_hours": price_hours, "saved_share": saved}
    return words
