"""An imported job as YAML with comments: what each key was, and below it every key that has no
counterpart, with the reason.
"""

from __future__ import annotations

import json
from typing import Any

from farthing.config.importers.record import Imported, Line, say
from farthing.printable import printable
from farthing.storage.files import Json

_SECTIONS = ("model", "data", "method", "train")
_WIDTH = 110


def job_text(imported: Imported, name: str) -> str:
    """The job file. `name` is that of the source's file, for the comments."""
    job = dict(imported.job)
    origin: dict[str, list[Line]] = {}
    for line in imported.mapped:
        origin.setdefault(line.became, []).append(line)
    output = job.pop("output_dir", None) or "runs/imported"
    rows = [
        (
            f"# From {printable(name)} ({imported.source}). Plan it: farthing plan FILE    Train"
            " it: farthing train FILE"
        ),
        "",
    ]
    rows += _key("task", job.pop("task"), origin, imported, "")
    data = _data(job)
    for section in _SECTIONS:
        keys = {
            key.partition(".")[2]: value
            for key, value in {**job, **data}.items()
            if key.startswith(f"{section}.")
        }
        if keys:
            rows += ["", f"{section}:"]
            for key, value in keys.items():
                rows += _key(f"{section}.{key}", value, origin, imported, "  ")
    rows += ["", *_key("output_dir", output, origin, imported, "")]
    for effect, title in (
        ("differs", "What trains differently here"),
        ("none", "What has no counterpart and changes no result"),
    ):
        lines = [line for line in imported.named if line.effect == effect]
        if lines:
            rows += ["", f"# {title}:"]
            by_reason: dict[str, list[str]] = {}
            for line in lines:
                by_reason.setdefault(line.why, []).append(f"{line.key}: {say(line.value)}")
            rows += [
                text
                for why, keys in by_reason.items()
                for text in _comment(f"{', '.join(keys)} - {why}")
            ]
    if imported.notes:
        rows += ["", "# Good to know:"]
        rows += [text for note in imported.notes for text in _comment(note)]
    return "\n".join(rows) + "\n"


def _data(job: Json) -> Json:
    """`data.train` in its shortest form: one data set stands with its keys in the section."""
    found: Json = {}
    for role in ("train", "eval"):
        sources = job.pop(f"data.{role}", None)
        if not sources:
            continue
        one = sources[0]
        if len(sources) == 1 and set(one) <= {"path", "columns", "name", "split"}:
            found[f"data.{role}"] = one["path"]
            if "split" in one:
                found[f"data.{role}_split"] = one["split"]
            if "name" in one:
                found["data.dataset_config_name"] = one["name"]
            if "columns" in one:
                found["data.columns"] = one["columns"]
        elif all(set(each) == {"path"} for each in sources):
            found[f"data.{role}"] = [each["path"] for each in sources]
        else:
            found[f"data.{role}"] = sources
    if "data.train" not in found:
        found["data.train"] = "train.jsonl"
    return found


def _key(
    key: str, value: Any, origin: dict[str, list[Line]], imported: Imported, indent: str
) -> list[str]:
    was = origin.get(key, [])
    words = ", ".join(
        f"{line.key}: {say(line.value)}" if say(line.value) != say(value) else line.key
        for line in was
        if line.key.rpartition(".")[2] != key.rpartition(".")[2] or say(line.value) != say(value)
    )
    words += "".join(f"; {line.why}" for line in was if line.why)
    if not was and key in imported.defaults:
        words = f"the default of {imported.defaults[key]}"
    text = f"{indent}{key.rpartition('.')[2]}: {yaml_of(value)}"
    comment = f"  # {printable(words)}" if words else ""
    if len(text) + len(comment) > 140 and comment:
        return [f"{indent}{line}" for line in _comment(words)] + [text]
    return [text + comment]


def yaml_of(value: Any) -> str:
    """A value in one line of YAML: plain where that is safe, else as JSON, which is YAML too."""
    if isinstance(value, str):
        is_plain = (
            value.replace("/", "").replace("-", "").replace("_", "").replace(".", "").isalnum()
            and value.isascii()
        )
        looks_like_other = (
            value.lower() in ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
            or value[:1] in "-.0123456789"
        )
        return value if is_plain and not looks_like_other else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        text = repr(value)
        if "e" in text and "." not in text:
            text = text.replace("e", ".0e")
        return (
            text.replace("e", "e+")
            if "e" in text and "e-" not in text and "e+" not in text
            else text
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(yaml_of(each) for each in value) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{yaml_of(str(key))}: {yaml_of(each)}" for key, each in value.items())
            + "}"
        )
    return json.dumps(value)


def _comment(text: str) -> list[str]:
    """A comment in lines of a readable length."""
    rows, row = [], "#"
    for word in printable(" ".join(text.split())).split(" "):
        if len(row) + len(word) > _WIDTH and row.strip("# "):
            rows.append(row)
            row = "#    "
        row += f" {word}"
    return [*rows, row]
