"""A job -> the planner's question, and its answer: the shape of the model, the lengths of the data,
offers, measurements.

This is where the planner's values come from: config.json, token caches or a sample of rows, the
price snapshot, the file of measurements, and what this machine is. `search.decide` gets them and
nothing else.

Refuses to import torch, to train and to print. The clock's time is handed in.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path

from farthing.config.data_lengths import read_lengths
from farthing.config.job import Job
from farthing.data.lengths import Lengths, from_mean
from farthing.errors import FarthingError, InputError
from farthing.local.machine import Machine, free_memory_bytes, installed_torch, local_machine
from farthing.local.measurements import MEASUREMENTS, Measurement, link_of, read_measurements
from farthing.models.families import FUSED_BY_LIGER
from farthing.models.model_config import find_config
from farthing.models.shapes import Shape, read_shape
from farthing.models.weights import begins_from_base
from farthing.objectives.registry import objective_of
from farthing.planner.alternatives import Rung, is_rented, other_methods, what_choices_save
from farthing.planner.calibration import calibrate, past_errors
from farthing.planner.estimate import Estimate
from farthing.planner.ownership import Owned
from farthing.planner.search import CPU_TOKENS, decide, recipe_of
from farthing.planner.software import (
    OLDEST_TORCH,
    Torch,
    fp16_risk,
    parse_torch,
    runs_in_words,
    torch_of,
)
from farthing.planner.speed import Calibration, Device, cpu_device, device_of, step_time, work_of
from farthing.planner.spot_traces import hazards, read_traces
from farthing.planner.types import (
    Answer,
    Assumptions,
    JobSpec,
    Place,
    Plan,
    Rejected,
    best_precision,
    open_ended,
    place_of,
)
from farthing.prices.catalog import Catalog, read_catalog, select_any
from farthing.prices.gpus import FACTS, gpu_of_device, gpus
from farthing.prices.offers import Billing, Offer
from farthing.storage.files import Json
from farthing.units import say_count

HERE, OWN = "this machine", "own"


@dataclass(frozen=True)
class Study:
    """A question to the planner with its answer, and everything that went into it."""

    job: Job
    wanted: JobSpec
    answer: Answer
    catalog: Catalog
    machine: Machine
    assumptions: Assumptions
    notes: tuple[str, ...]
    """Where model, lengths and calibration come from, and what is not known."""
    today: date
    own: tuple[Owned, ...] = ()
    law: str = "a prior: the middle of the zones that were measured"
    """Where the law of interruptions comes from."""
    rungs: tuple[Rung, ...] = ()
    """From the plain way to the first rented choice."""
    methods: tuple[tuple[str, Plan | None], ...] = ()
    """The first choice by each method."""


@dataclass(frozen=True)
class Asked:
    """What is asked beside the job. Names of GPUs, providers and regions: any of them will do;
    none: as the job says.
    """

    gpu: Sequence[str] = ()
    provider: Sequence[str] = ()
    region: Sequence[str] = ()
    kind: str | None = None
    max_gpus: int = 8
    prices: Path | str | None = None
    traces: Path | None = None
    """A folder of spot capacity."""
    own: Sequence[Owned] = ()
    budget_usd: float | None = None
    deadline_s: float | None = None
    n_examples: int | None = None
    """With `mean_tokens`: of data that can't be seen from here."""
    mean_tokens: float | None = None
    is_local: bool = True
    """Whether this machine is planned on."""
    torch: str | None = None
    """What rented machines get ("2.13.0+cu126"); None: the version and build that are installed
    here.
    """


