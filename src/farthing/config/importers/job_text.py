"""An imported job as YAML with comments: what each key was, and below it every key that has no
counterpart, with the reason.
"""

from __future__ import annotations

import json
import math
from typing import Any

import yaml

from farthing.config.importers.tables import Imported, Line, say
from farthing.printable import printable
from farthing.storage.files import Json

_SECTIONS = ("objective", "model", "data", "method", "train")
_WIDTH = 110


def job_text(imported: Imported, name: str) -> str:
    """The job file. `name` is that of the source's file, for the comments."""
    job = dict(imported.job)
    origin: dict[str, list[Line]] = {}
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
        rows += [f"{section}:"] if keys else []
        for key in keys:
            rows += written(key, values[key], "  ")
        rows += [""] if keys else []
    rows += written("output_dir", output)
    for effect, title in (
        ("differs", "What trains differently here"),
        ("none", "What has no counterpart and changes no result"),
    ):
        by_reason: dict[str, list[str]] = {}
        for line in imported.named:
            if line.effect == effect:
                by_reason.setdefault(line.why, []).append(f"{line.key}: {say(line.value)}")
        rows += ["", f"# {title}:"] if by_reason else []
        for why, keys in by_reason.items():
            rows += _comment(f"{', '.join(keys)} - {why}")
    rows += ["", "# Good to know:"] if imported.notes else []
    for note in imported.notes:
        rows += _comment(note)
    return "\n".join(rows) + "\n"


def _data(job: Json) -> Json:
    """`data.train` in its shortest form: one data set stands with its keys in the section."""
    found: Json = {}
    for role in ("train", "eval"):
        sources = job.pop(f"data.{role}", None)
        if not sources:
            continue
        one, keys = sources[0], {key for each in sources for key in each}
        if len(sources) == 1 and keys <= {"path", "columns", "name", "split"}:
            found[f"data.{role}"] = one["path"]
            own = ("split", f"data.{role}_split"), ("name", "data.dataset_config_name")
            for name, key in (*own, ("columns", "data.columns")):
                if name in one:
                    found[key] = one[name]
        elif keys == {"path"}:
            found[f"data.{role}"] = [each["path"] for each in sources]
        else:
            found[f"data.{role}"] = sources
    return {"data.train": "train.jsonl", **found}


def _key(key: str, value: Any, was: list[Line], default_of: str, indent: str) -> list[str]:
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
    if comment and len(text) + len(comment) > 140:
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
    rows, row = [], "#"
    for word in printable(" ".join(text.split())).split(" "):
        if len(row) + len(word) > _WIDTH and row.strip("# "):
            rows.append(row)
            row = "#    "
        row += f" {word}"
    return [*rows, row]
