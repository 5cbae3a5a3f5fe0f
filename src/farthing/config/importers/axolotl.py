"""Axolotl's YAML: https://docs.axolotl.ai/docs/config-reference.html, as of mid 2026."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farthing.config.importers import hf, preference
from farthing.config.importers.prompts import (
    chat_columns,
    columns_of_fields,
    pair_columns,
    pair_style,
)
from farthing.config.importers.record import Imported, flat, read_keys
from farthing.config.importers.tables import defaults, fact, table
from farthing.storage.files import Json

NAME = "axolotl"
_OBJECTIVES = ("dpo", "ipo", "kto", "orpo", "simpo")


def read(values: Mapping[str, Any], out: Imported) -> None:
    """Axolotl's settings."""
    for key, what in fact("axolotl-other-training").items():
        wanted = values.get(key)
        if wanted and wanted != {"name": None} and not (key == "rl" and wanted in _OBJECTIVES):
            first, *rest = flat({key: wanted})
            out.name(*first, f"{what}, which farthing does not do", "blocks")
            for each in rest:
                out.name(*each, f"settles {key}")
    _objective(values, out)
    _method(values, out)
    _data(values, out)
    hf.warmups(out, values)
    every = values.get("evals_per_epoch")
    if every == 1:
        out.put("evals_per_epoch", every, "train.eval_strategy", "epoch")
    if values.get("hub_model_id"):  # there a name alone publishes
        out.job["train.push_to_hub"] = True
    lowest = values.get("cosine_min_lr_ratio")
    if lowest and values.get("lr_scheduler", "cosine") == "cosine":
        to = "train.lr_scheduler_kwargs"
        out.put("cosine_min_lr_ratio", lowest, to, {"min_lr_rate": lowest})
        out.job["train.lr_scheduler_type"] = "cosine_with_min_lr"
        out.keep([("lr_scheduler", "cosine")], "train.lr_scheduler_type")
    overridden = values.get("overrides_of_model_config")
    if isinstance(overridden, Mapping) and isinstance(overridden.get("rope_scaling"), Mapping):
        at, to = "overrides_of_model_config.rope_scaling", "model.rope_scaling"
        out.put(at, overridden["rope_scaling"], to, dict(overridden["rope_scaling"]))
    for plugin in values.get("plugins") or ():
        if not any(name in str(plugin).lower() for name in fact("axolotl-plugins").split()):
            out.name("plugins", plugin, "a plugin that may change what is learned", "differs")
    kind = str(values.get("model_type"))
    if "Classification" in kind and not preference.is_asked(out):
        out.name("model_type", kind, "a classifier: farthing's data for those is another", "blocks")
    tool = f"{NAME}-preference" if preference.is_asked(out) else NAME
    leaves = ("rope_scaling", "lr_scheduler_kwargs")
    read_keys(out, flat(values, whole=leaves), table(tool))
    preference.settle(out, NAME)
    _tokens(out, values)
    _defaults(values, out)


def _objective(values: Mapping[str, Any], out: Imported) -> None:
    asked = values.get("rl")
    if asked in _OBJECTIVES:
        preference.read(out, str(asked), values, "dpo_loss_type")
        out.put("rl", asked, "task", out.job["task"])
        if asked == "simpo":
            out.default({"objective.beta": None if "rl_beta" in values else 0.1}, "TRL")
    elif values.get("reward_model") is True:
        preference.read(out, "reward", {})
        out.put("reward_model", True, "task", "reward")


def _tokens(out: Imported, values: Mapping[str, Any]) -> None:
    """New tokens need embeddings that are trained."""
    if values.get("adapter") and "method.modules_to_save" not in out.job:
        why = "new tokens whose embeddings nothing trains (lora_modules_to_save)"
        out.drop("model.new_tokens", why, "differs")


