"""Rows from files and data sets, each with the place it came from. A row that can't be read is a
`BadRow`, not a crash.

Local files are read as they are; anything with a scheme is fetched into the cache first, so that
hashing and reading see the same bytes. Folders and Hub names go through `datasets`. Refuses rows
and files that would fill the memory, and to know what the columns mean.
"""

from __future__ import annotations

import csv
import difflib
import functools
import gzip
import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from farthing.addresses import is_remote, without_secrets
from farthing.data.arrow import bytes_of_rows, dataset_rows, open_parquet, parquet_rows
from farthing.data.fetch import fetch
from farthing.data.rows import MAX_ROW_BYTES, BadRow, Own, Reading, Row, RowValue, too_large
from farthing.errors import DataError
from farthing.storage.files import (
    belongs_to_another,
    discard,
    files_below,
    own_folder,
    sha256_of,
)
from farthing.units import say_bytes

Progress = Callable[[str, int, int | None], None]
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "texts",
}
"""Ending -> kind of file. A text file is one document."""
MAX_JSON_BYTES = 2 << 30
_MANY_BYTES, _MOST_UNFOLDING = (
    256 << 20,
    200,
)  # what gzip may make of a file: so many bytes, or so many times its own


@dataclass(frozen=True)
class Source:
    """A file or data set that can be read again: its name for people, its bytes' identity, how to
    open it.
    """

    name: str
    sha256: str
    kind: str
    path: Path | None = None
    dataset: Any = None
    columns: Any = None
    """Its own `data.columns`, where they are not those of all sources."""
    weight: float = 1.0
    """How often each of its examples is learned in an epoch."""

    @property
    def identity(self) -> Any:
        """What its examples follow from: the content, and its own columns where it has any."""
        return self.sha256 if self.columns is None else [self.sha256, self.columns]

    def columns_or(self, others: Any) -> Any:
        """Its own columns, or those of all."""
        return others if self.columns is None else self.columns

    @property
    def n_bytes(self) -> int:
        """Its size, for progress: of the file as it lies, or of the data set's table."""
        if self.path is None:
            return int(self.dataset.data.nbytes)
        files = files_below(self.path) if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files)

    def rows(self, reading: Reading | None = None) -> Iterator[Row | BadRow]:
        """All rows, in order; `reading` is told how far it has got. Raises `DataError`."""
        reading = reading or Reading()
        line = 0
        try:
            for row in self._read(reading):
                line = row.line
                yield row
        except (
            OSError,
            EOFError,
            zlib.error,
        ) as error:  # a disk that fails, a file cut short, a broken gzip
            why = getattr(error, "strerror", None) or str(error)
            raise DataError(
                f"can't be read any further: {why}",
                where=f"{self.name}:{line + 1}",
                to_do="it is damaged: copy it again",
            ) from error
        except MemoryError as error:
            raise DataError(
                "this machine has not enough memory to read it",
                where=f"{self.name}:{line + 1}",
                to_do=(
                    "write it as .jsonl with one example a line, or use a machine with more memory"
                ),
            ) from error

    def _read(self, reading: Reading) -> Iterator[Row | BadRow]:
        if self.kind == "dataset":
            return dataset_rows(self.dataset, reading)
        assert self.path is not None
        read = {
            "jsonl": _jsonl,
            "json": _json,
            "csv": _csv,
            "parquet": parquet_rows,
            "texts": _texts,
        }[self.kind]
        return read(self.path, self.name, reading)


