"""The table of everything a job left open and the run decided, before its first step."""

from __future__ import annotations

import os
from pathlib import Path

from farthing.device_memory import set_allocator
from farthing.events import Decided
from farthing.local.machine import local_machine
from farthing.model.adapters import count_parameters
from farthing.model.hardware import device_name, n_devices
from farthing.model.head import one_kernel
from farthing.planner.estimate import Estimate
from farthing.train.built import Run
from farthing.train.resolve import RunSpec
from farthing.units import plural, say_bytes, say_seconds, say_usd


def emit_summary(run: Run) -> None:
    spec, train = run.spec, run.spec.train
    settings, schedule, fit = run.feed.settings, run.schedule, run.schedule.fit
    device, free = spec.numerics.device, say_bytes(run.memory.free_bytes)
    memory = f"{say_bytes(run.log.expected_bytes)} expected, {free} free"
    if device.type == "cuda":
        memory += f"; allocator: {set_allocator(os.environ)}"
    fitted = ""
    if fit is not None:
        when = "fixed" if fit.settled else f"fixed after step {fit.settles_at}"
        fitted = f"as many of {fit.asked_steps:,} as the limits allow, {when}"
    asked = "as asked" if train.save_minutes else "the planned interval"
    checkpoints = f"every {say_seconds(run.saver.every_s)}, {asked}"
    if train.save_steps is not None:
        checkpoints = f"every {plural(train.save_steps, 'step')}"
    price = _price_in_words(spec)
    n_ranks = run.context.ranks.n
    each = f"{n_ranks} ranks, each " if n_ranks > 1 else ""
    # of the GPUs that a process on its own sees
    n_idle = n_devices(device) - 1 if n_ranks == 1 else 0
    if n_idle > 0:
        price += f"; {plural(n_idle, 'other GPU')} here not used (where.gpus)"
    name, counts = Path(spec.choice.name).name, count_parameters(run.model)
    batch = plural(spec.global_batch_size, "example")
    warm_up = plural(schedule.n_warmup_steps, "warm-up step")
    run.context.emit(
        Decided(
            model=f"{name} ({spec.config.model_type}), {spec.method.name}",
            n_parameters=counts["total"],
            n_trainable=counts["trainable"],
            n_examples=len(run.train_examples),
            n_eval_examples=len(run.eval_examples) if run.eval_examples else 0,
            max_length=spec.recipe.max_length,
            n_steps=schedule.n_steps,
            batch=f"{batch} a step, up to {settings.micro_batch_tokens:,} tokens at a time",
            fitted=fitted,
            learning_rate=f"{spec.learning_rate:g}, {train.lr_scheduler_type}, {warm_up}",
            device=f"{each}{device_name(device)}",
            precision=spec.numerics.name,
            computed=_computed_in_words(run),
            memory=memory,
            checkpointing=settings.checkpointing,
            checkpoints=checkpoints,
            price=price,
            estimate=_estimate_in_words(run.estimate),
        )
    )
    if device.type == "cpu" and spec.where.device == "auto" and local_machine().n_gpus:
        run.context.warn(
            "there is a GPU here that torch can't use (see `farthing doctor`): the run trains on"
            " the processor; where.device: cuda refuses that"
        )
    if not run.memory.fits:
        run.context.warn(
            f"{say_bytes(run.memory.total_bytes)} may be needed and {free} are free: lower"
            " train.per_device_train_batch_size (the result stays the same) or data.max_length"
        )


def _computed_in_words(run: Run) -> str:
    """What is computed of a batch, and why not less."""
    forward, kernels = run.forward, run.kernels
    words = ["documents packed end to end, no padding"]
    if forward.why_padded:
        words = [f"padded ({forward.why_padded})"]
    if forward.head is not None:
        words.append(forward.head.why_whole or "output layer: only positions with a target")
    if forward.mixes(run.train_examples.tokens, run.train_examples.indices):
        assert forward.batching_rule is not None
        words.append(forward.batching_rule.why)
    if forward.shares:
        words.append("shared beginnings computed once")
    words += [str(what) for what in (kernels.lora, kernels.liger) if what]
    device = run.spec.numerics.device
    if forward.head is not None and not forward.head.why_whole and device.type == "cuda":
        words.append(
            f"losses {'in one kernel' if one_kernel(device) else 'by operations of torch'}"
        )
    if isinstance(kernels.compiled, int):
        words.append(f"{plural(kernels.compiled, 'layer')} compiled")
    elif run.spec.train.torch_compile:
        words.append(f"not compiled: {kernels.compiled}")
    return "; ".join(words)


def _estimate_in_words(estimate: Estimate | None) -> str:
    if estimate is None:
        return "none: the planner does not know this model, or this GPU by its name and memory"
    low, likely, high = estimate.wall_range_s
    words = f"{say_seconds(likely)} ({say_seconds(low)} to {say_seconds(high)})"
    if estimate.usd > 0:
        words += f", {say_usd(estimate.usd)}"
    return f"{words}, {say_bytes(estimate.peak_bytes)}; {estimate.calibration}"


def _price_in_words(spec: RunSpec) -> str:
    if spec.usd_per_hour == 0:
        return "$0.00 an hour (none given: set where.usd_per_hour, or power_watts and usd_per_kwh)"
    where, parts = spec.where, []
    if where.usd_per_hour:
        parts.append(f"rent {say_usd(where.usd_per_hour)}")
    if where.power_watts and where.usd_per_kwh:
        parts.append(f"{where.power_watts:g} W at {say_usd(where.usd_per_kwh)} a kWh")
    return f"{say_usd(spec.usd_per_hour)} an hour ({', '.join(parts)})"
