"""Axolotl's YAML: https://docs.axolotl.ai/docs/config-reference.html, as of mid 2026."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from farthing.config.importers import hf, preference
from farthing.config.importers.tables import Imported, defaults, fact, read_keys
from farthing.objectives.registry import objective_of
from farthing.storage.files import Json

NAME = "axolotl"
_FILES = ("json", "csv", "parquet", "text")


def read(values: Json, out: Imported) -> None:
    asked = values.get("rl")
    if asked in ("dpo", "ipo", "kto", "orpo", "simpo"):
        preference.read(out, asked, values, "dpo_loss_type", "rl")
    elif values.get("reward_model") is True:
        preference.read(out, "reward", {"reward_model": True}, said_by="reward_model")
    adapter, is_4bit = values.get("adapter"), values.get("load_in_4bit") is True
    if is_4bit and not adapter:
        out.refuse("load_in_4bit", True, "a 4-bit base without an adapter can't be trained")
    method = hf.method_of(bool(adapter), is_4bit or adapter == "qlora")
    if adapter in ("lora", "qlora"):
        out.put("adapter", adapter, "method.name", method)
    out.default({"method.name": method})
    layers = values.get("lora_target_modules")
    if values.get("lora_target_linear") is True and layers:
        out.name("lora_target_modules", layers, "lora_target_linear covers them")
    _data(values, out)
    if values.get("hub_model_id"):  # there a name alone publishes
        out.job["train.push_to_hub"] = True
    lowest = values.get("cosine_min_lr_ratio")
    if lowest and values.get("lr_scheduler", "cosine") == "cosine":
        to = "train.lr_scheduler_kwargs"
        out.put("cosine_min_lr_ratio", lowest, to, {"min_lr_rate": lowest})
        out.job["train.lr_scheduler_type"] = "cosine_with_min_lr"
        out.keep({"lr_scheduler": "cosine"}, "train.lr_scheduler_type")
    given, known = values.get("plugins"), "|".join(fact("axolotl-plugins").split())
    plugins = map(str, given if isinstance(given, list) else [given or known])
    if odd := [each for each in plugins if not re.search(known, each.lower())]:
        out.name("plugins", odd, "a plugin that may change what is learned", "differs")
    read_keys(out, values, NAME)
    preference.settle(out, NAME)
    if adapter and "method.modules_to_save" not in out.job:
        why = "new tokens whose embeddings nothing trains (lora_modules_to_save)"
        out.drop("model.new_tokens", why, "differs")
    defaults(out, NAME)
    notes = fact("axolotl-notes")
    out.notes += [notes["weights"]] * (method == "full" and values.get("bf16", "auto") is not False)
    out.notes += [notes["warmup"]] * ("train.warmup_ratio" in out.defaults)
    out.notes.append(fact("one-gpu"))
    is_split = out.job.get("train.gradient_accumulation_steps", 1) > 1 and not out.prefers
    out.notes += [notes["accumulation"]] * is_split
    out.notes += [notes["packing"]] * bool(values.get("sample_packing"))


# ---- the data ----


def _data(values: Json, out: Imported) -> None:
    kinds: list[str] = []
    for section in ("datasets", "pretraining_dataset", "test_datasets"):
        given = values.get(section)
        to = "data.eval" if section == "test_datasets" else "data.train"
        if isinstance(given, str):
            out.keep({section: given}, to)
            given = [{"path": given, "type": "completion"}]
        for index, item in enumerate(given if isinstance(given, list) else ()):
            if isinstance(item, dict):
                out.job.setdefault(to, []).append(_source(section, index, item, out))
                kinds.append(str(item.get("type") or section) if to == "data.train" else "")
    name, jinja = values.get("chat_template"), values.get("chat_template_jinja")
    uses_it = any("chat_template" in each for each in kinds)
    if {"completion", "pretrain", "pretraining_dataset"} & {*kinds}:
        out.notes.append(fact("long-texts"))
        if not values.get("excess_length_strategy"):
            out.default({"data.too_long": "truncate"})
    if name == "chatml" or {"chatml.ultra", "chatml.argilla_chat"} & {*kinds}:
        out.template("chat_template", name, fact("chatml"), "chatml.jinja")
    elif name == "jinja" and isinstance(jinja, str):
        out.template("chat_template_jinja", jinja, jinja)
        out.name("chat_template", name, "chat_template_jinja has it")
    elif name and (name == "tokenizer_default" or not uses_it):
        why = "the tokenizer's own chat template is used" if uses_it else "no data set asks for it"
        out.name("chat_template", name, why)


def _source(section: str, index: int, item: Json, out: Imported) -> Json:
    """A data set with what it is called in a job."""
    at = f"{section}[{index}]."
    own = {key: item[key] for key in ("path", "name", "split") if item.get(key) is not None}
    out.keep(own, "data.train", at)
    source: Json = {key: str(value) for key, value in own.items()}
    files = item.get("data_files")
    found = files if isinstance(files, list) else [files] * bool(files)
    if len(found) == 1 and "path" in source:
        is_kind = source["path"] in _FILES
        source["path"] = str(found[0]) if is_kind else f"{source['path'].rstrip('/')}/{found[0]}"
        if not is_kind:
            note = f"{source['path']}: a file within a data set; fetch it, and name the file here"
            out.notes.append(note)
        out.keep({"data_files": files}, "data.train", at)
    if item.get("path") is None:
        out.refuse(f"{at}path", None, "a data set without a path")
    columns, used = _columns(at, item, out, is_text=section == "pretraining_dataset")
    out.keep({key: item[key] for key in used.split() if item.get(key)}, "data.columns", at)
    read_keys(out, item, "axolotl-dataset", before=at)
    return source | {"columns": columns}


def _columns(at: str, item: Json, out: Imported, *, is_text: bool) -> tuple[Json, str]:
    """(columns of a data set, the keys that say them)."""
    kind, styles = item.get("type"), fact("axolotl-styles")
    if isinstance(kind, dict):
        of_kind = pair_columns(kind, out.job["task"]) if out.prefers else columns_of_fields(kind)
        return of_kind, "type"
    name, key = str(kind or ""), f"{at}type"
    base, _, style = name.partition(":")
    style = f"alpaca:{style}" if base == "alpaca" and style else base
    if is_text or base in ("completion", "pretrain") or (not name and "text_column" in item):
        return {"text": item.get("field") or item.get("text_column")}, "field text_column type"
    if out.prefers and base.startswith("bradley_terry.chat_template"):
        return {"prompt": "input"}, "type"
    if out.prefers and base in ("chatml.ultra", "chatml.argilla_chat"):
        return {}, "type"
    if out.prefers and (pair := pair_style(base, out.job["task"])):
        return pair, "type"
    if base.startswith(("sharegpt", "chat_template")):
        is_same = item.get("field_thinking") == item.get("template_thinking_key")
        thinking = "field_thinking template_thinking_key " * is_same
        return _chat(item, out), f"type {thinking}{fact('axolotl-chat-keys')}"
    if style in styles and not out.prefers:
        return dict(styles[style]), "type"
    if style in styles:
        out.refuse(key, kind, f"rows of {style} are no pairs or verdicts")
    elif not name and "type" in item:
        why = "tokenized already there; farthing tokenizes itself: name the text"
        out.refuse(key, kind, why)
    elif not out.prefers and any(word in name for word in fact("axolotl-preferences").split()):
        out.refuse(key, kind, "data for preferences or rewards, and no `rl` asks for them")
    elif name:
        why = f"how {name} joins columns is not known here: say it in data.columns, as a template"
        out.name(key, kind, why, "differs")
    return {}, ""


def _chat(item: Json, out: Imported) -> Json:
    if out.prefers:
        return {name: item.get(f"field_{name}") for name in ("messages", "chosen", "rejected")}
    found = item.get("message_property_mappings") or {}
    role = found.get("role") or item.get("message_field_role")
    content = found.get("content") or item.get("message_field_content")
    beside = {name: item.get(f"field_{name}") for name in ("system", "tools")}
    return chat_columns(item.get("field_messages"), role, content) | beside


# ---- columns and format strings ----


def pair_style(name: str, task: str) -> Json | None:
    """Axolotl's formats of preferences such as `chatml.intel`, for `task`; None for others."""
    frame, _, style = name.partition(".")
    frames, questions = fact("axolotl-frames"), fact("axolotl-questions")
    asked = "prompt" if (style, task) == ("ultra", "kto") else questions.get(style)
    is_pair = objective_of(task).n_sequences > 1
    if frame not in frames or asked is None or (style == "argilla" and is_pair):
        return None
    header, end, gap = frames[frame]
    user = f"{header.format('user')}{{{asked}}}{end}{gap}{header.format('assistant')}"
    answers = ("chosen", "rejected") if is_pair else ("completion",)
    return {
        "prompt": [f"{header.format('system')}{{system}}{end}{gap}{user}", user],
        **{answer: f"{{{answer}}}{end}" for answer in answers},
    }


