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

from farthing.errors import DataError
from farthing.storage.files import make_private, write_text


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
        raise _error(
            "a DatasetDict has several sets", f"name one, e.g. data[{next(iter(value), 'train')!r}]"
        )
    if type(value).__name__ == "DataFrame":
        return list(value.to_dict("records"))
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise _error(f"a {type(value).__name__} has no rows", "give a list")
    features = getattr(value, "features", None)
    classes = {name: getattr(each, "feature", each) for name, each in (features or {}).items()}
    classes = {name: each for name, each in classes.items() if hasattr(each, "int2str")}
    return value if not classes else (_with_names(row, classes) for row in value)


def _with_names(row: Mapping[str, Any], classes: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `datasets` with the names of its classes in place of their numbers."""
    found = dict(row)
    for name, of_class in classes.items():
        try:
            found[name] = None if row[name] is None else of_class.int2str(row[name])
        except ValueError:  # -1, as in data whose labels are kept back
            found[name] = None
    return found


def write_rows(value: Any, folder: Path) -> Path:
    """A JSON Lines file of these rows in `folder`, named by its content; one that is there is kept.

    Raises `DataError`.
    """
    lines = []
    for number, row in enumerate(rows_of(value), 1):
        if not isinstance(row, Mapping):
            what = f"row {number} is a {type(row).__name__}, not a mapping of columns"
            raise _error(what, 'write each row as {"column": value}')
        cells = []
        for name, value in row.items():
            try:
                if not _is_missing(value):
                    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
                    cells.append(f"{json.dumps(str(name))}: {text}")
            except (TypeError, ValueError) as error:
                what = f"row {number}: `{name}` is {error}, which a row can't hold"
                raise _error(what, "make it text or a number") from None
        lines.append("{" + ", ".join(cells) + "}\n")
    if not lines:
        raise _error("there are no rows", "give one at least")
    digest = hashlib.sha256("".join(lines).encode(errors="surrogatepass")).hexdigest()
    path = make_private(folder) / f"rows-{digest[:16]}.jsonl"
    if not path.exists():
        write_text(path, lines)
    return path


def _is_missing(value: Any) -> bool:
    is_nan = isinstance(value, float) and not math.isfinite(value)
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def _plain(value: Any) -> Any:
    """A value of numpy or pandas as JSON has it. Raises `TypeError` that names the type."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if _is_missing(value):
        return None
    raise TypeError(f"a {type(value).__name__}")


def _error(what: str, to_do: str) -> DataError:
    return DataError(what, where="data", to_do=to_do)
