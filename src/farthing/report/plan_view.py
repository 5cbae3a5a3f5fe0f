"""A plan as plain values: what `farthing plan --json` prints, and all that its drawings know.

The same study gives the same bytes. Offers that differ only in where they stand are one choice, told by the cheapest.
Refuses to decide (`plan` has), to draw, and to look at a clock, a file or the network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import farthing
from farthing.errors import UserMistake
from farthing.planner.ownership import (
    Owned,
    Saving,
    Way,
    break_even_hours,
    break_even_months,
    own_way,
    run_on_own,
    saving,
    yearly_usd,
)
from farthing.planner.types import SPEED_ERROR, Plan, Rejected, speed_error, up_front
from farthing.prices.catalog import HOURS_PER_MONTH, Offer, find_gpu, gpus
from farthing.units import plural, say_bytes, say_count, say_seconds, say_usd

if TYPE_CHECKING:
    from farthing.planner.inputs import Study

KIND = "farthing plan"
LOCAL, OWN = "this machine", "own"
NOT_YET = "needs several GPUs, which farthing cannot train on yet"
_DEARER = 2.0  # what being sooner may cost
_SLOWEST, _PATIENCE_S = 10.0, 3600.0  # how much slower a machine without a price may be and still be the answer


def plan_view(study: Study, runs_per_month: float | None = None) -> dict[str, Any]:
    """Everything a plan says. `runs_per_month` adds what a project of so many comes to in a year."""
    choices = _choices(study.answer.plans)
    rows = [_plan(rank, group, study.law) for rank, group in enumerate(choices, 1)]
    for row in _front([row for row in rows if row["is_runnable"]]):
        row["on_runnable_front"] = True
    best = _best(rows)
    if best is not None and best["rank"] > 1:
        best["why"] = f"the first that will do, {best['why']}"
    view = {
        "kind": KIND,
        "version": farthing.__version__,
        "date": study.today.isoformat(),
        "job": _job(study),
        "prices": _prices(study),
        "assumptions": list(study.assumptions.in_words()),
        "notes": list(study.notes),
        "answer": "",
        "best": best,
        "n_offers": len(study.answer.plans) + len(study.answer.rejected),
        "n_plans": len(study.answer.plans),
        "n_choices": len(rows),
        "plans": rows,
        "here": _here(rows, study),
        "sooner": _sooner(best, rows),
        "spot_or_not": _spot_or_not(rows),
        "nearest": [_rejected([one]) for one in _nearest(study.answer.rejected)],
        "rejected": _grouped(study.answer.rejected),
        "managed": _managed(study),
    }
    view["answer"] = _answer(view, rows)
    view["own"] = [_own(owned, rows, best, study, runs_per_month) for owned in study.own]
    view["years"] = _years(rows, view, study, runs_per_month) if runs_per_month else None
    return dict(_plain(view))


# ---- the job, the prices ----


def _job(study: Study) -> dict[str, Any]:
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
        "longest_tokens": lengths.longest,
        "longest_target_tokens": lengths.longest_target or None,
        "n_tokens": study.answer.n_steps * wanted.global_batch * wanted.tokens_per_example,
        "lengths_are_exact": lengths.is_exact,
        "lengths_source": lengths.source,
        "n_evaluations": wanted.n_evaluations,
        "n_eval_examples": wanted.eval_lengths.n_examples if wanted.eval_lengths is not None else 0,
        "limits": {
            "max_usd": wanted.max_usd,
            "max_hours": wanted.max_hours,
            "deadline_s": wanted.deadline_s,
            "sure": wanted.sure if wanted.deadline_s is not None else None,
        },
    }


def _prices(study: Study) -> dict[str, Any]:
    newest, median, oldest = study.catalog.ages_days
    return {
        "words": study.catalog.words,
        "where": study.catalog.where,
        "is_stale": study.catalog.is_stale,
        "age_days": {"newest": newest, "median": median, "oldest": oldest},
    }


# ---- plans ----


def _choices(plans: Iterable[Plan]) -> list[list[Plan]]:
    """Plans that differ only in region, zone and instance together, in the order of the first of each."""
    groups: dict[Any, list[Plan]] = {}
    for plan in plans:
        offer = plan.offer
        which = offer.instance if offer.provider in (LOCAL, OWN) else ""
        groups.setdefault((offer.provider, offer.gpu, offer.n_gpus, offer.is_spot, which), []).append(plan)
    return list(groups.values())


def _plan(rank: int, group: Sequence[Plan], law: str) -> dict[str, Any]:
    plan, offer, recipe, step = group[0], group[0].offer, group[0].recipe, group[0].step
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
        "usd_per_gpu_hour": None if offer.usd_per_hour is None else offer.usd_per_hour / max(1, offer.n_gpus),
        "price_source": offer.source,
        "price_date": offer.date.isoformat(),
        "recipe": {
            "words": recipe.in_words(),
            "method": recipe.method,
            "precision": recipe.precision,
            "micro_batch_tokens": recipe.micro_tokens,
            "mean_tokens_at_once": step.n_padded_tokens / recipe.n_gpus / recipe.n_micro_batches,
            "n_micro_batches": recipe.n_micro_batches,
            "is_flat": recipe.stack.is_flat,
            "global_batch": recipe.global_batch,
            "checkpointing": _checkpointing(recipe.every_n_layers),
            "every_n_layers": recipe.every_n_layers,
            "optimizer": recipe.optim,
            "sharding": recipe.sharding,
            "n_shards": recipe.n_gpus if recipe.sharding == "fsdp" else 1,
        },
        "memory": {
            "parts": _memory_parts(plan),
            "needed_bytes": plan.memory_range.likely,
            "range_bytes": plan.memory_range.as_list(),
            "capacity_bytes": plan.place.memory_bytes,
            "spare_bytes": plan.place.memory_bytes - plan.memory_range.likely,
            "moment": plan.memory.moment,
            "is_tight": plan.is_tight,
        },
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
        "cache_bytes": plan.cache_bytes,
        "spot": _spot(plan, law),
        "chance": plan.chance,
        "sure": _sure(plan),
        "why": f"{plan.why}; {plan.mixture}" if plan.mixture else plan.why,
        "on_front": any(one.on_front for one in group),
        "on_runnable_front": False,
        "is_runnable": plan.is_runnable,
        "not_runnable": "" if plan.is_runnable else NOT_YET,
        "also_at": [
            {
                "instance": other.offer.instance,
                "region": other.offer.region,
                "zone": other.offer.zone,
                "usd_per_hour": other.offer.usd_per_hour,
                "total_usd": other.total_usd,
                "hours": other.wall_s / 3600,
            }
            for other in group[1:]
        ],
    }


def _front(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of these plans those of which none is both cheaper and sooner, the cheapest first."""
    found: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["total_usd"], row["wall_s"], row["rank"])):
        if not found or row["wall_s"] < found[-1]["wall_s"]:
            found.append(row)
    return found


