"""What Hugging Face's libraries have in common, and their settings in files and on command lines:
TRL (`trl sft --config`), and transformers' `run_*.py`. Scripts are read by `script_job`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farthing.config.importers import preference
from farthing.config.importers.record import Imported, Odd, flat, read_keys
from farthing.config.importers.tables import defaults, fact, names, number, table, whole
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


def warmups(out: Imported, values: Mapping[str, Any]) -> None:
    """Both keys of a warm-up. The number of steps goes before the share; a number below 1 is a
    share, as transformers 5 has it. `values` are by their keys in the source.
    """
    for name in ("warmup_steps", "warmup_ratio"):
        for key, value in values.items():
            if key.rpartition(".")[2] != name or value is None or key in out.lines:
                continue
            try:
                found = number(value)
            except Odd as odd:
                out.name(key, value, str(odd), odd.effect)
                continue
            if found >= 1 and name == "warmup_steps":
                out.put(key, value, "train.warmup_steps", int(found))
            elif "train.warmup_steps" in out.job:
                out.name(key, value, "warmup_steps overrides it")
            elif found == 0 and name == "warmup_steps":
                out.name(key, value, "0: what warmup_ratio says holds")
            else:
                out.put(key, value, "train.warmup_ratio", float(found))


def quantized(out: Imported, values: Mapping[str, Any]) -> bool:
    """Whether the base is held in 4 bits; says what becomes of 8 bits."""
    if values.get("load_in_8bit") is True:
        why = "farthing has no 8-bit base: it stays in 16 bits, which is more exact"
        out.name("load_in_8bit", True, why, "differs")
    for key in ("load_in_8bit", "load_in_4bit"):
        if key in values:
            why = "method: qlora is the 4-bit base, lora and full are without"
            out.name(key, values[key], why)
    return values.get("load_in_4bit") is True


def no_adapter(out: Imported, values: Mapping[str, Any], *begins: str) -> None:
    """Name the keys that begin so, where there is no adapter that they could be about."""
    for key in values:
        if key.startswith(begins):
            out.name(key, values[key], "about an adapter, and there is none")


def peft_targets(out: Imported) -> None:
    """Which layers an adapter is put on where nothing is said."""
    name = str(out.job.get("model.model_name_or_path", "")).rstrip("/").rpartition("/")[2].lower()
    layers = next(
        each for pattern, each in fact("peft-targets").items() if re.search(pattern, name)
    )
    out.default({"method.target_modules": layers.split()}, "peft for models of this name")


def trainer_defaults(out: Imported) -> None:
    """What Trainer does where nothing is said."""
    defaults(out, "trainer")
    if "train.warmup_steps" not in out.job:
        out.default({"train.warmup_ratio": 0.0})
    if "train.eval_strategy" not in out.job and "train.eval_steps" not in out.job:
        out.default({"train.eval_strategy": "no"})


def trl_defaults(out: Imported) -> None:
    """What TRL's trainers do where nothing is said."""
    preference.defaults(out)
    defaults(out, TRL)
    trainer_defaults(out)
    out.notes.append(NO_COUNT_OF_GPUS)


def learns_prompts(out: Imported, values: Mapping[str, Any]) -> None:
    """Which tokens `SFTTrainer` learns."""
    if preference.is_asked(out) or out.job.get("task", CAUSAL_LM.name) != CAUSAL_LM.name:
        return
    for key in ("assistant_only_loss", "completion_only_loss"):
        if values.get(key) is True:
            return out.put(key, True, "data.train_on_prompt", False)
    if "data.train_on_prompt" not in out.job:
        out.default({"data.train_on_prompt": True})
        if values.get("completion_only_loss") is not False:
            out.notes.append(LEARNS_ALL)
    return None


def settle_prompts(out: Imported, folder: Path) -> None:
    """Of prompt/completion rows TRL learns completions alone: look at files beside the source."""
    paths = [folder / str(each.get("path")) for each in out.job.get("data.train", ())]
    if "data.train_on_prompt" in out.defaults and any(_has_completions(path) for path in paths):
        del out.job["data.train_on_prompt"]
        out.notes = [note for note in out.notes if note != LEARNS_ALL]


