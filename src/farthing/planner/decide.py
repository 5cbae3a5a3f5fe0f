"""Machines with their offers -> ranked plans and rejections. Each machine is planned once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date

from farthing.errors import InputError
from farthing.planner.price import Pricing, meet_deadline, within_limits
from farthing.planner.ranking import ranked
from farthing.planner.search import Refusal, Search, lacks_main_memory, may_be_spread
from farthing.planner.spot import Interruptions, prior
from farthing.planner.types import (
    HERE,
    OWN,
    Answer,
    Assumptions,
    JobSpec,
    Machine,
    MachinePlan,
    OfferPlan,
    Rejected,
)
from farthing.prices.offers import Offer

Hazard = Callable[[Offer], Interruptions]
Offered = tuple[Machine | Refusal, Sequence[Offer]]


def decide(
    wanted: JobSpec,
    machines: Iterable[Offered],
    *,
    today: date | None = None,
    assumptions: Assumptions | None = None,
    hazard: Hazard | None = None,
    explains: bool = True,
    has_own_prices: bool = False,
) -> Answer:
    """Plans for every offer, ranked. `hazard` says how long spot capacity lasts; by default the
    measured prior does. `explains`: rejections say what would let them in. `has_own_prices`: the
    offers' prices are the user's.
    """
    if wanted.lengths.n_examples < 1:
        raise InputError("there is no data to train on", where="data", to_do="check the data set")
    assumptions = assumptions or Assumptions()
    hazard = hazard or (lambda offer: prior(offer.n_gpus))
    search = Search(wanted, assumptions, explains=explains)
    plans: list[OfferPlan] = []
    rejected: list[Rejected] = []
    for machine, offers in machines:
        for found in _on_machine(search, machine, offers, hazard, today, has_own_prices):
            if isinstance(found, OfferPlan):
                plans.append(found)
            else:
                rejected.append(found)
    if wanted.deadline_s is not None:
        plans, late = meet_deadline(sorted(plans, key=lambda p: p.total_usd), wanted, hazard)
        rejected += late
    return Answer(tuple(ranked(plans)), tuple(rejected), wanted.n_steps)


def _on_machine(
    search: Search,
    machine: Machine | Refusal,
    offers: Sequence[Offer],
    hazard: Hazard,
    today: date | None,
    has_own_prices: bool,
) -> Iterable[OfferPlan | Rejected]:
    """Where nothing else fits and main memory is known to be enough, weights are kept there."""
    if isinstance(machine, Refusal):
        yield from (machine.of(offer) for offer in offers)
        return
    wanted, plan = search.wanted, search.plan(machine)
    other: MachinePlan | Refusal | None = None
    if isinstance(plan, Refusal) and search.explains and machine.is_cuda and may_be_spread(wanted):
        other = search.plan(machine, offloads=True)
    usual, offloaded = (
        Pricing(wanted, one, search.assumptions, hazard) if isinstance(one, MachinePlan) else None
        for one in (plan, other)
    )
    for offer in offers:
        pricing = usual
        if offloaded and offer.ram_gib is not None and not lacks_main_memory(offer, offloaded.on):
            pricing = offloaded
        if pricing is None:
            assert isinstance(plan, Refusal)
            yield plan.of(offer)
            continue
        if lacks := lacks_main_memory(offer, pricing.on):
            yield lacks
            continue
        age = max(0, (today - offer.date).days) if today is not None else 0
        is_users = has_own_prices or offer.provider in (HERE, OWN)
        found = pricing.plan(offer, age, is_users)
        yield within_limits(found, wanted) if isinstance(found, OfferPlan) else found
