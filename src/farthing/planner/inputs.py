"""A job -> the planner's question, and its answer: sizes of the model, lengths of the data, offers,
measurements, and this machine. The clock's time is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal

from farthing.config.data_lengths import read_lengths
from farthing.config.job import Job
from farthing.config.preflight import unread_keys
from farthing.config.values import Names, Positive, PositiveNumber, Usd
from farthing.data.lengths import Lengths, from_mean
from farthing.errors import FarthingError, InputError
from farthing.local.machine import LocalMachine, local_machine
from farthing.local.measurements import MEASUREMENTS, Measurement, read_measurements
from farthing.models.blocks import block_of
from farthing.models.counted import count_shape
from farthing.models.families import FAMILIES
from farthing.models.model_config import find_config
from farthing.models.shapes import Shape, read_shape
from farthing.models.weights import begins_from_base
from farthing.objectives.registry import objective_of
from farthing.planner.alternatives import SavingsStep, other_methods, what_choices_save
from farthing.planner.calibration import past_errors
from farthing.planner.decide import Offered, decide
from farthing.planner.estimate import Estimate
from farthing.planner.machines import (
    Calibrations,
    machine_here,
    machine_of,
    owned_offer,
    rented_torch,
)
from farthing.planner.managed import Fee, fees_of
from farthing.planner.ownership import Owned
from farthing.planner.search import Refusal
from farthing.planner.software import Torch, asked_precision, fp16_risk, parse_torch, runs_in_words
from farthing.planner.spot import hazards, read_traces
from farthing.planner.types import Answer, Assumptions, JobSpec, OfferPlan, Rejected, open_ended
from farthing.prices.catalog import Catalog, read_catalog, select
from farthing.prices.gpus import gpus
from farthing.prices.offers import Offer
from farthing.storage.files import Json
from farthing.tables import FACTS
from farthing.units import say_bytes, say_count

LAW = "a prior: the middle of the zones that were measured"
NO_FP8 = "fp8 kernels would take about half of the time of the products; farthing has none"
NO_TENSOR_PARALLEL = "tensor parallelism is not offered: GPUs share the batch, or the weights"


@dataclass(frozen=True)
class Study:
    """A question to the planner with its answer, and everything that went into it."""

    job: Job
    wanted: JobSpec
    answer: Answer
    catalog: Catalog
    machine: LocalMachine
    assumptions: Assumptions
    notes: tuple[str, ...]  # where model, lengths and calibration come from, and what is not known
    today: date
    own: tuple[Owned, ...] = ()
    law: str = LAW  # where the law of interruptions comes from
    savings: tuple[SavingsStep, ...] = ()  # from the plain way to the first rented choice
    methods: tuple[tuple[str, OfferPlan | None], ...] = ()  # the first choice by each method
    managed: tuple[Fee, ...] = ()  # services that train for a fee


@dataclass(frozen=True)
class PlanOptions:
    """What is asked beside the job. Names of GPUs, providers and regions: any of them will do."""

    gpu: Names = ()
    provider: Names = ()
    region: Names = ()
    kind: Literal["spot", "on-demand"] | None = None
    max_gpus: Positive = 8
    prices: Path | str | None = None
    traces: Path | None = None  # a folder of spot capacity
    own: Sequence[Owned] = ()
    budget_usd: Usd | None = None
    deadline_s: PositiveNumber | None = None
    n_examples: Positive | None = None  # with `mean_tokens`: of data that can't be seen from here
    mean_tokens: PositiveNumber | None = None
    is_local: bool = True  # this machine is planned on
    torch: str | None = None
    """What rented machines get ("2.13.0+cu126"); None: what is installed here."""


def study_job(job: Job, asked: PlanOptions, *, now: datetime) -> Study:
    """On every offer, here and on own GPUs. Raises `InputError`, `DataError`, `ModelError`."""
    cache_dir, today = Path(job.cache_dir or "."), now.date()
    config, where = find_config(job.model.model_name_or_path, job.model.revision)
    lengths, held_out = _lengths(job, cache_dir, asked.n_examples, asked.mean_tokens)
    shape = shape_of(job, config, lengths.n_labels or 2)
    wanted = wanted_of(job, shape, lengths, held_out, config=config, now=now)
    if asked.budget_usd is not None:
        wanted = replace(wanted, max_usd=asked.budget_usd)
    if asked.deadline_s is not None:
        wanted = replace(wanted, deadline_s=asked.deadline_s)
    catalog = read_catalog(asked.prices, today)
    measurements = read_measurements(cache_dir / MEASUREMENTS)
    machine, known = local_machine(), Calibrations(wanted, measurements)
    software = rented_torch() if asked.torch is None else parse_torch(asked.torch)
    notes = [f"model: {where}", f"data: {lengths.source}", *unread_keys(job)]
    notes += list(dict.fromkeys([*lengths.notes, *(held_out.notes if held_out else ())]))
    notes += [*_of_model(wanted), f"software: {runs_in_words(software)}"]
    offers = _offers(catalog, job, asked)
    here: list[Offered] = []
    if machine.taken_bytes > 1 << 30:
        notes.append(
            f"this machine: other processes hold {say_bytes(machine.taken_bytes)} of a GPU"
        )
    for n in _counts_here(machine, job, asked) if asked.is_local else ():
        found = machine_here(wanted, machine, job, measurements, today, n)
        if found is None:
            what = f"this machine: {machine.device_name} is no GPU that is known here"
            notes.append(f"{what}, so it is left out")
            break
        here.append((found[0], [found[1]]))
    rented = _machines(wanted, offers, known, software)
    owned = _machines(wanted, [owned_offer(one, today) for one in asked.own], known, software)
    own = [
        (one if isinstance(one, Refusal) else replace(one, is_local=True), at) for one, at in owned
    ]
    if job.where.device == "cpu":
        notes.append("where.device: cpu is of this machine; other places are planned with a GPU")
    hazard, law = None, LAW
    if asked.traces is not None:
        if not Path(asked.traces).is_dir():
            raise InputError("no such folder", where=str(asked.traces), to_do="name one of traces")
        hazard, law = hazards(read_traces(asked.traces))
        notes.append(law)
    assumptions, by_fee = Assumptions(), [offer for offer in offers if offer.usd_per_hour is None]
    has_own_prices = asked.prices not in (None, FACTS / "prices.csv")  # the package's own
    how = dict[str, Any](today=today, assumptions=assumptions, hazard=hazard)
    answer = decide(wanted, [*here, *own, *rented], has_own_prices=has_own_prices, **how)
    notes += [*known.notes, *_past(here, measurements, machine), *_not_offered(answer)]
    savings: tuple[SavingsStep, ...] = ()
    methods: tuple[tuple[str, OfferPlan | None], ...] = ()
    best = next((plan for plan in answer.plans if plan.is_rented), None)
    if best is not None:

        def answer_for(other: JobSpec, some: Sequence[Offer]) -> Answer:
            places = _machines(other, some, Calibrations(other, measurements), software)
            return decide(other, places, today=today, explains=False)

        savings = tuple(what_choices_save(answer, best, wanted, catalog.offers, answer_for))
        methods = tuple(other_methods(answer, wanted, answer_for, notes))
    fees = fees_of(wanted, job.model.model_name_or_path, job.max_length, by_fee, today)
    study = job, wanted, answer, catalog, machine, assumptions, tuple(notes), today
    return Study(*study, tuple(asked.own), law, savings, methods, fees)


def _of_model(wanted: JobSpec) -> list[str]:
    shape, found = wanted.shape, []
    if wanted.method == "qlora" and shape.n_active:
        n = say_count(shape.n_matmul - shape.n_packed)
        found.append(f"4 bits: bitsandbytes leaves experts in 16 bits, {n} weights")
    if not block_of(shape).is_traced:
        what = "sizes are exact, layers are counted as usual ones of their kind"
        found.append(f"{shape.model_type}: {what}; ranges are wider")
    return found


def _not_offered(answer: Answer) -> list[str]:
    """What others have that would make the first choice quicker."""
    best = answer.best
    if best is None or not best.on.machine.is_cuda:
        return []
    step, gpu = best.on.step, gpus().get(best.offer.gpu)
    share = step.parts.get("matmul", 0.0) / step.seconds
    found = [NO_FP8] if gpu is not None and "fp8" in gpu.flops and share > 0.4 else []
    waits = step.parts.get("communication", 0.0) / step.seconds > 0.3
    return [*found, NO_TENSOR_PARALLEL] if waits else found


def _offers(catalog: Catalog, job: Job, asked: PlanOptions) -> list[Offer]:
    """Those that are asked for. Raises `InputError` where there are none."""
    may = job.where
    names = asked.gpu or may.gpu, asked.provider or may.provider, asked.region or may.region
    chosen = select(catalog, *names, asked.kind or may.offers)
    offers = [offer for offer in chosen if offer.n_gpus <= asked.max_gpus]
    if not offers:
        what = f"no machine of at most {asked.max_gpus} GPUs is among the offers"
        raise InputError(what, where="--max-gpus", to_do="give more")
    if isinstance(may.gpus, int):  # the job would leave others idle, or refuse to begin
        offers = [offer for offer in offers if offer.n_gpus in (0, may.gpus)]
        if not offers:
            what = f"no machine of {may.gpus} GPUs is among the offers"
            raise InputError(what, where="where.gpus", to_do="give another number, or all")
    return offers


def _machines(
    wanted: JobSpec, offers: Sequence[Offer], known: Calibrations, software: Torch
) -> list[Offered]:
    groups: dict[tuple[str, int], list[Offer]] = {}
    for offer in offers:
        if offer.usd_per_hour is not None:
            groups.setdefault((offer.gpu, max(1, offer.n_gpus)), []).append(offer)
    how = wanted, known, software
    return [(machine_of(gpus()[gpu], n, *how), group) for (gpu, n), group in groups.items()]


def _past(
    here: Sequence[Offered], measurements: Sequence[Measurement], machine: LocalMachine
) -> list[str]:
    known = [one.calibration for one, _ in here if not isinstance(one, Refusal)]
    notes = [f"this machine is calibrated by {one.source}" for one in known[:1] if one.n_runs]
    earlier = past_errors(measurements, machine.hardware)
    return [*notes, earlier] if earlier else notes


def _counts_here(machine: LocalMachine, job: Job, asked: PlanOptions) -> list[int]:
    """As the job says; else one, two, four and so on, and all of them."""
    if machine.kind != "cuda" or job.where.device == "cpu":
        return [1]
    most = min(machine.n_gpus, asked.max_gpus)
    if job.where.gpus is not None:
        return [most if job.where.gpus == "all" else min(job.where.gpus, machine.n_gpus)]
    return sorted({*(2**power for power in range(most.bit_length())), most})


# ---- the job ----

_OF_METHOD = ("lora_r", "lora_dropout", "target_modules", "modules_to_save", "use_dora")
"""Settings of a method that the planner takes as they are."""


def shape_of(job: Job, config: Json, n_labels: int = 2) -> Shape:
    """With its head: by the table of its family, else counted on its own code."""
    n_labels = 0 if objective_of(job.task).scores_tokens else n_labels
    read = read_shape if config.get("model_type") in FAMILIES else count_shape
    return read(config, job.task, n_labels)


def wanted_of(
    job: Job,
    shape: Shape,
    lengths: Lengths,
    held_out: Lengths | None,
    *,
    config: Json,
    now: datetime,
) -> JobSpec:
    """What a job asks of the planner; `config` is the model's."""
    train, method = job.train, job.method
    micro_batch_tokens = train.micro_batch_tokens
    if micro_batch_tokens is None and job.says_micro_batch:  # as the trainer takes it
        micro_batch_tokens = job.micro_batch_size * lengths.longest_example
    deadline_s = None
    if job.limits.deadline is not None:
        deadline_s = job.limits.deadline.timestamp() - now.timestamp()
    is_generated = job.writes_texts
    is_adapter, keeps_start = method.name != "full", begins_from_base(method.init_lora_weights)
    every = train.gradient_checkpointing
    return JobSpec(
        shape=shape,
        method=method.name,
        optim=train.optim,
        global_batch=job.global_batch_size,
        lengths=lengths,
        n_epochs=train.num_train_epochs,
        max_steps=train.max_steps,
        micro_batch_tokens=micro_batch_tokens,
        spreads=None if job.where.strategy == "auto" else job.where.strategy != "ddp",
        may_spread=not (
            is_generated
            or (is_adapter and keeps_start)
            or (job.where.same_bits and not is_adapter)
            or train.torch_compile
        ),
        reshards=job.where.reshard_after_forward,
        offloads_weights=job.where.offload_weights,
        may_go_packed=job.model.attn_implementation is None,
        checkpoint_every=None if every == "auto" else int(every),
        precision=asked_precision(train.bf16, train.fp16),
        tf32=train.tf32,
        fp16_risk=fp16_risk(config),
        attention=job.model.attn_implementation or "",
        **{name: getattr(method, name) for name in _OF_METHOD},
        keeps_start=keeps_start,
        eval_lengths=held_out,
        eval_steps=0 if train.eval_strategy == "no" else train.eval_steps,
        eval_batch=train.per_device_eval_batch_size,
        max_new_tokens=job.data.max_target_length if is_generated else 0,
        save_every_s=train.save_minutes * 60 if train.save_minutes else None,
        save_steps=train.save_steps,
        store=job.output_store or "",
        is_tokenized=lengths.is_exact,
        **{name: getattr(job.limits, name) for name in ("max_usd", "max_hours", "max_gpu_hours")},
        deadline_s=deadline_s,
    )


