"""Rows that a program holds, as a file of their content: so that a run reads the same rows when it
resumes.

Takes a list of mappings, a `datasets.Dataset` or a pandas `DataFrame`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from farthing.data.rows import RowValue
from farthing.errors import DataError
from farthing.storage.files import make_private, write_text

_WHERE = "data"


def is_rows(value: Any) -> bool:
    """Whether a value is rows, and not the name of a source or a list of these."""
    if hasattr(value, "to_dict") or hasattr(value, "column_names"):
        return True
    if isinstance(value, list | tuple) and value and all(isinstance(e, Mapping) for e in value):
        return not all("path" in each for each in value)
    return False


def rows_of(value: Any) -> Iterable[Mapping[str, Any]]:
    """The rows of a list, a data set or a data frame. Raises `DataError`."""
    if isinstance(value, Mapping):  # of splits
        raise DataError(
            "a DatasetDict has several sets",
            where=_WHERE,
            to_do=f"name one, e.g. data[{next(iter(value), 'train')!r}]",
        )
    if type(value).__name__ == "DataFrame":
        return list(value.to_dict("records"))
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise DataError(f"a {type(value).__name__} has no rows", where=_WHERE, to_do="give a list")
    return value


def write_rows(value: Any, folder: Path) -> Path:
    """A JSON Lines file of these rows in `folder`, named by its content; one that is there is kept.

    Raises `DataError`.
    """
    lines = []
    for number, row in enumerate(rows_of(value), 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} is a {type(row).__name__}, not a mapping of columns",
                where=_WHERE,
                to_do='write each row as {"column": value}',
            )
        lines.append(json.dumps(_plain_row(row, number), ensure_ascii=False) + "\n")
    if not lines:
        raise DataError("there are no rows", where=_WHERE, to_do="give one at least")
    digest = hashlib.sha256("".join(lines).encode(errors="surrogatepass")).hexdigest()
    path = make_private(folder) / f"rows-{digest[:16]}.jsonl"
    if not path.exists():
        write_text(path, lines)
    return path


def _plain_row(row: Mapping[str, Any], number: int) -> RowValue:
    found: RowValue = {}
    for name, value in row.items():
        try:
            plain = _plain(value)
        except TypeError as error:
            raise DataError(
                f"row {number}: `{name}` is a {error}, which a row can't hold",
                where=_WHERE,
                to_do="make it text or a number",
            ) from None
        if plain is not None:
            found[str(name)] = plain
    return found


def _plain(value: Any) -> Any:
    """A value as JSON has it; None for what is missing. Raises `TypeError` that names the type."""
    if hasattr(value, "tolist") and not isinstance(value, type):  # of numpy
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool) or _is_missing(value):
        return None if _is_missing(value) else value
    raise TypeError(type(value).__name__)


def _is_missing(value: Any) -> bool:
    """pandas' own signs of a missing value."""
    return type(value).__name__ in ("NAType", "NaTType")
