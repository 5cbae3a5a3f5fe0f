"""A configuration that somebody wrote for a training loop of their own: usual words alone.

Words with one meaning are mapped. All others are listed as changing the result.
"""

from __future__ import annotations

import re

from farthing.config.importers.tables import Imported, fact, read_keys, table
from farthing.config.values import flat
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.storage.files import Json

NAME = "home-made"


def _name_of(key: str) -> str:
    """A key without its section, unless the table has it with that."""
    return key if key in table(NAME).keys else re.sub(fact("home-made-sections"), "", key)


def is_home_made(values: Json) -> bool:
    """Whether a model, data and how long or how fast are there, in usual words."""
    keys = table(NAME).keys
    found = {keys[name].key for key, _ in flat(values) if (name := _name_of(key)) in keys}
    lengths = {"train.num_train_epochs", "train.max_steps", "train.learning_rate"}
    return {"model.model_name_or_path", "data.train"} <= found and bool(lengths & found)


def read(values: Json, out: Imported) -> None:
    del out.job["task"]
    for key, value in flat(values):
        is_word = _name_of(key) not in table(NAME).keys or _name_of(key) in ("task", "objective")
        if is_word and isinstance(value, str) and re.search(fact("home-made-objectives"), value):
            why = f"{value}, whose settings and data this importer does not know"
            out.refuse(key, value, why)
    read_keys(out, values, NAME, name_of=_name_of)
    has_lora = any(key.startswith("method.lora") for key in out.job)
    out.default({"method.name": "lora" if has_lora else "full"}, "a loop without an adapter")
    if "task" not in out.job:
        out.notes.append(f"it names no task: {CAUSAL_LM.name} is a guess, check it first")
    if not {"train.bf16", "train.fp16"} & {*out.job}:
        out.notes.append("it names no precision: on GPUs that have bf16 this job computes in it")
    out.notes.append("read by its key names alone: compare each line with your loop")
    if "train.per_device_train_batch_size" in out.job:
        out.notes.append(fact("one-gpu"))
