"""TRL: the settings of `SFTTrainer` in a YAML for `trl sft --config`, on a command line, or in a
script.

Defaults are those of TRL 1.16 (`SFTConfig`, `ModelConfig`, `ScriptArguments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farthing.config.importers import hf_trainer as hf
from farthing.config.importers.record import (
    Imported,
    To,
    flat,
    names,
    read_keys,
    text,
    whole,
)
from farthing.config.importers.shared import NO_COUNT_OF_GPUS, reasons
from farthing.storage.files import Json

NAME = "trl"


SFT: dict[str, To] = {
    **hf.ARGUMENTS,
    "max_length": To("data.max_length", whole),
    "max_seq_length": To("data.max_length", whole),
    "chat_template_path": To("data.chat_template", text),
}
"""`SFTConfig`."""
TABLE: dict[str, To] = {
    **SFT,
    **hf.ADAPTER,
    **{
        key: hf.MODEL[key]
        for key in (
            "model_name_or_path",
            "model_revision",
            "trust_remote_code",
            "tokenizer_name_or_path",
        )
    },
    "lora_target_modules": To(
        "method.target_modules",
        lambda value: value.split() if isinstance(value, str) else names(value),
    ),
}


def read(values: Mapping[str, Any], out: Imported) -> None:
    """The flat settings of `trl sft`."""
    data(values, out)
    template = values.get("chat_template")
    if isinstance(template, str) and "{" in template:
        out.files["chat_template.jinja"] = template
        out.put("chat_template", template, "data.chat_template", "chat_template.jinja")
    is_4bit = hf.quantized(out, values)
    peft = values.get("use_peft")
    has_adapter = str(peft).lower() == "true"
    method = "full" if not has_adapter else "qlora" if is_4bit else "lora"
    if peft is not None:
        out.put("use_peft", peft, "method.name", method)
    out.default("method.name", method)
    if not has_adapter:
        hf.no_adapter(out, values, "lora_", "use_dora", "use_rslora")
    hf.warmups(out, values)
    read_keys(out, flat(values), TABLE, reasons("model", NAME, "common"))
    if has_adapter:
        out.default_all("method", lora_r=16, lora_alpha=32, lora_dropout=0.05)
        hf.peft_targets(out)
    defaults(out)


def defaults(out: Imported) -> None:
    """What `SFTTrainer` does where nothing is said."""
    out.default("train.learning_rate", 2e-5)
    hf.trainer_defaults(out)
    out.default("data.max_length", 1024)
    out.notes.append(NO_COUNT_OF_GPUS)


def data(values: Mapping[str, Any], out: Imported) -> None:
    """`dataset_name` and what goes with it, or the lists `datasets` (TRL) and `dataset_mixture`
    (Hugging Face's recipes).
    """
    key = next(
        (key for key in _NAMES_OF_DATA if isinstance(values.get(key), str) and values[key]), ""
    )
    held_key = "dataset_test_split" if values.get("dataset_test_split") else "validation_file"
    held_out, evaluates = (
        values.get(held_key),
        str(values.get("eval_strategy", "no")) not in ("no", "False"),
    )
    if key:
        name = values[key]
        source: Json = {"path": name}
        for own, theirs in (
            ("name", ("dataset_config", "dataset_config_name")),
            ("split", ("dataset_train_split",)),
        ):
            for each in theirs:
                if isinstance(values.get(each), str):
                    source[own] = values[each]
                    out.name(each, values[each], f"is `{own}` of data.train")
        field = values.get("dataset_text_field") or values.get("text_column")
        if isinstance(field, str) and field not in ("", "text"):
            source["columns"] = {"text": field}
        out.put(key, name, "data.train", [source])
        if held_out and evaluates:
            other = "split" if held_key == "dataset_test_split" else "path"
            out.put(held_key, held_out, "data.eval", [{**source, other: str(held_out)}])
    if held_out and not evaluates:
        out.name(held_key, held_out, "not evaluated there (eval_strategy: no)")
    _mixture(values.get("datasets"), "datasets", out)
    mixer = values.get("dataset_mixer")
    if isinstance(mixer, Mapping) and mixer:
        split = next(iter(names(values.get("dataset_splits") or ["train"])))
        for name, weight in mixer.items():
            out.keep(f"dataset_mixer.{name}", weight, "data.train")
        found = [{"path": name, "split": split, "weight": weight} for name, weight in mixer.items()]
        out.job.setdefault("data.train", found)
        if "dataset_splits" in values:
            out.name(
                "dataset_splits", values["dataset_splits"], "the first is `split` of data.train"
            )
    mixed = values.get("dataset_mixture")
    if isinstance(mixed, Mapping):
        _mixture(mixed.get("datasets"), "dataset_mixture.datasets", out)
        if isinstance(mixed.get("test_split_size"), float):
            out.put(
                "dataset_mixture.test_split_size",
                mixed["test_split_size"],
                "data.eval_fraction",
                mixed["test_split_size"],
            )


_NAMES_OF_DATA = ("dataset_name", "dataset_id_or_path", "train_file", "data_path")
_OF_SOURCE = {
    "path": "path",
    "id": "path",
    "name": "name",
    "config": "name",
    "split": "split",
    "fraction": "weight",
    "weight": "weight",
}


def _mixture(given: Any, at: str, out: Imported) -> None:
    """Several data sets, each with the share of its rows that is taken."""
    if not (isinstance(given, list) and given and all(isinstance(each, Mapping) for each in given)):
        return
    found = []
    for index, each in enumerate(given):
        found.append(
            {
                _OF_SOURCE[key]: value
                for key, value in each.items()
                if key in _OF_SOURCE and value is not None
            }
        )
        for key, value in flat(each, f"{at}[{index}]."):
            name = key.rpartition("].")[2].split(".")[0]
            if name in _OF_SOURCE:
                out.name(key, value, "is in data.train")
            elif name == "columns" and isinstance(value, list):
                out.name(
                    key,
                    value,
                    "the columns that are kept; farthing reads those it knows and names the others",
                )
            else:
                out.name(key, value, "farthing has no such setting for a data set", "differs")
    out.job.setdefault("data.train", found)
