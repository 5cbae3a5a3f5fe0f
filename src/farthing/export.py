"""A trained model for others: a Hugging Face folder (safetensors, tokenizer, model card), adapter-only or merged.

The folder appears whole or not at all. Refuses to train.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from farthing.durability.files import install_folder
from farthing.durability.run_folder import JOB, MODEL, kept_job
from farthing.errors import UserMistake
from farthing.model.load import AUTO_CLASSES, ModelChoice, load_config, load_model, load_tokenizer, quiet_libraries
from farthing.report.card import model_card
from farthing.report.receipt import build_receipt

ADAPTER_CONFIG = "adapter_config.json"


def export_model(folder: Path, model: Any, tokenizer: Any, receipt: dict[str, Any], step: int) -> None:
    """Write `model` as it was trained (an adapter, or the whole model), its tokenizer and a card with the receipt.

    An adapter comes with the configuration of the whole, so that the names of its classes are not lost.
    """

    def fill(draft: Path) -> None:
        model.config.use_cache = True
        try:
            model.save_pretrained(draft, safe_serialization=True)
            model.config.save_pretrained(draft)
        finally:
            model.config.use_cache = False
        tokenizer.save_pretrained(draft)
        (draft / "README.md").write_text(model_card(receipt, step, is_merged=False), encoding="utf-8")

    install_folder(folder, fill)


def export_run(
    run: Path, folder: Path, form: str, dtype: str | None = None, *, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Write the model of a run to `folder` as `adapter` (what was trained) or `merged` (the whole, ready to serve).

    Whether code that came with the base model may run is not the run folder's to say. Returns what was written. Raises
    `UserMistake` when the run has no model, or no adapter, or `folder` is in use.
    """
    quiet_libraries()
    source = run / MODEL
    if not source.is_dir():
        raise UserMistake("this run has exported no model yet", where=str(run), to_do="let `farthing train` finish it")
    if folder.exists() and any(folder.iterdir()):
        raise UserMistake("the folder is not empty", where=str(folder), to_do="name a new one with --output")
    is_adapter = (source / ADAPTER_CONFIG).exists()
    if form == "adapter":
        if not is_adapter:
            raise UserMistake("a full fine-tune has no adapter", where=str(run), to_do="use --format merged")
        install_folder(folder, lambda draft: _copy(source, draft))
    elif is_adapter:
        _merge(run, source, folder, dtype, trust_remote_code)
    else:
        _recast(run, source, folder, dtype)
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"folder": str(folder), "format": form, "bytes": n_bytes}


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


def _merge(run: Path, source: Path, folder: Path, dtype: str | None, trust_remote_code: bool) -> None:
    import peft

    job = kept_job(run)
    section = job["model"]
    if section["trust_remote_code"] and not trust_remote_code:
        raise UserMistake(
            "its job lets Python code run that comes with the base model",
            where=str(run / JOB),
            to_do="read that code; if you trust it: --trust-remote-code",
        )
    choice = ModelChoice(
        section["model_name_or_path"],
        section["revision"],
        None,
        section["init"],
        section["attn_implementation"],
        trust_remote_code,
    )
    tuned = load_config(ModelChoice(str(source)))
    base = load_model(
        choice,
        load_config(choice),
        job["task"],
        dtype=getattr(torch, dtype or "float32"),
        seed=job["train"]["seed"],
        label_names=tuple(name for _, name in sorted(tuned.id2label.items()))
        if job["task"] == "classification"
        else (),
        pad_id=tuned.pad_token_id,
    )
    with warnings.catch_warnings():  # of an output layer that is no longer tied to the embedding: it is saved beside it
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base, source).merge_and_unload()
    _write_whole(run, model, source, folder)


def _recast(run: Path, source: Path, folder: Path, dtype: str | None) -> None:
    job = kept_job(run)
    wanted = getattr(torch, dtype) if dtype else "auto"
    model = AUTO_CLASSES[job["task"]].from_pretrained(source, use_safetensors=True, dtype=wanted)
    _write_whole(run, model, source, folder)


def _write_whole(run: Path, model: Any, source: Path, folder: Path) -> None:
    receipt = build_receipt(run)

    def fill(draft: Path) -> None:
        model.config.use_cache = True
        model.save_pretrained(draft, safe_serialization=True)
        load_tokenizer(ModelChoice(str(source)), None).save_pretrained(draft)
        step = receipt["exported_step"] or receipt["steps"]
        (draft / "README.md").write_text(model_card(receipt, step, is_merged=True), encoding="utf-8")

    install_folder(folder, fill)
