"""Commits of a run in a store: what each names, and taking one back onto a disk.

    data/00000005-3f2a.../PATH             under a prefix of its own for every upload, never overwritten
    commits/00000005-000003-00000042.json  epoch, number and step; created last: without it nothing of it exists

A commit names every file that an empty machine needs, with size and sha256. Newest is the latest epoch's highest number:
what a machine did that had lost the run never wins. Refuses to parse a byte before its checksum was checked, and to
write anywhere but where a run folder has files. Checksums find accidents, not those who can write to the store.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from farthing.durability.accounts import Account, as_line, merge, read_ledger, take_in
from farthing.durability.files import (
    Damaged,
    discard,
    make_private,
    parse_json,
    sha256_of,
    sweep_drafts,
    unseal,
    write_text,
)
from farthing.durability.object_store import Garbled, NoSuchObject, Store, TooLarge
from farthing.durability.run_folder import CHECKPOINTS, JOB, LEDGER, LOG, MODEL, PLAN, RECEIPT, RUN, SCHEDULE
from farthing.errors import NoSpace, RunChanged, RunDamaged
from farthing.units import say_bytes

SCHEMA = 1
SMALL = (JOB, RUN, PLAN, SCHEDULE, LOG, LEDGER, RECEIPT, "measurements.json")
_COMMIT = re.compile(r"commits/(\d{8})-(\d{6})-(\d{8,})\.json")
_CHECKPOINT = re.compile(r"step-\d{8,}-\d{4,}")
_DRAFT = ".draft-"

Objects = dict[tuple[str, str], str]
"""(path, sha256) -> the object that holds it."""


class Commit(NamedTuple):
    """The name of a commit."""

    epoch: int
    number: int
    step: int

    @property
    def key(self) -> str:
        """Its object's."""
        return f"commits/{self.epoch:08d}-{self.number:06d}-{self.step:08d}.json"


def list_commits(store: Store) -> list[Commit]:
    """Every commit, newest first. Raises `StoreFault`."""
    matches = (_COMMIT.fullmatch(key) for key in store.list("commits/"))
    return sorted((Commit(int(m[1]), int(m[2]), int(m[3])) for m in matches if m), reverse=True)


def read_commit(store: Store, commit: Commit) -> dict[str, Any]:
    """What a commit names, its form checked. Raises `Damaged`, `RunChanged`, `StoreFault`."""
    try:
        manifest = unseal(store.get(commit.key).decode("utf-8"), "its commit")
    except (UnicodeDecodeError, TooLarge) as error:
        raise Damaged(f"its commit can't be read: {error}") from error
    if isinstance(manifest.get("schema"), int) and manifest["schema"] > SCHEMA:
        raise RunChanged(
            f"written by a newer farthing (schema {manifest['schema']}, this one reads up to {SCHEMA})",
            where=store.name,
            to_do="pip install --upgrade farthing",
        )
    if [manifest.get(key) for key in Commit._fields] != list(commit):
        raise Damaged("its commit is another one's")
    if not isinstance(manifest.get("files"), list):
        raise Damaged("its commit lists no files")
    for entry in manifest["files"]:
        path, name = (entry.get("path"), entry.get("object")) if isinstance(entry, dict) else (None, None)
        if not isinstance(path, str) or not _may_be_written(path):
            raise Damaged(f"its commit names a file outside the run: {path!r}")
        if not isinstance(name, str) or not name.startswith("data/") or ".." in name.split("/"):
            raise Damaged(f"its commit names an object outside its own: {name!r}")
        if not isinstance(entry.get("size"), int) or entry["size"] < 0 or not isinstance(entry.get("sha256"), str):
            raise Damaged(f"its commit gives no size and sha256 for {path}")
    paths = [entry["path"] for entry in manifest["files"]]
    folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    if len(set(paths)) < len(paths) or folders & set(paths):
        raise Damaged("its commit names a file twice, or as a folder too")
    return manifest


