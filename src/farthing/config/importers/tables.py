"""The tools as data: `facts/importers.yaml` as tables, and the ways in which values are read.

A row `train whole: max_steps batch=per_device_train_batch_size` maps keys to a section of the job;
`train.optim optimizer: optim optimizer` maps all of its keys to one.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, get_args

import yaml

from farthing.config.importers.record import Effect, Imported, Odd, Table, To, Why, say
from farthing.config.job import TrainSection
from farthing.config.values import known_init
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.registry import objective_names
from farthing.storage.files import Json


def number(value: Any) -> float | int:
    """A number, also where YAML took `2e-5` for text. Raises `Odd`."""
    if isinstance(value, bool):
        if not value:
            raise Odd("off there: its default holds", "none")
        raise Odd("true where a number is wanted")
    if isinstance(value, int):
        return value
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise Odd(f"not a number that can be read here ({say(value)}): set it by hand") from None
    if not math.isfinite(found):
        raise Odd("not a finite number")
    is_whole = found.is_integer() and not {".", "e", "E"} & set(str(value))
    return int(found) if is_whole else found


def positive(value: Any) -> float | int:
    """A number over 0. Raises `Odd`."""
    found = number(value)
    if found <= 0:
        raise Odd(f"{say(value)} switches it off there: its default holds", "none")
    return found


def whole(value: Any) -> int:
    """A whole number over 0. Raises `Odd`."""
    found = positive(value)
    if found != int(found):
        raise Odd(f"{say(value)} is no whole number")
    return int(found)


def truth(value: Any) -> bool:
    """true or false. Raises `Odd`."""
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "1", "0"):
        return value.lower() in ("true", "yes", "1")
    if not isinstance(value, bool):
        raise Odd(f"neither true nor false ({say(value)})")
    return value


def text(value: Any) -> str:
    """Raises `Odd` for what is no text."""
    if not isinstance(value, str) or not value.strip():
        raise Odd(f"no text that can be read here ({say(value)})")
    return value


def share(value: Any) -> float:
    """The share of rows that is held out. Raises `Odd` for a number of rows."""
    found = float(number(value))
    if found == 0:
        raise Odd("0: nothing is held out", "none")
    if found >= 1:
        why = f"holds out {found:g} rows; farthing holds out a share: set data.eval_fraction"
        raise Odd(why, "differs")
    return found


def names(value: Any) -> list[str]:
    """A list of names, also of one that is written with commas or blanks. Raises `Odd`."""
    if isinstance(value, str):
        value = value.replace(",", " ").split()
    is_list = isinstance(value, list | tuple) and bool(value)
    if not is_list or not all(isinstance(item, str) for item in value):
        raise Odd(f"no list of names that can be read here ({say(value)})")
    return list(value)


def targets(value: Any) -> list[str]:
    """Layers that get an adapter. Raises `Odd` for a pattern."""
    if isinstance(value, str) and any(sign in value for sign in "()|\\*[]"):
        raise Odd("a pattern of layer names; farthing takes names: set method.target_modules")
    found = names(value)
    if any(sign in name for name in found for sign in "()|\\*[]"):
        raise Odd("patterns of layer names; farthing takes names: set method.target_modules")
    return ["all-linear"] if found == ["all"] else found


def reports(value: Any) -> list[str]:
    """The trackers that farthing has. Raises `Odd` for none of them."""
    known = [name for name in names(value) if name in ("tensorboard", "wandb", "mlflow", "trackio")]
    if not known:
        raise Odd("farthing logs to its run folder; trackers are train.report_to", "none")
    return known


def begins(value: Any) -> str:
    """peft's `init_lora_weights`, as a word. Raises `Odd` for those that farthing has not."""
    name = value.lower() if isinstance(value, str) else str(truth(value)).lower()
    try:
        return known_init(name)
    except ValueError as error:
        raise Odd(f"{str(error).partition(';')[0]}: it begins as usual") from None


