"""Rows from files and data sets, each with the place it came from. A row that can't be read is a `BadRow`, not a crash.

Local files are read as they are; anything with a scheme comes through fsspec into the cache first, so that hashing and
reading see the same bytes. Folders and Hub names go through `datasets`. Refuses to know what the columns mean.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

import fsspec

from farthing.addresses import is_remote, without_secrets
from farthing.durability.files import make_private, sha256_of
from farthing.errors import DataError
from farthing.units import say_bytes

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
MAX_ROW_BYTES = 10_000_000
MAX_JSON_BYTES = 2 << 30


class Row(NamedTuple):
    """One usable row: where it stands (line, or index for files without lines; from 1) and its columns."""

    line: int
    value: dict[str, Any]


class BadRow(NamedTuple):
    """One unusable row and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class Source:
    """A file or data set that can be read again: its name for people, its bytes' identity, how to open it."""

    name: str
    sha256: str
    kind: str
    path: Path | None = None
    dataset: Any = None

    def rows(self) -> Iterator[Row | BadRow]:
        """All rows, in order."""
        if self.kind == "dataset":
            for index, value in enumerate(self.dataset, start=1):
                yield Row(index, value)
            return
        assert self.path is not None
        read = {"jsonl": _jsonl, "json": _json, "csv": _csv, "parquet": _parquet}[self.kind]
        line = 0
        try:
            for row in read(self.path, self.name):
                line = row.line
                yield row
        except (OSError, EOFError, zlib.error) as error:  # a disk that fails, a file cut short, a broken gzip
            why = getattr(error, "strerror", None) or str(error)
            raise DataError(
                f"can't be read any further: {why}", where=f"{self.name}:{line + 1}", to_do="bring the file back whole"
            ) from error


def open_sources(
    names: tuple[str, ...], *, cache_dir: Path, split: str, config_name: str | None = None
) -> list[Source]:
    """Resolve paths, URLs, folders and Hub names. Hashes every byte. Raises `DataError` that names what is missing."""
    return [_open_source(name, cache_dir, split, config_name) for name in names]


def _open_source(name: str, cache_dir: Path, split: str, config_name: str | None) -> Source:
    if is_remote(name):
        path, shown = _fetch(name, cache_dir), without_secrets(name)
    elif is_dataset(name):
        return _open_dataset(name, split, config_name, cache_dir)
    else:
        path, shown = Path(name), short_name(name)
    kind = kind_of_file(path, shown)
    try:
        return Source(shown, sha256_of(path), kind, path)
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}", where=shown) from error


def is_dataset(name: str) -> bool:
    """Whether a name that is no address means a data set: a folder here, or on the Hub."""
    path = Path(name)
    return path.is_dir() or (not path.exists() and not path.is_absolute())


def kind_of_file(path: Path, shown: str) -> str:
    """jsonl, json, csv or parquet. Raises `DataError` when there is no such file, or nothing in it that can be read."""
    if not path.exists():
        near = difflib.get_close_matches(path.name, os.listdir(path.parent) if path.parent.is_dir() else [], n=1)
        to_do = f"did you mean {path.parent / near[0]}?" if near else "check the path in `data:`"
        raise DataError("no such file", where=shown, to_do=to_do)
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = KINDS.get(suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else (suffixes or [""])[-1])
    if kind is None:
        raise DataError("unknown kind of data file", where=shown, to_do=f"use one of {', '.join(sorted(KINDS))}")
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


