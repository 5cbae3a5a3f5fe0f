"""A run's model in fewer bits, judged before it is kept: GGUF files and compressed-tensors folders.

The model is merged first, into a folder that goes away again; the export is read back and compared
with it on held-out examples of the run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, GenerationConfig

from farthing.after.held_out import HeldOut, held_out_of
from farthing.after.judge import judge
from farthing.config.job import Job
from farthing.errors import InputError, ModelError
from farthing.export.compressed import plan_compressed, write_compressed
from farthing.export.folders import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    export_run,
    refuse_used,
    save_tokenizer,
    trusted_job,
    whole_model,
)
from farthing.export.gguf_file import BITS, K_BITS, plan_gguf, read_back, write_gguf
from farthing.export.modelfile import modelfile
from farthing.model.load import ModelChoice, auto_class, load_tokenizer, quiet_libraries
from farthing.report.card import model_card
from farthing.report.receipt import build_receipt
from farthing.run.exported import CARD
from farthing.run.folder import trained_on_chats
from farthing.storage.files import DRAFT, Json, bytes_below, install_folder, write_json, write_text

WHOLE = ("adapter", "merged")
FORMATS = ("gguf", "fp8", "w8a16", "w4a16")
MOST_EXAMPLES = 200
MOST_KL = 0.1


class _Quantizer(NamedTuple):
    """How a model is written in fewer bits."""

    method: str
    write: Callable[[Path, Path], tuple[Any, list[str]]]
    """(folder of the merged model, new folder) -> the model read back from there, notes"""


def export_as(
    run: Path,
    folder: Path,
    form: str,
    *,
    dtype: str | None = None,
    bits: str | None = None,
    max_kl: float | None = None,
    is_forced: bool = False,
    data: Path | None = None,
    trust_remote_code: bool = False,
) -> Json:
    """Write the run's model to the new `folder` as `form`: adapter, merged or one of `FORMATS`.
    Returns what was written, and how it was judged on the run's held-out examples or on `data`.

    With `is_forced` it is kept whatever the judgement, or without one where the data is gone.
    Raises `InputError` for what a form has not or can't hold, before a byte is written;
    `ModelError` for a judgement above `max_kl`.
    """
    wanted = str(bits or "q8_0").lower()
    for name, value, known in (
        ("--format", form, (*WHOLE, *FORMATS)),
        ("--bits", wanted, (*BITS, *K_BITS)),
    ):
        if value not in known:
            what = f"there is no {value!r}"
            raise InputError(what, where=name, to_do=f"use one of {', '.join(known)}")
    misplaced = {
        "--bits": bits is not None and form != "gguf",
        "--dtype": dtype is not None and form != "merged",
        "--max-kl": max_kl is not None and form in WHOLE,
        "--force": is_forced and form in WHOLE,
        "--data": data is not None and form in WHOLE,
    }
    for name, is_odd in misplaced.items():
        if is_odd:
            raise InputError(f"--format {form} has no {name}", where=name, to_do="leave it out")
    if form in WHOLE:
        return export_run(run, folder, form, dtype, trust_remote_code=trust_remote_code)
    limit = MOST_KL if max_kl is None else max_kl
    if not limit >= 0:
        raise InputError("a limit is 0 or more", where="--max-kl", to_do="e.g. --max-kl 0.1")
    quiet_libraries()
    refuse_used(folder)
    quantizer = _quantizer(run, trusted_job(run, trust_remote_code), form, wanted)
    held_out: HeldOut | None = None
    try:
        held_out = held_out_of(run, data, MOST_EXAMPLES, trust_remote_code=trust_remote_code)
    except InputError:
        if not is_forced:
            raise
    said: Json = {"format": form, "bits": wanted if form == "gguf" else None}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}{DRAFT}", dir=folder.parent) as work:
        merged = Path(work) / "merged"
        export_run(run, merged, "merged", trust_remote_code=trust_remote_code)

        def fill(draft: Path) -> None:
            compressed, notes = quantizer.write(merged, draft)
            words, judged = "not judged: its data is gone", None
            if held_out is not None:
                whole = _load(merged, held_out.spec.job, form)
                verdict = judge(whole, compressed, held_out)
                words, judged = verdict.in_words(), verdict.to_json()
                if verdict.mean_kl > limit and not is_forced:
                    raise ModelError(
                        f"its answers differ from the merged model's, so it was deleted: {words}",
                        where=f"--max-kl {limit:g}",
                        to_do="choose more bits (--bits q8_0, --format w8a16), or keep it as it is"
                        " with --force",
                    )
            said.update(method=quantizer.method, notes=notes, judged=judged, judged_in_words=words)
            write_json(draft / "export.json", said)
            against = f"Against the merged model: {words}" if judged else f"It was {words}"
            lines = ["", "## Form", "", f"{quantizer.method}. {against}."]
            lines += [f"- {note}" for note in notes]
            card = model_card(build_receipt(run), is_merged=True, in_form=lines)
            write_text(draft / CARD, card)

        install_folder(folder, fill)
    return {"folder": str(folder), **said, "bytes": bytes_below(folder)}


def _quantizer(run: Path, job: Job, form: str, bits: str) -> _Quantizer:
    """Raises `InputError` for a model that the form can't hold."""
    source, trust = whole_model(run), {"trust_remote_code": job.model.trust_remote_code}
    tokenizer = load_tokenizer(ModelChoice(str(source)), None)
    path = source / MODEL_CONFIG
    config = AutoConfig.from_pretrained(path if path.exists() else source, **trust)
    if form != "gguf":
        compression = plan_compressed(config, job.task, form, **trust)

        def write_folder(merged: Path, draft: Path) -> tuple[Any, list[str]]:
            write_compressed(compression, merged, draft)
            save_tokenizer(tokenizer, draft)
            return _load(draft, job, form), []

        return _Quantizer(compression.method, write_folder)
    is_chat = trained_on_chats(run)
    plan = plan_gguf(config, tokenizer, job.task, bits, run.resolve().name, is_chat=is_chat)

    def write_file(merged: Path, draft: Path) -> tuple[Any, list[str]]:
        path, said = draft / "model.gguf", merged / GENERATION_CONFIG
        stops = GenerationConfig.from_pretrained(merged) if said.exists() else None
        ends = getattr(stops, "eos_token_id", None)
        if is_chat and isinstance(ends, list):  # of others llama.cpp knows some by their text
            plan.settings["eot_token_id"] = ends[-1]
        write_gguf(plan, merged, path, bits)
        model = _load(merged, job, form)
        model.load_state_dict(dict(read_back(plan, path, merged)), strict=False)
        text, notes = modelfile(tokenizer, stops, is_chat=is_chat)
        write_text(draft / "Modelfile", text)
        return model, [*plan.notes, *notes]

    return _Quantizer(f"GGUF {bits}", write_file)


def _load(folder: Path, job: Job, form: str) -> Any:
    """The model in a folder, all of whose weights were found there. Raises `ModelError`."""
    try:
        model, loading = auto_class(job.task).from_pretrained(
            folder,
            use_safetensors=True,
            dtype="auto",
            output_loading_info=True,
            trust_remote_code=job.model.trust_remote_code,
        )
        lacks = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
        why = f"it finds no {lacks[0]}" if lacks else ""
    except Exception as error:  # of a library, within a family that it does not know in this form
        why = f"{type(error).__name__}: {error}"
    if why:
        raise ModelError(
            f"transformers can't load the model in this form, so it was deleted: {why}",
            where=f"--format {form}",
            to_do="use --format merged, or gguf where llama.cpp has the family",
        )
    return model.eval()
