"""From the columns that a file has to the columns that formats read: renamed, joined by templates,
or known by usual names.

A value of `data.columns` is a column's name, a template with columns in braces
("{question}\\n{context}"), or a list of these of which the first counts whose columns are all
filled in a row. `{choices[answer]}` takes the item of a list that another column points at: a whole
number from 0, a letter from A, or the item's own text; `{translation.en}` takes a part of an
object. Braces are doubled to stand for themselves.
"""

from __future__ import annotations

import functools
import math
import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

from farthing.data.rows import RowValue
from farthing.errors import UnusableRowError

Template = str | tuple[str, ...]
Columns = Mapping[str, Template]
_PICK = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")

_USUAL_NAMES = {
    "messages": "conversation chat dialog dialogue turns message chat_messages",
    "prompt": "question query problem user human request source input_text",
    "completion": "response answer reply solution assistant bot target_text output_text",
    "input": "source article document dialogue source_text input_text question context",
    "target": "summary highlights target_text output_text answer response output translation",
    "output": "response answer completion",
    "text": "content document sentence review body narrative tweet comment utterance",
    "labels": "label categories topics tags classes genres emotions",
    "score": "rating stars similarity similarity_score grade",
    "tokens": "words",
    "tags": "ner_tags labels ner bio_tags iob_tags",
    "chosen": "chosen_response preferred chosen_answer accepted better",
    "rejected": "rejected_answer dispreferred worse",
    "label": "labels kto_tag is_desirable desirable category class sentiment intent topic product"
    " target emotion tag",
}
"""Common names for the columns of formats. farthing logs which of them it used."""
_TEXT_PAIRS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2")),
    *(("text1", "text2"), ("sentence_a", "sentence_b"), ("question", "sentence")),
)
"""The same of two texts that are read side by side: GLUE's, and their like."""
_ALSO_READ = {"input": "context", "system": "system_prompt system_message"}
"""The same of columns that a format reads where they are."""


def guessed(
    columns: set[str], needs: Iterable[str], may_have: Iterable[str]
) -> dict[str, str] | None:
    """Columns of the data that stand, by their usual names, for those that a format needs, and for
    those that it reads where they are; None where one that it needs is not found.

    A column that could be read as two, or two for one, is no guess. Capitals make no difference.
    """
    found: dict[str, str] = {}
    if "text_pair" in may_have:
        own = {name.lower(): name for name in columns}
        pairs = [pair for pair in _TEXT_PAIRS if own.keys() >= {*pair}]
        if len(pairs) == 1 and not columns & {"text", "text_pair"}:
            found = {"text": own[pairs[0][0]], "text_pair": own[pairs[0][1]]}
    for names, needed in ((needs, _USUAL_NAMES), (may_have, _ALSO_READ)):
        for standard in names:
            if standard in columns or standard in found:
                continue
            usual = {standard, *needed.get(standard, "").split()}
            near = [name for name in columns if name.lower() in usual]
            if len(near) == 1 and near[0] not in found.values():
                found[standard] = near[0]
            elif needed is _USUAL_NAMES:
                return None
    return found


def templates_of(template: Template) -> tuple[str, ...]:
    """The alternatives of a value of `data.columns`, in their order."""
    return (template,) if isinstance(template, str) else tuple(template)


@functools.lru_cache(maxsize=1024)
def parts_of(template: str) -> tuple[tuple[str, str], ...]:
    """(text, column after it) of a template; a plain name is one column without text. Raises
    `ValueError`.
    """
    if "{" not in template and "}" not in template:
        return (("", template),)
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"not a template ({error}); a brace that is meant as one is doubled"
        ) from error
    if any(name == "" or spec or conversion for _, name, spec, conversion in parsed):
        raise ValueError("only a column's name may stand in braces; write a literal brace twice")
    if not any(name for _, name, _, _ in parsed):
        raise ValueError("a template without a column in braces")
    return tuple((text, name or "") for text, name, _, _ in parsed)


