"""A plan as plain values: what `farthing plan --json` prints, and all that its drawings know.

The same study gives the same bytes. Offers that differ only in where they stand are one choice,
told by the cheapest. Refuses to decide (`plan` has), to draw, and to look at a clock, a file or the
network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import farthing
from farthing.data.lengths import Lengths
from farthing.planner.confidence import how_sure
from farthing.planner.serving import Traffic
from farthing.planner.throughput_arithmetic import ByHand, Known, OwnFigures, by_hand
from farthing.planner.types import OLD_PRICE_DAYS, Plan, Rejected, up_front
from farthing.prices.gpus import gpus
from farthing.prices.offers import Offer
from farthing.storage.files import Json
from farthing.units import plural, say_bytes, say_seconds

if TYPE_CHECKING:
    from farthing.planner.inputs import Study
from farthing.report.plan_beside import UNTRIED, UNTRIED_ALONE, sooner, spot_or_not, two_or_one
from farthing.report.plan_own import own_machine, years_of
from farthing.report.plan_savings import methods_view, runs_view, savings_view
from farthing.report.plan_services import paid_view, services
from farthing.report.plan_serving import serving_view
from farthing.report.plan_words import (
    LOCAL,
    OWN,
    RENTED,
    cause_of,
    has_price,
    hours_in_words,
    machine_of,
    say_cost,
    usd_in_words,
    what_to_do,
)

KIND = "farthing plan"


def plan_view(
    study: Study,
    runs_per_month: float | None = None,
    figures: OwnFigures | None = None,
    traffic: Traffic | None = None,
    n_runs: int | None = None,
    paid_usd: float | None = None,
) -> Json:
    """Everything a plan says. `runs_per_month` adds what a project of so many comes to in a year,
    `figures` what somebody knows of the run from elsewhere, `traffic` what answering with the model
    costs, `n_runs` what so many runs come to,
    `paid_usd` what somebody paid for it.

    Ranges are [low, likely, high]: 4 of 5 runs are in between. What a sum consists of is a mapping
    by name.
    """
    choices = _choices(study.answer.plans)
    rows = [
        plain(_plan(i, group, study.law, study.wanted.shape.model_type))
        for i, group in enumerate(choices, 1)
    ]
    best = rows[0] if rows else None
    view = {
        "kind": KIND,
        "version": farthing.__version__,
        "date": study.today.isoformat(),
        "job": _job(study),
        "prices": _prices(study),
        "assumptions": list(study.assumptions.in_words()),
        "notes": list(study.notes),
        "data_notes": list(
            dict.fromkeys(note for each in _lengths_of(study) for note in each.notes)
        ),
        "answer": "",
        "best": best,
        "n_offers": _n_offers(study),
        "n_plans": len(study.answer.plans),
        "n_choices": len(rows),
        "plans": rows,
        "here": _here(rows, study),
        "sooner": sooner(best, rows),
        "spot_or_not": spot_or_not(rows),
        "two_or_one": two_or_one(rows),
        "nearest": [_rejected([one]) for one in _nearest(study.answer.rejected)],
        "rejected": _grouped(study.answer.rejected),
        "managed": services(study),
        "savings": savings_view(study),
        "methods": methods_view(study),
    }
    view["answer"] = _answer(best, rows, study)
    view["own"] = [own_machine(owned, rows, study, runs_per_month) for owned in study.own]
    view["years"] = years_of(rows, view, study, runs_per_month) if runs_per_month else None
    found = _by_hand(study, figures or OwnFigures(), best)
    view["by_hand"] = None if found is None else found.to_json()
    view["runs"] = runs_view(view, n_runs) if n_runs else None
    view["serving"] = serving_view(study, traffic) if traffic is not None else None
    view["paid"] = None if paid_usd is None else paid_view(best, paid_usd)
    return dict(plain(view))


def plain(value: Any) -> Any:
    """Values that JSON has: numbers of numpy become Python's, what is not finite becomes null."""
    if value is None or isinstance(value, str | int):  # most are leaves
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    number = float(value)
    return float(f"{number:.10g}") if math.isfinite(number) else None


