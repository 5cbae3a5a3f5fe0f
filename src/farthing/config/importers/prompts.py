"""Columns and format strings of other tools as `data.columns`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from farthing.objectives.registry import objective_of
from farthing.storage.files import Json

_HEADERS = {
    "chatml": ("<|im_start|>{}\n", "<|im_end|>", "\n"),
    "llama3": ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", ""),
}
_ASKED = {"icr": "input", "intel": "question", "prompt_pairs": "prompt", "argilla": "instruction"}


def pair_style(name: str, task: str) -> Json | None:
    """Axolotl's formats of preferences such as `chatml.intel`, for `task`; None for others."""
    frame, _, style = name.partition(".")
    asked = "prompt" if (style, task) == ("ultra", "kto") else _ASKED.get(style)
    is_pair = objective_of(task).n_sequences > 1
    if frame not in _HEADERS or asked is None or (style == "argilla" and is_pair):
        return None
    header, end, gap = _HEADERS[frame]
    user = f"{header.format('user')}{{{asked}}}{end}{gap}{header.format('assistant')}"
    answers = ("chosen", "rejected") if is_pair else ("completion",)
    return {
        "prompt": [f"{header.format('system')}{{system}}{end}{gap}{user}", user],
        **{answer: f"{{{answer}}}{end}" for answer in answers},
    }


def chat_columns(field: Any, role: Any, content: Any) -> dict[str, str]:
    """`data.columns` of chats in a column of this name, whose turns have these keys."""
    in_sharegpt = role == "from" or content == "value"
    standard = "conversations" if in_sharegpt else "messages"
    field = str(field or standard)
    return {} if field == standard else {standard: field}


def _own(template: str, fields: Mapping[str, str]) -> str:
    """A format string with a data set's own columns."""
    return re.sub(r"\{(\w+)\}", lambda found: "{" + fields.get(found[1], found[1]) + "}", template)


def columns_of_fields(given: Mapping[str, Any]) -> Json:
    """Axolotl's own formats: fields with a format string each way."""
    known = ("system", "instruction", "input", "output")
    fields = {name: str(given.get(f"field_{name}") or name) for name in known}
    system = str(given.get("system_prompt") or "")
    start = str(given.get("system_format") or "{system}").replace("{system}", system)
    start = start if system else ""
    ways = (given.get("format") or "{instruction} {input} ", given.get("no_input_format"))
    forms = dict.fromkeys((str(ways[0]), str(ways[1] or "{instruction} ")))
    found = [start + _own(each, fields) for each in forms]
    return {
        "prompt": found if len(found) > 1 else found[0],
        "completion": "{" + fields["output"] + "}",
    }


def pair_columns(given: Mapping[str, Any], task: str) -> Json:
    """The same of preferences: a format string for each part."""
    is_pair = objective_of(task).n_sequences > 1
    parts = ("prompt", *(("chosen", "rejected") if is_pair else ("completion",)))
    fields = {name: str(given.get(f"field_{name}") or name) for name in (*parts, "system", "label")}
    found: Json = {
        part: _own(str(given.get(f"{part}_format") or f"{{{part}}}"), fields) for part in parts
    }
    return found | ({"label": fields["label"]} if fields["label"] != "label" else {})
