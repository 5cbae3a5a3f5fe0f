"""What Hugging Face's libraries have in common, and their settings in files and on command lines:
TRL (`trl sft --config`), and transformers' `run_*.py`. Scripts are read by `script_job`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farthing.config.importers import preference
from farthing.config.importers.tables import Imported, defaults, fact, names, read_keys, whole
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.registry import objective_of
from farthing.objectives.regression import REGRESSION
from farthing.objectives.seq2seq import SEQ2SEQ
from farthing.storage.files import Json

_OF_TEXTS = (CLASSIFICATION.name, REGRESSION.name)
TRL, TRAINER, UNSLOTH = "trl", "hf-trainer", "unsloth"
NO_COUNT_OF_GPUS = (
    "written for one GPU: where the original ran on N of them its global batch was N times "
    "per_device_train_batch_size x gradient_accumulation_steps"
)
LEARNS_ALL = (
    "TRL learns every token of `messages` and `text` rows, and only completions of"
    " prompt/completion rows: for those set data.train_on_prompt: false"
)


def is_true(value: Any) -> bool:
    """Whether a switch is on, in a file or on a command line."""
    return str(value).lower() == "true"


def method_of(has_adapter: bool, is_4bit: bool) -> str:
    return "full" if not has_adapter else "qlora" if is_4bit else "lora"


def peft_targets(out: Imported) -> None:
    """Which layers an adapter is put on where nothing is said."""
    name = str(out.job.get("model.model_name_or_path", "")).rstrip("/").rpartition("/")[2].lower()
    layers = next(
        each for pattern, each in fact("peft-targets").items() if re.search(pattern, name)
    )
    out.default({"method.target_modules": layers.split()}, "peft for models of this name")


def trl_defaults(out: Imported) -> None:
    """What TRL's trainers do where nothing is said."""
    preference.defaults(out)
    defaults(out, TRL, "trainer")
    out.notes.append(NO_COUNT_OF_GPUS)


def learns_prompts(out: Imported, *, is_said: bool) -> None:
    """`SFTTrainer` learns every token; `is_said`: also of prompt/completion rows."""
    if not out.prefers and out.job.get("task", CAUSAL_LM.name) == CAUSAL_LM.name:
        out.default({"data.train_on_prompt": True})
        if "data.train_on_prompt" in out.defaults and not is_said:
            out.notes.append(LEARNS_ALL)


def settle_prompts(out: Imported, folder: Path) -> None:
    """Of prompt/completion rows TRL learns completions alone: look at files beside the source."""
    paths = [folder / str(each.get("path")) for each in out.job.get("data.train", ())]
    if "data.train_on_prompt" in out.defaults and any(_has_completions(path) for path in paths):
        del out.job["data.train_on_prompt"]
        out.notes = [note for note in out.notes if note != LEARNS_ALL]


def _has_completions(path: Path) -> bool:
    with contextlib.suppress(ValueError, OSError, RecursionError):
        if path.suffix == ".jsonl" and path.is_file():
            with path.open("rb") as file:
                row = json.loads(file.readline(1 << 20))
            return isinstance(row, dict) and {"prompt", "completion"} <= row.keys()
    return False


def read(values: Mapping[str, Any], out: Imported, program: str, place: str) -> None:
    """Flat settings of TRL's programs or of transformers' scripts, named by `program`. `place`:
    folder and name of the file.
    """
    name = program.removesuffix(".py").removesuffix("_no_trainer")
    is_trainer = out.source == TRAINER
    _objective(values, out, name, place)
    if is_trainer and not out.prefers:
        _task(values, out, name)
    data(values, out)
    if is_trainer:
        _columns(values, out)
    has_adapter = _method(values, out, name)
    read_keys(out, values, TRAINER if is_trainer else TRL)
    preference.settle(out, TRL)
    if has_adapter:
        if not is_trainer:
            dropout = 0.0 if out.prefers else 0.05
            out.default({"method.lora_r": 16, "method.lora_alpha": 32})
            out.default({"method.lora_dropout": dropout})
        defaults(out, "lora")
        peft_targets(out)
    if is_trainer:
        return defaults(out, "trainer")
    learns_prompts(out, is_said=values.get("completion_only_loss") is False)
    return trl_defaults(out)


