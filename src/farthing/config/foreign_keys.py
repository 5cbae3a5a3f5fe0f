"""Keys of other tools in a job: other names of ours, which are understood, and keys that farthing has no use for.

A name is only taken for another where both mean the same. Nothing is guessed by spelling here.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

ALIASES: dict[str, str] = {
    "model_name": "model.model_name_or_path",
    "base_model": "model.model_name_or_path",
    "pretrained_model_name_or_path": "model.model_name_or_path",
    "tokenizer": "model.tokenizer_name_or_path",
    "tokenizer_name": "model.tokenizer_name_or_path",
    "model_revision": "model.revision",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "train_file": "data.train",
    "train_data": "data.train",
    "training_file": "data.train",
    "eval_dataset": "data.eval",
    "eval_file": "data.eval",
    "validation_file": "data.eval",
    "dataset_config": "data.dataset_config_name",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "sequence_len": "data.max_length",
    "seq_length": "data.max_length",
    "cutoff_len": "data.max_length",
    "block_size": "data.max_length",
    "max_source_length": "data.max_length",
    "val_set_size": "data.eval_fraction",
    "train_on_inputs": "data.train_on_prompt",
    "r": "method.lora_r",
    "rank": "method.lora_r",
    "lora_rank": "method.lora_r",
    "alpha": "method.lora_alpha",
    "dropout": "method.lora_dropout",
    "lora_target_modules": "method.target_modules",
    "lora_target": "method.target_modules",
    "lora_modules_to_save": "method.modules_to_save",
    "finetuning_type": "method.name",
    "adapter": "method.name",
    "epochs": "train.num_train_epochs",
    "num_epochs": "train.num_train_epochs",
    "n_epochs": "train.num_train_epochs",
    "optimizer": "train.optim",
    "lr": "train.learning_rate",
    "batch_size": "train.per_device_train_batch_size",
    "train_batch_size": "train.per_device_train_batch_size",
    "micro_batch_size": "train.per_device_train_batch_size",
    "per_gpu_train_batch_size": "train.per_device_train_batch_size",
    "eval_batch_size": "train.per_device_eval_batch_size",
    "gradient_accumulation": "train.gradient_accumulation_steps",
    "grad_accum": "train.gradient_accumulation_steps",
    "grad_accumulation_steps": "train.gradient_accumulation_steps",
    "accumulation_steps": "train.gradient_accumulation_steps",
    "scheduler": "train.lr_scheduler_type",
    "lr_scheduler": "train.lr_scheduler_type",
    "warmup": "train.warmup_steps",
    "num_warmup_steps": "train.warmup_steps",
    "grad_clip": "train.max_grad_norm",
    "gradient_clipping": "train.max_grad_norm",
    "clip_grad_norm": "train.max_grad_norm",
    "label_smoothing": "train.label_smoothing_factor",
    "random_seed": "train.seed",
    "activation_checkpointing": "train.gradient_checkpointing",
    "compile": "train.torch_compile",
    "evaluation_strategy": "train.eval_strategy",
    "patience": "train.early_stopping_patience",
    "max_train_steps": "train.max_steps",
    "checkpoint_dir": "output_dir",
    "output_path": "output_dir",
    "out_dir": "output_dir",
    "save_dir": "output_dir",
    "max_cost": "limits.max_usd",
    "budget": "limits.max_usd",
}
"""Another name -> the key of a job that means the same."""

_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_hf": "adamw_torch", "adam": "", "adamw_fused": "adamw_torch_fused"}
_SWITCHES = {"use_lora": "lora", "use_peft": "lora", "use_qlora": "qlora"}

ANSWERS: dict[str, str] = {
    "deepspeed": "`farthing train JOB --deepspeed FILE` reads it; in a job: where.strategy, train.optim: adamw_torch_offload",
    "fsdp": "in a job: where.strategy: fsdp, and where.reshard_after_forward",
    "fsdp_config": "`farthing train JOB --accelerate FILE` reads accelerate's; in a job: where.strategy: fsdp",
    "dataloader_num_workers": "tokens are read ahead by a thread from a memory-mapped cache: there are no workers",
    "num_workers": "tokens are read ahead by a thread from a memory-mapped cache: there are no workers",
    "pin_memory": "batches are copied ahead of the step anyway",
    "dataloader_pin_memory": "batches are copied ahead of the step anyway",
    "drop_last": "the last step of an epoch takes the examples that are left, weighted as all others",
    "dataloader_drop_last": "the last step of an epoch takes the examples that are left, weighted as all others",
    "shuffle": "the order is always a shuffle that follows from train.seed, the same on every machine and after every resume",
    "packing": "examples always lie end to end, each attending to itself alone; a batch is counted in examples",
    "sample_packing": "examples always lie end to end, each attending to itself alone; a batch is counted in examples",
    "group_by_length": "examples lie end to end without padding, so that their order need not depend on their length",
    "resume_from_checkpoint": "the same command goes on from the last whole checkpoint in output_dir by itself",
    "auto_resume": "the same command goes on from the last whole checkpoint in output_dir by itself",
    "resume": "the same command goes on from the last whole checkpoint in output_dir by itself",
    "overwrite_output_dir": "a finished run is never written over: name another output_dir",
    "push_to_hub": "nothing is published; `farthing export RUN --output DIR` writes the model, `hf upload` publishes it",
    "hub_model_id": "nothing is published; `farthing export RUN --output DIR` writes the model, `hf upload` publishes it",
    "logging_dir": "logs are in output_dir",
    "run_name": "a run is named by its output_dir",
    "load_in_8bit": "there is no 8-bit base; method: qlora has one of 4 bits, lora one of 16",
    "do_train": "`farthing train` trains, and evaluates where there is data for it",
    "do_eval": "`farthing train` trains, and evaluates where there is data for it",
    "num_gpus": "`where.gpus` says how many of a machine's GPUs share a run",
    "remove_unused_columns": "columns that nothing reads are ignored, and named",
    "save_strategy": "checkpoints go by time (train.save_minutes) or steps (train.save_steps)",
}
"""Keys that farthing has no use for: what it does instead."""


class Foreign(Exception):
    """A key of others that can't be taken as one of ours; the message says why."""