def _method(values: Mapping[str, Any], out: Imported) -> None:
    adapter = values.get("adapter")
    if values.get("load_in_4bit") is True and not adapter:
        out.name("load_in_4bit", True, "a 4-bit base without an adapter can't be trained", "blocks")
    is_4bit = hf.quantized(out, values)
    if adapter in ("lora", "qlora"):
        name = "qlora" if is_4bit or adapter == "qlora" else "lora"
        out.put("adapter", adapter, "method.name", name)
    elif adapter:
        out.name("adapter", adapter, f"farthing has no adapter of kind {adapter}", "blocks")
    else:
        if "adapter" in values:
            why = "no adapter: the whole model is trained"
            out.put("adapter", adapter, "method.name", "full", why)
        out.default({"method.name": "full"})
        hf.no_adapter(out, values, "lora_", "peft_", "loraplus_")
    linear = values.get("lora_target_linear")
    if linear is True and adapter:
        out.put("lora_target_linear", True, "method.target_modules", ["all-linear"])
        layers = values.get("lora_target_modules")
        if layers:
            out.name("lora_target_modules", layers, "lora_target_linear covers them")
    elif linear is not None:
        out.name("lora_target_linear", linear, "off there: lora_target_modules says which layers")


def _defaults(values: Mapping[str, Any], out: Imported) -> None:
    defaults(out, NAME)
    if "train.warmup_steps" not in out.job and "train.warmup_ratio" not in out.job:
        out.default({"train.warmup_ratio": 0.03})
        out.notes.append("Axolotl warms up for 3 % of the steps but 100 at most; this job for 3 %")
    if values.get("adapter") in ("lora", "qlora"):
        out.default({"method.lora_dropout": 0.0})
    out.notes.append(hf.NO_COUNT_OF_GPUS)
    if out.job.get("train.gradient_accumulation_steps", 1) > 1 and not preference.is_asked(out):
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
            out.keep([(section, given)], "data.train")
            given = [{"path": given, "type": "completion"}]
        is_text = section == "pretraining_dataset"
        for index, item in enumerate(given or []):
            if isinstance(item, Mapping):
                sources.append(_one(f"{section}[{index}]", item, out, is_text=is_text))
    held_out = [
        _one(f"test_datasets[{index}]", item, out, is_text=False)
        for index, item in enumerate(values.get("test_datasets") or [])
        if isinstance(item, Mapping)
    ]
    if sources:
        out.job["data.train"] = sources
    if held_out:
        out.job["data.eval"] = held_out
    types = [str(source.pop("_type", None)) for source in sources]
    for source in held_out:
        source.pop("_type", None)
    name, jinja = values.get("chat_template"), values.get("chat_template_jinja")
    uses_it = any("chat_template" in each for each in types)
    if name == "chatml" or any(each in ("chatml.ultra", "chatml.argilla_chat") for each in types):
        out.files["chatml.jinja"] = fact("chatml")
        out.job["data.chat_template"] = "chatml.jinja"
        out.keep([("chat_template", name)] if name == "chatml" else [], "data.chat_template")
        if name not in (None, "chatml"):
            out.name("chat_template", name, "the format of the data has a frame of its own")
    elif name == "jinja" and isinstance(jinja, str):
        file = "chat_template.jinja"
        out.files[file] = jinja
        out.put("chat_template_jinja", jinja, "data.chat_template", file)
        out.name("chat_template", name, "chat_template_jinja has it")
    elif name and (not uses_it or name == "tokenizer_default"):
        why = "the tokenizer's own chat template is used" if uses_it else "no data set asks for it"
        out.name("chat_template", name, why)
    elif name:
        why = (
            "the tokenizer's own chat template is used; where the two differ, give a Jinja file in"
            " data.chat_template"
        )
        out.name("chat_template", name, why, "differs")


