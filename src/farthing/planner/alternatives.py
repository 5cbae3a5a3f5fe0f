"""What each choice of a plan saves, against doing it the plain way; and the same job by another
method.

The plain way: full fine-tuning in fp32, padded as it comes in batches of eight, every layer
checkpointed, on demand on A100s. One choice after the other is put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from farthing.arrays import Ints
from farthing.data.lengths import Lengths, from_arrays
from farthing.errors import InputError
from farthing.planner.optimizers import BF16_WEIGHTS
from farthing.planner.types import HERE, OWN, Answer, JobSpec, OfferPlan, open_ended
from farthing.prices.offers import Offer, cheapest_firm

PLAIN_GPU, PLAIN_BATCH = "A100-80GB", 8
PLAIN_WAY = f"full, fp32, padded, every layer checkpointed, {PLAIN_GPU} on demand"
METHODS = ("full", "lora", "qlora")
AnswerFor = Callable[[JobSpec, Sequence[Offer]], Answer]


class SavingsStep(NamedTuple):
    choice: str  # plain, method, precision, packing, checkpointing, place or spot
    what: str  # what was chosen
    plan: OfferPlan | None  # the cheapest; None where none fits


def what_choices_save(
    answer: Answer, best: OfferPlan, wanted: JobSpec, offers: Iterable[Offer], answer_for: AnswerFor
) -> list[SavingsStep]:
    """From the plain way to the best rented plan, one choice after the other."""
    plain_offers = _cheapest(offer for offer in offers if offer.gpu == PLAIN_GPU)
    precision, asked = best.recipe.precision, open_ended(wanted)
    packing = "end to end" if best.recipe.stack.is_packed else "pieces of like lengths"
    padded = padded_as_it_comes(wanted.lengths)
    plain = replace(asked, method="full", precision="fp32", may_go_packed=False, lengths=padded)
    plain = replace(plain, micro_batch_tokens=None, checkpoint_every=1)
    method = replace(plain, method=wanted.method)
    in_precision = replace(method, precision=precision)
    packed = replace(in_precision, lengths=wanted.lengths, may_go_packed=wanted.may_go_packed)
    found = []
    for name, what, other in (
        ("plain", PLAIN_WAY, plain),
        ("method", wanted.method, method),
        ("precision", precision, in_precision),
        ("packing", packing, packed),
        ("checkpointing", "", replace(asked, precision=precision)),
    ):
        plan = _cheapest_plan(other, plain_offers, answer_for)
        if not what and plan is not None:
            what = f"of {plan.recipe.settings.checkpointing}"
        found.append(SavingsStep(name, what, plan))
    on_demand = next((one for one in answer.plans if one.is_rented and one.spot is None), None)
    has_spot = best.spot is not None and on_demand is not None
    for name, plan in (("place", on_demand if has_spot else best), ("spot", best))[: 1 + has_spot]:
        assert plan is not None
        found.append(SavingsStep(name, f"{plan.on.machine.gpu} at {plan.offer.provider}", plan))
    return found


def other_methods(
    answer: Answer, wanted: JobSpec, answer_for: AnswerFor, notes: list[str]
) -> list[tuple[str, OfferPlan | None]]:
    """The first choice by each method, rented at a firm price; None where nothing can. Methods that
    this model can't have are noted.
    """
    every = [*(one.offer for one in answer.plans), *(one.offer for one in answer.rejected)]
    offers = _cheapest(offer for offer in every if offer.gpu)
    if not offers:  # only spot or the lowest of marketplaces was asked for: nothing to compare with
        return []
    asked = open_ended(wanted)
    others = {name: replace(asked, method=name) for name in METHODS if name != wanted.method}
    if wanted.method == "full" and wanted.optim in ("adamw_torch_fused", "adamw_torch"):
        in_bf16 = replace(asked, optim=BF16_WEIGHTS)
        others[f"full with train.optim: {BF16_WEIGHTS} ({in_bf16.optimizer.quality})"] = in_bf16
    found = [(wanted.method, answer.best)]
    for name, other in others.items():
        try:
            found.append((name, answer_for(other, offers).best))
        except InputError as error:
            notes.append(f"{name} is not compared: {error.what}")
    return found


def padded_as_it_comes(lengths: Lengths) -> Lengths:
    """Examples in batches of so many in any order, each as long as the longest beside it."""
    order = np.random.Generator(np.random.Philox(key=1)).permutation(len(lengths.tokens))
    batch = min(PLAIN_BATCH, len(order))
    n = len(order) // batch * batch
    groups = order[:n].reshape(-1, batch)

    def padded(values: Ints) -> Ints:
        return np.repeat(values[groups].max(axis=1), groups.shape[1])

    return from_arrays(
        padded(lengths.tokens),
        None if lengths.targets is None else padded(lengths.targets),
        source=f"{lengths.source}, padded in batches of {PLAIN_BATCH}",
        n_examples=lengths.n_examples,
        n_target_tokens=lengths.n_target_tokens * n / max(1, lengths.n_examples),
        is_exact=False,
    )


def _cheapest(offers: Iterable[Offer]) -> list[Offer]:
    rented = (offer for offer in offers if offer.provider not in (HERE, OWN))
    return list(cheapest_firm(rented).values())


def _cheapest_plan(
    wanted: JobSpec, offers: Sequence[Offer], answer_for: AnswerFor
) -> OfferPlan | None:
    """On as few GPUs as it fits."""
    for n_gpus in sorted({offer.n_gpus for offer in offers}):
        some = [offer for offer in offers if offer.n_gpus == n_gpus]
        if plans := answer_for(wanted, some).plans:
            return min(plans, key=lambda plan: plan.total_usd)
    return None
