"""What each choice of a plan saves, against doing it the plain way; and the same job by another
method.

The plain way: full fine-tuning in fp32, padded as it comes in batches of eight, every layer
checkpointed, on demand on A100s. One choice after the other is put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import date
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.data.lengths import Lengths, from_arrays
from farthing.planner.decide import Offered, decide
from farthing.planner.optimizers import BF16_WEIGHTS
from farthing.planner.types import HERE, OWN, Answer, JobSpec, Plan, open_ended
from farthing.prices.offers import Offer, cheapest_firm

PLAIN_GPU, PLAIN_BATCH = "A100-80GB", 8
METHODS = ("full", "lora", "qlora")
MachinesFor = Callable[[Sequence[Offer], JobSpec], list[Offered]]


class SavingsStep(NamedTuple):
    choice: str  # plain, method, precision, packing, checkpointing, place or spot
    what: str  # what was chosen
    plan: Plan | None  # the cheapest; None where none fits


def what_choices_save(
    wanted: JobSpec,
    best: Plan,
    plans: Sequence[Plan],
    offers: Iterable[Offer],
    machines_for: MachinesFor,
    today: date,
) -> list[SavingsStep]:
    """From the plain way to the plan, one choice after the other. `plans` are the answer's."""
    plain_offers = _cheapest(offer for offer in offers if offer.gpu == PLAIN_GPU)
    precision, asked = best.recipe.precision, open_ended(wanted)
    plain = replace(
        asked,
        method="full",
        precision="fp32",
        lengths=padded_as_it_comes(wanted.lengths),
        may_go_packed=False,
        checkpoint_every=1,
        micro_batch_tokens=None,
    )
    method = replace(plain, method=wanted.method)
    in_precision = replace(method, precision=precision)
    packed = replace(in_precision, lengths=wanted.lengths, may_go_packed=wanted.may_go_packed)
    steps = [
        ("plain", f"full, fp32, padded, every layer checkpointed, {PLAIN_GPU} on demand", plain),
        ("method", wanted.method, method),
        ("precision", precision, in_precision),
        (
            "packing",
            "end to end" if best.recipe.stack.is_packed else "pieces of like lengths",
            packed,
        ),
        ("checkpointing", "", replace(asked, precision=precision)),
    ]
    found = []
    for name, what, other in steps:
        plan = _cheapest_plan(other, plain_offers, machines_for, today)
        if not what and plan is not None:
            what = f"of {plan.recipe.settings.checkpointing}"
        found.append(SavingsStep(name, what, plan))
    on_demand = next((plan for plan in plans if plan.is_rented and plan.spot is None), None)
    last = [("place", on_demand), ("spot", best)]
    if best.spot is None or on_demand is None:
        last = [("place", best)]
    for name, plan in last:
        assert plan is not None
        found.append(SavingsStep(name, f"{plan.on.machine.gpu} at {plan.offer.provider}", plan))
    return found


def other_methods(
    wanted: JobSpec, answer: Answer, machines_for: MachinesFor, today: date
) -> list[tuple[str, Plan | None]]:
    """The first choice by each method, rented at a firm price; None where nothing can."""
    every = [*(one.offer for one in answer.plans), *(one.offer for one in answer.rejected)]
    offers = _cheapest(offer for offer in every if offer.gpu)
    if not offers:  # only spot or the lowest of marketplaces was asked for: nothing to compare with
        return []
    found: list[tuple[str, Plan | None]] = [(wanted.method, answer.best)]
    asked = open_ended(wanted)
    others = {name: replace(asked, method=name) for name in METHODS if name != wanted.method}
    if wanted.method == "full" and wanted.optim in ("adamw_torch_fused", "adamw_torch"):
        in_bf16 = replace(asked, optim=BF16_WEIGHTS)
        others[f"full with train.optim: {BF16_WEIGHTS} ({in_bf16.optimizer.quality})"] = in_bf16
    for name, other in others.items():
        machines = machines_for(offers, other)
        found.append((name, decide(other, machines, today=today, explains=False).best))
    return found


def padded_as_it_comes(lengths: Lengths, batch: int = PLAIN_BATCH) -> Lengths:
    """Examples in batches of so many in any order, each as long as the longest beside it."""
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
    rented = (offer for offer in offers if offer.provider not in (HERE, OWN))
    return list(cheapest_firm(rented).values())


def _cheapest_plan(
    wanted: JobSpec, offers: Sequence[Offer], machines_for: MachinesFor, today: date
) -> Plan | None:
    """On as few GPUs as it fits."""
    for n_gpus in sorted({offer.n_gpus for offer in offers}):
        machines = machines_for([offer for offer in offers if offer.n_gpus == n_gpus], wanted)
        plans = decide(wanted, machines, today=today, explains=False).plans
        if plans:
            return min(plans, key=lambda plan: plan.total_usd)
    return None
