"""What the keys of a job take: numbers, amounts, names, columns with templates, labels, sources
with keys of their own.
"""

from __future__ import annotations

import codecs
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic.config import ConfigDict
from pydantic_core import PydanticCustomError

from farthing.data.columns import parts_of, templates_of
from farthing.data.rows import Own
from farthing.objectives.registry import find_objective, objective_names
from farthing.storage.files import Json
from farthing.units import parse_hours, parse_usd


def _number_is_no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("give a number, not true/false")
    return value


def _known_task(name: Any) -> Any:
    """The name of a task that there is. Raises the error that pydantic has for a value that is none
    of several.
    """
    if not isinstance(name, str) or find_objective(name) is None:
        *others, last = (repr(name) for name in objective_names())
        expected = f"{', '.join(others)} or {last}"
        raise PydanticCustomError(
            "literal_error", "Input should be {expected}", {"expected": expected}
        )
    return name


TaskName = Annotated[
    str, BeforeValidator(_known_task), Field(json_schema_extra={"enum": list(objective_names())})
]
Number = Annotated[float, BeforeValidator(_number_is_no_bool)]
Whole = Annotated[int, BeforeValidator(_number_is_no_bool)]
Share = Annotated[Number, Field(ge=0, le=1)]
Positive = Annotated[Whole, Field(ge=1)]
_MEASURE = WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]})
Usd = Annotated[float, BeforeValidator(parse_usd), Field(ge=0), _MEASURE]
Hours = Annotated[float, BeforeValidator(parse_hours), Field(gt=0), _MEASURE]
AsWord = BeforeValidator(lambda value: str(value).lower() if isinstance(value, bool) else value)


_OF_SOURCE: Json = {
    "path": {"type": "string", "description": "file, address, folder or data set"},
    "weight": {"type": "number", "description": "how often an epoch learns each of its examples"},
    "columns": {"type": "object", "description": "as data.columns, for this source alone"},
    "split": {"type": "string", "description": "split of a data set"},
    "name": {"type": "string", "description": "configuration of a Hub data set"},
}
"""The keys of a source, for editors."""
_OWN_SCHEMA: Json = {
    "type": "object",
    "required": ["path"],
    "additionalProperties": False,
    "properties": _OF_SOURCE,
}


def _or_list(item: Json) -> WithJsonSchema:
    """What editors are told of a key that takes one or several."""
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item}]})


class PlacedError(ValueError):
    """A mistake in a part of a value, and the keys that lead to it."""

    def __init__(self, message: str, *place: str) -> None:
        super().__init__(message)
        self.place = place


_SCHEDULE_KWARGS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr_rate", "min_lr", "num_cycles"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        "num_decay_steps",
        "decay_type",
        "warmup_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}
"""Settings of a schedule by transformers' names; the others have none."""
_CURVES = ("cosine", "linear", "1-sqrt")


def check_schedule(name: str, kwargs: dict[str, int | float | str]) -> None:
    """Raises `PlacedError` for settings that a schedule has not, or that it lacks."""
    known = _SCHEDULE_KWARGS.get(name, ())
    for key, value in kwargs.items():
        if key not in known:
            of = f"; it takes {', '.join(known)}" if known else " and takes none"
            raise PlacedError(
                f"{name} has no `{key}` in lr_scheduler_kwargs{of}", "lr_scheduler_kwargs"
            )
        if key in ("decay_type", "warmup_type"):
            if value not in _CURVES:
                raise PlacedError(
                    f"{key} is one of {', '.join(_CURVES)}, not {value!r}", "lr_scheduler_kwargs"
                )
        elif isinstance(value, str) or value < 0:
            raise PlacedError(
                f"lr_scheduler_kwargs: {key} is a number from 0 on, not {value!r}",
                "lr_scheduler_kwargs",
            )
        elif key in ("min_lr_rate", "min_lr_ratio") and value > 1:
            raise PlacedError(
                f"lr_scheduler_kwargs: {key} is a share of the learning rate, 0 to 1",
                "lr_scheduler_kwargs",
            )
    if name == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & kwargs.keys()) != 1:
        raise PlacedError(
            f"{name} needs one of min_lr and min_lr_rate, e.g. lr_scheduler_kwargs:"
            " {min_lr_rate: 0.1}",
            "lr_scheduler_type",
        )
    if name == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        raise PlacedError(
            f"{name} needs the steps in which the rate comes down at the end, e.g."
            " lr_scheduler_kwargs: {num_decay_steps: 100}",
            "lr_scheduler_type",
        )


Name = Annotated[str, Field(min_length=1)]
OneOrMany = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
Names = Annotated[tuple[Name, ...], OneOrMany, _or_list({"type": "string"})]
Paths = Annotated[
    tuple[Name, ...], OneOrMany, _or_list({"anyOf": [{"type": "string"}, _OWN_SCHEMA]})
]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Trackers = Annotated[
    tuple[Tracker, ...], OneOrMany, _or_list({"type": "string", "enum": list(get_args(Tracker))})
]
_ADVICE = "YAML reads yes, no, on, off, true and false as true/false; put the word in quotes"