def _kind(offer: Offer) -> str:
    if offer.provider == LOCAL:
        return "here"
    return "own" if offer.provider == OWN else offer.kind


def _name(plan: Plan) -> str:
    """`2x A100-80GB spot at Verda`, `own 1x RTX 4090`, `this machine`."""
    what = f"{max(1, plan.offer.n_gpus)}x {plan.place.device.name}"
    kind = _kind(plan.offer)
    if kind == "here":
        return f"{LOCAL} ({plan.place.device.name})"
    return (
        f"own {what.removeprefix('1x ')}"
        if kind == "own"
        else f"{what} {kind.replace('-', ' ')} at {plan.offer.provider}"
    )


def micro_batches_in_words(recipe: Mapping[str, Any]) -> str:
    """`3.7 micro-batches of up to 8,192 tokens, end to end`."""
    n = recipe["n_micro_batches"]
    number = f"{n:.0f}" if n == round(n) else f"{n:.1f}"
    one_or_more = "micro-batch" if n == 1 else "micro-batches"
    laid = "end to end" if recipe["is_flat"] else "padded"
    return f"{number} {one_or_more} of up to {recipe['micro_batch_tokens']:,} tokens, {laid}"


def _checkpointing(every_n_layers: int) -> str:
    return {0: "none", 1: "every layer", 2: "every 2nd layer"}.get(every_n_layers, f"every {every_n_layers}th layer")


