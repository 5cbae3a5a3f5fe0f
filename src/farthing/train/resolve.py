"""From a job to what its run starts from: every question about it is answered here, once.

Cheap checks come before dear ones: a wrong name or a changed file is found before anything is
tokenized or loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.config.data_lengths import note_token_set, recipe_of
from farthing.config.job import DataSection, Job, MethodSection, TrainSection, WhereSection
from farthing.data.batches import split_by_input
from farthing.data.read import Source, open_sources
from farthing.data.token_set import LINE_BITS, TokenRecipe, TokenSet, tokenizer_sha256
from farthing.data.tokens import refuse_one_class, tokenize
from farthing.errors import DataError, HardwareError
from farthing.events import DataRead, Emit, ReadingData, Tokenizing, Warned, ignore
from farthing.model.hardware import Numerics, choose_numerics, why_not_deterministic
from farthing.model.load import (
    ModelChoice,
    check_fits,
    load_config,
    load_tokenizer,
    model_sha256,
    need_bitsandbytes,
    set_languages,
)
from farthing.model.positions import max_positions
from farthing.models.refused import refuse_model
from farthing.objectives.objective import Objective, ObjectiveSettings, class_names
from farthing.objectives.registry import objective_of
from farthing.planner.software import fp16_risk
from farthing.run.folder import began
from farthing.train.ancestor import KEY as ANCESTOR
from farthing.train.ancestor import ancestor_identity
from farthing.train.finished import to_publish
from farthing.units import plural

MODEL_CONTENT = "model (content)"
ADDS_NOTHING = ("true", "gaussian")  # how adapters begin that add nothing before the first step


class Writing(NamedTuple):
    """With what, and how much, a model may write for an example."""

    tokenizer: Any
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a run starts from and how it is to be computed, identified but not yet tokenized or
    loaded.
    """

    job: Job
    """For the planner, which plans jobs. Whoever builds and trains reads what stands below."""
    task: str
    objective: Objective
    objective_settings: ObjectiveSettings | None
    choice: ModelChoice
    config: Any
    tokenizer: Any
    pad_id: int
    from_run: str | None  # the run whose weights this one begins with
    data: DataSection
    train_sources: list[Source]
    eval_sources: list[Source]
    recipe: TokenRecipe
    cache_dir: Path
    method: MethodSection
    train: TrainSection
    learning_rate: float
    global_batch_size: int
    micro_batch_size: int
    says_micro_batch: bool  # whether the user has said how much is computed at once
    writing: Writing | None  # with what an evaluation has the model write; None where it does not
    metric: str  # the metric that says which step is best; known, as the job was checked
    where: WhereSection
    usd_per_hour: float
    identity: dict[str, object]
    """What two attempts have to agree on, flat: settings, and content wherever it lies."""
    fingerprint: str  # which job it is, for what was learned by running out of memory

    @cached_property
    def numerics(self) -> Numerics:
        """What this machine computes the run in. Raises `HardwareError`."""
        return numerics_of(self.job, self.config)

    @property
    def beginning(self) -> dict[str, object]:
        """What the model follows from as it is before the first step."""
        names = [MODEL_CONTENT, "model.init", "model.rope_scaling", "model.new_tokens", ANCESTOR]
        adapter = self.method.init_lora_weights if self.method.name != "full" else "true"
        if adapter not in ADDS_NOTHING:
            names += [name for name in self.identity if name.startswith("method.")]
        draws = self.choice.init == "random" or self.choice.new_tokens or adapter == "false"
        return {
            **{name: self.identity.get(name) for name in names},
            "seed": self.train.seed if draws else None,
            "in_four_bits": self.method.name == "qlora",
        }


@dataclass(frozen=True)
class Examples:
    """Indices [n] into a token set."""

    tokens: TokenSet
    indices: NDArray[np.int64]
    were_tokenized: bool = True  # before this attempt: nothing had to be tokenized for it
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


def sha256_of_examples(*every: Examples | None) -> str:
    """Identity of what a run reads: the tokens and targets of its examples, and which of them are
    held out.
    """
    digest = hashlib.sha256()
    for examples in every:
        if examples is not None:
            digest.update(examples.tokens.content_sha256.encode())
            digest.update(np.ascontiguousarray(examples.indices, dtype=np.int64).tobytes())
    return digest.hexdigest()


def numerics_of(job: Job, config: Any = None) -> Numerics:
    """What this machine computes a job in. Raises `HardwareError`."""
    train = job.train
    return choose_numerics(
        job.where.device,
        train.bf16,
        train.fp16,
        train.tf32,
        train.full_determinism,
        "" if config is None else fp16_risk(config.to_dict()),
    )


