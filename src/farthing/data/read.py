"""Where rows come from: files, folders, addresses and data sets, each a `Source` that can be read
again.

Anything with a scheme is fetched into the cache first, so that hashing and reading see the same
bytes. Folders and Hub names go through `datasets`. Rows and files that would fill the memory are
refused.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from farthing.addresses import is_remote, without_secrets
from farthing.data import blocks
from farthing.data.arrow import (
    arrow_blocks,
    bytes_of_rows,
    open_parquet,
    parquet_blocks,
    write_arrow,
)
from farthing.data.blocks import Lines, delimiter_of, encoding_of, json_kind
from farthing.data.fetch import fetch
from farthing.data.rows import (
    AS_GUESSED,
    MAX_ROW_BYTES,
    BadRow,
    Block,
    Layout,
    Own,
    Reading,
    Row,
    too_large,
)
from farthing.errors import DataError
from farthing.storage.files import (
    belongs_to_another,
    bytes_below,
    discard,
    draft_of,
    files_below,
    own_folder,
    sha256_of,
)

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


@dataclass(frozen=True)
class Source:
    """A file or data set that can be read again: its name for people, its bytes' identity, how to
    open it.
    """

    name: str
    sha256: str
    kind: str
    paths: tuple[Path, ...] = ()
    """One file or folder of text files; of a data set its Arrow files."""
    layout: Layout = AS_GUESSED
    columns: Any = None
    """Its own `data.columns`, where they are not those of all sources."""
    weight: float = 1.0
    """How often each of its examples is learned in an epoch."""

    @property
    def identity(self) -> Any:
        """What its examples follow from: the content, its layout and its own columns where it has
        any.
        """
        layout = {key: value for key, value in asdict(self.layout).items() if value is not None}
        more = [layout] if self.layout != AS_GUESSED else []
        more += [] if self.columns is None else [self.columns]
        return [self.sha256, *more] if more else self.sha256

    @property
    def n_bytes(self) -> int:
        """Its size, for progress."""
        return sum(
            bytes_below(each) if each.is_dir() else each.stat().st_size for each in self.paths
        )

    def rows(self) -> Iterator[Row | BadRow]:
        """All rows, in order. Raises `DataError`."""
        for block in self.blocks():
            yield from block.rows()

    def blocks(self, reading: Reading | None = None) -> Iterator[Block]:
        """The rows unparsed, in order; `reading` is told how far it has got. Raises `DataError`."""
        reading = reading or Reading()
        n = 0
        try:
            for block in self._read(reading):
                n += len(block.sizes)
                yield block
        except (
            OSError,
            EOFError,
            zlib.error,
        ) as error:  # a disk that fails, a file cut short, a broken gzip
            why = getattr(error, "strerror", None) or str(error)
            raise DataError(
                f"can't be read any further: {why}",
                where=f"{self.name}:{n + 1}",
                to_do="it is damaged: copy it again",
            ) from error
        except MemoryError as error:
            raise DataError(
                "this machine has not enough memory to read it",
                where=f"{self.name}:{n + 1}",
                to_do=(
                    "write it as .jsonl with one example a line, or use a machine with more memory"
                ),
            ) from error

    def _read(self, reading: Reading) -> Iterator[Block]:
        if self.kind == "arrow":
            return arrow_blocks(self.paths, reading)
        (path,) = self.paths
        if self.kind == "parquet":
            return parquet_blocks(path, self.name, reading)
        return blocks.READERS[self.kind](path, self.name, self.layout, reading)


def open_sources(
    names: tuple[str, ...],
    *,
    cache_dir: Path,
    split: str,
    config_name: str | None = None,
    progress: Progress = lambda what, done, total: None,
    warn: Callable[[str], None] = lambda text: None,
    own: tuple[Own, ...] = (),
    layout: Layout = AS_GUESSED,
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
            path = fetch(name, cache_dir, progress, warn)
            source = file_source(path, layout, without_secrets(name))
        elif is_dataset(name) and not is_text_folder(Path(name)):
            source = _open_dataset(
                name, said.split or split, said.name or config_name, cache_dir, warn
            )
        else:
            source = file_source(Path(name), layout)
        if source.kind != "arrow":
            for text in _guesses(source):
                warn(text)
            source = replace(source, sha256=_content_sha256(source, progress))
        found.append(replace(source, columns=said.columns, weight=said.weight))
    return found


def file_source(path: Path, layout: Layout = AS_GUESSED, shown: str | None = None) -> Source:
    """A file, or a folder of text files, whose content is not hashed. Raises `DataError`."""
    shown = short_name(str(path)) if shown is None else shown
    kind = "texts" if is_text_folder(path) else kind_of_file(path, shown)
    try:
        if kind in ("json", "jsonl") and not layout.encoding:
            kind = json_kind(path)
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}", where=shown) from error
    if kind == "jsonl":
        layout = replace(layout, field=None)
    return Source(shown, "", kind, (path,), layout)


def _guesses(source: Source) -> list[str]:
    """What is read otherwise than the name of a file says."""
    (path,), shown, kind, layout = source.paths, source.name, source.kind, source.layout
    if path.is_dir():
        return []
    said = []
    mark = delimiter_of(path, layout) if kind == "csv" and not layout.separator else ","
    if mark not in (",", "\t"):
        said.append(f"{shown}: its columns are read as separated by `{mark}`")
    is_guessed = kind != "parquet" and not layout.encoding
    if is_guessed and (encoding := encoding_of(path)) != "utf-8":
        said.append(f"{shown}: it is not UTF-8, and is read as {encoding}")
    if kind in ("json", "jsonl") and KINDS[_ending(path)] != kind:
        is_document = "a document" if kind == "json" else "one object a line"
        said.append(f"{shown}: it is read as {is_document}")
    if kind == "csv" and (spaced := blocks.spaced_columns(path, layout)):
        said.append(
            f"{shown}: spaces around the names of columns are left out:"
            f" {', '.join(repr(name) for name in spaced[:5])}"
        )
    return said


def _content_sha256(source: Source, progress: Progress) -> str:
    (path,), shown = source.paths, source.name
    if path.is_dir():
        return folder_sha256(path, "")
    try:
        n_bytes = path.stat().st_size
        return sha256_of(path, lambda done: progress(f"reading {shown}", done, n_bytes))
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}", where=shown) from error


def is_dataset(name: str) -> bool:
    """Whether a name that is no address means a data set: a folder here, or on the Hub."""
    path = Path(name)
    return path.is_dir() or (not path.exists() and not path.is_absolute())


def say_names(names: Sequence[str]) -> str:
    """The names of sources: of many the first and the last."""
    if len(names) <= 4:
        return ", ".join(names)
    return f"{len(names):,} files, {names[0]} to {names[-1]}"


def is_text_folder(path: Path) -> bool:
    """Whether a folder holds text files and no other data: each file is a document."""
    if not path.is_dir():
        return False
    kinds = {KINDS.get(_ending(file)) for file in files_below(path)} - {None}
    return kinds == {"texts"}


def _ending(path: Path) -> str:
    """The ending that tells the kind of a file, zipped or not."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


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
    if not path.is_file() and not path.is_dir():
        what = "a pipe or a device, not a file"
        raise DataError(what, where=shown, to_do="copy its content to a file, and name that")
    kind = KINDS.get(_ending(path))
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
    """A Hub data set or a folder in a layout that `datasets` knows. No loading script is
    ever run.
    """
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
    return Source(f"{shown}[{split}]", sha256, "arrow", _arrow_files(data, cache, sha256))


def _arrow_files(data: Any, cache: Path, sha256: str) -> tuple[Path, ...]:
    """The files of a data set; of a part of them one of its own, made once."""
    files = tuple(Path(each["filename"]) for each in data.cache_files)
    if files and len(data) == sum(type(data).from_file(str(file)).num_rows for file in files):
        return files
    path = cache / f"part-{sha256[:32]}.arrow"
    if not path.exists():
        draft = draft_of(path)
        write_arrow(data, draft)
        os.replace(draft, path)
    return (path,)


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
                to_do="remove it, or replace it with a copy of its target",
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
    kind = KINDS.get(_ending(path))
    if kind is None or not path.is_file() or path.stat().st_size == 0:
        return
    large: list[int] = []
    if kind == "parquet":
        for batch in open_parquet(path, name).iter_batches(batch_size=256):
            large = large or [int(n) for n in bytes_of_rows(batch) if n > MAX_ROW_BYTES][:1]
    elif kind in ("jsonl", "csv"):
        with Lines(path, name, AS_GUESSED, Reading()) as lines:
            large = [line.n_bytes for line in lines if line.n_bytes > MAX_ROW_BYTES + 1][:1]
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
