"""A run put together from what it starts from: examples, model, optimizer, schedule, kernels,
memory, steps, checkpoints.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import farthing
from farthing.config.job import Job
from farthing.data.batches import Batches
from farthing.data.packing import MicroBatchCost
from farthing.dist.ranks import Ranks
from farthing.dist.reduce import reduce_bytes
from farthing.events import Emit, Note, Working, ignore
from farthing.local.measurements import Record
from farthing.model.activation_checkpointing import (
    Beside,
    Gathered,
    Linear,
    MemoryNeed,
    Sample,
    checkpointed_layers,
    choose_checkpointing,
)
from farthing.model.adapters import (
    Adapter,
    add_adapter,
    refuse_unreached,
    refuse_untrained_words,
    word_layers,
)
from farthing.model.casts import Casts
from farthing.model.causality import refuse_looking_ahead
from farthing.model.compiled import compile_blocks
from farthing.model.embedding_noise import EmbeddingNoise
from farthing.model.flops import flops_per_token, recomputed_of_forward, recomputed_share
from farthing.model.forward import Forward
from farthing.model.hardware import free_bytes, taken_bytes
from farthing.model.liger import use_liger
from farthing.model.load import FourBits, load_model, speak
from farthing.model.precision import precision_of
from farthing.planner.estimate import Estimate
from farthing.run.checkpoint import Checkpoints
from farthing.run.folder import CHECKPOINTS, COPIES, DATA_NOTES, LOG, copies_of, keep
from farthing.settings import Settings
from farthing.storage.files import Json
from farthing.storage.logs import SummedLines
from farthing.train.ancestor import begin_from
from farthing.train.built import Kernels, Run
from farthing.train.context import Context
from farthing.train.estimate import estimated
from farthing.train.evaluate import Evaluator, Writing
from farthing.train.forecast import Forecast
from farthing.train.optim import allocate_state, make_optimizer, state_bytes
from farthing.train.prefix_budget import micro_batches_of, share_prefix
from farthing.train.rank_setup import follow, lead, with_slots
from farthing.train.resolve import Examples, RunSpec, open_examples
from farthing.train.room import Steps
from farthing.train.run_settings import first_settings
from farthing.train.saver import Saver
from farthing.train.schedule import first_schedule
from farthing.train.state import Progress, parts_of
from farthing.train.step import Step
from farthing.train.step_feed import StepFeed
from farthing.train.step_log import StepLog
from farthing.train.strategy import may_shard, read_where_it_differs, shard_weights
from farthing.train.throughput import Pace, facts_of_lengths
from farthing.train.update_guard import (
    MODEL_TO_DO,
    OPTIMIZER_TO_DO,
    out_of_memory_said,
    update_bytes,
)

LEAVING_S = 5.0
SAVE_EVERY_S = 300.0  # where there is no plan
T = TypeVar("T")


def build(spec: RunSpec, context: Context, *, has_begun: bool = False) -> Run:
    """The run at step 0: tokenized, planned, with its model on the device. `has_begun`: earlier
    attempts knew its examples.
    """
    job, meter, emit, ranks = spec.job, context.meter, context.emit, context.ranks
    before_bytes, on_host = taken_bytes(spec.numerics.device), may_shard(job, ranks)
    reads = ranks.is_first or not on_host
    read = partial(build_model, spec, on_host=on_host, warn=context.warn)
    with contextlib.ExitStack() as stack:
        loading = None
        if spec.objective.scores_tokens:  # else the head waits for the data's
            loading = stack.enter_context(meanwhile(lambda: read((), reads=reads)))
        if not ranks.is_first:  # it has tokenized, and estimated, for all
            follow(context)
        examples, held_out = open_examples(spec, emit, context.is_asked_to_leave)
        sets = [each.tokens for each in (examples, held_out) if each is not None]
        notes = list(dict.fromkeys(note for each in sets for note in each.notes))
        keep(context.folder / DATA_NOTES, {"notes": notes})
        estimate = estimated(spec, context.folder, examples, held_out, emit, ranks.n)
        settings = first_settings(spec, context, examples, estimate)
        settings = with_slots(job, ranks, settings, has_begun, emit)
        if ranks.is_first:
            lead(context)
        settings = Settings.from_json(ranks.tell_all(settings.to_json()))
        context.ledger.write("starting")
        meter.enter("load_model")
        emit(Working("loading the model"))
        names = examples.tokens.label_names
        model = loading.result() if loading else read(names, reads=reads)
        model = read_where_it_differs(job, ranks, model, lambda: read(names))
    shard_weights(job, ranks, model, spec.numerics, emit)
    run = assemble(spec, context, model, (examples, held_out), estimate, settings)
    run.record.before_model_bytes = before_bytes
    context.ledger.write("starting")
    return run


def assemble(
    spec: RunSpec,
    context: Context,
    model: Any,
    examples: tuple[Examples, Examples | None],
    estimate: Estimate | None,
    settings: Settings,
) -> Run:
    """The run at step 0. `examples` are those for training and for evaluation."""
    job, train, numerics, ranks = spec.job, spec.job.train, spec.numerics, context.ranks
    train_examples, eval_examples = examples
    tokens = train_examples.tokens
    batches = Batches(
        train_examples.indices, job.global_batch_size, train.seed, train_examples.weights
    )
    schedule = first_schedule(
        job, context.folder, context.seconds_left(), estimate, batches.steps_per_epoch
    )
    weights, progress = ranks.trained_of(model), Progress()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = build_optimizer(job, model, weights)
    scaler = torch.amp.GradScaler(numerics.device.type, enabled=numerics.needs_scaler)
    forward, kernels = _computed(spec, context, model, settings)
    before_bytes, free = taken_bytes(numerics.device), ranks.least(free_bytes(numerics.device))
    with out_of_memory_said("train.optim", OPTIMIZER_TO_DO):
        allocate_state(optimizer)
    ahead = micro_batches_of(
        forward, tokens, batches, schedule.n_steps, settings.micro_batch_tokens
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
    if train.torch_compile:  # refused where weights are spread
        kernels.compiled = compile_blocks(model)
    liger, is_compiled = kernels.liger, isinstance(kernels.compiled, int)
    settings, memory = share_prefix(
        forward,
        tokens,
        batches,
        schedule.n_steps,
        settings,
        memory,
        may_grow=not (job.says_micro_batch or settings.probed or context.ledger.out_of_memory),
        emit=context.emit,
    )
    settings = replace(
        settings,
        checkpoint_every=memory.checkpoint_every,
        packed=forward.is_packed,
        compiled=is_compiled,
        kernels="liger" if liger and not liger.startswith("no ") else "torch",
    )
    state = parts_of(model, weights, optimizer, scaler, progress)
    text_log, record = SummedLines(context.folder / LOG), Record(loaded_bytes=before_bytes)
    pace = _pace_of(context, forward, train_examples, memory, free)
    feed = StepFeed(
        forward=forward,
        batches=batches,
        tokens=tokens,
        schedule=schedule,
        settings=settings,
        ranks=ranks,
        meter=context.meter,
    )

    def settle() -> None:
        log.settle()

    every_s = SAVE_EVERY_S if estimate is None else estimate.interval_s
    saver = Saver(
        context=context,
        checkpoints=_checkpoints(context, train.save_total_limit),
        state=state,
        progress=progress,
        schedule=schedule,
        log=text_log,
        record=record,
        model=model,
        tokenizer=spec.tokenizer,
        settle=settle,
        save_steps=train.save_steps,
        every_s=train.save_minutes * 60 if train.save_minutes else every_s,
        save_total_limit=train.save_total_limit,
        load_best_model_at_end=train.load_best_model_at_end,
        trained_bytes=sum(weight.numel() * weight.element_size() for weight in trained),
    )
    evaluator = None
    if eval_examples is not None:
        greater, metric = train.greater_is_better, spec.metric
        every = train.eval_steps or batches.steps_per_epoch
        writing = Writing(spec.tokenizer, job.data.max_target_length)
        evaluator = Evaluator(
            context=context,
            forward=forward,
            examples=eval_examples,
            feed=feed,
            progress=progress,
            log=text_log,
            record=record,
            settle=settle,
            writing=writing if job.writes_texts else None,
            every_steps=None if train.eval_strategy == "no" else every,
            micro_batch_size=train.per_device_eval_batch_size,
            metric=metric,
            greater_is_better=forward.of.metrics[metric] if greater is None else greater,
            early_stopping_threshold=train.early_stopping_threshold,
            early_stopping_patience=train.early_stopping_patience,
        )
    forecast = Forecast(
        context=context,
        progress=progress,
        schedule=schedule,
        feed=feed,
        pace=pace,
        saver=saver,
        evaluator=evaluator,
        estimate=estimate,
    )
    log = StepLog(
        context=context,
        log=text_log,
        progress=progress,
        schedule=schedule,
        feed=feed,
        scaler=scaler,
        pace=pace,
        record=record,
        forecast=forecast,
        is_compiled=is_compiled,
        max_skipped_steps=train.max_skipped_steps,
        usd_per_hour=job.usd_per_hour,
        job_fingerprint=job.fingerprint,
        expected_bytes=before_bytes + memory.total_bytes,
    )
    step = Step(
        forward=forward,
        feed=feed,
        optimizer=optimizer,
        scaler=scaler,
        max_grad_norm=train.max_grad_norm,
        seed=train.seed,
        meter=context.meter,
        should_stop=context.is_asked_to_leave,
        before_update=saver.wait_for_copies,
        ranks=ranks,
    )
    return Run(
        spec=spec,
        context=context,
        train_examples=train_examples,
        eval_examples=eval_examples,
        estimate=estimate,
        model=model,
        forward=forward,
        kernels=kernels,
        memory=memory,
        progress=progress,
        state=state,
        schedule=schedule,
        steps=Steps(step, log.note_out_of_memory),
        pace=pace,
        record=record,
        begin_as_ancestor=partial(
            begin_from, job, state["model"], ranks.rows_of, tokens.label_names
        ),
        saver=saver,
        evaluator=evaluator,
        forecast=forecast,
        log=log,
    )


def _computed(
    spec: RunSpec, context: Context, model: Any, settings: Settings
) -> tuple[Forward, Kernels]:
    """The forward pass, and what it has of our own in place of the model's code; no layer is
    compiled yet.
    """
    job, numerics, lora = spec.job, spec.numerics, None
    if job.method.name != "full":
        from farthing.model.lora_kernels import (
            use_low_rank,  # takes peft along, which a full run has no use for
        )

        lora = use_low_rank(model)
    wanted = job.train.use_liger_kernel
    if wanted == "auto":  # on a GPU, unless earlier attempts were without
        wanted = numerics.device.type == "cuda" and settings.kernels != "torch"
    liger = use_liger(model) if wanted else None
    forward = Forward(
        model,
        job.task,
        spec.pad_id,
        numerics,
        settings=job.objective,
        label_smoothing=job.train.label_smoothing_factor,
        may_go_packed=job.model.attn_implementation is None and settings.packed is not False,
    )
    forward.micro_batch_cost = MicroBatchCost(settings.least_tokens, settings.more_tokens)
    forward.within = context.ranks.within
    if numerics.device.type == "cuda" and numerics.autocast is not None:
        forward.casts = Casts(model, numerics.autocast)
    if job.train.neftune_noise_alpha:
        forward.noise = EmbeddingNoise(model, job.train.neftune_noise_alpha)
    return forward, Kernels(lora, liger, "not asked for")


def _pace_of(
    context: Context,
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
    layers, every = checkpointed_layers(model), memory.checkpoint_every
    kept_bytes = memory.layer.at(memory.n_tokens) * len(layers)
    known = {
        "recomputed_share": round(recomputed_share(model, layers, every), 4),
        "recomputed_of_forward": round(recomputed_of_forward(model, layers, every), 4),
        "need_bytes": memory.total_bytes,
        "need_without_checkpointing_bytes": int(memory.total_bytes + kept_bytes) if every else None,
        "free_bytes": free_bytes,
    }
    return Pace(forward.numerics, flops, context.meter, known | facts_of_lengths(lengths))


def _checkpoints(context: Context, save_total_limit: int) -> Checkpoints:
    copies: Json = {}
    return Checkpoints(
        context.folder / CHECKPOINTS,
        context.run_id,
        save_total_limit,
        warn=context.warn,
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


@contextlib.contextmanager
def meanwhile(compute: Callable[[], T]) -> Iterator[Future[T]]:
    """Something that another thread computes within the block. Who leaves it without the result
    waits a few seconds at most.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(compute())
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=run, name="farthing-meanwhile", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        thread.join(LEAVING_S)


