"""TRL: the settings of `SFTTrainer` in a YAML for `trl sft --config`, on a command line, or in a script.

Defaults are those of TRL 1.16 (`SFTConfig`, `ModelConfig`, `ScriptArguments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farthing.config.importers import hf_trainer as hf
from farthing.config.importers.record import (
    Imported,
    To,
    Why,
    flat,
    names,
    read_keys,
    text,
    whole,
)
from farthing.config.importers.shared import COMMON, NO_COUNT_OF_GPUS
from farthing.durability.files import Json

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
    **{key: hf.MODEL[key] for key in ("model_name_or_path", "model_revision", "trust_remote_code")},
    "lora_target_modules": To(
        "method.target_modules", lambda value: value.split() if isinstance(value, str) else names(value)
    ),
}
GROUPS = (
    *hf.MODEL_GROUPS,
    Why("none", "farthing masks prompts by itself: what the assistant or the completion says is learned",
        "completion_only_loss assistant_only_loss"),
    Why("none", "the column of the text; a column `text` is found by its name", "dataset_text_field"),
    Why("none", "settings of the data set's preparation", "dataset_kwargs* dataset_streaming ignore_bias_buffers streaming"),
    Why("differs", "special tokens; farthing takes the tokenizer as it is", "eos_token pad_token"),
    Why("none", "farthing's order is a permutation of all examples that follows from the seed", "shuffle_dataset"),
    Why("none", "the task of the adapter is that of the job", "lora_task_type"),
    *COMMON,
)  # fmt: skip


def read(values: Mapping[str, Any], out: Imported) -> None:
    """The flat settings of `trl sft`."""
    data(values, out)
    is_4bit = hf.quantized(out, dict(values), {"load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit"})
    if "load_in_4bit" in values:
        out.name("load_in_4bit", values["load_in_4bit"], "method: qlora is the 4-bit base")
    peft = values.get("use_peft")
    has_adapter = str(peft).lower() == "true"
    method = "full" if not has_adapter else "qlora" if is_4bit else "lora"
    if peft is not None:
        out.put("use_peft", peft, "method.name", method)
    out.default("method.name", method)
    if not has_adapter:
        for key in [key for key in values if key.startswith("lora_") or key in ("use_dora", "use_rslora")]:
            out.name(key, values[key], "about an adapter, and there is none")
    hf.warmups(out, values)
    read_keys(out, flat(values), TABLE, GROUPS)
    if has_adapter:
        hf.peft_defaults(out, r=16, alpha=32, dropout=0.05)
    defaults(out)


def defaults(out: Imported) -> None:
    """What `SFTTrainer` does where nothing is said."""
    out.default("train.learning_rate", 2e-5)
    hf.trainer_defaults(out)
    out.default("data.max_length", 1024)
    out.notes.append(NO_COUNT_OF_GPUS)


def data(values: Mapping[str, Any], out: Imported) -> None:
    """`dataset_name` and what goes with it, or the list `datasets`."""
    name = values.get("dataset_name") or values.get("train_file")
    if isinstance(name, str):
        source: Json = {"path": name}
        key = "dataset_name" if values.get("dataset_name") else "train_file"
        for own, theirs in (("name", ("dataset_config", "dataset_config_name")), ("split", ("dataset_train_split",))):
            for each in theirs:
                if isinstance(values.get(each), str):
                    source[own] = values[each]
                    out.name(each, values[each], f"is `{own}` of data.train")
        field = values.get("dataset_text_field") or values.get("text_column")
        if isinstance(field, str) and field not in ("", "text"):
            source["columns"] = {"text": field}
        out.put(key, name, "data.train", [source])
        held_out = values.get("dataset_test_split") or values.get("validation_file")
        if held_out and str(values.get("eval_strategy", "no")) != "no":
            key = "dataset_test_split" if values.get("dataset_test_split") else "validation_file"
            path = name if key == "dataset_test_split" else str(held_out)
            out.put(
                key, held_out, "data.eval", [{**source, "path": path, **({"split": held_out} if path == name else {})}]
            )
        elif values.get("dataset_test_split"):
            out.name("dataset_test_split", held_out, "not evaluated there (eval_strategy: no)")
    mixture = values.get("datasets")
    if isinstance(mixture, list) and mixture and all(isinstance(each, Mapping) for each in mixture):
        found = []
        for index, each in enumerate(mixture):
            keys = {"path": "path", "name": "name", "split": "split", "fraction": "weight"}
            found.append({keys[key]: value for key, value in each.items() if key in keys and value is not None})
            for key, value in flat(each, f"datasets[{index}]."):
                known = key.partition(".")[2].split(".")[0] in keys
                out.name(key, value, "is in data.train" if known else "farthing has no such setting for a data set",
                         "none" if known else "differs")  # fmt: skip
        out.job.setdefault("data.train", found)