def _by_hand(study: Study, figures: OwnFigures, best: Any) -> ByHand | None:
    """What somebody's own figures come to; the throughput that the job's cap on GPU-hours asks for."""  # noqa: E501
    wanted, plan = study.wanted, study.answer.best
    if not figures.is_any and wanted.max_gpu_hours is None:
        return None
    known = Known(
        n_samples=wanted.lengths.n_examples,
        n_epochs=wanted.n_epochs,
        tokens_per_sample=wanted.tokens_per_example,
        save_every_s=wanted.save_every_s,
        max_gpu_hours=wanted.max_gpu_hours,
    )
    if wanted.max_steps is not None:
        known = replace(known, n_samples=wanted.n_steps * wanted.global_batch, n_epochs=1.0)
    if best is not None and plan is not None:
        known = replace(
            known,
            usd_per_hour=best["usd_per_hour"] if best["kind"] in RENTED else None,
            paid_gb=best["paid_gb"],
            machine=best["name"],
            samples_per_min=wanted.global_batch / plan.step.seconds * 60,
            share_of_peak=_share_of_peak(plan),
        )
    return by_hand(figures, known)


def _share_of_peak(plan: Plan) -> float:
    """What a step reaches of the peak rate of its GPUs; 0 where that is not known."""
    gpu = gpus().get(plan.offer.gpu)
    peak = gpu.flops.get(plan.recipe.precision) if gpu is not None else None
    return plan.step.flops / plan.step.seconds / (peak * plan.recipe.n_gpus) if peak else 0.0


# ---- the job, the prices ----


def _job(study: Study) -> Json:
    job, wanted = study.job, study.wanted
    shape, lengths = wanted.shape, wanted.lengths
    return {
        "model": job.model.model_name_or_path,
        "revision": job.model.revision,
        "task": job.task,
        "method": wanted.method,
        "optimizer": wanted.optim,
        "n_parameters": shape.n_parameters,
        "n_trainable": wanted.n_trainable,
        "n_examples": lengths.n_examples,
        "n_epochs": None if wanted.max_steps is not None else wanted.n_epochs,
        "n_steps": study.answer.n_steps,
        "global_batch": wanted.global_batch,
        "mean_tokens": wanted.tokens_per_example,
        "longest_tokens": lengths.longest_example,
        "longest_target_tokens": lengths.longest_target or None,
        "n_tokens": study.answer.n_steps * wanted.global_batch * wanted.tokens_per_example,
        "lengths_are_exact": lengths.is_exact,
        "lengths_source": lengths.source,
        "n_evaluations": wanted.n_evaluations,
        "n_eval_examples": wanted.eval_lengths.n_examples if wanted.eval_lengths is not None else 0,
        "limits": {
            "max_usd": wanted.max_usd,
            "max_hours": wanted.max_hours,
            "max_gpu_hours": wanted.max_gpu_hours,
            "deadline_s": wanted.deadline_s,
            "confidence": wanted.confidence if wanted.deadline_s is not None else None,
        },
    }


def _prices(study: Study) -> Json:
    found = study.catalog
    ages = dict(zip(("newest", "median", "oldest"), found.ages_days, strict=True))
    return {
        "words": found.words,
        "where": found.where,
        "is_stale": found.is_stale,
        "age_days": ages,
    }


def _choices(plans: Iterable[Plan]) -> list[list[Plan]]:
    """Plans that differ only in region, zone and instance together, in the order of the first of
    each.
    """
    groups: dict[Any, list[Plan]] = {}
    for plan in plans:
        offer = plan.offer
        which = offer.instance if offer.provider in (LOCAL, OWN) else ""
        groups.setdefault(
            (offer.provider, offer.gpu, offer.n_gpus, offer.is_spot, which), []
        ).append(plan)
    return list(groups.values())


