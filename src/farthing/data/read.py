"""Where rows come from: files, folders, addresses and data sets, each a `Source` that can be read
again.

Anything with a scheme is fetched into the cache first, so that hashing and reading see the same
bytes. Folders and Hub names go through `datasets`. Files from elsewhere that would fill the memory
are refused.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from farthing.addresses import is_remote, without_secrets
from farthing.data.arrow import (
    arrow_blocks,
    parquet_blocks,
    refuse_parquet_bomb,
    write_arrow,
)
from farthing.data.blocks import READERS, delimiter_of, encoding_of, json_kind
from farthing.data.fetch import fetch
from farthing.data.rows import (
    AS_GUESSED,
    MAX_ROW_BYTES,
    BadRow,
    Layout,
    Own,
    Row,
    RowBlock,
    too_large,
)
from farthing.errors import DataError
from farthing.storage.files import (
    Warn,
    belongs_to_another,
    bytes_below,
    discard,
    draft_of,
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
MOST_UNPACKED_BYTES, MOST_UNPACKING = 256 << 20, 200
"""What gzip may make of a file from elsewhere: so many bytes, or so many times its own."""


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
        """What its examples follow from."""
        return [self.sha256, self.kind, asdict(self.layout), self.columns]

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

    def blocks(self, most_bytes: int | None = None) -> Iterator[RowBlock]:
        """The rows unparsed, in order. Of a source that is larger than `most_bytes` readers leave
        out parts, evenly where they can. Raises `DataError`.
        """
        n = 0
        try:
            for block in self._read(most_bytes):
                n += len(block.sizes)
                yield block
        except (OSError, EOFError, zlib.error, MemoryError) as error:
            # a disk that fails, a file cut short, a broken gzip
            why = getattr(error, "strerror", None) or str(error)
            what, to_do = f"can't be read any further: {why}", "it is damaged: copy it again"
            if isinstance(error, MemoryError):
                what = "this machine has not enough memory to read it"
                to_do = "write it as .jsonl, one example a line, or use a larger machine"
            raise DataError(what, where=f"{self.name}:{n + 1}", to_do=to_do) from error

    def _read(self, most_bytes: int | None) -> Iterator[RowBlock]:
        if self.kind == "arrow":
            return arrow_blocks(self.paths)
        (path,) = self.paths
        if self.kind == "parquet":
            return parquet_blocks(path, self.name, most_bytes)
        return READERS[self.kind](path, self.name, self.layout, most_bytes)


def open_sources(
    names: tuple[str, ...],
    *,
    cache_dir: Path,
    split: str,
    config_name: str | None = None,
    progress: Progress = lambda what, done, total: None,
    warn: Warn = lambda text: None,
    own: tuple[Own, ...] = (),
    layout: Layout = AS_GUESSED,
) -> list[Source]:
    """Resolve paths, URLs, folders and Hub names. Hashes every byte. Raises `DataError` that names
    what is missing.

    `own` has the keys of each of `names` alone.
    `progress(what, bytes done, bytes in all or None)` is called every few megabytes, `warn` with
    what is left out.
    """
    found = []
    for name, said in zip(names, own or (Own(),) * len(names), strict=True):
        place = place_of(name)
        if place in ("folder", "hub"):
            of = said.split or split, said.name or config_name
            source = _open_dataset(name, *of, cache_dir, warn)
        else:
            path, shown = Path(name), None
            if place == "remote":
                path, shown = fetch(name, cache_dir, progress, warn), without_secrets(name)
                _refuse_bomb(path, shown)
            source = _hashed(file_source(path, layout, shown), progress, warn)
        found.append(replace(source, columns=said.columns, weight=said.weight))
    return found


def file_source(path: Path, layout: Layout = AS_GUESSED, shown: str | None = None) -> Source:
    """A file, or a folder of text files, whose content is not hashed. Raises `DataError`."""
    shown = short_name(str(path)) if shown is None else shown
    try:
        kind = "texts" if is_text_folder(path) else _kind_of_file(path, shown)
        if kind in ("json", "jsonl") and not layout.encoding:
            kind = json_kind(path)
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}", where=shown) from error
    if kind == "jsonl":
        layout = replace(layout, field=None)
    elif ending_of(path) == ".tsv" and not layout.separator:
        layout = replace(layout, separator="\t")
    return Source(shown, "", kind, (path,), layout)


def _hashed(source: Source, progress: Progress, warn: Warn) -> Source:
    """The source with its identity, after what is read otherwise than the name says was told."""
    (path,), shown, kind, layout = source.paths, source.name, source.kind, source.layout
    if path.is_dir():
        return replace(source, sha256=folder_sha256(path, ""))
    if kind == "csv" and not layout.separator and (mark := delimiter_of(path, layout)) not in ",\t":
        warn(f"{shown}: its columns are read as separated by `{mark}`")
    is_guessed = kind != "parquet" and not layout.encoding
    try:
        if is_guessed and (encoding := encoding_of(path)) != "utf-8":
            warn(f"{shown}: it is not UTF-8, and is read as {encoding}")
        if kind in ("json", "jsonl") and KINDS[ending_of(path)] != kind:
            is_document = "a document" if kind == "json" else "one object a line"
            warn(f"{shown}: it is read as {is_document}")
        n_bytes = path.stat().st_size
        sha256 = sha256_of(path, lambda done: progress(f"reading {shown}", done, n_bytes))
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}", where=shown) from error
    return replace(source, sha256=sha256)


def place_of(name: str) -> Literal["file", "remote", "folder", "hub"]:
    """What data of a name is: a file or folder of text files, an address of a file, a data set in a
    folder here, or one on the Hub.
    """
    path = Path(name)
    if is_remote(name):
        return "remote"
    if path.is_dir():
        return "file" if is_text_folder(path) else "folder"
    return "file" if path.exists() or path.is_absolute() else "hub"


def say_names(names: Sequence[str]) -> str:
    """The names of sources: of many the first and the last."""
    if len(names) <= 4:
        return ", ".join(names)
    return f"{len(names):,} files, {names[0]} to {names[-1]}"


def is_text_folder(path: Path) -> bool:
    """Whether a folder holds text files and no other data: each file is a document."""
    if not path.is_dir():
        return False
    kinds = {KINDS.get(ending_of(file)) for file in files_below(path)} - {None}
    return kinds == {"texts"}


def ending_of(path: Path) -> str:
    """The ending that tells the kind of a file, zipped or not."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _kind_of_file(path: Path, shown: str) -> str:
    """jsonl, json, csv or parquet. Raises `OSError`, and `DataError` when there is no such file, or
    nothing in it that can be read.
    """
    kind = KINDS.get(ending_of(path))
    if path.is_symlink() and not path.exists():
        what = f"a link to {os.readlink(path)}, and no file is there"
        raise DataError(what, where=shown, to_do="correct the link, or name the file itself")
    if not path.exists():
        folder = path.parent
        near = difflib.get_close_matches(path.name, os.listdir(folder) if folder.is_dir() else [])
        to_do = f"did you mean {folder / near[0]}?" if near else "check the path in `data:`"
        raise DataError("no such file", where=shown, to_do=to_do)
    if not path.is_file():
        what = "a pipe or a device, not a file"
        raise DataError(what, where=shown, to_do="copy its content to a file, and name that")
    if kind is None:
        to_do = f"use one of {', '.join(sorted(KINDS))}; a .txt file is one document"
        raise DataError("unknown kind of data file", where=shown, to_do=to_do)
    if path.stat().st_size == 0:
        raise DataError("the file is empty", where=shown, to_do="check how it was written")
    return kind