def chat_columns(field: Any, role: Any, content: Any) -> Json:
    """`data.columns` of chats in a column of this name, whose turns have these keys."""
    return {"conversations" if role == "from" or content == "value" else "messages": field}


def _fields(given: Json, *known: str) -> dict[str, str]:
    return {name: str(given.get(f"field_{name}") or name) for name in known}


def _own(template: Any, fields: Mapping[str, str]) -> str:
    """A format string with a data set's own columns."""
    return re.sub(
        r"\{(\w+)\}", lambda found: "{" + fields.get(found[1], found[1]) + "}", str(template)
    )


def columns_of_fields(given: Json) -> Json:
    """Axolotl's own formats: fields with a format string each way."""
    fields = _fields(given, "system", "instruction", "input", "output")
    system = "{system}" if given.get("field_system") else str(given.get("system_prompt") or "")
    frame = str(given.get("system_format") or "{system}")
    start = _own(frame.replace("{system}", system), fields) * bool(system)
    with_input = given.get("format") or "{instruction} {input} "
    ways = dict.fromkeys((with_input, given.get("no_input_format") or "{instruction} "))
    starts = (start, "") if given.get("field_system") else (start,)
    found = [start + _own(each, fields) for start in starts for each in ways]
    prompt = found if len(found) > 1 else found[0]
    return {"prompt": prompt, "completion": "{" + fields["output"] + "}"}


def pair_columns(given: Json, task: str) -> Json:
    """The same of preferences: a format string for each part."""
    answers = ("chosen", "rejected") if objective_of(task).n_sequences > 1 else ("completion",)
    fields = _fields(given, "prompt", *answers, "system", "label")
    parts = ("prompt", *answers)
    forms = {part: given.get(f"{part}_format") or f"{{{part}}}" for part in parts}
    return {part: _own(form, fields) for part, form in forms.items()} | {"label": fields["label"]}