def study_job(job: Job, asked: Asked, *, now: datetime) -> Study:
    """Plan a job on every offer that is asked for, on this machine, and on GPUs of one's own.

    Raises `InputError`, `DataError`, `ModelError`.
    """
    cache_dir, today = Path(job.cache_dir or "."), now.date()
    config, where = find_config(job.model.model_name_or_path, job.model.revision)
    lengths, held_out = _lengths(job, cache_dir, asked.n_examples, asked.mean_tokens)
    notes = [f"model: {where}", f"data: {lengths.source}"]
    notes += list(dict.fromkeys([*lengths.notes, *(held_out.notes if held_out else ())]))
    wanted = wanted_of(
        job, shape_of(job, config, lengths.n_labels or 2), lengths, held_out, config=config, now=now
    )
    if wanted.method == "qlora" and wanted.shape.n_active:
        n = wanted.shape.n_matmul - wanted.shape.n_packed
        notes.append(f"4 bits: bitsandbytes leaves experts in 16 bits, {say_count(n)} weights")
    if asked.budget_usd is not None:
        wanted = replace(wanted, max_usd=asked.budget_usd)
    if asked.deadline_s is not None:
        wanted = replace(wanted, deadline_s=asked.deadline_s)
    catalog = read_catalog(asked.prices, today)
    measurements = read_measurements(cache_dir / MEASUREMENTS)
    machine = local_machine()
    known = _Known(wanted, measurements)
    offers = _offers(catalog, job, asked)
    software = rented_torch() if asked.torch is None else parse_torch(asked.torch)
    notes.append(f"software: {runs_in_words(software)}")
    found: list[Place | Rejected] = []
    if asked.is_local:
        ways = [
            place_here(wanted, machine, job, measurements, today, n)
            for n in _counts_here(machine, job, asked)
        ]
        found += [way for way in ways if way is not None]
        if None in ways:
            notes.append(
                f"this machine: {machine.device_name} is no GPU that is known here, so nothing is"
                " planned on it"
            )
    found += _places(wanted, offers, asked.own, known, software, today)
    if job.where.device == "cpu":
        notes.append(
            "where.device: cpu is of this machine; places with a GPU are planned as with"
            " where.device: auto"
        )
    is_given = asked.prices not in (None, FACTS / "prices.csv")  # not the package's own table
    places = [
        replace(place, is_given_price=is_given or place.is_local)
        for place in found
        if isinstance(place, Place)
    ]
    refused = tuple(place for place in found if isinstance(place, Rejected))
    hazard, law = None, Study.law
    if asked.traces is not None:
        hazard, law = hazards(read_traces(asked.traces), now)
        notes.append(law)
    assumptions, managed = Assumptions(), [offer for offer in offers if offer.usd_per_hour is None]
    answer = decide(wanted, places, assumptions=assumptions, managed=managed, hazard=hazard)
    answer = replace(answer, rejected=(*answer.rejected, *refused))
    notes += [*known.notes, *_past(places, measurements, machine)]
    rungs, methods = _beside(wanted, answer, catalog, known, software, today)
    return Study(
        job,
        wanted,
        answer,
        catalog,
        machine,
        assumptions,
        tuple(notes),
        today,
        tuple(asked.own),
        law,
        rungs,
        methods,
    )


def _beside(
    wanted: JobSpec, answer: Answer, catalog: Catalog, known: _Known, software: Torch, today: date
) -> tuple[tuple[Rung, ...], tuple[tuple[str, Plan | None], ...]]:
    """What the choices of the first rented plan save, and the other methods; nothing where nothing
    can be rented.
    """
    best = next((plan for plan in answer.plans if is_rented(plan)), None)
    if best is None:
        return (), ()

    def place_for(offer: Offer, other: JobSpec) -> Place | Rejected:
        return place_of(offer, other, known.of(offer.gpu), software, today)

    rungs = what_choices_save(wanted, best, answer.plans, catalog.offers, place_for)
    return tuple(rungs), tuple(other_methods(wanted, answer, place_for))


def _offers(catalog: Catalog, job: Job, asked: Asked) -> list[Offer]:
    """Those that are asked for. Raises `InputError` where there are none."""
    may = job.where
    chosen = select_any(
        catalog,
        asked.gpu or may.gpu,
        asked.provider or may.provider,
        asked.region or may.region,
        asked.kind or may.offers,
    )
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


def _places(
    wanted: JobSpec,
    offers: Sequence[Offer],
    own: Sequence[Owned],
    known: _Known,
    software: Torch,
    today: date,
) -> list[Place | Rejected]:
    """GPUs of one's own and offers with an hourly price, as places for the job."""
    found: list[Place | Rejected] = []
    for owned in own:
        offer = owned_offer(owned, today)
        place = place_of(offer, wanted, known.of(offer.gpu), software)
        # nothing is rented, so nothing has to be set up
        found.append(replace(place, is_local=True) if isinstance(place, Place) else place)
    for offer in offers:
        if offer.usd_per_hour is not None:
            found.append(place_of(offer, wanted, known.of(offer.gpu), software, today))
    return found


