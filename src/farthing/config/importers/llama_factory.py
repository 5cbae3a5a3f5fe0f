"""LLaMA-Factory's YAML or JSON, with the `dataset_info.json` that it names data by
(github.com/hiyouga/LLaMA-Factory).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farthing.config.importers import hf, preference
from farthing.config.importers.prompts import chat_columns
from farthing.config.importers.record import Imported, Odd, flat, read_keys
from farthing.config.importers.tables import fact, names, table, whole
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.storage.files import Json

NAME = "llama-factory"
MAX_REGISTRY_BYTES = 16 << 20


def read(values: Mapping[str, Any], out: Imported, folder: Path) -> None:
    """LLaMA-Factory's settings. `folder` is where the file lies: `dataset_dir` is looked for beside
    and above it.
    """
    is_v1 = "train_dataset" in values or "peft_config" in values
    _stage(values, out)
    if is_v1:
        _v1_method(values, out)
    else:
        _method(values, out)
    _data(values, out, folder)
    hf.warmups(out, values)
    stretch = values.get("rope_scaling")
    if isinstance(stretch, str):
        why = "stretches positions by a factor that is worked out there; set model.rope_scaling"
        out.name("rope_scaling", stretch, why, "differs")
    tool = f"{NAME}-preference" if preference.is_asked(out) else NAME
    read_keys(out, flat(values, whole=("rope_scaling", "lr_scheduler_kwargs")), table(tool))
    preference.settle(out, NAME)
    _tokens(values, out)
    _defaults(out, is_v1)


def _stage(values: Mapping[str, Any], out: Imported) -> None:
    stage = values.get("stage")
    if stage in ("sft", "pt"):
        out.put("stage", stage, "task", CAUSAL_LM.name)
    elif stage in ("dpo", "kto", "rm"):
        loss = str(values.get("pref_loss", "sigmoid")) if stage == "dpo" else ""
        name = loss if loss in ("orpo", "simpo") else {"rm": "reward"}.get(stage, stage)
        given = {
            key: value for key, value in values.items() if stage == "dpo" or key != "pref_loss"
        }
        preference.read(out, name, given, "pref_loss")
        out.put("stage", stage, "task", out.job["task"])
        if name == "simpo":
            out.default({"objective.beta": None if "pref_beta" in values else 0.1})
            out.default({"objective.simpo_gamma": None if "simpo_gamma" in values else 0.5})
        if values.get("ref_model") == values.get("model_name_or_path"):
            out.name("ref_model", values.get("ref_model"), "the model as it begins, as here")
        if stage == "kto" and values.get("pref_ftx"):
            why = "adds a loss of the desirable answers, which farthing's KTO has not"
            out.name("pref_ftx", values["pref_ftx"], why, "differs")
    elif stage is not None:
        out.name("stage", stage, f"{stage}, which farthing does not do", "blocks")
    starts = values.get("do_train") is True or "learning_rate" in values
    if not (stage is not None or "train_dataset" in values or starts):
        what = "merges or exports" if "export_dir" in values else "chats with or serves"
        key, value = next(iter(values.items()), ("", None))
        out.name(key, value, f"no training: this file {what} a model", "blocks")
    asks = values.get("do_predict")
    if values.get("do_train") is False or (asks and not values.get("do_train")):
        out.name("do_predict", asks, "no training: this file evaluates a model", "blocks")


def _v1_method(values: Mapping[str, Any], out: Imported) -> None:
    config = values.get("peft_config")
    name = config.get("name") if isinstance(config, Mapping) else None
    if name == "lora":
        is_4bit = isinstance(values.get("quant_config"), Mapping)
        out.put("peft_config.name", name, "method.name", "qlora" if is_4bit else "lora")
    elif name is not None:
        out.name("peft_config.name", name, f"{name}, which farthing does not do", "blocks")
    out.default({"method.name": "full"})


def _method(values: Mapping[str, Any], out: Imported) -> None:
    kind, bits = values.get("finetuning_type", "lora"), values.get("quantization_bit")
    if bits == 4:
        out.name("quantization_bit", bits, "method: qlora is the 4-bit base")
    elif bits is not None:
        why = f"farthing has no {bits}-bit base: it stays in 16 bits, which is more exact"
        out.name("quantization_bit", bits, why, "differs")
    if kind in ("lora", "full"):
        name = "qlora" if kind == "lora" and bits == 4 else kind
        if "finetuning_type" in values:
            out.put("finetuning_type", kind, "method.name", name)
        out.default({"method.name": name})
    else:
        out.name("finetuning_type", kind, f"{kind}, which farthing does not do", "blocks")
    to = "method.init_lora_weights"
    if values.get("pissa_init") is True:
        n = values.get("pissa_iter", 16)
        out.put("pissa_init", True, to, "pissa" if n == -1 else f"pissa_niter_{n}")
        out.keep([("pissa_iter", n)] if "pissa_iter" in values else [], to)
        why = "the exported adapter always fits the base as it was"
        out.name("pissa_convert", values.get("pissa_convert"), why)
    elif "pissa_init" in values:
        out.name("pissa_init", values["pissa_init"], "off there, and off here")


def _tokens(values: Mapping[str, Any], out: Imported) -> None:
    """New tokens; an adapter trains the embeddings then, as there."""
    wanted = [key for key in ("add_tokens", "add_special_tokens") if values.get(key)]
    found: list[str] = []
    for key in wanted:
        try:
            found += names(values[key])
        except Odd as odd:
            out.name(key, values[key], str(odd), "differs")
    if found and str(values.get("resize_vocab")).lower() == "true":
        out.job["model.new_tokens"] = found
        out.lines = {key: line for key, line in out.lines.items() if key not in wanted}
        out.keep([(key, values[key]) for key in wanted], "model.new_tokens")
        if out.job.get("method.name") != "full":
            out.default({"method.modules_to_save": ["embed_tokens", "lm_head"]}, "resize_vocab")
    else:
        for key in wanted:
            out.lines.pop(key, None)
            out.name(key, values[key], "without resize_vocab no embedding grows", "differs")


def _defaults(out: Imported, is_v1: bool) -> None:
    hf.trainer_defaults(out)
    if out.job.get("method.name") in ("lora", "qlora") and not is_v1:
        out.default({"method.lora_r": 8})
        out.default({"method.lora_alpha": 2 * out.job["method.lora_r"], "method.lora_dropout": 0.0})
        out.default({"method.target_modules": ["all-linear"]})
    out.default({"data.max_length": 2048})
    if not is_v1:
        out.default({"train.gradient_accumulation_steps": 1})
    out.notes.append(hf.NO_COUNT_OF_GPUS)


# ---- the data ----


def _data(values: Mapping[str, Any], out: Imported, folder: Path) -> None:
    directory = values.get("dataset_dir") or "data"
    registry, at = _registry(str(directory), folder)
    if registry and "dataset_dir" in values:
        out.name("dataset_dir", directory, "where dataset_info.json is")
    elif "dataset_dir" in values:
        why = "dataset_info.json is not there: data sets keep their names"
        out.name("dataset_dir", directory, why, "differs")
    for key in ("dataset", "eval_dataset", "train_dataset"):
        if not values.get(key):
            continue
        try:
            wanted = names(values[key])
        except Odd as odd:
            out.name(key, values[key], str(odd), "differs")
            continue
        if at is None and key == "train_dataset":
            out.notes.append(f"{wanted[0]} describes the data: name its files in data.train")
        to = "data.eval" if key == "eval_dataset" else "data.train"
        out.put(key, values[key], to, [_source(name, registry, at, out) for name in wanted])
    _template(values, out)
    most = values.get("max_samples")
    if most and len(out.job.get("data.train") or []) == 1:
        out.put("max_samples", most, "data.max_train_samples", whole(most))
    elif most:
        why = "so many rows of each data set; farthing takes all of them"
        out.name("max_samples", most, why, "differs")
    if out.job.get("data.train") and registry is None:
        out.notes.append(
            "no dataset_info.json was found: the names of data sets are LLaMA-Factory's own, put"
            " their files in their place"
        )


def _template(values: Mapping[str, Any], out: Imported) -> None:
    name = values.get("template")
    if name in (None, ""):
        return
    if values.get("stage") == "pt":
        out.name("template", name, "text without turns: no template is used")
    elif name in fact("llama-factory-frames"):
        out.files[f"{name}.jinja"] = fact("llama-factory-frames")[name]
        out.put("template", name, "data.chat_template", f"{name}.jinja")
    elif name in ("empty", "fewshot", "original"):
        why = (
            f"LLaMA-Factory's own `{name}` frame; farthing uses the tokenizer's chat template: the"
            " text differs"
        )
        out.name("template", name, why, "differs")
    else:
        why = (
            "the tokenizer's own chat template is used; for models of that family it writes the"
            " same turns. The line break behind a turn, which LLaMA-Factory learns too, is not"
            " learned"
        )
        out.name("template", name, why, "differs")


def _registry(directory: str, folder: Path) -> tuple[Json | None, Path | None]:
    """dataset_info.json in `directory`, which is relative to where LLaMA-Factory was started: the
    file's folder or above.
    """
    if ":" in directory:
        return None, None
    for base in (folder, *folder.resolve().parents):
        path = base / directory / "dataset_info.json"
        if path.is_file() and path.stat().st_size < MAX_REGISTRY_BYTES:
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, OSError, RecursionError):
                return None, None
            return (found, path.parent) if isinstance(found, dict) else (None, None)
    return None, None


_PLACES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")


def _source(name: str, registry: Json | None, at: Path | None, out: Imported) -> Json:
    entry = (registry or {}).get(name)
    if not isinstance(entry, dict):
        if registry is not None:
            out.notes.append(f"dataset_info.json has no `{name}`")
        return {"path": name}
    key = next((key for key in _PLACES if isinstance(entry.get(key), str)), "")
    is_file = key == "file_name" and at is not None
    source: Json = {"path": str(at / entry[key]) if is_file and at else entry.get(key, name)}
    for key, own in (("subset", "name"), ("split", "split")):
        if isinstance(entry.get(key), str):
            source[own] = entry[key]
    given = entry.get("columns")
    columns: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    at_key = f"dataset_info.{name}"
    ranks, asked = bool(entry.get("ranking")), preference.is_asked(out)
    is_judged = asked and out.job["task"] == "kto"
    if ranks != (asked and not is_judged):
        why = "pairs of answers" if ranks else "rows without a rejected answer"
        out.name(
            f"{at_key}.ranking", ranks, f"{why}, which {out.job['task']} does not learn", "blocks"
        )
    if is_judged and "kto_tag" not in columns:
        out.name(f"{at_key}.columns", dict(columns), "rows without a verdict (kto_tag)", "blocks")
    if any(key in columns for key in ("images", "videos", "audios")):
        why = "images, sound or video, which farthing does not train on"
        out.name(f"{at_key}.columns", dict(columns), why, "blocks")
    found = _columns(entry, columns)
    if ranks:
        found = {k: v for k, v in found.items() if k not in ("output", "text", "history")}
        pair = {name: str(columns.get(name, name)) for name in ("chosen", "rejected")}
        found |= {name: column for name, column in pair.items() if name != column}
        if "instruction" not in found and entry.get("formatting", "alpaca") == "alpaca":
            found["instruction"] = f"{{{columns.get('prompt', 'instruction')}}}"
    if is_judged and columns.get("kto_tag", "label") != "label":
        found["label"] = str(columns["kto_tag"])
    return source | ({"columns": found} if found else {})


def _columns(entry: Mapping[str, Any], columns: Mapping[str, Any]) -> Json:
    given = entry.get("tags")
    tags: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if entry.get("formatting", "alpaca") in ("sharegpt", "openai"):
        is_openai = entry.get("formatting") == "openai" or tags.get("role_tag") == "role"
        role = "role" if is_openai else tags.get("role_tag", "from")
        content = "content" if is_openai else tags.get("content_tag", "value")
        field = columns.get("messages", "messages" if is_openai else "conversations")
        return chat_columns(field, role, content)
    question = columns.get("prompt", "instruction")
    more = columns.get("query", "input" if not columns else None)
    answer = columns.get("response", "output" if not columns else None)
    if not answer and not entry.get("ranking"):
        return {"text": str(question)}
    asked = [f"{{{question}}}\n{{{more}}}", f"{{{question}}}"] if more else f"{{{question}}}"
    found: Json = {"instruction": asked, "output": f"{{{answer}}}"}
    own = {name: str(columns[name]) for name in ("system", "history") if columns.get(name)}
    return found | {name: column for name, column in own.items() if name != column}
