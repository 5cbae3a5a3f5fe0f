"""LLaMA-Factory's YAML or JSON, with the `dataset_info.json` that it names data by
(github.com/hiyouga/LLaMA-Factory).
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from farthing.config.importers import hf, preference
from farthing.config.importers.axolotl import chat_columns
from farthing.config.importers.tables import (
    Imported,
    UnmatchedError,
    defaults,
    fact,
    is_true,
    names,
    read_keys,
)
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.storage.files import Json, small_text

NAME = "llama-factory"
MAX_REGISTRY_BYTES = 16 << 20


def read(values: Json, out: Imported) -> None:
    is_v1 = "train_dataset" in values or "peft_config" in values  # its new engine
    if values.get("stage") == "pt" and values.get("packing") is None:
        values["packing"] = True  # its default
    _stage(values, out)
    method = _method(values, out, is_v1=is_v1)
    _data(values, out)
    read_keys(out, values, NAME)
    preference.settle(out, NAME)
    if "model.new_tokens" in out.job:
        if not is_true(values.get("resize_vocab")):
            why = "without resize_vocab no embedding grows"
            out.drop("model.new_tokens", why, "differs")
        elif method != "full":
            out.default({"method.modules_to_save": ["embed_tokens", "lm_head"]}, "resize_vocab")
    defaults(out, "trainer")
    hf.settle_precision(values, out, has_fp32_default=method == "full")
    if not is_v1:
        if method != "full":
            out.default({"method.lora_r": 8})
            out.default({"method.lora_alpha": 2 * out.job["method.lora_r"]})
        defaults(out, NAME)
    out.default({"data.max_length": 2048})
    out.notes += [fact("long-texts")] * (values.get("stage") == "pt")
    out.notes.append(fact("one-gpu"))


def _stage(values: Json, out: Imported) -> None:
    stage = values.get("stage")
    if stage in ("sft", "pt"):
        out.put("stage", stage, "task", CAUSAL_LM.name)
    elif stage in ("dpo", "kto", "rm"):
        loss = str(values.get("pref_loss", "sigmoid")) if stage == "dpo" else ""
        name = loss if loss in ("orpo", "simpo") else {"rm": "reward"}.get(stage, stage)
        given = dict(values) if stage == "dpo" else {**values, "pref_loss": None}
        preference.read(out, str(name), given, "pref_loss", "stage")
        if (model := values.get("ref_model")) == values.get("model_name_or_path"):
            out.name("ref_model", model, "the model as it begins, as here")
        if name in ("kto", "orpo", "simpo") and values.get("pref_ftx"):
            why = f"adds a loss of the better answers, which farthing's {name} has not"
            out.name("pref_ftx", values["pref_ftx"], why, "differs")
    elif stage is not None:
        out.refuse("stage", stage, f"{stage}, which farthing does not do")
    elif not ({"train_dataset", "learning_rate"} & set(values) or values.get("do_train") is True):
        what = "merges or exports" if "export_dir" in values else "chats with or serves"
        out.refuse(*next(iter(values.items())), f"no training: this file {what} a model")
    asks = values.get("do_predict")
    if values.get("do_train") is False or (asks and not values.get("do_train")):
        out.refuse("do_predict", asks, "no training: this file evaluates a model")


def _method(values: Json, out: Imported, *, is_v1: bool) -> str:
    key, kind = "finetuning_type", values.get("finetuning_type", "lora")
    is_4bit = values.get("quantization_bit") == 4
    if is_v1:
        given, is_4bit = values.get("peft_config"), isinstance(values.get("quant_config"), dict)
        key, kind = "peft_config.name", given.get("name") if isinstance(given, dict) else None
    method = hf.method_of(kind == "lora", is_4bit)
    if kind not in ("lora", "full", None):
        out.refuse(key, kind, f"{kind}, which farthing does not do")
    elif kind and key.partition(".")[0] in values:
        out.put(key, kind, "method.name", method)
    out.default({"method.name": method})
    if values.get("pissa_init") is True:
        n = values.get("pissa_iter", 16)
        to = "method.init_lora_weights"
        out.put("pissa_init", True, to, "pissa" if n == -1 else f"pissa_niter_{n}")
        out.keep({"pissa_iter": n} if "pissa_iter" in values else {}, to)
        why = "the exported adapter always fits the base as it was"
        out.name("pissa_convert", values.get("pissa_convert"), why)
    return method


# ---- the data ----


def _data(values: Json, out: Imported) -> None:
    directory = str(values.get("dataset_dir") or "data")
    registry, at = _registry(directory, out.path.parent)
    if registry and "dataset_dir" in values:
        out.name("dataset_dir", directory, "where dataset_info.json is")
    for key in ("dataset", "eval_dataset", "train_dataset"):
        if not values.get(key):
            continue
        try:
            wanted = names(values[key])
        except UnmatchedError as odd:
            out.name(key, values[key], str(odd), "differs")
            continue
        if not registry and key == "train_dataset":
            out.notes.append(f"{wanted[0]} describes the data: name its files in data.train")
        to = "data.eval" if key == "eval_dataset" else "data.train"
        out.put(key, values[key], to, [_source(name, registry, at, out) for name in wanted])
    frames, name = fact("llama-factory-frames"), values.get("template")
    if name and values.get("stage") == "pt":
        out.name("template", name, "text without turns: no template is used")
    elif isinstance(name, str) and name in frames:
        out.template("template", name, frames[name], f"{name}.jinja")
    most = values.get("max_samples")
    if most and len(out.job.get("data.train") or []) == 1:
        to = "data.max_train_samples"
        out.put("max_samples", most, to, out.fit(to, most))
    if out.job.get("data.train") and not registry:
        note = "no dataset_info.json was found: put files in place of the names of data sets"
        out.notes.append(note)


def _registry(directory: str, folder: Path) -> tuple[Json, Path]:
    """dataset_info.json in `directory`, which is relative to where LLaMA-Factory was started: the
    file's folder or above. Empty where there is none.
    """
    folder = folder.resolve()  # the job may be written elsewhere
    for base in (folder, *folder.parents):
        path = base / directory / "dataset_info.json"
        if ":" not in directory and path.is_file():
            with contextlib.suppress(ValueError, OSError, RecursionError):
                found = json.loads(small_text(path, MAX_REGISTRY_BYTES))
                return (found if isinstance(found, dict) else {}), path.parent
            break
    return {}, folder


def _source(name: str, registry: Json, at: Path, out: Imported) -> Json:
    entry = registry.get(name)
    if not isinstance(entry, dict):
        out.notes += [f"dataset_info.json has no `{name}`"] * bool(registry)
        return {"path": name}
    places = fact("llama-factory-places").split()
    key = next((key for key in places if isinstance(entry.get(key), str)), "")
    source: Json = {"path": str(at / entry[key]) if key == "file_name" else entry.get(key, name)}
    own = {"name": entry.get("subset"), "split": entry.get("split")}
    source |= {key: value for key, value in own.items() if isinstance(value, str)}
    for key in ("num_samples", "folder"):
        if entry.get(key):
            why = "chooses a part of the data; farthing takes all of it"
            out.name(f"dataset_info.{name}.{key}", entry[key], why, "differs")
    given = entry.get("columns")
    columns: Json = dict(given) if isinstance(given, dict) else {}
    ranks, task = bool(entry.get("ranking")), out.job["task"]
    is_judged = task == "kto"
    if ranks != (out.prefers and not is_judged):
        why = "pairs of answers" if ranks else "rows without a rejected answer"
        out.refuse(f"dataset_info.{name}.ranking", ranks, f"{why}, which {task} does not learn")
    at_key = f"dataset_info.{name}.columns"
    if is_judged and "kto_tag" not in columns:
        out.refuse(at_key, columns, "rows without a verdict (kto_tag)")
    if {"images", "videos", "audios"} & {*columns}:
        why = "images, sound or video, which farthing does not train on"
        out.refuse(at_key, columns, why)
    found = _columns(entry, columns)
    if ranks:
        found = {k: v for k, v in found.items() if k not in ("output", "text", "history")}
        found |= {name: columns.get(name) for name in ("chosen", "rejected")}
    if is_judged:
        found["label"] = columns.get("kto_tag")
    return source | {"columns": found}


def _columns(entry: Json, columns: Json) -> Json:
    given = entry.get("tags")
    tags: Json = given if isinstance(given, dict) else {}
    if entry.get("formatting", "alpaca") in ("sharegpt", "openai"):
        is_openai = entry.get("formatting") == "openai" or tags.get("role_tag") == "role"
        role = "role" if is_openai else tags.get("role_tag", "from")
        content = "content" if is_openai else tags.get("content_tag", "value")
        field = columns.get("messages", "messages" if is_openai else "conversations")
        beside = {name: columns.get(name) for name in ("system", "tools")}
        return chat_columns(field, role, content) | beside
    usual = {"query": "input", "response": "output"} if not columns else {}
    known = {"prompt": "instruction", **usual, **columns}
    question, more, answer = (known.get(key) for key in ("prompt", "query", "response"))
    if not answer and not entry.get("ranking"):
        return {"text": f"{{{question}}}"}
    asked = [f"{{{question}}}\n{{{more}}}", f"{{{question}}}"] if more else f"{{{question}}}"
    found: Json = {"instruction": asked, "output": f"{{{answer}}}"}
    return found | {name: columns.get(name) for name in ("system", "history")}
