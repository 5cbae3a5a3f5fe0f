"""Axolotl's YAML: https://docs.axolotl.ai/docs/config-reference.html, as of mid 2026."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farthing.config.importers import hf_trainer as hf
from farthing.config.importers.prompts import ALPACA_STYLES, CHATML, chat_columns, style_of_fields
from farthing.config.importers.record import (
    Imported,
    Odd,
    To,
    flat,
    names,
    optimizer,
    positive,
    read_keys,
    rows,
    scheduler,
    share,
    text,
    truth,
    whole,
)
from farthing.config.importers.shared import NO_COUNT_OF_GPUS, reasons
from farthing.storage.files import Json

NAME = "axolotl"


def _too_long(value: Any) -> str:
    if value not in ("drop", "truncate", "raise"):
        raise Odd("farthing truncates, skips or refuses what is too long (data.too_long)")
    return {"drop": "skip", "truncate": "truncate", "raise": "error"}[value]


def _targets(value: Any) -> list[str]:
    found = names(value)
    if any(sign in name for name in found for sign in "()|\\*"):
        raise Odd(
            "a pattern of layer names; farthing takes names: all-linear is used, which adapts more"
            " layers"
        )
    return found


TABLE: dict[str, To] = {
    **{key: rule for key, rule in hf.ARGUMENTS.items() if key not in ("report_to",)},
    **hf.ADAPTER,
    **rows("model", text, "base_model=model_name_or_path revision_of_model=revision"),
    **rows("model", truth, "trust_remote_code"),
    **rows("data", truth, "train_on_inputs=train_on_prompt"),
    **rows("method", truth, "peft_use_dora=use_dora peft_use_rslora=use_rslora"),
    **rows(
        "train",
        whole,
        "micro_batch_size=per_device_train_batch_size eval_batch_size=per_device_eval_batch_size",
    ),
    **rows("train", positive, "num_epochs=num_train_epochs adam_eps=adam_epsilon"),
    "sequence_len": To("data.max_length", whole),
    "excess_length_strategy": To("data.too_long", _too_long),
    "val_set_size": To("data.eval_fraction", share),
    "optimizer": To("train.optim", optimizer),
    "lr_scheduler": To("train.lr_scheduler_type", scheduler),
    "lora_target_modules": To("method.target_modules", _targets),
    "peft_init_lora_weights": To("method.init_lora_weights", hf.scratch),
}
_OTHER_TRAINING = {
    "processor_type": "images or sound (a processor)",
    "rl": "preference or reinforcement learning",
    "reward_model": "a reward model",
    "process_reward_model": "a reward model",
    "diffusion": "a diffusion language model",
    "ebft": "energy-based training",
    "qat": "quantization-aware training",
    "unfrozen_parameters": "some layers in full and the others frozen",
    "relora": "ReLoRA",
    "llmcompressor": "pruning while training",
}


def read(values: Mapping[str, Any], out: Imported) -> None:
    """Axolotl's settings."""
    for key, what in _OTHER_TRAINING.items():
        wanted = values.get(key)
        if wanted and wanted != {"name": None}:
            parts = dict(flat({key: wanted}))
            for index, (part, value) in enumerate(parts.items()):
                why = f"{what}, which farthing does not do" if index == 0 else f"settles {key}"
                out.name(part, value, why, "blocks" if index == 0 else "none")
    _method(values, out)
    _data(values, out)
    hf.warmups(out, values)
    _evaluation(values, out)
    hf.positions(out, values)
    hf.positions(out, values.get("overrides_of_model_config") or {}, "overrides_of_model_config.")
    if values.get("hub_model_id"):  # there a name alone publishes
        out.job["train.push_to_hub"] = True
    read_keys(out, flat(values), TABLE, reasons("model", NAME, "common"))
    _defaults(values, out)


def _evaluation(values: Mapping[str, Any], out: Imported) -> None:
    every = values.get("evals_per_epoch")
    if every == 1:
        out.put("evals_per_epoch", every, "train.eval_strategy", "epoch")
    elif every:
        out.name(
            "evals_per_epoch",
            every,
            "farthing evaluates once an epoch, or every train.eval_steps steps",
        )
    if values.get("early_stopping_patience") is False:
        out.name("early_stopping_patience", False, "off there, and off here")


