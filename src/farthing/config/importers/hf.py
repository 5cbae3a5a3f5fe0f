"""What Hugging Face's libraries have in common, and their settings in files and on command lines:
TRL (`trl sft --config`), and transformers' `run_*.py`. Scripts are read by `script_job`.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from farthing.config.importers import preference
from farthing.config.importers.tables import Imported, defaults, fact, is_true, names, read_keys
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.registry import objective_of
from farthing.objectives.regression import REGRESSION
from farthing.objectives.seq2seq import SEQ2SEQ
from farthing.storage.files import Json

TRL, TRAINER, UNSLOTH = "trl", "hf-trainer", "unsloth"


def method_of(has_adapter: bool, is_4bit: bool) -> str:
    return "full" if not has_adapter else "qlora" if is_4bit else "lora"


def settle_precision(values: Json, out: Imported, *, has_fp32_default: bool) -> None:
    """Precision where a tool has fp32 for what is not written, and weights that are less than
    that.
    """
    weights = {k: v for k, v in values.items() if k in fact("dtypes-of-weights").split() and v}
    is_low = {k: v for k, v in weights.items() if not re.search("32", str(v))}
    if out.job.get("method.name") == "full":
        for key, value in is_low.items():
            out.name(key, value, fact("low-weights"), "differs", is_last=True)
    is_open = not (is_low or values.get("bf16") or values.get("fp16"))
    if has_fp32_default and is_open:
        of = f"{out.source}: fp32 where neither bf16 nor fp16 is set"
        out.default({"train.bf16": False, "train.tf32": False}, of)


def settle(values: Json, out: Imported, *, has_adapter: bool, has_fp32_default: bool) -> None:
    """Set the libraries' defaults. `SFTTrainer` learns every token, and of prompt/completion rows
    only completions.
    """
    preference.settle(out, TRL)
    settle_precision(values, out, has_fp32_default=has_fp32_default)
    if has_adapter:
        defaults(out, "lora")
        path, known = str(out.job.get("model.model_name_or_path", "")), fact("peft-targets").items()
        name = path.rstrip("/").rpartition("/")[2].lower()
        layers = next(each for pattern, each in known if re.search(pattern, name))
        out.default({"method.target_modules": layers.split()}, "peft for models of this name")
    of_trl = (TRL,) if out.source != TRAINER or (out.prefers and out.labels) else ()
    if of_trl and out.prefers:
        rate = 1e-4 if out.job["task"] == "reward" else 1e-6
        out.default({"train.learning_rate": rate, "data.max_length": 1024})
    elif of_trl and out.job.setdefault("task", CAUSAL_LM.name) == CAUSAL_LM.name:
        paths = (out.path.parent / str(each.get("path")) for each in out.job.get("data.train", ()))
        learns_all = values.get("completion_only_loss") is False
        if learns_all or not any(map(_has_completions, paths)):
            out.default({"data.train_on_prompt": True})
        is_open = "data.train_on_prompt" in out.defaults and not learns_all
        out.notes += [fact("trl-learns")] * (is_open and out.source != UNSLOTH)
    defaults(out, *of_trl, "trainer")
    task = objective_of(out.job.get("task", CAUSAL_LM.name))
    is_split = out.job.get("train.gradient_accumulation_steps", 1) > 1
    if is_split and (task.is_pair or task.scores_words):
        out.notes.append(fact("axolotl-notes")["accumulation"].replace("Axolotl", "Trainer"))
    out.notes.append(fact("one-gpu"))


def _has_completions(path: Path) -> bool:
    with contextlib.suppress(ValueError, OSError, RecursionError):
        if path.suffix == ".jsonl" and path.is_file():
            with path.open("rb") as file:
                row = json.loads(file.readline(1 << 20))
            return isinstance(row, dict) and {"prompt", "completion"} <= row.keys()
    return False


def read(values: Json, out: Imported) -> None:
    """Flat settings of TRL's programs or of transformers' scripts."""
    name = out.program.removesuffix(".py").removesuffix("_no_trainer")
    is_trainer = out.source == TRAINER
    if name.startswith("run_clm"):
        values.setdefault("block_size", 1024)  # its default
    read_objective(values, out, name)
    if is_trainer and not out.prefers:
        _task(values, out, name)
    read_data(values, out)
    if is_trainer:
        _columns(values, out)
    has_adapter = _method(values, out, name)
    read_keys(out, values, TRAINER if is_trainer else TRL)
    for pattern, settings in fact("program-defaults").items() if is_trainer else ():
        if re.match(pattern, out.program):
            out.default(settings, out.program)
    if has_adapter and not is_trainer:
        dropout = 0.0 if out.prefers else 0.05
        out.default({"method.lora_r": 16, "method.lora_alpha": 32, "method.lora_dropout": dropout})
    settle(values, out, has_adapter=has_adapter, has_fp32_default=is_trainer)


def read_objective(values: Json, out: Imported, name: str) -> None:
    """The objective that a program of TRL has, or that a file's keys, name and folder tell."""
    if "vlm" in name or "_vl" in name:
        return out.refuse("(script)", name, "images, which farthing does not train on")
    if name.startswith(tuple(fact("other-programs").split())):
        why = f"{name} is reinforcement learning or distillation, which farthing does not do"
        return out.refuse("(script)", name, why)
    found = preference.of_keys(values) or preference.of_words(name)
    place = f"{out.path.absolute().parent.name}/{out.path.name}"
    if not found and preference.has_keys(values) and (found := preference.of_words(place)):
        note = f"the objective, {found}, is taken from the name of the file or its folder"
        out.notes.append(note)
    if found:
        preference.read(out, found, values)
    elif name and not name.startswith(("sft", "run_", *fact("run-scripts"))):
        out.name("(script)", name, "this script's training is in its code", "differs")
    return None