def columns_of(template: Template) -> tuple[str, ...]:
    """The columns of the data that a value of `data.columns` reads, of all its alternatives."""
    found: dict[str, None] = {}
    for each in templates_of(template):
        for _, name in parts_of(each):
            match = _PICK.fullmatch(name)
            found |= dict.fromkeys(match.groups() if match else (name,) if name else ())
    return tuple(found)


def own_columns(template: Template, there: Iterable[str]) -> set[str]:
    """The same by the names that the data has: of `translation.en` the column `translation`, unless
    one is called so.
    """
    there = set(there)
    return {name if name in there else name.partition(".")[0] for name in columns_of(template)}


def missing(template: Template, columns: Iterable[str]) -> str:
    """A column that no row has and every alternative needs; empty where one alternative can be
    filled.
    """
    there = set(columns)
    lacking = [
        next((name for name in columns_of(each) if not own_columns(name, there) <= there), "")
        for each in templates_of(template)
    ]
    return "" if "" in lacking else lacking[0]


def renamed(row: RowValue, columns: Columns) -> RowValue:
    """A row as its format reads it. Raises `UnusableRowError` where no template can be filled."""
    read = {name for template in columns.values() for name in own_columns(template, row)}
    kept = {name: value for name, value in row.items() if name not in read}
    return kept | {standard: _value(template, row) for standard, template in columns.items()}


def _value(template: Template, row: Mapping[str, Any]) -> Any:
    alternatives, lacking = templates_of(template), ""
    for each in alternatives:
        if "{" not in each and (len(alternatives) == 1 or not _is_empty(_part(row, each))):
            return _part(row, each)  # as it is: the format says what is wrong with it
        parts = [(text, name, _part(row, name)) for text, name in parts_of(each)]
        empty = next((name for _, name, value in parts if name and _is_empty(value)), "")
        if not empty:
            return "".join(
                text + (_as_text(value, name) if name else "") for text, name, value in parts
            )
        lacking = lacking or empty.partition("[")[0]
    more = "; give a second template without it in a list for such rows"
    raise UnusableRowError(
        f"`{lacking}` is empty, which its template in data.columns needs"
        f"{more if len(alternatives) == 1 else ''}"
    )


def _part(row: Mapping[str, Any], name: str) -> Any:
    """A column, a part of an object in one, `translation.en`, or an item of a list in one,
    `choices[answer]`.
    """
    if name in row:
        return row[name]
    if match := _PICK.fullmatch(name):
        return _picked(row, *match.groups())
    column, _, inner = name.partition(".")
    value = row.get(column)
    return _part(value, inner) if inner and isinstance(value, Mapping) else None


def _is_empty(value: Any) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    return is_nan or value in (None, [], {}) or (isinstance(value, str) and not value.strip())


def _as_text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        value = value["text"]
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        letters = string.ascii_uppercase if len(value) <= 26 else ""
        return "\n".join(
            f"{letters[index]}. {item}" if letters else str(item)
            for index, item in enumerate(value)
        )
    raise UnusableRowError(f"`{name}` is neither text nor a number nor a list of these")


def _picked(row: Mapping[str, Any], name: str, pointer: str) -> Any:
    """The item of the list `name` that `pointer` points at. ARC's form, {text: [...], label:
    [...]}, goes by its labels.
    """
    choices, which = row.get(name), row.get(pointer)
    if isinstance(choices, dict):
        labels, choices = list(choices.get("label") or []), choices.get("text")
        which = labels.index(which) if which in labels else which
    if not isinstance(choices, list) or not choices:
        raise UnusableRowError(f"`{name}` is no list to choose from")
    if isinstance(which, list) and len(which) == 1:
        which = which[0]
    index: Any = which
    if isinstance(which, str):
        if which in choices:
            return which
        digits = which.strip().upper()
        is_letter = len(digits) == 1 and digits in string.ascii_uppercase
        index = int(digits) if digits.isdecimal() else ord(digits) - 65 if is_letter else None
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(choices):
        raise UnusableRowError(
            f"`{pointer}` is {which!r}, which is none of the {len(choices)} in `{name}`"
        )
    return choices[index]
