"""An attempt put together from its examples and its model: optimizer, schedule, kernels, memory,
steps, checkpoints.

Refuses to train, and to read a checkpoint: `saver.restore` does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

import farthing
from farthing.config.job import Job
from farthing.data.batches import Batches
from farthing.data.packing import MicroBatchCost
from farthing.events import Warned
from farthing.local.measurements import Record
from farthing.model.activation_checkpointing import MemoryNeed, checkpointed_layers
from farthing.model.adapters import count_parameters
from farthing.model.casts import Casts
from farthing.model.compiled import compile_blocks, n_graphs, n_kinds, worth_compiling
from farthing.model.embedding_noise import EmbeddingNoise
from farthing.model.flops import flops_per_token, recomputed_of_forward, recomputed_share
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics, free_bytes, taken_bytes
from farthing.model.liger import use_liger
from farthing.planner.estimate import Estimate
from farthing.run.checkpoint import Checkpoints
from farthing.run.folder import CHECKPOINTS, COPIES, LOG, copies_of
from farthing.settings import Settings
from farthing.storage.files import Json
from farthing.storage.logs import SummedLines
from farthing.train.attempt import Attempt, Clocks, Context, Kernels, Saving
from farthing.train.learning_rate import first_schedule
from farthing.train.optim import allocate_state
from farthing.train.prefix_budget import micro_batches_of
from farthing.train.room import Steps
from farthing.train.saver import wait_for_copies
from farthing.train.setup import Examples, Inputs, build_optimizer, settle_checkpointing
from farthing.train.state import Progress, parts_of
from farthing.train.step import Step
from farthing.train.step_feed import StepFeed
from farthing.train.step_log import note_out_of_memory
from farthing.train.throughput import Pace, facts_of_lengths
from farthing.train.update_guard import OPTIMIZER_TO_DO, out_of_memory_said

SAVE_EVERY_S = 300.0  # where there is no plan


def assemble(
    job: Job,
    context: Context,
    inputs: Inputs,
    numerics: Numerics,
    model: Any,
    examples: tuple[Examples, Examples | None],
    estimate: Estimate | None,
    settings: Settings,
) -> Attempt:
    """The attempt at step 0. `examples` are those for training and for evaluation."""
    ranks, (train_examples, eval_examples) = context.ranks, examples
    batches = Batches(
        train_examples.indices, job.global_batch_size, job.train.seed, train_examples.weights
    )
    schedule = first_schedule(
        job, context.folder, context.ledger, estimate, batches.steps_per_epoch
    )
    weights, parameters, progress = ranks.trained_of(model), count_parameters(model), Progress()
    trained_bytes = sum(
        weight.numel() * weight.element_size()
        for weight in model.parameters()
        if weight.requires_grad
    )
    optimizer = build_optimizer(job, model, weights)
    scaler = torch.amp.GradScaler(numerics.device.type, enabled=numerics.needs_scaler)
    forward, kernels = _computed(job, context, inputs, numerics, model, settings)
    before_bytes, free = taken_bytes(numerics.device), ranks.least(free_bytes(numerics.device))
    with out_of_memory_said("train.optim", OPTIMIZER_TO_DO):
        allocate_state(optimizer)
    ahead = micro_batches_of(
        forward, train_examples, batches, schedule.n_steps, settings.micro_batch_tokens
    )
    memory = settle_checkpointing(
        job,
        forward,
        train_examples,
        settings,
        optimizer=optimizer,
        free_bytes=free,
        ahead=ahead,
        ranks=ranks,
        emit=context.emit,
    )
    if not ranks.is_fsdp:
        kernels.compiled = _compile(job, model, kernels.liger, settings, estimate, schedule.n_steps)
    attempt = Attempt(
        job=job,
        context=context,
        inputs=inputs,
        numerics=numerics,
        train_examples=train_examples,
        eval_examples=eval_examples,
        estimate=estimate,
        model=model,
        forward=forward,
        batches=batches,
        optimizer=optimizer,
        scaler=scaler,
        schedule=schedule,
        kernels=kernels,
        parameters=parameters,
        memory=memory,
        expected_bytes=before_bytes + memory.total_bytes,
        progress=progress,
        state=parts_of(model, weights, optimizer, scaler) | {"progress": progress},
        checkpoints=_checkpoints(job, context),
        log=SummedLines(context.folder / LOG),
        pace=_pace_of(context, numerics, forward, train_examples, memory, free),
        record=Record(loaded_bytes=before_bytes),
        saving=Saving(
            _save_every_s(job, estimate),
            context.meter.wall_s,
            (0, 0, False),
            trained_bytes=trained_bytes,
        ),
        clocks=Clocks(n_graphs=n_graphs()),
    )
    attempt.steps = _steps_of(attempt, settings)
    return attempt


def _computed(
    job: Job, context: Context, inputs: Inputs, numerics: Numerics, model: Any, settings: Settings
) -> tuple[Forward, Kernels]:
    """The forward pass, and what it has of our own in place of the model's code; no layer is
    compiled yet.
    """
    lora = None
    if job.method.name != "full":
        from farthing.model.lora_kernels import (
            use_low_rank,  # takes peft along, which a full run has no use for
        )

        lora = use_low_rank(model)
    liger = use_liger(model) if _wants_liger(job, numerics, settings) else None
    forward = Forward(
        model,
        job.task,
        inputs.pad_id,
        numerics,
        settings=job.objective,
        label_smoothing=job.train.label_smoothing_factor,
        may_go_packed=job.model.attn_implementation is None and settings.packed is not False,
    )
    forward.tile_tokens = settings.tile_tokens
    forward.micro_batch_cost = MicroBatchCost(settings.least_tokens, settings.more_tokens)
    forward.within = context.ranks.within
    if numerics.device.type == "cuda" and numerics.autocast is not None:
        forward.casts = Casts(model, numerics.autocast)
    if job.train.neftune_noise_alpha:
        forward.noise = EmbeddingNoise(model, job.train.neftune_noise_alpha)
    return forward, Kernels(lora, liger, "layers are not compiled where their weights are gathered")


def _steps_of(attempt: Attempt, settings: Settings) -> Steps:
    """What takes the attempt's steps, by `settings` with what was decided since."""
    job, context, forward, liger = (
        attempt.job,
        attempt.context,
        attempt.forward,
        attempt.kernels.liger,
    )
    settings = replace(
        settings,
        checkpoint_every=attempt.memory.checkpoint_every,
        packed=forward.is_packed,
        compiled=isinstance(attempt.kernels.compiled, int),
        kernels="liger" if liger and not liger.startswith("no ") else "torch",
    )
    feed = StepFeed(
        forward=forward,
        batches=attempt.batches,
        tokens=attempt.train_examples.tokens,
        n_steps=attempt.n_steps,
        settings=settings,
        ranks=context.ranks,
        meter=context.meter,
    )
    step = Step(
        forward=forward,
        feed=feed,
        optimizer=attempt.optimizer,
        scaler=attempt.scaler,
        learning_rate_at=lambda step: job.learning_rate * attempt.schedule.factor(step),
        max_grad_norm=job.train.max_grad_norm,
        seed=job.train.seed,
        meter=context.meter,
        should_stop=lambda: bool(context.notice) or context.ranks.others_ask_to_leave,
        before_update=lambda: wait_for_copies(attempt),
        ranks=context.ranks,
    )
    return Steps(step, partial(note_out_of_memory, attempt))


