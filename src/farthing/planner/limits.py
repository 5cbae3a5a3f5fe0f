"""Plans against the job's limits: dollars, hours, and a deadline with the chance to meet it.

A plan that passes a limit is rejected with the limit, or the number of steps, that would let it in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from farthing.planner.ownership import needed_samples_per_min
from farthing.planner.spot import Choice, Interruptions, SaveSchedule, choose
from farthing.planner.types import JobSpec, Plan, Range, Rejected
from farthing.prices.offers import Offer
from farthing.units import said_apart, say_seconds, say_usd

_80_PERCENT = NormalDist().inv_cdf(
    0.9
)  # standard deviations on either side that hold 80 % of cases


def within_limits(plan: Plan, wanted: JobSpec) -> Plan | Rejected:
    """The plan, or why it passes the dollars, the hours or the deadline of the job."""
    usd, hours = plan.total_usd, plan.wall_s / 3600
    if wanted.max_usd is not None and usd > wanted.max_usd:
        what = "costs {}, the cap is {}".format(*said_apart(usd, wanted.max_usd, say_usd, "${}"))
        change = (
            "limits.max_usd:"
            f" {_rounded_up(usd)}{_or_fewer_steps(plan, wanted, wanted.max_usd / usd, ('waiting',))}"  # noqa: E501
        )
        return Rejected(plan.offer, what, change, usd / max(wanted.max_usd, 1e-9))
    if wanted.max_hours is not None and hours > wanted.max_hours:
        says = said_apart(hours, wanted.max_hours, lambda h: say_seconds(h * 3600), "{} h")
        what = "takes {}, the cap is {}".format(*says)
        change = (
            "limits.max_hours:"
            f" {_rounded_up(hours)}{_or_fewer_steps(plan, wanted, wanted.max_hours / hours)}"
        )
        return Rejected(plan.offer, what, change, hours / max(wanted.max_hours, 1e-9))
    gpu_hours, cap = hours * plan.recipe.n_gpus, wanted.max_gpu_hours
    if cap is not None and gpu_hours > cap:
        n_samples = wanted.n_steps * wanted.global_batch
        needed, now = (
            needed_samples_per_min(n_samples, 1, cap, plan.recipe.n_gpus),
            n_samples / (hours * 60),
        )
        says = said_apart(gpu_hours, cap, lambda h: f"{h:,.3g} GPU-hours", "{} GPU-hours")
        what = "takes {}, the cap is {}".format(*says)
        change = (
            f"limits.max_gpu_hours: {_rounded_up(gpu_hours)}, or {needed:,.0f} samples/min instead"
            f" of {now:,.0f}{_or_fewer_steps(plan, wanted, cap / gpu_hours)}"
        )
        return Rejected(plan.offer, what, change, gpu_hours / max(cap, 1e-9))
    least_s = plan.wall_s - plan.seconds.get(
        "waiting", 0.0
    )  # where spot waits, on demand may step in
    if wanted.deadline_s is not None and least_s > wanted.deadline_s:
        late = say_seconds(plan.wall_s - max(0.0, wanted.deadline_s))
        needed_s = _confident_s(plan, wanted.confidence)
        change = _later(needed_s - wanted.deadline_s)
        return Rejected(
            plan.offer,
            f"ends {late} after the deadline",
            change,
            needed_s / max(wanted.deadline_s, 1.0),
        )
    return plan


def _or_fewer_steps(plan: Plan, wanted: JobSpec, share: float, free: tuple[str, ...] = ()) -> str:
    """The job that keeps the limit: as many steps as the share leaves room for beside what may not
    shrink.

    Of spot that is also what interruptions take: it does shrink with the job, but not evenly.
    """
    moving_s = sum(
        plan.seconds.get(name, 0.0) for name in ("training", "evaluation", "checkpoints")
    )
    counted_s = plan.wall_s - sum(plan.seconds.get(name, 0.0) for name in free)
    left_s = share * counted_s - (counted_s - moving_s)
    n = int(wanted.n_steps * max(0.0, left_s) / max(moving_s, 1e-9) * 0.95)
    once_s = plan.seconds.get("evaluation", 0.0) / max(1, wanted.n_evaluations)
    per_step_s = (moving_s - plan.seconds.get("evaluation", 0.0)) / wanted.n_steps
    while n >= 1:  # evaluations do not shrink evenly
        fewer = replace(wanted, max_steps=n)
        if n * per_step_s + fewer.n_evaluations * once_s <= 0.97 * left_s:
            return f", or train.max_steps: {n} of {wanted.n_steps}"
        n = int(n * 0.9)
    return ""


def meet_deadline(
    plans: Sequence[Plan], wanted: JobSpec, hazard: Callable[[Offer], Interruptions]
) -> tuple[list[Plan], list[Rejected]]:
    """Plans with their chance to be done in time; spot that is not sure enough is rejected."""
    deadline_s = wanted.deadline_s
    assert deadline_s is not None
    kept: list[Plan] = []
    late: list[Rejected] = []
    on_demand: dict[Any, Plan] = {}
    for plan in plans:  # the cheapest come first
        if plan.spot is None:
            on_demand.setdefault(_machine_key(plan.offer), plan)
    for plan in plans:
        if plan.spot is None:
            chance = NormalDist(plan.wall_s, _spread_s(plan)).cdf(deadline_s)
            if chance >= wanted.confidence:
                kept.append(replace(plan, chance=chance))
            else:
                late.append(_late(plan, chance, deadline_s, wanted.confidence))
            continue
        busy_s = sum(plan.seconds.get(name, 0.0) for name in ("training", "evaluation"))
        before_s = sum(
            plan.seconds.get(name, 0.0) for name in ("setup", "download", "start-up", "tokenizing")
        )
        own = on_demand.get(_machine_key(plan.offer))
        own_usd = own.offer.usd_per_hour if own is not None else None
        n_saves = max(1.0, math.ceil(busy_s / plan.interval_s))
        save_s = max(1e-3, plan.seconds.get("checkpoints", 0.0) / n_saves)
        choice = choose(
            busy_s,
            SaveSchedule(plan.interval_s, save_s, before_s),
            hazard(plan.offer),
            spot_usd_per_h=plan.offer.usd_per_hour or 0.0,
            on_demand_usd_per_h=own_usd if own_usd is not None else math.inf,
            deadline_s=max(1.0, deadline_s - before_s),
            confidence=wanted.confidence,
        )
        alone = next(way for way in choice.ways if way.kind == "spot")
        if alone.chance >= wanted.confidence:
            kept.append(replace(plan, chance=alone.chance))
        elif (
            own is not None
            and choice.best.kind == "mixture"
            and choice.best.chance >= wanted.confidence
        ):
            kept.append(_mixed(plan, choice, before_s))
        else:
            late.append(_late(plan, alone.chance, deadline_s, wanted.confidence))
    return kept, late


def _late(plan: Plan, chance: float, deadline_s: float, confidence: float) -> Rejected:
    """A plan that is not sure enough to be done in time."""
    kind = "spot" if plan.spot is not None else "it"
    what = f"{kind} is done by the deadline with {chance:.0%} only"
    needed_s = _confident_s(plan, confidence)
    return Rejected(
        plan.offer, what, _later(needed_s - deadline_s), max(1.0, needed_s / max(deadline_s, 1.0))
    )


def _spread_s(plan: Plan) -> float:
    """Standard deviation of the end: the range holds 80 % of cases."""
    return max(1e-6, (plan.hours_range.high - plan.hours_range.likely) * 3600 / _80_PERCENT)


def _confident_s(plan: Plan, confidence: float) -> float:
    """Time after which a plan is done with this chance."""
    return plan.wall_s + max(
        0.0, NormalDist().inv_cdf(min(max(confidence, 1e-6), 1 - 1e-6))
    ) * _spread_s(plan)


def _later(seconds: float) -> str:
    """A deadline that is so much later, in whole minutes and not too few."""
    minutes = max(1, math.ceil(seconds / 60 + 1e-6))
    return f"a deadline {say_seconds(60.0 * minutes)} later"


def _machine_key(offer: Offer) -> tuple[str, str, int]:
    return offer.provider, offer.gpu, offer.n_gpus


def _mixed(plan: Plan, choice: Choice, before_s: float) -> Plan:
    """The spot plan with the same machine on demand whenever it falls behind the deadline."""
    way = choice.best
    rate = plan.offer.usd_per_hour or 0.0
    usd = {"compute": way.usd + before_s / 3600 * rate}
    usd |= {name: value for name, value in plan.usd.items() if name not in ("compute", "rounding")}
    waiting_s = (
        way.wall_s
        + before_s
        - sum(v for name, v in plan.seconds.items() if name not in ("waiting", "lost work"))
    )
    seconds = {
        name: value for name, value in plan.seconds.items() if name not in ("waiting", "lost work")
    }
    seconds["waiting"] = max(0.0, waiting_s)
    total, hours = sum(usd.values()), sum(seconds.values()) / 3600
    wide = plan.usd_range.high / max(plan.usd_range.likely, 1e-9)
    return replace(
        plan,
        usd=usd,
        seconds=seconds,
        usd_range=Range(total / wide, total, total * wide),
        hours_range=Range(
            min(hours, plan.hours_range.low), hours, max(hours, plan.hours_range.high)
        ),
        chance=way.chance,
        mixture=choice.why,
    )


def _rounded_up(usd: float) -> str:
    digits = 2 if usd < 100 else 0
    return f"{math.ceil(usd * 10**digits) / 10**digits:.{digits}f}"