def _has_completions(path: Path) -> bool:
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            row = json.loads(file.readline(1 << 20))
    except (ValueError, OSError, RecursionError):
        return False
    return isinstance(row, dict) and {"prompt", "completion"} <= row.keys()


def read_trl(values: Mapping[str, Any], out: Imported, program: str = "", place: str = "") -> None:
    """The flat settings of TRL's programs. `place`: folder and name of the file."""
    _programs_objective(values, out, program, place)
    data(values, out)
    is_4bit = quantized(out, values)
    peft = values.get("use_peft")
    has_adapter = str(peft).lower() == "true"
    method = "full" if not has_adapter else "qlora" if is_4bit else "lora"
    if peft is not None:
        out.put("use_peft", peft, "method.name", method)
    out.default({"method.name": method})
    if not has_adapter:
        no_adapter(out, values, "lora_", "use_dora", "use_rslora")
    warmups(out, values)
    no_limit(out, values, "max_length")
    learns_prompts(out, values)
    _read(out, values, TRL)
    if has_adapter:
        dropout = 0.0 if preference.is_asked(out) else 0.05
        out.default({"method.lora_r": 16, "method.lora_alpha": 32, "method.lora_dropout": dropout})
        peft_targets(out)
    trl_defaults(out)


def no_limit(out: Imported, values: Mapping[str, Any], key: str) -> None:
    """A length that is switched off by an empty value."""
    if key in values and values[key] is None:
        out.name(key, None, "no limit there: set data.max_length above the longest row", "differs")


def _programs_objective(values: Mapping[str, Any], out: Imported, program: str, place: str) -> None:
    """The objective that a program of TRL has, or that a file's keys, name and folder tell."""
    name = program.removesuffix(".py")
    if "vlm" in name or "_vl" in name:
        return out.name("(script)", program, "images, which farthing does not train on", "blocks")
    if name.startswith(tuple(fact("other-programs").split())):
        why = f"{program} is reinforcement learning or distillation, which farthing does not do"
        return out.name("(script)", program, why, "blocks")
    found = preference.of_keys(values) or preference.of_words(name)
    if not found and preference.of_words(place) and preference.has_keys(values):
        found = preference.of_words(place)
        out.notes.append(
            f"the objective, {found}, is taken from the name of the file or its folder"
        )
    if found:
        preference.read(out, found, values)
    elif name and not name.startswith("sft") and out.source != TRAINER:
        out.name("(script)", program, "this script's training is in its code", "differs")


def _read(out: Imported, values: Mapping[str, Any], tool: str) -> None:
    tool += "-preference" if preference.is_asked(out) else ""
    read_keys(out, flat(values, whole=("rope_scaling", "lr_scheduler_kwargs")), table(tool))
    preference.settle(out, TRL)


# ---- transformers' scripts ----


def read_trainer(values: Mapping[str, Any], out: Imported, program: str, place: str) -> None:
    """Flat settings of one of the `run_*.py` scripts, named by `program`."""
    name = program.removesuffix(".py").removesuffix("_no_trainer")
    tasks = fact("run-scripts")
    task = next((task for begins, task in tasks.items() if name.startswith(begins)), None)
    _programs_objective(values, out, program, place)
    if name.startswith("run_") and task is None and not preference.is_asked(out):
        out.name("(script)", program, f"{program} is a task that farthing does not have", "blocks")
    if not preference.is_asked(out):
        out.job["task"] = task or _guessed(values)
    is_number = str(values.get("do_regression")).lower() == "true"
    is_number |= str(values.get("task_name")).lower() == "stsb"
    if out.job["task"] == CLASSIFICATION.name and is_number:
        out.job["task"] = REGRESSION.name
        if "do_regression" in values:
            out.put("do_regression", values["do_regression"], "task", REGRESSION.name)
    if values.get("task_name") and out.job["task"] in _OF_TEXTS:
        name_of_task = str(values["task_name"]).lower()
        source: Json = {"path": "nyu-mll/glue", "name": name_of_task}
        if name_of_task in fact("glue"):
            source["columns"] = {"text": fact("glue")[name_of_task], "label": "label"}
        out.put("task_name", name_of_task, "data.train", [source])
    data(values, out)
    block = values.get("block_size")
    if block:
        out.job["data.max_length"] = whole(block)
        why = (
            "run_clm joins all documents and cuts them into blocks of this length; here documents"
            " stay apart, and data.max_length is this length"
        )
        out.name("block_size", block, why, "differs")
    _columns(values, out)
    warmups(out, values)
    _method(values, out, name)
    _read(out, values, TRAINER)
    if out.job["method.name"] != "full":
        defaults(out, "lora")
        peft_targets(out)
    trainer_defaults(out)


