"""Machines with their offers -> ranked plans and rejections. Each machine is planned once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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

    def on_machine(machine: Machine, offers: Sequence[Offer]) -> Iterator[OfferPlan | Rejected]:
        """Where nothing else fits and main memory is known to be enough, weights are kept there."""
        plan, other = search.plan(machine), None
        if isinstance(plan, Refusal) and explains and machine.is_cuda and may_be_spread(wanted):
            other = search.plan(machine, offloads=True)
        usual, offloaded = (
            Pricing(wanted, one, assumptions, hazard) if isinstance(one, MachinePlan) else None
            for one in (plan, other)
        )
        for offer in offers:
            pricing = usual
            if offloaded and offer.ram_gib is not None:
                pricing = None if lacks_main_memory(offer, offloaded.on) else offloaded
            if pricing is None:
                assert isinstance(plan, Refusal)
                yield plan.of(offer)
            elif lacks := lacks_main_memory(offer, pricing.on):
                yield lacks
            else:
                age = max(0, (today - offer.date).days) if today is not None else 0
                is_users = has_own_prices or offer.provider in (HERE, OWN)
                found = pricing.plan(offer, age, is_users)
                yield within_limits(found, wanted) if isinstance(found, OfferPlan) else found

    plans: list[OfferPlan] = []
    rejected: list[Rejected] = []
    for machine, offers in machines:
        if isinstance(machine, Refusal):
            rejected += map(machine.of, offers)
            continue
        for found in on_machine(machine, offers):
            if isinstance(found, OfferPlan):
                plans.append(found)
            else:
                rejected.append(found)
    if wanted.deadline_s is not None:
        plans, late = meet_deadline(sorted(plans, key=lambda p: p.total_usd), wanted, hazard)
        rejected += late
    return Answer(tuple(ranked(plans)), tuple(rejected), wanted.n_steps)
