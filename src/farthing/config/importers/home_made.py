"""A configuration that somebody wrote for a training loop of their own: usual words alone.

Words with one meaning are mapped. All others are named as changing the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from farthing.config.importers.hf_trainer import ARGUMENTS, LORA, bf16, warmups
from farthing.config.importers.record import (
    Imported,
    Odd,
    To,
    flat,
    number,
    optimizer,
    positive,
    read_keys,
    rows,
    scheduler,
    text,
    whole,
)
from farthing.config.importers.shared import NO_COUNT_OF_GPUS, reasons
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.registry import objective_names

NAME = "home-made"


def _files(value: Any) -> list[dict[str, str]]:
    return [{"path": text(each)} for each in (value if isinstance(value, list) else [value])]


def _precision(value: Any) -> bool:
    if str(value).lower() not in ("bf16", "bfloat16"):
        raise Odd(f"{value}: farthing chooses the precision by the GPU; set train.bf16 or fp16")
    return bf16(True)


def _supervised(value: Any) -> str:
    if str(value).lower() not in ("lora", "full"):
        raise Odd(f"{value}: which training that is is not known here", "blocks")
    return str(value).lower()


def _task(value: Any) -> str:
    name = str(value).lower().replace("_", "-")
    if name in ("sft", "text-generation"):
        return CAUSAL_LM.name
    if name not in objective_names():
        raise Odd(f"{value}, which farthing does not do", "blocks")
    return name


def _each(to: str, convert: Any, keys: str) -> dict[str, To]:
    return dict.fromkeys(keys.split(), To(to, convert))


TABLE: dict[str, To] = {
    **ARGUMENTS,
    **LORA,
    **_each("task", _task, "task objective"),
    **_each(
        "model.model_name_or_path",
        text,
        "model model_name model_id base_model pretrained_model model.name model.id model.path"
        " model_name_or_path",
    ),
    **_each(
        "data.train",
        _files,
        "dataset data dataset_path data_path train_file train_data train_path dataset_name"
        " dataset.path dataset.name dataset.train dataset.train_file data.path data.train"
        " data.train_file data.dataset",
    ),
    **_each(
        "data.eval",
        _files,
        "eval_dataset val_dataset eval_file val_file validation_file eval_data val_data eval_path"
        " dataset.val dataset.eval dataset.validation data.val data.eval data.validation",
    ),
    **_each(
        "data.max_length",
        whole,
        "max_length max_seq_length max_seq_len seq_len seq_length sequence_length block_size",
    ),
    **_each("train.num_train_epochs", positive, "epochs num_epochs n_epochs max_epochs"),
    **_each(
        "train.per_device_train_batch_size",
        whole,
        "batch_size train_batch_size micro_batch_size",
    ),
    **_each("train.global_batch_size", whole, "global_batch_size effective_batch_size"),
    **_each(
        "train.gradient_accumulation_steps",
        whole,
        "gradient_accumulation grad_accumulation grad_accum accumulation_steps grad_accum_steps"
        " accumulate_grad_batches",
    ),
    **_each("train.learning_rate", positive, "lr optimizer.lr optimizer.learning_rate"),
    **_each("train.optim", optimizer, "optimizer optimizer.name optimizer.type"),
    **_each(
        "train.lr_scheduler_type",
        scheduler,
        "scheduler lr_scheduler lr_schedule scheduler.name scheduler.type",
    ),
    **_each("train.max_grad_norm", number, "grad_clip gradient_clip clip_grad_norm"),
    **_each("train.bf16", _precision, "precision mixed_precision dtype"),
    "random_seed": ARGUMENTS["seed"],
    **_each("output_dir", text, "checkpoint_dir checkpoints_dir checkpoint_path save_dir"),
    **_each("output_dir", text, "output checkpoint.dir output.dir"),
    **_each("method.name", _supervised, "method"),
    **rows("method", whole, "lora_r lora_rank=lora_r"),
    **rows("method", positive, "lora_alpha lora.alpha=lora_alpha"),
    **rows("method", number, "lora_dropout lora.dropout=lora_dropout"),
    **rows("method", whole, "lora.rank=lora_r"),
}
_PARENTS = [
    "train",
    "training",
    "trainer",
    "hyperparameters",
    "optimizer",
    "model",
    "data",
    "dataset",
    "lora",
    "peft",
]


_OTHER_OBJECTIVE = re.compile(
    r"(?i)(?<![a-z])(ipo|dpo|orpo|kto|ppo|grpo|rloo|simpo|cpo|gkd)(?![a-z])|(dpo|orpo|kto|ppo|grpo"
    r"|reward|rloo)_?trainer|rlhf|preference|reinforce|distill|reward"
)
"""Values by which a configuration says another objective, whatever its key is."""


def _name_of(key: str) -> str:
    parent, _, last = key.rpartition(".")
    return last if key not in TABLE and parent in _PARENTS else key


def is_home_made(values: Mapping[str, Any]) -> bool:
    """Whether a model, data and how long or how fast are there, in usual words."""
    found = {TABLE[name].key for key, _ in flat(values) if (name := _name_of(key)) in TABLE}
    lengths = {"train.num_train_epochs", "train.max_steps", "train.learning_rate"}
    return {"model.model_name_or_path", "data.train"} <= found and bool(lengths & found)


def read(values: Mapping[str, Any], out: Imported) -> None:
    """A configuration of one's own."""
    del out.job["task"]
    if isinstance(values.get("lora"), bool):
        out.put("lora", values["lora"], "method.name", "lora" if values["lora"] else "full")
    warmups(out, values)
    for key, value in flat(values):
        is_text = isinstance(value, str) and _name_of(key) not in TABLE
        if is_text and _OTHER_OBJECTIVE.search(value):
            out.name(key, value, f"{value}, which farthing does not do", "blocks")
    read_keys(out, flat(values), TABLE, reasons("common"), name_of=_name_of)
    has_lora = any(key.startswith("method.lora") for key in out.job)
    out.default("method.name", "lora" if has_lora else "full", "a loop without an adapter")
    if "task" not in out.job:
        out.notes.append(f"no task is named there: {CAUSAL_LM.name} is a guess, check it first")
    out.notes.append("read by its words alone: compare each line with what your loop did")
    if "train.per_device_train_batch_size" in out.job:
        out.notes.append(NO_COUNT_OF_GPUS)
