"""What each choice of a plan saves, against doing it the plain way; and what the same job costs by
another method.

The plain way: full fine-tuning in fp32, padded as it comes in batches of eight, every layer
checkpointed, on demand on A100s. One choice after the other is put in its place, each priced by the
same search. Refuses to know clocks, files and words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.data.lengths import Lengths, from_arrays
from farthing.planner.recipe import BF16_WEIGHTS
from farthing.planner.search import QUALITY, decide
from farthing.planner.types import Answer, JobSpec, Place, Plan, Rejected, open_ended
from farthing.prices.offers import Offer

PLAIN_GPU, PLAIN_BATCH = "A100-80GB", 8
METHODS = ("full", "lora", "qlora")
NOT_RENTED = ("this machine", "own")
PlaceFor = Callable[[Offer, JobSpec], Place | Rejected]


class Rung(NamedTuple):
    """The plain way, or it with one choice more in its place."""

    choice: str
    """plain, method, precision, packing, checkpointing, place or spot."""
    what: str
    """What was chosen."""
    plan: Plan | None
    """The cheapest; None where none fits."""


def is_rented(plan: Plan) -> bool:
    """Whether it is on a machine of somebody else's."""
    return plan.offer.provider not in NOT_RENTED


def what_choices_save(
    wanted: JobSpec, best: Plan, plans: Sequence[Plan], offers: Iterable[Offer], place_for: PlaceFor
) -> list[Rung]:
    """From the plain way to the plan, one choice after the other. `offers` have the A100s; `plans`
    are the answer's.
    """
    plain_offers = _cheapest(
        offer for offer in offers if offer.gpu == PLAIN_GPU and not offer.is_spot
    )
    plain = replace(
        open_ended(wanted),
        method="full",
        precision="fp32",
        lengths=padded_as_it_comes(wanted.lengths),
        may_go_packed=False,
        checkpoint_every=1,
        micro_batch_tokens=None,
    )
    with_method = replace(plain, method=wanted.method)
    with_precision = replace(with_method, precision=best.place.precision)
    with_packing = replace(
        with_precision, lengths=wanted.lengths, may_go_packed=wanted.may_go_packed
    )
    as_asked = replace(open_ended(wanted), precision=best.place.precision)
    steps = [
        ("plain", f"full, fp32, padded, every layer checkpointed, {PLAIN_GPU} on demand", plain),
        ("method", wanted.method, with_method),
        ("precision", best.place.precision, with_precision),
        (
            "packing",
            "end to end" if best.recipe.stack.is_packed else "pieces of like lengths",
            with_packing,
        ),
        ("checkpointing", "", as_asked),
    ]
    rungs = [
        Rung(name, what, _cheapest_plan(other, plain_offers, place_for))
        for name, what, other in steps
    ]
    if rungs[-1].plan is not None:
        rungs[-1] = rungs[-1]._replace(what=f"of {rungs[-1].plan.recipe.settings.checkpointing}")
    on_demand = next((plan for plan in plans if is_rented(plan) and plan.spot is None), None)
    if best.spot is not None and on_demand is not None:
        rungs.append(
            Rung("place", f"{on_demand.place.device.name} at {on_demand.offer.provider}", on_demand)
        )
        rungs.append(Rung("spot", f"{best.place.device.name} at {best.offer.provider}", best))
    else:
        rungs.append(Rung("place", f"{best.place.device.name} at {best.offer.provider}", best))
    return rungs


def other_methods(
    wanted: JobSpec, answer: Answer, place_for: PlaceFor
) -> list[tuple[str, Plan | None]]:
    """The first choice for the job by each method, rented at a firm price; None where nothing can."""  # noqa: E501
    every = [plan.offer for plan in answer.plans] + [one.offer for one in answer.rejected]
    offers = _cheapest(one for one in every if one.gpu and one.provider not in NOT_RENTED)
    if not offers:  # only spot or the lowest of marketplaces was asked for: nothing to compare with
        return []
    found: list[tuple[str, Plan | None]] = [(wanted.method, answer.best)]
    others = {name: {"method": name} for name in METHODS if name != wanted.method}
    if wanted.method == "full" and wanted.optim in ("adamw_torch_fused", "adamw_torch"):
        others[f"full with train.optim: {BF16_WEIGHTS}{QUALITY[BF16_WEIGHTS]}"] = {
            "optim": BF16_WEIGHTS
        }
    for name, changes in others.items():
        other = replace(open_ended(wanted), **changes)  # type: ignore[arg-type]
        places = [
            place
            for place in (place_for(offer, other) for offer in offers)
            if isinstance(place, Place)
        ]
        found.append((name, decide(other, places, explains=False).best))
    return found


def padded_as_it_comes(lengths: Lengths, batch: int = PLAIN_BATCH) -> Lengths:
    """The lengths of examples in batches of so many in any order, each as long as the longest
    beside it.
    """
    order = np.random.Generator(np.random.Philox(key=1)).permutation(len(lengths.tokens))
    n = max(1, len(order) // batch) * batch if len(order) >= batch else len(order)
    groups = order[:n].reshape(-1, min(batch, n))

    def padded(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.repeat(values[groups].max(axis=1), groups.shape[1])

    return from_arrays(
        padded(lengths.tokens),
        None if lengths.targets is None else padded(lengths.targets),
        source=f"{lengths.source}, padded in batches of {batch}",
        n_examples=lengths.n_examples,
        n_target_tokens=lengths.n_target_tokens * n / max(1, lengths.n_examples),
        is_exact=False,
    )


def _cheapest(offers: Iterable[Offer]) -> list[Offer]:
    """The cheapest firm offer of each machine, on demand."""
    found: dict[tuple[str, int], Offer] = {}
    for offer in offers:
        usd, key = offer.usd_per_hour, (offer.gpu, offer.n_gpus)
        if (
            offer.is_spot
            or usd is None
            or offer.billing.prices_are == "from"
            or offer.billing.pack_usd
        ):
            continue
        if key not in found or usd < (found[key].usd_per_hour or 0.0):
            found[key] = offer
    return list(found.values())


def _cheapest_plan(wanted: JobSpec, offers: Sequence[Offer], place_for: PlaceFor) -> Plan | None:
    """On as few GPUs as it fits."""
    for n_gpus in sorted({offer.n_gpus for offer in offers}):
        places = [place_for(offer, wanted) for offer in offers if offer.n_gpus == n_gpus]
        plans = decide(
            wanted, [place for place in places if isinstance(place, Place)], explains=False
        ).plans
        if plans:
            return min(plans, key=lambda plan: plan.total_usd)
    return None
