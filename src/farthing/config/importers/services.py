"""Jobs of services: the JSON that makes one or describes one, or the arguments of their clients.

OpenAI never published what its multiplier multiplies for GPT-4 models. For GPT-3 it was the
pretraining rate times 0.02 to 0.2, with a batch of 0.2 % of the examples up to 256. So a rate is
only suggested.
"""

from __future__ import annotations

import re

from farthing.config.importers import preference
from farthing.config.importers.tables import Imported, defaults, fact, read_keys
from farthing.storage.files import Json

OPENAI, TOGETHER, FIREWORKS = "openai", "together", "fireworks"
_STAND_IN = "Qwen/Qwen2.5-7B-Instruct"


def snake(name: str) -> str:
    """`loraRank` and `lora-rank` as `lora_rank`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).replace("-", "_").lower()


def _inner(values: Json, key: str, name: str) -> Json:
    """A section of a job; one that is a word stands for its `name`."""
    given = values.get(key)
    return given if isinstance(given, dict) else {name: given} if given else {}


def _note_files(out: Imported, service: str) -> None:
    for line in out.mapped:
        if line.key in ("training_file", "validation_file") and "." not in str(line.value):
            note = f"{line.value} is a file at {service}: fetch it to {line.value}.jsonl beside"
            out.notes.append(f"{note} the job")


def read_openai(values: Json, out: Imported) -> None:
    method = _inner(values, "method", "type")
    kinds = ("dpo", "reinforcement", "supervised")
    kind = method.get("type") or next((each for each in kinds if each in method), None)
    if kind == "dpo":
        preference.read(out, "dpo", {"method.type": kind}, said_by="method.type")
    elif kind == "supervised":
        out.name("method.type", kind, "supervised: what farthing does")
    elif kind is not None:
        out.refuse("method.type", kind, f"{kind} learning, which farthing does not do")
    out.job["model.model_name_or_path"] = _STAND_IN
    read_keys(out, values, OPENAI, name_of=lambda key: re.sub(".*hyperparameters.*\\.", "", key))
    _note_files(out, "OpenAI (its files API)")
    for of, each in fact("openai-guesses").items():
        out.default(each, of)
    out.notes.append(fact("openai-note"))


def read_together(values: Json, out: Imported) -> None:
    method = _inner(values, "training_method", "method")
    before = "training_method." if isinstance(values.get("training_method"), dict) else ""
    key = f"{before}method" if before else "training_method"
    if (name := method.get("method")) == "dpo":
        inner = method if before else values
        mean = inner.get("dpo_normalize_logratios_by_length") and "sigmoid_norm"
        preference.read(out, "dpo", {"rpo_alpha": inner.get("rpo_alpha"), "loss_type": mean})
        out.lines = {}  # of names that stand in `training_method`
        out.put(key, name, "task", "dpo")
        losses = {"rpo_alpha", "dpo_normalize_logratios_by_length"}
        out.keep({k: v for k, v in inner.items() if k in losses}, "objective.loss_type", before)
        out.name("train_on_inputs", values.get("train_on_inputs"), "answers alone are learned")
    elif name not in (None, "sft"):
        out.refuse(key, name, f"{name}, which farthing does not do")
    kind = _inner(values, "training_type", "type").get("type")
    is_lora = values.get("lora", str(kind or "lora").lower() == "lora")
    trained = "lora" if is_lora else "full"
    for key, value in (("lora", values.get("lora")), ("training_type.type", kind)):
        if value is not None:
            out.put(key, value, "method.name", trained)
    out.default({"method.name": trained})
    read_keys(out, values, TOGETHER)
    _note_files(out, "Together")
    defaults(out, TOGETHER)
    if is_lora:
        out.default({"method.lora_r": 8})
        out.default({"method.lora_alpha": 2 * out.job["method.lora_r"]})


def read_fireworks(values: Json, out: Imported) -> None:
    known = {snake(key): (key, value) for key, value in values.items()}
    key, template = known.get("jinja_template", ("", None))
    if isinstance(template, str) and template.strip():
        out.template(key, template, template)
    read_keys(out, values, FIREWORKS, name_of=snake)
    name = str(known.get("base_model", ("", ""))[1] or "").rpartition("/")[2]
    out.job.setdefault("model.model_name_or_path", name or _STAND_IN)
    out.job.setdefault("train.global_batch_size", 16)
    defaults(out, FIREWORKS)
