"""Kinds of machine for a job: of the catalog, of one's own, and this one, with what the software
and the model allow there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from datetime import date

from farthing.config.job import Job
from farthing.errors import InputError
from farthing.local.machine import LocalMachine, free_memory_bytes, installed_torch
from farthing.local.measurements import Measurement, link_of
from farthing.models.families import FUSED_BY_LIGER
from farthing.planner.calibration import calibrate
from farthing.planner.memory import OnDevice
from farthing.planner.ownership import Owned
from farthing.planner.recipe import PLAIN, Kernels
from farthing.planner.search import CPU_TOKENS, RecipeBase, Refusal, recipe_of
from farthing.planner.software import (
    OLDEST_TORCH,
    Torch,
    choose_precision,
    host_note,
    parse_torch,
    torch_of,
    why_no_code,
)
from farthing.planner.speed import KNOWN_LINK_ERROR, Calibration, Device, cpu_device, device_of
from farthing.planner.types import HERE, OWN, UNCALIBRATED, JobSpec, Machine
from farthing.prices.gpus import Gpu, gpu_of_device
from farthing.prices.offers import Billing, Offer


def machine_of(
    gpu: Gpu,
    n_gpus: int,
    wanted: JobSpec,
    known: Calibrations | None = None,
    torch: Torch | None = None,
) -> Machine | Refusal:
    """GPUs as a machine for a job; a refusal where software or GPU can't do what it takes."""
    if torch is not None:
        needs = wanted.method == "qlora" or wanted.optimizer.needs_bitsandbytes
        no_code = why_no_code(gpu, torch, needs_bitsandbytes=needs, attention=wanted.attention)
        if no_code is not None:
            return Refusal("software", *no_code, 2.0 if no_code[2] == "torch" else 20.0)
    risk, has_fp16 = wanted.fp16_risk, "fp16" in gpu.flops
    precision = choose_precision(wanted.precision, gpu.has_bf16, has_fp16, risk)
    device = device_of(gpu, precision, tf32=wanted.tf32)
    if device is None or (precision == "bf16" and not gpu.has_bf16):
        found = choose_precision(None, gpu.has_bf16, has_fp16, risk)
        what = f"{gpu.name} does not compute in {precision}"
        change = f"leave train.{precision} out: {found} is used"
        return Refusal("precision", what, change, "precision", 1.5)
    if wanted.optimizer.has_bf16_weights and precision != "bf16":
        what = f"train.optim: {wanted.optim} computes in bf16, and {gpu.name} in {precision}"
        return Refusal("precision", what, "train.optim: adamw_torch_fused", "optimizer", 3.0)
    note = ""
    if risk and precision == "fp32" and not gpu.has_bf16:
        note = f"fp32, because {risk}"
    if risk and precision == "fp16":
        note = f"fp16 was asked for, but {risk}: a run that overflows has to be done again"
    kernels = Kernels(has_flex=takes_flex(gpu, precision, wanted.shape.head_dim))
    how = gpu.name, precision, device, kernels
    return Machine(
        *(gpu.name, n_gpus, device, precision, OnDevice(gpu.usable_bytes)),
        UNCALIBRATED if known is None else known.of(*how),
        gpu.architecture,
        precision_note=note,
        host_note=host_note(gpu, torch) if torch is not None else "",
        kernels=kernels,
    )


def takes_flex(gpu: Gpu, precision: str, head_dim: int) -> bool:
    """Whether flex attention runs there, as `model.attention_choice` has it: its backward pass of
    wide heads needs the shared memory of the larger chips.
    """
    is_large = gpu.compute_capability in ("8.0", "9.0", "10.0", "10.3")
    most = 64 if precision == "fp32" else 256 if is_large else 128
    return float(gpu.compute_capability or 0) >= 8.0 and 16 <= head_dim <= most


class Calibrations:
    """What runs on GPUs say of them, wherever these stand, made when first asked for."""

    def __init__(self, wanted: JobSpec, measurements: Sequence[Measurement]) -> None:
        self._wanted, self._measurements = wanted, measurements
        self._made: dict[str, Calibration] = {}
        self._hardware: dict[str, str] = {}
        for m in measurements:
            if m.device == "cuda" and (gpu := gpu_of_device(m.hardware)) is not None:
                self._hardware[gpu.name] = m.hardware

    def of(self, gpu: str, precision: str, device: Device, kernels: Kernels) -> Calibration:
        if gpu not in self._hardware:
            return UNCALIBRATED
        if gpu not in self._made:
            made = self.on(self._hardware[gpu], precision, device, kernels)
            # the rest is of that machine
            self._made[gpu] = replace(made, start_s=None, load_s=None, save_s=None)
        return self._made[gpu]

    def on(
        self, hardware: str, precision: str, device: Device, kernels: Kernels = PLAIN
    ) -> Calibration:
        """What is known of one kind of hardware, by the name that measurements are kept under."""
        if not self._measurements:
            return UNCALIBRATED
        wanted = self._wanted
        most, every = wanted.micro_batch_tokens or CPU_TOKENS, wanted.checkpoint_every or 0
        recipe = recipe_of(wanted, RecipeBase(precision, kernels=kernels), most, every)
        case = wanted.case(recipe, is_cuda=device.is_cuda)
        return calibrate(self._measurements, hardware, case, device, wanted.lengths.mean)

    @property
    def notes(self) -> list[str]:
        made = self._made.items()
        return [f"{gpu} is calibrated by {one.source}" for gpu, one in made if one.n_runs]