def _memory_parts(plan: Plan) -> dict[str, float]:
    """The components; what a calibration or a processor adds to the formula is one of them, so that they add up."""
    known = plan.place.calibration.extra_bytes
    parts: dict[str, float] = dict(plan.memory.parts if known is not None else plan.memory.as_dict())
    rest = plan.memory_range.likely - sum(parts.values())
    if abs(rest) >= 1:
        parts["measured beside the formula" if known is not None else "the process itself"] = rest
    return parts


def _spot(plan: Plan, law: str) -> dict[str, Any] | None:
    if plan.spot is None:
        return None
    found = plan.spot
    return {
        "n_interruptions": found.n_interruptions,
        "lost_s": found.lost_s,
        "restart_s": found.restart_s,
        "waiting_s": found.waiting_s,
        "checkpoint_s": found.checkpoint_s,
        "save_every_s": plan.interval_s,
        "cache_bytes": plan.cache_bytes,
        "law": law,
        "mixture": plan.mixture,
    }


def _sure(plan: Plan) -> str:
    known, error = plan.place.calibration, speed_error(plan.place)
    if known.n_runs:
        return f"calibrated by {known.source}: seconds within {error:.0%} in 4 of 5 cases"
    if not plan.place.is_cuda:
        return f"nothing was measured on this processor: {error:.0%} either way is supposed"
    if plan.place.device.name in SPEED_ERROR:
        return f"not measured by you; published runs on this GPU's chip were predicted within {error:.0%}, 9 of 10"
    return f"not measured by you, and no published run on this GPU is known: {error:.0%} either way is supposed"


# ---- the answer in a sentence ----


