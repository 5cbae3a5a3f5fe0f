"""LLaMA-Factory's YAML or JSON, with the `dataset_info.json` that it names data by
(github.com/hiyouga/LLaMA-Factory).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farthing.config.importers import hf_trainer as hf
from farthing.config.importers.prompts import FRAMES, chat_columns
from farthing.config.importers.record import (
    Imported,
    Odd,
    To,
    flat,
    names,
    number,
    positive,
    read_keys,
    share,
    text,
    truth,
    whole,
)
from farthing.config.importers.shared import NO_COUNT_OF_GPUS, reasons
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.storage.files import Json

NAME = "llama-factory"
MAX_REGISTRY_BYTES = 16 << 20


def _targets(value: Any) -> list[str]:
    found = names(value)
    return ["all-linear"] if found == ["all"] else found


TABLE: dict[str, To] = {
    **hf.ARGUMENTS,
    **hf.ADAPTER,
    **{key: hf.MODEL[key] for key in ("model_name_or_path", "model_revision", "trust_remote_code")},
    "cutoff_len": To("data.max_length", whole),
    "train_on_prompt": To("data.train_on_prompt", truth),
    "val_size": To("data.eval_fraction", share),
    "lora_target": To("method.target_modules", _targets),
    "additional_target": To("method.modules_to_save", names),
    "train_from_scratch": To(
        "model.init", lambda value: "random" if truth(value) else "pretrained"
    ),
    "neftune_alpha": To("train.neftune_noise_alpha", positive),
}
V1_TABLE: dict[str, To] = {
    **TABLE,
    "model": To("model.model_name_or_path", text),
    "micro_batch_size": To("train.per_device_train_batch_size", whole),
    "global_batch_size": To("train.global_batch_size", whole),
    "peft_config.r": To("method.lora_r", whole),
    "peft_config.lora_alpha": To("method.lora_alpha", positive),
    "peft_config.lora_dropout": To("method.lora_dropout", number),
    "peft_config.target_modules": To("method.target_modules", _targets),
}
_STAGES = {
    "rm": "a reward model",
    "ppo": "reinforcement learning (PPO)",
    "dpo": "preference learning (DPO)",
    "kto": "learning from verdicts (KTO)",
}


def read(values: Mapping[str, Any], out: Imported, folder: Path) -> None:
    """LLaMA-Factory's settings. `folder` is where the file lies: `dataset_dir` is looked for beside
    and above it.
    """
    is_v1 = "train_dataset" in values or "peft_config" in values
    _kind(values, out)
    if is_v1:
        _v1_method(values, out)
    else:
        _method(values, out)
    _data(values, out, folder)
    hf.warmups(out, values)
    read_keys(out, flat(values), V1_TABLE if is_v1 else TABLE, reasons("model", NAME, "common"))
    _defaults(values, out, is_v1)


def _kind(values: Mapping[str, Any], out: Imported) -> None:
    stage = values.get("stage")
    if stage in _STAGES:
        out.name("stage", stage, f"{_STAGES[stage]}, which farthing does not do", "blocks")
    elif stage in ("sft", "pt"):
        out.put("stage", stage, "task", CAUSAL_LM.name)
    trains = (
        "stage" in values
        or "train_dataset" in values
        or values.get("do_train") is True
        or "learning_rate" in values
    )
    if not trains:
        what = "merges or exports" if "export_dir" in values else "chats with or serves"
        key = next(iter(values), "")
        out.name(key, values.get(key), f"no training: this file {what} a model", "blocks")
    elif values.get("do_train") is False or (
        values.get("do_predict") and not values.get("do_train")
    ):
        out.name(
            "do_predict",
            values.get("do_predict"),
            "no training: this file evaluates a model",
            "blocks",
        )


def _v1_method(values: Mapping[str, Any], out: Imported) -> None:
    config = values.get("peft_config")
    name = config.get("name") if isinstance(config, Mapping) else None
    quantized = isinstance(values.get("quant_config"), Mapping)
    if name in (None, "lora"):
        if name:
            out.put("peft_config.name", name, "method.name", "qlora" if quantized else "lora")
        out.default("method.name", "full")
    else:
        out.name("peft_config.name", name, f"{name}, which farthing does not do", "blocks")


def _method(values: Mapping[str, Any], out: Imported) -> None:
    kind, bits = values.get("finetuning_type", "lora"), values.get("quantization_bit")
    if bits == 4:
        out.name("quantization_bit", bits, "method: qlora is the 4-bit base")
    elif bits is not None:
        out.name(
            "quantization_bit",
            bits,
            f"farthing has no {bits}-bit base: it stays in 16 bits, which is more exact",
            "differs",
        )
    if kind in ("lora", "full"):
        name = "qlora" if kind == "lora" and bits == 4 else kind
        if "finetuning_type" in values:
            out.put("finetuning_type", kind, "method.name", name)
        out.default("method.name", name)
    else:
        out.name("finetuning_type", kind, f"{kind}, which farthing does not do", "blocks")
    if values.get("pissa_init") is True:
        n = values.get("pissa_iter", 16)
        out.put(
            "pissa_init",
            True,
            "method.init_lora_weights",
            "pissa" if n == -1 else f"pissa_niter_{n}",
        )
        if "pissa_iter" in values:
            out.keep("pissa_iter", n, "method.init_lora_weights")
        out.name(
            "pissa_convert",
            values.get("pissa_convert"),
            "the exported adapter always fits the base as it was",
        )
    elif "pissa_init" in values:
        out.name("pissa_init", values["pissa_init"], "off there, and off here")


def _defaults(values: Mapping[str, Any], out: Imported, is_v1: bool) -> None:
    hf.trainer_defaults(out)
    if out.job.get("method.name") in ("lora", "qlora") and not is_v1:
        out.default("method.lora_r", 8)
        out.default("method.lora_alpha", 2 * out.job["method.lora_r"])
        out.default("method.lora_dropout", 0.0)
        out.default("method.target_modules", ["all-linear"])
    out.default("data.max_length", 2048)
    out.default("train.gradient_accumulation_steps", None if is_v1 else 1)
    out.notes.append(NO_COUNT_OF_GPUS)


# ---- the data ----


def _data(values: Mapping[str, Any], out: Imported, folder: Path) -> None:
    directory = values.get("dataset_dir") or "data"
    registry, at = _registry(str(directory), folder)
    if "dataset_dir" in values:
        out.name(
            "dataset_dir",
            values["dataset_dir"],
            (
                "where dataset_info.json is"
                if registry
                else "dataset_info.json is not there: data sets keep their names"
            ),
            "none" if registry else "differs",
        )
    for key, to in (
        ("dataset", "data.train"),
        ("eval_dataset", "data.eval"),
        ("train_dataset", "data.train"),
    ):
        if not values.get(key):
            continue
        try:
            wanted = names(values[key])
        except Odd as odd:
            out.name(key, values[key], str(odd), "differs")
            continue
        if at is None and key == "train_dataset":
            out.notes.append(f"{wanted[0]} describes the data: name its files in data.train")
        found = [_source(name, registry, at, out) for name in wanted]
        out.put(key, values[key], to, found)
    _template(values, out)
    if values.get("max_samples"):
        is_one = len(out.job.get("data.train") or []) == 1
        if is_one:
            out.put(
                "max_samples",
                values["max_samples"],
                "data.max_train_samples",
                whole(values["max_samples"]),
            )
        else:
            out.name(
                "max_samples",
                values["max_samples"],
                "so many rows of each data set; farthing takes all of them",
                "differs",
            )
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
    elif name in FRAMES:
        out.files[f"{name}.jinja"] = FRAMES[name]
        out.put("template", name, "data.chat_template", f"{name}.jinja")
    elif name in ("empty", "fewshot", "original"):
        out.name(
            "template",
            name,
            f"LLaMA-Factory's own `{name}` frame; farthing uses the tokenizer's chat template: the"
            " text differs",
            "differs",
        )
    else:
        out.name(
            "template",
            name,
            "the tokenizer's own chat template is used; for models of that family it writes the"
            " same turns. The line break behind a turn, which LLaMA-Factory learns too, is not"
            " learned",
        )


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
            except (ValueError, OSError):
                return None, None
            return (found, path.parent) if isinstance(found, dict) else (None, None)
    return None, None


def _source(name: str, registry: Json | None, at: Path | None, out: Imported) -> Json:
    entry = (registry or {}).get(name)
    if not isinstance(entry, dict):
        if registry is not None:
            out.notes.append(f"dataset_info.json has no `{name}`")
        return {"path": name}
    source: Json = {}
    for key in (
        "file_name",
        "hf_hub_url",
        "ms_hub_url",
        "om_hub_url",
        "script_url",
        "cloud_file_name",
    ):
        if isinstance(entry.get(key), str):
            source["path"] = str(at / entry[key]) if key == "file_name" and at else entry[key]
            break
    source.setdefault("path", name)
    for key, own in (("subset", "name"), ("split", "split")):
        if isinstance(entry.get(key), str):
            source[own] = entry[key]
    if entry.get("ranking"):
        out.name(
            f"dataset_info.{name}.ranking",
            True,
            "preference data, which farthing does not train on",
            "blocks",
        )
    raw = entry.get("columns")
    columns: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
    if any(key in columns for key in ("images", "videos", "audios")):
        out.name(
            f"dataset_info.{name}.columns",
            dict(columns),
            "images, sound or video, which farthing does not train on",
            "blocks",
        )
    found = _columns(entry, columns)
    return source | ({"columns": found} if found else {})


def _columns(entry: Mapping[str, Any], columns: Mapping[str, Any]) -> Json:
    given = entry.get("tags")
    tags: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if entry.get("formatting", "alpaca") in ("sharegpt", "openai"):
        is_openai = entry.get("formatting") == "openai" or tags.get("role_tag") == "role"
        role, content = (
            ("role", "content")
            if is_openai
            else (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
        )
        return chat_columns(
            columns.get("messages", "messages" if is_openai else "conversations"), role, content
        )
    question, more = (
        columns.get("prompt", "instruction"),
        columns.get("query", "input" if not columns else None),
    )
    answer = columns.get("response", "output" if not columns else None)
    if not answer:
        return {"text": str(question)}
    asked: Any = f"{{{question}}}"
    if more:
        asked = [f"{{{question}}}\n{{{more}}}", f"{{{question}}}"]
    found = {"instruction": asked, "output": f"{{{answer}}}"}
    if columns.get("system"):
        found["system"] = f"{{{columns['system']}}}"
    if columns.get("history"):
        found["history"] = str(columns["history"])
    return found