def _past(
    places: Sequence[Place], measurements: Sequence[Measurement], machine: Machine
) -> list[str]:
    """What runs here have taught: what this machine is calibrated by, and how far off estimates
    were.
    """
    here = next((place.calibration for place in places if place.offer.provider == HERE), None)
    notes = (
        [f"this machine is calibrated by {here.source}"] if here is not None and here.n_runs else []
    )
    earlier = past_errors(measurements, machine.hardware)
    return [*notes, earlier] if earlier else notes


# ---- the job ----


def shape_of(job: Job, config: Json, n_labels: int = 2) -> Shape:
    """The sizes of the job's model with its head. A head for classification is small; two labels
    unless known.
    """
    return read_shape(config, job.task, 0 if objective_of(job.task).scores_tokens else n_labels)


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
    precision = (
        "bf16" if train.bf16 else "fp16" if train.fp16 else "fp32" if train.bf16 is False else None
    )
    checkpointing = train.gradient_checkpointing
    micro_batch_tokens = train.micro_batch_tokens
    if micro_batch_tokens is None and job.says_micro_batch:
        micro_batch_tokens = (
            job.micro_batch_size * lengths.longest_example
        )  # as the trainer takes it
    deadline_s = None
    if job.limits.deadline is not None:
        deadline_s = job.limits.deadline.timestamp() - now.timestamp()
    is_generated = objective_of(job.task).is_pair and train.predict_with_generate
    return JobSpec(
        shape=shape,
        method=method.name,
        optim=train.optim,
        global_batch=job.global_batch_size,
        lengths=lengths,
        n_epochs=train.num_train_epochs,
        max_steps=train.max_steps,
        micro_batch_tokens=micro_batch_tokens,
        spreads=spreads(job),
        may_spread=_may_spread(job),
        reshards=job.where.reshard_after_forward,
        offloads_weights=job.where.offload_weights,
        may_go_packed=job.model.attn_implementation is None,
        checkpoint_every=None if checkpointing == "auto" else int(checkpointing),
        precision=precision,
        fp16_risk=fp16_risk(config),
        attention=job.model.attn_implementation or "",
        lora_r=method.lora_r,
        lora_dropout=method.lora_dropout,
        target_modules=method.target_modules,
        modules_to_save=method.modules_to_save,
        use_dora=method.use_dora,
        keeps_start=begins_from_base(method.init_lora_weights),
        eval_lengths=held_out,
        eval_steps=0 if train.eval_strategy == "no" else train.eval_steps,
        eval_batch=train.per_device_eval_batch_size,
        max_new_tokens=job.data.max_target_length if is_generated else 0,
        save_every_s=train.save_minutes * 60 if train.save_minutes else None,
        save_steps=train.save_steps,
        store=job.output_store or "",
        is_tokenized=lengths.is_exact,
        max_usd=job.limits.max_usd,
        max_hours=job.limits.max_hours,
        max_gpu_hours=job.limits.max_gpu_hours,
        deadline_s=deadline_s,
    )


def spreads(job: Job) -> bool | None:
    """Whether the job asks for weights that are spread over GPUs, or for whole ones; None: it
    leaves that open.
    """
    return None if job.where.strategy == "auto" else job.where.strategy != "ddp"


def _may_spread(job: Job) -> bool:
    """Whether weights can be spread, as far as this hangs neither on method nor optimizer:
    `train.strategy` has the reasons.
    """
    is_adapter = job.method.name != "full"
    is_generated = objective_of(job.task).is_pair and job.train.predict_with_generate
    is_kept = is_adapter and begins_from_base(job.method.init_lora_weights)
    asks_for_bits = job.where.same_bits and not is_adapter
    return not (is_generated or is_kept or asks_for_bits or job.train.torch_compile is True)


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
            to_do = f"give {lacks} too"
            raise InputError(
                f"{lacks} is not known: {error.what}", where=error.where, to_do=to_do
            ) from None
        if mean_tokens is None and n_examples is not None:
            return seen.repeated(n_examples), held_out
        n_examples = seen.n_examples
    assert mean_tokens is not None
    target = mean_tokens / 4 if objective_of(job.task).is_pair else None
    longest = max(job.max_length, int(mean_tokens) + 1)
    return from_mean(n_examples, mean_tokens, longest, mean_target=target), None


# ---- places ----