def open_sources(
    names: tuple[str, ...],
    *,
    cache_dir: Path,
    split: str,
    config_name: str | None = None,
    progress: Progress = lambda what, done, total: None,
    warn: Callable[[str], None] = lambda text: None,
    own: tuple[Own, ...] = (),
) -> list[Source]:
    """Resolve paths, URLs, folders and Hub names. Hashes every byte. Raises `DataError` that names
    what is missing.

    `own` has what is said of each of `names` alone.
    `progress(what, bytes done, bytes in all or None)` is called every few megabytes, `warn` with
    what is left out.
    """
    found = []
    for name, said in zip(names, own or (Own(),) * len(names), strict=True):
        if is_remote(name):
            source = _of_file(
                fetch(name, cache_dir, progress, warn), without_secrets(name), progress, warn
            )
        elif is_text_folder(Path(name)):
            source = Source(short_name(name), folder_sha256(Path(name), ""), "texts", Path(name))
        elif is_dataset(name):
            source = _open_dataset(
                name, said.split or split, said.name or config_name, cache_dir, warn
            )
        else:
            source = _of_file(Path(name), short_name(name), progress, warn)
        found.append(replace(source, columns=said.columns, weight=said.weight))
    return found


def _of_file(path: Path, shown: str, progress: Progress, warn: Callable[[str], None]) -> Source:
    kind = kind_of_file(path, shown)
    if kind == "csv" and (mark := delimiter_of(path)) not in (",", "\t"):
        warn(f"{shown}: its columns are read as separated by `{mark}`")
    if kind in ("csv", "jsonl", "json") and encoding_of(path) != "utf-8":
        warn(f"{shown}: it is not UTF-8, and is read as {encoding_of(path)}")
    if kind == "csv" and (spaced := _spaced_columns(path, shown)):
        warn(
            f"{shown}: spaces around the names of columns are left out:"
            f" {', '.join(repr(name) for name in spaced[:5])}"
        )
    try:
        n_bytes = path.stat().st_size
        return Source(
            shown,
            sha256_of(path, lambda done: progress(f"reading {shown}", done, n_bytes)),
            kind,
            path,
        )
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}", where=shown) from error


def _spaced_columns(path: Path, shown: str) -> list[str]:
    """Names in the first line of a CSV file that begin or end with spaces."""
    with _Bytes(path, shown, Reading()) as file:
        line = file.readline(MAX_ROW_BYTES).decode("utf-8-sig", errors="replace").rstrip("\r\n")
    return [name for name in line.split(delimiter_of(path)) if name != name.strip()]


def is_dataset(name: str) -> bool:
    """Whether a name that is no address means a data set: a folder here, or on the Hub."""
    path = Path(name)
    return path.is_dir() or (not path.exists() and not path.is_absolute())


def is_text_folder(path: Path) -> bool:
    """Whether a folder holds text files and no other data: each file is a document."""
    if not path.is_dir():
        return False
    kinds = {KINDS.get(file.suffix.lower()) for file in files_below(path)} - {None}
    return kinds == {"texts"}


def kind_of_file(path: Path, shown: str) -> str:
    """jsonl, json, csv or parquet. Raises `DataError` when there is no such file, or nothing in it
    that can be read.
    """
    if not path.exists():
        near = difflib.get_close_matches(
            path.name, os.listdir(path.parent) if path.parent.is_dir() else [], n=1
        )
        to_do = f"did you mean {path.parent / near[0]}?" if near else "check the path in `data:`"
        raise DataError("no such file", where=shown, to_do=to_do)
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = KINDS.get(
        suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else (suffixes or [""])[-1]
    )
    if kind is None:
        to_do = f"use one of {', '.join(sorted(KINDS))}; a .txt file is one document"
        raise DataError("unknown kind of data file", where=shown, to_do=to_do)
    try:
        if path.stat().st_size == 0:
            raise DataError("the file is empty", where=shown, to_do="check how it was written")
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}", where=shown) from error
    return kind


