"""A configuration that somebody wrote for a training loop of their own: usual words alone.

Words with one meaning are mapped. All others are named as changing the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from farthing.config.importers.hf import NO_COUNT_OF_GPUS
from farthing.config.importers.tables import Imported, flat, read_keys, table
from farthing.objectives.causal_lm import CAUSAL_LM

NAME = "home-made"
_PARENTS = {
    *("train", "training", "trainer", "hyperparameters", "optimizer"),
    *("model", "data", "dataset", "lora", "peft"),
}
_OTHER_OBJECTIVE = re.compile(
    r"(?i)(?<![a-z])(ipo|dpo|orpo|kto|ppo|grpo|rloo|simpo|cpo|gkd)(?![a-z])|(dpo|orpo|kto|ppo|grpo"
    r"|reward|rloo)_?trainer|rlhf|preference|reinforce|distill|reward"
)
"""Values by which a configuration says another objective, whatever its key is."""


def _name_of(key: str) -> str:
    parent, _, last = key.rpartition(".")
    return last if key not in table(NAME).keys and parent in _PARENTS else key


def is_home_made(values: Mapping[str, Any]) -> bool:
    """Whether a model, data and how long or how fast are there, in usual words."""
    keys = table(NAME).keys
    found = {keys[name].key for key, _ in flat(values) if (name := _name_of(key)) in keys}
    lengths = {"train.num_train_epochs", "train.max_steps", "train.learning_rate"}
    return {"model.model_name_or_path", "data.train"} <= found and bool(lengths & found)


def read(values: Mapping[str, Any], out: Imported) -> None:
    del out.job["task"]
    if isinstance(values.get("lora"), bool):
        out.put("lora", values["lora"], "method.name", "lora" if values["lora"] else "full")
    for key, value in flat(values):
        name = _name_of(key)
        is_word = name not in table(NAME).keys or name in ("task", "objective")
        if is_word and isinstance(value, str) and _OTHER_OBJECTIVE.search(value):
            why = f"{value}, whose settings and data this importer does not know"
            out.refuse(key, value, why)
    read_keys(out, values, NAME, name_of=_name_of)
    has_lora = any(key.startswith("method.lora") for key in out.job)
    out.default({"method.name": "lora" if has_lora else "full"}, "a loop without an adapter")
    if "task" not in out.job:
        out.notes.append(f"it names no task: {CAUSAL_LM.name} is a guess, check it first")
    out.notes.append("read by its key names alone: compare each line with your loop")
    if "train.per_device_train_batch_size" in out.job:
        out.notes.append(NO_COUNT_OF_GPUS)
