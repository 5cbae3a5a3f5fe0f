"""A trained model for others: a Hugging Face folder (safetensors, tokenizer, model card),
adapter-only or merged.

The folder appears whole or not at all, and a merged model only after it was read back and has
answered as the adapter does. What a run exports follows from the run, not from how often it was
killed: only the bill on the card tells of that.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig

from farthing.config.job import Job
from farthing.errors import InputError, ModelError
from farthing.model.adapter_start import as_one_adapter
from farthing.model.adapters import break_ties
from farthing.model.load import (
    ModelChoice,
    auto_class,
    load_config,
    load_model,
    load_tokenizer,
    model_sha256,
    quiet_libraries,
)
from farthing.model.same_answers import answers, refuse_other_answers
from farthing.report.card import model_card
from farthing.report.receipt import build_receipt
from farthing.report.receipt_types import RunReceipt
from farthing.report.words import lines
from farthing.run.exported import CARD, damage_of, seal_export
from farthing.run.folder import JOB, MODEL, RUN, kept, kept_job
from farthing.storage.files import (
    MANIFEST,
    Json,
    bytes_below,
    install_folder,
    read_json,
    sweep_drafts,
    write_text,
)

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "model_config.json"
"""The configuration of an adapter's whole model. It is not called config.json: a folder that has
one beside an adapter is taken by transformers for a whole model."""
WRITE_AGAIN = (
    "run `farthing train` with its job again: it writes the model again from the checkpoint"
)


def export_model(
    folder: Path,
    model: Any,
    tokenizer: Any,
    receipt: RunReceipt,
    step: int,
    trained: dict[str, Tensor] | None = None,
) -> None:
    """Write `model` as it was trained (an adapter, or the whole model), its tokenizer, a card and a
    manifest. `trained` are its trained tensors, where the model itself has rows of them only.

    An adapter comes with the configuration of the whole and how it generates, so that the names of
    its classes and the language that it was taught to write are not lost.
    """

    def fill(draft: Path) -> None:
        model.config.use_cache = True
        tensors = None
        if trained is not None:
            frozen = {n: w for n, w in model.named_parameters() if not w.requires_grad}
            tensors = {name: weight.detach().cpu() for name, weight in frozen.items()} | trained
        try:
            with as_one_adapter(model) as whole:
                model.save_pretrained(draft, safe_serialization=True, state_dict=whole or tensors)
            if (draft / ADAPTER_CONFIG).exists():
                _sort_layers(draft / ADAPTER_CONFIG)
                model.config.to_json_file(draft / MODEL_CONFIG)
                if (inner := model.get_base_model()).can_generate():
                    inner.generation_config.save_pretrained(draft)
        finally:
            model.config.use_cache = False
        save_tokenizer(tokenizer, draft)
        write_text(draft / CARD, model_card(receipt, step=step, is_merged=False))
        seal_export(draft)

    install_folder(folder, fill)


def write_card(run: Path, receipt: RunReceipt) -> None:
    """Bring the card of a run's exported model, if there is one, up to its receipt. Raises
    `OSError`.
    """
    folder = run / MODEL
    if folder.is_dir() and not folder.is_symlink():
        write_text(folder / CARD, model_card(receipt, is_merged=False))


def _sort_layers(path: Path) -> None:
    """Sort the names of layers, which `peft` keeps as a set, in another order in every process."""
    values = read_json(path)
    for key in ("target_modules", "exclude_modules"):
        if isinstance(values.get(key), list):
            values[key].sort()
    path.write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Without the truncation and padding that the last call asked it for: those are of one attempt,
    not of the model. With the templates that it has beside the one for chats, for tools or
    documents."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    others, used = getattr(tokenizer, "other_templates", None), tokenizer.chat_template
    try:
        if isinstance(others, dict):
            tokenizer.chat_template = others if used is None else {**others, "default": used}
        tokenizer.save_pretrained(
            folder, save_jinja_files=not isinstance(others, dict)
        )  # several: in its configuration
    finally:
        tokenizer.chat_template = used


def whole_model(run: Path) -> Path:
    """The folder of a run's model. Raises `InputError` where there is none, or a damaged one."""
    source = run / MODEL
    if not source.is_dir():
        raise InputError(
            "this run has exported no model yet",
            where=str(run),
            to_do="finish it with `farthing train`",
        )
    if damage := damage_of(run):
        what = f"the run's model is damaged: {damage}"
        raise InputError(what, where=str(source), to_do=WRITE_AGAIN)
    return source