def _best(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The first that the trainer can run. A machine without a price is the answer only when it is not far slower."""
    can = [row for row in rows if row["is_runnable"]]
    priced = next((row for row in can if has_price(row)), None)
    for row in can:
        if has_price(row) or priced is None:
            return row
        if row["wall_s"] <= max(_PATIENCE_S, _SLOWEST * priced["wall_s"]):
            return row
    return None


def _answer(view: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    best = view["best"]
    if best is None:
        if not rows:
            return f"Nothing can do this job as it is: none of {plural(view['n_offers'], 'offer')}."
        return f"No single GPU can do this job. {rows[0]['name']} would: {_figures(rows[0])}; but it {NOT_YET}."
    verb = {"own": "Use your ", "here": "Use "}.get(best["kind"], "Rent ")
    with_own = ", on demand when it falls behind the deadline" if best["spot"] and best["spot"]["mixture"] else ""
    text = f"{verb}{best['name']}{with_own}: {_figures(best)}."
    rented = _best([row for row in rows if row["kind"] in _RENTED])
    if best["kind"] not in _RENTED and rented is not None:
        text += f" Rented: {rented['name']}, {say_cost(rented['total_usd'])}, {say_seconds(rented['wall_s'])}."
    return text


def _figures(row: Mapping[str, Any]) -> str:
    low, likely, high = row["usd_range"]
    usd = f"{say_cost(likely)} ({say_cost(low).removeprefix('$')} to {say_cost(high).removeprefix('$')})"
    if not has_price(row):
        usd = "no price is given"
    fits = "fits, but tightly," if row["memory"]["is_tight"] else "fits"
    return f"{usd}, {say_seconds(row['wall_s'])}, {fits} with {say_bytes(row['memory']['spare_bytes'])} to spare"


def has_price(row: Mapping[str, Any]) -> bool:
    """Whether the dollars of a plan mean anything: a machine of one's own may have no price."""
    return row["kind"] != "here" or bool(row["usd_per_hour"])


def say_cost(usd: float | None) -> str:
    """`$0.78`, `$12.30`, `$1,234`: as many digits as an estimate deserves."""
    if usd is None:
        return say_usd(usd)
    if 0 < abs(usd) < 0.1:
        return f"${usd:.{min(6, 1 - math.floor(math.log10(abs(usd))))}f}"
    return f"${usd:,.2f}" if abs(usd) < 1000 else f"${usd:,.0f}"


def _here(rows: Sequence[Mapping[str, Any]], study: Study) -> dict[str, Any] | None:
    """This machine: a plan, or why not."""
    row = next((row for row in rows if row["kind"] == "here"), None)
    if row is not None:
        words = f"{say_seconds(row['wall_s'])}, "
        words += say_cost(row["total_usd"]) if has_price(row) else "no price given (where.usd_per_hour)"
        words += f", fits with {say_bytes(row['memory']['spare_bytes'])} to spare"
        return {"name": row["name"], "rank": row["rank"], "words": words, "reason": "", "change": ""}
    one = next((one for one in study.answer.rejected if one.offer.provider == LOCAL), None)
    if one is None:
        return None
    return {
        "name": f"{LOCAL} ({study.machine.device_name})",
        "rank": None,
        "words": f"{_now(one.reason)}; {one.change}",
        "reason": one.reason,
        "change": one.change,
    }


def _sooner(best: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The soonest that costs at most twice as much as the best, when it is at least a quarter sooner."""
    if best is None:
        return None
    most = _DEARER * best["total_usd"] if has_price(best) else math.inf
    can = [row for row in rows if row["is_runnable"] and has_price(row) and row["total_usd"] <= most]
    row = min(can, key=lambda row: (row["wall_s"], row["total_usd"], row["rank"]), default=None)
    if row is None or row["wall_s"] > best["wall_s"] * 0.75:
        return None
    more = f", {row['total_usd'] / best['total_usd'] - 1:+.0%} dollars" if has_price(best) and best["total_usd"] else ""
    words = f"{row['name']} {say_cost(row['total_usd'])} in {say_seconds(row['wall_s'])}: "
    return {"rank": row["rank"], "words": f"{words}{best['wall_s'] / row['wall_s']:.1f} x as fast{more}"}


def _spot_or_not(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The best on spot against the best on demand."""
    both = [next((row for row in rows if row["is_runnable"] and row["kind"] == kind), None) for kind in _RENTED]
    demand, spot = both
    if demand is None or spot is None:
        return None
    saved = saving(spot["total_usd"], demand["total_usd"])
    words = "; ".join(
        f"{row['name']} {say_cost(row['total_usd'])} in {say_seconds(row['wall_s'])}" for row in (spot, demand)
    )
    words += f": spot {_less(saved)}"
    return {
        "on_demand_rank": demand["rank"],
        "spot_rank": spot["rank"],
        "saved_usd": saved.usd,
        "saved_share": saved.share,
        "words": words,
    }


_RENTED = ("on-demand", "spot")


def _less(saved: Saving) -> str:
    """`45 % less`."""
    if saved.share is None:
        return f"{say_cost(-saved.usd)} more" if saved.usd else "costs the same"
    if abs(saved.share) < 0.005:
        return "costs the same"
    return f"{abs(saved.share) * 100:.0f} % {'less' if saved.is_one else 'more'}"


# ---- why not ----


def _grouped(rejected: Iterable[Rejected]) -> list[dict[str, Any]]:
    """Rejections that are alike together, the nearest first."""
    groups: dict[Any, list[Rejected]] = {}
    for one in rejected:
        offer = one.offer
        groups.setdefault((offer.gpu, offer.n_gpus, offer.is_spot, one.reason, one.change), []).append(one)
    rows = [_rejected(group) for group in groups.values()]
    return sorted(rows, key=lambda row: (row["distance"], row["gpu"], row["n_gpus"], row["kind"], row["reason"]))


def _rejected(group: Sequence[Rejected]) -> dict[str, Any]:
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
    return offer.usd_per_hour if offer.usd_per_hour is not None else math.inf, offer.provider, offer.region, offer.zone


def _nearest(rejected: Sequence[Rejected], n: int = 3) -> list[Rejected]:
    """The ways that are nearest to being possible: different kinds of change first, then other GPUs.

    First what fits a GPU that the trainer can use and only passes a limit, which one change mends for certain.
    """

    def key(one: Rejected) -> Any:
        needs_memory = one.reason.startswith("needs")
        return one.offer.n_gpus > 1, needs_memory and is_limited, one.distance, _usd_key(one.offer)

    is_limited = any(not one.reason.startswith("needs") for one in rejected)
    ordered = sorted(rejected, key=key)
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


def ways_out(view: Mapping[str, Any]) -> list[str]:
    """The nearest ways to make the job possible, in words."""
    return [f"{way['change']}, for {_where(way)}, which now {_now(way['reason'])}" for way in view["nearest"]]


def _where(way: Mapping[str, Any]) -> str:
    what = f"{way['n_gpus']}x {way['gpu']}" if way["kind"] != "here" else LOCAL
    if way["kind"] in ("here", "own"):
        return what
    price = "" if way["usd_per_hour"] is None else f" at {say_usd(way['usd_per_hour'])} an hour"
    return f"{what} {way['kind'].replace('-', ' ')}{price}"


def _now(reason: str) -> str:
    return reason.partition(" (")[0]


# ---- services, own machines, years ----


def _managed(study: Study) -> list[dict[str, Any]]:
    return [
        {
            "provider": offer.provider,
            "what": offer.instance,
            "usd": usd,
            "unit": offer.unit,
            "usd_per_unit": offer.usd,
            "price_source": offer.source,
            "price_date": offer.date.isoformat(),
            "takes_the_model": _takes(offer, study),
        }
        for offer, usd in study.answer.managed
    ]


def _takes(offer: Offer, study: Study) -> bool:
    """Whether the service names this model, or a range of sizes and a method that it is in."""
    if offer.unit == "run":
        return True
    billions = study.wanted.shape.n_parameters / 1e9
    size = re.search(r"(?:up to (\d+)B)|(?:(\d+)B to (\d+)B)", offer.instance)
    if size:
        low, high = (0.0, float(size[1])) if size[1] else (float(size[2]), float(size[3]))
        is_lora = "lora" in offer.instance.lower()
        return low * 0.97 <= billions < (high + 1) and is_lora == (study.wanted.method != "full")
    name = study.job.model.model_name_or_path.rpartition("/")[2].lower()
    return offer.instance.lower().removesuffix(" hosted") == name


def _own(
    owned: Owned, rows: Sequence[Mapping[str, Any]], best: Any, study: Study, runs_per_month: float | None
) -> dict[str, Any]:
    """A machine of one's own: what this run costs on it, and when buying it pays back."""
    mine = [row for row in rows if row["kind"] == "own" and (row["gpu"], row["n_gpus"]) == (owned.gpu, owned.n_gpus)]
    found: dict[str, Any] = {
        "name": f"{owned.n_gpus}x {owned.gpu}",
        "price_usd": owned.price_usd,
        "power_kw": owned.power_kw,
        "usd_per_kwh": owned.usd_per_kwh,
        "running_usd_per_h": owned.running_usd_per_h,
        "wear_usd_per_h": owned.wear_usd_per_h,
        "hours_per_month": owned.hours_per_month,
        "rank": None,
        "hours": None,
        "usd": None,
        "total_usd": None,
        "against": [],
        "words": "",
    }
    if not mine:
        why = [
            one
            for one in study.answer.rejected
            if one.offer.provider == OWN and (one.offer.gpu, one.offer.n_gpus) == (owned.gpu, owned.n_gpus)
        ]
        found["words"] = f"{why[0].reason}; {why[0].change}" if why else "not among the offers"
        return found
    row = mine[0]
    usd = {name: value for name, value in run_on_own(owned, row["hours"]).items() if value}
    found |= {"rank": row["rank"], "hours": row["hours"], "usd": usd, "total_usd": sum(usd.values())}
    hours_per_month = runs_per_month * row["hours"] if runs_per_month else owned.hours_per_month
    equal = min(
        (r for r in rows if r["kind"] == "on-demand" and (r["gpu"], r["n_gpus"]) == (owned.gpu, owned.n_gpus)),
        key=lambda r: (r["usd_per_hour"], r["provider"]),
        default=None,
    )
    rented = _best([r for r in rows if r["kind"] in _RENTED])
    for is_equal, other in ((True, equal), (False, rented)):
        if other is None or any(other["rank"] == one["rank"] for one in found["against"]):
            continue
        # against other GPUs: what the rent for the work of an own hour comes to
        per_hour = float(other["usd_per_hour"] if is_equal else other["total_usd"] / row["hours"])
        found["against"].append(
            {
                "rank": other["rank"],
                "name": other["name"],
                "is_equal": is_equal,
                "usd_per_own_hour": per_hour,
                "break_even_hours": break_even_hours(owned, per_hour),
                "break_even_months": break_even_months(
                    owned, rent_usd_per_h=per_hour, hours_per_month=min(hours_per_month, HOURS_PER_MONTH)
                ),
                "hours_per_month": min(hours_per_month, HOURS_PER_MONTH),
            }
        )
    found["words"] = f"{say_cost(found['total_usd'])} and {say_seconds(row['wall_s'])} for this run"
    return found


def _years(
    rows: Sequence[Mapping[str, Any]], view: Mapping[str, Any], study: Study, runs_per_month: float
) -> dict[str, Any]:
    """What a project of so many runs a month comes to, in a year and in three."""
    ways: dict[str, Way] = {}
    notes: list[str] = []
    for kind in _RENTED:
        row = _best([row for row in rows if row["kind"] == kind])
        if row is not None:
            ways[f"rent {row['name']}"] = Way(row["total_usd"])
    for owned, found in zip(study.own, view["own"], strict=True):
        if found["hours"] is None:
            continue
        name = f"{'buy' if owned.price_usd else 'own'} {found['name']}"
        ways[name] = own_way(owned, found["hours"])
        busy = found["hours"] * runs_per_month
        if busy > HOURS_PER_MONTH:
            notes.append(f"{name}: {busy:,.0f} hours a month are more than one machine has")
    service = next((service for service in view["managed"] if service["takes_the_model"]), None)
    if service is not None:
        ways[f"{service['provider']}, {service['what']}"] = Way(service["usd"])
    return {
        "runs_per_month": runs_per_month,
        "one_year_usd": yearly_usd(ways, runs_per_month),
        "three_years_usd": yearly_usd(ways, runs_per_month, 3),
        "notes": notes,
    }


# ---- finding and comparing plans ----


def find_plan(view: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The plan that a rank or a name means: `3`, `H100`, `2x RTX 4090 spot`, `verda/A100-80GB`, `own`.

    The first that answers to the name, one GPU before several. Raises `UserMistake`, with the reason where all that
    answer were rejected.
    """
    rows: list[dict[str, Any]] = view["plans"]
    wanted = text.strip()
    if re.fullmatch(r"#?\d+", wanted):
        rank = int(wanted.lstrip("#"))
        row = next((row for row in rows if row["rank"] == rank), None)
        if row is None:
            raise UserMistake(f"there is no plan {rank}", where="plan", to_do=f"give a rank from 1 to {len(rows)}")
        return row
    found = sorted((row for row in rows if _answers(row, wanted)), key=lambda row: not row["is_runnable"])
    if found:
        return found[0]
    no = next((one for one in view["rejected"] if _answers(one, wanted)), None)
    if no is not None:
        raise UserMistake(f"`{wanted}` was rejected: {no['reason']}", where="plan", to_do=no["change"])
    to_do = 'give a rank, or a name such as "H100", "2x RTX 4090 spot" or "RunPod/L40S"'
    raise UserMistake(f"no plan is called `{wanted}`", where="plan", to_do=to_do)


def _answers(row: Mapping[str, Any], text: str) -> bool:
    """Whether a plan or a rejection is what `text` names."""
    provider, slash, rest = text.rpartition("/")
    rest = rest.strip().lower()
    for word, kinds in (("on-demand", ("on-demand",)), ("on demand", ("on-demand",)), ("spot", ("spot",))):
        if rest.endswith(word):
            rest = rest.removesuffix(word).strip()
            if row["kind"] not in kinds:
                return False
            break
    if slash and _key(provider) not in _key(row["provider"]):
        return False
    count = re.match(r"(\d+)\s*x\s*", rest)
    if count:
        rest = rest[count.end() :]
        if row["n_gpus"] != int(count[1]):
            return False
    if not rest:
        return True
    if rest in ("own", "here", LOCAL) or _key(rest) == _key(row["provider"]):
        return rest in (row["kind"], row["provider"]) or _key(rest) == _key(row["provider"])
    names = {_key(row["gpu"])}
    if row["gpu"] in gpus():
        names |= {_key(alias) for alias in gpus()[row["gpu"]].aliases}
    if _key(rest) in names or _key(row["gpu"]).startswith(_key(rest)):
        return True
    try:
        return find_gpu(rest).name == row["gpu"]
    except UserMistake:
        return False


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def compare_plans(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Two plans side by side: figures of both with the ratio b / a, and a sentence."""

    def memory(row: Mapping[str, Any]) -> float:
        return float(row["memory"]["needed_bytes"])

    figures: dict[str, tuple[float | None, float | None]] = {
        "total_usd": (a["total_usd"], b["total_usd"]),
        "hours": (a["hours"], b["hours"]),
        "usd_per_hour": (a["usd_per_hour"], b["usd_per_hour"]),
        "tokens_per_s": (a["step"]["tokens_per_s"], b["step"]["tokens_per_s"]),
        "step_s": (a["step"]["seconds"], b["step"]["seconds"]),
        "memory_bytes": (memory(a), memory(b)),
        "capacity_bytes": (a["memory"]["capacity_bytes"], b["memory"]["capacity_bytes"]),
    }
    saved = saving(b["total_usd"], a["total_usd"])
    return dict(
        _plain(
            {
                "a": {"rank": a["rank"], "name": a["name"]},
                "b": {"rank": b["rank"], "name": b["name"]},
                "rows": {
                    name: {"a": one, "b": other, "ratio": other / one if one and other is not None else None}
                    for name, (one, other) in figures.items()
                },
                "saved_usd": saved.usd,
                "saved_share": saved.share,
                "words": f"{_sum_of(a)}; {_sum_of(b)}: {_less(saved)}",
            }
        )
    )


def _sum_of(row: Mapping[str, Any]) -> str:
    """`2x RTX 4090 at $0.50 each for 7 h = $7.00`."""
    each = " each" if row["n_gpus"] > 1 else ""
    price = "" if row["usd_per_gpu_hour"] is None else f" at {say_usd(row['usd_per_gpu_hour'])}{each}"
    kind = " spot" if row["kind"] == "spot" else ""
    return f"{row['n_gpus']}x {row['gpu']}{kind}{price} for {say_seconds(row['wall_s'])} = {say_cost(row['total_usd'])}"


def summary(view: Mapping[str, Any]) -> str:
    """The job in one line."""
    job = view["job"]
    share = job["n_trainable"] / max(1, job["n_parameters"])
    trained = (
        "" if job["n_trainable"] == job["n_parameters"] else f", {say_count(job['n_trainable'])} ({share:.1%}) trained"
    )
    epochs = f" x {plural_of(job['n_epochs'], 'epoch')}" if job["n_epochs"] is not None else ""
    return (
        f"{job['model']} ({say_count(job['n_parameters'])} parameters{trained}), {job['method']}, {job['task']}: "
        f"{plural(job['n_examples'], 'example')}{epochs}, {plural(job['n_steps'], 'step')} of {job['global_batch']}, "
        f"{say_count(job['n_tokens'])} tokens ({job['mean_tokens']:,.0f} in the mean, {job['longest_tokens']:,} in the longest)"
    )


def limits_in_words(view: Mapping[str, Any]) -> str:
    """`at most $5.00, within 12 h`; nothing where there are none."""
    limits = view["job"]["limits"]
    words = []
    if limits["max_usd"] is not None:
        words.append(f"at most {say_cost(limits['max_usd'])}")
    if limits["max_hours"] is not None:
        words.append(f"at most {say_seconds(limits['max_hours'] * 3600)}")
    if limits["deadline_s"] is not None:
        words.append(
            f"done in {say_seconds(limits['deadline_s'])} from now, on spot with {limits['sure']:.0%} at least"
        )
    return ", ".join(words)


def break_even_words(own: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """When buying a machine pays back against one way of renting."""
    price = "" if one["usd_per_own_hour"] is None else f"{say_usd(one['usd_per_own_hour'])} an hour"
    if not one["is_equal"]:
        price = f"the best rent, {price.removesuffix(' an hour')} for what it does in an hour"
    rent = f"{one['name']} ({price})"
    if one["break_even_hours"] is None:
        return f"bought for {say_cost(own['price_usd'])} it never pays back against {rent}"
    months = one["break_even_months"]
    long = f"{months:,.1f} months" if months < 36 else f"{months / 12:,.0f} years"
    return (
        f"bought for {say_cost(own['price_usd'])} it pays back after {one['break_even_hours']:,.0f} h of use, "
        f"{long} with {one['hours_per_month']:.3g} h a month, against {rent}"
    )


def plural_of(n: float, word: str) -> str:
    """`1 epoch`, `2.5 epochs`."""
    return f"{n:g} {word}" if n == 1 else f"{n:g} {word}s"


def _plain(value: Any) -> Any:
    """Values that JSON has: numbers of numpy become Python's, what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    return float(f"{number:.10g}")