def _counts_here(machine: Machine, job: Job, asked: Asked) -> list[int]:
    """How many GPUs of this machine may share the run: as the job says; else one, two, four and so
    on, and all of them.
    """
    if machine.kind != "cuda" or job.where.device == "cpu":
        return [1]
    most = min(machine.n_gpus, asked.max_gpus)
    if job.where.gpus is not None:
        return [most if job.where.gpus == "all" else min(job.where.gpus, machine.n_gpus)]
    return sorted({*(2**power for power in range(most.bit_length())), most})


def place_here(
    wanted: JobSpec,
    machine: Machine,
    job: Job,
    measurements: Sequence[Measurement],
    today: date,
    n_gpus: int | None = None,
) -> Place | Rejected | None:
    """This machine as the trainer would use it, on `n_gpus` of its GPUs or as many as the job says;
    None for a GPU that is not known.

    A CPU computes in fp32 unless asked for bf16.
    """
    is_cuda = machine.kind == "cuda" and job.where.device != "cpu"
    if n_gpus is None:
        n_gpus = (
            machine.n_gpus if job.where.gpus == "all" else min(job.where.gpus or 1, machine.n_gpus)
        )
    n_gpus = n_gpus if is_cuda else 1
    note = ""
    offer = Offer(
        HERE,
        machine.device_name if is_cuda else machine.cpu.name,
        "",
        n_gpus,
        "",
        "",
        job.where.spot,
        "machine_hour",
        job.usd_per_hour,
        "the job's own price: where.usd_per_hour and electricity",
        today,
        Billing(HERE),
    )
    if is_cuda:
        gpu = gpu_of_device(machine.device_name, machine.memory_bytes)
        if gpu is None:
            return None
        offer = offer._replace(gpu=gpu.name, ram_gib=float(free_memory_bytes() >> 30))
        judged = place_of(offer, wanted, torch=torch_of(*installed_torch()))
        if isinstance(judged, Rejected):
            return judged
        precision, note = judged.precision, judged.precision_note
        device = device_of(gpu, precision)
        memory_bytes, hardware = min(machine.memory_bytes, gpu.usable_bytes), machine.hardware
        if device is not None and (link := link_of(measurements, hardware, n_gpus)):
            device = device._replace(link_bytes_per_s=link, knows_link=True)
    else:
        precision = wanted.precision or "fp32"
        device = cpu_device(
            machine.cpu.name,
            machine.cpu.peak_flops(precision, machine.n_threads),
            machine.n_threads,
        )
        memory_bytes = machine.memory_bytes if machine.kind == "cpu" else free_memory_bytes()
        hardware = replace(machine, kind="cpu", device_name=machine.cpu.name).hardware
    if device is None:
        return None
    known = _calibration(wanted, measurements, hardware, precision, device)
    memory_bytes -= (
        memory_bytes % 2**30 if memory_bytes > 2**30 else 0
    )  # what is free moves; a plan should not
    return Place(
        offer,
        device,
        precision,
        memory_bytes,
        known,
        is_local=True,
        is_cuda=is_cuda,
        precision_note=note,
        is_part=is_cuda and n_gpus < machine.n_gpus,
        has_liger=is_cuda and _has_liger(wanted, job, offer.gpu),
    )


def rented_torch() -> Torch:
    """The torch that a rented machine is taken to get: the version and the build for GPUs that are
    installed here.

    Where that is for CPUs alone, or too old to be known, the one that PyPI has of it, or of the
    oldest known.
    """
    version, build = installed_torch()
    try:
        return parse_torch(f"{version}+{build}" if build and build != "cpu" else version)
    except InputError:
        return Torch(OLDEST_TORCH)


def _has_liger(wanted: JobSpec, job: Job, gpu: str) -> bool:
    """Whether the trainer would take Liger's kernels on a GPU of this machine: see
    `model/liger.py`.
    """
    is_wanted = (
        job.train.use_liger_kernel is not False and wanted.shape.model_type in FUSED_BY_LIGER
    )
    is_new = float(gpus()[gpu].compute_capability or 0) >= 8.0
    return is_wanted and is_new and importlib.util.find_spec("liger_kernel") is not None


def plan_here(
    wanted: JobSpec,
    machine: Machine,
    job: Job,
    measurements: Sequence[Measurement],
    today: date,
    n_gpus: int | None = None,
) -> Plan | Rejected | None:
    """The plan for this machine alone, limits aside, `n_gpus` as for `place_here`; None where it
    can't be planned on.
    """
    place = place_here(wanted, machine, job, measurements, today, n_gpus)
    if place is None or isinstance(place, Rejected):
        return place
    answer = decide(open_ended(wanted), [place])
    return answer.plans[0] if answer.plans else answer.rejected[0]


