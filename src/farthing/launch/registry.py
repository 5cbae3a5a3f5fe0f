"""Every target by its name, and by which of them a provider's machines are rented."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from farthing.errors import InputError
from farthing.launch.target import Target
from farthing.launch.targets import (
    hf_jobs,
    hosts,
    kubernetes,
    lambda_cloud,
    runpod,
    skypilot,
    slurm,
    vast,
    vertex,
)
from farthing.prices.offers import Offer
from farthing.tables import facts

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        hosts.LOCAL,
        hosts.SSH,
        slurm.TARGET,
        kubernetes.TARGET,
        vertex.TARGET,
        skypilot.TARGET,
        runpod.TARGET,
        vast.TARGET,
        lambda_cloud.TARGET,
        hf_jobs.TARGET,
    )
}
HERE = hosts.LOCAL.name
OF_PROVIDER = {"RunPod": "runpod", "Vast.ai": "vast", "Lambda": "lambda"}
PROVIDERS = {
    "runpod": ("RunPod",),
    "vast": ("Vast.ai",),
    "lambda": ("Lambda",),
    "vertex": ("GCP",),
    "skypilot": tuple(skypilot.INFRA),
}
"""Whose offers of the price table each target can rent. Hugging Face's prices are not in it."""


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
    if target.name == "lambda":
        return Called(offer.instance) if offer.provider == "Lambda" else None
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
    if not at and target.at and not target.at.startswith("["):
        raise InputError(
            f"{target.title} needs to know where",
            where="--on",
            to_do=f"--on {target.name}:{target.at}",
        )


def target_of(offer: Offer) -> Target | None:
    """The target by which a provider's offer is rented when none was named: our own client, else
    SkyPilot.
    """
    name = OF_PROVIDER.get(offer.provider) or (
        "skypilot" if offer.provider in skypilot.INFRA else None
    )
    return TARGETS[name] if name else None