def _method(values: Json, out: Imported, program: str) -> bool:
    """Whether there is an adapter: by a switch, and of a script also by the adapter's settings or
    by its own name.
    """
    switches = {k: v for k, v in values.items() if k in fact("adapter-switches").split()}
    wanted = [key for key, value in switches.items() if is_true(value)]
    is_told = not {"use_lora", "use_peft"} & {*switches} and any(
        key in values for key in ("lora_r", "lora_rank", "lora_alpha")
    )
    has_adapter = bool(wanted) or (out.source == TRAINER and (is_told or "lora" in program))
    is_4bit = is_true(values.get("load_in_4bit")) or any("q" in key for key in wanted)
    method = method_of(has_adapter, is_4bit)
    for key, value in switches.items():
        out.put(key, value, "method.name", method)
    out.default({"method.name": method}, "the script" if has_adapter else "")
    return has_adapter


# ---- transformers' scripts ----


def _task(values: Json, out: Imported, name: str) -> None:
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
    if task == CLASSIFICATION.name and (is_number or of_glue == "stsb"):
        task = REGRESSION.name
        out.keep({"do_regression": True} if is_number else {}, "task")
    out.job["task"] = task
    if of_glue and task in (CLASSIFICATION.name, REGRESSION.name):
        out.put("task_name", of_glue, "data.train", [{"path": "nyu-mll/glue", "name": of_glue}])
    if block := values.get("block_size"):
        out.job["data.max_length"] = out.fit("data.max_length", block)


def _columns(values: Json, out: Imported) -> None:
    """Columns by name and the prefix of T5's inputs, as templates."""
    given = {k: str(v) for k, v in values.items() if v and k in fact("run-columns").split()}
    source = given.get("text_column", given.get("text_column_name", ""))
    label, prefix = given.get("label_column_name", ""), values.get("source_prefix")
    task, columns = objective_of(out.job["task"]), Json()
    if task.scores_words:
        columns = {"tokens": source, "tags": label}
    elif task.name in (CLASSIFICATION.name, REGRESSION.name):
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
    for each in (*out.job.get("data.train", ()), *out.job.get("data.eval", ())) if columns else ():
        each["columns"] = columns


# ---- the data ----


def read_data(values: Json, out: Imported) -> None:
    """`dataset_name` and what goes with it, or the lists `datasets` (TRL), `dataset_mixture` and
    `dataset_mixer` (Hugging Face's recipes).
    """
    template = values.get("chat_template")
    if isinstance(template, str) and "{" in template:
        out.template("chat_template", template, template)
    said = {key: value for key, value in values.items() if type(value) is str and value}
    asked = values.get("eval_strategy", values.get("evaluation_strategy", "no"))
    evaluates = str(asked) not in ("no", "False")
    if out.source == TRL and not out.labels and evaluates and "dataset_name" in said:
        said.setdefault("dataset_test_split", "test")
    held_key = "dataset_test_split" if "dataset_test_split" in said else "validation_file"
    held = said.get(held_key)
    if held and not evaluates:
        out.name(held_key, held, "not evaluated there (eval_strategy: no)")
    if key := next((key for key in fact("names-of-data").split() if key in said), ""):
        source: Json = {"path": said[key]}
        for theirs, own in fact("beside-data").items():
            if theirs in said:
                source[own] = said[theirs]
                out.name(theirs, said[theirs], f"is `{own}` of data.train")
        source["columns"] = {"text": said.get("dataset_text_field")}
        out.put(key, said[key], "data.train", [source])
        if held and evaluates:
            other = "split" if held_key == "dataset_test_split" else "path"
            out.put(held_key, held, "data.eval", [{**source, other: held}])
    _mixture(values.get("datasets"), "datasets", out)
    if isinstance(mixed := values.get("dataset_mixture"), dict):
        _mixture(mixed.get("datasets"), "dataset_mixture.datasets", out)
    if isinstance(mixer := values.get("dataset_mixer"), dict):
        _mixer(mixer, values.get("dataset_splits"), out, evaluates=evaluates)


def _mixer(mixer: Json, splits: Any, out: Imported, *, evaluates: bool) -> None:
    """Weights of data sets by their names, and their splits: of training, then of evaluation."""
    first, *others = names(splits or ["train"])
    out.keep({"dataset_mixer": mixer}, "data.train")
    known = [{"path": name, "split": first, "weight": mixer[name]} for name in mixer]
    out.job.setdefault("data.train", known)
    is_more = bool(others) and not (len(others) == 1 and "test" in others[0])
    if others and evaluates and not is_more:
        out.job["data.eval"] = [{"path": name, "split": others[0]} for name in mixer]
    why = "the first is `split` of data.train" + ", and others are left out" * is_more
    if splits:
        out.name("dataset_splits", splits, why, "differs" if is_more else "none")


def _mixture(given: Any, at: str, out: Imported) -> None:
    """Several data sets, each with the share of its rows that is taken."""
    if not (isinstance(given, list) and given and all(isinstance(each, dict) for each in given)):
        return
    found, known = [], fact("mixture-keys")
    for index, each in enumerate(given):
        own = {key: value for key, value in each.items() if key in known and value is not None}
        found.append({known[key]: value for key, value in own.items()})
        out.keep(own, "data.train", f"{at}[{index}].")
        read_keys(out, each, "mixture", before=f"{at}[{index}].")
    out.job.setdefault("data.train", found)
