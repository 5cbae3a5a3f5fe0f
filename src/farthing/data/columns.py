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
import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

from farthing.data.rows import RowValue
from farthing.objectives.columns import Unusable

Template = str | tuple[str, ...]
Columns = Mapping[str, Template]
_PICK = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")

SYNONYMS: dict[str, tuple[str, ...]] = {
    "messages": ("conversation", "chat", "dialog", "dialogue", "turns", "message"),
    "conversations": (),
    "instruction": (),
    "prompt": ("question", "query", "problem", "user", "human", "request", "source", "input_text"),
    "completion": (
        "response",
        "answer",
        "reply",
        "solution",
        "assistant",
        "bot",
        "target_text",
        "output_text",
    ),
    "input": (
        "source",
        "article",
        "document",
        "dialogue",
        "source_text",
        "input_text",
        "question",
        "context",
    ),
    "target": (
        "summary",
        "highlights",
        "target_text",
        "output_text",
        "answer",
        "response",
        "output",
        "translation",
    ),
    "output": ("response", "answer", "completion"),
    "text": (
        "content",
        "document",
        "sentence",
        "review",
        "body",
        "narrative",
        "tweet",
        "comment",
        "utterance",
    ),
    "labels": ("label", "categories", "topics", "tags", "classes", "genres", "emotions"),
    "score": ("rating", "stars", "similarity", "similarity_score", "grade"),
    "tokens": ("words",),
    "tags": ("ner_tags", "labels", "ner", "bio_tags", "iob_tags"),
    "chosen": ("chosen_response", "preferred", "chosen_answer", "accepted", "better"),
    "rejected": ("rejected_answer", "dispreferred", "worse"),
    "label": (
        "labels",
        "kto_tag",
        "is_desirable",
        "desirable",
        "category",
        "class",
        "sentiment",
        "intent",
        "topic",
        "product",
        "target",
        "emotion",
        "tag",
    ),
}
"""Other names that the columns of formats go by. What is read so is said."""


_MORE = {"input": ("context",), "system": ("system_prompt", "system_message")}
"""The same of columns that a format reads where they are."""
ELSEWHERE = {
    "contents": (
        "these are Gemini's chats: write each row as `messages`, [{role: user, content: ...},"
        " {role: assistant, ...}]"
    ),
    "annotations": "an export of Label Studio has its values nested: export it as CSV or JSON-MIN",
    "paragraphs": (
        "SQuAD nests its questions: write a row for each, with `context`, `question` and `answer`"
    ),
}
"""Columns of other services' files, by which they are known: what to do."""


def guessed_more(columns: set[str], may_have: Iterable[str]) -> dict[str, str]:
    """Columns of the data that stand for those that a format reads where they are (Dolly's
    `context` for `input`).
    """
    found = {
        standard: [own for own in _MORE.get(standard, ()) if own in columns]
        for standard in may_have
    }
    return {
        standard: own[0]
        for standard, own in found.items()
        if len(own) == 1 and standard not in columns
    }


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
    parts = []
    for text, name, spec, conversion in parsed:
        if name == "" or spec or conversion:
            raise ValueError(
                "only a column's name may stand in braces; write a literal brace twice"
            )
        parts.append((text, name or ""))
    if not any(name for _, name in parts):
        raise ValueError("a template without a column in braces")
    return tuple(parts)


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
    """A row as its format reads it. Raises `Unusable` where no template can be filled."""
    read = {name for template in columns.values() for name in own_columns(template, row)}
    kept = {name: value for name, value in row.items() if name not in read}
    return kept | {standard: _value(template, row) for standard, template in columns.items()}


def _value(template: Template, row: Mapping[str, Any]) -> Any:
    alternatives = templates_of(template)
    lacking = ""
    for each in alternatives:
        if "{" not in each and (len(alternatives) == 1 or not _is_empty(_part(row, each))):
            return _part(row, each)  # as it is: the format says what is wrong with it
        filled, why = _filled(each, row)
        if filled is not None:
            return filled
        lacking = lacking or why
    more = (
        ""
        if len(alternatives) > 1
        else "; give a second template without it in a list for such rows"
    )
    raise Unusable(f"{lacking}{more}")


def _filled(template: str, row: Mapping[str, Any]) -> tuple[str | None, str]:
    """The text of a template, or None and why."""
    written = []
    for text, name in parts_of(template):
        written.append(text)
        if not name:
            continue
        match = _PICK.fullmatch(name)
        value = (
            _picked(row.get(match[1]), row.get(match[2]), match[1], match[2])
            if match
            else _part(row, name)
        )
        if _is_empty(value):
            return (
                None,
                (
                    f"`{match[1] if match else name}` is empty, which its template in data.columns"
                    " needs"
                ),
            )
        written.append(_as_text(value, name))
    return "".join(written), ""