def _fetch(url: str, cache_dir: Path) -> Path:
    """Copy a remote file into the cache, never stale: the copy is named by URL and version (ETag and the like).

    Without a version it is fetched each time and named by its content.
    """
    shown = without_secrets(url)
    try:
        filesystem, remote = fsspec.core.url_to_fs(url)
        version = _version(filesystem, remote)
        folder = make_private(cache_dir / "downloads")
        endings = "".join(Path(urlsplit(shown).path).suffixes[-2:])

        def named(version: str) -> Path:
            # the query is part of what is asked for; user and password are not
            asked = re.sub(r"://[^/?#]*@", "://", url)
            return folder / (hashlib.sha256(f"{asked}\n{version}".encode()).hexdigest()[:32] + endings)

        path = named(version) if version else None
        if path is None or not path.exists():
            draft = folder / f"{uuid.uuid4().hex}.draft-"
            try:
                with filesystem.open(remote, "rb") as source, open(draft, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                path = path or named(sha256_of(draft))
                os.replace(draft, path)
            finally:
                draft.unlink(missing_ok=True)
        return path
    except ImportError as error:
        scheme = url.split(":", 1)[0]
        extra = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}.get(scheme, "")
        to_do = f"pip install 'farthing[{extra}]'" if extra else f"install the fsspec package for {scheme}://"
        raise DataError(f"{scheme}:// needs a package that is not installed", where=shown, to_do=to_do) from error
    except FileNotFoundError as error:
        raise DataError("no such file", where=shown, to_do="check the address in `data:`") from error
    except Exception as error:  # every fsspec backend has errors of its own
        what = f"can't be read ({type(error).__name__}: {_redacted(str(error), url)})"
        raise DataError(what, where=shown, to_do="check the address, the network and the credentials") from error


def _version(filesystem: Any, remote: str) -> str:
    """What changes when the file does; empty for a web server that gives no ETag."""
    if "http" in filesystem.protocol or "https" in filesystem.protocol:
        return str(filesystem.info(remote).get("ETag") or "")
    return str(filesystem.ukey(remote))


def _redacted(text: str, url: str) -> str:
    """An error's text without what the address keeps secret, in whatever form the text repeats it."""
    text = text.replace(url, without_secrets(url))
    for secret in re.findall(r"://([^/?#]*)@", url):
        for part in sorted({secret, *secret.split(":", 1)[1:]}, key=len, reverse=True):
            text = text.replace(part, "***") if part else text
    return re.sub(r"(https?://[^\s'\"?]*)\?[^\s'\"]*", r"\1", text)[:300]


def _open_dataset(name: str, split: str, config_name: str | None, cache_dir: Path) -> Source:
    """A Hub data set or a folder in a layout that `datasets` knows. No loading script is ever run."""
    import datasets

    datasets.disable_progress_bars()
    if Path(name).is_dir():
        _refuse_leading_out(Path(name))
    shown = short_name(name) if Path(name).is_absolute() else name
    # `datasets` goes by file times, we by bytes: each content has a cache of its own
    content = folder_sha256(Path(name), split) if Path(name).is_dir() else ""
    cache = make_private(cache_dir / "datasets") / content[:32]
    try:
        data = datasets.load_dataset(name, config_name, split=split, cache_dir=str(cache))
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        said = str(reason or error).strip().splitlines()
        message = said[0][:300] if said else type(error).__name__
        if not Path(name).exists() and isinstance(error, ConnectionError | FileNotFoundError | OSError):
            raise DataError(
                f"neither a local file nor a data set that can be reached ({message})",
                where=shown,
                to_do="check the name, or the network; a local path needs its file ending (.jsonl, .csv ...)",
            ) from error
        raise DataError(
            message, where=shown, to_do="check `train_split`, `eval_split` and `dataset_config_name`"
        ) from error
    if len(data) == 0:
        raise DataError(f"split `{split}` is empty", where=shown, to_do="choose another split")
    version = f"{name}/{config_name}/{split}/{data._fingerprint}"
    sha256 = content or hashlib.sha256(version.encode()).hexdigest()
    return Source(f"{shown}[{split}]", sha256, "dataset", dataset=data)


def _refuse_leading_out(folder: Path) -> None:
    """Refuse links in a folder to what is not of it: who made the folder would choose a file of its reader's to learn.

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


def folder_sha256(folder: Path, split: str) -> str:
    """Identity of a data set in a folder: the split and every file's name and bytes."""
    digest = hashlib.sha256(split.encode())
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder)}:{sha256_of(path)}".encode())
    return digest.hexdigest()


