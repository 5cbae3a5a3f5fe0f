"""A run put together from what it starts from: examples, model, optimizer, schedule, kernels,
memory, steps, checkpoints.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from farthing.data.batches import Batches
from farthing.data.formats import chat_reader
from farthing.data.packing import MicroBatchCost
from farthing.device_memory import out_of_memory_said
from farthing.events import Working
from farthing.local.measurements import Record
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
from farthing.model.forward import Forward
from farthing.model.hardware import free_bytes, taken_bytes
from farthing.model.liger import use_liger
from farthing.model.load import FourBits, load_model, speak, stop_at
from farthing.model.loss import inner_of
from farthing.model.precision import precision_of
from farthing.planner.estimate import Estimate
from farthing.run.folder import DATA_NOTES, keep
from farthing.settings import Settings
from farthing.train.built import Run
from farthing.train.context import Context, ModelKernels
from farthing.train.estimate import estimated
from farthing.train.memory import settle_checkpointing, share_prefix
from farthing.train.optim import allocate_state, make_optimizer
from farthing.train.rank_setup import follow, lead, slots_of_run
from farthing.train.resolve import Examples, RunSpec, open_examples
from farthing.train.run_settings import first_settings
from farthing.train.schedule import first_schedule
from farthing.train.step_feed import StepFeed
from farthing.train.strategy import may_shard, read_where_it_differs, shard_weights

LEAVING_S = 5.0
MODEL_TO_DO = "the model's weights do not fit: use method: qlora, a smaller model, or a larger GPU"
OPTIMIZER_TO_DO = (
    "the optimizer's state does not fit beside the weights: use optim: adamw_8bit or"
    " adamw_torch_offload, method: lora or qlora, or a larger GPU"
)
T = TypeVar("T")


def build(spec: RunSpec, context: Context, *, has_begun: bool = False) -> Run:
    """The run at step 0: tokenized, planned, with its model on the device. `has_begun`: earlier
    attempts knew its examples.
    """
    meter, emit, ranks = context.meter, context.emit, context.ranks
    before_bytes, on_host = taken_bytes(spec.numerics.device), may_shard(spec, ranks)
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
        slots = slots_of_run(spec.where, ranks, settings.slots or int(has_begun), emit)
        settings = replace(settings, slots=slots)
        if ranks.is_first:
            lead(context)
        settings = Settings.from_json(ranks.tell_all(settings.to_json()))
        context.ledger.write()
        meter.enter("load_model")
        emit(Working("loading the model"))
        names = examples.tokens.label_names
        model = loading.result() if loading else read(names, reads=reads)
        if on_host and ranks.n > 1:
            model = read_where_it_differs(ranks, model, lambda: read(names))
    shard_weights(spec, ranks, model, emit)
    run = assemble(spec, context, model, (examples, held_out), estimate, settings)
    run.record.before_model_bytes = before_bytes
    context.ledger.write()
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
    train, numerics, ranks, emit = spec.train, spec.numerics, context.ranks, context.emit
    train_examples, eval_examples = examples
    if spec.objective.predicts_next and train_examples.tokens.facts["n_rendered"]:
        stop = chat_reader(spec.tokenizer, spec.recipe.date).stop
        stop_at(inner_of(model), spec.tokenizer.get_vocab().get(stop))
    batches = Batches(
        train_examples.indices, spec.global_batch_size, train.seed, train_examples.weights
    )
    schedule = first_schedule(
        train,
        spec.learning_rate,
        context.folder,
        context.limits.left_s,
        estimate,
        batches.steps_per_epoch,
    )
    is_full = spec.method.name == "full"
    optimizer = make_optimizer(
        model,
        ranks.trained_of(model),
        train,
        spec.learning_rate,
        None if is_full else spec.method.loraplus_lr_ratio,
    )
    forward, kernels = _computed(spec, context, model, settings)
    before_bytes, free = taken_bytes(numerics.device), ranks.least(free_bytes(numerics.device))
    with out_of_memory_said("train.optim", OPTIMIZER_TO_DO):
        allocate_state(optimizer)
    feed = StepFeed(
        forward=forward,
        batches=batches,
        tokens=train_examples.tokens,
        schedule=schedule,
        settings=settings,
        ranks=ranks,
        meter=context.meter,
    )
    memory = settle_checkpointing(
        train.gradient_checkpointing, feed, train_examples, optimizer, free, emit
    )
    if train.torch_compile:  # refused where weights are spread
        kernels.compiled = compile_blocks(model)
        if isinstance(kernels.compiled, int):
            forward.casts = None
    is_said = spec.says_micro_batch or settings.probed or context.ledger.out_of_memory
    memory = share_prefix(feed, memory, may_grow=not is_said, emit=emit)
    feed.settings = replace(
        feed.settings,
        checkpoint_every=memory.checkpoint_every,
        packed=forward.is_packed,
        compiled=isinstance(kernels.compiled, int),
        kernels="liger" if kernels.has_liger else "torch",
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
        optimizer=optimizer,
        memory=memory,
        schedule=schedule,
        feed=feed,
        record=Record(loaded_bytes=before_bytes),
    )


def _computed(
    spec: RunSpec, context: Context, model: Any, settings: Settings
) -> tuple[Forward, ModelKernels]:
    """The forward pass, and what it has of our own in place of the model's code; no layer is
    compiled yet.
    """
    numerics, train, lora = spec.numerics, spec.train, None
    is_cuda = numerics.device.type == "cuda"
    if spec.method.name != "full":  # takes peft along, which a full run has no use for
        from farthing.model.lora_kernels import use_low_rank

        lora = use_low_rank(model)
    wanted = train.use_liger_kernel
    if wanted == "auto":  # on a GPU, unless earlier attempts were without
        wanted = is_cuda and settings.kernels != "torch"
    of_liger = use_liger(model) if wanted else (False, "")
    forward = Forward(
        model,
        spec.task,
        spec.pad_id,
        numerics,
        settings=spec.objective_settings,
        label_smoothing=train.label_smoothing_factor,
        may_go_packed=spec.choice.attn_implementation is None and settings.packed is not False,
    )
    forward.micro_batch_cost = MicroBatchCost(settings.least_tokens, settings.more_tokens)
    forward.within = context.ranks.within
    if is_cuda and numerics.autocast is not None:
        forward.casts = Casts(model, numerics.autocast)
    if train.neftune_noise_alpha:
        forward.noise = EmbeddingNoise(model, train.neftune_noise_alpha)
    return forward, ModelKernels(lora, *of_liger, compiled="not asked for")


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
    those of classification.
    """
    task, numerics, method, seed = spec.task, spec.numerics, spec.method, spec.train.seed
    quantize = method.name == "qlora"
    model: Any = load_model(
        spec.choice if reads else replace(spec.choice, init="meta"),
        spec.config,
        task,
        dtype=precision_of(method.name, spec.train.optim, numerics).weights,
        seed=seed,
        label_names=label_names,
        pad_id=spec.pad_id,
        in_four_bits=FourBits(numerics.device, method.modules_to_save) if quantize else None,
        n_words=len(spec.tokenizer) if spec.choice.new_tokens else None,
        warn=warn,
    )
    if spec.recipe.target_lang:
        speak(model, spec.tokenizer, spec.recipe.target_lang)
    adapter = None
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
        model = add_adapter(model, adapter, task, seed)
        refuse_untrained_words(model, ends)
    if not quantize and not on_host:
        model.to(numerics.device)
    if reads:
        with replace(
            numerics, device=next(model.parameters()).device
        ).autocasting():  # modules that are saved are fp32
            if spec.objective.predicts_next:
                refuse_looking_ahead(model, spec.choice.name)
            if adapter is not None:
                refuse_unreached(model, adapter)
    model.train()
    return model
