"""From a job to what the loop needs: tokenized examples, a model with its optimizer, and the
identity of it all.

Cheap checks come before dear ones: a wrong name or a changed file is found before anything is
tokenized or loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from farthing.config.data_lengths import note_token_set
from farthing.config.job import Job
from farthing.data.batches import split_by_input
from farthing.data.chat import asks_for_the_date
from farthing.data.packing import target_lengths_of
from farthing.data.read import Source, open_sources
from farthing.data.token_set import LINE_BITS, Recipe, TokenSet, notes_of
from farthing.data.tokens import refuse_one_class, tokenize
from farthing.dist.ranks import Ranks
from farthing.dist.reduce import reduce_bytes
from farthing.errors import DataError, HardwareError
from farthing.events import DataRead, Emit, Note, ReadingData, Tokenizing, Warned, ignore
from farthing.model.activation_checkpointing import (
    Beside,
    Gathered,
    Linear,
    MemoryNeed,
    Sample,
    choose_checkpointing,
)
from farthing.model.adapters import (
    Adapter,
    add_adapter,
    refuse_unreached,
    refuse_untrained_words,
    word_layers,
)
from farthing.model.causality import refuse_looking_ahead
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics, choose_numerics, why_not_deterministic
from farthing.model.load import (
    FourBits,
    ModelChoice,
    check_fits,
    load_config,
    load_model,
    load_tokenizer,
    need_bitsandbytes,
    set_languages,
    speak,
)
from farthing.model.positions import max_positions
from farthing.model.precision import precision_of
from farthing.models.refused import refuse_model
from farthing.objectives.objective import class_names
from farthing.objectives.registry import objective_of
from farthing.planner.software import fp16_risk
from farthing.run.folder import began
from farthing.settings import Settings
from farthing.train.ancestor import ancestor_identity
from farthing.train.identity import identity_of
from farthing.train.optim import make_optimizer, state_bytes
from farthing.train.published import published_as
from farthing.train.update_guard import MODEL_TO_DO, out_of_memory_said, update_bytes
from farthing.units import plural

T = TypeVar("T")


def model_choice(job: Job) -> ModelChoice:
    """The job's model section in plain values."""
    section = job.model
    return ModelChoice(
        section.model_name_or_path,
        section.revision,
        section.tokenizer_name_or_path,
        section.init,
        section.attn_implementation,
        section.trust_remote_code,
        section.rope_scaling,
        section.new_tokens,
    )


@dataclass(frozen=True)
class Inputs:
    """What a run starts from, identified but not yet tokenized or loaded."""

    choice: ModelChoice
    config: Any
    tokenizer: Any
    train_sources: list[Source]
    eval_sources: list[Source]
    recipe: Recipe
    identity: dict[str, object]

    @property
    def pad_id(self) -> int:
        """The token that fills a batch; its positions are masked, so any will do.

        But for classification, where some models look for the last token that is not what their own
        config calls padding.
        """
        text_config = self.config.get_text_config()
        own = (
            getattr(text_config, "pad_token_id", None)
            if objective_of(self.recipe.task).labels is not None
            else None
        )
        if own is not None and 0 <= own < text_config.vocab_size:
            return int(own)
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0


@dataclass(frozen=True)
class Examples:
    """Indices [n] into a token set."""

    tokens: TokenSet
    indices: NDArray[np.int64]
    were_tokenized: bool = True
    """Before this attempt: nothing had to be tokenized for it."""
    source_weights: tuple[float, ...] = ()
    """How often an epoch takes the examples of each source; empty: once."""

    @property
    def weights(self) -> NDArray[np.float64] | None:
        """How often an epoch takes each example [n]; None where it takes all once."""
        if all(weight == 1 for weight in self.source_weights):
            return None
        return np.array(self.source_weights)[self.tokens.lines[self.indices] >> LINE_BITS]

    def __len__(self) -> int:
        return len(self.indices)


def check_extras(job: Job, device: str) -> None:
    """Refuse what can't work on this machine before anything else is done. Raises `HardwareError`.

    That is what needs bitsandbytes where it does not work, and on CUDA what can't be deterministic
    where that is asked for.
    """
    if job.train.full_determinism and device == "cuda":
        why_not = why_not_deterministic(job.model.attn_implementation, job.train.torch_compile)
        if why_not:
            raise HardwareError(
                f"full_determinism can't be kept with {why_not}",
                where="train.full_determinism",
                to_do="leave one of the two out",
            )
    published_as(job)  # raises without a token
    if job.method.name == "qlora":
        need_bitsandbytes("method: qlora")
    if "8bit" in job.train.optim or "paged" in job.train.optim:
        need_bitsandbytes(f"optim: {job.train.optim}")


def identify(
    job: Job, emit: Emit = ignore, on_data: Callable[[], None] = lambda: None
) -> tuple[Numerics, Inputs]:
    """What a run computes in and starts from. What is wrong is found here before anything is
    tokenized or loaded; `on_data` is called before the data is read. Raises `FarthingError`.
    """
    asked = (
        job.where.device,
        job.train.bf16,
        job.train.fp16,
        job.train.tf32,
        job.train.full_determinism,
    )
    check_extras(job, choose_numerics(*asked).device.type)
    on_data()
    inputs = open_inputs(job, emit)
    return choose_numerics(*asked, fp16_risk(inputs.config.to_dict())), inputs


def open_inputs(job: Job, emit: Emit = ignore) -> Inputs:
    """Find and identify model, tokenizer and data, telling how far it has read. Raises
    `ModelError`, `DataError`.
    """
    choice = model_choice(job)
    config = load_config(choice)
    refuse_model(config.to_dict(), job.task, choice.name)
    day = began(Path(job.output_dir))
    of_words = objective_of(job.task).scores_words
    tokenizer = load_tokenizer(choice, job.data.chat_template, of_words=of_words)
    limits = [n for n in (max_positions(config), tokenizer.model_max_length) if n]
    max_length = job.data.max_length or min([job.max_length, *limits])
    data = job.data
    lengths = {"data.max_length": max_length}
    task = objective_of(job.task)
    if task.is_pair:
        lengths["data.max_target_length"] = data.max_target_length
    check_fits(config, tokenizer, lengths, choice)
    source_lang, target_lang = set_languages(
        tokenizer, job.task, data.source_lang, data.target_lang
    )
    recipe = Recipe(
        task=job.task,
        max_length=max_length,
        max_target_length=data.max_target_length,
        too_long=job.too_long,
        train_on_prompt=data.train_on_prompt,
        columns=dict(data.columns),
        label_map=dict(data.label_map),
        max_bad_rows=data.max_bad_rows,
        scored=job.scored,
        source_lang=source_lang,
        target_lang=target_lang,
        model_classes=(
            class_names(config) if task.reads_labels and choice.init == "pretrained" else ()
        ),
        date=day if task.reads_answers and asks_for_the_date(tokenizer.chat_template) else "",
    )
    cache_dir = Path(job.cache_dir or ".")
    opened: dict[str, Any] = {
        "cache_dir": cache_dir,
        "config_name": data.dataset_config_name,
        "layout": data.layout,
        "progress": lambda what, done, total: emit(ReadingData(what, done, total)),
        "warn": lambda text: emit(Warned(text)),
    }
    train_sources = open_sources(
        data.train,
        split=data.train_split,
        own=data.of_train,
        **opened,
    )
    eval_sources = (
        open_sources(
            data.eval,
            split=data.eval_split,
            own=data.of_eval,
            **opened,
        )
        if data.eval
        else []
    )
    identity = identity_of(job, choice, config, tokenizer, train_sources, eval_sources, recipe)
    identity |= ancestor_identity(job, identity)
    return Inputs(choice, config, tokenizer, train_sources, eval_sources, recipe, identity)


