"""The copy of a run in a store, made in the background, from which an empty machine continues.

What is to be copied is hard-linked aside and sent by a thread: the newest first, and what it
replaces is dropped. Data goes first, the lease is renewed, the commit comes last; files that an
earlier commit has already are not sent again. A store that is slow or away is waited for by the
thread, never by the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from farthing.addresses import is_remote
from farthing.clock import seconds_since_boot
from farthing.errors import (
    InputError,
    RunChangedError,
    RunDamagedError,
    RunTakenError,
    StoreUnavailableError,
)
from farthing.run.accounts import Account, read_ledger
from farthing.run.commits import (
    LOG_PARTS,
    SCHEMA,
    SMALL,
    Commit,
    Objects,
    join_ledgers,
    list_commits,
    objects_of,
    read_commit,
    take_newest,
    with_words,
)
from farthing.run.folder import (
    CHECKPOINTS,
    LEDGER,
    LOG,
    MODEL,
    RUN,
    SEARCH_LOG,
    is_damaged,
    run_id_of,
    saves_in,
)
from farthing.storage.files import (
    DamagedFileError,
    Json,
    StoredFile,
    Warn,
    files_below,
    make_private,
    read_json,
    seal,
    sha256_of,
    verify_folder,
    write_json,
)
from farthing.storage.lease import Gaps, Lease, LeaseLostError, bills_left
from farthing.storage.mounts import bucket_mount_of
from farthing.storage.objects import (
    NoSuchBucketError,
    NoSuchObjectError,
    Retrying,
    Store,
    StoreError,
    StoreRefusedError,
    open_store,
)
from farthing.units import plural

OUTBOX, SEEN = "outbox", "store.json"
N_WORDS = 64
MOST_PIECES = 100
"""Of the log in a store; then it is sent whole again."""
SAFE_AGE_S = 86400.0  # what no commit names is removed when it is older
_UPLOAD = re.compile(r"data/\d{8}-[0-9a-f]{32}/")  # the folder may hold other data


@dataclass(frozen=True)
class MirrorTimes:
    """How patient a mirror is, in seconds."""

    renew_s: float = 20.0
    """Between renewals of the lease."""
    lease_s: float = 60.0
    """Without a new link for so long, another machine may take the run over."""
    answer_s: float = 60.0
    """For a store to answer at the start, retries included, and for a renewal."""
    deliver_s: float = 3600.0
    """For one commit, retries included; then a newer one gets its turn."""
    pause_s: float = 0.5
    """Before a first retry."""
    again_s: float = 30.0
    """Before a commit that failed is tried again."""
    finish_s: float = 600.0
    """At the end of a run, for the last commit ..."""
    give_up_s: float = 60.0
    """... or so long, when the store only fails."""
    leave_s: float = 20.0
    """For the last commit when the machine is about to be taken away."""


PACE = MirrorTimes()
Accept = Callable[[list[Account]], None]


@dataclass
class _Parcel:
    """Files set aside in `folder`, to be sent as one commit."""

    folder: Path
    step: int
    files: list[str]
    carried: Sequence[StoredFile] = ()
    """Entries of the commit before, whose files are the same."""
    arrived: Objects = field(default_factory=dict)


def open_mirror(address: str | None, folder: Path, keep: int, warn: Warn) -> Mirror | None:
    """The mirror at an address, of which nothing is asked yet. Raises `InputError`."""
    return None if address is None else Mirror(open_store(address), folder, keep, warn, PACE)


class Mirror:
    """The copy of the run in `folder`, in `store`. `warn` is called by `check` alone."""

    def __init__(
        self, store: Store, folder: Path, keep: int, warn: Warn, pace: MirrorTimes
    ) -> None:
        self.folder, self.pace = folder, pace
        self.delivered_step: int | None = None
        """Step of the newest commit of this attempt."""
        self.delivery_s = 0.0
        """Seconds of the longest delivery so far."""
        self._store, self._keep, self._warn = store, keep, warn
        self.lease = Lease(folder, pace.lease_s, self._words, self._say_at_once)
        self._known: dict[Commit, Objects] = {}
        self._newest: Json | None = None
        self._n_commits = 0
        self._said: list[str] = []
        self._lost: str | None = None
        self._gaps = Gaps(pace.lease_s)
        self.on_bills: Accept = partial(join_ledgers, folder / LEDGER)
        """Gets attempts of other machines: of those before, and of those that lost the run."""
        self._bills: list[Json] = []
        self._known_bills: set[str] = set()
        self.failing = False
        self._wake, self._late = threading.Condition(), threading.Lock()
        self.pending: _Parcel | None = None
        self._sending: _Parcel | None = None
        self._stop = threading.Event()
        self._log_pieces: list[str] = []
        self._log_bytes = 0
        """How much of the log is in the pieces."""
        self._threads: list[threading.Thread] = []
        shutil.rmtree(folder / OUTBOX, ignore_errors=True)

    # ---- at the start ----

    def doubt(self) -> str | None:
        """Why a folder may be no store; the text follows its name. A disk that is not mounted is
        just another folder on the run's own.
        """
        if is_remote(self._store.name):
            return None
        root = Path(self._store.name)
        if program := bucket_mount_of(root):
            return (
                f"is a bucket, mounted by {program}: by its own address (s3://..., gs://...) two"
                " machines are kept apart"
            )
        with contextlib.suppress(OSError):  # the store does not answer
            if root.stat().st_dev == self.folder.stat().st_dev:
                return "is on the disk of the run: mount one that outlives this machine"
        return None

    def bring_back(
        self, allow_restart: bool = False, should_stop: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Take the lease, and bring the folder up to what the store has; the step of the commit
        taken, if one was.

        Raises `RunTakenError` (another machine trains this run), `RunDamagedError`,
        `RunChangedError`, `InputError` (the store refuses),
        `DiskFullError`, `RunInterruptedError`; `StoreUnavailableError` when it doesn't answer and
        the folder alone does not hold the run.
        """
        step, patient = None, self.patient(self.pace.answer_s)
        try:
            words = self.lease.claim(patient, should_stop)
            words += bills_left(patient, self._known_bills, self._said.append)
            step = self.catch_up(words, allow_restart)
        except LeaseLostError as error:
            raise self._busy(str(error)) from error
        except StoreError as error:
            may_pass = patient.has_answered and not isinstance(error, NoSuchBucketError)
            if isinstance(error, StoreRefusedError) and not may_pass:
                raise InputError(
                    f"the store refuses: {error}",
                    where=f"output_store: {self._store.name}",
                    to_do=(
                        "check the address, and the credentials in the environment (read, write,"
                        " list, delete)"
                    ),
                ) from error
            if isinstance(error, StoreRefusedError) or not (self.folder / RUN).exists():
                raise StoreUnavailableError(
                    f"the store does not answer ({error}), and this folder does not hold the run",
                    where=f"output_store: {self._store.name}",
                    to_do=(
                        "try the same command again when it does; without output_store the run"
                        " would begin again"
                    ),
                ) from error
            self.lease.epoch = 0
            self._warn(f"the store does not answer ({error}); the run continues from this folder")
        self._threads = [
            threading.Thread(target=work, name="store", daemon=True)
            for work in (self._keep_lease, self._keep_sending)
        ]
        for thread in self._threads:
            thread.start()
        return step

    def catch_up(self, words: list[Json], allow_restart: bool) -> int | None:
        store, step = self.patient(self.pace.deliver_s), None
        commits, known = list_commits(store), list[Account]()
        done = [0, *(save.step for save in saves_in(self.folder / CHECKPOINTS))]
        if (self.folder / SEARCH_LOG).exists():  # a search has no checkpoints of its own
            done += [each.committed for each in read_ledger(self.folder / LEDGER).accounts]
        is_behind = bool(commits) and (
            run_id_of(self.folder) is None
            or is_damaged(self.folder)
            or commits[0].epoch > self._seen_epoch()  # it continued elsewhere
            or commits[0].step > max(done)
        )
        if is_behind:
            try:
                taken = take_newest(store, self.folder, commits, self._warn)
                step, known, self._known[taken.commit] = taken.step, taken.accounts, taken.objects
            except RunDamagedError:
                if not allow_restart:
                    raise
                self._warn("the store has no whole checkpoint: starting without it, as you asked")
        else:
            with contextlib.suppress(DamagedFileError, RunChangedError, NoSuchObjectError):
                self._known = {commit: self._objects(store, commit) for commit in commits[:1]}
        if known := with_words(known, words):
            self.on_bills(known)
        self._note_seen()
        return step

    def _seen_epoch(self) -> int:
        """What this folder held last in this store: later commits were made elsewhere."""
        try:
            seen = read_json(self.folder / SEEN)
            return int(seen["epoch"]) if seen["store"] == self._store.name else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _note_seen(self) -> None:
        write_json(self.folder / SEEN, {"store": self._store.name, "epoch": self.lease.epoch})

    # ---- while the run continues ----

    def offer(
        self, step: int, checkpoints: Iterable[Path] = (), *, with_model: bool = False
    ) -> None:
        """Set aside what a commit of `step` needs, and let it be sent. Never raises."""
        try:
            sources = [path for checkpoint in checkpoints for path in checkpoint.iterdir()]
            if with_model:
                sources += files_below(self.folder / MODEL)
            self._set_aside(
                step, [path.relative_to(self.folder).as_posix() for path in sorted(sources)]
            )
        except OSError as error:
            self._said.append(
                f"the copy of step {step} could not be set aside for the store ({error})"
            )

    def offer_last_words(self) -> None:
        """The newest commit once more, with ledger and receipt as they are now. Never raises."""
        if self._newest is not None and self.pending is None:
            carried = [
                entry
                for entry in self._newest["files"]
                if entry["path"].partition("/")[0] in (CHECKPOINTS, MODEL)
            ]
            with contextlib.suppress(OSError):
                self._set_aside(self._newest["step"], [], carried)

    def check(self) -> None:
        """Say what there is to say; raises `RunTakenError` when another machine has taken the run
        over. After a gap in which this process did not run the store is asked at once.
        """
        if self._threads and self._lost is None and self._gaps.taken():
            try:
                self._hold(self.patient(self.pace.answer_s))
            except LeaseLostError as error:
                self._lost = str(error)
            except StoreError as error:
                self._said.append(f"the store does not answer ({error}); the run continues")
        self._flush()
        if self._lost is not None:
            raise self._busy(self._lost)

    def _flush(self) -> None:
        while self._said:
            self._warn(self._said.pop(0))
        if self._bills:
            rows, self._bills = self._bills, []
            self.on_bills(with_words([], rows))

    def _set_aside(self, step: int, names: list[str], carried: Sequence[StoredFile] = ()) -> None:
        """Link files, copy the small ones, and let the parcel be sent in place of one that waits.
        One that is not filled is removed: its links would hold on to old checkpoints. Raises
        `OSError`."""
        outbox = make_private(self.folder / OUTBOX)
        folder = make_private(outbox / uuid.uuid4().hex)
        small = [name for name in SMALL if name != LOG and (self.folder / name).exists()]
        try:
            for name in names:
                _link(self.folder / name, folder / name)
            for name in small:
                shutil.copyfile(self.folder / name, folder / name)
            self._cut_log(outbox)
            for name in self._log_pieces:
                _link(outbox / name, folder / name)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        parcel = _Parcel(folder, step, [*names, *small, *self._log_pieces], carried)
        with self._wake:
            replaced, self.pending = self.pending, parcel
            self._wake.notify_all()
        if replaced is not None:
            shutil.rmtree(replaced.folder, ignore_errors=True)

    def _cut_log(self, outbox: Path) -> None:
        """Copy the lines by which the log has grown into a piece of their own. A log that has
        become shorter, as after a restore, is copied whole."""
        log = self.folder / LOG
        n_bytes = log.stat().st_size if log.exists() else 0
        if n_bytes < self._log_bytes or len(self._log_pieces) == MOST_PIECES:
            self._log_pieces, self._log_bytes = [], 0
        if n_bytes > self._log_bytes:
            with open(log, "rb") as file:
                file.seek(self._log_bytes)
                lines = file.read()
            lines = lines[: lines.rfind(b"\n") + 1]
            name = f"{LOG_PARTS}/{len(self._log_pieces):06d}"
            (outbox / name).parent.mkdir(exist_ok=True)
            (outbox / name).unlink(missing_ok=True)  # it may still be linked elsewhere
            (outbox / name).write_bytes(lines)
            self._log_pieces.append(name)
            self._log_bytes += len(lines)

    def _busy(self, holder: str) -> RunTakenError:
        return RunTakenError(
            holder,
            where=f"output_store: {self._store.name}",
            to_do="wait for it, stop it, or give this job another output_store and output_dir",
        )

    def _say_at_once(self, text: str) -> None:
        self._said.append(text)
        if not self._threads:
            self.check()

    def patient(self, total_s: float) -> Retrying:
        return Retrying(self._store, total_s, self._stop, pause_s=self.pace.pause_s)

    def _words(self) -> list[Json]:
        """The accounts of the newest attempts: spending that no commit holds yet travels with the
        lease. Each knows what all before it have cost."""
        with contextlib.suppress(OSError):
            newest = read_ledger(self.folder / LEDGER).accounts[-N_WORDS:]
            return [account.as_row() for account in newest]
        return []

    # ---- the threads ----

    def _keep_lease(self) -> None:
        tick_s = min(1.0, self.pace.lease_s / 4, self.pace.renew_s)
        due_at = seconds_since_boot() + self.pace.renew_s
        while not self._stop.wait(tick_s):
            self._gaps.tick()
            try:
                now = seconds_since_boot()
                if now >= due_at:
                    due_at = now + self.pace.renew_s
                    if now - self.lease.renewed_at >= self.pace.renew_s / 2:
                        self._hold(self.patient(self.pace.answer_s))
            except LeaseLostError as error:
                self._lost = str(error)
                return
            except Exception:  # the other thread warns that the store is away
                continue

    def _hold(self, store: Store) -> None:
        """Renew the lease, or take it late. Raises `LeaseLostError`, `StoreError`."""
        with self._late:
            if not self.lease.epoch:
                self._bills += self.lease.claim(store, self._stop.is_set)
                if any(commit.epoch > self._seen_epoch() for commit in list_commits(store)):
                    raise LeaseLostError(
                        "the run has gone on elsewhere while the store could not be reached"
                    )
                self._note_seen()
                return
        self.lease.renew(store)

    def _keep_sending(self) -> None:
        """The newest parcel; one that failed goes again unless there is a newer one."""
        while not self._stop.is_set() and self._lost is None:
            with self._wake:
                if self.pending is None:
                    self._wake.wait(1.0)
                    continue
                parcel, self.pending = self.pending, None
                self._sending = parcel
            is_done, began_s = True, time.monotonic()
            try:
                self.send(parcel, self.patient(self.pace.deliver_s))
                if self.failing:
                    self._said.append(f"the store is back: the copy of step {parcel.step} is in it")
                self.failing = False
                self.delivery_s = max(self.delivery_s, time.monotonic() - began_s)
            except LeaseLostError as error:
                self._lost = str(error)
            except DamagedFileError as error:
                self._said.append(
                    f"the checkpoint of step {parcel.step} is damaged on this disk ({error}): not"
                    " copied"
                )
            except Exception as error:  # of whatever library: it must not end the run, nor go
                is_done = False  # unsaid
                if not self.failing:
                    self._said.append(
                        f"the copy of step {parcel.step} has not reached the store ({error});"
                        " training continues"
                    )
                self.failing = True
            with self._wake:
                if not is_done and self.pending is None:
                    self.pending = parcel
                else:
                    shutil.rmtree(parcel.folder, ignore_errors=True)
                self._sending = None
                self._wake.notify_all()
                if not is_done and not self._stop.is_set():
                    self._wake.wait(self.pace.again_s)

    def send(self, parcel: _Parcel, store: Store) -> None:
        """Data first, the lease once more, the commit last; then what is older goes. Raises
        `LeaseLostError`, `StoreError`, `DamagedFileError`.
        """
        if not self.lease.epoch:
            self._hold(store)
        epoch = self.lease.epoch
        entries = self._send_data(parcel, store)
        self._bills += bills_left(store, self._known_bills, self._said.append)
        self._hold(store)
        self._n_commits += 1
        commit = Commit(epoch, self._n_commits, parcel.step)
        manifest = {
            "kind": "farthing commit",
            "schema": SCHEMA,
            "run_id": run_id_of(parcel.folder),
            **commit._asdict(),
            "writer": self.lease.writer,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": entries,
        }
        if not store.create(commit.key, seal(manifest).encode()):
            raise LeaseLostError("another process committed in the name of this one")
        self._known[commit] = objects_of(entries)
        self.delivered_step, self._newest = parcel.step, manifest
        # no object goes of which it can't be told whether a commit names it
        with contextlib.suppress(StoreError, DamagedFileError, RunChangedError):
            self._rotate(store)

    def _send_data(self, parcel: _Parcel, store: Store) -> list[StoredFile]:
        """The entries of a parcel's files, each sent unless the store has it, all seen there with
        their size: also those of earlier commits, as somebody may have emptied the store.

        Small ones are sent with each commit: damage to one that all share would leave no commit to
        fall back to.
        """
        digests: dict[str, str] = {}
        for folder in sorted((parcel.folder / CHECKPOINTS).glob("*")):
            place = folder.relative_to(parcel.folder).as_posix()
            for file in verify_folder(folder)["files"]:
                digests[f"{place}/{file['name']}"] = file["sha256"]
        entries = list(parcel.carried)
        for path in parcel.files:
            local = parcel.folder / path
            digest = digests.get(path) or sha256_of(local)
            there = [parcel.arrived, *(() if path in SMALL else self._known.values())]
            name = next((each[path, digest] for each in there if (path, digest) in each), "")
            if not name:
                name = f"data/{self.lease.epoch:08d}-{parcel.folder.name}/{path}"
                store.put(name, local)
                parcel.arrived[path, digest] = name
            entries.append(
                {"path": path, "size": local.stat().st_size, "sha256": digest, "object": name}
            )
        sizes = {key: found.n_bytes for key, found in store.list("data/").items()}
        gone = {entry["object"] for entry in entries if sizes.get(entry["object"]) != entry["size"]}
        if gone:
            for objects in (parcel.arrived, *self._known.values()):
                for key in [key for key, name in objects.items() if name in gone]:
                    del objects[key]
            raise StoreError(f"{plural(len(gone), 'file')} did not arrive whole, or were removed")
        return entries

    def _rotate(self, store: Store) -> None:
        """Keep the newest commits of `keep` steps, and the objects that those name."""
        kept: dict[int, Commit] = {}
        commits = sorted({*list_commits(store), *self._known}, reverse=True)  # lists may be late
        for commit in commits:
            if len(kept) < self._keep:
                kept.setdefault(commit.step, commit)
        store.remove([commit.key for commit in commits if commit not in kept.values()])
        self._known = {commit: self._objects(store, commit) for commit in kept.values()}
        named = {name for objects in self._known.values() for name in objects.values()}
        mine, there = f"data/{self.lease.epoch:08d}-", store.list("data/")
        now = max(
            (entry.at for entry in there.values()), default=0.0
        )  # by the clock that has dated them
        store.remove(
            [
                key
                for key, entry in there.items()
                if _UPLOAD.match(key)
                and key not in named
                and (key.startswith(mine) or now - entry.at > SAFE_AGE_S)
            ]
        )

    def _objects(self, store: Store, commit: Commit) -> Objects:
        return self._known.get(commit) or objects_of(read_commit(store, commit)["files"])

    # ---- at the end ----

    def wait(self, seconds: float) -> bool:
        """Until all that was offered is in the store; False when time has run out."""
        began = time.monotonic()
        with self._wake:
            self._wake.notify_all()
            while self.pending is not None or self._sending is not None:
                waited_s = time.monotonic() - began
                is_hopeless = self.failing and waited_s > self.pace.give_up_s
                if waited_s >= seconds or is_hopeless or self._lost is not None:
                    return False
                self._wake.wait(min(seconds - waited_s, 0.5))
        return self._lost is None

    def close(self, seconds: float) -> None:
        """Wait for the rest, give the lease back, and end. Never raises."""
        if not self._threads:
            return
        if not self.wait(seconds) and self._lost is None:
            there = "nothing" if self.delivered_step is None else f"step {self.delivered_step}"
            self._said.append(
                f"the newest copy could not be brought to {self._store.name}: {there} of this"
                " attempt is there"
            )
        self._stop.set()
        store = Retrying(self._store, min(5.0, max(seconds, 1.0)), pause_s=self.pace.pause_s)
        with contextlib.suppress(LeaseLostError, StoreError):
            if self._lost is not None:
                self.lease.leave_bill(store)
            elif not self.failing:
                self.lease.release(store)
        with self._wake:
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(1.0)
        shutil.rmtree(self.folder / OUTBOX, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._flush()


def _link(path: Path, target: Path) -> None:
    """A link to a file that is never changed; a copy where there are no links."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