def refuse_used(folder: Path) -> None:
    """Raises `InputError` where something is in the folder already, or a file is in its place; what
    a killed export left beside it is removed.
    """
    at = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not at.is_dir():
        what = "a file or a broken link, where a folder is to be written"
        raise InputError(what, where=str(at), to_do="name a new folder with --output")
    if at == folder and any(folder.iterdir()):
        raise InputError(
            "the folder is not empty", where=str(folder), to_do="name a new one with --output"
        )
    sweep_drafts(folder.parent, (folder.name,))


def export_run(
    run: Path, folder: Path, form: str, dtype: str | None = None, *, trust_remote_code: bool = False
) -> Json:
    """Write the model of a run to `folder` as `adapter` (what was trained) or `merged` (the whole,
    ready to serve). Returns what was written.

    Raises `InputError` when the run has no model, or a damaged one, or no adapter, or `folder` is
    in use; `ModelError` when the model that was written does not answer as the trained one.
    """
    quiet_libraries()
    source, receipt = whole_model(run), build_receipt(run)
    kept_job(run)  # the card tells of it
    refuse_used(folder)
    is_adapter = (source / ADAPTER_CONFIG).exists()
    if form == "merged":
        _write_merged(run, source, folder, dtype, trust_remote_code, receipt)
    elif not is_adapter:
        raise InputError(
            "a full fine-tune has no adapter", where=str(run), to_do="use --format merged"
        )
    else:

        def fill(draft: Path) -> None:
            ignored = shutil.ignore_patterns(MANIFEST)
            shutil.copytree(source, draft, dirs_exist_ok=True, ignore=ignored)
            write_text(draft / CARD, model_card(receipt, is_merged=False))

        install_folder(folder, fill)
    notes = lines("receipt.txt", "damage", receipt)
    return {"folder": str(folder), "format": form, "bytes": bytes_below(folder), "notes": notes}


def trusted_job(run: Path, trust_remote_code: bool) -> Job:
    """The job of a run. Raises `RunDamagedError`, and `InputError` where it needs code that nobody
    has said to trust, or is of another version.
    """
    try:
        job = Job.model_validate(kept_job(run))
    except ValueError as error:
        raise InputError(
            "its job is that of another version of farthing",
            where=str(run),
            to_do="use the version that trained it",
        ) from error
    if job.model.trust_remote_code and not trust_remote_code:
        raise InputError(
            "its job allows the Python code that comes with the base model to run",
            where=str(run / JOB),
            to_do="read that code; if you trust it: --trust-remote-code",
        )
    return job


def trained_model(
    run: Path, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False
) -> Any:
    """The model of a run in evaluation mode: an adapter on its base, or the whole. Raises as
    `export_run` does.
    """
    source, job = whole_model(run), trusted_job(run, trust_remote_code)
    if (source / ADAPTER_CONFIG).exists():
        return _adapted(job, source, dtype)
    return _read(source, job, dtype)


def untrained_model(
    run: Path, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False
) -> Any:
    """The model that the run began with, in evaluation mode; a head that the base lacks is drawn
    as it was. Raises `ModelError`.
    """
    job = trusted_job(run, trust_remote_code)
    return _base_of(run, job, tuned_config(whole_model(run)), dtype).eval()


