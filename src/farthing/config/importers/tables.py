"""Settings of other tools as keys of the job: each is mapped, or named with the reason.

`facts/importers.yaml` has the tools as data. A row `train whole: max_steps batch=learning_rate`
maps keys to a section of the job; `train.optim optimizer: optim optimizer` maps all to one key.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from farthing.config.foreign_keys import facts_of_tools
from farthing.config.job import SECTIONS, Job
from farthing.config.values import Tracker, flat
from farthing.objectives.registry import find_objective
from farthing.storage.files import Json

Effect = Literal["none", "differs", "blocks"]
"""The effect of an unsupported key: the same result, another result, or no job."""
UNKNOWN = "farthing does not know this key; look it up, and set it by hand if it matters"
ONLY_RUNNING = "only running the script would tell this value: set it by hand"
_UNLESS = {"train.warmup_ratio": "train.warmup_steps", "train.eval_strategy": "train.eval_steps"}
"""Keys that have no default where another one is set."""


class Computed(str):
    """The source text of a value that only running the script would tell."""

    @property
    def is_constant(self) -> bool:
        """Whether the text stands for itself: `torch.bfloat16`, `IntervalStrategy.EPOCH`."""
        enums = r"(torch|IntervalStrategy|SchedulerType|OptimizerNames)\.\w+"
        return re.fullmatch(enums, self) is not None


def is_open(value: Any) -> bool:
    """Whether a value is unknown."""
    return isinstance(value, Computed) and not value.is_constant


class UnmatchedError(Exception):
    """A value without a counterpart. The message says why and what that changes."""

    def __init__(self, why: str, effect: Effect = "differs") -> None:
        super().__init__(why)
        self.effect: Effect = effect


class At(NamedTuple):
    """What a reader gives for a value that belongs to another key than its row says."""

    key: str
    value: Any


class Rule(NamedTuple):
    """A key of the job that means the same, and how its value is written there."""

    key: str
    reader: str  # a function below, one of `words`, or empty: the value is what the key takes
    note: str


class Why(NamedTuple):
    """Why the keys that match these patterns have no counterpart, and what that changes."""

    effect: Effect
    reason: str
    patterns: tuple[str, ...]


class ToolTable(NamedTuple):
    """A tool's keys, and what it does where nothing is written."""

    keys: Mapping[str, Rule]
    reasons: tuple[Why, ...]
    defaults: Json

    def why(self, form: str) -> Why | None:
        """Why a key, or `key=value`, has no counterpart."""
        for each in self.reasons:
            if _any_of(each.patterns, "=" in form).match(form):
                return each
        return None


class KeyFate(NamedTuple):
    """What became of one key of the source."""

    key: str
    value: Any
    became: str  # the key of the job; empty for a key that is only named
    why: str
    effect: Effect


