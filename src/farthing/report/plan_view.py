"""A plan as typed values: what `farthing plan --json` prints, and all that its drawings know.

The same study gives the same bytes. Offers that differ only in place are one choice, the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import farthing
from farthing.planner.managed import Fee
from farthing.planner.ownership import saving
from farthing.planner.ranking import TIE, why_first
from farthing.planner.serving import Traffic
from farthing.planner.speed import StepTime
from farthing.planner.throughput_arithmetic import Known, OwnFigures, by_hand
from farthing.planner.types import (
    AGED_PRICE_DAYS,
    HERE,
    OLD_PRICE_DAYS,
    OWN,
    MachinePlan,
    OfferPlan,
    Range,
    Rejected,
)
from farthing.prices.gpus import gpus
from farthing.prices.offers import (
    ASSUMED_EGRESS_USD_PER_GB,
    ASSUMED_STORAGE_USD_PER_GB_MONTH,
    Offer,
)
from farthing.report import plan_asides as aside
from farthing.report.plan_types import (
    RENTED,
    Choice,
    Elsewhere,
    JobView,
    MemoryView,
    PlanLimits,
    Prices,
    RecipeView,
    Refused,
    SpotView,
    StepView,
    machine_name,
    view_of,
)
from farthing.report.plan_words import said, say_saving
from farthing.report.words import lines, say
from farthing.storage.files import Json

if TYPE_CHECKING:
    from farthing.planner.inputs import Study

KIND = "farthing plan"
UNTRIED = "farthing was not run on several real GPUs so far"
SOONER_AT_MOST = 2.0  # times the dollars of the best
ASSUMED = ASSUMED_STORAGE_USD_PER_GB_MONTH, ASSUMED_EGRESS_USD_PER_GB
N_CHOICES, N_REJECTED, N_NEAREST = 20, 20, 3  # in JSON without --all


@dataclass(frozen=True)
class Here:
    name: str
    rank: int | None
    words: str
    reason: str = ""
    change: str = ""


@dataclass(frozen=True)
class Against:
    rank: int
    other_rank: int
    saved_usd: float
    saved_share: float | None
    words: str


@dataclass(frozen=True)
class Compared:
    a: str
    b: str
    rows: dict[str, dict[str, float | None]]
    table: tuple[tuple[str, ...], ...]
    saved_usd: float
    saved_share: float | None
    words: str


@dataclass(frozen=True)
class Method:
    method: str
    is_asked: bool
    usd: float | None
    hours: float | None
    where: str


@dataclass(frozen=True)
class PlanView:
    """Everything a plan says."""

    kind: str
    version: str
    date: str
    job: JobView
    prices: Prices
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    data_notes: tuple[str, ...]
    answer: str
    best: Choice | None
    n_offers: int
    n_plans: int
    n_choices: int
    plans: tuple[Choice, ...]
    here: Here | None
    sooner: Against | None
    spot_or_not: Against | None
    two_or_one: Against | None
    nearest: tuple[Refused, ...]
    rejected: tuple[Refused, ...]
    managed: tuple[Fee, ...]
    savings: aside.Savings | None
    methods: tuple[Method, ...]
    own: tuple[aside.OwnMachine, ...] = ()
    years: aside.Years | None = None
    by_hand: dict[str, Any] | None = None
    runs: aside.Runs | None = None
    serving: aside.ServingView | None = None
    paid: aside.Paid | None = None
    comparison: Compared | None = None

    def to_json(self, *, is_whole: bool = True, limit: int | None = None) -> Json:
        plans, rejected = self.plans[: limit or None], self.rejected
        if not is_whole:
            rejected = rejected[:N_REJECTED]
            if not limit:
                plans = tuple(replace(one, also_at=()) for one in plans[:N_CHOICES])
        return dict(_plain(asdict(replace(self, plans=plans, rejected=rejected))))


def plan_view(
    study: Study,
    runs_per_month: float | None = None,
    figures: OwnFigures | None = None,
    traffic: Traffic | None = None,
    n_runs: int | None = None,
    paid_usd: float | None = None,
) -> PlanView:
    """The view of a study, with what is asked for beside it: a project of so many runs a month,
    figures of one's own, a traffic to serve, so many runs, and what somebody paid.
    """
    answer, wanted, prices = study.answer, study.wanted, study.catalog
    groups: dict[tuple[object, ...], list[OfferPlan]] = {}
    for plan in answer.plans:
        o = plan.offer
        which = "" if plan.is_rented else o.instance
        groups.setdefault((o.provider, o.gpu, o.n_gpus, o.is_spot, which), []).append(plan)
    ranked = enumerate(groups.values(), 1)
    choices = tuple(_choice(rank, group, study) for rank, group in ranked)
    best = choices[0] if choices else None
    read = [lengths for lengths in (wanted.lengths, wanted.eval_lengths) if lengths is not None]
    words, renewal = (say("prices.txt", name, prices) for name in ("words", "renewal"))
    ages = dict(zip(("newest", "median", "oldest"), prices.ages_days, strict=True))
    savings, others = aside.savings_of(study), aside.elsewhere(study.managed, paid_usd)
    own = tuple(aside.own_machine(owned, choices, study, runs_per_month) for owned in study.own)
    return PlanView(
        kind=KIND,
        version=farthing.__version__,
        date=study.today.isoformat(),
        job=_job(study),
        prices=Prices(words, prices.where, prices.is_stale, renewal, ages),
        assumptions=tuple(lines("plan.txt", "assumptions", study.assumptions, *ASSUMED)),
        notes=study.notes,
        data_notes=tuple(dict.fromkeys(note for lengths in read for note in lengths.notes)),
        answer=_answer(best, choices, study),
        best=best,
        n_offers=len(answer.plans) + len(answer.rejected),
        n_plans=len(answer.plans),
        n_choices=len(choices),
        plans=choices,
        here=_here(choices, study),
        sooner=_sooner(best, choices),
        spot_or_not=_spot_or_not(choices),
        two_or_one=_two_or_one(choices),
        nearest=tuple(_refused([one]) for one in _nearest(answer.rejected)),
        rejected=_grouped(answer.rejected),
        managed=study.managed,
        savings=savings,
        methods=_methods(study),
        own=own,
        years=aside.years_of(choices, own, study.own, runs_per_month, others)
        if runs_per_month
        else None,
        by_hand=_by_hand(study, figures or OwnFigures(), best),
        runs=aside.runs_of(n_runs, best, savings, others) if n_runs else None,
        serving=None if traffic is None else aside.serving_of(study, traffic),
        paid=None if paid_usd is None else aside.paid_of(paid_usd, best),
    )


def _plain(value: Any) -> Any:
    """Values that JSON has: numbers of numpy become Python's, what is not finite becomes null."""
    if value is None or isinstance(value, str | int):  # most are leaves
        return value
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict") and not isinstance(value, Range):
        return _plain(value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    number = float(value)
    return float(f"{number:.10g}") if math.isfinite(number) else None


def _job(study: Study) -> JobView:
    job, wanted = study.job, study.wanted
    lengths, held_out = wanted.lengths, wanted.eval_lengths
    confidence = None if wanted.deadline_s is None else wanted.confidence
    return view_of(
        JobView,
        *(wanted, lengths, job.model, job),
        model=job.model.model_name_or_path,
        optimizer=wanted.optim,
        n_parameters=wanted.shape.n_parameters,
        n_epochs=None if wanted.max_steps is not None else wanted.n_epochs,
        mean_tokens=wanted.tokens_per_example,
        longest_tokens=lengths.longest_example,
        longest_target_tokens=lengths.longest_target or None,
        lengths_are_exact=lengths.is_exact,
        lengths_source=lengths.source,
        n_eval_examples=held_out.n_examples if held_out is not None else 0,
        limits=view_of(PlanLimits, wanted, confidence=confidence),
    )


def _by_hand(study: Study, figures: OwnFigures, best: Choice | None) -> dict[str, Any] | None:
    """What somebody's own figures come to; the throughput that the job's cap on GPU-hours asks."""
    wanted, plan = study.wanted, study.answer.best
    if figures == OwnFigures() and wanted.max_gpu_hours is None:
        return None
    n_samples, mean = wanted.lengths.n_examples, wanted.tokens_per_example
    known = view_of(Known, wanted, n_samples=n_samples, tokens_per_sample=mean)
    if wanted.max_steps is not None:
        known = replace(known, n_samples=wanted.n_taken, n_epochs=1.0)
    if best is not None and plan is not None:
        peak = gpus()[plan.offer.gpu].flops.get(plan.recipe.precision) if plan.offer.gpu else None
        step = plan.on.step
        reached = step.flops / step.seconds / (peak * plan.recipe.n_gpus) if peak else 0.0
        known = replace(
            known,
            save_every_s=known.save_every_s or plan.interval_s,
            usd_per_hour=best.usd_per_hour if best.is_rented else None,
            paid_gb=best.paid_gb,
            machine=best.name,
            n_gpus=plan.recipe.n_gpus,
            samples_per_min=wanted.global_batch / step.seconds * 60,
            share_of_peak=reached,
        )
    found = by_hand(figures, known)
    return {"words": lines("plan.txt", "by_hand", found, figures, known), **found}


# ---- choices ----


def kind_of(offer: Offer) -> str:
    return {HERE: "here", OWN: "own"}.get(offer.provider, offer.kind)


def _choice(rank: int, group: Sequence[OfferPlan], study: Study) -> Choice:
    plan, offer, on = group[0], group[0].offer, group[0].on
    n_gpus, gpu, kind = max(1, offer.n_gpus), on.machine.gpu, kind_of(offer)
    machine = machine_name(n_gpus, gpu)
    name = f"{n_gpus}x {gpu} {kind.replace('-', ' ')} at {offer.provider}"
    if not plan.is_rented:
        name = f"{HERE} ({machine})" if kind == "here" else f"own {machine}"
    notes = why(plan, study.answer.plans), plan.mixture, on.machine.precision_note
    save_every = {"save_every_s": plan.interval_s, "law": study.law}
    spot = plan.spot and view_of(SpotView, plan.spot, plan, **save_every)
    return view_of(
        Choice,
        *(plan, offer),
        rank=rank,
        name=name,
        gpu=gpu,
        is_cpu=not on.machine.is_cuda,
        n_gpus=n_gpus,
        kind=kind,
        usd_per_gpu_hour=None if offer.usd_per_hour is None else offer.usd_per_hour / n_gpus,
        paid_gb=n_gpus * gpus()[gpu].memory_gib if offer.unit == "gb_hour" else None,
        price_source=offer.source,
        price_date=offer.date.isoformat(),
        price_is="from" if plan.is_from_price else "",
        price_notes=_price_notes(plan),
        recipe=_recipe(plan),
        memory=_memory(plan.on),
        hours=plan.wall_s / 3600,
        step=_step(plan.on.step),
        save_every_s=plan.interval_s,
        spot=spot,
        pace=say("plan.txt", "pace", on),
        confidence=say("plan.txt", "how_sure", on),
        why="; ".join(words for words in notes if words),
        on_front=any(one.on_front for one in group),
        n_also=len(group) - 1,
        also_at=tuple(view_of(Elsewhere, o, o.offer, hours=o.wall_s / 3600) for o in group[1:]),
    )


def why(plan: OfferPlan, plans: Sequence[OfferPlan]) -> str:
    """What a plan is against the first of all, or why that one is the first."""
    reasons = why_first(plans) if plan is plans[0] else None
    return say("plan.txt", "why", plan, plans[0], reasons, TIE)


def _recipe(plan: OfferPlan) -> RecipeView:
    recipe, n_padded = plan.recipe, plan.on.step.n_padded_tokens
    return view_of(
        RecipeView,
        *(plan, recipe, recipe.settings, plan.on.machine),
        words=recipe.in_words(),
        mean_tokens_at_once=n_padded / recipe.n_gpus / recipe.n_micro_batches,
        is_flat=recipe.stack.is_packed,
        optimizer=recipe.optim,
    )


def _memory(on: MachinePlan) -> MemoryView:
    needed, there = on.memory.on_device.n_bytes, on.machine.memory.n_bytes
    found = on.memory.as_dict(), needed, on.memory_range, there, there - needed
    return MemoryView(*found, on.memory.moment, on.is_tight, on.host_bytes)


def _step(step: StepTime) -> StepView:
    share = min(1.0, step.n_tokens / max(1.0, step.n_padded_tokens))
    return view_of(StepView, step, useful_share=share, flops_per_s=step.flops / step.seconds)


def _price_notes(plan: OfferPlan) -> tuple[str, ...]:
    is_old = plan.price_age_days >= AGED_PRICE_DAYS and not plan.is_users_price
    return tuple(lines("plan.txt", "price_notes", plan, plan.offer.billing, is_old))


def _answer(best: Choice | None, rows: Sequence[Choice], study: Study) -> str:
    rented = next((row for row in rows if row.is_rented), None)
    here = next((row for row in rows if not row.is_priced), None)
    n_refused, cap = len(study.answer.rejected), study.wanted.max_usd
    return say("plan.txt", "answer", best, n_refused, cap, rented, here)


def _here(rows: Sequence[Choice], study: Study) -> Here | None:
    row = next((row for row in rows if row.kind == "here"), None)
    if row is not None:
        return Here(row.name, row.rank, say("plan.txt", "here", row))
    for one in study.answer.rejected:
        if one.offer.provider == HERE:
            words = f"{one.reason}; {one.change}"
            name = f"{HERE} ({study.machine.device_name})"
            return Here(name, None, words, one.reason, one.change)
    return None


# ---- beside the best ----


def _against(row: Choice, other: Choice, words: str) -> Against:
    saved = saving(row.total_usd, other.total_usd)
    return Against(row.rank, other.rank, saved.usd, saved.share, words)


def _cheaper(row: Choice, other: Choice, name: str) -> str:
    saved = say_saving(saving(row.total_usd, other.total_usd))
    return f"{said(row)}; {said(other)}: {name} {saved}"


def _sooner(best: Choice | None, rows: Sequence[Choice]) -> Against | None:
    """The soonest that costs at most twice as much as the best, when it is a quarter sooner."""
    if best is None:
        return None
    most = SOONER_AT_MOST * best.total_usd if best.is_priced else math.inf
    can = [row for row in rows if row.is_priced and row.total_usd <= most]
    row = min(can, key=lambda row: (row.wall_s, row.total_usd, row.rank), default=None)
    if row is None or row.wall_s > best.wall_s * 0.75:
        return None
    more = f", {row.total_usd / best.total_usd - 1:+.0%} dollars" if 0 < most < math.inf else ""
    words = f"{said(row)}: {best.wall_s / row.wall_s:.1f} x as fast{more}"
    return _against(row, best, words)


def _spot_or_not(rows: Sequence[Choice]) -> Against | None:
    """The best on spot against the best on demand."""
    demand, spot = (next((row for row in rows if row.kind == kind), None) for kind in RENTED)
    if demand is None or spot is None:
        return None
    return _against(spot, demand, _cheaper(spot, demand, "spot"))


def _two_or_one(rows: Sequence[Choice]) -> Against | None:
    """The best on two GPUs against the best on one that costs more an hour than each of them."""
    rented = [row for row in rows if row.kind == "on-demand"]
    rented.sort(key=lambda row: bool(row.price_is) or row.price_age_days > OLD_PRICE_DAYS)
    two = next((row for row in rented if row.n_gpus == 2), None)
    if two is None:
        return None
    ones = (row for row in rented if row.n_gpus == 1)
    each = two.usd_per_gpu_hour or 0.0
    one = next((row for row in ones if (row.usd_per_gpu_hour or 0.0) > each), None)
    if one is None:
        return None
    return _against(two, one, f"{_cheaper(two, one, 'two')}; {UNTRIED}")


def _methods(study: Study) -> tuple[Method, ...]:
    found = []
    for method, plan in study.methods:
        where, usd, hours = "", None, None
        if plan is not None:
            what = machine_name(plan.recipe.n_gpus, plan.on.machine.gpu)
            where = f"{what} at {plan.offer.provider}" if plan.is_rented else f"own {what}"
            usd, hours = plan.total_usd, plan.wall_s / 3600
        found.append(Method(method, method == study.wanted.method, usd, hours, where))
    return tuple(sorted(found, key=lambda one: (one.usd is None, one.usd or 0.0)))


# ---- why not ----


def _grouped(rejected: Iterable[Rejected]) -> tuple[Refused, ...]:
    """Rejections that are alike together, the nearest first."""
    groups: dict[tuple[object, ...], list[Rejected]] = {}
    for one in rejected:
        offer = one.offer
        alike = offer.gpu, offer.n_gpus, offer.is_spot, one.reason, one.change
        groups.setdefault(alike, []).append(one)
    rows = [_refused(group) for group in groups.values()]
    rows.sort(
        key=lambda r: (math.inf if r.distance is None else r.distance, r.gpu, r.n_gpus, r.kind)
    )
    return tuple(rows)


def _refused(group: Sequence[Rejected]) -> Refused:
    one = min(group, key=lambda one: _usd_key(one.offer))
    offer = one.offer
    return view_of(
        Refused,
        *(one, offer),
        gpu=offer.gpu or offer.instance,
        n_gpus=max(1, offer.n_gpus),
        kind=kind_of(offer),
        change=one.change or "another GPU",
        cause=one.kind,
        n_offers=len(group),
        distance=one.distance if math.isfinite(one.distance) else None,
    )


def _usd_key(offer: Offer) -> tuple[float, str, str, str]:
    usd = math.inf if offer.usd_per_hour is None else offer.usd_per_hour
    return usd, offer.provider, offer.region, offer.zone


def _nearest(rejected: Sequence[Rejected]) -> list[Rejected]:
    """The ways that are nearest to being possible: different kinds of change first, then other
    GPUs.

    First what fits a GPU that the trainer can use and only passes a limit, which one change mends
    for certain; last what torch has no code for, of which it is not known whether it would fit.
    """
    is_limited = any(one.kind != "memory" for one in rejected)

    def key(one: Rejected) -> tuple[object, ...]:
        needs_memory = one.kind == "memory" and is_limited
        is_many = one.offer.n_gpus > 1
        return one.change_kind == "torch", is_many, needs_memory, one.distance, _usd_key(one.offer)

    ordered = sorted((one for one in rejected if one.change), key=key)
    found: list[Rejected] = []
    for of_what in (
        lambda one: one.change_kind,
        lambda one: one.change,
        lambda one: (one.offer.gpu, one.offer.n_gpus),
    ):
        seen = {of_what(one) for one in found}
        for one in ordered:
            if len(found) < N_NEAREST and of_what(one) not in seen:
                seen.add(of_what(one))
                found.append(one)
    return sorted(found, key=key)
