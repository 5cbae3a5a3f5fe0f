"""The forms of rows that tasks read, and how a column of a row is read."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from farthing.errors import UnusableRowError

Row = Mapping[str, Any]
"""A row of the data, by standard columns."""


class Format(NamedTuple):
    """A form of rows: its name, the columns that it needs, a label last, and those that it also
    reads where they are.
    """

    name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...] = ()


def _form(name: str, *may_have: str, needs: tuple[str, ...] = ()) -> Format:
    """A form that is named by the columns it needs, unless these are given."""
    return Format(name, needs or tuple(name.split("/")), may_have)


MESSAGES = _form("messages", "tools", "functions", "system")
CONVERSATIONS = _form("conversations", "system", "tools")
CHATGPT = _form("mapping", needs=("mapping", "current_node"))
INSTRUCTION = _form("instruction", "input", "system", "history", needs=("instruction", "output"))
PROMPT_COMPLETION = _form("prompt/completion", "tools")
INPUT_TARGET = _form("input/target")
TEXT_LABEL = _form("text/label", "text_pair")
TEXT = _form("text")
TEXT_LABELS = _form("text/labels", "text_pair")
TEXT_SCORE = _form("text/score", "text_pair")
TOKENS_TAGS = _form("tokens/tags")

_BESIDE = ("system", "tools", "margin")
_PREFERRED = ("input", "preferred_output", "non_preferred_output")
PAIRS = (
    _form("input/preferred", needs=_PREFERRED),
    _form("messages/rejected_response", *_BESIDE),
    _form("messages/rejected_messages", *_BESIDE),
    _form("conversations/chosen/rejected", *_BESIDE),
    _form("instruction/chosen/rejected", "input", *_BESIDE),
    _form("prompt/chosen/rejected", *_BESIDE),
    _form("messages/chosen/rejected", *_BESIDE),
    _form("chosen/rejected", *_BESIDE),
)
VERDICTS = (
    _form("prompt/completion/label", "tools"),
    _form("messages/label", "tools", "system"),
    _form("instruction/output/label", "input", "system"),
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


def list_of(row: Row, column: str) -> list[Any]:
    """The list in a column of a row; a table has it as JSON, or as Python writes it. Raises
    `UnusableRowError`.
    """
    value = parsed_list(row.get(column))
    if value is None:
        raise UnusableRowError(f"no `{column}`")
    if not isinstance(value, list | tuple):
        what = "text" if isinstance(value, str) else kind_of(value)
        raise UnusableRowError(f"`{column}` is {what}, not a list")
    return list(value)


def text_of(row: Row, column: str, *, may_be_empty: bool = False) -> str:
    """The text in a column of a row. Raises `UnusableRowError`."""
    value = row.get(column)
    if value is None:
        if may_be_empty:
            return ""
        raise UnusableRowError(f"no `{column}`")
    if not isinstance(value, str):
        raise UnusableRowError(f"`{column}` is {kind_of(value)}, not text")
    if not may_be_empty and not value.strip():
        raise UnusableRowError(f"`{column}` is empty")
    return value