def check_extras(job: Job, device: str = "") -> None:
    """Refuse what can't work on this machine before anything else is done. Raises `HardwareError`.

    That is what needs bitsandbytes where it does not work, and on CUDA what can't be deterministic
    where that is asked for.
    """
    device = device or numerics_of(job).device.type
    if job.train.full_determinism and device == "cuda":
        why_not = why_not_deterministic(job.model.attn_implementation, job.train.torch_compile)
        if why_not:
            raise HardwareError(
                f"full_determinism can't be kept with {why_not}",
                where="train.full_determinism",
                to_do="leave one of the two out",
            )
    to_publish(job)  # raises without a token
    if job.method.name == "qlora":
        need_bitsandbytes("method: qlora")
    if "8bit" in job.train.optim or "paged" in job.train.optim:
        need_bitsandbytes(f"optim: {job.train.optim}")


def resolve(job: Job, emit: Emit = ignore) -> RunSpec:
    """Find and identify model, tokenizer and data, telling how far it has read. Raises
    `ModelError`, `DataError`, `InputError`.
    """
    section, data, task = job.model, job.data, objective_of(job.task)
    choice = ModelChoice(
        section.model_name_or_path,
        section.revision,
        section.tokenizer_name_or_path,
        section.init,
        section.attn_implementation,
        section.trust_remote_code,
        section.rope_scaling,
        section.new_tokens,
    )
    config = load_config(choice)
    refuse_model(config.to_dict(), job.task, choice.name, job.method.name)
    day = began(Path(job.output_dir))
    tokenizer = load_tokenizer(choice, data.chat_template, of_words=task.scores_words)
    limits = [n for n in (max_positions(config), tokenizer.model_max_length) if n]
    max_length = data.max_length or min([job.max_length, *limits])
    lengths = {"data.max_length": max_length}
    if task.is_pair:
        lengths["data.max_target_length"] = data.max_target_length
    check_fits(config, tokenizer, lengths, choice)
    source_lang, target_lang = set_languages(
        tokenizer, job.task, data.source_lang, data.target_lang
    )
    keeps_classes = task.reads_labels and choice.init == "pretrained"
    recipe = replace(
        recipe_of(job, max_length, tokenizer.chat_template, day),
        source_lang=source_lang,
        target_lang=target_lang,
        model_classes=class_names(config) if keeps_classes else (),
    )
    read = partial(
        open_sources,
        cache_dir=Path(job.cache_dir or "."),
        config_name=data.dataset_config_name,
        layout=data.layout,
        progress=lambda what, done, total: emit(ReadingData(what, done, total)),
        warn=lambda text: emit(Warned(text)),
    )
    train = read(data.train, split=data.train_split, own=data.of_train)
    held_out = read(data.eval, split=data.eval_split, own=data.of_eval) if data.eval else []
    weights = [source.weight for source in train]
    identity = {
        **job.identity(),
        "data.train (content)": [source.identity for source in train],
        "data.eval (content)": [source.identity for source in held_out],
        "tokenizer (content)": tokenizer_sha256(tokenizer),
        **({"data.train (weights)": weights} if any(weight != 1 for weight in weights) else {}),
        MODEL_CONTENT: model_sha256(choice, config, Path(job.cache_dir) if job.cache_dir else None),
        **{
            f"tokenization.{key}": value
            for key, value in asdict(recipe).items()
            if key != "label_names"
        },
    }
    identity |= ancestor_identity(job, identity)
    return RunSpec(
        job=job,
        task=job.task,
        objective=task,
        objective_settings=job.objective,
        choice=choice,
        config=config,
        tokenizer=tokenizer,
        pad_id=_pad_id(config, tokenizer, task),
        from_run=section.from_run,
        data=data,
        train_sources=train,
        eval_sources=held_out,
        recipe=recipe,
        cache_dir=Path(job.cache_dir or "."),
        method=job.method,
        train=job.train,
        learning_rate=job.learning_rate,
        global_batch_size=job.global_batch_size,
        micro_batch_size=job.micro_batch_size,
        says_micro_batch=job.says_micro_batch,
        writing=Writing(tokenizer, data.max_target_length) if job.writes_texts else None,
        metric=(job.train.metric_for_best_model or "loss").removeprefix("eval_"),
        where=job.where,
        usd_per_hour=job.usd_per_hour,
        identity=identity,
        fingerprint=job.fingerprint,
    )


def _pad_id(config: Any, tokenizer: Any, objective: Objective) -> int:
    """The token that fills a batch; its positions are masked, so any will do.

    But for classification, where some models look for the last token that is not what their own
    config calls padding.
    """
    text_config = config.get_text_config()
    own = None if objective.scores_tokens else getattr(text_config, "pad_token_id", None)
    if own is not None and 0 <= own < text_config.vocab_size:
        return int(own)
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in found if token is not None), 0)


