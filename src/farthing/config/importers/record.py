"""What became of each key of another tool's settings: mapped to a key of the job, or named with the
reason.

A table says for each key `To(job key, conversion)`; groups of patterns say why a key has no
counterpart and what that changes. What neither knows is named as unknown, so that no key is lost.
Refuses to read files and to know any tool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args

from farthing.config.job import KEYS, SECTIONS, TrainSection
from farthing.storage.files import Json

Effect = Literal["none", "differs", "blocks"]
"""Of a key that is named: the result is the same, the result differs, or the job can't be expressed
at all.
"""
UNKNOWN = (
    "not a key that this importer knows; look up what it does and set it by hand if it matters"
)


class Odd(Exception):
    """A value that has no counterpart. The message says why and what changes by that."""

    effect: Effect = "differs"

    def __init__(self, why: str, effect: Effect = "differs") -> None:
        super().__init__(why)
        self.effect = effect


class To(NamedTuple):
    """A key of the job that means the same, and how its value is written there."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""


def rows(section: str, convert: Callable[[Any], Any], keys: str) -> dict[str, To]:
    """Rows of a table: keys that a section of the job has by the same name, or `key=ours` by
    another one.
    """
    pairs = (word.partition("=") for word in keys.split())
    return {name: To(f"{section}.{own or name}", convert) for name, _, own in pairs}


class Why(NamedTuple):
    """Why the keys that match these patterns have no counterpart, and what that changes."""

    effect: Effect
    reason: str
    patterns: str


class Line(NamedTuple):
    """What became of one key of the source."""

    key: str
    value: Any
    became: str
    """The key of the job; empty for a key that is only named."""
    why: str
    effect: Effect


@dataclass
class Imported:
    """A job as it is being made. `job` is flat: `section.key` to value."""

    source: str
    job: Json = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    defaults: dict[str, str] = field(default_factory=dict)
    """Keys of the job that the source leaves to its tool's default: whose default it is."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that belong beside the job: name to text."""

    def put(self, key: str, value: Any, to: str, converted: Any, note: str = "") -> None:
        """Map a key of the source. A key of the job that an earlier one has set stays: the second
        is named.
        """
        if not exists(to):
            self.name(key, value, f"farthing has no `{to.rpartition('.')[2]}` yet", "differs")
        elif to in self.job and self.job[to] != converted:
            self.name(
                key, value, f"`{to}` is {say(self.job[to])} by another key already", "differs"
            )
        else:
            self.job[to] = converted
            self.lines[key] = Line(key, value, to, note, "none")

    def name(self, key: str, value: Any, why: str, effect: Effect = "none") -> None:
        """Say why a key has no counterpart. What was mapped stays mapped."""
        if key not in self.lines:
            self.lines[key] = Line(key, value, "", why, effect)

    def keep(self, key: str, value: Any, to: str) -> None:
        """A key that became part of a key of the job, such as the split of one of several data
        sets.
        """
        self.lines[key] = Line(key, value, to, "", "none")

    def default(self, key: str, value: Any, of: str = "") -> None:
        """What the source's tool does where the source says nothing."""
        if key not in self.job and exists(key) and value is not None:
            self.job[key] = value
            self.defaults[key] = of or self.source

    def default_all(self, section: str, /, **values: Any) -> None:
        """The same of several keys of a section."""
        for name, value in values.items():
            self.default(f"{section}.{name}", value)

    @property
    def mapped(self) -> list[Line]:
        """Keys with a counterpart."""
        return [line for line in self.lines.values() if line.became]

    @property
    def named(self) -> list[Line]:
        """Keys without one."""
        return [line for line in self.lines.values() if not line.became]

    @property
    def blockers(self) -> list[Line]:
        """Keys that ask for a training which farthing can't do."""
        return [line for line in self.lines.values() if line.effect == "blocks"]


