"""The objectives by name: those of this folder, and those of installed packages.

A package brings one by an entry point of the group `farthing.objectives`, whose name is the
objective's and whose object is an `Objective`; a program by `register`. A package is imported when
its objective is asked for.
"""

from __future__ import annotations

import difflib
import hashlib
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from pydantic import ValidationError

from farthing.errors import InputError
from farthing.objectives import cpo, dpo, kto, orpo, reward, simpo
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.columns import PAIRS, VERDICTS, Format
from farthing.objectives.multi_label import MULTI_LABEL
from farthing.objectives.objective import Objective, ObjectiveSettings
from farthing.objectives.regression import REGRESSION
from farthing.objectives.seq2seq import SEQ2SEQ
from farthing.objectives.token_classification import TOKEN_CLASSIFICATION

ENTRY_POINTS = "farthing.objectives"
_OBJECTIVES: dict[str, Objective] = {}


_OF_UNITS = ("needs_reference", "is_mismatched", "figures", "value")  # read beside a loss alone


def register(task: Objective) -> None:
    """Make a task known in this process. Raises `ValueError` where its name is another's, or where
    it says what nothing would read.
    """
    unread = ("targets",) if task.loss is not None else _OF_UNITS
    for name in unread:
        if getattr(task, name):
            has = "has a" if task.loss is not None else "has no"
            raise ValueError(f"`{name}` is not read where an objective {has} `loss` of its own")
    odd = [form.name for form in task.formats if form not in (*PAIRS, *VERDICTS)]
    if task.loss is not None and odd:
        to_do = "formats of columns.PAIRS and columns.VERDICTS are; data.columns maps other columns"
        raise ValueError(f"`{odd[0]}` is not read where an objective has a `loss`: {to_do}")
    if _OBJECTIVES.setdefault(task.name, task) != task:
        raise ValueError(f"there is another task called {task.name}")


for _each in (
    *(CAUSAL_LM, SEQ2SEQ, CLASSIFICATION),
    *(MULTI_LABEL, REGRESSION, TOKEN_CLASSIFICATION),
    *(each.OBJECTIVE for each in (dpo, kto, orpo, simpo, cpo, reward)),
):
    register(_each)


_BUILT_IN = frozenset(_OBJECTIVES)


def is_installed(name: str) -> bool:
    """Whether every process finds an objective, and not only the program that registered it."""
    return name in _BUILT_IN or bool(package_of(name))


def package_of(name: str) -> str:
    """The installed package that brings an objective; empty for farthing's own."""
    points = [] if name in _BUILT_IN else entry_points(group=ENTRY_POINTS, name=name)
    return next((point.dist.name if point.dist else point.module for point in points), "")


def code_sha256(name: str) -> str:
    """What tells two versions of an objective of others apart: a hash of the files that its
    functions are written in, and of all Python files of the package that brings it. Empty for
    farthing's own.
    """
    if name in _BUILT_IN:
        return ""
    modules = [sys.modules[module] for module in _modules_of(objective_of(name))]
    files = {Path(path) for each in modules if (path := getattr(each, "__file__", None))}
    for point in entry_points(group=ENTRY_POINTS, name=name):
        package = sys.modules.get(point.module.partition(".")[0])  # a program may bring its own
        for folder in getattr(package, "__path__", ()):
            files |= {*Path(folder).rglob("*.py")}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def _modules_of(value: object) -> Iterator[str]:
    if isinstance(value, tuple):
        for each in value:
            yield from _modules_of(each)
    elif callable(value) and getattr(value, "__module__", None) in sys.modules:
        yield value.__module__


def objective_names() -> tuple[str, ...]:
    return tuple(_OBJECTIVES)


def find_objective(name: str) -> Objective | None:
    """The task of this name; None where there is none. Raises `InputError` for a package whose task
    can't be taken.
    """
    points = () if name in _OBJECTIVES else entry_points(group=ENTRY_POINTS, name=name)
    for point in [*points][:1]:
        try:
            task = point.load()
            if not isinstance(task, Objective) or task.name != name:
                raise TypeError("it is no farthing Objective of that name")
            register(task)
        except Exception as error:
            raise InputError(
                f"the task `{name}` of an installed package can't be used:"
                f" {type(error).__name__}: {str(error)[:200]}",
                where=point.value,
                to_do="mend it",
            ) from error
    return _OBJECTIVES.get(name)


def objective_of(name: str) -> Objective:
    """The task of this name. Raises `InputError` for one that is not known."""
    task = find_objective(name)
    if task is None:
        raise InputError(
            f"there is no task `{name}`", where="task", to_do=f"use one of {', '.join(_OBJECTIVES)}"
        )
    return task


def read_settings(given: object) -> ObjectiveSettings:
    """The settings of `objective: NAME`, or `objective: {name: NAME, ...}`. Raises `ValueError`."""
    values = {"name": given} if isinstance(given, str) else given
    if isinstance(values, ObjectiveSettings):
        return values
    known = list(_with_keys())
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise ValueError(f"`name` is missing; use one of {', '.join(known)}")
    name = values["name"]
    found = find_objective(name)
    if found is None or found.settings is None:
        near = difflib.get_close_matches(name, known, n=1)
        to_do = f"did you mean `{near[0]}`?" if near else f"use one of {', '.join(known)}"
        what = "has no keys: name it as `task:`" if found else "is no objective"
        raise ValueError(f"`{name}` {what}; {to_do}")
    try:
        return found.settings.model_validate(values)
    except ValidationError as error:
        raise ValueError(_explained(error, found.settings, name)) from None


def _with_keys() -> dict[str, type[ObjectiveSettings]]:
    """The settings of the objectives that have keys, by name."""
    return {name: each.settings for name, each in _OBJECTIVES.items() if each.settings}


def keys_of_objectives() -> list[str]:
    """The keys that the objectives of this folder have, each once."""
    return list(dict.fromkeys(key for each in _with_keys().values() for key in each.model_fields))


def schema() -> dict[str, object]:
    known = _with_keys()
    keys = (settings.model_json_schema() for settings in known.values())
    return {"anyOf": [{"type": "string", "enum": list(known)}, *keys, {"type": "null"}]}


def _explained(error: ValidationError, settings: type[ObjectiveSettings], name: str) -> str:
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        keys = [each for each in settings.model_fields if each != "name"]
        near = difflib.get_close_matches(key, keys, n=1)
        to_do = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(keys)}"
        return f"{name} has no key `{key}`; {to_do}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "literal_error":
        message = f"can't be {str(first['input'])[:60]!r}; use {first['ctx']['expected']}"
    return f"`{key}` {message[:1].lower()}{message[1:]}" if key else message


def format_of(name: str) -> Format:
    return next(each for task in _OBJECTIVES.values() for each in task.formats if each.name == name)


def standard_columns() -> set[str]:
    formats = (each for task in _OBJECTIVES.values() for each in task.formats)
    return {name for each in formats for name in (*each.needs, *each.may_have)}