def short_name(name: str) -> str:
    """A local path as people write it: relative to here when it is below here."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name


def _open_dataset(
    name: str, split: str, config_name: str | None, cache_dir: Path, warn: Callable[[str], None]
) -> Source:
    """A Hub data set or a folder in a layout that `datasets` knows. No loading script is ever run."""  # noqa: E501
    if Path(name).is_dir():
        _refuse_leading_out(Path(name))
        for path in sorted(Path(name).rglob("*")):
            _refuse_unfolding(path, short_name(str(path)))
    shown = short_name(name) if Path(name).is_absolute() else name
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "no local file, and data sets are read by the package `datasets`, which is not"
            " installed",
            where=shown,
            to_do="check the path, or: pip install 'farthing[datasets]'",
        ) from error
    datasets.disable_progress_bars()
    # `datasets` goes by file times, we by bytes: each content has a cache of its own
    content = folder_sha256(Path(name), split) if Path(name).is_dir() else ""
    cache = own_folder(cache_dir / "datasets", warn) / content[:32]
    if cache.exists() and any(belongs_to_another(path) for path in (cache, *cache.rglob("*"))):
        discard(cache)
    try:
        builder = datasets.load_dataset_builder(name, config_name, cache_dir=str(cache))
        if not content and not Path(builder.cache_dir).exists():
            _refuse_unfolding_on_hub(name, builder)
        builder.download_and_prepare()
        data = builder.as_dataset(split=split)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (
            error.__cause__
            if isinstance(error, datasets.exceptions.DatasetGenerationError)
            else error
        )
        said = str(reason or error).strip().splitlines()
        message = said[0][:300] if said else type(error).__name__
        if not Path(name).exists() and isinstance(
            error, ConnectionError | FileNotFoundError | OSError
        ):
            raise DataError(
                f"neither a local file nor a data set that can be reached ({message})",
                where=shown,
                to_do=(
                    "check the name, or the network; a local path needs its file ending (.jsonl,"
                    " .csv ...)"
                ),
            ) from error
        raise DataError(
            message,
            where=shown,
            to_do="check `train_split`, `eval_split` and `dataset_config_name`",
        ) from error
    if len(data) == 0:
        raise DataError(f"split `{split}` is empty", where=shown, to_do="choose another split")
    version = f"{name}/{config_name}/{split}/{data._fingerprint}"
    sha256 = content or hashlib.sha256(version.encode()).hexdigest()
    return Source(f"{shown}[{split}]", sha256, "dataset", dataset=data)


def _refuse_leading_out(folder: Path) -> None:
    """Refuse links in a folder to what is not of it: who made the folder would choose a file of its
    reader's to learn.

    The Hub's cache keeps the files of a snapshot in `blobs` beside it. Raises `DataError`.
    """
    homes = [folder.resolve()]
    if folder.parent.name == "snapshots":
        homes.append((folder.parent.parent / "blobs").resolve())
    for path in folder.rglob("*"):
        if path.is_symlink() and not any(path.resolve().is_relative_to(home) for home in homes):
            raise DataError(
                "a link that leads out of the data set's folder",
                where=str(path),
                to_do="remove it, or put a copy of what it leads to in its place",
            )


def _refuse_unfolding_on_hub(name: str, builder: Any) -> None:
    """As in a folder. The files are then in the Hub's cache, where the builder of `datasets` finds
    them.
    """
    from datasets.utils.file_utils import cached_path

    for urls in (builder.config.data_files or {}).values():
        for url in urls:
            _refuse_unfolding(
                Path(cached_path(url)), f"{name}/{url.partition('@')[2].partition('/')[2] or url}"
            )


def _refuse_unfolding(path: Path, name: str) -> None:
    """Refuse a file of a data set of which a row would fill the memory of `datasets`. Raises
    `DataError`.
    """
    kind = KINDS.get((path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix).lower())
    if kind is None or not path.is_file() or path.stat().st_size == 0:
        return
    large: list[int] = []
    if kind == "parquet":
        for batch in open_parquet(path, name).iter_batches(batch_size=256):
            large = large or [int(n) for n in bytes_of_rows(batch) if n > MAX_ROW_BYTES][:1]
    elif kind in ("jsonl", "csv"):
        with _Bytes(path, name, Reading()) as file:
            while raw := file.readline(MAX_ROW_BYTES + 1):
                if len(raw) > MAX_ROW_BYTES:
                    large = large or [file.skip_line(raw)]
                file.check()
    if large:
        raise DataError(
            too_large(large[0]),
            where=name,
            to_do="take it out, or cut it into rows that can be learned",
        )


def folder_sha256(folder: Path, split: str) -> str:
    """Identity of a data set in a folder: the split and every file's name and bytes."""
    digest = hashlib.sha256(split.encode())
    for path in files_below(folder):
        digest.update(f"{path.relative_to(folder)}:{sha256_of(path)}".encode())
    return digest.hexdigest()


