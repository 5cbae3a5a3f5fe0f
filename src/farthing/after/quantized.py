"""A run's model in fewer bits, judged before it is kept: GGUF files and compressed-tensors folders.

The model is merged first, into a folder that goes away again; what was written is read back and
held against it on held-out examples of the run.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from farthing.after.chat import trained_on_chats
from farthing.after.held_out import held_out_of
from farthing.after.judge import Verdict, judge
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
from farthing.storage.files import Json, bytes_below, install_folder

WHOLE = ("adapter", "merged")
FORMATS = ("gguf", "fp8", "w8a16", "w4a16")
MOST_EXAMPLES = 200
MOST_KL = 0.1


@dataclass(frozen=True)
class Wish:
    form: str
    """One of `FORMATS`."""
    bits: str = "q8_0"
    """Of a GGUF file."""
    max_kl: float = MOST_KL
    is_forced: bool = False
    """Keep it whatever the judgement, or without one where the data is gone."""
    data: Path | None = None
    """Examples to judge on, instead of the run's own."""
    trust_remote_code: bool = False


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

    Raises `InputError` for what a form has not.
    """
    if form not in (*WHOLE, *FORMATS):
        raise InputError(
            f"there is no format {form!r}",
            where="--format",
            to_do=f"use one of {', '.join((*WHOLE, *FORMATS))}",
        )
    given = {
        "--bits": bits is not None and form != "gguf",
        "--dtype": dtype is not None and form != "merged",
        "--max-kl": max_kl is not None and form in WHOLE,
        "--force": is_forced and form in WHOLE,
        "--data": data is not None and form in WHOLE,
    }
    for name, is_odd in given.items():
        if is_odd:
            raise InputError(f"--format {form} has no {name}", where=name, to_do="leave it out")
    if max_kl is not None and not max_kl >= 0:
        raise InputError("a limit is 0 or more", where="--max-kl", to_do="e.g. --max-kl 0.1")
    if form in WHOLE:
        return export_run(run, folder, form, dtype, trust_remote_code=trust_remote_code)
    wanted = (bits or "q8_0").lower()
    if wanted not in (*BITS, *K_BITS):
        raise InputError(
            f"there is no {wanted!r}",
            where="--bits",
            to_do=f"use one of {', '.join((*BITS, *K_BITS))}",
        )
    limit = MOST_KL if max_kl is None else max_kl
    return export_quantized(
        run, folder, Wish(form, wanted, limit, is_forced, data, trust_remote_code)
    )


def export_quantized(run: Path, folder: Path, wish: Wish) -> Json:
    """Write the run's model to the new `folder` as wished; returns what was written and how it was
    judged.

    Raises `InputError` before a byte is written for what the form can't hold, `ModelError` for a
    judgement above the limit.
    """
    quiet_libraries()
    refuse_used(folder)
    source = whole_model(run)
    job = trusted_job(run, wish.trust_remote_code)
    tokenizer = load_tokenizer(ModelChoice(str(source)), None)
    beside = source / MODEL_CONFIG
    config = AutoConfig.from_pretrained(
        beside if beside.exists() else source, trust_remote_code=wish.trust_remote_code
    )
    name = run.resolve().name
    gguf, compression = None, None
    if wish.form == "gguf":
        gguf = plan_gguf(
            config, tokenizer, job["task"], wish.bits, name, is_chat=trained_on_chats(job)
        )
    else:
        compression = plan_compressed(
            config, job["task"], wish.form, trust_remote_code=wish.trust_remote_code
        )
    held_out = _held_out(run, wish)
    said: Json = {"folder": str(folder), "format": wish.form, "bits": wish.bits if gguf else None}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as work:
        merged_folder = Path(work) / "merged"
        export_run(run, merged_folder, "merged", trust_remote_code=wish.trust_remote_code)

        def load(place: Path) -> Any:
            return _load_whole(place, job["task"], wish)

        def fill(draft: Path) -> None:
            if gguf:
                path = draft / "model.gguf"
                write_gguf(gguf, merged_folder, path, wish.bits)
                said.update(method=f"GGUF {wish.bits}", notes=list(gguf.notes))
                compressed = load(merged_folder)
                compressed.load_state_dict(dict(read_back(gguf, path, merged_folder)), strict=False)
                stops = (
                    merged_folder / GENERATION_CONFIG
                ).exists() and compressed.generation_config
                text, notes = modelfile(tokenizer, stops or None, is_chat=trained_on_chats(job))
                (draft / "Modelfile").write_text(text, encoding="utf-8")
                said["notes"] += notes
            elif compression:
                write_compressed(compression, merged_folder, draft)
                said.update(method=compression.in_words(), notes=[])
                save_tokenizer(tokenizer, draft)
                compressed = load(draft)
            verdict = None if held_out is None else judge(load(merged_folder), compressed, held_out)
            said["judged"] = None if verdict is None else verdict.to_json()
            said["judged_in_words"] = (
                "not judged: its data is gone" if verdict is None else verdict.in_words()
            )
            _refuse_far(verdict, wish)
            public = {
                key: value for key, value in said.items() if key != "folder"
            }  # no path of this machine
            (draft / "export.json").write_text(
                json.dumps(public, indent=1, allow_nan=False) + "\n", encoding="utf-8"
            )
            card = model_card(build_receipt(run), is_merged=True, in_form=_on_card(said, verdict))
            (draft / CARD).write_text(card, encoding="utf-8")

        install_folder(folder, fill)
    said["bytes"] = bytes_below(folder)
    return said


def _load_whole(folder: Path, task: str, wish: Wish) -> Any:
    """The model in a folder, all of whose weights were found there. Raises `ModelError`."""
    trust = {"trust_remote_code": wish.trust_remote_code}
    try:
        model, loading = auto_class(task).from_pretrained(
            folder, use_safetensors=True, dtype="auto", output_loading_info=True, **trust
        )
        lacks = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
        why = f"it finds no {lacks[0]}" if lacks else ""
    except (
        Exception
    ) as error:  # of a library, in the middle of a family that it does not know in this form
        why = f"{type(error).__name__}: {error}"
    if why:
        raise ModelError(
            f"transformers can't load the model in this form, so it was deleted: {why}",
            where=f"--format {wish.form}",
            to_do="use --format merged, or gguf where llama.cpp has the family",
        )
    return model.eval()


def _held_out(run: Path, wish: Wish) -> Any:
    """What the model is judged on; None where there is none and the person insists. Raises
    `InputError`.
    """
    try:
        return held_out_of(run, wish.data, MOST_EXAMPLES, trust_remote_code=wish.trust_remote_code)
    except InputError:
        if not wish.is_forced:
            raise
        return None


def _refuse_far(verdict: Verdict | None, wish: Wish) -> None:
    """Raises `ModelError` for a model that answers otherwise than the merged one."""
    if verdict is None or wish.is_forced or verdict.mean_kl <= wish.max_kl:
        return
    raise ModelError(
        f"its answers differ from the merged model's, so it was deleted: {verdict.in_words()}",
        where=f"--max-kl {wish.max_kl:g}",
        to_do="choose more bits (--bits q8_0, --format w8a16), or keep it as it is with --force",
    )


def _on_card(said: Json, verdict: Verdict | None) -> list[str]:
    judged = (
        "It was not judged: the run's data is gone."
        if verdict is None
        else f"Against the merged model: {verdict.in_words()}."
    )
    return [
        "",
        "## Form",
        "",
        f"{said['method']}. {judged}",
        *(f"- {note}" for note in said["notes"]),
    ]