def _lengths(
    job: Job, cache_dir: Path, n_examples: int | None, mean_tokens: float | None
) -> tuple[Lengths, Lengths | None]:
    if n_examples is None and mean_tokens is None:
        return read_lengths(job, cache_dir=cache_dir)
    if n_examples is None or mean_tokens is None:  # the data says the other
        try:
            seen, held_out = read_lengths(job, cache_dir=cache_dir)
        except FarthingError as error:
            lacks = "--examples" if n_examples is None else "--mean-tokens"
            what = f"{lacks} is not known: {error.what}"
            raise InputError(what, where=error.where, to_do=f"give {lacks} too") from None
        if mean_tokens is None and n_examples is not None:
            return seen.repeated(n_examples), held_out
        n_examples = seen.n_examples
    assert mean_tokens is not None
    target = mean_tokens / 4 if objective_of(job.task).is_pair else None
    longest = max(job.max_length, int(mean_tokens) + 1)
    found = from_mean(n_examples, mean_tokens, longest, mean_target=target)
    if objective_of(job.task).scores_tokens:
        return found, None
    try:  # the head has an output for each class
        return replace(found, n_labels=read_lengths(job, cache_dir=cache_dir)[0].n_labels), None
    except FarthingError:
        note = "classes: 2 by assumption, because the data is not here"
        return replace(found, notes=(*found.notes, note)), None


