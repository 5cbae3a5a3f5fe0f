"""Transformers' Trainer: JSON for `HfArgumentParser`, command lines of `run_*.py`. Scripts are read
by `script_job`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farthing.config.importers import hf_trainer as hf
from farthing.config.importers import trl
from farthing.config.importers.record import (
    Imported,
    To,
    flat,
    names,
    read_keys,
    rows,
    scheduler,
    text,
    whole,
)
from farthing.config.importers.shared import reasons
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.seq2seq import SEQ2SEQ
from farthing.storage.files import Json

NAME = "hf-trainer"
TABLE: dict[str, To] = {
    **hf.ARGUMENTS,
    **hf.MODEL,
    **hf.ADAPTER,
    **rows("method", names, "lora_target_modules=target_modules modules_to_save"),
    **rows(
        "data",
        whole,
        "max_seq_length=max_length max_length max_source_length=max_length max_target_length "
        "model_max_length=max_length max_seq_len=max_length "
        "max_train_samples max_eval_samples max_val_samples=max_eval_samples",
    ),
    **rows("data", text, "source_lang target_lang"),
    "num_warmup_steps": To("train.warmup_steps", whole),
    "max_train_steps": To("train.max_steps", whole),
    "lr_scheduler": To("train.lr_scheduler_type", scheduler),
}
_TASKS = {
    "run_glue": CLASSIFICATION.name,
    "run_classification": CLASSIFICATION.name,
    "run_xnli": CLASSIFICATION.name,
    "run_summarization": SEQ2SEQ.name,
    "run_translation": SEQ2SEQ.name,
    "run_clm": CAUSAL_LM.name,
    "run_sft": CAUSAL_LM.name,
    "run_pt": CAUSAL_LM.name,
    "finetune_trainer": SEQ2SEQ.name,
}


def read(values: Mapping[str, Any], out: Imported, program: str = "") -> None:
    """Flat settings of one of the `run_*.py` scripts, named by `program`."""
    name = program.removesuffix(".py").removesuffix("_no_trainer")
    task = next((task for begins, task in _TASKS.items() if name.startswith(begins)), None)
    if name.startswith("run_") and task is None:
        out.name("(script)", program, f"{program} is a task that farthing does not have", "blocks")
    out.job["task"] = task or _guessed(values)
    if values.get("task_name") and out.job["task"] == CLASSIFICATION.name:
        task_name = str(values["task_name"]).lower()
        out.put(
            "task_name",
            task_name,
            "data.train",
            [{"path": "nyu-mll/glue", "name": task_name, **_glue(task_name)}],
        )
    trl.data(values, out)
    block = values.get("block_size")
    if block:
        out.job["data.max_length"] = whole(block)
        out.name(
            "block_size",
            block,
            "run_clm joins all documents and cuts them into blocks of this length; here documents"
            " stay apart, and data.max_length is this length",
            "differs",
        )
    _columns(values, out)
    hf.warmups(out, values)
    _method(values, out, name)
    read_keys(out, flat(values), TABLE, reasons("model", NAME, trl.NAME, "common"))
    if out.job["method.name"] != "full":
        out.default_all("method", lora_r=8, lora_alpha=8, lora_dropout=0.0)
        hf.peft_targets(out)
    hf.trainer_defaults(out)


def _method(values: Mapping[str, Any], out: Imported, program: str) -> None:
    """An adapter where the script is told of one: by a switch, by the adapter's settings or by its
    own name.
    """
    switches = {
        key: values[key]
        for key in ("q_lora", "qlora", "use_lora", "use_peft", "use_qlora")
        if key in values
    }
    wanted = {key for key, value in switches.items() if str(value).lower() == "true"}
    has_settings = any(key in values for key in ("lora_r", "lora_rank", "lora_alpha"))
    has_adapter = (
        bool(wanted)
        or (has_settings and not {"use_lora", "use_peft"} & set(switches))
        or "lora" in program
    )
    is_4bit = hf.quantized(out, values)
    method = (
        "full"
        if not has_adapter
        else "qlora"
        if is_4bit or any("q" in key for key in wanted)
        else "lora"
    )
    for key, value in switches.items():
        out.put(key, value, "method.name", method)
    out.default("method.name", method, "the script" if has_adapter else "")
    if has_adapter:
        targets = values.get("trainable")
        if isinstance(targets, str) and targets:
            out.put("trainable", targets, "method.target_modules", targets.split(","))
    else:
        hf.no_adapter(out, values, "lora_")


_GLUE = {
    "cola": "{sentence}",
    "sst2": "{sentence}",
    "mrpc": "{sentence1}\n{sentence2}",
    "stsb": "{sentence1}\n{sentence2}",
    "qqp": "{question1}\n{question2}",
    "mnli": "{premise}\n{hypothesis}",
    "qnli": "{question}\n{sentence}",
    "rte": "{sentence1}\n{sentence2}",
    "wnli": "{sentence1}\n{sentence2}",
}


def _glue(name: str) -> Json:
    return {"columns": {"text": _GLUE[name], "label": "label"}} if name in _GLUE else {}


def _guessed(values: Mapping[str, Any]) -> str:
    if values.get("task_name") or "label_column_name" in values:
        return CLASSIFICATION.name
    return (
        SEQ2SEQ.name
        if "max_source_length" in values or "predict_with_generate" in values
        else CAUSAL_LM.name
    )


def _columns(values: Mapping[str, Any], out: Imported) -> None:
    """Columns by name and the prefix of T5's inputs, as templates."""
    columns: Json = {}
    source = values.get("text_column") or values.get("text_column_name")
    target = values.get("summary_column")
    prefix = values.get("source_prefix")
    if out.job["task"] == SEQ2SEQ.name:
        if prefix and source:
            columns["input"] = f"{prefix}{{{source}}}"
        elif source:
            columns["input"] = str(source)
        if target:
            columns["target"] = str(target)
    elif source and source != "text":
        columns["text"] = str(source)
    for key in ("text_column", "text_column_name", "summary_column"):
        if values.get(key):
            out.name(key, values[key], "is in data.columns" if columns else "found by its name")
    if prefix:
        known = bool(source)
        out.name(
            "source_prefix",
            prefix,
            "is in data.columns"
            if known
            else f'put it into data.columns: {{input: "{prefix}{{your column}}"}}',
            "none" if known else "differs",
        )
    if columns and out.job.get("data.train"):
        out.job["data.train"][0]["columns"] = columns
