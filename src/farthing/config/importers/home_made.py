"""A configuration that somebody wrote for a training loop of their own: usual words alone.

Words with one meaning are mapped. All others are listed as changing the result.
"""

from __future__ import annotations

import re

from farthing.config.importers.hf import NO_COUNT_OF_GPUS
from farthing.config.importers.tables import Imported, read_keys, table
from farthing.config.values import flat
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.storage.files import Json

NAME = "home-made"
_SECTION = r"^(train|training|trainer|hyperparameters|optimizer|model|data|dataset|lora|peft)\."
_OTHER_OBJECTIVE = re.compile(
    "(?i)(^|[^a-z])(i|d|c|p|gr|or|sim)po|kto|rloo|gkd|rlhf|reward|preference|reinforce|distill"
)
"""Values by which a configuration says another objective, whatever its key is."""


def _name_of(key: str) -> str:
    """A key without its section, unless the table has it with that."""
    return key if key in table(NAME).keys else re.sub(_SECTION, "", key)


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
        if is_word and isinstance(value, str) and _OTHER_OBJECTIVE.search(value):
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
        out.notes.append(NO_COUNT_OF_GPUS)