def exists(key: str) -> bool:
    """Whether a job has this key."""
    section, _, name = key.rpartition(".")
    return name in KEYS.get(section, ()) and key not in SECTIONS


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; items of a list of mappings are `key[0].inner`. An empty
    mapping is a leaf.
    """
    for name, value in values.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{key}.")
        elif (
            isinstance(value, list)
            and value
            and all(isinstance(item, Mapping) and item for item in value)
        ):
            for index, item in enumerate(value):
                yield from flat(item, f"{key}[{index}].")
        else:
            yield key, value


def read_keys(
    out: Imported,
    values: Iterable[tuple[str, Any]],
    table: Mapping[str, To],
    groups: Iterable[Why],
    *,
    name_of: Callable[[str], str] = lambda key: key,
) -> None:
    """Map or name every key that nobody has dealt with. `name_of` is the key as the tables have it."""  # noqa: E501
    groups = tuple(groups)
    for key, value in values:
        if key in out.lines:
            continue
        name = name_of(key)
        if value is None or value == "":
            out.name(key, value, "empty there: its default holds")
        elif name in table:
            by_rule(out, key, value, table[name])
        else:
            why = next(
                (g for g in groups if any(fnmatchcase(name, p) for p in g.patterns.split())), None
            )
            if why and (value is False or value == 0):
                out.name(key, value, "off there, and farthing has none of it: " + why.reason)
            else:
                out.name(key, value, *((why.reason, why.effect) if why else (UNKNOWN, "differs")))


def by_rule(out: Imported, key: str, value: Any, rule: To) -> None:
    """Map a key as a row of a table says, or name it where its value has no counterpart."""
    try:
        out.put(key, value, rule.key, rule.convert(value), rule.note)
    except Odd as odd:
        out.name(key, value, str(odd), odd.effect)


def say(value: Any) -> str:
    """A value in a few characters, as YAML would show it."""
    text = (
        {True: "true", False: "false", None: "empty"}[value]
        if isinstance(value, bool | None)
        else str(value)
    )
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


# ---- conversions that several tables use ----


def number(value: Any) -> float | int:
    """A number, also where YAML took `2e-5` for text. Raises `Odd`."""
    if isinstance(value, bool):
        raise Odd("true/false where a number is wanted")
    if isinstance(value, int):
        return value
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise Odd(f"not a number that can be read here ({say(value)}): set it by hand") from None
    if not math.isfinite(found):
        raise Odd("not a finite number")
    return (
        int(found)
        if found.is_integer() and "." not in str(value) and "e" not in str(value).lower()
        else found
    )


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
    """Text that is known. Raises `Odd`."""
    if not isinstance(value, str) or not value.strip():
        raise Odd(f"no text that can be read here ({say(value)})")
    return value


def share(value: Any) -> float:
    """The share of rows that is held out. Raises `Odd` for a number of rows."""
    found = float(number(value))
    if found == 0:
        raise Odd("0: nothing is held out", "none")
    if found >= 1:
        raise Odd(
            f"holds out {found:g} rows; farthing holds out a share: set data.eval_fraction", "none"
        )
    return found


def names(value: Any) -> list[str]:
    """A list of names, also of one that is written with commas. Raises `Odd`."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if (
        not isinstance(value, list | tuple)
        or not value
        or not all(isinstance(item, str) for item in value)
    ):
        raise Odd(f"no list of names that can be read here ({say(value)})")
    return list(value)


def _choices(key: str) -> tuple[str, ...]:
    return tuple(str(each) for each in get_args(TrainSection.model_fields[key].annotation))


_SAME_OPTIMIZER = {
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adamw_apex_fused": "adamw_torch_fused",
    "adamw_torch_npu_fused": "adamw_torch_fused",
    "adamw_torch_xla": "adamw_torch",
    "adamw_anyprecision": "adamw_torch",
    "paged_adamw": "paged_adamw_32bit",
    "adamw_bnb": "adamw_bnb_8bit",
    "adamw_torch_8bit": "adamw_8bit",
}


def optimizer(value: Any) -> str:
    """An optimizer that farthing has. Raises `Odd` for others, which train differently."""
    name = text(value).rpartition("OptimizerNames.")[2].lower()
    name = _SAME_OPTIMIZER.get(name, name)
    if name not in _choices("optim"):
        raise Odd(
            f"farthing has no {name}: adamw_torch_fused is used instead, and the losses will differ"
        )
    return name


def scheduler(value: Any) -> str:
    """A schedule that farthing has. Raises `Odd`."""
    name = text(value).rpartition("SchedulerType.")[2].lower()
    if name in ("cosine_with_min_lr", "warmup_stable_decay"):
        raise Odd(
            f"{name} needs train.lr_scheduler_kwargs, which is not imported: the default is used"
            " instead, and the losses will differ"
        )
    if name not in _choices("lr_scheduler_type"):
        raise Odd(
            f"farthing has no schedule {name}: the default is used instead, and the losses will"
            " differ"
        )
    return name