def open_examples(
    spec: RunSpec, emit: Emit, should_stop: Callable[[], bool] = lambda: False
) -> tuple[Examples, Examples | None]:
    """(train, eval) examples, tokenized or from the cache. Raises `DataError`,
    `RunInterruptedError`.
    """
    data, n_chunks = spec.data, 0

    def tokens_of(role: str, sources: list[Source], recipe: TokenRecipe) -> TokenSet:
        def progress(rows: int, n_tokens: int, share: float) -> None:
            nonlocal n_chunks
            n_chunks += 1
            emit(Tokenizing(role, rows, n_tokens, share))

        tokens = tokenize(
            sources,
            spec.tokenizer,
            recipe,
            spec.cache_dir,
            progress=progress,
            should_stop=should_stop,
            warn=lambda text: emit(Warned(text)),
        )
        with contextlib.suppress(OSError):  # a plan would have to do without
            both, folder = (spec.train_sources, spec.eval_sources), tokens.folder
            note_token_set(spec.job, role, *both, folder, cache_dir=spec.cache_dir)
        _say_data(role, tokens, emit)
        return tokens

    train_tokens = tokens_of("train", spec.train_sources, spec.recipe)
    train, held_out = np.arange(len(train_tokens)), None
    if spec.eval_sources:
        recipe = replace(spec.recipe, label_names=train_tokens.label_names)
        eval_tokens = tokens_of("eval", spec.eval_sources, recipe)
        held_out = Examples(eval_tokens, np.arange(len(eval_tokens))[: data.max_eval_samples])
    elif data.eval_fraction > 0:
        train, chosen = split_by_input(
            train_tokens.groups, data.eval_fraction, spec.train.seed, train_tokens.inputs
        )
        n_inputs = int(train_tokens.facts["n_distinct_inputs"]) if len(chosen) else 0
        refuse_too_few(n_inputs, spec.train_sources[0].name)
        held_out = Examples(train_tokens, chosen[: data.max_eval_samples])
    weights = tuple(source.weight for source in spec.train_sources)
    examples = Examples(train_tokens, train[: data.max_train_samples], n_chunks == 0, weights)
    for text in _doubts(spec, examples, held_out):
        emit(Warned(text))
    return examples, held_out


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
            notes=tokens.notes,
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


def _doubts(spec: RunSpec, train: Examples, held_out: Examples | None) -> Iterator[str]:
    """What to look at in the examples, as notes. Raises `DataError` for data of one class, of which
    nothing can be learned.
    """
    names, label_map = train.tokens.label_names, spec.recipe.label_map
    has_classes = train.tokens.labels is not None and bool(names)
    if has_classes:
        sources = [source["name"] for source in train.tokens.facts["sources"]]
        seen = np.unique(_labels_of(train), axis=0).tolist()
        refuse_one_class([names[each] if isinstance(each, int) else each for each in seen], sources)
        alike: dict[str, list[str]] = {}
        for name in names:
            alike.setdefault(" ".join(name.lower().split()), []).append(name)
        if found := [" and ".join(map(repr, each)) for each in alike.values() if len(each) > 1]:
            yield (
                "labels that differ in capitals or spaces alone are different classes:"
                f" {', '.join(found[:5])}; make them one with data.label_map, or in the data"
            )
        if idle := [f"{key!r} ({name!r})" for key, name in label_map.items() if name not in names]:
            classes = ", ".join(map(repr, names[:8])) + (" ..." if len(names) > 8 else "")
            yield (
                f"data.label_map names values that no row has: {', '.join(idle[:5])}; the classes"
                f" are {classes}"
            )
    if held_out is None:
        return
    if has_classes and held_out.tokens.labels is not None:
        of_train, of_held_out = (_classes_in(_labels_of(each)) for each in (train, held_out))
        if unseen := sorted(of_held_out - of_train):
            some = ", ".join(repr(held_out.tokens.label_names[label]) for label in unseen[:5])
            yield (
                f"{len(unseen)} labels are in the evaluation data and never seen in training"
                f" ({some}): they count as errors"
            )
    groups = train.tokens.groups[train.indices]
    is_shared = np.isin(held_out.tokens.groups[held_out.indices], groups)
    if spec.eval_sources and is_shared.any():
        first = held_out.tokens.place(int(held_out.indices[int(np.argmax(is_shared))]))
        yield (
            f"{int(is_shared.sum()):,} of {len(held_out):,} evaluation examples have an input that"
            f" is trained on too (the first: {first}): the evaluation is too good by that; leave"
            " them out of one of the files"
        )


def _labels_of(examples: Examples) -> NDArray[Any]:
    found = examples.tokens.labels_of(examples.indices)
    assert found is not None
    return found


def _classes_in(labels: NDArray[Any]) -> set[int]:
    """The classes that occur in labels [n], or are marked in [n, C]."""
    return set((np.flatnonzero(labels.any(0)) if labels.ndim > 1 else np.unique(labels)).tolist())
