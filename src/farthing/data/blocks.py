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
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from farthing.data.rows import (
    AS_GUESSED,
    MAX_ROW_BYTES,
    BadRow,
    Block,
    Layout,
    Reading,
    Row,
    RowValue,
    too_large,
)
from farthing.errors import DataError
from farthing.storage.files import files_below
from farthing.units import say_bytes

BLOCK_ROWS, BLOCK_BYTES = 1024, 2 << 20
MAX_JSON_BYTES = 2 << 30
"""Of a JSON document that is one object."""
_MOST_PENDING = 8 * MAX_ROW_BYTES
_MANY_BYTES, _MOST_UNFOLDING = 256 << 20, 200
"""What gzip may make of a file: so many bytes, or so many times its own."""
_N_SPANS = 64
"""Parts of a large file that are read where not all of it is."""


class Raw(NamedTuple):
    """A row on its way, or a line of a file in UTF-8 with its break."""

    number: int
    n_bytes: int
    """More than it holds where it is over the limit."""
    content: Any
    """The bytes of a line, of which JSON is parsed when it is asked for; else the row or bad row
    itself.
    """
    n_quotes: int = 0
    """In the rest of a line that was passed over."""


class Lines:
    """The lines of a file. Refuses one that unpacks beyond all measure."""

    def __init__(self, path: Path, name: str, layout: Layout, reading: Reading) -> None:
        self.name, self.n = name, 0
        self._raw = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        self._is_zipped = path.suffix == ".gz"
        self._n_bytes = max(1, path.stat().st_size)
        self._encoding = layout.encoding or encoding_of(path)
        unpacked: Any = gzip.GzipFile(fileobj=self._raw) if self._is_zipped else self._raw
        self._packed = unpacked
        is_utf8 = codecs.lookup(self._encoding).name == "utf-8"
        self._text = None if is_utf8 else io.TextIOWrapper(unpacked, self._encoding, newline="\n")
        reading.share = self._share
        most = reading.most_bytes
        self._most_unpacked = most if most is not None and (self._is_zipped or self._text) else None
        self._spans: list[tuple[int, int]] = []
        if most is not None and self._most_unpacked is None and self._n_bytes > most:
            starts = [self._n_bytes * i // _N_SPANS for i in range(_N_SPANS)]
            self._spans = [(start, start + most // _N_SPANS) for start in starts]
        self._reading, self._seen_bytes = reading, 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._packed.close()
        self._raw.close()

    def _share(self) -> float:
        if not self._reading.is_whole and not self._is_zipped:
            return min(1.0, self._seen_bytes / self._n_bytes)
        return 1.0 if self._raw.closed else min(1.0, self._raw.tell() / self._n_bytes)

    def read(self, n_bytes: int) -> bytes:
        """The next bytes in UTF-8, some more or fewer than these; none at the end."""
        self._check()
        return self._taken((self._text or self._packed).read, n_bytes)

    def _readline(self, n_bytes: int) -> bytes:
        return self._taken((self._text or self._packed).readline, n_bytes)

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
        if not self._spans:
            yield from self._to(None)
        for start, stop in self._spans:
            self._reading.is_whole = False
            self._raw.seek(start)
            if start:
                self._raw.readline(MAX_ROW_BYTES)
            yield from self._to(stop)

    def _to(self, stop: int | None) -> Iterator[Raw]:
        while raw := self._readline(MAX_ROW_BYTES + 1):
            self.n += 1
            if self.n % 1024 == 0:
                self._check()
            line = Raw(self.n, len(raw), raw)
            if len(raw) > MAX_ROW_BYTES and not raw.endswith(b"\n"):
                line = self._skipped(line)
            elif self.n == 1:
                line = line._replace(content=raw.removeprefix(b"\xef\xbb\xbf"))
            self._seen_bytes += line.n_bytes
            yield line
            if stop is not None and self._raw.tell() >= stop:
                return
            if self._most_unpacked is not None and self._seen_bytes > self._most_unpacked:
                self._reading.is_whole = False
                return

    def _skipped(self, line: Raw) -> Raw:
        """A line that is too long to be held, passed over to its end."""
        n_bytes = n_quotes = 0
        while raw := self._readline(1 << 20):
            n_bytes, n_quotes = n_bytes + len(raw), n_quotes + raw.count(b'"')
            self._check()
            if raw.endswith(b"\n"):
                break
        return line._replace(n_bytes=line.n_bytes + n_bytes, n_quotes=n_quotes)

    def _check(self) -> None:
        n_bytes = self._packed.tell() if self._is_zipped else 0
        if n_bytes > _MANY_BYTES and n_bytes > _MOST_UNFOLDING * self._n_bytes:
            raise DataError(
                f"it unpacks from {say_bytes(self._n_bytes)} to more than {say_bytes(n_bytes)}",
                where=self.name,
                to_do=(
                    "check where it comes from; if you trust it, unpack it and use it without .gz"
                ),
            )


def _blocks(rows: Iterable[Raw]) -> Iterator[Block]:
    """Rows in blocks of as many and as large as a block may be."""
    pending: list[Raw] = []
    n_bytes = 0
    for row in rows:
        pending.append(row)
        n_bytes += row.n_bytes
        if len(pending) == BLOCK_ROWS or n_bytes > BLOCK_BYTES:
            yield _block(pending)
            pending, n_bytes = [], 0
    if pending:
        yield _block(pending)


def _block(rows: list[Raw]) -> Block:
    def read(picked: Sequence[int]) -> Iterator[Row | BadRow]:
        for row in (rows[index] for index in picked):
            yield _json_row(row) if isinstance(row.content, bytes) else row.content

    return Block(np.fromiter((row.n_bytes for row in rows), np.int64, len(rows)), read)


# ---- JSON lines ----


def jsonl_blocks(path: Path, name: str, layout: Layout, reading: Reading) -> Iterator[Block]:
    """One object a line."""
    with Lines(path, name, layout, reading) as lines:
        yield from _blocks(line for line in lines if line.content.strip())


def _json_row(row: Raw) -> Row | BadRow:
    line = row.number
    if row.n_bytes > MAX_ROW_BYTES + 1:
        return BadRow(line, too_large(row.n_bytes))
    try:
        value = _DECODER.decode(row.content.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(line, f"invalid UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        column = f" at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        return BadRow(line, f"invalid JSON{column}: {_why(error)}")
    return Row(line, value) if isinstance(value, dict) else BadRow(line, "not a JSON object")


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


# ---- a JSON document ----


def json_blocks(path: Path, name: str, layout: Layout, reading: Reading) -> Iterator[Block]:
    """The objects of an array, or of the list within an object that `layout.field` names or that is
    its only one.
    """
    with Lines(path, name, layout, reading) as file:
        document = _Document(file, name)
        if document.skip_blanks() == "[" and not layout.field:
            values: Iterable[Any] = document.items()
        else:
            values = _list_of(document.whole(), name, layout.field)
        yield from _blocks(_value_row(number, value) for number, value in enumerate(values, 1))


def _value_row(number: int, value: Any) -> Raw:
    n_bytes = _n_characters(value)
    row = Row(number, value) if isinstance(value, dict) else BadRow(number, "not a JSON object")
    if n_bytes > MAX_ROW_BYTES:
        row = BadRow(number, too_large(n_bytes))
    return Raw(number, n_bytes, row)


class _Document:
    """The text of a JSON document, of which only what is being parsed is held."""

    def __init__(self, file: Lines, name: str) -> None:
        self._file, self._name = file, name
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at, self._is_end = "", 0, False
        self._n_lines, self._column = 0, 0

    def skip_blanks(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text) or self._is_end:
                return self._text[self._at : self._at + 1]
            self._more(1 << 18)

    def items(self) -> Iterator[Any]:
        """The items of an array that begins here. Raises `DataError`."""
        self._at += 1
        mark = self.skip_blanks()
        while mark != "]":
            yield self._value()
            mark = self.skip_blanks()
            if mark not in (",", "]"):
                raise self._invalid("Expecting ',' delimiter", self._at)
            if mark == ",":
                self._at += 1
                mark = self.skip_blanks()
                if mark == "]":
                    raise self._invalid("Expecting value", self._at)
        self._at += 1
        if self.skip_blanks():
            raise self._invalid("Extra data", self._at)

    def whole(self) -> Any:
        """The one value of the document. Raises `DataError`."""
        while not self._is_end:
            self._more(16 << 20)
            if len(self._text) > MAX_JSON_BYTES:
                raise DataError(
                    "too large for one JSON document",
                    where=self._name,
                    to_do="write it as .jsonl, one object a line",
                )
        value = self._value()
        if self.skip_blanks():
            raise self._invalid("Extra data", self._at)
        return value

    def _value(self) -> Any:
        n_more = 1 << 18
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
                raise DataError(
                    f"invalid JSON: {_why(error)}",
                    where=self._name,
                    to_do="check how it was written",
                ) from error
            self._more(n_more)
            n_more *= 2

    def _more(self, n_bytes: int) -> None:
        """Forget what was parsed, and read on."""
        done = self._text[: self._at]
        if n := done.count("\n"):
            self._n_lines, self._column = self._n_lines + n, 0
        self._column += len(done) - done.rfind("\n") - 1
        raw = self._file.read(n_bytes)
        try:
            text = self._decode(raw, not raw)
        except UnicodeDecodeError as error:
            raise DataError(
                f"invalid UTF-8 at byte {error.start} behind line {self._n_lines + 1}",
                where=self._name,
                to_do="write it as UTF-8, or name its encoding: data.encoding",
            ) from error
        self._text, self._at, self._is_end = self._text[self._at :] + text, 0, not raw

    def _invalid(self, what: str, at: int) -> DataError:
        before = self._text[:at]
        n = before.count("\n")
        column = len(before) - before.rfind("\n") - 1 + (0 if n else self._column)
        return DataError(
            f"invalid JSON: {what}",
            where=f"{self._name}:{self._n_lines + n + 1}:{column + 1}",
            to_do="correct it",
        )


def _list_of(value: Any, name: str, field: str | None) -> list[Any]:
    """The list of a document's rows. Raises `DataError`."""
    lists = _lists_in(value) if isinstance(value, dict) else {}
    if field:
        found = value
        for key in field.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, list):
            return found
        what = f"there is no list at `{field}` (data.field)"
    else:
        outer = value.values() if isinstance(value, dict) else ()
        direct = [each for each in outer if isinstance(each, list)]
        if len(direct) == 1:
            return direct[0]
        if not direct and len(lists) == 1:
            return next(iter(lists.values()))
        what = "not an array of objects"
    shown = ", ".join(f"`{path}` ({len(items)} items)" for path, items in list(lists.items())[:8])
    example = next(iter(lists), "")
    raise DataError(
        what,
        where=name,
        to_do=(
            f"name the one that holds the rows of {shown}: data.field: {example}"
            if lists
            else "write [{...}, {...}], or .jsonl"
        ),
    )


def _lists_in(value: RowValue, before: str = "", depth: int = 3) -> dict[str, list[Any]]:
    """Lists within an object by their path."""
    found: dict[str, list[Any]] = {}
    for name, inner in value.items():
        if isinstance(inner, list):
            found[f"{before}{name}"] = inner
        elif isinstance(inner, dict) and depth:
            found |= _lists_in(inner, f"{before}{name}.", depth - 1)
    return found


def _n_characters(value: Any) -> int:
    """Characters of all texts within a value, and one for everything else."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_n_characters(part) for part in parts)


# ---- CSV ----


def csv_blocks(path: Path, name: str, layout: Layout, reading: Reading) -> Iterator[Block]:
    """Records under a header line, quoted as RFC 4180 has it."""
    csv.field_size_limit(min(sys.maxsize, MAX_ROW_BYTES))
    delimiter = layout.separator or delimiter_of(path, layout)
    with Lines(path, name, layout, reading) as lines:
        records = _records(lines, delimiter)
        header = _header(next(records, None), name)
        yield from _blocks(raw._replace(content=_csv_row(raw, header)) for raw in records)


def _text(raw: bytes) -> str:
    """Bytes that are no UTF-8 become lone surrogates; the row they are in is then named."""
    return raw.decode("utf-8", errors="surrogateescape")


class _RowTooLarge(csv.Error):
    """A CSV row beyond the limit was passed over."""


def _records(lines: Lines, delimiter: str) -> Iterator[Raw]:
    """The records of a file: fields, or a bad row."""
    each = iter(lines)
    for line in each:
        if line.content.strip(b"\r\n"):
            yield _record(line, each, delimiter)


def _record(first: Raw, lines: Iterator[Raw], delimiter: str) -> Raw:
    n_bytes = 0

    def feed() -> Iterator[str]:
        nonlocal n_bytes
        is_quoted = False
        for line in itertools.chain([first], lines):
            n_bytes += line.n_bytes
            is_quoted ^= (line.content.count(b'"') + line.n_quotes) % 2 == 1
            if n_bytes > MAX_ROW_BYTES:
                while is_quoted and (more := next(lines, None)):
                    is_quoted ^= (more.content.count(b'"') + more.n_quotes) % 2 == 1
                raise _RowTooLarge(too_large(n_bytes))
            yield _text(line.content)

    # strict: a quote that is never closed is an error, not a field with the rest of the file
    reader = csv.reader(feed(), delimiter=delimiter, strict=True)
    content: list[str] | BadRow
    try:
        content = next(reader, [])
    except csv.Error as error:
        why = str(error) if isinstance(error, _RowTooLarge) else f"invalid CSV: {error}"
        content = BadRow(first.number, why)
    return Raw(first.number, n_bytes, content)


def _header(first: Raw | None, name: str) -> list[str]:
    """The names of a CSV file's columns, from its first line. Raises `DataError`."""
    where, to_do = f"{name}:1", "the first line of a CSV file names its columns, each once"
    fields = [] if first is None else first.content
    if isinstance(fields, BadRow):
        raise DataError(f"the header line is {fields.reason}", where=where, to_do=to_do)
    header = [column.strip() for column in fields]
    if not any(header):
        raise DataError("no header line", where=where, to_do=to_do)
    if twice := next((column for column in header if header.count(column) > 1), None):
        raise DataError(f"column `{twice}` appears twice in the header", where=where, to_do=to_do)
    return header


def _csv_row(raw: Raw, header: list[str]) -> Row | BadRow:
    if isinstance(raw.content, BadRow):
        return raw.content
    if len(raw.content) != len(header):
        return BadRow(raw.number, f"{len(raw.content)} fields, the header has {len(header)}")
    if any(re.search("[\udc80-\udcff]", field) for field in raw.content):
        return BadRow(raw.number, "invalid UTF-8")
    return Row(raw.number, dict(zip(header, raw.content, strict=True)))


# ---- plain text ----


def text_blocks(path: Path, name: str, layout: Layout, reading: Reading) -> Iterator[Block]:
    """Each text file as one row, in the order of names, or each of its lines; white space alone is
    passed over.
    """
    files = [path] if path.is_file() else [file for file in files_below(path) if is_text(file)]
    done = 0

    def rows() -> Iterator[Raw]:
        nonlocal done
        number = 0
        for file in files:
            with Lines(file, name, layout, Reading()) as lines:
                by_line = layout.text_unit == "line"
                for text in lines if by_line else [_whole(lines)]:
                    number += 1
                    row = _text_row(number, text, "" if by_line else f"{file.name}: ")
                    if row is not None:
                        yield Raw(number, text.n_bytes, row)
            done += 1

    reading.share = lambda: done / max(1, len(files))
    yield from _blocks(rows())


def _whole(lines: Lines) -> Raw:
    """All of a file up to the limit."""
    pieces: list[bytes] = []
    while sum(map(len, pieces)) <= MAX_ROW_BYTES and (piece := lines.read(1 << 20)):
        pieces.append(piece)
    content = b"".join(pieces)
    return Raw(1, len(content), content)


def _text_row(number: int, text: Raw, of_file: str) -> Row | BadRow | None:
    """None for white space alone. `of_file` is before what is wrong with a file as a whole."""
    if text.n_bytes > MAX_ROW_BYTES + 1:
        more = "; data.text_unit: line reads each line as a text" if of_file else ""
        return BadRow(number, f"{of_file}{too_large(text.n_bytes)}{more}")
    try:
        value = text.content.decode("utf-8-sig" if of_file else "utf-8")
    except UnicodeDecodeError as error:
        more = "" if of_file else " of the line"
        return BadRow(number, f"{of_file}invalid UTF-8 at byte {error.start}{more}")
    value = value if of_file else value.rstrip("\r\n")
    return Row(number, {"text": value}) if value.strip() else None


READERS = {"jsonl": jsonl_blocks, "json": json_blocks, "csv": csv_blocks, "texts": text_blocks}
"""By kind of file."""


def is_text(path: Path) -> bool:
    """Whether a file is plain text by its name, zipped or not."""
    return path.name.lower().endswith((".txt", ".txt.gz"))


# ---- guesses ----


def _first_line(path: Path, layout: Layout) -> str:
    try:
        with Lines(path, path.name, layout, Reading()) as lines:
            return _text(next(iter(lines)).content)
    except (OSError, EOFError, zlib.error, StopIteration, DataError):
        return ""


def delimiter_of(path: Path, layout: Layout = AS_GUESSED) -> str:
    """What separates the columns of a CSV file: a comma, or what its first line has instead."""
    if ".tsv" in path.suffixes:
        return "\t"
    line = re.sub(r'"[^"]*"', "", _first_line(path, layout))
    found = [mark for mark in ";\t|" if mark in line]
    return found[0] if "," not in line and len(found) == 1 else ","


def spaced_columns(path: Path, layout: Layout) -> list[str]:
    """Names in the first line of a CSV file that begin or end with spaces."""
    line = _first_line(path, layout).rstrip("\r\n")
    names = line.split(layout.separator or delimiter_of(path, layout))
    return [name for name in names if name != name.strip()]


def json_kind(path: Path) -> str:
    """jsonl or json: an array is a document, and a file whose first line is a whole object of
    several lines has one a line, whatever its name is.
    """
    try:
        with Lines(path, path.name, AS_GUESSED, Reading()) as lines:
            some = [line.content for line in itertools.islice(lines, 100)]
    except (OSError, EOFError, zlib.error, DataError):
        some = []
    first, *more = [raw.strip() for raw in some if raw.strip()] or [b""]
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
    """utf-8, utf-16 by its mark, or cp1252 for a file that is no UTF-8 anywhere, in three lines at
    least.
    """
    status = path.stat()
    return _encoding_of(path, status.st_mtime_ns, status.st_size)


@functools.cache
def _encoding_of(path: Path, changed_ns: int, n_bytes: int) -> str:
    n_broken, has_multibyte = 0, False
    opened: Callable[..., IO[bytes]] = gzip.open if path.suffix == ".gz" else open  # type: ignore[assignment]
    try:
        with opened(path, "rb") as file:
            start = file.read(4096)
            if start[:2] in (b"\xff\xfe", b"\xfe\xff") and len(start) % 2 == 0:
                return "utf-16"
            if path.suffix == ".gz":
                return "utf-8"
            file.seek(0)
            for line in iter(lambda: file.readline(1 << 20), b""):
                if line.isascii():
                    continue
                try:
                    line.decode("utf-8")
                    has_multibyte = True
                except UnicodeDecodeError:
                    n_broken += 1
                    has_multibyte |= bool(_MULTIBYTE.search(line))
                    line.decode("cp1252")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return "utf-8"
    return "cp1252" if n_broken >= 3 and not has_multibyte else "utf-8"