def objects_of(manifest: dict[str, Any]) -> Objects:
    """Which object holds which file of a commit."""
    return {(entry["path"], entry["sha256"]): entry["object"] for entry in manifest["files"]}


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder holds a committed checkpoint, whole or not."""
    checkpoints = folder / CHECKPOINTS
    return checkpoints.is_dir() and any(_CHECKPOINT.fullmatch(path.name) for path in checkpoints.iterdir())


def run_id_of(folder: Path) -> str | None:
    """The id of the run in a folder; None where it can't be read."""
    try:
        return str(parse_json((folder / RUN).read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ---- onto a disk ----


def take_newest(
    store: Store, folder: Path, commits: list[Commit], words: list[dict[str, Any]], warn: Callable[[str], None]
) -> tuple[Commit, Objects]:
    """Bring the newest whole commit into a run folder; the ledger is joined with `words`, see `join_ledgers`.

    Damaged ones are said aloud. Raises `RunDamaged` when none is whole, `RunChanged` when the folder holds another run,
    `NoSpace`, `StoreFault`.
    """
    for commit in commits:
        try:
            manifest = read_commit(store, commit)
            if (ours := run_id_of(folder)) is not None and ours != manifest.get("run_id"):
                raise RunChanged(
                    f"the store holds another run than {folder}",
                    where=f"output_store: {store.name}",
                    to_do="give this job another output_store, or the store's run an empty output_dir",
                )
            _install(store, folder, manifest, words, warn)
            return commit, objects_of(manifest)
        except (Damaged, NoSuchObject, Garbled) as error:
            warn(f"the copy of step {commit.step} in the store is damaged ({error}); trying the one before")
    raise RunDamaged(
        f"none of the {len(commits)} commits in the store is whole",
        where=store.name,
        to_do="bring one back, or start from zero on purpose with --allow-restart",
    )


def _install(
    store: Store, folder: Path, manifest: dict[str, Any], words: list[dict[str, Any]], warn: Callable[[str], None]
) -> None:
    """Fetch every file, verify it, and only then put all of them in place."""
    n_bytes = sum(entry["size"] for entry in manifest["files"])
    if shutil.disk_usage(folder).free < 2 * n_bytes:
        raise NoSpace(
            f"the copy in the store takes {say_bytes(n_bytes)}, and there is no room for it and the next",
            where=str(folder),
            to_do="make room, or set output_dir to a disk that has it",
        )
    sweep_drafts(folder)
    draft = make_private(folder / f"restore{_DRAFT}{uuid.uuid4().hex[:8]}")
    try:
        for entry in manifest["files"]:
            path = draft / entry["path"]
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            store.fetch(entry["object"], path, entry["size"])
            size = path.stat().st_size
            if size != entry["size"]:
                raise Damaged(f"{entry['path']} has {size} bytes, {entry['size']} were sent")
            if sha256_of(path) != entry["sha256"]:
                raise Damaged(f"{entry['path']} differs from what was sent (sha256)")
        _put_in_place(draft, folder, manifest["step"], words, warn)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _put_in_place(
    draft: Path, folder: Path, step: int, words: list[dict[str, Any]], warn: Callable[[str], None]
) -> None:
    """Checkpoints and model first, run.json last: a kill in between leaves a folder that is brought back again."""
    checkpoints = make_private(folder / CHECKPOINTS)
    arrived = {path.name: path for path in (draft / CHECKPOINTS).glob("*")}
    for path in [path for path in checkpoints.iterdir() if _CHECKPOINT.fullmatch(path.name)]:
        if path.name in arrived:
            discard(path)
        elif int(path.name.split("-")[1]) >= step:
            warn(f"{path.name} here is not what the run went on from elsewhere: set aside")
            path.rename(path.with_name(f"{path.name}.elsewhere-{uuid.uuid4().hex[:4]}"))
    for name, path in arrived.items():
        path.rename(checkpoints / name)
    if (draft / MODEL).is_dir():
        if (folder / MODEL).exists():
            discard(folder / MODEL)
        (draft / MODEL).rename(folder / MODEL)
    join_ledgers(folder / LEDGER, draft / LEDGER, words)
    for name in (*(name for name in SMALL if name not in (RUN, LEDGER)), RUN):
        if (draft / name).exists():
            os.replace(draft / name, folder / name)


def _may_be_written(path: str) -> bool:
    """Whether a path of a commit is one that a run folder has."""
    parts = path.split("/")
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") or len(part) > 200 for part in parts):
        return False
    if parts[0] == CHECKPOINTS:
        return len(parts) == 3 and _CHECKPOINT.fullmatch(parts[1]) is not None
    return (parts[0] == MODEL and len(parts) > 1) or path in SMALL


# ---- spending ----


def join_ledgers(here: Path, from_store: Path, words: list[dict[str, Any]]) -> None:
    """Write at `here` what the store's ledger, the lease's `words` and the ledger here know together, see `merge`."""
    told: dict[int, Account] = {}
    for row in words:
        take_in(told, row)
    told = {number: replace(account, committed=-1) for number, account in told.items()}  # it was, elsewhere
    joined = merge(merge(read_ledger(from_store).accounts, told), read_ledger(here).accounts)
    if joined:
        write_text(here, "".join(as_line(joined[number]) + "\n" for number in sorted(joined)))