def _method(values: Mapping[str, Any], out: Imported) -> None:
    adapter = values.get("adapter")
    if values.get("load_in_4bit") is True and not adapter:
        out.name("load_in_4bit", True, "a 4-bit base without an adapter can't be trained", "blocks")
    is_4bit = hf.quantized(out, values)
    if adapter in ("lora", "qlora"):
        out.put(
            "adapter", adapter, "method.name", "qlora" if is_4bit or adapter == "qlora" else "lora"
        )
    elif adapter:
        out.name(
            "adapter",
            adapter,
            f"an adapter of kind {adapter}, which farthing does not have",
            "blocks",
        )
    else:
        if "adapter" in values:
            out.put(
                "adapter", adapter, "method.name", "full", "no adapter: the whole model is trained"
            )
        out.default("method.name", "full")
        hf.no_adapter(out, values, "lora_", "peft_", "loraplus_")
    linear = values.get("lora_target_linear")
    if linear is True and adapter:
        out.put("lora_target_linear", True, "method.target_modules", ["all-linear"])
        if values.get("lora_target_modules"):
            out.name(
                "lora_target_modules",
                values["lora_target_modules"],
                "lora_target_linear covers them",
            )
    elif linear is not None:
        out.name("lora_target_linear", linear, "off there: lora_target_modules says which layers")


def _defaults(values: Mapping[str, Any], out: Imported) -> None:
    out.default_all(
        "train", num_train_epochs=1.0, per_device_train_batch_size=1, gradient_accumulation_steps=1
    )
    out.default_all("train", lr_scheduler_type="cosine", optim="adamw_torch_fused")
    if "train.warmup_steps" not in out.job and "train.warmup_ratio" not in out.job:
        out.default("train.warmup_ratio", 0.03)
        out.notes.append("Axolotl warms up for 3 % of the steps but 100 at most; this job for 3 %")
    out.default("data.max_length", 512)
    out.default("data.too_long", "skip")
    out.default("train.load_best_model_at_end", False)
    if values.get("adapter") in ("lora", "qlora"):
        out.default("method.lora_dropout", 0.0)
    out.notes.append(NO_COUNT_OF_GPUS)
    if out.job.get("train.gradient_accumulation_steps", 1) > 1:
        out.notes.append(
            "Axolotl takes the mean of its micro-batches' losses; here every target of a step"
            " weighs the same, however many its micro-batch has"
        )
    if values.get("sample_packing"):
        out.notes.append(
            "sample_packing: a step there held micro_batch_size x gradient_accumulation_steps"
            " packed sequences of sequence_len tokens; here it holds that many examples. Set"
            " train.global_batch_size to sequence_len / (mean tokens of an example) times as many"
            " for as many steps an epoch (`farthing doctor --data FILE` says the mean)"
        )


# ---- the data ----


def _data(values: Mapping[str, Any], out: Imported) -> None:
    sources: list[Json] = []
    for section in ("datasets", "pretraining_dataset"):
        given = values.get(section)
        if isinstance(given, str):
            given = [{"path": given, "type": "completion"}]
            out.put(section, given[0]["path"], "data.train", given[0]["path"])
            out.job.pop("data.train")
        for index, item in enumerate(given or []):
            if isinstance(item, Mapping):
                sources.append(
                    _one(f"{section}[{index}]", item, out, is_text=section == "pretraining_dataset")
                )
    if sources:
        out.job["data.train"] = sources
    held_out = [
        _one(f"test_datasets[{index}]", item, out, is_text=False)
        for index, item in enumerate(values.get("test_datasets") or [])
        if isinstance(item, Mapping)
    ]
    if held_out:
        out.job["data.eval"] = held_out
    name = values.get("chat_template")
    types = [str(source.get("_type")) for source in sources]
    if name == "chatml":
        out.files["chatml.jinja"] = CHATML
        out.put("chat_template", name, "data.chat_template", "chatml.jinja")
    elif name == "jinja" and isinstance(values.get("chat_template_jinja"), str):
        out.files["chat_template.jinja"] = values["chat_template_jinja"]
        out.put(
            "chat_template_jinja",
            values["chat_template_jinja"],
            "data.chat_template",
            "chat_template.jinja",
        )
        out.name("chat_template", name, "chat_template_jinja has it")
    elif name:
        uses_it = any(each.startswith("chat_template") for each in types)
        out.name(
            "chat_template",
            name,
            (
                "the tokenizer's own chat template is used; where the two differ, give a Jinja file"
                " in data.chat_template"
                if uses_it
                else "no data set asks for it"
            ),
            "none" if not uses_it or name == "tokenizer_default" else "differs",
        )
    for source in sources + held_out:
        source.pop("_type", None)