def _plan(rank: int, group: Sequence[Plan], law: str, family: str) -> Json:
    plan, offer, step = group[0], group[0].offer, group[0].step
    return {
        "rank": rank,
        "name": _name(plan),
        "provider": offer.provider,
        "instance": offer.instance,
        "gpu": plan.place.device.name,
        "is_cpu": not plan.place.is_cuda,
        "n_gpus": max(1, offer.n_gpus),
        "region": offer.region,
        "zone": offer.zone,
        "kind": _kind(offer),
        "usd_per_hour": offer.usd_per_hour,
        "usd_per_gpu_hour": (
            None if offer.usd_per_hour is None else offer.usd_per_hour / max(1, offer.n_gpus)
        ),
        "paid_gb": offer.n_gpus * gpus()[offer.gpu].memory_gib if offer.unit == "gb_hour" else None,
        "price_source": offer.source,
        "price_date": offer.date.isoformat(),
        "price_age_days": plan.place.price_age_days,
        "price_is": "from" if plan.place.is_from_price else "",
        "price_notes": price_notes(plan),
        "recipe": _recipe(plan),
        "memory": _memory(plan),
        "seconds": plan.seconds,
        "wall_s": plan.wall_s,
        "hours": plan.wall_s / 3600,
        "hours_range": plan.hours_range.as_list(),
        "step": {
            "seconds": step.seconds,
            "parts": step.parts,
            "tokens_per_s": step.tokens_per_s,
            "useful_share": min(1.0, step.n_tokens / max(1.0, step.n_padded_tokens)),
            "flops_per_s": step.flops / step.seconds,
        },
        "usd": plan.usd,
        "total_usd": plan.total_usd,
        "usd_range": plan.usd_range.as_list(),
        "up_front_usd": up_front(plan),
        "save_every_s": plan.interval_s,
        "spot": _spot(plan, law),
        "chance": plan.chance,
        "confidence": how_sure(plan.place, family),
        "why": "; ".join(
            words for words in (plan.why, plan.mixture, plan.place.precision_note) if words
        ),
        "on_front": any(one.on_front for one in group),
        "also_at": [
            {
                **{
                    name: getattr(other.offer, name)
                    for name in ("instance", "region", "zone", "usd_per_hour")
                },
                "total_usd": other.total_usd,
                "hours": other.wall_s / 3600,
            }
            for other in group[1:]
        ],
    }


def _recipe(plan: Plan) -> Json:
    """How it is computed."""
    recipe, step = plan.recipe, plan.step
    return {
        "words": recipe.in_words(),
        "method": recipe.method,
        "precision": recipe.precision,
        "precision_note": plan.place.precision_note,
        "micro_batch_tokens": recipe.settings.micro_batch_tokens,
        "mean_tokens_at_once": step.n_padded_tokens / recipe.n_gpus / recipe.n_micro_batches,
        "n_micro_batches": recipe.n_micro_batches,
        "is_flat": recipe.stack.is_packed,
        "global_batch": recipe.global_batch,
        "checkpointing": recipe.settings.checkpointing,
        "checkpoint_every": recipe.settings.checkpoint_every,
        "optimizer": recipe.optim,
        "sharding": recipe.sharding,
        "to_set": list(plan.to_set),
        "n_shards": recipe.n_gpus if recipe.sharding == "fsdp" else 1,
    }


def _memory(plan: Plan) -> Json:
    """What it needs of a GPU, and what is there."""
    return {
        "parts": _memory_parts(plan),
        "needed_bytes": plan.memory_range.likely,
        "range_bytes": plan.memory_range.as_list(),
        "capacity_bytes": plan.place.memory_bytes,
        "spare_bytes": plan.place.memory_bytes - plan.memory_range.likely,
        "moment": plan.memory.moment,
        "is_tight": plan.is_tight,
        "host_bytes": plan.host_bytes,
    }


def _lengths_of(study: Study) -> list[Lengths]:
    held_out = study.wanted.eval_lengths
    return [study.wanted.lengths, *([held_out] if held_out is not None else [])]


def _kind(offer: Offer) -> str:
    if offer.provider == LOCAL:
        return "here"
    return "own" if offer.provider == OWN else offer.kind