@out_of_memory_said("model.model_name_or_path", MODEL_TO_DO)
def build_model(
    spec: RunSpec,
    label_names: tuple[str, ...],
    *,
    on_host: bool = False,
    reads: bool = True,
    warn: Callable[[str], None] = lambda text: None,
) -> Any:
    """The model with what the method trains, in training mode, on its device unless it stays
    `on_host`; without weights, and not looked at, where it does not read them. `label_names` are
    those of classification."""
    job, numerics, method = spec.job, spec.numerics, spec.job.method
    quantize = method.name == "qlora"
    model: Any = load_model(
        spec.choice if reads else replace(spec.choice, init="meta"),
        spec.config,
        job.task,
        dtype=precision_of(method.name, job.train.optim, numerics).weights,
        seed=job.train.seed,
        label_names=label_names,
        pad_id=spec.pad_id,
        in_four_bits=FourBits(numerics.device, method.modules_to_save) if quantize else None,
        n_words=len(spec.tokenizer) if spec.choice.new_tokens else None,
        warn=warn,
    )
    if spec.recipe.target_lang:
        speak(model, spec.tokenizer, spec.recipe.target_lang)
    if method.name != "full":
        adapter = Adapter(
            method.lora_r,
            method.lora_alpha,
            method.lora_dropout,
            method.target_modules,
            method.modules_to_save,
            method.use_dora,
            method.use_rslora,
            method.init_lora_weights,
            method.lora_bias,
        )
        ends = word_layers(model) if spec.choice.new_tokens else ()
        model = add_adapter(model, adapter, job.task, job.train.seed)
        refuse_untrained_words(model, ends)
    if not quantize and not on_host:
        model.to(numerics.device)
    if reads:
        with replace(
            numerics, device=next(model.parameters()).device
        ).autocasting():  # modules that are saved are fp32
            if spec.objective.predicts_next:
                refuse_looking_ahead(model, spec.choice.name)
            if method.name != "full":
                refuse_unreached(model, adapter, job.task)
    model.train()
    return model