# ---- one reader for each kind ----


def _open_bytes(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def _jsonl(path: Path, name: str) -> Iterator[Row | BadRow]:
    with _open_bytes(path) as file:
        line = 0
        while raw := file.readline(MAX_ROW_BYTES + 1):
            line += 1
            if len(raw) > MAX_ROW_BYTES and not raw.endswith(b"\n"):
                size = len(raw)
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(1 << 20)
                    size += len(raw)
                yield BadRow(line, f"a row of {say_bytes(size)}; the limit is {say_bytes(MAX_ROW_BYTES)}")
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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two equal ones JSON would silently keep the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"`{next(name for name in names if names.count(name) > 1)}` stands twice in one object")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)  # made once: `json.loads` would make one for each row


def _json(path: Path, name: str) -> Iterator[Row | BadRow]:
    """A JSON array of objects, or one object whose only list is the data (`{"data": [...]}`)."""
    with _open_bytes(path) as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise DataError("too large for one JSON document", where=name, to_do="write it as .jsonl, one object a line")
    try:
        values = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"invalid UTF-8 at byte {error.start}", where=name, to_do="write it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"invalid JSON: {error.msg}",
            where=f"{name}:{error.lineno}:{error.colno}",
            to_do="mend it; a file with one object a line is called .jsonl",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"invalid JSON: {error}", where=name, to_do="check how it was written") from error
    if isinstance(values, dict):
        lists = [value for value in values.values() if isinstance(value, list)]
        values = lists[0] if len(lists) == 1 else values
    if not isinstance(values, list):
        raise DataError("not an array of objects", where=name, to_do="write [{...}, {...}], or .jsonl")
    for index, value in enumerate(values, start=1):
        yield Row(index, value) if isinstance(value, dict) else BadRow(index, "not a JSON object")


def _csv(path: Path, name: str) -> Iterator[Row | BadRow]:
    csv.field_size_limit(min(sys.maxsize, MAX_ROW_BYTES))
    with _open_bytes(path) as file:
        # surrogateescape keeps reading past bytes that are not UTF-8; the row they are in is then named
        pieces = iter(lambda: file.readline(MAX_ROW_BYTES + 1), b"")
        text = (raw.decode("utf-8", errors="surrogateescape") for raw in pieces)
        text = (line.removeprefix("\ufeff") if index == 0 else line for index, line in enumerate(text))
        # strict: a quote that is never closed is an error, not a field with the rest of the file in it
        reader = csv.reader(text, delimiter="\t" if ".tsv" in path.suffixes else ",", strict=True)
        to_do = "the first line of a CSV file names its columns, each once"
        try:
            header = next(reader, None)
        except csv.Error as error:
            raise DataError(f"the header line is invalid CSV: {error}", where=f"{name}:1", to_do=to_do) from error
        if not header or not any(header):
            raise DataError("no header line", where=f"{name}:1", to_do=to_do)
        if len(set(header)) < len(header):
            twice = next(column for column in header if header.count(column) > 1)
            raise DataError(f"column `{twice}` stands twice in the header", where=f"{name}:1", to_do=to_do)
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(line, f"invalid CSV: {error}")
                continue
            if not fields:
                continue
            if len(fields) != len(header):
                yield BadRow(line, f"{len(fields)} fields, the header has {len(header)}")
            elif any(re.search("[\udc80-\udcff]", field) for field in fields):
                yield BadRow(line, "invalid UTF-8")
            else:
                yield Row(line, dict(zip(header, fields, strict=True)))


def _parquet(path: Path, name: str) -> Iterator[Row | BadRow]:
    import pyarrow
    import pyarrow.parquet

    index = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for value in batch.to_pylist():
                index += 1
                yield Row(index, value)
    except (pyarrow.ArrowException, OSError) as error:
        why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"not a readable Parquet file: {why}", where=f"{name}:{index + 1}", to_do="bring the file back whole"
        ) from error