def _base_of(run: Path, job: Job, tuned: Json, dtype: torch.dtype) -> Any:
    """The model that a run began with. Raises `ModelError` where its files are others by now."""
    model, of_text = job.model, tuned.get("text_config") or tuned
    choice = ModelChoice(  # the attention of the job may need a GPU, and is none of the weights
        model.model_name_or_path,
        model.revision,
        init=model.init,
        trust_remote_code=model.trust_remote_code,
        rope_scaling=model.rope_scaling,
    )
    config, cache = load_config(choice), Path(job.cache_dir) if job.cache_dir else None
    known = (kept(run / RUN) or {}).get("identity", {}).get("model (content)")
    if known not in (None, model_sha256(choice, config, cache)):
        what = "its weights or configuration are not those that the run began with"
        to_do = "put those back; of a model on the Hub the revision of that day"
        raise ModelError(what, where=choice.name, to_do=to_do)
    # transformers leaves out the names that it would make up itself
    names = {int(index): str(name) for index, name in tuned.get("id2label", {}).items()}
    classes = tuple(name for _, name in sorted(names.items())) or ("LABEL_0", "LABEL_1")
    return load_model(
        choice,
        config,
        job.task,
        dtype=dtype,
        seed=job.train.seed,
        label_names=classes,
        pad_id=of_text.get("pad_token_id"),
        n_words=of_text.get("vocab_size") if model.new_tokens else None,
    )


def _adapted(job: Job, source: Path, dtype: torch.dtype) -> Any:
    """The adapter in `source` on its base."""
    import peft

    base = _base_of(source.parent, job, tuned_config(source), dtype)
    if (source / GENERATION_CONFIG).exists():
        base.generation_config = GenerationConfig.from_pretrained(source)
    with safe_open(source / ADAPTER_WEIGHTS, framework="pt") as weights:
        break_ties(base, weights.keys())
    with warnings.catch_warnings():  # an untied output layer is saved beside the embedding
        warnings.simplefilter("ignore")
        # else peft reads the adapter onto a GPU, which another run may have filled
        return peft.PeftModel.from_pretrained(base, source, torch_device="cpu").eval()


def _read(folder: Path, job: Job, dtype: torch.dtype | str) -> Any:
    """A whole model in a folder, in evaluation mode."""
    trusts = job.model.trust_remote_code
    return (
        auto_class(job.task)
        .from_pretrained(folder, use_safetensors=True, dtype=dtype, trust_remote_code=trusts)
        .eval()
    )


def _write_merged(
    run: Path,
    source: Path,
    folder: Path,
    dtype: str | None,
    trust_remote_code: bool,
    receipt: RunReceipt,
) -> None:
    """Write the whole model into a folder; read back from there it must answer as it did. Raises
    `ModelError`.
    """
    job = trusted_job(run, trust_remote_code)
    tokenizer = load_tokenizer(ModelChoice(str(source)), None)
    is_adapter = (source / ADAPTER_CONFIG).exists()
    asked = getattr(torch, dtype or "float32")
    model = _adapted(job, source, asked) if is_adapter else _read(source, job, "auto")
    expected = answers(model)
    if is_adapter:
        with warnings.catch_warnings():  # of weights that are no longer tied
            warnings.simplefilter("ignore")
            model = model.merge_and_unload()
    elif dtype:
        del model
        model = _read(source, job, asked)

    def fill(draft: Path) -> None:
        model.config.use_cache = True
        model.save_pretrained(draft, safe_serialization=True)
        save_tokenizer(tokenizer, draft)
        write_text(draft / CARD, model_card(receipt, is_merged=True))
        model.to("meta")  # its memory is for the copy that is read back
        written = _read(draft, job, "auto")
        found, base = answers(written), job.model.model_name_or_path
        refuse_other_answers(found, expected, written.dtype, base)

    install_folder(folder, fill)


def tuned_config(source: Path) -> Json:
    """The configuration of the whole model, which stands beside an adapter too. Raises
    `ModelError`.
    """
    path = source / MODEL_CONFIG
    path = path if path.exists() else source / "config.json"
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        what = f"the adapter's configuration can't be read ({type(error).__name__})"
        raise ModelError(what, where=str(path), to_do=WRITE_AGAIN) from error