def build_optimizer(
    job: Job, model: Any, weights: Mapping[str, nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """The job's optimizer over the trained weights, or the rows of them in `weights`."""
    train = job.train
    optimizer = make_optimizer(
        model,
        train.optim,
        learning_rate=job.learning_rate,
        weight_decay=train.weight_decay,
        betas=(train.adam_beta1, train.adam_beta2),
        epsilon=train.adam_epsilon,
        loraplus=job.method.loraplus_lr_ratio if job.method.name != "full" else None,
    )
    if weights is not None:  # it has no state yet
        name_of = {weight: name for name, weight in model.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [weights[name_of[weight]] for weight in group["params"]]
    return optimizer


def settle_checkpointing(
    job: Job,
    forward: Forward,
    train: Examples,
    settings: Settings,
    *,
    optimizer: torch.optim.Optimizer,
    free_bytes: int,
    ahead: tuple[NDArray[np.int64], bool],
    ranks: Ranks,
    emit: Emit = ignore,
) -> MemoryNeed:
    """Measure small forward passes and switch on as much activation checkpointing as the largest
    micro-batch needs.

    With `auto` no less is tried than `settings` have. `free_bytes` are those before the optimizer's
    state was made; `ahead` has the examples of the largest micro-batch, and whether a step has
    several.
    """
    lengths = forward.lengths_of(train.tokens).astype(np.int64)
    (largest, has_several), of_all = ahead, lengths[train.indices]
    # as many pairs for each token as all have together: where scores are kept, they grow with the
    # squares of lengths
    middle = np.argmin(abs(of_all - (of_all**2).sum() / of_all.sum()))
    sorted_largest = largest[np.argsort(lengths[largest])]
    some = train.indices[:: max(1, len(of_all) // 4096)]
    scored = float(train.tokens.target_lengths[some].sum()) / max(
        1.0, float(train.tokens.lengths[some].sum())
    )
    fsdp = ranks.fsdp

    def sample_of(size: int) -> Sample:
        sample = np.full(size, train.indices[middle])
        if forward.of.is_pair and len(largest) >= 8:  # padded in groups, as all of them will be
            sample = sorted_largest[2 // size :: 4 // size]
        arrays = forward.collate(train.tokens, sample)
        batch = forward.to_device(arrays)
        return Sample(forward.n_computed(arrays), lambda: forward.before_head(batch))

    wanted = job.train.gradient_checkpointing
    n_tokens = forward.n_tokens_of(train.tokens, largest)
    head, twice = forward.head_bytes(n_tokens, scored), forward.head_bytes(2 * n_tokens, scored)
    is_cuda = forward.numerics.device.type == "cuda"
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    need = choose_checkpointing(
        forward.model,
        (sample_of(1), sample_of(2)),
        Beside(
            n_tokens=n_tokens,
            accumulates=has_several or settings.slots > ranks.n,
            optimizer_bytes=state_bytes(optimizer, forward.numerics.device),
            update_bytes=max(update_bytes(optimizer), reduce_bytes(ranks, trained))
            if is_cuda
            else 0,
            free_bytes=free_bytes,
            head=Linear(2 * head - twice, (twice - head) / max(1, n_tokens)),
            autocast=(None if fsdp is not None and fsdp.casts_rows else forward.numerics.autocast),
            casts_once=forward.casts is not None and bool(forward.casts.weights),
            gathered=Gathered() if fsdp is None else fsdp.gathered,
        ),
        wanted=wanted if wanted == "auto" else int(wanted),
        planned=settings.checkpoint_every,
        fits_all=lambda fits: fits if fsdp is None else bool(ranks.least(int(fits))),
    )
    if fsdp is not None:  # no backward pass has come after
        fsdp.let_go()
    if fsdp is not None and fsdp.trains_rows and ranks.n > 1 and has_several:
        more = fsdp.whole_gradients_bytes
        whole = replace(need, gathered=Gathered(*(each + more for each in need.gathered)))
        fsdp.accumulates_whole = bool(ranks.least(int(whole.fits)))
        need = whole if fsdp.accumulates_whole else need
        how = "whole, and sent once a step" if fsdp.accumulates_whole else "by rows"
        why = "" if fsdp.accumulates_whole else ", as whole ones do not fit"
        emit(Note(f"gradients of several micro-batches are added up {how}{why}"))
    return need