def _name(plan: Plan) -> str:
    """`2x A100-80GB spot at Verda`, `own 1x RTX 4090`, `this machine`."""
    n_gpus, gpu, kind = max(1, plan.offer.n_gpus), plan.place.device.name, _kind(plan.offer)
    if kind in RENTED:
        return f"{n_gpus}x {gpu} {kind.replace('-', ' ')} at {plan.offer.provider}"
    return (
        f"{LOCAL} ({machine_of(n_gpus, gpu)})"
        if kind == "here"
        else f"own {machine_of(n_gpus, gpu)}"
    )


def _memory_parts(plan: Plan) -> dict[str, float]:
    """The components; what a calibration or a processor adds to the formula is one of them, so that
    they add up.
    """
    known = plan.place.calibration.extra_bytes
    parts: dict[str, float] = dict(plan.memory.as_dict())
    rest = plan.memory_range.likely - sum(parts.values())
    if abs(rest) >= 1:
        parts["measured beside the formula" if known is not None else "the process itself"] = rest
    return parts


def _spot(plan: Plan, law: str) -> Json | None:
    """What interruptions take, and by which law."""
    if plan.spot is None:
        return None
    found = {name: value for name, value in asdict(plan.spot).items() if name != "work_s"}
    more = {
        "save_every_s": plan.interval_s,
        "law": law,
        "mixture": plan.mixture,
    }
    return found | more


def _answer(best: Any, rows: Sequence[Mapping[str, Any]], study: Study) -> str:
    if best is None:
        return f"Nothing can do this job as it is: none of {plural(_n_offers(study), 'offer')}."
    text = f"{what_to_do(best)}: {_figures(best)}."
    if best["recipe"]["to_set"]:
        text += (
            f" Set {' and '.join(best['recipe']['to_set'])};"
            f" {UNTRIED if best['n_gpus'] > 1 else UNTRIED_ALONE}."
        )
    cap = study.wanted.max_usd
    if cap is not None and best["usd_range"][2] > cap:
        text += (
            f" It may come to {say_cost(best['usd_range'][2])}: at {say_cost(cap)} the run saves"
            " and stops."
        )
    rented = next((row for row in rows if row["kind"] in RENTED), None)
    if best["kind"] not in RENTED and rented is not None:
        text += (
            f" Rented: {rented['name']}, {say_cost(rented['total_usd'])},"
            f" {say_seconds(rented['wall_s'])}."
        )
    here = next((row for row in rows if row["kind"] == "here" and not has_price(row)), None)
    if here is not None and here is not best:
        text += f" This machine: {hours_in_words(here)}, no price is given."
    return text


def _n_offers(study: Study) -> int:
    return len(study.answer.plans) + len(study.answer.rejected)


def price_notes(plan: Plan) -> list[str]:
    """What is to be known of a price beside its dollars."""
    terms, place = plan.offer.billing, plan.place
    found = []
    if place.is_from_price:
        found.append("the lowest of a marketplace, which may be taken")
    if place.price_age_days > OLD_PRICE_DAYS:
        found.append(f"the price is {place.price_age_days} days old")
    if terms.pack_usd:
        found.append(
            f"{say_cost(up_front(plan))} is paid before, in packs of {say_cost(terms.pack_usd)}"
        )
    elif terms.deposit_usd > plan.total_usd:
        found.append(f"a deposit of {say_cost(terms.deposit_usd)} is paid before")
    moved = {name: plan.usd.get(name, 0.0) for name in ("storage", "egress")}
    unknown = {"storage": terms.storage_usd_per_gb_month, "egress": terms.egress_usd_per_gb}
    assumed = [
        name for name, usd in moved.items() if unknown[name] is None and usd > 0.02 * plan.total_usd
    ]
    if assumed:
        found.append(
            f"{say_cost(sum(moved[name] for name in assumed))} of it is {' and '.join(assumed)} by"
            " assumption"
        )
    if plan.hours_range.high > terms.most_hours:
        found.append(
            f"a machine is taken back after {terms.most_hours:g} h: begin it again, it goes on"
        )
    if place.host_note:
        found.append(place.host_note)
    if plan.usd.get("rounding", 0.0) > 0.02 * plan.total_usd:
        found.append(
            f"{say_cost(plan.usd['rounding'])} of it is the provider's minimum or rounding up"
        )
    return found


