"""Together AI's fine-tuning jobs: the JSON of its API, or the arguments of `together fine-tuning
create`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farthing.config.importers.record import (
    Imported,
    Odd,
    To,
    flat,
    names,
    number,
    positive,
    read_keys,
    rows,
    scheduler,
    text,
    whole,
)
from farthing.config.importers.shared import reasons, uploaded

NAME = "together"


def _batch(value: Any) -> int:
    if value == "max":
        raise Odd(
            "max: Together chose it by the model; farthing's default of 16 examples holds",
            "differs",
        )
    return whole(value)


TABLE: dict[str, To] = {
    "model": To("model.model_name_or_path", text),
    **rows("train", positive, "n_epochs=num_train_epochs learning_rate"),
    **rows("train", number, "weight_decay max_grad_norm"),
    **rows("train", whole, "seed"),
    "batch_size": To("train.global_batch_size", _batch),
    "warmup_ratio": To("train.warmup_ratio", lambda value: float(number(value))),
    "max_seq_length": To("data.max_length", whole),
    **rows(
        "train", scheduler, "lr_scheduler.lr_scheduler_type=lr_scheduler_type lr_scheduler_type"
    ),
}
for _prefix in ("", "training_type."):
    TABLE |= {
        f"{_prefix}lora_r": To("method.lora_r", whole),
        f"{_prefix}lora_alpha": To("method.lora_alpha", positive),
        f"{_prefix}lora_dropout": To("method.lora_dropout", number),
        f"{_prefix}lora_trainable_modules": To("method.target_modules", names),
    }


def read(values: Mapping[str, Any], out: Imported) -> None:
    """A fine-tuning job of Together."""
    given = values.get("training_type")
    kind: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    is_lora = values.get("lora", str(kind.get("type", "lora")).lower() == "lora")
    out.default("method.name", "lora" if is_lora else "full")
    if "lora" in values:
        out.put("lora", values["lora"], "method.name", "lora" if is_lora else "full")
    if "type" in kind:
        out.put("training_type.type", kind["type"], "method.name", "lora" if is_lora else "full")
    method = values.get("training_method")
    name = method.get("method") if isinstance(method, Mapping) else method
    if name not in (None, "sft"):
        key = "training_method.method" if isinstance(method, Mapping) else "training_method"
        out.name(key, name, f"{name}, which farthing does not do", "blocks")
    for key, value in flat({"training_method": method}) if method is not None else ():
        out.name(
            key,
            value,
            "supervised: what farthing does" if value == "sft" else "settles the training method",
        )
    uploaded(values, out, "Together")
    if values.get("train_on_inputs") is True:
        out.put("train_on_inputs", True, "data.train_on_prompt", True)
    read_keys(out, flat(values), TABLE, reasons(NAME))
    out.default_all("train", num_train_epochs=1, learning_rate=1e-5, warmup_ratio=0.0)
    if is_lora:
        out.default("method.lora_r", 8)
        out.default("method.lora_alpha", 2 * out.job["method.lora_r"])
