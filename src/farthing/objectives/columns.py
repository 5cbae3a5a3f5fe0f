"""The forms of rows that tasks read, and how a column of a row is read."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Unusable(Exception):
    """A row that can't become an example. The message is the reason, in words for its owner.

    `given` is what its owner wrote as input, where the row could be read and only the template
    stands in the way.
    """

    given: tuple[str, ...] = ()


class Format(NamedTuple):
    """A form of rows: its name, the columns that it needs, and those that it also reads where they
    are.
    """

    name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...] = ()


MESSAGES = Format("messages", ("messages",), ("tools", "functions", "system"))
CONVERSATIONS = Format("conversations", ("conversations",), ("system", "tools"))
INSTRUCTION = Format("instruction", ("instruction", "output"), ("input", "system", "history"))
PROMPT_COMPLETION = Format("prompt/completion", ("prompt", "completion"), ("tools",))
INPUT_TARGET = Format("input/target", ("input", "target"))
TEXT_LABEL = Format("text/label", ("text", "label"))
TEXT = Format("text", ("text",))
TEXT_LABELS = Format("text/labels", ("text", "labels"))
TEXT_SCORE = Format("text/score", ("text", "score"))
TOKENS_TAGS = Format("tokens/tags", ("tokens", "tags"))

_BESIDE = ("system", "tools", "margin")
PAIRS = (
    Format("input/preferred", ("input", "preferred_output", "non_preferred_output")),
    Format("messages/rejected_response", ("messages", "rejected_response"), _BESIDE),
    Format("messages/rejected_messages", ("messages", "rejected_messages"), _BESIDE),
    Format("conversations/chosen/rejected", ("conversations", "chosen", "rejected"), _BESIDE),
    Format(
        "instruction/chosen/rejected", ("instruction", "chosen", "rejected"), ("input", *_BESIDE)
    ),
    Format("prompt/chosen/rejected", ("prompt", "chosen", "rejected"), _BESIDE),
    Format("messages/chosen/rejected", ("messages", "chosen", "rejected"), _BESIDE),
    Format("chosen/rejected", ("chosen", "rejected"), _BESIDE),
)
VERDICTS = (
    Format("prompt/completion/label", ("prompt", "completion", "label"), ("tools",)),
    Format("messages/label", ("messages", "label"), ("tools", "system")),
    Format("instruction/output/label", ("instruction", "output", "label"), ("input", "system")),
)

_KINDS = {
    "dict": "an object",
    "list": "a list",
    "int": "a number",
    "float": "a number",
    "bool": "true/false",
    "Decimal": "a decimal number",
    "date": "a date",
    "datetime": "a date with time",
    "time": "a time of day",
    "timedelta": "a duration",
    "bytes": "bytes",
    "NoneType": "nothing",
    "Timestamp": "a date with time",
}


def kind_of(value: Any) -> str:
    return _KINDS.get(type(value).__name__, type(value).__name__)


def parsed_list(value: Any) -> Any:
    """A list that is written as text; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        for parse in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return parse(value.strip())
    return value


def list_of(row: Mapping[str, Any], column: str) -> list[Any]:
    """The list in a column of a row; a table has it as JSON, or as Python writes it. Raises
    `Unusable`.
    """
    value = parsed_list(row.get(column))
    if value is None:
        raise Unusable(f"no `{column}`")
    if not isinstance(value, list | tuple):
        what = "text" if isinstance(value, str) else kind_of(value)
        raise Unusable(f"`{column}` is {what}, not a list")
    return list(value)


def text_of(row: Mapping[str, Any], column: str, *, may_be_empty: bool = False) -> str:
    """The text in a column of a row. Raises `Unusable`."""
    value = row.get(column)
    if value is None:
        if may_be_empty:
            return ""
        raise Unusable(f"no `{column}`")
    if not isinstance(value, str):
        raise Unusable(f"`{column}` is {kind_of(value)}, not text")
    if not may_be_empty and not value.strip():
        raise Unusable(f"`{column}` is empty")
    return value