def _figures(row: Mapping[str, Any]) -> str:
    notes = "".join(f"; {words}" for words in row["price_notes"])
    fits = "fits, but tightly," if row["memory"]["is_tight"] else "fits"
    return (
        f"{usd_in_words(row)}, {hours_in_words(row)}, {fits} with"
        f" {say_bytes(row['memory']['spare_bytes'])} to spare{notes}"
    )


def _here(rows: Sequence[Mapping[str, Any]], study: Study) -> Json | None:
    """This machine: a plan, or why not."""
    row = next((row for row in rows if row["kind"] == "here"), None)
    if row is not None:
        words = f"{hours_in_words(row)}, "
        words += (
            say_cost(row["total_usd"]) if has_price(row) else "no price given (where.usd_per_hour)"
        )
        words += f", fits with {say_bytes(row['memory']['spare_bytes'])} to spare"
        return {
            "name": row["name"],
            "rank": row["rank"],
            "words": words,
            "reason": "",
            "change": "",
        }
    one = next((one for one in study.answer.rejected if one.offer.provider == LOCAL), None)
    if one is None:
        return None
    name, words = f"{LOCAL} ({study.machine.device_name})", f"{cause_of(one.reason)}; {one.change}"
    return {"name": name, "rank": None, "words": words, "reason": one.reason, "change": one.change}


# ---- why not ----


def _grouped(rejected: Iterable[Rejected]) -> list[Json]:
    """Rejections that are alike together, the nearest first."""
    groups: dict[Any, list[Rejected]] = {}
    for one in rejected:
        offer = one.offer
        groups.setdefault(
            (offer.gpu, offer.n_gpus, offer.is_spot, one.reason, one.change), []
        ).append(one)
    rows = [_rejected(group) for group in groups.values()]
    return sorted(
        rows,
        key=lambda row: [row[name] for name in ("distance", "gpu", "n_gpus", "kind", "reason")],
    )


def _rejected(group: Sequence[Rejected]) -> Json:
    cheapest = min(group, key=lambda one: _usd_key(one.offer))
    offer = cheapest.offer
    return {
        "gpu": offer.gpu or offer.instance,
        "n_gpus": max(1, offer.n_gpus),
        "kind": _kind(offer),
        "reason": cheapest.reason,
        "change": cheapest.change,
        "n_offers": len(group),
        "usd_per_hour": offer.usd_per_hour,
        "provider": offer.provider,
        "distance": cheapest.distance,
    }


def _usd_key(offer: Offer) -> tuple[float, str, str, str]:
    return (
        offer.usd_per_hour if offer.usd_per_hour is not None else math.inf,
        offer.provider,
        offer.region,
        offer.zone,
    )


def _nearest(rejected: Sequence[Rejected], n: int = 3) -> list[Rejected]:
    """The ways that are nearest to being possible: different kinds of change first, then other
    GPUs.

    First what fits a GPU that the trainer can use and only passes a limit, which one change mends
    for certain; last what torch has no code for, of which it is not known whether it would fit, and
    none of it that nothing mends.
    """

    def key(one: Rejected) -> Any:
        needs_memory = one.reason.startswith("needs")
        return (
            one.change.startswith("pip "),
            one.offer.n_gpus > 1,
            needs_memory and is_limited,
            one.distance,
            _usd_key(one.offer),
        )

    is_limited = any(not one.reason.startswith("needs") for one in rejected)
    ordered = sorted((one for one in rejected if one.change != "another GPU"), key=key)
    found: list[Rejected] = []
    for of_what in (
        lambda one: re.sub(r"[\d.,]+", "#", one.change),
        lambda one: one.change,
        lambda one: (one.offer.gpu, one.offer.n_gpus),
    ):
        seen = {of_what(one) for one in found}
        for one in ordered:
            if len(found) < n and of_what(one) not in seen:
                seen.add(of_what(one))
                found.append(one)
    return sorted(found, key=key)