def _objective(values: Mapping[str, Any], out: Imported, name: str, place: str) -> None:
    """The objective that a program of TRL has, or that a file's keys, name and folder tell."""
    if "vlm" in name or "_vl" in name:
        return out.refuse("(script)", name, "images, which farthing does not train on")
    if name.startswith(tuple(fact("other-programs").split())):
        why = f"{name} is reinforcement learning or distillation, which farthing does not do"
        return out.refuse("(script)", name, why)
    found = preference.of_keys(values) or preference.of_words(name)
    if not found and preference.has_keys(values) and (found := preference.of_words(place)):
        out.notes.append(
            f"the objective, {found}, is taken from the name of the file or its folder"
        )
    if found:
        preference.read(out, found, values)
    elif name and not name.startswith("sft") and out.source != TRAINER:
        out.name("(script)", name, "this script's training is in its code", "differs")
    return None


def _method(values: Mapping[str, Any], out: Imported, program: str) -> bool:
    """Whether there is an adapter: by a switch, and of a script also by the adapter's settings or
    by its own name.
    """
    known = ("q_lora", "qlora", "use_lora", "use_peft", "use_qlora")
    switches = {key: values[key] for key in known if key in values}
    wanted = [key for key, value in switches.items() if is_true(value)]
    is_told = not {"use_lora", "use_peft"} & set(switches) and any(
        key in values for key in ("lora_r", "lora_rank", "lora_alpha")
    )
    has_adapter = bool(wanted) or (out.source == TRAINER and (is_told or "lora" in program))
    is_4bit = values.get("load_in_4bit") is True or any("q" in key for key in wanted)
    method = method_of(has_adapter, is_4bit)
    for key, value in switches.items():
        out.put(key, value, "method.name", method)
    out.default({"method.name": method}, "the script" if has_adapter else "")
    return has_adapter


# ---- transformers' scripts ----


def _task(values: Mapping[str, Any], out: Imported, name: str) -> None:
    known = fact("run-scripts").items()
    task = next((task for begins, task in known if name.startswith(begins)), None)
    if name.startswith("run_") and task is None:
        out.refuse("(script)", name, f"{name} is a task that farthing does not have")
    of_glue = str(values.get("task_name") or "").lower()
    if task is None:
        is_pair = "max_source_length" in values or "predict_with_generate" in values
        is_class = of_glue or "label_column_name" in values
        task = (CLASSIFICATION if is_class else SEQ2SEQ if is_pair else CAUSAL_LM).name
    is_number = is_true(values.get("do_regression"))
    out.job["task"] = task
    if task == CLASSIFICATION.name and (is_number or of_glue == "stsb"):
        out.job["task"] = REGRESSION.name
        out.keep({"do_regression": True} if is_number else {}, "task")
    if of_glue and out.job["task"] in _OF_TEXTS:
        source: Json = {"path": "nyu-mll/glue", "name": of_glue}
        if of_glue in fact("glue"):
            source["columns"] = {"text": fact("glue")[of_glue], "label": "label"}
        out.put("task_name", of_glue, "data.train", [source])
    if block := values.get("block_size"):
        out.job["data.max_length"] = whole(block)


def _columns(values: Mapping[str, Any], out: Imported) -> None:
    """Columns by name and the prefix of T5's inputs, as templates."""
    keys = ("text_column", "text_column_name", "summary_column", "text_column_names")
    given = {key: str(values[key]) for key in (*keys, "label_column_name") if values.get(key)}
    source = given.get("text_column", given.get("text_column_name", ""))
    label, prefix = given.get("label_column_name", ""), values.get("source_prefix")
    task, columns = objective_of(out.job["task"]), Json()
    if task.scores_words:
        columns = {"tokens": source, "tags": label}
    elif task.name in _OF_TEXTS:
        several = names(given.get("text_column_names", "text"))
        glue = str(values.get("text_column_delimiter", " "))
        joined = glue.join(f"{{{name}}}" for name in several)
        columns = {"text": several[0] if len(several) == 1 else joined, "label": label}
    elif task.is_pair:
        start = f"{prefix}{{{source}}}" if prefix and source else source
        columns = {"input": start, "target": given.get("summary_column", "")}
    elif not task.learns_units:
        columns = {"text": source}
    columns = {name: column for name, column in columns.items() if column and name != column}
    for key, value in given.items():
        out.name(key, value, "is in data.columns" if columns else "found by its name")
    if prefix and source:
        out.name("source_prefix", prefix, "is in data.columns")
    elif prefix:
        why = f'put it into data.columns: {{input: "{prefix}{{your column}}"}}'
        out.name("source_prefix", prefix, why, "differs")
    if columns and out.job.get("data.train"):
        for each in (*out.job["data.train"], *out.job.get("data.eval", ())):
            each["columns"] = columns