def _one(at: str, item: Mapping[str, Any], out: Imported, *, is_text: bool) -> Json:
    """A data set with what it is called in a job."""
    source: Json = {}
    for key in ("path", "data_files", "name", "split", "ds_type"):
        if key not in item:
            continue
        value = item[key]
        if value is None:
            out.name(f"{at}.{key}", value, "empty there: its default holds")
        elif key == "data_files":
            _files(out, f"{at}.data_files", value, source)
        elif key in ("path", "name", "split"):
            source[key] = str(value)
            out.keep(f"{at}.{key}", value, "data.train")
        else:
            out.name(f"{at}.{key}", value, "the kind of a file is seen from its ending")
    if item.get("path") is None:
        out.name(f"{at}.path", None, "a data set without a path", "blocks")
    kind = item.get("type")
    source["_type"] = kind
    columns = _columns(at, item, out, is_text=is_text)
    if columns:
        source["columns"] = columns
    for key, value in flat(item, f"{at}."):
        if key not in out.lines:
            name = key[len(at) + 1 :]
            why = (
                "settles preference data, which farthing does not train on"
                if name.startswith("field_")
                else ""
            )
            if name.startswith("roles.") or name in (
                "roles_to_train",
                "train_on_eos",
                "train_on_eot",
            ):
                why = "farthing knows the usual names of roles and learns the assistant's turns"
            elif name.startswith("message_field_training"):
                why = "farthing reads `weight`, `train` and `loss` of a turn"
            out.name(
                key,
                value,
                why or "farthing has no such setting for a data set",
                "none" if why else "differs",
            )
    return source


def _files(out: Imported, key: str, files: Any, source: Json) -> None:
    found = [files] if isinstance(files, str) else list(files) if isinstance(files, list) else []
    if len(found) == 1 and "path" in source:
        source["path"] = f"{source['path'].rstrip('/')}/{found[0]}"
        out.keep(key, files, "data.train")
        out.notes.append(
            f"{source['path']}: a file within a data set; fetch it, and name the file here"
        )
    else:
        out.name(
            key,
            files,
            "several files of one data set: fetch them and name each in data.train",
            "differs",
        )


_PREFERENCES = [
    "dpo",
    "orpo",
    "kto",
    "ultra",
    "argilla",
    "bradley",
    "stepwise",
    "ebft",
    "rwd.",
    "intel",
    "prompt_pairs",
]


def _columns(at: str, item: Mapping[str, Any], out: Imported, *, is_text: bool) -> Json:
    kind = item.get("type")
    if isinstance(kind, Mapping):
        columns = style_of_fields(kind)
        for key, value in flat({"type": kind}, f"{at}."):
            out.keep(key, value, "data.columns")
        return columns
    name = str(kind or "")
    base, _, style = name.partition(":")
    if is_text or base in ("completion", "pretrain") or (not name and "text_column" in item):
        column = item.get("field") or item.get("text_column") or "text"
        for key in ("field", "text_column", "type"):
            if key in item:
                out.keep(f"{at}.{key}", item[key], "data.columns")
        return {} if column == "text" else {"text": str(column)}
    is_sharegpt = base in ("sharegpt", "sharegpt.load_role", "sharegpt_simple")
    if is_sharegpt or base == "chat_template" or base.startswith("chat_template.default"):
        out.keep(f"{at}.type", kind, "data.train")
        return _chat(at, item, out)
    key = f"alpaca:{style}" if base == "alpaca" and style else base
    if key in ALPACA_STYLES:
        out.keep(f"{at}.type", kind, "data.columns")
        return dict(ALPACA_STYLES[key])
    if not name:
        if "type" in item:
            out.name(
                f"{at}.type",
                kind,
                "tokenized already there; farthing tokenizes itself: name the text",
                "blocks",
            )
        return {}
    if any(word in name for word in _PREFERENCES):
        out.name(
            f"{at}.type",
            kind,
            "data for preferences or rewards, which farthing does not train on",
            "blocks",
        )
    else:
        out.name(
            f"{at}.type",
            kind,
            f"how {name} joins the columns is not known here: say it in data.columns, such as"
            ' {prompt: "{question}\\n", completion: "{answer}"}',
            "differs",
        )
    return {}


def _chat(at: str, item: Mapping[str, Any], out: Imported) -> Json:
    field = item.get("field_messages")
    mapping = item.get("message_property_mappings") or {}
    role = mapping.get("role") or item.get("message_field_role")
    content = mapping.get("content") or item.get("message_field_content")
    for key in (
        "field_messages",
        "message_field_role",
        "message_field_content",
        "field_tools",
        "field_thinking",
        "field_system",
        "template_thinking_key",
    ):
        if key in item:
            out.keep(f"{at}.{key}", item[key], "data.columns")
    for key in mapping:
        out.keep(f"{at}.message_property_mappings.{key}", mapping[key], "data.columns")
    if item.get("chat_template"):
        out.name(
            f"{at}.chat_template",
            item["chat_template"],
            "one chat template for all data: data.chat_template",
            "differs",
        )
    return chat_columns(field, role, content)