def estimate_of(plan: Plan, wanted: JobSpec) -> Estimate:
    """What a plan says of the job that it is for."""
    recipe, shape, adapters = plan.recipe, wanted.shape, wanted.adapters
    padded = wanted.cut(recipe.settings.micro_batch_tokens, recipe.n_gpus, recipe.cost).example
    mean, share = wanted.tokens_per_example, wanted.labelled_share
    bare = step_time(
        work_of(shape, recipe, padded, mean, adapters, labelled_share=share), plan.place.device
    ).parts
    # a run is measured by what torch allocates, without context and slack
    beside = plan.memory.total_bytes - plan.memory.allocated_bytes
    return Estimate(
        wall_s=plan.wall_s,
        wall_range_s=[hours * 3600 for hours in plan.hours_range.as_list()],
        usd=plan.total_usd,
        usd_range=plan.usd_range.as_list(),
        peak_bytes=int(plan.memory_range.likely) - beside,
        peak_range_bytes=[int(n) - beside for n in plan.memory_range.as_list()],
        seconds=plan.seconds,
        memory=plan.memory.as_dict(),
        step_s=plan.step.seconds,
        tokens_per_s=plan.step.tokens_per_s,
        interval_s=plan.interval_s,
        calibration=plan.place.calibration.source or "formulas only",
        settings=recipe.settings,
        first_layer=adapters.first_layer if adapters is not None else 0,
        formula={
            "compute_s": sum(seconds for name, seconds in bare.items() if name != "optimizer"),
            "optimizer_s": bare.get("optimizer", 0.0),
            "peak_bytes": plan.memory.allocated_bytes,
        },
    )


def owned_offer(owned: Owned, today: date) -> Offer:
    """A GPU of one's own as an offer: electricity, wear and the rest for each hour."""
    usd = owned.running_usd_per_h + owned.wear_usd_per_h
    words = (
        f"own: {owned.power_kw:g} kW at ${owned.usd_per_kwh:g} a kWh, wear"
        f" ${owned.wear_usd_per_h:.3f} an hour"
    )
    name = f"{owned.n_gpus}x {owned.gpu}"
    return Offer(
        OWN,
        name,
        owned.gpu,
        owned.n_gpus,
        "",
        "",
        False,
        "machine_hour",
        usd,
        words,
        today,
        Billing(OWN),
    )


class _Known:
    """Calibrations of GPUs that runs were measured on, made when first asked for."""

    def __init__(self, wanted: JobSpec, measurements: Sequence[Measurement]) -> None:
        self._wanted = wanted
        self._measurements = measurements
        self._hardware: dict[str, str] = {}
        for m in measurements:
            gpu = gpu_of_device(m.hardware) if m.device == "cuda" else None
            if gpu is not None:
                self._hardware[gpu.name] = m.hardware
        self._made: dict[str, Calibration] = {}

    def of(self, gpu: str) -> Calibration | None:
        """What is known of a GPU; None without runs on one."""
        hardware = self._hardware.get(gpu)
        if hardware is None:
            return None
        if gpu not in self._made:
            precision = self._wanted.precision or best_precision(
                gpus()[gpu], self._wanted.fp16_risk
            )
            device = device_of(gpus()[gpu], precision)
            made = Calibration()
            if device is not None:
                made = _calibration(self._wanted, self._measurements, hardware, precision, device)
            self._made[gpu] = replace(
                made, start_s=None, save_s=None
            )  # of that machine, not of the GPU
        return self._made[gpu]

    @property
    def notes(self) -> list[str]:
        """Which GPUs are calibrated, and by what."""
        return [
            f"{gpu} is calibrated by {made.source}"
            for gpu, made in self._made.items()
            if made.n_runs
        ]


def _calibration(
    wanted: JobSpec,
    measurements: Sequence[Measurement],
    hardware: str,
    precision: str,
    device: Device,
) -> Calibration:
    if not measurements:
        return Calibration()
    recipe = recipe_of(
        wanted, precision, wanted.micro_batch_tokens or CPU_TOKENS, wanted.checkpoint_every or 0
    )
    return calibrate(
        measurements,
        hardware,
        wanted.shape,
        recipe,
        device,
        wanted.adapters,
        labelled_share=wanted.labelled_share,
        mean_tokens=wanted.lengths.mean,
    )