def _columns(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    found: dict[str, str | tuple[str, ...]] = {}
    for name, given in value.items():
        if isinstance(name, bool) or isinstance(given, bool):
            raise ValueError(f"`{name}: {given}` holds a true/false; {_ADVICE}")
        template: Any = tuple(given) if isinstance(given, list) else given
        if not isinstance(template, str | tuple) or not all(
            isinstance(each, str) for each in template
        ):
            raise ValueError(
                f"`{name}` is no column's name, template or list of templates; e.g. prompt:"
                ' "{question}"'
            )
        if not template:
            raise ValueError(f"`{name}` is empty; name a column")
        for each in templates_of(template):
            try:
                parts_of(each)
            except ValueError as error:
                raise ValueError(f"`{name}`: {error}") from None
        found[str(name)] = template
    return found


def _labels(value: Any) -> Any:
    """Whole numbers are labels by their digits. A true/false was most likely a word: it would match
    nothing in silence.
    """
    if not isinstance(value, dict):
        return value
    for name, label in value.items():
        if isinstance(label, bool):
            raise ValueError(f"`{name}: {str(label).lower()}` names no class; {_ADVICE}")
        if isinstance(name, bool):
            raise ValueError(f"a label is {str(name).lower()}; {_ADVICE}")
    return {
        str(name): str(label) if isinstance(label, int) else label for name, label in value.items()
    }


ColumnMap = Annotated[dict[str, str | tuple[str, ...]], BeforeValidator(_columns)]
LabelMap = Annotated[dict[str, str], BeforeValidator(_labels)]
_COLUMNS = TypeAdapter(ColumnMap, config=ConfigDict(strict=False))


def with_own(values: Json) -> Json:
    """`train: [{path: a, weight: 2}, b]` as paths, and beside them what is said of each. Raises
    `PlacedError`.
    """
    for role in ("train", "eval"):
        given = values.get(role)
        if isinstance(given, dict):
            given = [given]
        if not isinstance(given, list | tuple) or not any(isinstance(each, dict) for each in given):
            continue
        paths, own = [], []
        is_one = isinstance(values.get(role), dict)
        for index, each in enumerate(given):
            said = each if isinstance(each, dict) else {"path": each}
            at = (role,) if is_one else (role, str(index))
            _check(said, at)
            paths.append(said["path"])
            columns = said.get("columns")
            try:
                columns = None if columns is None else _COLUMNS.validate_python(columns)
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise PlacedError(f"columns of {said['path']}: {message}", *at, "columns") from None
            own.append(
                Own(columns, float(said.get("weight", 1)), said.get("split"), said.get("name"))
            )
        values = {**values, role: paths, f"of_{role}": own}
    return values


def _check(said: dict[Any, Any], at: tuple[str, ...]) -> None:
    role = at[0]
    unknown = [str(key) for key in said if key not in _OF_SOURCE]
    if unknown:
        raise PlacedError(
            f"`{unknown[0]}` is no key of a source in `{role}`; there are {', '.join(_OF_SOURCE)}",
            *at,
            unknown[0],
        )
    if not isinstance(said.get("path"), str) or not said["path"]:
        raise PlacedError(f"a source in `{role}` without a path; write {{path: FILE}}", *at, "path")
    weight = said.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1000:
        raise PlacedError(
            f"weight {weight!r} of {said['path']}; a number over 0 is wanted, 2 takes each example"
            " twice an epoch",
            *at,
            "weight",
        )
    if role == "eval" and weight != 1:
        raise PlacedError(
            f"weight of {said['path']}; evaluation takes each example once, leave it out",
            *at,
            "weight",
        )
    for key in ("split", "name"):
        if key in said and not isinstance(said[key], str):
            raise PlacedError(f"{key} of {said['path']} is no text; put it in quotes", *at, key)


def known_encoding(name: str) -> str:
    """A text encoding that Python knows. Raises `ValueError`."""
    try:
        codecs.lookup(name).incrementaldecoder()
        if not isinstance(b"".decode(name), str):
            raise LookupError
    except (LookupError, TypeError, ValueError):
        raise ValueError(
            f"no text encoding is called {name}; use utf-8, cp1252, utf-16 ..."
        ) from None
    return name


_NEED_DATA = {"eva": "EVA", "corda": "CorDA", "lora_ga": "LoRA-GA"}


def known_init(name: str) -> str:
    """A word for `init_lora_weights` that farthing knows. Raises `ValueError` with the reason for
    others of peft's.
    """
    known = ("true", "false", "gaussian", "orthogonal", "pissa", "olora")
    if name in known or re.fullmatch(r"pissa_niter_[1-9][0-9]*", name):
        return name
    why = f"no way to begin that is known ({name})"
    if name in _NEED_DATA:
        why = (
            f"{_NEED_DATA[name]} looks at a sample of the data before the adapter is made, which"
            " farthing does not do"
        )
    elif name == "loftq":
        why = "LoftQ makes a quantized base of its own, and farthing's is that of bitsandbytes"
    raise ValueError(f"{why}; use {', '.join(known)} or pissa_niter_16")
