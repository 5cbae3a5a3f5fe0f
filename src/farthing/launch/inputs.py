"""Local data, models and tokenized data on their way to a machine, by content: what the store has
is not sent again.

    inputs/sha256-HEX               a file, whatever its name
    launch/LAUNCH/inputs.json       where each goes on the machine, with size and sha256

The job that travels names the files where they will be. Data tokenized here goes along, into the
cache that training looks in first, so that no second of a rented machine is spent on that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from farthing.config.job import Job
from farthing.errors import InputError, StoreUnavailableError
from farthing.run.commits import fetch_whole, is_here
from farthing.storage.files import DamagedFileError, Json, seal, sha256_of
from farthing.storage.objects import NoSuchObjectError, Store, StoreError, get_sealed

INPUTS, CACHE = "inputs", "cache"


@dataclass(frozen=True)
class Packed:
    """What of a job is only here, and the paths it gets there."""

    files: tuple[tuple[Path, str], ...] = ()
    """(file here, path there)."""
    values: dict[str, Json] = field(default_factory=dict)
    """Sections of the job as they read there."""

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path, _ in self.files)


def pack(job: Job) -> Packed:
    """Every local file that the job needs. Raises `InputError` for one that is not there."""
    files: dict[str, Path] = {}

    def take(name: str | None, place: str) -> str | None:
        """The path there of something here; None for what is not here: a Hub name, an address."""
        if not name or not name.startswith("/"):
            return None
        here = Path(name)
        if not here.exists():
            raise InputError(
                "no such file or folder", where=name, to_do="check the path in the job"
            )
        to = f"{INPUTS}/{place}"
        if here.is_dir():
            files.update(
                {f"{to}/{path.relative_to(here).as_posix()}": path for path in _files_in(here)}
            )
            return f"./{to}"
        files[f"{to}/{here.name}"] = here
        return f"./{to}/{here.name}"

    values: dict[str, Json] = {"model": {}, "data": {}}
    model, data = job.model, job.data
    if moved := take(model.model_name_or_path, "model"):
        values["model"]["model_name_or_path"] = moved
    place = "model" if model.tokenizer_name_or_path == model.model_name_or_path else "tokenizer"
    if moved := take(model.tokenizer_name_or_path, place):
        values["model"]["tokenizer_name_or_path"] = moved
    for key, names in (("train", data.train), ("eval", data.eval)):
        moved_all = [take(name, f"{key}-{at}") or name for at, name in enumerate(names)]
        if moved_all:
            values["data"][key] = moved_all
    if moved := take(data.chat_template, "template"):
        values["data"]["chat_template"] = moved
    return Packed(tuple((path, to) for to, path in files.items()), values)


def _files_in(folder: Path) -> Iterator[Path]:
    """Files of a folder, links to files included, without what is hidden."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root) / name for name in sorted(names) if not name.startswith("."))


def with_token_sets(packed: Packed, folders: list[Path]) -> Packed:
    """The same with token sets, which stand in a folder `tokens` of the cache."""
    more = [
        (path, f"{CACHE}/tokens/{folder.name}/{path.relative_to(folder)}")
        for folder in folders
        for path in _files_in(folder)
    ]
    return Packed((*packed.files, *more), packed.values)


def inputs_key(launch_id: str) -> str:
    return f"launch/{launch_id}/inputs.json"


def send_inputs(store: Store, packed: Packed, key: str) -> int:
    """Bring to the store what it lacks, and the list last; bytes sent.

    Raises `StoreUnavailableError`, `InputError` for a file that can't be read.
    """
    sent, entries = 0, []
    try:
        there = store.list(f"{INPUTS}/")
        for path, to in packed.files:
            try:
                digest, size = sha256_of(path), path.stat().st_size
            except OSError as error:
                raise InputError(
                    f"can't be read: {error.strerror}",
                    where=str(path),
                    to_do="check its permissions",
                ) from None
            name = f"{INPUTS}/sha256-{digest}"
            if name not in there or there[name].n_bytes != size:
                store.put(name, path)
                sent += size
            entries.append({"path": to, "object": name, "size": size, "sha256": digest})
        store.put(key, seal({"kind": "farthing inputs", "files": entries}).encode())
    except StoreError as error:
        raise StoreUnavailableError(
            f"the store does not take the inputs ({error})", to_do="try again when it does"
        ) from error
    return sent


def fetch_inputs(store: Store, key: str, folder: Path) -> None:
    """Bring the inputs of a launch into `folder`, each file verified; what is there already is not
    fetched again.

    Raises `StoreUnavailableError` where the store does not give them, `InputError` for a list that
    is none.
    """
    try:
        listed = get_sealed(store, key)["files"]
        for entry in listed:
            path = folder / _safe(str(entry["path"]))
            if is_here(path, entry):
                continue
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = path.with_name(f"{path.name}.draft")
            try:
                fetch_whole(store, entry, draft)
            except DamagedFileError:
                store.remove([entry["object"]])  # the next launch sends it again
                raise
            os.replace(draft, path)
    except (NoSuchObjectError, DamagedFileError, KeyError, TypeError) as error:
        raise InputError(
            f"the inputs in the store are not whole ({error})",
            where=key,
            to_do="run `farthing launch` again: it sends them",
        ) from error
    except StoreError as error:
        raise StoreUnavailableError(
            f"the store does not give the inputs ({error})", to_do="another machine may do better"
        ) from error


def _safe(path: str) -> PurePosixPath:
    """A path that stays within the folders of inputs and cache. Raises `DamagedFileError`."""
    parts = PurePosixPath(path)
    if (
        parts.is_absolute()
        or ".." in parts.parts
        or parts.parts[:1] not in ((INPUTS,), (CACHE,))
        or "\0" in path
    ):
        raise DamagedFileError(f"a path outside the inputs: {path!r}")
    return parts
