"""Keys of other tools in a job: other names of ours, which are understood, and keys that farthing
has no use for.

A name is only taken for another where both mean the same. Nothing is guessed by spelling here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

import yaml

from farthing.storage.files import Json

_OTHER_NAMES: dict[str, str] = {
    "model.model_name_or_path": "model_name base_model pretrained_model_name_or_path",
    "model.tokenizer_name_or_path": "tokenizer tokenizer_name",
    "model.revision": "model_revision",
    "data.train": "dataset dataset_name train_file train_data training_file",
    "data.eval": "eval_dataset eval_file validation_file",
    "data.dataset_config_name": "dataset_config",
    "data.max_length": (
        "max_seq_length max_seq_len sequence_len seq_length cutoff_len block_size max_source_length"
    ),
    "data.eval_fraction": "val_set_size",
    "data.train_on_prompt": "train_on_inputs",
    "method.lora_r": "r rank lora_rank",
    "method.lora_alpha": "alpha",
    "method.lora_dropout": "dropout",
    "method.target_modules": "lora_target_modules lora_target",
    "method.modules_to_save": "lora_modules_to_save",
    "method.name": "finetuning_type adapter",
    "train.num_train_epochs": "epochs num_epochs n_epochs",
    "train.optim": "optimizer",
    "train.learning_rate": "lr",
    "train.per_device_train_batch_size": (
        "batch_size train_batch_size micro_batch_size per_gpu_train_batch_size"
    ),
    "train.per_device_eval_batch_size": "eval_batch_size",
    "train.gradient_accumulation_steps": (
        "gradient_accumulation grad_accum grad_accumulation_steps accumulation_steps"
    ),
    "train.lr_scheduler_type": "scheduler lr_scheduler",
    "train.warmup_steps": "warmup num_warmup_steps",
    "train.max_grad_norm": "grad_clip gradient_clipping clip_grad_norm",
    "train.label_smoothing_factor": "label_smoothing",
    "train.seed": "random_seed",
    "train.gradient_checkpointing": "activation_checkpointing",
    "train.torch_compile": "compile",
    "train.eval_strategy": "evaluation_strategy",
    "train.early_stopping_patience": "patience",
    "train.max_steps": "max_train_steps",
    "output_dir": "checkpoint_dir output_path out_dir save_dir",
    "limits.max_usd": "max_cost budget",
}
"""A key of a job -> what others call it, where both mean the same."""
ALIASES = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}
"""Another name -> the key of a job that means the same."""

_OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw_hf": "adamw_torch",
    "adam": "",
    "adamw_fused": "adamw_torch_fused",
}
_SWITCHES = {"use_lora": "lora", "use_peft": "lora", "use_qlora": "qlora"}


class Foreign(Exception):
    """A key of others that can't be taken as one of ours; the message says why."""


def answer(name: str, *, is_exact: bool = False) -> str:
    """What farthing does instead of a key of another tool; empty for a key that nobody has.

    `is_exact`: only of keys that are known by their whole name, not by how they begin or end.
    """
    for before, of in (("", "job"), ("another tool's key: ", "common")):
        for group in facts_of_tools()[of]["reasons"]:
            patterns = group["keys"].split()
            if name in patterns or (not is_exact and any(fnmatchcase(name, p) for p in patterns)):
                return before + str(group["why"])
    return ""


@functools.cache
def facts_of_tools() -> Json:
    """What is known of other tools' settings."""
    file = resources.files("farthing").joinpath("facts/importers.yaml")
    found: Json = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


def adopt(
    values: dict[Any, Any], known: dict[str, list[str]]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Move aliases to where they belong, in place; yields (where it stood, where it is now).

    `known` has the keys of each section, and of the job itself as "". Raises `Foreign` where both
    names are given.
    """
    for section in ("", *(name for name in known if name)):
        place = values if section == "" else values.get(section)
        if not isinstance(place, dict):
            continue
        for name in [
            name for name in place if isinstance(name, str) and name not in known[section]
        ]:
            target, value = _meant(name, place[name], known if section == "" else {})
            if target is None:
                continue
            del place[name]
            _put(values, target, value, name)
            yield ((section, name) if section else (name,)), tuple(target.split("."))


def _meant(name: str, value: Any, known: dict[str, list[str]]) -> tuple[str | None, Any]:
    """(key of the job, value there) of another name; `known` are the sections in which a bare key
    of ours is looked for.
    """
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
    # a search's own seed or trials are named within its section alone
    homes = [s for s, keys in known.items() if s not in ("", "search") and name in keys]
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
