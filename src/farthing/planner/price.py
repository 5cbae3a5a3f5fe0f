"""A machine's plan on an offer -> seconds and dollars by what they go to, with their ranges;
interruptions of spot counted; held against the job's limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

from farthing.planner.ownership import needed_samples_per_min
from farthing.planner.ranges import price_error
from farthing.planner.spot import (
    Z80,
    Expected,
    Interruptions,
    Mixture,
    SaveSchedule,
    WorkRange,
    best_interval_s,
    chance_by,
    expect,
    mixture,
    young_interval_s,
)
from farthing.planner.types import (
    OLD_PRICE_DAYS,
    Assumptions,
    JobSpec,
    MachinePlan,
    OfferPlan,
    Range,
    Rejected,
)
from farthing.prices.offers import Offer, bill, boot_of
from farthing.units import said_apart, say_seconds, say_usd

_STORES = {"s3": "AWS", "gs": "GCP", "az": "Azure"}  # whose own machines pay no egress to them
WORST = 10.0  # of what is likely: the upper end of a range that has none
CRASH_EVERY_S = 7 * 86400.0  # of a machine that is not taken away, by assumption
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 60.0, 1800.0
STARTING = ("setup", "download", "start-up", "tokenizing")
BUSY = ("training", "evaluation", "reference")


class _Timed(NamedTuple):
    """What a job takes on a machine and how it ranges, whatever an hour costs."""

    seconds: dict[str, float]
    wall_s: float
    billed_s: float
    interval_s: float
    n_saves: float
    spot: Expected | None
    hours_range: Range
    billed_range: Range


def quiet_interval_s(save_s: float) -> float:
    young = young_interval_s(save_s, CRASH_EVERY_S)
    return min(LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, young))


class Pricing:
    """The offers of one kind of machine. What they share is worked out once."""

    def __init__(
        self,
        wanted: JobSpec,
        on: MachinePlan,
        assumptions: Assumptions,
        hazard: Callable[[Offer], Interruptions],
    ) -> None:
        self.wanted, self.on, self.assumptions, self.hazard = wanted, on, assumptions, hazard
        self._time = cache(self._timed)

    def plan(self, offer: Offer, price_age_days: int, is_users_price: bool) -> OfferPlan | Rejected:
        """The offer's plan; a rejection where interruptions keep it from ever ending."""
        zone, save_s = self.hazard(offer) if offer.is_spot else None, self.save_s(offer)
        wanted, timed = self.wanted, self._time(self.setup_s(offer), save_s, zone)
        if not math.isfinite(timed.wall_s):
            what = "interruptions come faster than work is saved"
            change = "the same machine on demand"
            return Rejected(offer, "spot", what, change, "on demand", 10.0)
        held_gb = (wanted.shape.n_parameters * 2 + 3 * wanted.save_bytes) / 1e9
        usd = bill(
            offer,
            timed.billed_s / 3600,
            n_starts=1 + (math.ceil(timed.spot.n_interruptions) if timed.spot else 0),
            storage_gb=0.0 if self.on.machine.is_local else held_gb,
            storage_hours=timed.wall_s / 3600,
            egress_gb=self._leaving_gb(offer, timed.n_saves),
        )
        rate = offer.usd_per_hour or 0.0
        total, billed = sum(usd.values()), timed.billed_range
        is_old = price_age_days > OLD_PRICE_DAYS and not is_users_price
        cheaper, dearer = price_error(offer, price_age_days if is_old else 0)
        least = total - rate * (billed.likely - billed.low) / 3600
        most = total + rate * (billed.high - billed.likely) / 3600
        usd_range = Range(max(0.0, least * (1 - cheaper)), total, most * (1 + dearer))
        return OfferPlan(
            offer,
            self.on,
            timed.seconds,
            timed.wall_s,
            usd,
            total,
            timed.hours_range,
            usd_range,
            timed.interval_s,
            price_age_days,
            timed.spot,
            is_users_price=is_users_price,
        )

    def setup_s(self, offer: Offer) -> float:
        """From the request for a machine until it can begin."""
        if self.on.machine.is_local:
            return 0.0
        boot = boot_of(offer.provider)
        return boot.seconds if boot.is_known else self.assumptions.setup_s

    def save_s(self, offer: Offer) -> float:
        """That training stands still for a checkpoint: its copy goes to main memory where it takes
        no more than half of that, else straight to the disk.
        """
        known, a = self.on.machine.calibration.save_s, self.assumptions
        if known is not None:
            return known
        n_bytes = self.wanted.save_bytes
        fits = offer.ram_gib is None or n_bytes <= 0.5 * offer.ram_gib * 2**30
        rate = a.snapshot_bytes_per_s if fits or not self.on.machine.is_cuda else a.disk_bytes_per_s
        return 0.05 + n_bytes / rate

    def _leaving_gb(self, offer: Offer, n_checkpoints: float) -> float:
        """What leaves the provider: the model, and checkpoints where their store is elsewhere."""
        if self.on.machine.is_local:
            return 0.0
        wanted, scheme = self.wanted, self.wanted.store.partition("://")[0]
        is_elsewhere = wanted.store and _STORES.get(scheme) != offer.provider
        saved = n_checkpoints * wanted.save_bytes if is_elsewhere else 0.0
        return (wanted.n_trainable * 4 + saved) / 1e9

    def _timed(self, setup_s: float, save_s: float, zone: Interruptions | None) -> _Timed:
        """Seconds with checkpoints and, in a zone of spot capacity, interruptions."""
        wanted, speed = self.wanted, self.on.speed_spread
        seconds = self.on.seconds | {"setup": setup_s}
        before_s = setup_s + seconds["download"] + seconds["start-up"]
        busy_s = sum(seconds[name] for name in BUSY)
        steps_s = wanted.save_steps * self.on.step.seconds if wanted.save_steps else None
        interval_s = steps_s or wanted.save_every_s
        spot, cases = None, list[Expected]()
        if zone is None:
            interval_s = interval_s or quiet_interval_s(save_s)
            seconds["checkpoints"] = (busy_s // interval_s + 1) * save_s
        else:
            if interval_s is None:
                interval_s = max(30.0, min(best_interval_s(save_s, before_s, zone), busy_s))
            saves = SaveSchedule(interval_s, save_s, before_s)
            spot, *cases = (expect(busy_s, saves, one) for one in (zone, *zone.good_and_bad))
            seconds |= {"checkpoints": spot.checkpoint_s, "waiting": spot.waiting_s}
            seconds |= {"lost work": spot.lost_s, "restarts": spot.restart_s}
        seconds = {name: value for name, value in seconds.items() if value > 0}
        wall_s = sum(seconds.values())
        if spot is not None and not math.isfinite(spot.wall_s):
            wall_s = math.inf
        # what interruptions cost has a range of its own; starts and saves are no surer than steps
        away = ("waiting", "lost work", "restarts")
        moving_s = wall_s - sum(seconds.get(name, 0.0) for name in away)
        less_s, more_s = (1 - speed.low) * moving_s, (speed.high - 1) * moving_s
        if self.on.machine.precision_note and self.on.recipe.precision == "fp16":
            more_s += moving_s  # a run that overflows has to be done again

        def ranged(likely_s: float, *times_s: float) -> Range:
            """By the expected, the good and the bad case of interruptions."""
            low_s, high_s = likely_s - less_s, likely_s + more_s
            if times_s:
                low_s -= max(0.0, times_s[0] - times_s[1])
                high_s += max(0.0, times_s[2] - times_s[0])
            if not math.isfinite(high_s):  # a bad case that never ends: only a warning
                high_s = WORST * likely_s
            return Range(max(0.0, low_s), likely_s, high_s)

        every = [spot, *cases] if spot is not None else []
        hours = [s / 3600 for s in ranged(wall_s, *(one.wall_s for one in every))]
        billed_s = wall_s - seconds.get("waiting", 0.0)
        billed = ranged(billed_s, *(one.billed_s for one in every))
        n_saves = busy_s // interval_s + 1
        return _Timed(seconds, wall_s, billed_s, interval_s, n_saves, spot, Range(*hours), billed)


# ---- limits ----


def within_limits(plan: OfferPlan, wanted: JobSpec) -> OfferPlan | Rejected:
    hours, n_gpus = plan.wall_s / 3600, plan.recipe.n_gpus
    limits: tuple[tuple[str, float, float | None, Callable[[float], str], str], ...] = (
        ("usd", plan.total_usd, wanted.max_usd, say_usd, "costs ${}"),
        ("hours", hours, wanted.max_hours, lambda h: say_seconds(h * 3600), "takes {} h"),
        (
            "gpu_hours",
            hours * n_gpus,
            wanted.max_gpu_hours,
            "{:,.3g} GPU-hours".format,
            "takes {} GPU-hours",
        ),
    )
    for name, spent, cap, say, words in limits:
        if cap is None or spent <= cap:
            continue
        change = f"limits.max_{name}: {_rounded_up(spent)}"
        if name == "gpu_hours":
            n_samples = wanted.n_taken
            needed = needed_samples_per_min(n_samples, 1, cap, n_gpus)
            change += f", or {needed:,.0f} samples/min instead of {n_samples / hours / 60:,.0f}"
        is_usd = name == "usd"
        free, kept = (("waiting",), plan.usd) if is_usd else ((), {})
        fixed = sum(usd for part, usd in kept.items() if part != "compute")
        change += _or_fewer_steps(plan, wanted, (cap - fixed) / (spent - fixed), free)
        kind, verb = "dollars" if is_usd else name.replace("_", "-"), words.split()[0]
        says = said_apart(spent, cap, say, words.partition(" ")[2])
        what = "{} {}, the cap is {}".format(verb, *says)
        return Rejected(plan.offer, kind, what, change, kind, spent / max(cap, 1e-9))
    least_s = plan.wall_s - plan.seconds.get("waiting", 0.0)  # on demand may step in
    if wanted.deadline_s is not None and least_s > wanted.deadline_s:
        late = say_seconds(plan.wall_s - max(0.0, wanted.deadline_s))
        return _late(plan, wanted, f"ends {late} after the deadline")
    return plan


def _or_fewer_steps(
    plan: OfferPlan, wanted: JobSpec, share: float, free: tuple[str, ...] = ()
) -> str:
    """The job that keeps the limit: as many steps as the share leaves room for beside what may not
    shrink. Of spot that is also what interruptions take: it shrinks with the job, but not evenly.
    """
    moving_s = plan.seconds_of("training", "evaluation")
    counted_s = plan.wall_s - plan.seconds_of(*free)
    left_s = share * counted_s - (counted_s - moving_s)
    n = int(wanted.n_steps * max(0.0, left_s) / moving_s * 0.95)
    evaluating_s = plan.seconds_of("evaluation")
    once_s = evaluating_s / max(1, wanted.n_evaluations)
    per_step_s = (moving_s - evaluating_s) / wanted.n_steps
    while n >= 1:  # evaluations do not shrink evenly
        fewer = replace(wanted, max_steps=n)
        if n * per_step_s + fewer.n_evaluations * once_s <= 0.97 * left_s:
            return f", or train.max_steps: {n} of {wanted.n_steps}"
        n = int(n * 0.9)
    return ""


def meet_deadline(
    plans: Sequence[OfferPlan], wanted: JobSpec, hazard: Callable[[Offer], Interruptions]
) -> tuple[list[OfferPlan], list[Rejected]]:
    """Plans with their chance to be done in time; what is not sure enough is rejected."""
    deadline_s, least = wanted.deadline_s, wanted.confidence
    assert deadline_s is not None
    kept: list[OfferPlan] = []
    late: list[Rejected] = []
    # the cheapest, which comes first, is the last one put in
    on_demand = {_machine_key(one.offer): one for one in reversed(plans) if one.spot is None}
    chance_of, mixture_of = cache(chance_by), cache(mixture)
    for plan in plans:
        own = None
        if plan.spot is None:
            chance = NormalDist(plan.wall_s, _sigma_s(plan)).cdf(deadline_s)
        else:
            before_s, busy_s = (plan.seconds_of(*names) for names in (STARTING, BUSY))
            n_saves = max(1.0, math.ceil(busy_s / plan.interval_s))
            save_s = max(1e-3, plan.seconds.get("checkpoints", 0.0) / n_saves)
            saves, zone = SaveSchedule(plan.interval_s, save_s, before_s), hazard(plan.offer)
            work = WorkRange(busy_s, *plan.on.speed_spread[:2])
            case = max(1.0, deadline_s - before_s), work, saves, zone
            chance, own = chance_of(*case), on_demand.get(_machine_key(plan.offer))
        if chance >= least:
            kept.append(_in_time(plan, chance, deadline_s))
            continue
        if own is not None:
            way = mixture_of(case[0], WorkRange(busy_s), saves, zone)  # likely, as other dollars
            both, surely = _mixed(plan, own, way, before_s, chance), mixture_of(*case).chance
            if surely >= least and both.total_usd < own.total_usd:
                kept.append(_in_time(both, surely, deadline_s))
                continue
        kind = "it" if plan.spot is None else "spot"
        late.append(_late(plan, wanted, f"{kind} is done by the deadline with {chance:.0%} only"))
    return kept, late


def _in_time(plan: OfferPlan, chance: float, deadline_s: float) -> OfferPlan:
    """With its chance, which is 90 % at least: the range, which nine of ten are below, ends by
    then.
    """
    hours = plan.hours_range
    high = max(hours.likely, min(hours.high, deadline_s / 3600))
    return plan._replace(chance=chance, hours_range=hours._replace(high=high))


def _late(plan: OfferPlan, wanted: JobSpec, what: str) -> Rejected:
    deadline_s = wanted.deadline_s or 0.0
    needed_s = plan.wall_s + NormalDist().inv_cdf(wanted.confidence) * _sigma_s(plan)
    minutes = max(1, math.floor((needed_s - deadline_s) / 60) + 1)
    change = f"a deadline {say_seconds(60.0 * minutes)} later"
    over = max(1.0, needed_s / max(deadline_s, 1.0))
    return Rejected(plan.offer, "deadline", what, change, "deadline", over)


def _sigma_s(plan: OfferPlan) -> float:
    """Standard deviation of the end: the range holds 80 % of cases."""
    return max(1e-6, (plan.hours_range.high - plan.hours_range.likely) * 3600 / Z80)


def _machine_key(offer: Offer) -> tuple[str, str, int]:
    return offer.provider, offer.gpu, offer.n_gpus


def _mixed(
    plan: OfferPlan, own: OfferPlan, way: Mixture, before_s: float, alone: float
) -> OfferPlan:
    """With the same machine on demand when spot falls behind the deadline, each at its price."""
    rate, own_rate = ((one.offer.usd_per_hour or 0.0) / 3600 for one in (plan, own))
    usd = {"compute": (way.spot_s + before_s) * rate + way.on_demand_s * own_rate}
    usd |= {name: v for name, v in plan.usd.items() if name not in ("compute", "rounding")}
    seconds = {n: v for n, v in plan.seconds.items() if n not in ("waiting", "lost work")}
    seconds["waiting"] = max(0.0, way.wall_s + before_s - sum(seconds.values()))
    total, wall_s = sum(usd.values()), sum(seconds.values())
    wide = plan.usd_range.high / max(plan.usd_range.likely, 1e-9)
    known, hours = plan.hours_range, wall_s / 3600
    return plan._replace(
        usd=usd,
        total_usd=total,
        seconds=seconds,
        wall_s=wall_s,
        usd_range=Range(total / wide, total, total * wide),
        hours_range=Range(min(hours, known.low), hours, max(hours, known.high)),
        mixture=f"spot alone meets the deadline with {alone:.0%}; with on demand when it falls "
        f"behind it saves {1 - total / own.total_usd:.0%} of {say_usd(own.total_usd)}",
    )


def _rounded_up(number: float) -> str:
    digits = 2 if number < 100 else 0
    return f"{math.ceil(number * 10**digits) / 10**digits:.{digits}f}"
