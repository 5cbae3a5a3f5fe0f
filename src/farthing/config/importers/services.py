"""Jobs of services: the JSON that makes one or describes one, or the arguments of their clients.

OpenAI never published what its multiplier multiplies for GPT-4 models. For GPT-3 it was the
pretraining rate times 0.02 to 0.2, with a batch of 0.2 % of the examples up to 256. So a rate is
only suggested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from farthing.config.importers import preference
from farthing.config.importers.record import Imported, Odd, flat, read_keys
from farthing.config.importers.tables import READERS, defaults, positive, table, text, whole

OPENAI, TOGETHER, FIREWORKS = "openai", "together", "fireworks"
_STAND_IN = "Qwen/Qwen2.5-7B-Instruct"


def snake(name: str) -> str:
    """`loraRank` and `lora-rank` as `lora_rank`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).replace("-", "_").lower()


def _multiplier(value: Any) -> float:
    """Of farthing's rate for adapters, which a multiplier of 1 is taken to mean."""
    return float(positive(value)) * 2e-4


def _batch(value: Any) -> int:
    if value == "max":
        why = "max: Together chose it by the model; farthing's default of 16 examples holds"
        raise Odd(why)
    return whole(value)


def _service_model(value: Any) -> str:
    name = text(value)
    if name.startswith("accounts/"):
        why = "Fireworks' name of a model: put its Hugging Face name here, of which the last part"
        raise Odd(f"{name} is {why} stands now")
    return name


def _uploaded(value: Any) -> list[dict[str, str]]:
    name = text(value).rpartition("/")[2]
    return [{"path": name if "." in name else f"{name}.jsonl"}]


READERS.update(
    multiplier=_multiplier, batch=_batch, service_model=_service_model, uploaded=_uploaded
)


def _files(values: Mapping[str, Any], out: Imported, service: str) -> None:
    """Files of a service by their names there, as files beside the job."""
    for key, to in (("training_file", "data.train"), ("validation_file", "data.eval")):
        file = str(values.get(key) or "")
        if file:
            out.put(key, file, to, [{"path": file if "." in file else f"{file}.jsonl"}])
            if "." not in file:
                note = f"{file} is a file at {service}: fetch it to {file}.jsonl beside the job"
                out.notes.append(note)


def read_openai(values: Mapping[str, Any], out: Imported) -> None:
    """A fine-tuning job of OpenAI."""
    given = values.get("method")
    method: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    kinds = ("dpo", "reinforcement", "supervised")
    kind = method.get("type") or next((k for k in kinds if k in method), None)
    if kind == "dpo":
        preference.read(out, "dpo", {})
        out.put("method.type", kind, "task", "dpo")
    elif kind == "supervised":
        out.name("method.type", kind, "supervised: what farthing does")
    elif kind is not None:
        key = next(key for key, _ in flat({"method": method}))
        out.name(key, kind, f"{kind} learning, which farthing does not do", "blocks")
    why = f"weights that OpenAI keeps: another model is needed; {_STAND_IN} stands in the job"
    out.name("model", values.get("model"), f"{why}, choose yours", "differs")
    out.job["model.model_name_or_path"] = _STAND_IN
    _files(values, out, "OpenAI (its files API)")
    inner = flat(values)
    read_keys(
        out,
        inner,
        table("openai"),
        name_of=lambda key: key.rpartition(".")[2] if "hyperparameters" in key else key,
    )
    out.default({"train.num_train_epochs": 3}, "OpenAI's usual choice for auto")
    out.default({"train.global_batch_size": 8}, "a guess for auto")
    out.default({"method.name": "lora"}, "what OpenAI trains is not published; an adapter")
    out.notes.append(
        "OpenAI never published what it trains (all weights or an adapter), its rates and its"
        " batches for auto: the losses will differ; data, epochs and seed are the same"
    )


def read_together(values: Mapping[str, Any], out: Imported) -> None:
    """A fine-tuning job of Together."""
    given, method = values.get("training_type"), values.get("training_method")
    kind: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    is_lora = values.get("lora", str(kind.get("type", "lora")).lower() == "lora")
    trained = "lora" if is_lora else "full"
    if "lora" in values:
        out.put("lora", values["lora"], "method.name", trained)
    if "type" in kind:
        out.put("training_type.type", kind["type"], "method.name", trained)
    out.default({"method.name": trained})
    inner: Mapping[str, Any] = method if isinstance(method, Mapping) else {"method": method}
    name, key = inner.get("method"), "training_method.method"
    key = key if isinstance(method, Mapping) else "training_method"
    if name == "dpo":
        per_token = inner.get("dpo_normalize_logratios_by_length")
        given = {"rpo_alpha": inner.get("rpo_alpha"), "loss_type": per_token and "sigmoid_norm"}
        preference.read(out, "dpo", given)
        out.lines.clear()
        out.put(key, name, "task", "dpo")
        for each in ("rpo_alpha", "dpo_normalize_logratios_by_length"):
            if each in inner:
                out.keep([(f"training_method.{each}", inner[each])], "objective.loss_type")
    elif name not in (None, "sft"):
        out.name(key, name, f"{name}, which farthing does not do", "blocks")
    elif name == "sft":
        out.name(key, name, "supervised: what farthing does")
    _files(values, out, "Together")
    if values.get("train_on_inputs") is True and name != "dpo":
        out.put("train_on_inputs", True, "data.train_on_prompt", True)
    read_keys(out, flat(values), table("together"))
    defaults(out, "together")
    if is_lora:
        out.default({"method.lora_r": 8})
        out.default({"method.lora_alpha": 2 * out.job["method.lora_r"]})


def read_fireworks(values: Mapping[str, Any], out: Imported) -> None:
    """A fine-tuning job of Fireworks."""
    if values.get("kind") not in (None, "sft", "SFT"):
        out.name("kind", values["kind"], f"{values['kind']}, which farthing does not do", "blocks")
    known = {snake(key): (key, value) for key, value in values.items()}
    key, template = known.get("jinja_template", ("", None))
    if isinstance(template, str) and template.strip():
        out.files["chat_template.jinja"] = template
        out.put(key, template, "data.chat_template", "chat_template.jinja")
    key, stops = known.get("early_stop", ("", None))
    if stops:
        why = "ends when the evaluation loss rises; set train.early_stopping_patience"
        out.name(key, stops, why, "differs")
    read_keys(
        out,
        flat(values),
        table("fireworks"),
        name_of=lambda key: ".".join(snake(part) for part in key.split(".")),
    )
    name = str(known.get("base_model", ("", ""))[1] or "").rpartition("/")[2]
    out.job.setdefault("model.model_name_or_path", name or _STAND_IN)
    out.job.setdefault("train.global_batch_size", 16)
    defaults(out, "fireworks")
