"""The table of everything a job left open and the run decided, before its first step.

Data flows from a run that stands at its first step to `emit`.
"""

from __future__ import annotations

import os
from pathlib import Path

from farthing.config.job import Job
from farthing.device_memory import set_allocator
from farthing.events import Decided
from farthing.model.adapters import count_parameters
from farthing.model.hardware import device_name, n_devices
from farthing.planner.estimate import Estimate
from farthing.train.built import Run
from farthing.units import plural, say_bytes, say_seconds, say_usd


def emit_summary(job: Job, run: Run) -> None:
    batch = job.global_batch_size
    counts = count_parameters(run.model)
    run.context.emit(
        Decided(
            model=(
                f"{Path(run.spec.choice.name).name} ({run.spec.config.model_type}),"
                f" {job.method.name}"
            ),
            n_parameters=counts["total"],
            n_trainable=counts["trainable"],
            n_examples=len(run.train_examples),
            n_eval_examples=len(run.eval_examples) if run.eval_examples else 0,
            max_length=run.spec.recipe.max_length,
            n_steps=run.schedule.n_steps,
            batch=(
                f"{plural(batch, 'example')} a step, up to"
                f" {run.steps.settings.micro_batch_tokens:,} tokens at a time"
            ),
            fitted=_fit_in_words(run),
            learning_rate=f"{job.learning_rate:g}, {job.train.lr_scheduler_type}, "
            + plural(run.schedule.n_warmup_steps, "warm-up step"),
            device=device_name(run.spec.numerics.device),
            precision=run.spec.numerics.name,
            computed=_computed_in_words(job, run),
            memory=_memory_in_words(run),
            checkpointing=run.steps.settings.checkpointing,
            checkpoints=_interval_in_words(job, run),
            price=_price_in_words(job) + _idle_in_words(run),
            estimate=_estimate_in_words(run.estimate),
        )
    )
    if not run.memory.fits:
        run.context.warn(
            f"{say_bytes(run.memory.total_bytes)} may be needed and"
            f" {say_bytes(run.memory.free_bytes)} are free: lower"
            " train.per_device_train_batch_size (the result stays the same) or data.max_length"
        )


def _idle_in_words(run: Run) -> str:
    """Of the GPUs that a process on its own sees, those that compute nothing; empty where there are
    none.
    """
    n_idle = n_devices(run.spec.numerics.device) - 1 if run.context.ranks.n == 1 else 0
    return f"; {plural(n_idle, 'other GPU')} here not used (where.gpus)" if n_idle > 0 else ""


def _memory_in_words(run: Run) -> str:
    words = f"{say_bytes(run.log.expected_bytes)} expected, {say_bytes(run.memory.free_bytes)} free"
    is_cuda = run.spec.numerics.device.type == "cuda"
    return f"{words}; allocator: {set_allocator(os.environ)}" if is_cuda else words


def _computed_in_words(job: Job, run: Run) -> str:
    """What is computed of a batch, and why not less."""
    forward = run.forward
    words = [
        (
            f"padded ({forward.why_padded})"
            if forward.why_padded
            else "documents packed end to end, no padding"
        )
    ]
    if run.forward.of.scores_tokens:
        words.append(forward.why_all_scored or "output layer: only positions with a target")
    if forward.mixes(run.train_examples.tokens, run.train_examples.indices):
        assert forward.batching_rule is not None
        words.append(forward.batching_rule.why)
    if forward.shares:
        words.append("shared beginnings computed once")
    words += [str(what) for what in (run.kernels.lora, run.kernels.liger) if what is not None]
    if isinstance(run.kernels.compiled, int):
        words.append(f"{plural(run.kernels.compiled, 'layer')} compiled")
    elif job.train.torch_compile:
        words.append(f"not compiled: {run.kernels.compiled}")
    return "; ".join(words)


def _fit_in_words(run: Run) -> str:
    if run.schedule.fit is None:
        return ""
    when = (
        "fixed" if run.schedule.fit.settled else f"fixed after step {run.schedule.fit.settles_at}"
    )
    return f"as many of {run.schedule.fit.asked_steps:,} as the limits allow, {when}"


def _interval_in_words(job: Job, run: Run) -> str:
    if job.train.save_steps is not None:
        return f"every {plural(job.train.save_steps, 'step')}"
    asked = "as asked" if job.train.save_minutes else "the planned interval"
    return f"every {say_seconds(run.saver.every_s)}, {asked}"


def _estimate_in_words(estimate: Estimate | None) -> str:
    if estimate is None:
        return "none: the planner does not know this model, or this GPU by its name and memory"
    low, likely, high = estimate.wall_range_s
    words = f"{say_seconds(likely)} ({say_seconds(low)} to {say_seconds(high)})"
    if estimate.usd > 0:
        words += f", {say_usd(estimate.usd)}"
    return f"{words}, {say_bytes(estimate.peak_bytes)}; {estimate.calibration}"


def _price_in_words(job: Job) -> str:
    if job.usd_per_hour == 0:
        return "$0.00 an hour (none given: set where.usd_per_hour, or power_watts and usd_per_kwh)"
    parts = []
    if job.where.usd_per_hour:
        parts.append(f"rent {say_usd(job.where.usd_per_hour)}")
    if job.where.power_watts and job.where.usd_per_kwh:
        parts.append(f"{job.where.power_watts:g} W at {say_usd(job.where.usd_per_kwh)} a kWh")
    return f"{say_usd(job.usd_per_hour)} an hour ({', '.join(parts)})"
