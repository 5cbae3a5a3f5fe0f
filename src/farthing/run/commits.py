"""Commits of a run in a store: what each names, and taking one back onto a disk.

    data/00000005-3f2a.../PATH             under a prefix of its own for every upload, never
    overwritten
    data/.../log.parts/000007              what the log has grown by since the commit before
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
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from farthing.errors import DiskFullError, RunChangedError, RunDamagedError
from farthing.run.accounts import Account, accounts_of, as_line, merge, read_ledger
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
    Warn,
    check_file,
    discard,
    draft_of,
    entries_of,
    make_private,
    refuse_other,
    set_aside,
    sweep_drafts,
    write_text,
)
from farthing.storage.lease import newest_words
from farthing.storage.objects import NoSuchObjectError, Store, get_sealed, twice_if_damaged
from farthing.units import say_bytes

SCHEMA = 2
LOG_PARTS = "log.parts"
"""Of the log: pieces that end with a line and never change."""
SMALL = (
    *(JOB, RUN, PLAN, SETTINGS, SCHEDULE, LOG, LEDGER, RECEIPT, SEARCH_LOG),
    "measurements.json",
)
_COMMIT = re.compile(r"commits/(\d{8})-(\d{6})-(\d{8,})\.json")
_NAME = r"(?!\.\.?(/|$))[^/\\\0]{1,200}"
_PATH = re.compile(
    rf"{CHECKPOINTS}/{CHECKPOINT_NAME.pattern}/{_NAME}|{LOG_PARTS}/\d{{6}}|{MODEL}(/{_NAME})+"
)
_IS_LOST = (DamagedFileError, NoSuchObjectError)
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
    return sorted((Commit(*map(int, match.groups())) for match in matches if match), reverse=True)


def _in_place_of(store: Store, commit: Commit) -> list[Commit]:
    """The commits for which one was removed while it was read; none where it is still there."""
    commits = list_commits(store)
    return [] if commit in commits else commits


def read_commit(store: Store, commit: Commit) -> Json:
    """Its form checked. Raises `DamagedFileError`, `RunChangedError`, `StoreError`."""
    manifest = get_sealed(store, commit.key, "its commit")
    refuse_other(manifest, SCHEMA, store.name)
    if [manifest.get(key) for key in Commit._fields] != list(commit):
        raise DamagedFileError("its commit is that of another copy")
    entries = entries_of(manifest, StoredFile, "its commit")
    for path in (entry["path"] for entry in entries):
        if path not in SMALL and not _PATH.fullmatch(path):
            raise DamagedFileError(f"its commit names a file outside the run: {path!r}")
    for name in (entry["object"] for entry in entries):
        if not name.startswith("data/") or ".." in name.split("/"):
            raise DamagedFileError(f"its commit names an object outside its own: {name!r}")
    paths = {entry["path"] for entry in entries}
    folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    if len(paths) < len(entries) or folders & paths:
        raise DamagedFileError("its commit names a file twice, or as a folder too")
    return manifest


def objects_of(entries: Iterable[StoredFile]) -> Objects:
    """Which object holds which file of a commit."""
    return {(entry["path"], entry["sha256"]): entry["object"] for entry in entries}


# ---- onto a disk ----


def take_small(store: Store, folder: Path, words: list[Json]) -> bool:
    """Bring what the store's newest whole commit says of its run into `folder`, without checkpoints
    and model, to look at.

    What is there already is not fetched again; the ledger is joined with `words`. False where the
    store holds no run. Raises `StoreError`, `RunChangedError`.
    """
    is_there, commits = bool(words), list_commits(store)
    while commits:
        commit, *older = commits
        try:
            files = read_commit(store, commit)["files"]
            wanted = [
                each for each in files if each["path"] in SMALL or _unit(each["path"]) == LOG_PARTS
            ]
            lost = _fetch_all(
                store, folder, [each for each in wanted if not is_here(folder / each["path"], each)]
            )
        except _IS_LOST:
            lost = None
        if lost != {} and (newer := _in_place_of(store, commit)):
            commits = newer
        elif lost is None:
            commits = older
        else:
            for path in lost:  # an empty file counts as damaged, none would not
                (folder / path).touch()
            _join_log(folder)
            is_there = True
            break
    if is_there:
        join_ledgers(folder / LEDGER, with_words([], words))
    return is_there


def take_run(store: Store, folder: Path, warn: Warn) -> None:
    """Bring the newest commit, if there is one, into a folder that nobody trains in, and what the
    lease knows besides to its ledger. Raises as `take_newest`."""
    if commits := list_commits(store):
        taken = take_newest(store, make_private(folder), commits, warn)
        join_ledgers(folder / LEDGER, with_words(taken.accounts, newest_words(store)))


class Taken(NamedTuple):
    """A commit that is on the disk now."""

    commit: Commit
    step: int
    """Of its newest checkpoint."""
    objects: Objects
    """Those that were found whole."""
    accounts: list[Account]
    """Of its ledger, which the caller has to join with the one here."""


def take_newest(store: Store, folder: Path, commits: list[Commit], warn: Warn) -> Taken:
    """Bring the newest commit whose own checkpoint is whole into a run folder, else the newest
    other checkpoint that is.

    Other lost files are skipped with a warning. Raises `RunDamagedError` when no
    checkpoint is whole, `RunChangedError` when the folder holds another run, `DiskFullError`,
    `StoreError`.
    """

    def say_damaged(commit: Commit, error: Exception) -> None:
        warn(
            f"the copy of step {commit.step} in the store is damaged ({error}); trying the one"
            " before"
        )

    readable: list[tuple[Commit, Json]] = []
    for commit in commits:
        try:
            manifest = read_commit(store, commit)
        except _IS_LOST as error:
            if newer := _in_place_of(store, commit):
                return take_newest(store, folder, newer, warn)
            say_damaged(commit, error)
            continue
        # None where the file with the id was damaged when it was sent, or is not here
        if len({manifest.get("run_id"), run_id_of(folder)} - {None}) > 1:
            raise RunChangedError(
                f"the store holds another run than {folder}",
                where=f"output_store: {store.name}",
                to_do="give this job another output_store, or the store's run an empty output_dir",
            )
        readable.append((commit, manifest))
    for needs_its_step in (True, False):
        for commit, manifest in readable:
            try:
                return _install(store, folder, commit, manifest, warn, needs_its_step)
            except _IS_LOST as error:
                if newer := _in_place_of(store, commit):
                    return take_newest(store, folder, newer, warn)
                if needs_its_step:
                    say_damaged(commit, error)
    raise RunDamagedError(
        f"none of the {len(commits)} commits in the store is whole",
        where=store.name,
        to_do="bring one back, or start from step 0 with --allow-restart",
    )


def _install(
    store: Store,
    folder: Path,
    commit: Commit,
    manifest: Json,
    warn: Warn,
    needs_its_step: bool,
) -> Taken:
    """Fetch every file, verify it, and only then put in place what is whole.

    A checkpoint or model with a file that is lost is left out. Lost files that decide the result
    are written again from a checkpoint, see `run_folder.mend`. Raises `DamagedFileError` when there
    would be no step to continue from.
    """
    entries, own = manifest["files"], commit.step
    n_bytes = sum(entry["size"] for entry in entries)
    if shutil.disk_usage(folder).free < 2 * n_bytes:
        raise DiskFullError(
            f"the copy in the store takes {say_bytes(n_bytes)}, and twice as much must be free",
            where=str(folder),
            to_do="make room, or set output_dir to a disk that has it",
        )
    sweep_drafts(folder)
    draft = make_private(draft_of(folder / "restore"))
    try:
        lost = _fetch_all(store, draft, entries)
        steps = {save.step for save in saves_in(draft / CHECKPOINTS)}
        has_a_step = own == 0 or (own in steps if needs_its_step else bool(steps))
        if lost and (SEARCH_LOG in lost or not has_a_step or _in_place_of(store, commit)):
            raise DamagedFileError(next(iter(lost.values())))
        mend(draft, lambda text: None)
        _join_log(draft)
        if run_id_of(draft) is None or manifest.get("run_id") not in (None, run_id_of(draft)):
            raise DamagedFileError(lost.get(RUN, f"{RUN} is of another run"))
        for path, why in lost.items():
            warn(f"{path} of the copy of step {own} in the store is lost ({why}); the rest is used")
        accounts = read_ledger(draft / LEDGER).accounts
        _put_in_place(draft, folder, own, warn)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    whole = [entry for entry in entries if _unit(entry["path"]) not in lost]
    step = max((step for step in steps if step <= own), default=own)
    return Taken(commit, step, objects_of(whole), accounts)


def _fetch_all(store: Store, draft: Path, entries: list[StoredFile]) -> dict[str, str]:
    """Fetch and verify the files of a commit into `draft`; what is lost, by path, and why. A
    checkpoint or a model is there whole or not at all. Raises `StoreError`."""
    lost: dict[str, str] = {}
    for entry in entries:
        unit, path = _unit(entry["path"]), draft / entry["path"]
        if unit in lost and unit != LOG_PARTS:
            continue
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            fetch_whole(store, entry, path)
        except _IS_LOST as error:
            lost[unit] = str(error)
            gone = path if unit == LOG_PARTS else draft / unit
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
    return lost


def fetch_whole(store: Store, entry: StoredFile, path: Path) -> None:
    """Raises `DamagedFileError`, `NoSuchObjectError`, `StoreError`."""

    def fetch() -> None:
        store.fetch(entry["object"], path, entry["size"])
        check_file(path, entry, entry["path"])

    twice_if_damaged(fetch)


def is_here(path: Path, entry: StoredFile) -> bool:
    """Whether a file holds what an entry says."""
    with contextlib.suppress(DamagedFileError):
        check_file(path, entry, entry["path"])
        return True
    return False


def _unit(path: str) -> str:
    """What has to be whole together: a checkpoint, the model, or a file; the log counts as one."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == CHECKPOINTS else parts[0]