def mapping(value: Any) -> Json:
    """Settings within a key, also as JSON on a command line. Raises `Odd`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise Odd("no settings that can be read here: set them by hand")
    return dict(value)


def files(value: Any) -> list[Json]:
    """Data by the name of a file or a data set."""
    return [{"path": text(each)} for each in (value if isinstance(value, list) else [value])]


def one_of(known: Mapping[str, Any], why: str, effect: Effect = "differs") -> Callable[[Any], Any]:
    """A reader of words. It raises `Odd` with the reason for others."""

    def read(value: Any) -> Any:
        name = str(value).rpartition(".")[2].lower()
        if name not in known:
            raise Odd(f"{say(value)}: {why}", effect)
        return known[name]

    return read


def _of_train(key: str, others: Mapping[str, str]) -> Callable[[Any], Any]:
    """One of the values that a key of `train` takes, under other tools' names too."""
    known = {str(each): str(each) for each in get_args(TrainSection.model_fields[key].annotation)}
    return one_of({**known, **others}, "farthing has none; its default is used, the losses differ")


_OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_hf", "adamw_torch_xla", "adamw_anyprecision"), "adamw_torch"),
    **dict.fromkeys(("adamw_apex_fused", "adamw_torch_npu_fused"), "adamw_torch_fused"),
    **{"paged_adamw": "paged_adamw_32bit", "adamw_bnb": "adamw_bnb_8bit"},
    "adamw_torch_8bit": "adamw_8bit",
}
_TASKS = {
    "sft": CAUSAL_LM.name,
    "text-generation": CAUSAL_LM.name,
    "text_generation": CAUSAL_LM.name,
}
READERS: dict[str, Callable[[Any], Any]] = {
    **{
        each.__name__: each
        for each in (
            *(number, positive, whole, truth, text, share, names, targets, reports, begins),
            *(mapping, files),
        )
    },
    "optimizer": _of_train("optim", _OPTIMIZERS),
    "schedule": _of_train("lr_scheduler_type", {}),
    "strategy": _of_train("eval_strategy", {}),
    "seed": lambda value: int(number(value)),
    "compiled": lambda value: value != "auto" and truth(value),
    "scratch": lambda value: "random" if truth(value) else "pretrained",
    "precision": one_of({"bf16": True, "bfloat16": True}, "set train.bf16 or train.fp16"),
    "too_long": one_of(
        {"drop": "skip", "truncate": "truncate", "raise": "error"}, "set data.too_long"
    ),
    "task": one_of(
        {name: name for name in objective_names()} | _TASKS, "which farthing does not do", "blocks"
    ),
    "method": one_of(
        {"lora": "lora", "full": "full"}, "which training that is is not known here", "blocks"
    ),
    "offload": one_of(
        {"cpu": "adamw_torch_offload"},
        "where optimizer state is off-loaded; farthing off-loads it to main memory: say cpu",
        "blocks",
    ),
    "offload_weights": one_of(
        {"cpu": True, "true": True},
        "where weights are off-loaded; farthing keeps them in main memory: say cpu",
        "blocks",
    ),
}


@functools.lru_cache(maxsize=1)
def _blocks() -> Json:
    file = resources.files("farthing").joinpath("facts/importers.yaml")
    found: Json = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


@functools.cache
def table(name: str) -> Table:
    """A block of the tables with those that it takes."""
    block = _blocks()[name]
    keys: dict[str, To] = {}
    reasons: list[Why] = []
    for row, words in block.get("keys", {}).items():
        target, _, how = row.partition(" ")
        is_one = "." in target or target in ("task", "output_dir")
        for word in words.split():
            theirs, _, ours = word.partition("=")
            to = target if is_one else f"{target}.{ours or theirs}"
            keys[theirs] = To(to, READERS[how or "text"], block.get("notes", {}).get(theirs, ""))
    for each in block.get("reasons", ()):
        reasons.append(Why(each["effect"], each["why"], tuple(each["keys"].split())))
    for other in block.get("takes", "").split():
        taken = table(other)
        keys = {**taken.keys, **keys}
        reasons += taken.reasons
    return Table(keys, tuple(reasons), block.get("defaults", {}))


def fact(name: str) -> Any:
    """Another block: prompts, layers, columns."""
    return _blocks()[name]


def defaults(out: Imported, *of: str) -> None:
    """What tools do where nothing is said, the first one first."""
    for name in of:
        out.default(table(name).defaults)
