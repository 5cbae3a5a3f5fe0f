"""The order of plans: the cheapest first, the sooner among dollars that estimates can't tell apart; and each with its why."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from farthing.planner.types import Plan
from farthing.prices.offers import Offer
from farthing.units import say_usd

TIE = 0.05  # dollars closer than this are not told apart by estimates that share their error


class _Placed(NamedTuple):
    """A plan with what it is ranked by, worked out once."""

    usd: float
    wall_s: float
    name: tuple[str, ...]
    plan: Plan


def ranked(plans: Iterable[Plan]) -> list[Plan]:
    """The cheapest first; among dollars that can't be told apart, the sooner. Each says why it stands where it does."""
    ordered = sorted((_Placed(p.total_usd, p.wall_s, _name_key(p.offer), p) for p in plans), key=lambda one: one[:3])
    soonest, front = math.inf, set()
    for one in ordered:
        if one.wall_s < soonest:
            soonest = one.wall_s
            front.add(id(one.plan))
    in_order: list[_Placed] = []
    start = 0
    while start < len(ordered):
        most = ordered[start].usd * (1 + TIE) + 1e-9
        end = next((i for i in range(start, len(ordered)) if ordered[i].usd > most), len(ordered))
        near = ordered[start:end]
        in_order += sorted(near, key=lambda one: (not one.plan.is_runnable, one.wall_s, one.usd, one.name))
        start = end
    return [
        replace(one.plan, on_front=id(one.plan) in front, why=_why(one, in_order[0], ordered[0], i == 0))
        for i, one in enumerate(in_order)
    ]


def _why(one: _Placed, first: _Placed, cheapest: _Placed, is_first: bool) -> str:
    if is_first:
        if one.usd > cheapest.usd:
            better = "sooner" if one.wall_s < cheapest.wall_s else "on one GPU"
            return (
                f"within {TIE:.0%} of the cheapest ({say_usd(cheapest.usd)}), which estimates can't tell apart, "
                f"and {better}"
            )
        return "the cheapest"
    more = one.usd / first.usd - 1 if first.usd else 0.0
    faster = first.wall_s / one.wall_s
    words = f"{more:+.0%} dollars" if abs(more) >= 0.005 else "as dear"
    return f"{words} against the first, " + (
        f"{faster:.1f} x as fast" if faster >= 1 else f"{1 / faster:.1f} x as slow"
    )


def _name_key(offer: Offer) -> tuple[str, ...]:
    return offer.provider, offer.gpu, str(offer.n_gpus), offer.region, offer.zone, offer.kind, offer.instance