def _one(at: str, item: Mapping[str, Any], out: Imported, *, is_text: bool) -> Json:
    """A data set with what it is called in a job."""
    source: Json = {"_type": item.get("type")}
    for key in ("path", "name", "split"):
        if item.get(key) is not None:
            source[key] = str(item[key])
            out.keep([(f"{at}.{key}", item[key])], "data.train")
    files = item.get("data_files")
    found = [files] if isinstance(files, str) else files if isinstance(files, list) else []
    if len(found) == 1 and "path" in source:
        if source["path"] not in ("json", "csv", "parquet", "text"):
            source["path"] = f"{source['path'].rstrip('/')}/{found[0]}"
            note = f"{source['path']}: a file within a data set; fetch it, and name the file here"
            out.notes.append(note)
        else:
            source["path"] = str(found[0])
        out.keep([(f"{at}.data_files", files)], "data.train")
    if item.get("path") is None:
        out.name(f"{at}.path", None, "a data set without a path", "blocks")
    columns = _columns(at, item, out, is_text=is_text)
    if columns:
        source["columns"] = columns
    before = f"{at}."
    dataset = table("axolotl-dataset")
    read_keys(out, flat(item, before), dataset, name_of=lambda key: key.removeprefix(before))
    return source


def _columns(at: str, item: Mapping[str, Any], out: Imported, *, is_text: bool) -> Json:
    kind, where = item.get("type"), "data.columns"
    asked = preference.is_asked(out)
    if isinstance(kind, Mapping):
        out.keep(flat({"type": kind}, f"{at}."), where)
        return pair_columns(kind, out.job["task"]) if asked else columns_of_fields(kind)
    name = str(kind or "")
    base, _, style = name.partition(":")
    key = f"{at}.type"
    if is_text or base in ("completion", "pretrain") or (not name and "text_column" in item):
        column = item.get("field") or item.get("text_column") or "text"
        known = ("field", "text_column", "type")
        out.keep([(f"{at}.{each}", item[each]) for each in known if each in item], where)
        return {} if column == "text" else {"text": str(column)}
    is_chat = base.startswith(("sharegpt", "chat_template", "bradley_terry.chat_template"))
    if asked and base.startswith("bradley_terry.chat_template"):
        out.keep([(key, kind)], where)
        return {"prompt": "input"}
    if asked and base in ("chatml.ultra", "chatml.argilla_chat"):
        out.keep([(key, kind)], "data.train")
        return {}
    if asked and (pair := pair_style(base, out.job["task"])):
        out.keep([(key, kind)], where)
        return pair
    if is_chat and not base.startswith("bradley"):
        out.keep([(key, kind)], "data.train")
        return _chat(at, item, out)
    style = f"alpaca:{style}" if base == "alpaca" and style else base
    styles = fact("axolotl-styles")
    if asked and style in styles:
        out.name(key, kind, f"rows of {style} are no pairs or verdicts", "blocks")
        return {}
    if style in styles:
        out.keep([(key, kind)], where)
        return dict(styles[style])
    if not name:
        if "type" in item:
            why = "tokenized already there; farthing tokenizes itself: name the text"
            out.name(key, kind, why, "blocks")
        return {}
    if not asked and any(word in name for word in fact("axolotl-preferences").split()):
        out.name(key, kind, "data for preferences or rewards, and no `rl` asks for them", "blocks")
    else:
        why = (
            f"how {name} joins the columns is not known here: say it in data.columns, such as"
            ' {prompt: "{question}\\n", completion: "{answer}"}'
        )
        out.name(key, kind, why, "differs")
    return {}


def _chat(at: str, item: Mapping[str, Any], out: Imported) -> Json:
    found = item.get("message_property_mappings") or {}
    role = found.get("role") or item.get("message_field_role")
    content = found.get("content") or item.get("message_field_content")
    known = fact("axolotl-chat-keys").split()
    out.keep([(f"{at}.{key}", item[key]) for key in known if key in item], "data.columns")
    out.keep(flat({"message_property_mappings": found} if found else {}, f"{at}."), "data.columns")
    if not preference.is_asked(out):
        return chat_columns(item.get("field_messages"), role, content)
    columns = {}
    for name in ("messages", "chosen", "rejected"):
        column = item.get(f"field_{name}")
        out.keep([(f"{at}.field_{name}", column)] if column else [], "data.columns")
        if column and column != name:
            columns[name] = str(column)
    return columns
