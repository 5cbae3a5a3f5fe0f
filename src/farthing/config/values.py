"""What the keys of a job take: numbers, amounts, names, columns with templates, labels, sources
with keys of their own.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from farthing.addresses import is_remote, without_secrets
from farthing.config import paths
from farthing.data.columns import parts_of, templates_of
from farthing.data.rows import Own
from farthing.objectives.registry import find_objective, objective_names, standard_columns
from farthing.storage.files import Json
from farthing.storage.objects import BUCKETS
from farthing.units import parse_hours, parse_usd

WHOLE = ("rope_scaling", "lr_scheduler_kwargs")  # keys whose mapping is one value


def flat(values: Json, before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; items of a list of mappings are `key[0].inner`. An empty
    mapping is a leaf.
    """
    for name, value in values.items():
        key = f"{before}{name}"
        if isinstance(value, dict) and value and key.rpartition(".")[2] not in WHOLE:
            yield from flat(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(v, dict) and v for v in value):
            for index, item in enumerate(value):
                yield from flat(item, f"{key}[{index}].")
        else:
            yield key, value


def _is_no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("give a number, not true/false")
    return value


def _one_of(name: Any, known: Collection[str]) -> Any:
    """Raises the error that pydantic has for a value that is none of several."""
    if name not in known:
        *others, last = map(repr, sorted(known))
        context = {"expected": f"{', '.join(others)} or {last}"}
        raise PydanticCustomError("literal_error", "Input should be {expected}", context)
    return name


def _known_task(name: Any) -> Any:
    is_installed = isinstance(name, str) and find_objective(name) is not None
    return name if is_installed else _one_of(name, objective_names())


TaskName = Annotated[
    str, BeforeValidator(_known_task), Field(json_schema_extra={"enum": list(objective_names())})
]
Number = Annotated[float, BeforeValidator(_is_no_bool)]
Whole = Annotated[int, BeforeValidator(_is_no_bool)]
PositiveNumber = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Share = Annotated[Number, Field(ge=0, le=1)]
Positive = Annotated[Whole, Field(ge=1)]
_MEASURE = WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]})
_NOT_BOOL = BeforeValidator(_is_no_bool)
Usd = Annotated[float, BeforeValidator(parse_usd), _NOT_BOOL, Field(ge=0), _MEASURE]
Hours = Annotated[float, BeforeValidator(parse_hours), _NOT_BOOL, Field(gt=0), _MEASURE]
AsWord = BeforeValidator(lambda value: str(value).lower() if isinstance(value, bool) else value)
Name = Annotated[str, Field(min_length=1)]


def _as_git_names(name: str) -> str:
    if not re.fullmatch(r"[^\x00-\x20\x7f~^:?*\[\\]+", name):
        raise ValueError(
            "git has no such name; write a branch, tag or commit, such as main, v1.0 or 40 hex"
            " digits"
        )
    return name


def _no_url(to_do: str) -> AfterValidator:
    def check(name: str) -> str:
        if is_remote(name):
            raise ValueError(f"this is a URL; {to_do}")
        return name

    return AfterValidator(check)


def _in_store(name: str) -> str:
    scheme = name.partition("://")[0] if is_remote(name) else "file"
    if scheme not in (*BUCKETS, "file"):
        raise ValueError(
            f"{scheme}:// is no store; give a folder, s3://bucket/prefix, gs://bucket/prefix or"
            " az://container/prefix"
        )
    if re.match(rf"({'|'.join(BUCKETS)}):(?!//)", name):
        raise ValueError("an address has two slashes, as in s3://bucket/prefix")
    if name.startswith("file://") and not name.startswith("file:///"):
        raise ValueError("file:// needs three slashes and an absolute path, as in file:///mnt/runs")
    if name != without_secrets(name):
        raise ValueError(
            "give a URL without user, password and query: credentials go into the environment"
        )
    return name


Folder = Annotated[
    Name,
    _no_url("give a folder of this machine, and use `output_store:` for a copy elsewhere"),
    paths.placed(paths.folder),
]
HubName = Annotated[
    Name,
    _no_url("give a Hub name or a folder, and put tokens into the environment (HF_TOKEN)"),
    paths.placed(paths.local),
]
Revision = Annotated[str, AfterValidator(_as_git_names)]
RunName = Annotated[Name, paths.placed(paths.run_and_step)]
File = Annotated[str, paths.placed(paths.absolute)]
Store = Annotated[Name, AfterValidator(_in_store), paths.placed(paths.store)]
OneOrMany = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)


def _template(given: Any) -> Any:
    template = tuple(given) if isinstance(given, list) else given
    is_text = template and isinstance(template, str | tuple)
    if not is_text or not all(isinstance(each, str) for each in template):
        raise ValueError(
            "no column's name, template or list of templates; put words in quotes, as in"
            ' {prompt: "{question}"}'
        )
    for each in templates_of(template):
        parts_of(each)
    return template


def _label(label: Any) -> Any:
    if isinstance(label, bool):
        raise ValueError("YAML reads yes, no, on and off as true/false; put the word in quotes")
    return str(label) if isinstance(label, int) else label


_Column = Annotated[str, BeforeValidator(lambda name: _one_of(name, standard_columns()))]
ColumnMap = dict[_Column, Annotated[str | tuple[str, ...], BeforeValidator(_template)]]
_Label = Annotated[str, BeforeValidator(_label)]
LabelMap = dict[_Label, _Label]


