"""Commits of a run in a store: what each names, and taking one back onto a disk.

    data/00000005-3f2a.../PATH             under a prefix of its own for every upload, never
    overwritten
    data/.../log.parts/000007              the log in pieces: those that earlier commits have are
    not sent again
    commits/00000005-000003-00000042.json  epoch, number and step; created last: without it nothing
    of it exists

A commit names every file that an empty machine needs, with size and sha256. Newest is the latest
epoch's highest number: what a machine did that had lost the run never wins. Checksums find
accidents, not those who can write to the store.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from farthing.errors import DiskFullError, RunChangedError, RunDamagedError
from farthing.run.accounts import WRITES, accounts_of, as_line, merge, read_ledger
from farthing.run.folder import (
    CHECKPOINT_NAME,
    CHECKPOINTS,
    JOB,
    LEDGER,
    LOG,
    MODEL,
    PLAN,
    RECEIPT,
    RUN,
    SCHEDULE,
    SEARCH_LOG,
    SETTINGS,
    mend,
    run_id_of,
    saves_in,
)
from farthing.storage.files import (
    DamagedFileError,
    Json,
    StoredFile,
    check_file,
    discard,
    draft_of,
    make_private,
    refuse_other,
    sweep_drafts,
    unseal,
    write_text,
)
from farthing.storage.objects import Garbled, NoSuchObject, Store, TooLarge
from farthing.units import say_bytes

SCHEMA = 2  # 1: the log is sent whole
LOG_PARTS = "log.parts"
"""Of the log: pieces that end with a line, of which all but the last never change."""
SMALL = (
    *(JOB, RUN, PLAN, SETTINGS, SCHEDULE, LOG, LEDGER, RECEIPT, SEARCH_LOG),
    "measurements.json",
)
_COMMIT = re.compile(r"commits/(\d{8})-(\d{6})-(\d{8,})\.json")


Objects = dict[tuple[str, str], str]
"""(path, sha256) -> the object that holds it."""


class Commit(NamedTuple):
    """The name of a commit."""

    epoch: int
    number: int
    step: int

    @property
    def key(self) -> str:
        return f"commits/{self.epoch:08d}-{self.number:06d}-{self.step:08d}.json"


def list_commits(store: Store) -> list[Commit]:
    """Every commit, newest first. Raises `StoreError`."""
    matches = (_COMMIT.fullmatch(key) for key in store.list("commits/"))
    return sorted((Commit(int(m[1]), int(m[2]), int(m[3])) for m in matches if m), reverse=True)


def read_commit(store: Store, commit: Commit) -> Json:
    """Its form checked. Raises `DamagedFileError`, `RunChangedError`, `StoreError`."""
    try:
        manifest = unseal(store.get(commit.key).decode("utf-8"), "its commit")
    except (UnicodeDecodeError, TooLarge) as error:
        raise DamagedFileError(f"its commit can't be read: {error}") from error
    refuse_other(manifest, SCHEMA, store.name)
    if [manifest.get(key) for key in Commit._fields] != list(commit):
        raise DamagedFileError("its commit is that of another copy")
    if not isinstance(manifest.get("files"), list):
        raise DamagedFileError("its commit lists no files")
    for entry in manifest["files"]:
        path, name = (
            (entry.get("path"), entry.get("object")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(path, str) or not _may_be_written(path):
            raise DamagedFileError(f"its commit names a file outside the run: {path!r}")
        if not isinstance(name, str) or not name.startswith("data/") or ".." in name.split("/"):
            raise DamagedFileError(f"its commit names an object outside its own: {name!r}")
        if (
            not isinstance(entry.get("size"), int)
            or entry["size"] < 0
            or not isinstance(entry.get("sha256"), str)
        ):
            raise DamagedFileError(f"its commit gives no size and sha256 for {path}")
    paths = [entry["path"] for entry in manifest["files"]]
    folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    if len(set(paths)) < len(paths) or folders & set(paths):
        raise DamagedFileError("its commit names a file twice, or as a folder too")
    return manifest


def objects_of(manifest: Json) -> Objects:
    """Which object holds which file of a commit."""
    return {(entry["path"], entry["sha256"]): entry["object"] for entry in manifest["files"]}


# ---- onto a disk ----


def take_small(store: Store, folder: Path, words: list[Json]) -> bool:
    """Bring what the store's newest whole commit says of its run into `folder`, without checkpoints
    and model, to look at.

    What is there already is not fetched again; the ledger is joined with `words`, see
    `join_ledgers`. False where the store holds no run. Raises `StoreError`, `RunChangedError`.
    """
    for commit in list_commits(store):
        try:
            manifest = read_commit(store, commit)
        except (DamagedFileError, NoSuchObject, Garbled):
            continue
        files = manifest["files"]
        wanted = [
            each
            for each in files
            if each["path"] in SMALL or each["path"].startswith(f"{LOG_PARTS}/")
        ]
        _fetch_all(
            store, folder, [each for each in wanted if not is_here(folder / each["path"], each)]
        )
        _join_log(folder)
        join_ledgers(folder / LEDGER, folder / LEDGER, words)
        return True
    if words:
        join_ledgers(folder / LEDGER, folder / LEDGER, words)
    return bool(words)


def take_newest(
    store: Store,
    folder: Path,
    commits: list[Commit],
    words: list[Json],
    warn: Callable[[str], None],
) -> tuple[Commit, int, Objects]:
    """Bring the newest commit whose own checkpoint is whole into a run folder, else the newest
    other checkpoint that is.

    Returns (commit, step of its newest checkpoint, the objects that were found whole). What else of
    it is lost is named in a warning and done without; the ledger is joined with `words`, see
    `join_ledgers`. Raises `RunDamagedError` when no checkpoint is whole, `RunChangedError` when the
    folder holds another run, `DiskFullError`, `StoreError`.
    """
    readable: list[tuple[Commit, Json]] = []
    for commit in commits:
        try:
            manifest = read_commit(store, commit)
        except (DamagedFileError, NoSuchObject, Garbled) as error:
            warn(
                f"the copy of step {commit.step} in the store is damaged ({error}); trying the one"
                " before"
            )
            continue
        theirs = manifest.get(
            "run_id"
        )  # None where the file that says so was damaged when it was sent
        if theirs is not None and (ours := run_id_of(folder)) is not None and ours != theirs:
            raise RunChangedError(
                f"the store holds another run than {folder}",
                where=f"output_store: {store.name}",
                to_do="give this job another output_store, or the store's run an empty output_dir",
            )
        readable.append((commit, manifest))
    for needs_its_step in (True, False):
        for at, (commit, manifest) in enumerate(readable):
            older = [other for _, other in readable[at + 1 :]]
            try:
                step, objects = _install(
                    store, folder, manifest, older, words, warn, needs_its_step=needs_its_step
                )
                return commit, step, objects
            except (DamagedFileError, NoSuchObject, Garbled) as error:
                if needs_its_step:
                    warn(
                        f"the copy of step {commit.step} in the store is damaged ({error}); trying"
                        " the one before"
                    )
    raise RunDamagedError(
        f"none of the {len(commits)} commits in the store is whole",
        where=store.name,
        to_do="bring one back, or start from step 0 with --allow-restart",
    )


def _install(
    store: Store,
    folder: Path,
    manifest: Json,
    older: list[Json],
    words: list[Json],
    warn: Callable[[str], None],
    *,
    needs_its_step: bool,
) -> tuple[int, Objects]:
    """Fetch every file, verify it, and only then put in place what is whole.

    A checkpoint or model with a file that is lost is left out. A lost small file is taken from
    `older` commits, where they have it; those that decide the result come from the checkpoint, see
    `run_folder.mend`. Raises `DamagedFileError` when there would be no step to continue from.
    """
    n_bytes = sum(entry["size"] for entry in manifest["files"])
    if shutil.disk_usage(folder).free < 2 * n_bytes:
        raise DiskFullError(
            f"the copy in the store takes {say_bytes(n_bytes)}, and twice as much must be free",
            where=str(folder),
            to_do="make room, or set output_dir to a disk that has it",
        )
    sweep_drafts(folder)
    draft = make_private(draft_of(folder / "restore"))
    try:
        lost = _fetch_all(store, draft, manifest["files"])
        steps = {save.step for save in saves_in(draft / CHECKPOINTS)}
        own = manifest["step"]
        if lost and own > 0 and (not steps or (needs_its_step and own not in steps)):
            raise DamagedFileError(next(iter(lost.values())))
        mend(draft, lambda text: None)
        small = {path for path in lost if path in SMALL or path.startswith(f"{LOG_PARTS}/")}
        for path in [
            path
            for path in lost
            if path in small - {SETTINGS, SCHEDULE} and not (draft / path).exists()
        ]:
            spares = [entry for other in older for entry in other["files"] if entry["path"] == path]
            if any(not _fetch_all(store, draft, [spare]) for spare in spares):
                lost[path] += "; an older copy is used"
        _join_log(draft)
        if run_id_of(draft) is None or manifest.get("run_id") not in (None, run_id_of(draft)):
            raise DamagedFileError(lost.get(RUN, f"{RUN} is of another run"))
        for path, why in lost.items():
            warn(f"{path} of the copy of step {own} in the store is lost ({why}); the rest is used")
        _put_in_place(draft, folder, manifest["step"], words, warn)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    whole = [entry for entry in manifest["files"] if _unit(entry["path"]) not in lost]
    return max((step for step in steps if step <= own), default=own), objects_of({"files": whole})


def _fetch_all(store: Store, draft: Path, entries: list[StoredFile]) -> dict[str, str]:
    """Fetch and verify the files of a commit into `draft`; what is lost, by path, and why. A
    checkpoint or a model is there whole or not at all. Raises `StoreError`."""
    lost: dict[str, str] = {}
    for entry in entries:
        unit = _unit(entry["path"])
        if unit in lost:
            continue
        path = draft / entry["path"]
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            fetch_whole(store, entry, path)
        except (DamagedFileError, NoSuchObject, Garbled) as error:
            lost[unit] = str(error)
            gone = draft / unit
            if gone.is_dir():
                shutil.rmtree(gone)
            gone.unlink(missing_ok=True)
    return lost


def fetch_whole(store: Store, entry: StoredFile, path: Path) -> None:
    """Raises `DamagedFileError`, `NoSuchObject`, `Garbled`, `StoreError`."""
    store.fetch(entry["object"], path, entry["size"])
    check_file(path, entry, entry["path"])


def is_here(path: Path, entry: StoredFile) -> bool:
    """Whether a file holds what an entry says."""
    with contextlib.suppress(DamagedFileError):
        check_file(path, entry, entry["path"])
        return True
    return False


def _unit(path: str) -> str:
    """What has to be whole together: a checkpoint, the model, or a file by itself."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] in (CHECKPOINTS, LOG_PARTS) else parts[0]