def _wants_liger(job: Job, numerics: Numerics, settings: Settings) -> bool:
    """As the job says; else on a GPU, unless earlier attempts were without."""
    wanted = job.train.use_liger_kernel
    is_auto = wanted == "auto" and numerics.device.type == "cuda" and settings.kernels != "torch"
    return wanted is True or is_auto


def _compile(
    job: Job,
    model: Any,
    liger: str | None,
    settings: Settings,
    estimate: Estimate | None,
    n_steps: int,
) -> int | str:
    """Compile the layers where the job says so, earlier attempts did or it pays; returns how many,
    or why none.
    """
    wanted = job.train.torch_compile
    if wanted == "auto" and settings.compiled is not None:
        wanted = settings.compiled
    if wanted == "auto" and liger and not liger.startswith("no "):
        return "Liger's kernels leave little to gain, and the two were never tried together"
    pays = worth_compiling(
        wanted,
        device=next(model.parameters()).device.type,
        n_kinds=n_kinds(model) if wanted == "auto" else 0,
        step_s=None if estimate is None else estimate.step_s,
        n_steps_left=n_steps,
        full_determinism=job.train.full_determinism,
    )
    return compile_blocks(model) if pays else "it would not pay"


def _pace_of(
    context: Context,
    numerics: Numerics,
    forward: Forward,
    examples: Examples,
    memory: MemoryNeed,
    free_bytes: int,
) -> Pace:
    """What the steps are summed up in, with what is known of one before any: how long examples are,
    what activation checkpointing adds, and what of memory it would take to do without."""
    model, lengths = forward.model, examples.tokens.lengths[examples.indices]
    # less where the last layer is computed of the tokens that are read
    flops = flops_per_token(model, *forward.last_layer_read(examples.tokens, examples.indices))
    layers = checkpointed_layers(model)
    kept_bytes = memory.layer.at(memory.n_tokens) * len(layers)
    known = {
        "recomputed_share": round(recomputed_share(model, layers, memory.checkpoint_every), 4),
        "recomputed_of_forward": round(
            recomputed_of_forward(model, layers, memory.checkpoint_every), 4
        ),
        "need_bytes": memory.total_bytes,
        "need_without_checkpointing_bytes": int(memory.total_bytes + kept_bytes)
        if memory.checkpoint_every
        else None,
        "free_bytes": free_bytes,
    }
    return Pace(numerics, flops, context.meter, known | facts_of_lengths(lengths))


def _checkpoints(job: Job, context: Context) -> Checkpoints:
    copies: Json = {}
    return Checkpoints(
        context.folder / CHECKPOINTS,
        context.run_id,
        job.train.save_total_limit,
        warn=lambda text: context.emit(Warned(text)),
        facts=lambda: manifest_facts(context, copies),
        copy=context.replica.offer if context.replica is not None else None,
        shared=context.ranks.shared_checkpoints(),
    )


def manifest_facts(context: Context, copies: Json) -> Json:
    """What a checkpoint's manifest says of the run, the files that decide its result among it.
    Brings `copies` up to date.
    """
    copies.update(copies_of(context.folder, copies))
    return {"farthing": farthing.__version__, **context.ledger.witness(), COPIES: dict(copies)}


def _save_every_s(job: Job, estimate: Estimate | None) -> float:
    if job.train.save_minutes:
        return job.train.save_minutes * 60
    return SAVE_EVERY_S if estimate is None else estimate.interval_s