# ---- one run here ----


def plan_here(
    wanted: JobSpec,
    machine: LocalMachine,
    job: Job,
    measurements: Sequence[Measurement],
    today: date,
    n_gpus: int | None = None,
) -> OfferPlan | Rejected | None:
    """The plan for this machine alone, limits aside; None where it can't be planned on."""
    found = machine_here(wanted, machine, job, measurements, today, n_gpus)
    if found is None:
        return None
    answer = decide(open_ended(wanted), [(found[0], [found[1]])], today=today)
    return answer.plans[0] if answer.plans else answer.rejected[0]


def estimate_of(plan: OfferPlan, wanted: JobSpec) -> Estimate:
    """Memory is what torch allocates, as the trainer measures it."""
    on, recipe, adapters = plan.on, plan.recipe, wanted.adapters
    return Estimate(
        wall_s=plan.wall_s,
        wall_range_s=[hours * 3600 for hours in plan.hours_range],
        usd=plan.total_usd,
        peak_bytes=on.memory.allocated.n_bytes,
        seconds=plan.seconds,
        memory=on.memory.as_dict(),
        step_s=on.step.seconds,
        interval_s=plan.interval_s,
        calibration=on.machine.calibration.source or "formulas only",
        settings=recipe.settings,
        first_layer=adapters.first_layer if adapters is not None else 0,
    )