def _join_log(draft: Path) -> None:
    """Put the pieces of a log together again; a lost one leaves out its lines."""
    if pieces := sorted((draft / LOG_PARTS).glob("*")):
        (draft / LOG).write_bytes(b"".join(piece.read_bytes() for piece in pieces))


def _put_in_place(draft: Path, folder: Path, step: int, warn: Warn) -> None:
    """run.json comes last: a kill before leaves a folder that is brought back again."""
    checkpoints = make_private(folder / CHECKPOINTS)
    arrived = {save.folder.name: save.folder for save in saves_in(draft / CHECKPOINTS)}
    for here, _, path in saves_in(checkpoints):
        if path.name in arrived:
            discard(path)
        elif here >= step:
            warn(f"{path.name} here is not part of the run that the store has: set aside")
            path.rename(path.with_name(f"{path.name}.elsewhere-{uuid.uuid4().hex[:4]}"))
    for name, path in arrived.items():
        path.rename(checkpoints / name)
    if (draft / MODEL).is_dir():
        if (folder / MODEL).exists():  # where no run is, it is the user's own
            (discard if (folder / RUN).exists() else set_aside)(folder / MODEL)
        (draft / MODEL).rename(folder / MODEL)
    for name in (*(name for name in SMALL if name not in (RUN, LEDGER)), RUN):
        if (draft / name).exists():
            os.replace(draft / name, folder / name)


# ---- spending ----


def with_words(accounts: list[Account], words: list[Json]) -> list[Account]:
    """What a store's ledger and the lease's `words` know together."""
    # what was committed elsewhere is not here
    told = (replace(account, committed=-1) for account in accounts_of(words))
    return merge(accounts, told)


def join_ledgers(here: Path, known: list[Account]) -> None:
    """Add to the ledger at `here`, which no attempt is writing, what is known besides."""
    if joined := merge(known, read_ledger(here).accounts):
        write_text(here, map(as_line, joined))