def open_examples(
    job: Job, inputs: Inputs, emit: Emit, should_stop: Callable[[], bool]
) -> tuple[Examples, Examples | None]:
    """(train, eval) examples, tokenized or from the cache. Raises `DataError`,
    `RunInterruptedError`.
    """
    cache_dir = Path(job.cache_dir or ".")
    n_chunks = 0

    def tokens_of(role: str, sources: list[Source], recipe: Recipe) -> TokenSet:
        def progress(rows: int, n_tokens: int, share: float) -> None:
            nonlocal n_chunks
            n_chunks += 1
            emit(Tokenizing(role, rows, n_tokens, share))

        tokens = tokenize(
            sources,
            inputs.tokenizer,
            recipe,
            cache_dir,
            progress=progress,
            should_stop=should_stop,
            warn=lambda text: emit(Warned(text)),
        )
        with contextlib.suppress(OSError):  # a plan would have to do without
            note_token_set(
                job,
                role,
                inputs.train_sources,
                inputs.eval_sources,
                tokens.folder,
                cache_dir=cache_dir,
            )
        return tokens

    train_tokens = tokens_of("train", inputs.train_sources, inputs.recipe)
    _say_data("train", train_tokens, emit)
    train = np.arange(len(train_tokens))
    held_out: Examples | None = None
    if inputs.eval_sources:
        recipe = replace(inputs.recipe, label_names=train_tokens.label_names)
        eval_tokens = tokens_of("eval", inputs.eval_sources, recipe)
        _say_data("eval", eval_tokens, emit)
        held_out = Examples(eval_tokens, np.arange(len(eval_tokens)))
    elif job.data.eval_fraction > 0:
        groups, inputs_of_all = train_tokens.groups, train_tokens.inputs
        train, chosen = split_by_input(
            groups, job.data.eval_fraction, job.train.seed, inputs_of_all
        )
        refuse_too_few(
            int(train_tokens.facts["n_distinct_inputs"]) if len(chosen) else 0,
            inputs.train_sources[0].name,
        )
        held_out = Examples(train_tokens, chosen)
    weights = tuple(source.weight for source in inputs.train_sources)
    train_examples = Examples(
        train_tokens, train[: job.data.max_train_samples], n_chunks == 0, weights
    )
    _judge_labels(train_examples, inputs.recipe.label_map, emit)
    if held_out is not None:
        held_out = Examples(held_out.tokens, held_out.indices[: job.data.max_eval_samples])
        _say_unseen_labels(train_examples, held_out, emit)
        if inputs.eval_sources:
            _say_shared_inputs(train_examples, held_out, emit)
    return train_examples, held_out


def refuse_too_few(n_distinct_inputs: int, where: str) -> None:
    """Refuse to hold out a part of one input. Raises `DataError`."""
    if n_distinct_inputs < 2:
        raise DataError(
            "too few distinct inputs to hold any out for evaluation",
            where=where,
            to_do="give data.eval a file, or set data.eval_fraction: 0",
        )


def _say_data(role: str, tokens: TokenSet, emit: Emit) -> None:
    facts = tokens.facts
    counts = {
        each.name: facts[each.name] for each in fields(DataRead) if each.name.startswith("n_")
    }
    emit(
        DataRead(
            role=role,
            names=tuple(source["name"] for source in facts["sources"]),
            formats=tuple(facts["formats"]),
            bad_rows=tuple((place, reason) for place, reason in facts["bad_rows"]),
            notes=notes_of(facts),
            **counts,
        )
    )
    if n_turns := facts.get("n_unlearned_turns", 0):
        text = (
            f"{plural(n_turns, 'assistant turn')} of the {role} data are context and not learned:"
            " the chat template never shows them as the model would write them (a template with"
            " {% generation %} marks learns them)"
        )
        emit(Warned(text))


def examples_sha256(train: Examples, held_out: Examples | None) -> str:
    """Identity of what a run reads: the tokens and targets of its examples, and which of them are
    held out.
    """
    digest = hashlib.sha256()
    for examples in (train, held_out):
        if examples is not None:
            digest.update(examples.tokens.content_sha256.encode())
            digest.update(np.ascontiguousarray(examples.indices, dtype=np.int64).tobytes())
    return digest.hexdigest()


def _judge_labels(train: Examples, label_map: dict[str, str], emit: Emit) -> None:
    """Refuse data of one class, of which nothing can be learned; name classes that may be one, and
    labels to be mapped that there are none of. Raises `DataError`."""
    names = train.tokens.label_names
    if train.tokens.labels is None or not names:
        return
    sources = [source["name"] for source in train.tokens.facts["sources"]]
    seen = np.unique(_labels_of(train), axis=0).tolist()
    refuse_one_class([names[each] if isinstance(each, int) else each for each in seen], sources)
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(" ".join(name.lower().split()), []).append(name)
    if doubts := [" and ".join(map(repr, each)) for each in alike.values() if len(each) > 1]:
        text = (
            "labels that differ in capitals or spaces alone are different classes:"
            f" {', '.join(doubts[:5])}"
        )
        emit(Warned(f"{text}; make them one with data.label_map, or in the data"))
    if idle := [f"{key!r} ({name!r})" for key, name in label_map.items() if name not in names]:
        text = f"data.label_map names values that no row has: {', '.join(idle[:5])}"
        emit(
            Warned(
                f"{text}; the classes are"
                f" {', '.join(map(repr, names[:8]))}{' ...' if len(names) > 8 else ''}"
            )
        )


