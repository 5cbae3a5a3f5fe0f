"""Every target by its name, and by which of them a provider's machines are rented.

A target is a file in `targets/` whose values of type `Target` are found here.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import NamedTuple

from farthing.errors import InputError
from farthing.launch import targets
from farthing.launch.target import Target
from farthing.prices.offers import Offer
from farthing.tables import facts

TARGETS: dict[str, Target] = {
    value.name: value
    for module in pkgutil.iter_modules(targets.__path__)
    for value in vars(import_module(f"{targets.__name__}.{module.name}")).values()
    if isinstance(value, Target)
}
HERE = "local"


class Called(NamedTuple):
    """What a target calls a GPU."""

    gpu_id: str
    machine_type: str = ""


@cache
def _calls() -> dict[tuple[str, str, int], Called]:
    return {
        (row["target"], row["gpu"], int(row["n_gpus"] or 0)): Called(row["id"], row["machine_type"])
        for row in facts("launch")
    }


def called(target: Target, offer: Offer) -> Called | None:
    """What the target calls the GPU of an offer; None where it has none such."""
    if not target.picks_gpus:
        return Called("")
    if target.rents_instances:
        return Called(offer.instance) if offer.provider in target.providers else None
    names = (f"{target.name}/{offer.provider}", target.name)
    known = (_calls().get((name, offer.gpu, n)) for name in names for n in (offer.n_gpus, 0))
    return next((found for found in known if found), None)


def find_target(text: str) -> tuple[Target, str]:
    """`slurm:low` -> (the target, "low"). Raises `InputError`."""
    name, _, at = text.partition(":")
    target = TARGETS.get(name.strip().lower())
    if target is None:
        raise InputError(
            f"no target is called `{name}`", where="--on", to_do=f"use one of {', '.join(TARGETS)}"
        )
    refuse_nowhere(target, at)
    return target, at


def refuse_nowhere(target: Target, at: str) -> None:
    """Raise `InputError` for a target that has to be told where, and is not."""
    if not at and target.needs_place:
        raise InputError(
            f"{target.title} needs to know where",
            where="--on",
            to_do=f"--on {target.name}:{target.at}",
        )


def target_of(offer: Offer) -> Target | None:
    """The target that rents an offer when none was named: our own client, else SkyPilot."""
    able = [target for target in TARGETS.values() if offer.provider in target.providers]
    own = [target for target in able if target.client is not None]
    return next(iter([*own, *(target for target in able if target.name == "skypilot")]), None)