def _method(values: Mapping[str, Any], out: Imported, program: str) -> None:
    """An adapter where the script is told of one: by a switch, by the adapter's settings or by its
    own name.
    """
    known = ("q_lora", "qlora", "use_lora", "use_peft", "use_qlora")
    switches = {key: values[key] for key in known if key in values}
    wanted = {key for key, value in switches.items() if str(value).lower() == "true"}
    has_settings = any(key in values for key in ("lora_r", "lora_rank", "lora_alpha"))
    is_told = has_settings and not {"use_lora", "use_peft"} & set(switches)
    has_adapter = bool(wanted) or is_told or "lora" in program
    is_4bit = quantized(out, values) or any("q" in key for key in wanted)
    method = "full" if not has_adapter else "qlora" if is_4bit else "lora"
    for key, value in switches.items():
        out.put(key, value, "method.name", method)
    out.default({"method.name": method}, "the script" if has_adapter else "")
    if not has_adapter:
        no_adapter(out, values, "lora_")
    elif isinstance(values.get("trainable"), str) and values["trainable"]:
        layers = values["trainable"]
        out.put("trainable", layers, "method.target_modules", layers.split(","))


def _guessed(values: Mapping[str, Any]) -> str:
    if values.get("task_name") or "label_column_name" in values:
        return CLASSIFICATION.name
    is_pair = "max_source_length" in values or "predict_with_generate" in values
    return SEQ2SEQ.name if is_pair else CAUSAL_LM.name


def _columns(values: Mapping[str, Any], out: Imported) -> None:
    """Columns by name and the prefix of T5's inputs, as templates."""
    columns: Json = {}
    source = values.get("text_column") or values.get("text_column_name")
    prefix, task = values.get("source_prefix"), out.job["task"]
    of_texts = values.get("text_column_names")
    if objective_of(task).scores_words:
        known = {"tokens": "text_column_name", "tags": "label_column_name"}
        columns = {own: str(values[key]) for own, key in known.items() if values.get(key)}
    elif task in _OF_TEXTS:
        if of_texts:
            given = names(of_texts)
            glue = str(values.get("text_column_delimiter", " "))
            columns["text"] = given[0] if len(given) == 1 else glue.join(f"{{{n}}}" for n in given)
        if values.get("label_column_name"):
            columns["label"] = str(values["label_column_name"])
    elif objective_of(task).is_pair:
        if source:
            columns["input"] = f"{prefix}{{{source}}}" if prefix else str(source)
        if values.get("summary_column"):
            columns["target"] = str(values["summary_column"])
    elif source and source != "text" and not objective_of(task).learns_units:
        columns["text"] = str(source)
    columns = {name: column for name, column in columns.items() if name != column}
    for key in ("text_column", "text_column_name", "summary_column", "text_column_names"):
        if values.get(key):
            out.name(key, values[key], "is in data.columns" if columns else "found by its name")
    if label := columns.get("label", columns.get("tags")):
        out.name("label_column_name", label, "is in data.columns")
    if prefix and source:
        out.name("source_prefix", prefix, "is in data.columns")
    elif prefix:
        why = f'put it into data.columns: {{input: "{prefix}{{your column}}"}}'
        out.name("source_prefix", prefix, why, "differs")
    if columns and out.job.get("data.train"):
        for source in (*out.job["data.train"], *out.job.get("data.eval", ())):
            source["columns"] = columns


# ---- the data ----

_NAMES_OF_DATA = ("dataset_name", "dataset_id_or_path", "train_file", "data_path")


