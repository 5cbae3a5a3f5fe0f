"""What a throughput comes to, by hand: hours and price-hours, spot with its interruptions, a cap on GPU-hours, a quicker step.

For those who bring figures of their own (samples a minute, a discount, how often they are interrupted). First-order: an
interruption loses half of the interval between checkpoints, and the restart; P is the price of an hour on demand.

Refuses to predict a throughput: `speed` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from farthing.errors import UserMistake
from farthing.planner.ownership import faster, hours_of, needed_samples_per_min, run_on_rent
from farthing.planner.pricing import LONGEST_INTERVAL_S
from farthing.units import parse_hours, parse_share, say_seconds, say_usd


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
        """Raises `UserMistake` for figures that can't be, and for those that lack their throughput."""
        for name in ("samples_per_min", "tokens_per_s", "interrupted_every_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e12:
                flag = f"--{name.removesuffix('_s') if name != 'tokens_per_s' else name}".replace("_", "-")
                raise UserMistake(f"{value:g} is not above 0", where=flag, to_do="give a number above 0")
        if self.samples_per_min is not None and self.tokens_per_s is not None:
            raise UserMistake(
                "one throughput is enough", where="--samples-per-min, --tokens-per-s", to_do="leave one out"
            )
        spot = self.spot_discount, self.spot_overhead, self.interrupted_every_s
        if any(value is not None for value in spot) and self.samples_per_min is None and self.tokens_per_s is None:
            raise UserMistake(
                "a discount or interruptions need a throughput", where="plan", to_do="add --samples-per-min N"
            )
        if self.restart_s and self.interrupted_every_s is None:
            raise UserMistake(
                "a restart comes after an interruption", where="--restart", to_do="add --interrupted-every 8h"
            )
        if self.step_s is not None and min(self.step_s) <= 0:
            raise UserMistake(
                "a step takes more than 0 seconds", where="--step-time", to_do="e.g. --step-time 200ms 130ms"
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
    """Figures as people write them: "50%", "8h", "3min", "200ms". Raises `UserMistake`."""

    def read(name: str, parse: Callable[[str], float], text: str) -> float:
        try:
            return parse(text)
        except ValueError as error:
            raise UserMistake(str(error), where=name, to_do=f"see `farthing plan --help` for {name}") from None

    def share(name: str, text: str | None) -> float | None:
        return None if text is None else read(name, parse_share, text)

    def seconds(name: str, text: str) -> float:
        return 3600 * read(name, parse_hours, text)

    figures = OwnFigures(
        samples_per_min=samples_per_min,
        tokens_per_s=tokens_per_s,
        spot_discount=share("--spot-discount", spot_discount),
        spot_overhead=share("--spot-overhead", spot_overhead),
        interrupted_every_s=None if interrupted_every is None else seconds("--interrupted-every", interrupted_every),
        restart_s=0.0 if restart is None else seconds("--restart", restart),
        step_s=None
        if step_time is None
        else (seconds("--step-time", step_time[0]), seconds("--step-time", step_time[1])),
    )
    figures.check()
    return figures


def by_hand(
    figures: OwnFigures,
    *,
    n_samples: int,
    n_epochs: float,
    tokens_per_sample: float,
    save_every_s: float | None = None,
    max_gpu_hours: float | None = None,
    usd_per_hour: float | None = None,
    paid_gb: float | None = None,
) -> dict[str, Any]:
    """The figures as plain values, and `words` with a line for each of them. `max_gpu_hours` is the job's cap; `paid_gb` is
    the memory that an hour is paid by, where it is paid by that."""
    found: dict[str, Any] = {"words": []}
    words: list[str] = found["words"]
    rate = figures.samples_per_min
    if rate is None and figures.tokens_per_s is not None:
        rate = figures.tokens_per_s * 60 / max(1.0, tokens_per_sample)
    if max_gpu_hours is not None:
        found["needed_samples_per_min"] = needed = needed_samples_per_min(n_samples, n_epochs, max_gpu_hours)
        words.append(f"{max_gpu_hours:g} GPU-hours are enough at {needed:,.0f} samples/min")
    if rate is not None:
        hours = hours_of(n_samples, n_epochs, rate)
        found |= {"samples_per_min": rate, "hours": hours, "price_hours": run_on_rent(1.0, hours)}
        text = f"{n_samples:,} samples x {n_epochs:g} at {rate:,.0f} a minute: {hours:.2f} h, {hours:.2f} P on demand"
        if usd_per_hour:
            found["usd"] = run_on_rent(usd_per_hour, hours)
            text += f", {say_usd(found['usd'])} at {say_usd(usd_per_hour)} an hour"
        if paid_gb:
            found["units"] = paid_gb * hours
            text += f" ({paid_gb:g} GB x {hours:.2f} h = {found['units']:.1f} units)"
        words.append(text)
        if max_gpu_hours is not None:
            found["fits_the_cap"] = hours <= max_gpu_hours
        _add_spot(found, figures, hours, save_every_s)
    if figures.step_s is not None:
        times, saved = faster(*figures.step_s)
        found |= {"times_as_fast": times, "saved_share": saved}
        before, after = (f"{1000 * s:g} ms" for s in figures.step_s)
        words.append(f"a step of {after} instead of {before}: {times:.2f} x as fast, {saved:.0%} fewer dollars")
    return found


def _add_spot(found: dict[str, Any], figures: OwnFigures, hours: float, save_every_s: float | None) -> None:
    """Interruptions, what they lose, and what spot costs with them."""
    overhead = figures.spot_overhead or 0.0
    if figures.interrupted_every_s is not None:
        interval_s = save_every_s if save_every_s is not None else LONGEST_INTERVAL_S
        n = hours * 3600 / figures.interrupted_every_s
        each_s = interval_s / 2 + figures.restart_s
        found |= {"n_interruptions": n, "lost_s_each": each_s, "lost_s": n * each_s}
        if figures.spot_overhead is None:
            overhead = n * each_s / (hours * 3600)
        found["words"].append(
            f"{n:.2g} expected interruptions, {say_seconds(each_s)} lost each (half of the {say_seconds(interval_s)} "
            f"between checkpoints, and the restart): {say_seconds(n * each_s)} in all"
        )
    if figures.spot_discount is None:
        return
    price_hours = run_on_rent(1 - figures.spot_discount, hours * (1 + overhead))
    saved = 1 - price_hours / hours
    found["spot"] = {
        "hours": hours * (1 + overhead),
        "overhead": overhead,
        "price_hours": price_hours,
        "saved_share": saved,
    }
    found["words"].append(
        f"on spot, {figures.spot_discount:.0%} cheaper with {overhead:.1%} more hours: {price_hours:.2g} P, "
        f"{abs(saved):.0%} {'less' if saved > 0 else 'more'} than on demand"
    )