@dataclass
class Imported:
    """A job in the making. `job` is flat: `section.key` to value."""

    source: str
    path: Path  # the file that is read
    program: str = ""  # the script or verb of a command line: `run_glue.py`, `sft`
    job: Json = field(default_factory=dict)
    lines: dict[str, KeyFate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    defaults: dict[str, str] = field(default_factory=dict)
    """Keys of the job that the source leaves to its tool's default: whose default it is."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that belong beside the job: name to text."""
    labels: dict[str, str] = field(default_factory=dict)
    """Of a script, keys with the call they stand in: `beta` is `DPOConfig.beta`."""

    def _note(self, key: str, value: Any, to: str, why: str, effect: Effect) -> None:
        key = self.labels.get(key, key)
        self.lines[key] = KeyFate(key, value, to, why, effect)

    def put(self, key: str, value: Any, to: str, converted: Any, note: str = "") -> None:
        """Map a key of the source. A key of the job that is set already stays."""
        if not self.has(to):
            why = f"farthing has no `{to.rpartition('.')[2]}`"
            self.name(key, value, f"{why} for {self.job.get('task')}", "differs")
        elif to in self.job and self.job[to] != converted:
            self.name(key, value, f"another key set `{to}` to {say(self.job[to])}", "differs")
        else:
            self.job[to] = converted
            self._note(key, value, to, note, "none")

    def template(self, key: str, value: Any, text: str, name: str = "chat_template.jinja") -> None:
        """Map a key to a chat template, which becomes a file."""
        self.files[name] = text
        self.put(key, value, "data.chat_template", name)

    def name(
        self, key: str, value: Any, why: str, effect: Effect = "none", *, is_last: bool = False
    ) -> None:
        """Say why a key has no counterpart. A key that has a line keeps it, unless `is_last`."""
        if is_last or self.labels.get(key, key) not in self.lines:
            self._note(key, value, "", why, effect)

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Make no job because of a key, whatever became of it."""
        self._note(key, value, "", why, "blocks")

    def keep(self, values: Json, to: str, before: str = "") -> None:
        """Keys that became part of a key of the job, such as the split of a data set."""
        for key, value in flat(values, before):
            self._note(key, value, to, "", "none")

    def drop(self, to: str, why: str, effect: Effect = "none") -> None:
        """Take a key out of the job, and name the keys of the source that set it."""
        if self.job.pop(to, None) is not None:
            self.defaults.pop(to, None)
            for line in [line for line in self.mapped if line.became == to]:
                self._note(line.key, line.value, "", why, effect)

    def default(self, values: Json, of: str = "") -> None:
        """What the source's tool does where the source says nothing."""
        for key, value in values.items():
            is_open = key not in self.job and _UNLESS.get(key) not in self.job
            if is_open and self.has(key) and value is not None:
                self.job[key] = value
                self.defaults[key] = of or self.source

    def _type(self, key: str) -> TypeAdapter[Any] | None:
        section, _, name = key.rpartition(".")
        objective = find_objective(str(self.job.get("task")))
        of_objective = {"objective": objective.settings if objective else None}
        model = {"": Job, **SECTIONS, **of_objective}.get(section)
        return _type_of(model, name) if model and name in model.model_fields else None

    def has(self, key: str) -> bool:
        """Whether a job of this task has the key."""
        return self._type(key) is not None

    def fit(self, key: str, value: Any) -> Any:
        """A value as the key of the job takes it. Raises `UnmatchedError`."""
        known = self._type(key)
        if known is None:
            return value  # `put` names it
        try:
            fitted = known.validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            if value is False or first["type"] == "greater_than" or first.get("ctx", {}).get("ge"):
                raise UnmatchedError(
                    f"{say(value)} disables it there; the default of farthing applies", "none"
                ) from None
            why = first["msg"].removeprefix("Value error, ").partition(";")[0]
            raise UnmatchedError(f"farthing's `{key}` can't be {say(value)}: {why}") from None
        if type(value) is int and type(fitted) is float:
            return value
        return list(fitted) if isinstance(fitted, tuple) else fitted

    @property
    def prefers(self) -> bool:
        """Whether the job has an objective of preferences or rewards."""
        return "objective.name" in self.job

    @property
    def mapped(self) -> list[KeyFate]:
        return [line for line in self.lines.values() if line.became]

    @property
    def named(self) -> list[KeyFate]:
        return [line for line in self.lines.values() if not line.became]

    @property
    def blockers(self) -> list[KeyFate]:
        """Keys that ask for a training which farthing can't do."""
        return [line for line in self.lines.values() if line.effect == "blocks"]


@functools.cache
def _type_of(section: type[BaseModel], name: str) -> TypeAdapter[Any]:
    info = section.model_fields[name]
    annotated: Any = Annotated[(info.annotation, Field(), *info.metadata)]
    return TypeAdapter(annotated, config=ConfigDict(allow_inf_nan=False))


def read_keys(
    out: Imported,
    values: Json,
    tool: str,
    *,
    before: str = "",
    name_of: Callable[[str], str] = lambda key: key,
) -> None:
    """Map or name every key without a line, each called `before` and its own name. `name_of` is its
    name in the tool's table.
    """
    known = table(
        f"{tool}-preference" if out.prefers and f"{tool}-preference" in facts_of_tools() else tool
    )
    for key, value in flat(values, before):
        if key in out.lines:
            continue
        name = name_of(key.removeprefix(before))
        rule, why = known.keys.get(name), known.why(name)
        if exact := known.why(f"{name}={say(value)}"):
            out.name(key, value, exact.reason, exact.effect)
        elif value is None or value == "":
            out.name(key, value, "empty there; the default of farthing applies")
        elif rule and not is_open(value):
            by_rule(out, key, value, rule)
        elif rule or (is_open(value) and why is None):
            out.name(key, value, ONLY_RUNNING, "none" if name == "output_dir" else "differs")
        elif why and why.effect != "none" and not value:
            out.name(key, value, "disabled there, and farthing lacks it: " + why.reason)
        else:
            out.name(key, value, *((why.reason, why.effect) if why else (UNKNOWN, "differs")))


def by_rule(out: Imported, key: str, value: Any, rule: Rule) -> None:
    """Map a key as a row of a table says, or name it where its value has no counterpart."""
    words = fact("words").get(rule.reader)
    try:
        if rule.reader in _READERS:
            found = _READERS[rule.reader](value)
        elif words:
            found = _by_words(out, rule.key, value, words)
        else:
            found = out.fit(rule.key, str(value) if isinstance(value, Computed) else value)
    except UnmatchedError as odd:
        return out.name(key, value, str(odd), odd.effect)
    to, found = found if isinstance(found, At) else (rule.key, found)
    return out.put(key, value, to, found, rule.note)


def _by_words(out: Imported, key: str, value: Any, words: Json) -> Any:
    """A tool's word for what the key takes, or the key's own."""
    before, _, last = str(value).lower().rpartition(".")
    word = last if before.isidentifier() else str(value).lower()
    found = words["known"].get(word)
    if isinstance(found, dict):
        return At(**found)
    with contextlib.suppress(UnmatchedError):
        if found is not None or "own" in words:
            return out.fit(key, word if found is None else found)
    raise UnmatchedError(f"{say(value)}: {words['why']}", words.get("effect", "differs"))


def say(value: Any) -> str:
    """A value in a few characters, as YAML would show it."""
    words = {True: "true", False: "false", None: "empty"}
    text = words[value] if isinstance(value, bool | None) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


# ---- values that are not what the key of the job takes; each raises `UnmatchedError` ----


def number(value: Any) -> float:
    """A number above 0, also where YAML took `2e-5` for text."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        why = f"no number that can be read here ({say(value)}): set it by hand"
        raise UnmatchedError(why) from None
    if not 0 < found < math.inf:
        why = f"{say(value)} disables it there; the default of farthing applies"
        raise UnmatchedError(why, "none")
    return found


def warmup(value: Any) -> int | At:
    """Steps; a number below 1 is a share, as transformers 5 has it."""
    if value in (0, "0"):
        return 0
    found = number(value)
    return int(found) if found >= 1 else At("train.warmup_ratio", found)


def is_true(value: Any) -> bool:
    """Whether a switch is on, in a file or on a command line."""
    return str(value).lower() in ("true", "yes", "on", "1")


def names(value: Any) -> list[str]:
    """A list of names, also of one that is written with commas or blanks."""
    found = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(x, str) for x in found):
        raise UnmatchedError(f"no list of names that can be read here ({say(value)})")
    return [str(item) for item in found]


def targets(value: Any) -> list[str]:
    """Layers that get an adapter: names and no pattern."""
    if set("()|\\*[]") & set("".join(map(str, value if isinstance(value, list) else [value]))):
        why = "a pattern of layer names; farthing takes names: set method.target_modules"
        raise UnmatchedError(why)
    found = names(value)
    return ["all-linear"] if found == ["all"] else found


def reports(value: Any) -> list[str]:
    """The trackers that farthing has."""
    known = [name for name in names(value) if name in get_args(Tracker)]
    if not known:
        why = "farthing logs to its run folder; trackers are train.report_to"
        raise UnmatchedError(why, "none")
    return known


def mapping(value: Any) -> Json:
    """Settings within a key, also as JSON on a command line."""
    with contextlib.suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise UnmatchedError("no settings that can be read here: set them by hand")
    if any(isinstance(each, Computed) for each in value.values()):
        raise UnmatchedError(ONLY_RUNNING)
    return dict(value)


def files(value: Any) -> list[Json]:
    """Data by the name of a file or a data set."""
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) and each.strip() for each in found):
        raise UnmatchedError(f"no name of data ({say(value)})")
    return [{"path": str(each)} for each in found]


def uploaded(value: Any) -> list[Json]:
    """A file of a service by its name there, as a file beside the job."""
    name = files(value)[0]["path"].rpartition("/")[2]
    return [{"path": name if "." in name else f"{name}.jsonl"}]


_READERS: dict[str, Callable[[Any], Any]] = {
    **{each.__name__: each for each in (warmup, names, targets, reports, mapping, files)},
    "service-file": uploaded,
    "multiplier": lambda value: number(value) * 2e-4,  # of farthing's rate for adapters
}


@functools.cache
def _any_of(patterns: tuple[str, ...], has_value: bool) -> re.Pattern[str]:
    wanted = (translate(each) for each in patterns if ("=" in each) == has_value)
    return re.compile("|".join(wanted) or "(?!)")


@functools.cache
def table(name: str) -> ToolTable:
    """A block of the tables with those that it takes."""
    block = facts_of_tools()[name]
    keys: dict[str, Rule] = {}
    for row, words in block.get("keys", {}).items():
        target, _, how = row.partition(" ")
        is_one = "." in target or target in ("task", "output_dir")
        for word in words.split():
            theirs, _, ours = word.partition("=")
            to = target if is_one else f"{target}.{ours or theirs}"
            keys[theirs] = Rule(to, how, block.get("notes", {}).get(theirs, ""))
    reasons = [
        Why(r["effect"], r["why"], tuple(r["keys"].split())) for r in block.get("reasons", ())
    ]
    for taken in map(table, block.get("takes", "").split()):
        keys = {**taken.keys, **keys}
        reasons += taken.reasons
    return ToolTable(keys, tuple(reasons), block.get("defaults", {}))


def fact(name: str) -> Any:
    """Another block: prompts, layers, columns."""
    return facts_of_tools()[name]


def defaults(out: Imported, *of: str) -> None:
    """Defaults of tools, the first one first."""
    for name in of:
        out.default(table(name).defaults)
