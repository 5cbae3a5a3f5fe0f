"""Keys of other tools in a job: other names of ours, which are understood, and keys that farthing
has no use for.

A name is only taken for another where both mean the same. Nothing is guessed by spelling here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

import yaml

from farthing.storage.files import Json

_FACTS = resources.files("farthing") / "facts"
ALIASES = {
    name: key
    for key, names in json.loads((_FACTS / "other_names.json").read_text("utf-8")).items()
    for name in names.split()
}
"""Another name -> the key of a job that means the same."""
_OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw_hf": "adamw_torch",
    "adamw_fused": "adamw_torch_fused",
}
_SWITCHES = {"use_lora": "lora", "use_peft": "lora", "use_qlora": "qlora"}


class ForeignKeyError(Exception):
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
    found: Json = yaml.safe_load((_FACTS / "importers.yaml").read_text("utf-8"))
    return found


def adopt(
    values: dict[Any, Any], known: dict[str, list[str]]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Move aliases to where they belong, in place; yields (where it stood, where it is now).

    `known` has the keys of each section, of the job itself as "". Raises `ForeignKeyError`
    where both names are given.
    """
    # a search's own seed or trials are named within its section alone, and `name` is of two
    sections = [section for section in known if section not in ("", "search")]
    homes = {key: f"{section}.{key}" for section in sections for key in known[section]}
    homes.pop("name", None)
    for section in known:
        place: Any = values.get(section) if section else values
        for name in list(place) if isinstance(place, dict) else ():
            if not isinstance(name, str) or name in known[section]:
                continue
            target, value = _meant(name, place[name])
            target = target or ("" if section else homes.get(name, ""))
            if target:
                del place[name]
                _put(values, target, value, name)
                yield ((section, name) if section else (name,)), tuple(target.split("."))


def _meant(name: str, value: Any) -> tuple[str, Any]:
    """(key of the job, value there) of another name; an empty key where it has none."""
    if name in _SWITCHES and isinstance(value, bool):
        return "method.name", _SWITCHES[name] if value else "full"
    if name == "load_in_4bit" and value is True:
        return "method.name", "qlora"
    if name == "optimizer" and isinstance(value, str):
        value = _OPTIMIZERS.get(value.lower(), value)
    if name in ("adapter", "finetuning_type") and value not in ("lora", "qlora", "full"):
        return "", value
    return ALIASES.get(name, ""), value


def _put(values: dict[Any, Any], target: str, value: Any, name: str) -> None:
    section, _, key = target.rpartition(".")
    place = values.setdefault(section, {}) if section else values
    if not isinstance(place, dict):
        raise ForeignKeyError(f"`{name}` means `{target}`, and `{section}` is no section here")
    given = place.setdefault(key, value)
    if target == "method.name" and (given, value) in (("lora", "qlora"), ("qlora", "lora")):
        place[key] = "qlora"
    elif given != value:
        raise ForeignKeyError(f"`{name}` means `{target}`, which is {given!r} already")
