"""Fireworks' fine-tuning jobs: the JSON of its API (camelCase) or the arguments of `firectl sftj
create`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from farthing.config.importers.record import (
    Imported,
    Odd,
    To,
    flat,
    positive,
    read_keys,
    text,
    whole,
)
from farthing.config.importers.shared import reasons

NAME = "fireworks"


def snake(name: str) -> str:
    """`loraRank` and `lora-rank` as `lora_rank`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).replace("-", "_").lower()


def _model(value: Any) -> str:
    name = text(value)
    if name.startswith("accounts/"):
        raise Odd(
            f"{name} is Fireworks' name of a model: put its Hugging Face name here, of which the"
            " last part stands now",
            "differs",
        )
    return name


def _data(value: Any) -> list[dict[str, str]]:
    name = text(value).rpartition("/")[2]
    return [{"path": name if "." in name else f"{name}.jsonl"}]


TABLE: dict[str, To] = {
    "base_model": To("model.model_name_or_path", _model),
    "dataset": To("data.train", _data),
    "training_data": To("data.train", _data),
    "evaluation_dataset": To("data.eval", _data),
    "epochs": To("train.num_train_epochs", positive),
    "learning_rate": To("train.learning_rate", positive),
    "lora_rank": To("method.lora_r", whole),
    "max_context_length": To("data.max_length", whole),
    "gradient_accumulation_steps": To("train.gradient_accumulation_steps", whole),
    "learning_rate_warmup_steps": To("train.warmup_steps", whole),
}


def read(values: Mapping[str, Any], out: Imported) -> None:
    """A fine-tuning job of Fireworks."""
    if values.get("kind") not in (None, "sft", "SFT"):
        out.name("kind", values["kind"], f"{values['kind']}, which farthing does not do", "blocks")
    read_keys(
        out,
        flat(values),
        TABLE,
        reasons(NAME),
        name_of=lambda key: ".".join(snake(part) for part in key.split(".")),
    )
    for key, value in values.items():
        if snake(key) == "jinja_template" and isinstance(value, str) and value.strip():
            out.lines.pop(key, None)
            out.files["chat_template.jinja"] = value
            out.put(key, value, "data.chat_template", "chat_template.jinja")
        elif snake(key) == "early_stop" and value:
            out.lines.pop(key, None)
            why = "ends when the evaluation loss rises; set train.early_stopping_patience"
            out.name(key, value, why, "differs")
    model = values.get("baseModel") or values.get("base_model") or values.get("base-model")
    out.job.setdefault(
        "model.model_name_or_path",
        str(model or "").rpartition("/")[2] or "Qwen/Qwen2.5-7B-Instruct",
    )
    out.job.setdefault("train.global_batch_size", 16)
    out.default("method.name", "lora")
    out.default_all("train", num_train_epochs=1, learning_rate=1e-4)
    out.default("method.lora_r", 8)