def machine_here(
    wanted: JobSpec,
    machine: LocalMachine,
    job: Job,
    measurements: Sequence[Measurement],
    today: date,
    n_gpus: int | None = None,
) -> tuple[Machine | Refusal, Offer] | None:
    """This machine as the trainer would use it, on `n_gpus` of its GPUs or as many as the job says;
    None for a GPU that is not known. A CPU computes in fp32 unless asked for bf16.
    """
    is_cuda = machine.kind == "cuda" and job.where.device != "cpu"
    if n_gpus is None:
        all_gpus = job.where.gpus == "all"
        n_gpus = machine.n_gpus if all_gpus else min(int(job.where.gpus or 1), machine.n_gpus)
    known, machine = Calibrations(wanted, measurements), machine.on_first(n_gpus)

    words = "the job's own price: where.usd_per_hour and electricity"

    def offer(gpu: str, n: int, name: str) -> Offer:
        here = _unsold(HERE, name, gpu, n, job.usd_per_hour, words, today)
        return here._replace(is_spot=job.where.spot)

    if not is_cuda:
        cpu, precision = machine.cpu, wanted.precision or "fp32"
        peak = cpu.peak_flops(precision, machine.n_threads)
        device = cpu_device(cpu.name, peak, machine.n_threads)
        free = machine.memory_bytes if machine.kind == "cpu" else free_memory_bytes()
        hardware = replace(machine, kind="cpu", device_name=cpu.name).hardware
        measured = known.on(hardware, precision, device)
        how = cpu.name, 1, device, precision, _steady(free), measured
        return Machine(*how, is_local=True, is_cuda=False), offer("", 1, cpu.name)
    gpu = gpu_of_device(machine.device_name, machine.memory_bytes)
    if gpu is None:
        return None
    ram_gib = float(free_memory_bytes() >> 30)
    at = offer(gpu.name, n_gpus, machine.device_name)._replace(ram_gib=ram_gib)
    judged = machine_of(gpu, n_gpus, wanted, torch=torch_of(*installed_torch()))
    if isinstance(judged, Refusal):
        return judged, at
    device = judged.device
    if link := link_of(measurements, machine.hardware, n_gpus):
        device = device._replace(link_bytes_per_s=link, link_error=KNOWN_LINK_ERROR)
    has_liger = (
        job.train.use_liger_kernel is not False
        and wanted.shape.model_type in FUSED_BY_LIGER
        and float(gpu.compute_capability or 0) >= 8.0
        and importlib.util.find_spec("liger_kernel") is not None
    )
    kernels = judged.kernels._replace(has_liger=has_liger)
    calibration = known.on(machine.hardware, judged.precision, device, kernels)
    memory = max(1, min(machine.memory_bytes, gpu.usable_bytes) - machine.taken_bytes)
    is_part = n_gpus < machine.n_gpus
    found = replace(judged, device=device, kernels=kernels, calibration=calibration, host_note="")
    return replace(found, memory=_steady(memory), is_local=True, is_part=is_part), at


def _steady(n_bytes: int) -> OnDevice:
    """In whole GiB: what is free moves; a plan should not."""
    return OnDevice(n_bytes - (n_bytes % 2**30 if n_bytes > 2**30 else 0))


def rented_torch() -> Torch:
    """The torch that a rented machine is taken to get: the version and the build for GPUs that are
    installed here. Where that is for CPUs alone, or unknown, the one that PyPI has of it, or of the
    oldest known.
    """
    version, build = installed_torch()
    try:
        return parse_torch(f"{version}+{build}" if build and build != "cpu" else version)
    except InputError:
        return Torch(OLDEST_TORCH)


def owned_offer(owned: Owned, today: date) -> Offer:
    """A GPU of one's own as an offer: electricity, wear and the rest for each hour."""
    usd = owned.running_usd_per_h + owned.wear_usd_per_h
    words = f"own: {owned.power_kw:g} kW at ${owned.usd_per_kwh:g} a kWh, wear "
    words += f"${owned.wear_usd_per_h:.3f} an hour"
    name = f"{owned.n_gpus}x {owned.gpu}"
    return _unsold(OWN, name, owned.gpu, owned.n_gpus, usd, words, today)


def _unsold(
    provider: str, name: str, gpu: str, n_gpus: int, usd_per_hour: float, words: str, today: date
) -> Offer:
    hourly = False, "machine_hour", usd_per_hour
    return Offer(provider, name, gpu, n_gpus, "", "", *hourly, words, today, Billing(provider))
