"""An imported job as YAML with comments: what each key was, and below it every key that has no
counterpart, with the reason.
"""

from __future__ import annotations

import json
import math
import textwrap
from typing import Any

import yaml

from farthing.config.importers.tables import Imported, KeyFate, say
from farthing.printable import printable
from farthing.storage.files import Json

_SECTIONS = ("objective", "model", "data", "method", "train")
_TITLES = {
    "differs": "What trains differently here",
    "none": "What has no counterpart and changes no result",
}
_WIDTH = 111


def job_text(imported: Imported, name: str) -> str:
    """The job file. `name` is that of the source's file, for the comments."""
    job = dict(imported.job)
    origin: dict[str, list[KeyFate]] = {}
    for line in imported.mapped:
        origin.setdefault(line.became, []).append(line)

    def written(key: str, value: Any, indent: str = "") -> list[str]:
        return _key(key, value, origin.get(key, []), imported.defaults.get(key, ""), indent)

    source = f"{printable(name)} ({imported.source})"
    rows = [f"# From {source}. Plan it: farthing plan FILE    Train it: farthing train FILE", ""]
    task, output = job.pop("task"), job.pop("output_dir", None) or "runs/imported"
    if "objective.name" not in job:
        rows += [*written("task", task), ""]
    else:
        origin["objective.name"] = [*origin.get("objective.name", []), *origin.get("task", [])]
    values = {**job, **_data(job)}
    for section in _SECTIONS:
        keys = [key for key in values if key.startswith(f"{section}.")]
        if keys:
            own = [row for key in keys for row in written(key, values[key], "  ")]
            rows += [f"{section}:", *own, ""]
    rows += written("output_dir", output)
    for effect, title in _TITLES.items():
        by_reason: dict[str, list[str]] = {}
        for line in imported.named:
            if line.effect == effect:
                by_reason.setdefault(line.why, []).append(f"{line.key}: {say(line.value)}")
        rows += ["", f"# {title}:"] if by_reason else []
        for why, said in by_reason.items():
            rows += _comment(f"{', '.join(said)} - {why}")
    rows += ["", "# Good to know:"] if imported.notes else []
    for note in imported.notes:
        rows += _comment(note)
    return "\n".join(rows) + "\n"


def _data(job: Json) -> Json:
    """`data.train` in its shortest form: one data set stands with its keys in the section."""
    found: Json = {"data.train": "train.jsonl"}
    roles = {role: job.pop(f"data.{role}", None) or [] for role in ("train", "eval")}
    shared = [[each.get(key) for key in ("columns", "name")] for s in roles.values() for each in s]
    for role, sources in roles.items():
        keys = {key for each in sources for key in each}
        is_plain = keys <= {"path", "columns", "name", "split"}
        if len(sources) == 1 and is_plain and shared == shared[:1] * len(shared):
            to = {"path": role, "name": "dataset_config_name", "split": f"{role}_split"}
            order = [key for key in ("path", "split", "name", "columns") if key in keys]
            found |= {f"data.{to.get(key, key)}": sources[0][key] for key in order}
        elif sources:
            found[f"data.{role}"] = [s["path"] for s in sources] if keys == {"path"} else sources
    return found


def _key(key: str, value: Any, was: list[KeyFate], default_of: str, indent: str) -> list[str]:
    own = key.rpartition(".")[2], say(value)
    words = ", ".join(
        line.key if say(line.value) == own[1] else f"{line.key}: {say(line.value)}"
        for line in was
        if (line.key.rpartition(".")[2], say(line.value)) != own
    )
    words += "".join(f"; {line.why}" for line in was if line.why)
    if not was and default_of:
        words = f"the default of {default_of}"
    text = f"{indent}{own[0]}: {yaml_of(value)}"
    comment = f"  # {printable(words)}" if words else ""
    if len(text) + len(comment) > _WIDTH + 29 and comment:
        return [f"{indent}{line}" for line in _comment(words)] + [text]
    return [text + comment]


def yaml_of(value: Any) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
    )
    text = text.removesuffix("\n").removesuffix("\n...")
    # in one line: JSON is YAML too
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        printable(" ".join(text.split())),
        _WIDTH,
        initial_indent="# ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )
