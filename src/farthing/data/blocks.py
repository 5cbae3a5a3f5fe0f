"""Files of text as blocks of rows: JSON lines, JSON, CSV and plain text, zipped or not, in any
encoding. A row that can't be read is a `BadRow`. Memory holds a block, however large the file is.
"""

from __future__ import annotations

import codecs
import csv
import functools
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farthing.data.rows import (
    AS_GUESSED,
    MAX_ROW_BYTES,
    BadRow,
    Layout,
    Row,
    RowBlock,
    RowValue,
    too_large,
)
from farthing.errors import DataError
from farthing.storage.files import files_below

BLOCK_ROWS, BLOCK_BYTES = 1024, 2 << 20
MAX_JSON_BYTES = 2 << 30
"""Of a JSON document that is one object."""
_MOST_PENDING = 8 * MAX_ROW_BYTES
_N_SPANS = 64
"""Parts of a large file that are read where not all of it is."""
_GUESSED_BYTES = 64 << 20
"""From which the encoding is guessed."""


class Raw(NamedTuple):
    """A row that is not parsed yet, or a line of a file in UTF-8 with its break."""

    number: int
    n_bytes: int
    """More than it holds where it is over the limit."""
    content: Any


def _opened(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")


class Lines:
    """The lines of a file, and how far it has been read."""

    def __init__(
        self, path: Path, name: str, layout: Layout, most_bytes: int | None = None
    ) -> None:
        self.name, self.n, self.n_read = name, 0, 0
        self._encoding = layout.encoding or encoding_of(path)
        self._bytes = _opened(path)
        is_utf8 = codecs.lookup(self._encoding).name == "utf-8"
        is_plain = is_utf8 and path.suffix != ".gz"
        self._file: Any = (
            self._bytes if is_utf8 else io.TextIOWrapper(self._bytes, self._encoding, newline="\n")
        )
        self._n_bytes, self._most = path.stat().st_size, most_bytes
        self._spans: list[tuple[int, int | None]] = [(0, None)]
        if is_plain and most_bytes and self._n_bytes > most_bytes:
            starts = [self._n_bytes * i // _N_SPANS for i in range(_N_SPANS)]
            self._spans = [(start, start + most_bytes // _N_SPANS) for start in starts]
            self._most = None
        self._packed = getattr(self._bytes, "fileobj", self._bytes)

    def share(self) -> float:
        """Of the file, that has been read."""
        done = self.n_read if len(self._spans) > 1 else self._packed.tell()
        return min(1.0, done / max(1, self._n_bytes))

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._bytes.close()

    def read(self, n_bytes: int) -> bytes:
        """The next bytes in UTF-8, some more or fewer than these; none at the end."""
        return self._taken(self._file.read, n_bytes)

    def _taken(self, take: Callable[[int], str | bytes], n_bytes: int) -> bytes:
        try:
            taken = take(n_bytes)
            return taken.encode(errors="surrogatepass") if isinstance(taken, str) else taken
        except UnicodeError as error:
            raise DataError(
                f"it is not written in {self._encoding}: {getattr(error, 'reason', error)}",
                where=f"{self.name}:{self.n + 1}",
                to_do="name its encoding: data.encoding: utf-8, cp1252, utf-16 ...",
            ) from error

    def __iter__(self) -> Iterator[Raw]:
        for start, stop in self._spans:
            if start:
                self._bytes.seek(start)
                self._bytes.readline(MAX_ROW_BYTES)
            while raw := self._taken(self._file.readline, MAX_ROW_BYTES + 1):
                self.n += 1
                n_bytes = len(raw)
                if n_bytes > MAX_ROW_BYTES and not raw.endswith(b"\n"):
                    n_bytes += self._skip_line()
                elif self.n == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                self.n_read += n_bytes
                yield Raw(self.n, n_bytes, raw)
                if stop is not None and self._bytes.tell() >= stop:
                    break
                if self._most and self.n_read > self._most:
                    self._n_bytes += 1  # what was unpacked ahead is no whole file
                    return

    def _skip_line(self) -> int:
        """Pass over the rest of a line that is too long to be held; its bytes."""
        n_bytes = 0
        while raw := self._taken(self._file.readline, 1 << 20):
            n_bytes += len(raw)
            if raw.endswith(b"\n"):
                break
        return n_bytes


def _blocks(
    rows: Iterable[Raw], parse: Callable[[Any], RowValue | str], share: Callable[[], float]
) -> Iterator[RowBlock]:
    """Rows in blocks of as many and as large as a block may be. `parse` makes a row of a content
    when it is asked for, or says why there is none."""
    pending: list[Raw] = []
    n_bytes = 0
    for row in rows:
        pending.append(row)
        n_bytes += row.n_bytes
        if len(pending) == BLOCK_ROWS or n_bytes > BLOCK_BYTES:
            yield _block(pending, parse, share())
            pending, n_bytes = [], 0
    if pending:
        yield _block(pending, parse, share())


def _block(rows: list[Raw], parse: Callable[[Any], RowValue | str], share: float) -> RowBlock:
    def read(picked: Sequence[int]) -> Iterator[Row | BadRow]:
        for number, n_bytes, content in (rows[index] for index in picked):
            is_large = n_bytes > MAX_ROW_BYTES + 1
            made = too_large(n_bytes) if is_large else parse(content)
            yield BadRow(number, made) if isinstance(made, str) else Row(number, made)

    return RowBlock(np.fromiter((row.n_bytes for row in rows), np.int64, len(rows)), read, share)


def _as_object(value: Any) -> RowValue | str:
    return value if isinstance(value, dict) else "not a JSON object"


# ---- JSON ----


def jsonl_blocks(path: Path, name: str, layout: Layout, most: int | None) -> Iterator[RowBlock]:
    """One object a line."""
    with Lines(path, name, layout, most) as lines:
        rows = (line for line in lines if line.content.strip())
        yield from _blocks(rows, _json_row, lines.share)


def _json_row(line: bytes) -> RowValue | str:
    try:
        return _as_object(_DECODER.decode(line.rstrip(b"\r\n").decode("utf-8")))
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start} of the line"
    except (ValueError, RecursionError) as error:
        column = f" at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        return f"invalid JSON{column}: {_why(error)}"


def _why(error: Exception) -> str:
    """What is wrong with JSON, as Python's parser found it."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "a number of thousands of digits" if "digits" in str(error) else str(error)


def _object(pairs: list[tuple[str, Any]]) -> RowValue:
    """An object whose keys differ: of two equal ones JSON would silently keep the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"`{next(name for name in names if names.count(name) > 1)}` appears twice in one object"
        )
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object
)  # made once: `json.loads` would make one for each row


def json_blocks(path: Path, name: str, layout: Layout, _: int | None) -> Iterator[RowBlock]:
    """The objects of an array, or of the list within an object that `layout.field` names or that is
    its only one.
    """
    with Lines(path, name, layout) as file:
        document = _Document(file)
        if document.next_mark() == "[" and not layout.field:
            values: Iterable[Any] = document.items()
        else:
            values = _list_of(document.whole(), name, layout.field)
        rows = (Raw(n, _n_characters(value), value) for n, value in enumerate(values, 1))
        yield from _blocks(rows, _as_object, file.share)


class _Document:
    """The text of a JSON document, of which only what is being parsed is held."""

    def __init__(self, file: Lines) -> None:
        self._file, self._text, self._at = file, "", 0
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._is_end, self._line, self._column = False, 1, 1  # of where the text begins

    def next_mark(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            rest = self._text[self._at :].lstrip(" \t\r\n")
            self._at = len(self._text) - len(rest)
            if rest or self._is_end:
                return rest[:1]
            self._more(1 << 18)

    def items(self) -> Iterator[Any]:
        """The items of an array that begins here. Raises `DataError`."""
        self._at += 1
        mark = "" if self.next_mark() == "]" else ","
        while mark == ",":
            yield self._value()
            mark = self.next_mark()
            self._at += mark == ","
            if mark not in (",", "]"):
                raise self._invalid("Expecting ',' delimiter", self._at)
        self._at += 1
        self._end()

    def whole(self) -> Any:
        """The one value of the document. Raises `DataError`."""
        while not self._is_end:
            self._more(16 << 20)
            if len(self._text) > MAX_JSON_BYTES:
                raise DataError(
                    "too large for one JSON document",
                    where=self._file.name,
                    to_do="write it as .jsonl, one object a line",
                )
        value = self._value()
        self._end()
        return value

    def _end(self) -> None:
        if self.next_mark():
            raise self._invalid("Extra data", self._at)

    def _value(self) -> Any:
        n_more = 1 << 18
        self.next_mark()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._is_end:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                if self._is_end or len(self._text) - self._at > _MOST_PENDING:
                    raise self._invalid(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise self._invalid(_why(error), self._at) from error
            self._more(n_more)
            n_more *= 2

    def _more(self, n_bytes: int) -> None:
        """Forget what was parsed, and read on."""
        self._line, self._column = self._place(self._at)
        raw = self._file.read(n_bytes)
        try:
            text = self._decode(raw, not raw)
        except UnicodeDecodeError as error:
            raise DataError(
                f"invalid UTF-8 at byte {error.start} behind line {self._line}",
                where=self._file.name,
                to_do="write it as UTF-8, or name its encoding: data.encoding",
            ) from error
        self._text, self._at, self._is_end = self._text[self._at :] + text, 0, not raw

    def _place(self, at: int) -> tuple[int, int]:
        """Line and column of a character of the text, from 1."""
        before = self._text[:at]
        n_lines, line_start = before.count("\n"), before.rfind("\n") + 1
        return self._line + n_lines, at - line_start + (1 if n_lines else self._column)

    def _invalid(self, what: str, at: int) -> DataError:
        line, column = self._place(at)
        where = f"{self._file.name}:{line}:{column}"
        return DataError(f"invalid JSON: {what}", where=where, to_do="correct it")


def _list_of(value: Any, name: str, field: str | None) -> list[Any]:
    """The list of a document's rows. Raises `DataError`."""
    lists = _lists_in(value) if isinstance(value, dict) else {}
    if field and field in lists:
        return lists[field]
    outer = [path for path in lists if "." not in path] or list(lists)
    if len(outer) == 1 and not field:
        items = lists[outer[0]]
        is_chat = bool(items) and isinstance(items[0], dict) and {"role", "from"} & items[0].keys()
        return [value] if is_chat else items  # one chat is a row, its turns are none
    shown = ", ".join(f"`{path}` ({len(items)} items)" for path, items in list(lists.items())[:8])
    raise DataError(
        f"there is no list at `{field}` (data.field)" if field else "not an array of objects",
        where=name,
        to_do=(
            f"name the one that holds the rows of {shown}: data.field: {next(iter(lists))}"
            if lists
            else "write [{...}, {...}], or .jsonl"
        ),
    )


def _lists_in(value: RowValue, before: str = "") -> dict[str, list[Any]]:
    """Lists within an object by their path."""
    found: dict[str, list[Any]] = {}
    for name, inner in value.items():
        if isinstance(inner, list):
            found[f"{before}{name}"] = inner
        elif isinstance(inner, dict):
            found |= _lists_in(inner, f"{before}{name}.")
    return found


def _n_characters(value: Any) -> int:
    """Characters of all texts within a value, and one for everything else."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_n_characters(part) for part in parts)


# ---- CSV ----


def csv_blocks(path: Path, name: str, layout: Layout, most: int | None) -> Iterator[RowBlock]:
    """Records under a header line, quoted as RFC 4180 has it."""
    csv.field_size_limit(MAX_ROW_BYTES)
    delimiter = layout.separator or delimiter_of(path, layout)
    with Lines(path, name, layout, most) as lines:
        records = _records(lines, delimiter)
        header = _header(next(records, None), name)
        yield from _blocks(records, functools.partial(_csv_row, header), lines.share)


def _records(lines: Lines, delimiter: str) -> Iterator[Raw]:
    """The records of a file: fields, or why there are none. Blank lines are passed over. Of a
    record that is none each line counts: a quote that is not closed swallows other rows.
    """
    first = n_before = 0

    def texts() -> Iterator[str]:
        for line in lines:
            if (n_bytes := lines.n_read - n_before) > MAX_ROW_BYTES + 1:
                to_do = "take this row out, or close its quotes"
                raise DataError(too_large(n_bytes), where=f"{lines.name}:{first}", to_do=to_do)
            # bytes that are no UTF-8 become lone surrogates: the row they are in is then named
            yield str(line.content, "utf-8", "surrogateescape")

    # strict: a quote that is never closed is an error, not a field with the rest of the file
    reader, n_fields = csv.reader(texts(), delimiter=delimiter, strict=True), 0
    while True:
        first, n_before = lines.n + 1, lines.n_read
        try:
            content: list[str] | str = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            content = f"invalid CSV: {error}"
        if not content:
            continue
        n_fields = n_fields or len(content)
        is_whole = isinstance(content, list) and len(content) == n_fields
        numbers = range(first, 1 + (first if is_whole else lines.n))
        n_bytes = (lines.n_read - n_before) // len(numbers)
        yield from (Raw(number, n_bytes, content) for number in numbers)


def _header(first: Raw | None, name: str) -> list[str]:
    """The names of a CSV file's columns, from its first line. Raises `DataError`."""
    fields: list[str] | str = [] if first is None else first.content
    header = [] if isinstance(fields, str) else [column.strip() for column in fields]
    twice = next((column for column in header if header.count(column) > 1), None)
    if any(header) and twice is None:
        return header
    what = "no header line" if twice is None else f"column `{twice}` appears twice in the header"
    raise DataError(
        f"the header line is {fields}" if isinstance(fields, str) else what,
        where=f"{name}:1",
        to_do="the first line of a CSV file names its columns, each once",
    )


def _csv_row(header: list[str], fields: list[str] | str) -> RowValue | str:
    if isinstance(fields, str):
        return fields
    if len(fields) != len(header):
        return f"{len(fields)} fields, the header has {len(header)}"
    if any(re.search("[\udc80-\udcff]", field) for field in fields):
        return "invalid UTF-8; data.encoding names another encoding"
    return dict(zip(header, fields, strict=True))


# ---- plain text ----


def text_blocks(path: Path, name: str, layout: Layout, _: int | None) -> Iterator[RowBlock]:
    """Each text file as one row, in the order of names, or each of its lines; white space alone is
    passed over.
    """
    files = [path] if path.is_file() else [file for file in files_below(path) if is_text(file)]
    by_line, done = layout.text_unit == "line", 0

    def contents() -> Iterator[tuple[int, RowValue | str]]:
        nonlocal done
        for file in files:
            with Lines(file, name, layout) as lines:
                if by_line:
                    yield from ((line.n_bytes, _text(line.content)) for line in lines)
                else:
                    whole = lines.read(MAX_ROW_BYTES + 2)
                    yield len(whole), _text(whole, f"{file.name}: ")
            done += 1

    rows = (Raw(number, *each) for number, each in enumerate(contents(), 1))
    filled = (row for row in rows if row.content)
    yield from _blocks(filled, lambda made: made, lambda: done / len(files))


def _text(content: bytes, of_file: str = "") -> RowValue | str:
    """Why a text is none, after the file that is one; empty for white space alone."""
    try:
        text = content.decode("utf-8-sig" if of_file else "utf-8")
    except UnicodeDecodeError as error:
        more = "" if of_file else " of the line"
        return f"{of_file}invalid UTF-8 at byte {error.start}{more}"
    text = text if of_file else text.rstrip("\r\n")
    return {"text": text} if text.strip() else ""


READERS = {"jsonl": jsonl_blocks, "json": json_blocks, "csv": csv_blocks, "texts": text_blocks}
"""By kind of file."""


def is_text(path: Path) -> bool:
    """Whether a file is plain text by its name, zipped or not."""
    return path.name.lower().endswith((".txt", ".txt.gz"))


# ---- guesses ----


def _first_lines(path: Path, layout: Layout, n: int) -> list[bytes]:
    """At most `n` lines; fewer where the file can't be read, which its reader says."""
    try:
        with Lines(path, path.name, layout) as lines:
            return [line.content for line in itertools.islice(lines, n)]
    except (OSError, EOFError, zlib.error, DataError):
        return []


def delimiter_of(path: Path, layout: Layout = AS_GUESSED) -> str:
    """What separates the columns of a CSV file: a comma, or what its first line has instead."""
    line = re.sub(rb'"[^"]*"', b"", b"".join(_first_lines(path, layout, 1)))
    found = [mark for mark in ";\t|" if mark.encode() in line]
    return found[0] if b"," not in line and len(found) == 1 else ","


def json_kind(path: Path) -> str:
    """jsonl or json: an array is a document, and a file whose first line is a whole object of
    several lines has one a line, whatever its name is.
    """
    some = [line.strip() for line in _first_lines(path, AS_GUESSED, 100) if line.strip()]
    first, *more = some or [b""]
    if first[:1] == b"[":
        return "json"
    if ".json" not in path.suffixes:
        return "jsonl"
    try:
        return "jsonl" if more and isinstance(json.loads(first), dict) else "json"
    except (ValueError, RecursionError):
        return "json"


_MULTIBYTE = re.compile(rb"[\xc2-\xf4][\x80-\xbf]{1,3}")


def encoding_of(path: Path) -> str:
    """utf-8, utf-16 by its mark, or cp1252 for a file whose beginning is no UTF-8 anywhere, in
    three lines at least.
    """
    status = path.stat()
    return _encoding_of(path, status.st_mtime_ns, status.st_size)


@functools.cache
def _encoding_of(path: Path, changed_ns: int, n_bytes: int) -> str:
    try:
        with _opened(path) as file:
            start = file.read(4096)
            if start[:2] in (b"\xff\xfe", b"\xfe\xff") and len(start) % 2 == 0:
                return "utf-16"
            if path.suffix == ".gz":
                return "utf-8"
            start += file.read(_GUESSED_BYTES)
            if start.isascii() or _MULTIBYTE.search(start):
                return "utf-8"
            start.decode("cp1252")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return "utf-8"
    n_broken = sum(not line.isascii() for line in start.split(b"\n"))
    return "cp1252" if n_broken >= 3 else "utf-8"