# ---- one reader for each kind ----


class _Bytes:
    """A file that may be gzipped, and how far it has been read. Refuses one that unfolds beyond all
    measure.
    """

    def __init__(self, path: Path, name: str, reading: Reading) -> None:
        self.name, self._raw = name, open(path, "rb")  # noqa: SIM115 - closed by __exit__
        self.is_zipped = path.suffix == ".gz"
        self.file: IO[bytes] = gzip.GzipFile(fileobj=self._raw) if self.is_zipped else self._raw  # type: ignore[assignment]
        self._n_bytes = max(1, path.stat().st_size)
        self._encoding = "utf-8" if self.is_zipped else encoding_of(path)
        reading.share = self._share
        if self.file.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):  # type: ignore[attr-defined]
            self.__exit__()
            raise DataError(
                "is written in UTF-16", where=name, to_do="save it as UTF-8 (in Excel: CSV UTF-8)"
            )

    def __enter__(self) -> _Bytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self._raw.close()

    def _share(self) -> float:
        return 1.0 if self._raw.closed else min(1.0, self._raw.tell() / self._n_bytes)

    def readline(self, n_bytes: int) -> bytes:
        """A line, or as much of it as this, in UTF-8."""
        return self._utf8(self.file.readline(n_bytes))

    def read(self, n_bytes: int) -> bytes:
        """As many bytes, in UTF-8."""
        return self._utf8(self.file.read(n_bytes))

    def _utf8(self, raw: bytes) -> bytes:
        return raw if self._encoding == "utf-8" else raw.decode(self._encoding).encode()

    def skip_line(self, raw: bytes) -> int:
        """Pass over what is left of a line of which `raw` was read; bytes of all of it."""
        n_bytes = len(raw)
        while raw and not raw.endswith(b"\n"):
            raw = self.file.readline(1 << 20)
            n_bytes += len(raw)
            self.check()
        return n_bytes

    def check(self) -> None:
        """To be called now and then. Raises `DataError`."""
        n_bytes = self.file.tell() if self.is_zipped else 0
        if n_bytes > _MANY_BYTES and n_bytes > _MOST_UNFOLDING * self._n_bytes:
            raise DataError(
                f"it unpacks from {say_bytes(self._n_bytes)} to more than {say_bytes(n_bytes)}",
                where=self.name,
                to_do=(
                    "check where it comes from; if you trust it, unpack it and use it without .gz"
                ),
            )


def _jsonl(path: Path, name: str, reading: Reading) -> Iterator[Row | BadRow]:
    with _Bytes(path, name, reading) as file:
        line = 0
        while raw := file.readline(MAX_ROW_BYTES + 1):
            line += 1
            if line % 1024 == 0:
                file.check()
            if len(raw) > MAX_ROW_BYTES and not raw.endswith(b"\n"):
                yield BadRow(line, too_large(file.skip_line(raw)))
                continue
            if line == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield json_row(raw, line)


