"""What a throughput comes to, by hand: hours and price-hours, spot with its interruptions, a cap on
GPU-hours, a quicker step.

For those who bring figures of their own (samples a minute, a discount, how often they are
interrupted). First-order: an interruption loses half of the interval between checkpoints, and the
restart; P is the price of an hour on demand.

Refuses to predict a throughput: `speed` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from farthing.errors import InputError
from farthing.planner.ownership import faster, hours_of, needed_samples_per_min, run_on_rent
from farthing.planner.price import LONGEST_INTERVAL_S
from farthing.units import parse_hours, parse_share, say_seconds, say_usd

MUCH_FASTER = 1.5  # than the plan expects: from here on it is said
REACHED = (
    0.75  # of the peak of a GPU: more than the best published runs reach, recomputation included
)


@dataclass(frozen=True)
class OwnFigures:
    """What somebody knows of a run from elsewhere. Shares are of 1."""

    samples_per_min: float | None = None
    tokens_per_s: float | None = None
    spot_discount: float | None = None
    spot_overhead: float | None = None
    """Of the hours; None: from the interruptions."""
    interrupted_every_s: float | None = None
    restart_s: float = 0.0
    step_s: tuple[float, float] | None = None
    """Seconds of a step before and after."""

    @property
    def is_any(self) -> bool:
        """Whether there is anything to reckon with."""
        return self != OwnFigures()

    def check(self) -> None:
        """Raises `InputError` for figures that can't be, and for those that lack their throughput."""  # noqa: E501
        for name in ("samples_per_min", "tokens_per_s", "interrupted_every_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e12:
                flag = f"--{name.removesuffix('_s') if name != 'tokens_per_s' else name}".replace(
                    "_", "-"
                )
                raise InputError(
                    f"{value:g} is not above 0", where=flag, to_do="give a number above 0"
                )
        if self.samples_per_min is not None and self.tokens_per_s is not None:
            raise InputError(
                "one throughput is enough",
                where="--samples-per-min, --tokens-per-s",
                to_do="leave one out",
            )
        spot = self.spot_discount, self.spot_overhead, self.interrupted_every_s
        if (
            any(value is not None for value in spot)
            and self.samples_per_min is None
            and self.tokens_per_s is None
        ):
            raise InputError(
                "a discount or interruptions need a throughput",
                where="plan",
                to_do="add --samples-per-min N",
            )
        if self.restart_s and self.interrupted_every_s is None:
            raise InputError(
                "a restart comes after an interruption",
                where="--restart",
                to_do="add --interrupted-every 8h",
            )
        if self.step_s is not None and min(self.step_s) <= 0:
            raise InputError(
                "a step takes more than 0 seconds",
                where="--step-time",
                to_do="e.g. --step-time 200ms 130ms",
            )


def parse_figures(
    samples_per_min: float | None,
    tokens_per_s: float | None,
    spot_discount: str | None,
    spot_overhead: str | None,
    interrupted_every: str | None,
    restart: str | None,
    step_time: Sequence[str] | None,
) -> OwnFigures:
    """Figures as people write them: "50%", "8h", "3min", "200ms". Raises `InputError`."""

    def read(name: str, parse: Callable[[str], float], text: str) -> float:
        try:
            return parse(text)
        except ValueError as error:
            raise InputError(
                str(error), where=name, to_do=f"see `farthing plan --help` for {name}"
            ) from None

    def share(name: str, text: str | None) -> float | None:
        return None if text is None else read(name, parse_share, text)

    def seconds(name: str, text: str) -> float:
        return 3600 * read(name, parse_hours, text)

    figures = OwnFigures(
        samples_per_min=samples_per_min,
        tokens_per_s=tokens_per_s,
        spot_discount=share("--spot-discount", spot_discount),
        spot_overhead=share("--spot-overhead", spot_overhead),
        interrupted_every_s=(
            None if interrupted_every is None else seconds("--interrupted-every", interrupted_every)
        ),
        restart_s=0.0 if restart is None else seconds("--restart", restart),
        step_s=(
            None
            if step_time is None
            else (seconds("--step-time", step_time[0]), seconds("--step-time", step_time[1]))
        ),
    )
    figures.check()
    return figures


@dataclass(frozen=True)
class Known:
    """What the plan knows of a run that somebody's figures are reckoned with."""

    n_samples: int
    n_epochs: float
    tokens_per_sample: float
    save_every_s: float | None = None
    max_gpu_hours: float | None = None
    """The job's cap."""
    usd_per_hour: float | None = None
    """Of the first choice, where it is rented."""
    paid_gb: float | None = None
    """The memory that an hour is paid by, where it is paid by that."""
    machine: str = ""
    """The first choice, with ..."""
    n_gpus: int = 1
    """... so many GPUs, ..."""
    samples_per_min: float = 0.0
    """... the throughput that the plan expects there, and ..."""
    share_of_peak: float = 0.0
    """... the share of its GPUs' peak rate that this is."""


@dataclass(frozen=True)
class OnSpot:
    """Hours, and what they come to in hours on demand."""

    hours: float
    overhead: float
    price_hours: float
    saved_share: float


@dataclass(frozen=True)
class ByHand:
    """What somebody's figures come to, and a line of words for each of them; None where nothing is
    known of it.
    """

    words: tuple[str, ...] = ()
    needed_samples_per_min: float | None = None
    samples_per_min: float | None = None
    hours: float | None = None
    price_hours: float | None = None
    usd: float | None = None
    units: float | None = None
    share_of_peak: float | None = None
    fits_the_cap: bool | None = None
    n_interruptions: float | None = None
    lost_s_each: float | None = None
    lost_s: float | None = None
    spot: OnSpot | None = None
    times_as_fast: float | None = None
    saved_share: float | None = None

    def and_say(self, words: str, **found: Any) -> ByHand:
        """The same with more that was found, and words for it."""
        return replace(self, words=(*self.words, words), **found)

    def to_json(self) -> dict[str, object]:
        """Plain values, without what is not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def by_hand(figures: OwnFigures, known: Known) -> ByHand:
    """What the figures come to for a run."""
    found = ByHand()
    rate, cap = figures.samples_per_min, known.max_gpu_hours
    if rate is None and figures.tokens_per_s is not None:
        rate = figures.tokens_per_s * 60 / max(1.0, known.tokens_per_sample)
    if cap is not None:
        needed = needed_samples_per_min(known.n_samples, known.n_epochs, cap, known.n_gpus)
        of_several = f" with {known.n_gpus} GPUs" if known.n_gpus > 1 else ""
        found = found.and_say(
            f"{cap:g} GPU-hours are enough at {needed:,.0f} samples/min{of_several}",
            needed_samples_per_min=needed,
        )
    if rate is not None:
        hours = hours_of(known.n_samples, known.n_epochs, rate)
        found = _with_bill(found, known, rate, hours)
        found = _with_peak(found, known, rate)
        found = _with_spot(found, figures, hours, known.save_every_s)
    if figures.step_s is not None:
        times, saved = faster(*figures.step_s)
        before, after = (f"{1000 * s:g} ms" for s in figures.step_s)
        words = (
            f"a step of {after} instead of {before}: {times:.2f} x as fast, {saved:.0%} fewer"
            " dollars"
        )
        found = found.and_say(words, times_as_fast=times, saved_share=saved)
    return found


def _with_bill(found: ByHand, known: Known, rate: float, hours: float) -> ByHand:
    """Hours and dollars on demand."""
    usd = run_on_rent(known.usd_per_hour, hours) if known.usd_per_hour else None
    units = known.paid_gb * hours if known.paid_gb else None
    text = (
        f"{known.n_samples:,} samples x {known.n_epochs:g} at {rate:,.0f} a minute: {hours:.2f} h,"
        f" {hours:.2f} P on demand"
    )
    if usd is not None:
        text += f", {say_usd(usd)} at {say_usd(known.usd_per_hour)} an hour"
    if units is not None:
        text += f" ({known.paid_gb:g} GB x {hours:.2f} h = {units:.1f} units)"
    cap = known.max_gpu_hours
    return found.and_say(
        text,
        samples_per_min=rate,
        hours=hours,
        price_hours=run_on_rent(1.0, hours),
        usd=usd,
        units=units,
        fits_the_cap=None if cap is None else hours * known.n_gpus <= cap,
    )


def _with_peak(found: ByHand, known: Known, rate: float) -> ByHand:
    """Whether the first choice could do it: against what the plan expects there, and against its
    peak.
    """
    if not known.samples_per_min or rate < MUCH_FASTER * known.samples_per_min:
        return found
    share = known.share_of_peak * rate / known.samples_per_min
    verdict = (
        "more than it has"
        if share > 1
        else "more than training reaches"
        if share > REACHED
        else "ask how it was measured"
    )
    words = f"{known.machine}: the plan expects {known.samples_per_min:,.0f} samples/min of "
    words += (
        f"{known.tokens_per_sample:,.0f} tokens there; {rate:,.0f} would take {share:.0%} of its"
        f" peak FLOP/s, {verdict}"
    )
    return found.and_say(words, share_of_peak=share)


def _with_spot(
    found: ByHand, figures: OwnFigures, hours: float, save_every_s: float | None
) -> ByHand:
    """Interruptions, what they lose, and what spot costs with them."""
    overhead = figures.spot_overhead or 0.0
    if figures.interrupted_every_s is not None:
        interval_s = save_every_s if save_every_s is not None else LONGEST_INTERVAL_S
        n = hours * 3600 / figures.interrupted_every_s
        each_s = interval_s / 2 + figures.restart_s
        if figures.spot_overhead is None:
            overhead = n * each_s / (hours * 3600)
        words = (
            f"{n:.2g} expected interruptions, {say_seconds(each_s)} lost each (half of the"
            f" {say_seconds(interval_s)} between checkpoints, and the restart):"
            f" {say_seconds(n * each_s)} in all"
        )
        found = found.and_say(words, n_interruptions=n, lost_s_each=each_s, lost_s=n * each_s)
    if figures.spot_discount is None:
        return found
    price_hours = run_on_rent(1 - figures.spot_discount, hours * (1 + overhead))
    saved = 1 - price_hours / hours
    words = (
        f"on spot, {figures.spot_discount:.0%} cheaper with {overhead:.1%} more hours:"
        f" {price_hours:.2g} P, {abs(saved):.0%} {'less' if saved > 0 else 'more'} than on demand"
    )
    return found.and_say(words, spot=OnSpot(hours * (1 + overhead), overhead, price_hours, saved))
