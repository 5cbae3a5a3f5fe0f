"""The order of plans: the first choice, then by dollars, the sooner where estimates can't tell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from farthing.planner.types import OLD_PRICE_DAYS, OfferPlan

TIE, TIE_USD = 0.05, 0.01  # dollars closer than either are not told apart by estimates
FRESHER_WITHIN = 0.20  # an old price is not taken where a fresher one costs so much more at most


def ranked(plans: Iterable[OfferPlan]) -> list[OfferPlan]:
    """The first is the one to take: the cheapest at a price that can be had. Then by dollars, the
    sooner among those that can't be told apart, and last what has no price.
    """
    ordered = sorted(plans, key=_key)
    soonest = math.inf
    for number, plan in enumerate(ordered):
        if plan.wall_s < soonest and plan.is_priced:
            soonest = plan.wall_s
            ordered[number] = plan._replace(on_front=True)
    priced = [plan for plan in ordered if plan.is_priced]
    in_order = _by_dollars(priced)
    if priced:
        first = priced[_first_that_can_be_had(priced)]
        in_order = [first, *(plan for plan in in_order if plan is not first)]
    return in_order + [plan for plan in ordered if not plan.is_priced]


class WhyFirst(NamedTuple):
    """What the first has before cheaper plans, if there are any."""

    cheapest: OfferPlan | None  # that can be had as simply, and costs about the same
    fits_surely: bool  # where some of the cheaper may not
    can_be_had: bool  # where some of the cheaper can't


def why_first(plans: Sequence[OfferPlan]) -> WhyFirst:
    cheaper = [plan for plan in plans if plan.is_priced and plan.total_usd < plans[0].total_usd]
    return WhyFirst(
        min((plan for plan in cheaper if _can_be_had(plan)), key=_key, default=None),
        any(plan.on.is_tight for plan in cheaper),
        any(not plan.on.is_tight and not _can_be_had(plan) for plan in cheaper),
    )


def _key(plan: OfferPlan) -> tuple[object, ...]:
    offer = plan.offer
    name = offer.provider, offer.gpu, str(offer.n_gpus), offer.region, offer.zone, offer.kind
    return plan.total_usd, plan.wall_s, *name, offer.instance


def _first_that_can_be_had(priced: Sequence[OfferPlan]) -> int:
    """Of those near the cheapest that can be had the soonest, one GPU before several; `priced` has
    the cheapest first. Where nothing can be had: the cheapest in the worst case of its range.
    """
    can = [n for n, plan in enumerate(priced) if _can_be_had(plan)]
    nearly = [n for n, plan in enumerate(priced) if _can_be_had(plan, 2 * OLD_PRICE_DAYS)]
    every = range(len(priced))

    def worst(n: int) -> tuple[object, ...]:
        return priced[n].on.is_tight, priced[n].usd_range.high, n

    first = min(nearly or every, key=worst)
    if can and not (nearly and priced[first].usd_range.high < priced[can[0]].total_usd):
        near = itertools.takewhile(lambda n: priced[n].total_usd <= _most(priced[can[0]]), can)
        first = min(near, key=lambda n: (priced[n].recipe.n_gpus > 1, priced[n].wall_s, n))
    if priced[first].has_old_price:
        most = (1 + FRESHER_WITHIN) * priced[first].total_usd
        fresh = [n for n in every if not priced[n].has_old_price and priced[n].total_usd <= most]
        fresh = [n for n in fresh if priced[first].on.is_tight or not priced[n].on.is_tight]
        first = min(fresh, key=lambda n: (n not in can, n), default=first)
    return first


def _most(plan: OfferPlan) -> float:
    """The dollars that can't be told from a plan's."""
    return max(plan.total_usd * (1 + TIE), plan.total_usd + TIE_USD) + 1e-9


def _can_be_had(plan: OfferPlan, most_days: int = OLD_PRICE_DAYS) -> bool:
    """Whether the run can be had for its dollars: in memory that is surely enough, at a firm price,
    without a pack or deposit that is more than it needs, before the machine is taken back, and with
    what pip installs by itself.
    """
    is_paid_by_use = plan.up_front_usd <= (1 + TIE) * plan.total_usd + 0.01
    is_kept = plan.hours_range.high <= plan.offer.billing.most_hours
    is_fresh = plan.is_users_price or plan.price_age_days <= most_days
    is_firm = is_fresh and not plan.is_from_price
    is_simple = is_kept and not plan.on.machine.host_note
    return is_firm and is_paid_by_use and is_simple and not plan.on.is_tight


def _by_dollars(priced: Sequence[OfferPlan]) -> list[OfferPlan]:
    groups: list[list[OfferPlan]] = []
    most = -math.inf
    for plan in priced:
        if plan.total_usd > most:
            groups.append([])
            most = _most(plan)
        groups[-1].append(plan)
    return [plan for group in groups for plan in sorted(group, key=lambda p: p.wall_s)]