def data(values: Mapping[str, Any], out: Imported) -> None:
    """`dataset_name` and what goes with it, or the lists `datasets` (TRL), `dataset_mixture` and
    `dataset_mixer` (Hugging Face's recipes).
    """
    template = values.get("chat_template")
    if isinstance(template, str) and "{" in template:
        out.files["chat_template.jinja"] = template
        out.put("chat_template", template, "data.chat_template", "chat_template.jinja")
    is_said = {k: v for k in _NAMES_OF_DATA if type(v := values.get(k)) is str}
    key = next((key for key, value in is_said.items() if value), "")
    held_key = "dataset_test_split" if values.get("dataset_test_split") else "validation_file"
    held_out = values.get(held_key)
    evaluates = str(values.get("eval_strategy", "no")) not in ("no", "False")
    if key:
        source: Json = {"path": values[key]}
        for theirs in ("dataset_config", "dataset_config_name", "dataset_train_split"):
            if isinstance(values.get(theirs), str):
                own = "split" if theirs.endswith("split") else "name"
                source[own] = values[theirs]
                out.name(theirs, values[theirs], f"is `{own}` of data.train")
        column = values.get("dataset_text_field")
        if isinstance(column, str) and column not in ("", "text"):
            source["columns"] = {"text": column}
        out.put(key, values[key], "data.train", [source])
        if held_out and evaluates:
            other = "split" if held_key == "dataset_test_split" else "path"
            out.put(held_key, held_out, "data.eval", [{**source, other: str(held_out)}])
    if held_out and not evaluates:
        out.name(held_key, held_out, "not evaluated there (eval_strategy: no)")
    _mixture(values.get("datasets"), "datasets", out)
    mixer = values.get("dataset_mixer")
    if isinstance(mixer, Mapping) and mixer:
        splits = names(values.get("dataset_splits") or ["train"])
        out.keep(flat({"dataset_mixer": mixer}), "data.train")
        known = [{"path": name, "split": splits[0], "weight": mixer[name]} for name in mixer]
        out.job.setdefault("data.train", known)
        if len(splits) == 2 and "test" in splits[1] and evaluates:
            out.job["data.eval"] = [{"path": name, "split": splits[1]} for name in mixer]
        is_more = len(splits) > 2 or (len(splits) == 2 and "test" not in splits[1])
        why = "the first is `split` of data.train" + ", and others are left out" * is_more
        if "dataset_splits" in values:
            out.name("dataset_splits", splits, why, "differs" if is_more else "none")
    mixed = values.get("dataset_mixture")
    if isinstance(mixed, Mapping):
        _mixture(mixed.get("datasets"), "dataset_mixture.datasets", out)
        held = mixed.get("test_split_size")
        if isinstance(held, float):
            out.put("dataset_mixture.test_split_size", held, "data.eval_fraction", held)
        elif held and evaluates:
            why = f"{held} rows are held out there; set data.eval_fraction"
            out.name("dataset_mixture.test_split_size", held, why, "differs")


_OF_SOURCE = {
    **{"path": "path", "id": "path", "name": "name", "config": "name", "split": "split"},
    **{"fraction": "weight", "weight": "weight"},
}


def _mixture(given: Any, at: str, out: Imported) -> None:
    """Several data sets, each with the share of its rows that is taken."""
    if not (isinstance(given, list) and given and all(isinstance(each, Mapping) for each in given)):
        return
    found = []
    for index, each in enumerate(given):
        own = {_OF_SOURCE[k]: v for k, v in each.items() if k in _OF_SOURCE and v is not None}
        found.append(own)
        for key, value in flat(each, f"{at}[{index}]."):
            name = key.rpartition("].")[2].split(".")[0]
            if name in _OF_SOURCE:
                out.name(key, value, "is in data.train")
            elif name == "columns" and isinstance(value, list):
                why = "the columns that are kept; farthing reads those it knows, names the others"
                is_other = "chat_template_kwargs" in value
                also = ", but settings of the template in the rows are not read"
                out.name(key, value, why + also * is_other, "differs" if is_other else "none")
            else:
                out.name(key, value, "farthing has no such setting for a data set", "differs")
    out.job.setdefault("data.train", found)