def _say_unseen_labels(train: Examples, held_out: Examples, emit: Emit) -> None:
    if (
        train.tokens.labels is None
        or held_out.tokens.labels is None
        or not train.tokens.label_names
    ):
        return
    of_train, of_held_out = (_classes_in(_labels_of(each)) for each in (train, held_out))
    unseen = of_held_out - of_train
    if unseen:
        names = ", ".join(repr(held_out.tokens.label_names[label]) for label in sorted(unseen)[:5])
        text = (
            f"{len(unseen)} labels are in the evaluation data and never seen in training ({names}):"
            " they count as errors"
        )
        emit(Warned(text))


def _labels_of(examples: Examples) -> NDArray[Any]:
    found = examples.tokens.labels_of(examples.indices)
    assert found is not None
    return found


def _classes_in(labels: NDArray[Any]) -> set[int]:
    """The classes that occur in labels [n], or are marked in [n, C]."""
    return set((np.flatnonzero(labels.any(0)) if labels.ndim > 1 else np.unique(labels)).tolist())


def _say_shared_inputs(train: Examples, held_out: Examples, emit: Emit) -> None:
    """Inputs that are learned and evaluated on: what is measured on them says nothing of
    new ones.
    """
    is_shared = np.isin(
        held_out.tokens.groups[held_out.indices], train.tokens.groups[train.indices]
    )
    if not is_shared.any():
        return
    first = held_out.tokens.place(int(held_out.indices[int(np.argmax(is_shared))]))
    text = (
        f"{int(is_shared.sum()):,} of {len(held_out):,} evaluation examples have an input that is"
        f" trained on too (the first: {first}): the evaluation is too good by that; leave them out"
        " of one of the files"
    )
    emit(Warned(text))


LEAVING_S = 5.0


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
    job: Job,
    inputs: Inputs,
    numerics: Numerics,
    label_names: tuple[str, ...],
    *,
    on_host: bool = False,
    reads: bool = True,
    warn: Callable[[str], None] = lambda text: None,
) -> Any:
    """The model with what the method trains, in training mode, on its device unless it stays
    `on_host`; without weights, and not looked at, where it does not read them. `label_names` are
    those of classification."""
    method = job.method
    quantize = method.name == "qlora"
    model: Any = load_model(
        inputs.choice if reads else replace(inputs.choice, init="meta"),
        inputs.config,
        job.task,
        dtype=precision_of(method.name, job.train.optim, numerics).weights,
        seed=job.train.seed,
        label_names=label_names,
        pad_id=inputs.pad_id,
        in_four_bits=FourBits(numerics.device, method.modules_to_save) if quantize else None,
        n_words=len(inputs.tokenizer) if inputs.choice.new_tokens else None,
        warn=warn,
    )
    if inputs.recipe.target_lang:
        speak(model, inputs.tokenizer, inputs.recipe.target_lang)
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
        ends = word_layers(model) if inputs.choice.new_tokens else ()
        model = add_adapter(model, adapter, job.task, job.train.seed)
        refuse_untrained_words(model, ends)
    if not quantize and not on_host:
        model.to(numerics.device)
    if reads:
        with replace(
            numerics, device=next(model.parameters()).device
        ).autocasting():  # modules that are saved are fp32
            if objective_of(job.task).predicts_next:
                refuse_looking_ahead(model, inputs.choice.name)
            if method.name != "full":
                refuse_unreached(model, adapter, job.task)
    model.train()
    return model


def build_optimizer(
    job: Job, model: Any, weights: Mapping[str, nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """The job's optimizer over the trained weights, or the rows of them in `weights`, by the
    `rules` that the run began under."""
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
    scored = float(target_lengths_of(train.tokens, some).sum()) / max(
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
            largest_tokens=n_tokens,
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