def _part(row: Mapping[str, Any], name: str) -> Any:
    """A column, or a part of an object in one: `translation.en`."""
    if name in row:
        return row[name]
    column, _, inner = name.partition(".")
    value = row.get(column)
    return _part(value, inner) if inner and isinstance(value, Mapping) else None


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {}) or (isinstance(value, str) and not value.strip())


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
        return "\n".join(
            f"{chr(65 + index)}. {item}" if len(value) <= 26 else str(item)
            for index, item in enumerate(value)
        )
    raise Unusable(f"`{name}` is neither text nor a number nor a list of these")


def _picked(choices: Any, which: Any, name: str, pointer: str) -> Any:
    """The item of `choices` that `which` points at. ARC's form, {text: [...], label: [...]}, goes
    by its labels.
    """
    labels: list[Any] = []
    if isinstance(choices, dict):
        labels, choices = list(choices.get("label") or []), choices.get("text")
    if not isinstance(choices, list) or not choices:
        raise Unusable(f"`{name}` is no list to choose from")
    if isinstance(which, list) and len(which) == 1:
        which = which[0]
    if labels and which in labels:
        return choices[labels.index(which)]
    if isinstance(which, str) and which in choices:
        return which
    index = which
    if isinstance(which, str):
        digits = which.strip()
        index = (
            int(digits)
            if digits.isdecimal()
            else ord(digits.upper()) - 65
            if len(digits) == 1
            else None
        )
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(choices):
        raise Unusable(f"`{pointer}` is {which!r}, which is none of the {len(choices)} in `{name}`")
    return choices[index]


def guessed(columns: set[str], needed: tuple[str, ...]) -> dict[str, str] | None:
    """Columns of the data that stand for those a format needs, by their usual names; None where one
    is not found.

    A column that could be read as two, or two for one, is no guess. Capitals make no difference.
    """
    by_lower: dict[str, list[str]] = {}
    for name in columns:
        by_lower.setdefault(name.lower(), []).append(name)
    found: dict[str, str] = {}
    for standard in needed:
        if standard in columns:
            continue
        names = [
            own
            for each in (standard, *SYNONYMS.get(standard, ()))
            for own in by_lower.get(each, ())
        ]
        if len(names) != 1 or names[0] in found.values():
            return None
        found[standard] = names[0]
    return found or None


_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "passage"),
    ("question", "sentence"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("sentence_a", "sentence_b"),
    ("query", "document"),
    ("query", "passage"),
    ("question", "context"),
    ("claim", "evidence"),
    ("title", "text"),
    ("title", "body"),
)
"""Columns whose two texts are classified together."""


_NEVER_LEARNED = {"negative", "negatives", "neg", "rejected", "id", "index", "url", "source"}
"""Columns that nobody means to learn, whatever else is there."""
_POINTERS = ("answer", "gold", "label", "answerkey", "answer_idx", "answer_index", "correct")


def suggested(columns: set[str], needs: tuple[str, ...]) -> str:
    """What to write as `data.columns` for a format that needs these: by usual names where they are,
    else by the file's own.
    """
    by_lower = {name.lower(): name for name in sorted(columns)}
    if own := by_lower.get("translation"):
        source, target = (
            needs if needs in (("input", "target"), ("prompt", "completion")) else ("", "")
        )
        mapped = (
            f'{{{source}: "{{{own}.en}}", {target}: "{{{own}.de}}"}}, with its languages in place'
            " of en and de"
        )
        return mapped if source else ""
    left = dict(by_lower)
    found: dict[str, str] = {}
    for standard in needs:
        names = [name for name in (standard, *SYNONYMS.get(standard, ())) if name in left]
        if names:
            found[standard] = left.pop(names[0])
    pair = next((each for each in _PAIRS if set(each) <= set(by_lower)), None)
    if needs[0] == "text" and pair is not None:
        found["text"] = '"' + "\\n".join(f"{{{by_lower[name]}}}" for name in pair) + '"'
        left = {name: own for name, own in left.items() if name not in pair}
    lacking = [standard for standard in needs if standard not in found]
    if len(lacking) == 1 and len(left) == 1 and not set(left) & _NEVER_LEARNED:
        found[lacking[0]] = left.pop(next(iter(left)))
    if "choices" in by_lower and needs[-1] in ("completion", "target", "output"):
        pointers = [by_lower[name] for name in _POINTERS if name in by_lower]
        if len(pointers) == 1:
            found[needs[-1]] = f'"{{{by_lower["choices"]}[{pointers[0]}]}}"'
    if len(found) < len(needs):
        return ""
    return "{" + ", ".join(f"{standard}: {found[standard]}" for standard in needs) + "}"