# ---- the data ----

_NAMES_OF_DATA = ("dataset_name", "dataset_id_or_path", "train_file", "data_path")
_OF_SOURCE = {
    **{"path": "path", "id": "path", "name": "name", "config": "name", "split": "split"},
    **{"fraction": "weight", "weight": "weight"},
}


def data(values: Mapping[str, Any], out: Imported) -> None:
    """`dataset_name` and what goes with it, or the lists `datasets` (TRL), `dataset_mixture` and
    `dataset_mixer` (Hugging Face's recipes).
    """
    template = values.get("chat_template")
    if isinstance(template, str) and "{" in template:
        out.template("chat_template", template, template)
    said = {key: value for key, value in values.items() if type(value) is str and value}
    evaluates = str(values.get("eval_strategy", "no")) not in ("no", "False")
    held_key = "dataset_test_split" if "dataset_test_split" in said else "validation_file"
    held = said.get(held_key)
    if held and not evaluates:
        out.name(held_key, held, "not evaluated there (eval_strategy: no)")
    if key := next((key for key in _NAMES_OF_DATA if key in said), ""):
        source: Json = {"path": said[key]}
        for theirs in ("dataset_config", "dataset_config_name", "dataset_train_split"):
            if theirs in said:
                own = "split" if theirs.endswith("split") else "name"
                source[own] = said[theirs]
                out.name(theirs, said[theirs], f"is `{own}` of data.train")
        if said.get("dataset_text_field", "text") != "text":
            source["columns"] = {"text": said["dataset_text_field"]}
        out.put(key, said[key], "data.train", [source])
        if held and evaluates:
            other = "split" if held_key == "dataset_test_split" else "path"
            out.put(held_key, held, "data.eval", [{**source, other: held}])
    _mixture(values.get("datasets"), "datasets", out)
    mixer = values.get("dataset_mixer")
    if isinstance(mixer, Mapping) and mixer:
        first, *others = names(values.get("dataset_splits") or ["train"])
        out.keep({"dataset_mixer": mixer}, "data.train")
        known = [{"path": name, "split": first, "weight": mixer[name]} for name in mixer]
        out.job.setdefault("data.train", known)
        is_held_out = len(others) == 1 and "test" in others[0]
        if is_held_out and evaluates:
            out.job["data.eval"] = [{"path": name, "split": others[0]} for name in mixer]
        is_more = bool(others) and not is_held_out
        why = "the first is `split` of data.train" + ", and others are left out" * is_more
        if splits := values.get("dataset_splits"):
            out.name("dataset_splits", splits, why, "differs" if is_more else "none")
    mixed = values.get("dataset_mixture")
    if isinstance(mixed, Mapping):
        _mixture(mixed.get("datasets"), "dataset_mixture.datasets", out)


def _mixture(given: Any, at: str, out: Imported) -> None:
    """Several data sets, each with the share of its rows that is taken."""
    if not (isinstance(given, list) and given and all(isinstance(each, Mapping) for each in given)):
        return
    found = []
    for index, each in enumerate(given):
        own = {key: value for key, value in each.items() if key in _OF_SOURCE and value is not None}
        found.append({_OF_SOURCE[key]: value for key, value in own.items()})
        out.keep(own, "data.train", f"{at}[{index}].")
        read_keys(out, each, "mixture", before=f"{at}[{index}].", name_of=_last)
    out.job.setdefault("data.train", found)


def _last(key: str) -> str:
    return key.rpartition("].")[2]
