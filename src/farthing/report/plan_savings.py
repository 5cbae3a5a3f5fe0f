"""What each choice of a plan saves, the other methods, and what so many runs come to: views with
their words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from farthing.planner.alternatives import is_rented
from farthing.planner.ownership import saving
from farthing.planner.types import Plan
from farthing.report.plan_services import fees
from farthing.report.plan_words import machine_of, say_cost, say_saving
from farthing.storage.files import Json
from farthing.units import say_seconds

if TYPE_CHECKING:
    from farthing.planner.inputs import Study

Row = Mapping[str, Any]


def savings_view(study: Study) -> Json | None:
    """From the plain way to the first rented choice, one choice after the other; None where nothing
    is rented.
    """
    if not study.rungs:
        return None
    rungs: list[Json] = []
    before: float | None = None
    for rung in study.rungs:
        plan, words = rung.plan, "no machine with A100s holds it"
        one: Json = {
            "choice": rung.choice,
            "what": rung.what,
            "usd": None,
            "hours": None,
            "saved_share": None,
        }
        if plan is not None:
            one |= {
                "usd": plan.total_usd,
                "hours": plan.wall_s / 3600,
                "n_gpus": plan.recipe.n_gpus,
            }
            words = f"{say_cost(plan.total_usd)} in {say_seconds(plan.wall_s)}"
            if before is not None:
                saved = saving(plan.total_usd, before)
                one |= {"saved_usd": saved.usd, "saved_share": saved.share}
                words += f", {say_saving(saved)}"
            before = plan.total_usd
        rungs.append(one | {"words": f"{rung.choice}: {rung.what}: {words}"})
    priced = [one["usd"] for one in rungs if one["usd"] is not None]
    whole = saving(priced[-1], priced[0])
    return {
        "rungs": rungs,
        "plain_usd": priced[0],
        "usd": priced[-1],
        "saved_usd": whole.usd,
        "saved_share": whole.share,
        "words": f"{say_cost(priced[-1])} instead of {say_cost(priced[0])}: {say_saving(whole)}",
    }


def methods_view(study: Study) -> list[Json]:
    """The first choice by each method, the cheapest first."""
    found = [
        {
            "method": method,
            "is_asked": method == study.wanted.method,
            "usd": None if plan is None else plan.total_usd,
            "hours": None if plan is None else plan.wall_s / 3600,
            "where": "" if plan is None else _where(plan),
        }
        for method, plan in study.methods
    ]
    return sorted(found, key=lambda one: (one["usd"] is None, one["usd"] or 0.0))


def _where(plan: Plan) -> str:
    what = machine_of(plan.recipe.n_gpus, plan.place.device.name)
    return f"{what} at {plan.offer.provider}" if is_rented(plan) else f"own {what}"


def methods_in_words(methods: list[Row]) -> str:
    """`lora $0.39 (RTX 4090 at Verda), full $0.64 (L40S at RunPod), qlora on no machine`."""
    return ", ".join(
        (
            f"{one['method']} on no machine that farthing can train on"
            if one["usd"] is None
            else f"{one['method']} {say_cost(one['usd'])} ({one['where']})"
        )
        for one in methods
    )


def runs_view(view: Row, n_runs: int) -> Json:
    """What so many runs come to: the first choice, the plain way, a service that takes the model."""  # noqa: E501
    ways: dict[str, float] = {}
    best = view["best"]
    if best is not None:
        ways[best["name"]] = n_runs * best["total_usd"]
    if view["savings"] is not None:
        ways["the plain way"] = n_runs * view["savings"]["plain_usd"]
    ways |= {name: n_runs * fee_usd for name, fee_usd in fees(view["managed"]).items()}
    words = [f"{name}: {say_cost(usd)}" for name, usd in ways.items()]
    if best is not None and len(ways) > 1:
        mine, dearest = ways[best["name"]], max(ways.values())
        words.append(
            f"against the dearest {say_cost(dearest - mine)} saved,"
            f" {say_saving(saving(mine, dearest))}"
        )
    return {"n_runs": n_runs, "usd": ways, "words": words}