class DataSource(BaseModel):
    """A file or data set with keys of its own."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    path: Annotated[Name, Field(description="file, address, folder or data set")]
    weight: Annotated[
        Number,
        Field(gt=0, le=1000, description="how often an epoch learns each of its examples"),
    ] = 1.0
    columns: Annotated[
        ColumnMap | None, Field(description="as data.columns, for this source alone")
    ] = None
    split: Annotated[str | None, Field(description="split of a data set")] = None
    name: Annotated[str | None, Field(description="configuration of a Hub data set")] = None


def _or_list(item: Json) -> WithJsonSchema:
    """What editors are told of a key that takes one or several."""
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item}]})


Names = Annotated[tuple[Name, ...], OneOrMany, _or_list({"type": "string"})]
Paths = Annotated[
    tuple[Name, ...],
    OneOrMany,
    _or_list({"anyOf": [{"type": "string"}, DataSource.model_json_schema()]}),
]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Trackers = Annotated[
    tuple[Tracker, ...], OneOrMany, _or_list({"type": "string", "enum": list(get_args(Tracker))})
]


class PlacedError(ValueError):
    """A mistake in a part of a value, and the keys that lead to it."""

    def __init__(self, message: str, *place: str) -> None:
        super().__init__(message)
        self.place = place


def with_own(values: Json, folder_of: Callable[[str], Path] | None) -> Json:
    """`train: [{path: a, weight: 2}, b]` as paths, with patterns spelled out, and beside them the
    keys of each. Raises `PlacedError`.
    """
    for role in ("train", "eval"):
        given = values.get(role)
        several = given if isinstance(given, list | tuple) else [given]
        if not given or not all(isinstance(each, str | dict) for each in several):
            continue
        found = list[tuple[str, Own]]()
        for index, each in enumerate(several):
            at = (role, str(index)) if several is given else (role,)
            path, own = _source(each, role, at) if isinstance(each, dict) else (each, Own())
            try:
                files = paths.spelled_out(path, folder_of(role)) if folder_of and path else [path]
            except ValueError as error:
                raise PlacedError(str(error), *at) from None
            found += [(file, own) for file in files]
        values = {**values, role: [file for file, _ in found]}
        if any(isinstance(each, dict) for each in several):
            values[f"of_{role}"] = [own for _, own in found]
    return values


def _source(given: Json, role: str, at: tuple[str, ...]) -> tuple[str, Own]:
    try:
        source = DataSource.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key, what = ".".join(map(str, first["loc"])), first["msg"]
        message = f"`{key}` of a source: {what[:1].lower()}{what[1:]}"
        raise PlacedError(message, *at, *map(str, first["loc"])) from None
    if role == "eval" and source.weight != 1:
        what = "evaluation takes each example once; leave it out"
        raise PlacedError(f"weight of {source.path}: {what}", *at, "weight")
    return source.path, Own(source.columns, source.weight, source.split, source.name)


class ScheduleKwargs(BaseModel):
    """What the settings of schedules take."""

    model_config = ConfigDict(allow_inf_nan=False)
    num_cycles: NonNegative = 0.5
    min_lr: NonNegative = 0
    min_lr_rate: Share = 0
    min_lr_ratio: Share = 0
    lr_end: NonNegative = 0
    power: NonNegative = 1
    timescale: NonNegative = 0
    num_decay_steps: NonNegative = 0
    decay_type: Literal["cosine", "linear", "1-sqrt"] = "linear"
    warmup_type: Literal["cosine", "linear", "1-sqrt"] = "linear"


def _schedule_settings(given: Json) -> Json:
    """Numbers also of what YAML takes for a text, such as 1e-6."""
    try:
        found = ScheduleKwargs.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['loc'][0]}: {first['msg']}") from None
    return {
        key: getattr(found, key, value) if isinstance(value, str) else value
        for key, value in given.items()
    }


ScheduleSettings = Annotated[dict[str, int | float | str], AfterValidator(_schedule_settings)]
_SCHEDULES: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr_rate", "min_lr", "num_cycles"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "decay_type", "warmup_type", "min_lr_ratio", "num_cycles"),
    ),
}
"""Settings of a schedule by transformers' names; the others have none."""


def check_schedule(name: str, kwargs: Json) -> None:
    """Raises `PlacedError` for settings that a schedule has not, or that it lacks."""
    known = _SCHEDULES.get(name, ())
    if unknown := [key for key in kwargs if key not in known]:
        of = f"; it takes {', '.join(known)}" if known else " and takes none"
        message = f"{name} has no `{unknown[0]}` in lr_scheduler_kwargs{of}"
        raise PlacedError(message, "lr_scheduler_kwargs")
    lacks = ""
    if name == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & kwargs.keys()) != 1:
        lacks = "one of min_lr and min_lr_rate, e.g. lr_scheduler_kwargs: {min_lr_rate: 0.1}"
    if name == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        lacks = (
            "the steps in which the rate comes down at the end, e.g. lr_scheduler_kwargs:"
            " {num_decay_steps: 100}"
        )
    if lacks:
        raise PlacedError(f"{name} needs {lacks}", "lr_scheduler_type")


def _on_the_clock(moment: datetime) -> datetime:
    try:
        moment.timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{moment} is no moment that a clock shows; give a later date") from None
    return moment


def _is_no_number(value: Any) -> Any:
    """pydantic takes 20261201 for seconds since 1970."""
    if isinstance(value, int | float) or (isinstance(value, str) and value.strip().isdigit()):
        raise ValueError(f"{value} is no moment; write it as in 2027-01-31T18:00")
    return value


Moment = Annotated[datetime, BeforeValidator(_is_no_number), AfterValidator(_on_the_clock)]


def known_encoding(name: str) -> str:
    """A text encoding that Python knows. Raises `ValueError`."""
    try:
        codecs.lookup(name).incrementaldecoder()
        "a".encode(name)  # an empty text asks no codec
    except (LookupError, TypeError, ValueError):
        raise ValueError(
            f"no text encoding is called {name}; use utf-8, cp1252, utf-16 ..."
        ) from None
    return name