def answer(name: str) -> str:
    """What farthing does instead of a key of another tool; empty for a key that nobody has."""
    if name in ANSWERS:
        return ANSWERS[name]
    from farthing.config.importers.shared import COMMON

    why = next(
        (group for group in COMMON if any(fnmatchcase(name, pattern) for pattern in group.patterns.split())), None
    )
    return f"another tool's key: {why.reason}" if why else ""


def adopt(values: dict[Any, Any], known: dict[str, list[str]]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Move aliases to where they belong, in place; yields (where it stood, where it is now).

    `known` has the keys of each section, and of the job itself as "". Raises `Foreign` where both names are given.
    """
    for section in ("", *(name for name in known if name)):
        place = values if section == "" else values.get(section)
        if not isinstance(place, dict):
            continue
        for name in [name for name in place if isinstance(name, str) and name not in known[section]]:
            target, value = _meant(name, place[name], known if section == "" else {})
            if target is None:
                continue
            del place[name]
            _put(values, target, value, name)
            yield ((section, name) if section else (name,)), tuple(target.split("."))


def _meant(name: str, value: Any, known: dict[str, list[str]]) -> tuple[str | None, Any]:
    """(key of the job, value there) of another name; `known` are the sections in which a bare key of ours is looked for."""
    if name in _SWITCHES and isinstance(value, bool):
        return "method.name", _SWITCHES[name] if value else "full"
    if name == "load_in_4bit" and value is True:
        return "method.name", "qlora"
    if name == "optimizer" and isinstance(value, str):
        value = _OPTIMIZERS.get(value.lower(), value) or value
    if name in ("adapter", "finetuning_type") and value not in ("lora", "qlora", "full"):
        return None, value
    if name in ALIASES:
        return ALIASES[name], value
    homes = [section for section, keys in known.items() if section and name in keys]
    return (f"{homes[0]}.{name}" if len(homes) == 1 else None), value


def _put(values: dict[Any, Any], target: str, value: Any, name: str) -> None:
    section, _, key = target.rpartition(".")
    place = values
    if section:
        place = values.setdefault(section, {})
        if not isinstance(place, dict):
            raise Foreign(f"`{name}` means `{target}`, and `{section}` is no section here")
    if key in place and place[key] != value:
        if (target, place[key], value) == ("method.name", "lora", "qlora"):
            place[key] = value
        elif (target, place[key], value) != ("method.name", "qlora", "lora"):
            raise Foreign(f"`{name}` means `{target}`, which is {place[key]!r} already")
        return
    place[key] = value
