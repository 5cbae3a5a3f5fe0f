"""What became of each key of another tool's settings: mapped to a key of the job, or named with the
reason. No key is lost; what no table knows is named as unknown. Knows no tool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from farthing.config.job import KEYS, SECTIONS
from farthing.objectives.registry import find_objective
from farthing.storage.files import Json

Effect = Literal["none", "differs", "blocks"]
"""Of a key that is named: the result is the same, the result differs, or no job can be made."""
UNKNOWN = "farthing does not know this key; look it up, and set it by hand if it matters"
ONLY_RUNNING = "only running the script would tell this value: set it by hand"


class Computed(str):
    """The source text of a value that only running the script would tell."""


class Odd(Exception):
    """A value without a counterpart. The message says why and what that changes."""

    def __init__(self, why: str, effect: Effect = "differs") -> None:
        super().__init__(why)
        self.effect: Effect = effect


class To(NamedTuple):
    """A key of the job that means the same, and how its value is written there."""

    key: str
    convert: Callable[[Any], Any]
    note: str = ""


class Why(NamedTuple):
    """Why the keys that match these patterns have no counterpart, and what that changes."""

    effect: Effect
    reason: str
    patterns: tuple[str, ...]


class Table(NamedTuple):
    """A tool's keys, and what it does where nothing is written."""

    keys: Mapping[str, To]
    reasons: tuple[Why, ...]
    defaults: Json

    def why(self, name: str) -> Why | None:
        """Why a key has no counterpart; None for an unknown key."""
        fits = (w for w in self.reasons if any(fnmatchcase(name, p) for p in w.patterns))
        return next(fits, None)

    def why_value(self, name: str, value: Any) -> Why | None:
        """The same of a value alone, by patterns such as `key=value`."""
        form = f"{name}={say(value)}"
        known = ((w, [p for p in w.patterns if "=" in p]) for w in self.reasons)
        return next((w for w, ps in known if any(fnmatchcase(form, p) for p in ps)), None)


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
    """A job in the making. `job` is flat: `section.key` to value."""

    source: str
    job: Json = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    defaults: dict[str, str] = field(default_factory=dict)
    """Keys of the job that the source leaves to its tool's default: whose default it is."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that belong beside the job: name to text."""

    def put(self, key: str, value: Any, to: str, converted: Any, note: str = "") -> None:
        """Map a key of the source. A key of the job that is set already stays."""
        if not self.has(to):
            why = f"farthing has no `{to.rpartition('.')[2]}`"
            self.name(key, value, f"{why} for {self.job.get('task')}", "differs")
        elif to in self.job and self.job[to] != converted:
            self.name(key, value, f"another key set `{to}` to {say(self.job[to])}", "differs")
        else:
            self.job[to] = converted
            self.lines[key] = Line(key, value, to, note, "none")

    def name(self, key: str, value: Any, why: str, effect: Effect = "none") -> None:
        """Say why a key has no counterpart. A mapped key stays mapped."""
        if key not in self.lines:
            self.lines[key] = Line(key, value, "", why, effect)

    def keep(self, values: Iterable[tuple[str, Any]], to: str) -> None:
        """Keys that became part of a key of the job, such as the split of a data set."""
        for key, value in values:
            self.lines[key] = Line(key, value, to, "", "none")

    def drop(self, to: str, why: str, effect: Effect = "none") -> None:
        """Take a key out of the job, and name the keys of the source that set it."""
        if self.job.pop(to, None) is not None:
            self.defaults.pop(to, None)
            for line in [line for line in self.lines.values() if line.became == to]:
                self.lines[line.key] = Line(line.key, line.value, "", why, effect)

    def default(self, values: Mapping[str, Any], of: str = "") -> None:
        """What the source's tool does where the source says nothing."""
        for key, value in values.items():
            if key not in self.job and self.has(key) and value is not None:
                self.job[key] = value
                self.defaults[key] = of or self.source

    def has(self, key: str) -> bool:
        """Whether such a job has this key."""
        section, _, name = key.rpartition(".")
        if section != "objective":
            return exists(key)
        found = find_objective(str(self.job.get("task")))
        return (
            found is not None
            and found.settings is not None
            and (name in found.settings.model_fields)
        )

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
    """Whether any job has this key."""
    section, _, name = key.rpartition(".")
    return name in KEYS.get(section, ()) and key not in SECTIONS


def flat(
    values: Mapping[str, Any], before: str = "", whole: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; items of a list of mappings are `key[0].inner`. An empty
    mapping is a leaf, and so is a mapping whose key is in `whole`.
    """
    for name, value in values.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping) and value and name not in whole:
            yield from flat(value, f"{key}.", whole)
        elif isinstance(value, list) and value and all(isinstance(v, Mapping) and v for v in value):
            for index, item in enumerate(value):
                yield from flat(item, f"{key}[{index}].", whole)
        else:
            yield key, value


def read_keys(
    out: Imported,
    values: Iterable[tuple[str, Any]],
    table: Table,
    *,
    name_of: Callable[[str], str] = lambda key: key,
) -> None:
    """Map or name every key without a line. `name_of` is the key as the table has it."""
    for key, value in values:
        if key in out.lines:
            continue
        name = name_of(key)
        rule, why, exact = table.keys.get(name), table.why(name), table.why_value(name, value)
        if value is None or value == "":
            out.name(key, value, "empty there: its default holds")
        elif exact:
            out.name(key, value, exact.reason, exact.effect)
        elif rule and not _is_open(value):
            by_rule(out, key, value, rule)
        elif rule and rule.key == "output_dir":
            out.name(key, value, "a computed value: output_dir in the job is a new folder")
        elif rule and name in ("bf16", "fp16") and ("support" in value or "avail" in value):
            out.name(key, value, "farthing takes bf16 where the GPU has it natively")
        elif rule or (_is_open(value) and why is None):
            out.name(key, value, ONLY_RUNNING, "differs")
        elif why and why.effect != "none" and not value:
            out.name(key, value, "off there, and farthing has none of it: " + why.reason)
        else:
            out.name(key, value, *((why.reason, why.effect) if why else (UNKNOWN, "differs")))


def _is_open(value: Any) -> bool:
    """Whether a value is unknown; `torch.bfloat16`, `IntervalStrategy.EPOCH` stand for
    themselves.
    """
    own = ("torch.", "IntervalStrategy", "SchedulerType", "OptimizerNames")
    return isinstance(value, Computed) and not value.startswith(own)


def by_rule(out: Imported, key: str, value: Any, rule: To) -> None:
    """Map a key as a row of a table says, or name it where its value has no counterpart."""
    try:
        out.put(key, value, rule.key, rule.convert(value), rule.note)
    except Odd as odd:
        out.name(key, value, str(odd), odd.effect)


def say(value: Any) -> str:
    """A value in a few characters, as YAML would show it."""
    words = {True: "true", False: "false", None: "empty"}
    text = words[value] if isinstance(value, bool | None) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