def _join_log(draft: Path) -> None:
    """Put the pieces of a log together again; a lost one leaves out its lines."""
    pieces = sorted((draft / LOG_PARTS).glob("*"))
    if pieces:
        with open(draft / LOG, "wb") as whole:
            for piece in pieces:
                whole.write(piece.read_bytes())


def _put_in_place(
    draft: Path, folder: Path, step: int, words: list[Json], warn: Callable[[str], None]
) -> None:
    """run.json comes last: a kill before leaves a folder that is brought back again."""
    checkpoints = make_private(folder / CHECKPOINTS)
    arrived = [save.folder for save in saves_in(draft / CHECKPOINTS)]
    for here, _, path in saves_in(checkpoints):
        if path.name in [each.name for each in arrived]:
            discard(path)
        elif here >= step:
            warn(f"{path.name} here is not part of the run that the store has: set aside")
            path.rename(path.with_name(f"{path.name}.elsewhere-{uuid.uuid4().hex[:4]}"))
    for path in arrived:
        path.rename(checkpoints / path.name)
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
    if (
        "\\" in path
        or "\0" in path
        or any(part in ("", ".", "..") or len(part) > 200 for part in parts)
    ):
        return False
    if parts[0] == CHECKPOINTS:
        return len(parts) == 3 and CHECKPOINT_NAME.fullmatch(parts[1]) is not None
    if parts[0] == LOG_PARTS:
        return len(parts) == 2 and re.fullmatch(r"\d{6}", parts[1]) is not None
    return (parts[0] == MODEL and len(parts) > 1) or path in SMALL


# ---- spending ----


def join_ledgers(here: Path, from_store: Path, words: list[Json]) -> None:
    """Write at `here` what the store's ledger, the lease's `words` and the one here know."""
    # what was committed elsewhere is not here
    told = {
        number: replace(account, committed=-1) for number, account in accounts_of(words).items()
    }
    known = merge(read_ledger(from_store).accounts, told)
    with WRITES:
        if joined := merge(known, read_ledger(here).accounts):
            write_text(here, (as_line(joined[number]) for number in sorted(joined)))