def json_row(raw: bytes, line: int) -> Row | BadRow:
    """The row that one line of a JSONL file holds."""
    try:
        value = _DECODER.decode(raw.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(line, f"invalid UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        column = f" at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        return BadRow(line, f"invalid JSON{column}: {why}")
    return Row(line, value) if isinstance(value, dict) else BadRow(line, "not a JSON object")


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


def _json(path: Path, name: str, reading: Reading) -> Iterator[Row | BadRow]:
    """A JSON array of objects, or one object whose only list is the data (`{"data": [...]}`)."""
    pieces, n_bytes = [], 0
    with _Bytes(path, name, Reading()) as file:
        while n_bytes <= MAX_JSON_BYTES and (piece := file.read(1 << 20)):
            pieces.append(piece)
            n_bytes += len(piece)
            file.check()
    raw = b"".join(pieces)
    pieces.clear()
    if n_bytes > MAX_JSON_BYTES:
        raise DataError(
            "too large for one JSON document",
            where=name,
            to_do="write it as .jsonl, one object a line",
        )
    try:
        values = _DECODER.decode(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"invalid UTF-8 at byte {error.start}", where=name, to_do="write it as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"invalid JSON: {error.msg}",
            where=f"{name}:{error.lineno}:{error.colno}",
            to_do="correct it; a file with one object a line is called .jsonl",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"invalid JSON: {error}", where=name, to_do="check how it was written"
        ) from error
    if isinstance(values, dict):
        lists = [value for value in values.values() if isinstance(value, list)]
        values = lists[0] if len(lists) == 1 else values
    if not isinstance(values, list):
        paths = _lists_in(values) if isinstance(values, dict) else []
        raise DataError(
            "not an array of objects",
            where=name,
            to_do=(
                f"its lists are {', '.join(paths)}: write the one that holds the rows to a file of"
                " its own, [{...}, {...}] or .jsonl"
                if paths
                else "write [{...}, {...}], or .jsonl"
            ),
        )
    index = 0
    reading.share = lambda: index / max(1, len(values))
    for index, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            yield BadRow(index, "not a JSON object")
        elif n_bytes > MAX_ROW_BYTES and (n := n_characters(value)) > MAX_ROW_BYTES:
            yield BadRow(index, too_large(n))
        else:
            yield Row(index, value)


def _lists_in(value: RowValue, before: str = "", depth: int = 3) -> list[str]:
    """Lists within an object, by their path, with how many items each has."""
    found = []
    for name, inner in value.items():
        if isinstance(inner, list):
            found.append(f"`{before}{name}` ({len(inner)} items)")
        elif isinstance(inner, dict) and depth:
            found += _lists_in(inner, f"{before}{name}.", depth - 1)
    return found[:8]


def n_characters(value: Any) -> int:
    """Characters of all texts within a value, and one for everything else."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(n_characters(part) for part in parts)


class _RowTooLarge(csv.Error):
    """A CSV row beyond the limit was passed over."""


class _CsvLines:
    """The lines of a CSV file as text. A row that has got too large is passed over to its end,
    across quoted lines.
    """

    def __init__(self, file: _Bytes) -> None:
        self._file, self.n_lines = file, 0
        self._n_bytes, self._is_quoted = 0, False

    def begin_row(self) -> None:
        """What comes next is a new row."""
        self._n_bytes, self._is_quoted = 0, False

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        raw = self._line()
        if self.n_lines == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if self._n_bytes > MAX_ROW_BYTES:
            while raw and (self._is_quoted or not raw.endswith(b"\n")):
                raw = self._line()
            raise _RowTooLarge(too_large(self._n_bytes))
        if not raw:
            raise StopIteration
        # surrogateescape keeps reading past bytes that are not UTF-8; the row they are in is then
        # named
        return raw.decode("utf-8", errors="surrogateescape")

    def _line(self) -> bytes:
        raw = self._file.readline(MAX_ROW_BYTES + 1)
        self.n_lines += raw.endswith(b"\n")
        self._n_bytes += len(raw)
        self._is_quoted ^= raw.count(b'"') % 2 == 1
        if self.n_lines % 1024 == 0:
            self._file.check()
        return raw


def _csv(path: Path, name: str, reading: Reading) -> Iterator[Row | BadRow]:
    csv.field_size_limit(min(sys.maxsize, MAX_ROW_BYTES))
    with _Bytes(path, name, reading) as file:
        lines = _CsvLines(file)
        # strict: a quote that is never closed is an error, not a field with the rest of the file in
        # it
        reader = csv.reader(lines, delimiter=delimiter_of(path), strict=True)
        header = csv_header(reader, name)
        while True:
            line = lines.n_lines + 1
            lines.begin_row()
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(
                    line, str(error) if isinstance(error, _RowTooLarge) else f"invalid CSV: {error}"
                )
                continue
            if fields:
                yield csv_row(fields, header, line)


@functools.cache
def _first_line(path: Path, changed_ns: int) -> str:
    opened: Callable[..., IO[bytes]] = gzip.open if path.suffix == ".gz" else open  # type: ignore[assignment]
    try:
        with opened(path, "rb") as file:
            return file.readline(MAX_ROW_BYTES).decode("utf-8-sig", errors="replace")
    except (OSError, EOFError, zlib.error):
        return ""


def delimiter_of(path: Path) -> str:
    """What separates the columns of a CSV file: a comma, or what its first line has instead."""
    if ".tsv" in path.suffixes:
        return "\t"
    line = re.sub(r'"[^"]*"', "", _first_line(path, path.stat().st_mtime_ns))
    found = [mark for mark in ";\t|" if mark in line]
    return found[0] if "," not in line and len(found) == 1 else ","


_MULTIBYTE = re.compile(rb"[\xc2-\xf4][\x80-\xbf]{1,3}")


def encoding_of(path: Path) -> str:
    """utf-8, or cp1252 for a file that is no UTF-8 anywhere, in three lines at least."""
    return _encoding_of(path, path.stat().st_mtime_ns, path.stat().st_size)


@functools.cache
def _encoding_of(path: Path, changed_ns: int, n_bytes: int) -> str:
    n_broken, has_multibyte = 0, False
    try:
        with open(path, "rb") as file:
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
    except (OSError, UnicodeDecodeError):
        return "utf-8"
    return "cp1252" if n_broken >= 3 and not has_multibyte else "utf-8"


def _texts(path: Path, name: str, reading: Reading) -> Iterator[Row | BadRow]:
    """Each text file as one row, in the order of names; files of white space are passed over."""
    files = files_below(path) if path.is_dir() else [path]
    files = [file for file in files if KINDS.get(file.suffix.lower()) == "texts"]
    done = 0
    reading.share = lambda: done / max(1, len(files))
    for done, file in enumerate(files, start=1):
        if file.stat().st_size > MAX_ROW_BYTES:
            yield BadRow(done, f"{file.name}: {too_large(file.stat().st_size)}")
            continue
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            yield BadRow(done, f"{file.name}: invalid UTF-8 at byte {error.start}")
            continue
        if text.strip():
            yield Row(done, {"text": text})


def csv_header(reader: Iterator[list[str]], name: str) -> list[str]:
    """The names of a CSV file's columns, from its first line. Raises `DataError`."""
    where, to_do = f"{name}:1", "the first line of a CSV file names its columns, each once"
    try:
        header = [column.strip() for column in next(reader, ())]
    except csv.Error as error:
        raise DataError(
            f"the header line is invalid CSV: {error}", where=where, to_do=to_do
        ) from error
    if not any(header):
        raise DataError("no header line", where=where, to_do=to_do)
    if len(set(header)) < len(header):
        twice = next(column for column in header if header.count(column) > 1)
        raise DataError(f"column `{twice}` appears twice in the header", where=where, to_do=to_do)
    return header


def csv_row(fields: list[str], header: list[str], line: int) -> Row | BadRow:
    """The row of a line whose bytes that are no UTF-8 have become lone surrogates."""
    if len(fields) != len(header):
        return BadRow(line, f"{len(fields)} fields, the header has {len(header)}")
    if any(re.search("[\udc80-\udcff]", field) for field in fields):
        return BadRow(line, "invalid UTF-8")
    return Row(line, dict(zip(header, fields, strict=True)))