def short_name(name: str) -> str:
    """A local path as people write it: relative to here when it is below here."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name


def _open_dataset(
    name: str, split: str, config_name: str | None, cache_dir: Path, warn: Warn
) -> Source:
    """A Hub data set or a folder in a layout that `datasets` knows. No loading script is
    ever run.
    """
    folder, shown = Path(name), short_name(name)
    if folder.is_dir():
        _refuse_leading_out(folder)
        for path in files_below(folder):
            _refuse_large_rows(path, short_name(str(path)))
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
    content = folder_sha256(folder, f"{config_name}/{split}") if folder.is_dir() else ""
    cache = own_folder(cache_dir / "datasets", warn) / content[:32]
    if cache.exists() and any(belongs_to_another(path) for path in (cache, *cache.rglob("*"))):
        discard(cache)
    try:
        builder = datasets.load_dataset_builder(name, config_name, cache_dir=str(cache))
        if not content and not Path(builder.cache_dir).exists():
            _refuse_large_rows_on_hub(name, builder)
        if content and hasattr(builder.config, "keep_default_na"):
            _read_as_texts(builder.config)
        builder.download_and_prepare()
        data = builder.as_dataset(split=split)
    except (
        ValueError,
        OSError,
        RuntimeError,
        csv.Error,
        datasets.exceptions.DatasetsError,
    ) as error:
        reason: BaseException = error
        if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__:
            reason = error.__cause__
        what = (str(reason).strip().splitlines() or [type(error).__name__])[0][:300]
        to_do = "check `train_split`, `eval_split` and `dataset_config_name`"
        if what.startswith(("Couldn't cast", "Schema at index")):
            what = "its files have different columns, or one column has values of several kinds"
            to_do = "name each file: data.train: [a.csv, b.csv], or {path: a.csv, columns: ...}"
        if isinstance(error, OSError) and not folder.exists():
            what = f"neither a local file nor a data set that can be reached ({what})"
            to_do = (
                "check the name, or the network; a local path needs its file ending (.jsonl ...)"
            )
        raise DataError(what, where=shown, to_do=to_do) from error
    if len(data) == 0:
        raise DataError(f"split `{split}` is empty", where=shown, to_do="choose another split")
    version = f"{name}/{config_name}/{split}/{data._fingerprint}"
    sha256 = content or hashlib.sha256(version.encode()).hexdigest()
    return Source(f"{shown}[{split}]", sha256, "arrow", _arrow_files(data, cache, sha256))


def _read_as_texts(config: Any) -> None:
    """Have `datasets` read the cells of CSV files as a file alone is read: as texts."""
    names = set[str]()
    for path in (path for paths in config.data_files.values() for path in paths):
        opened: Any = gzip.open if path.endswith(".gz") else open
        if Path(path).is_file():
            with opened(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
                names.update(next(csv.reader(file, delimiter=config.sep), []))
    config.converters = dict.fromkeys(names, str)
    config.keep_default_na = False


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


def folder_sha256(folder: Path, of: str) -> str:
    """Identity of a folder: every file's name and bytes, and `of` a data set its configuration and
    split.
    """
    digest = hashlib.sha256(of.encode())
    for path in files_below(folder):
        digest.update(f"{path.relative_to(folder)}:{sha256_of(path)}".encode())
    return digest.hexdigest()


# ---- files from elsewhere ----


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


def _refuse_bomb(path: Path, name: str) -> None:
    """Refuse a file that unpacks beyond measure. Raises `DataError`."""
    if ending_of(path) == ".parquet":
        refuse_parquet_bomb(path, name)
    if path.suffix != ".gz":
        return
    n_bytes, most = 0, max(MOST_UNPACKED_BYTES, MOST_UNPACKING * path.stat().st_size)
    try:
        with gzip.open(path) as file:
            while (piece := file.read(1 << 20)) and n_bytes <= most:
                n_bytes += len(piece)
    except (OSError, EOFError, zlib.error):
        return  # its reader says where it is damaged
    if n_bytes > most:
        raise DataError(
            f"it unpacks from {say_bytes(path.stat().st_size)} to more than {say_bytes(most)}",
            where=name,
            to_do="check where it comes from; if you trust it, fetch and unpack it yourself",
        )


def _refuse_large_rows(path: Path, name: str) -> None:
    """Refuse a file of a data set of which a row would fill the memory of `datasets`. Raises
    `DataError`.
    """
    if KINDS.get(ending_of(path)) not in ("parquet", "jsonl", "csv") or not path.stat().st_size:
        return
    _refuse_bomb(path, name)
    for block in file_source(path, shown=name).blocks():
        if (most := int(block.sizes.max())) > MAX_ROW_BYTES + 1:
            to_do = "take it out, or cut it into rows that can be learned"
            raise DataError(too_large(most), where=name, to_do=to_do)


def _refuse_large_rows_on_hub(name: str, builder: Any) -> None:
    """The files are then in the Hub's cache, where the builder of `datasets` finds them."""
    from datasets.utils.file_utils import cached_path

    for url in (each for urls in (builder.config.data_files or {}).values() for each in urls):
        shown = f"{name}/{url.partition('@')[2].partition('/')[2] or url}"
        _refuse_large_rows(Path(cached_path(url)), shown)
