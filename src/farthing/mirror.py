"""The copy of a run in a store, made behind its back: an empty machine goes on from it alone.

    writers/00000007.json                the lease: a chain of links, each created only where none was
    data/00000005-3f2a.../PATH           what a commit needs, under a prefix of its own, never overwritten
    commits/00000005-000003-00000042.json  epoch, number, step: created last; without it nothing of it exists

A commit names every file that is needed, with size and sha256: the newest checkpoint, the best one, log, ledger, plan,
the model when there is one. Files that an earlier commit has already are not sent again. Whoever adds the next link
holds the run, so a renewal fails as soon as somebody else has taken over; the number of the link that began a hold is
the epoch (fencing token) in the names of its commits, and later epochs go before earlier ones.

Nothing here blocks the run: what is to be copied is hard-linked aside and sent by a thread, the newest first, and what
it replaces is dropped. Refuses to let two machines train one run, and to parse a byte before its checksum was checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farthing.errors import Interrupted, NoSpace, RunBusy, RunChanged, RunDamaged, StoreDown, UserMistake
from farthing.files import (
    Damaged,
    JsonLines,
    discard,
    make_private,
    seal,
    sha256_of,
    sweep_drafts,
    unseal,
    verify_folder,
    write_json,
    write_text,
)
from farthing.run_folder import CHECKPOINTS, JOB, LEDGER, LOG, MODEL, PLAN, RECEIPT, RUN, SCHEDULE
from farthing.store import Entry, Garbled, NoSuchObject, Retrying, Store, StoreFault, StoreRefuses, open_store
from farthing.units import say_bytes, say_seconds

SCHEMA = 1
SMALL = (JOB, RUN, PLAN, SCHEDULE, LOG, LEDGER, RECEIPT, "measurements.json")
OUTBOX, SEEN = "outbox", "store.json"
SAFE_AGE_S = 86400.0  # what no commit names is removed when it is older
_COMMIT = re.compile(r"commits/(\d{8})-(\d{6})-(\d{8,})\.json")
_LINK = re.compile(r"writers/(\d{8})\.json")
_CHECKPOINT = re.compile(r"step-\d{8,}-\d{4,}")
_DRAFT = ".draft-"
N_LINKS = 8
MAX_COMMIT_BYTES = 16 << 20


@dataclass(frozen=True)
class Pace:
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
    """Before a commit that failed is tried anew."""
    finish_s: float = 600.0
    """At the end of a run, for the last commit ..."""
    give_up_s: float = 60.0
    """... or so long, when the store only fails."""
    leave_s: float = 20.0
    """When the machine is about to be taken away."""


PACE = Pace()


@dataclass
class _Parcel:
    """Files set aside to be sent as one commit."""

    folder: Path
    step: int
    files: list[str]
    done: dict[tuple[str, str], str] = field(default_factory=dict)
    """(path, sha256) -> object, of what has arrived."""
    prefix: str = ""
    carried: list[dict[str, Any]] = field(default_factory=list)
    """Entries of the commit before, whose files are the same."""


class Lost(Exception):
    """Another machine holds the run now. The message says which."""


def open_mirror(address: str | None, folder: Path, keep: int, warn: Callable[[str], None]) -> Mirror | None:
    """The mirror of a run folder at an address, of which nothing is asked yet; None without one. Raises `UserMistake`."""
    return None if address is None else Mirror(open_store(address), folder, keep, warn, PACE)


class Mirror:
    """The copy of the run in `folder`, in `store`. `warn` is called by `check` and the calls that wait, never by a thread."""

    def __init__(
        self, store: Store, folder: Path, keep: int, warn: Callable[[str], None], pace: Pace | None = None
    ) -> None:
        self.folder, self.pace = folder, pace or Pace()
        self.epoch: int | None = None
        """The fencing token of this attempt; None as long as the store could not be asked."""
        self.delivered_step: int | None = None
        """Step of the newest commit of this attempt."""
        self._store, self._keep, self._warn = store, keep, warn
        self._writer = _writer_of(folder)
        self._n_link = self._n_commits = 0
        self._renewed_at = -1e9
        self._lease_lock, self._wake = threading.Lock(), threading.Condition()
        self._pending: _Parcel | None = None
        self._sending: _Parcel | None = None
        self._known: dict[str, dict[tuple[str, str], str]] = {}  # commit -> (path, sha256) -> object
        self._said: list[str] = []
        self._lost: str | None = None
        self._failing_since: float | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._past_rows: list[dict[str, Any]] = []
        self._newest: dict[str, Any] | None = None  # the newest commit of this attempt
        shutil.rmtree(folder / OUTBOX, ignore_errors=True)

    # ---- at the start ----

    def bring_back(self, allow_restart: bool = False, should_stop: Callable[[], bool] = lambda: False) -> int | None:
        """Take the lease, and bring the folder up to what the store has; the step of the commit it took, if it took one.

        Raises `RunBusy` (another machine trains this run), `RunDamaged`, `RunChanged`, `UserMistake` (the store refuses),
        `NoSpace`, `Interrupted`; `StoreDown` when it doesn't answer and the folder alone does not hold the run.
        """
        store = self._patient(self.pace.answer_s)
        try:
            self._claim(store, should_stop)
            step = self._catch_up(allow_restart)
        except Lost as error:
            raise self._busy(str(error)) from error
        except StoreRefuses as error:
            raise UserMistake(
                f"the store refuses: {error}",
                where=f"output_store: {self._store.name}",
                to_do="check the address, and the credentials in the environment (read, write, list, delete)",
            ) from error
        except StoreFault as error:
            if not (self.folder / RUN).exists():
                raise StoreDown(
                    f"the store does not answer ({error}), and this folder does not hold the run",
                    where=f"output_store: {self._store.name}",
                    to_do="try the same command again when it does; without output_store the run would begin anew",
                ) from error
            self.epoch = None
            self._warn(f"the store does not answer ({error}); the run goes on from this folder")
            step = None
        self._past_rows = list(_last_rows(JsonLines(self.folder / LEDGER).rows()).values())
        self.check()
        for work in (self._keep_lease, self._keep_sending):
            self._threads.append(threading.Thread(target=work, name="store", daemon=True))
            self._threads[-1].start()
        return step

    def _claim(self, store: Store, should_stop: Callable[[], bool]) -> None:
        """Add the next link to the chain, when nobody alive holds it. Raises `Lost`, `StoreFault`, `Interrupted`."""
        number = self._newest_link(store)
        if number:
            link = self._link(store, number)
            if link.get("writer") != self._writer and not link.get("released"):
                self._wait_for_silence(store, number, link, should_stop)
            if isinstance(rows := link.get("ledger"), list) and not self._past_rows:
                self._past_rows = [row for row in rows if isinstance(row, dict)]
        self._add_link(store, number + 1, number + 1)
        self.epoch = number + 1
        key = f"writers/condition-{self.epoch:08d}"
        if store.create(key, b"first") and store.create(key, b"second"):
            self._say(f"{self._store.name} overwrites where it was told not to: it can't keep two machines apart")
        store.remove([key])

    def _wait_for_silence(
        self, store: Store, number: int, link: dict[str, Any], should_stop: Callable[[], bool]
    ) -> None:
        """Return once the holder of a link has been silent for its lease. Clocks that differ cost time, not safety."""
        lease_s = min(float(link.get("lease_s", 0.0)), 3600.0)
        if time.time() - float(link.get("at", 0.0)) > 2 * lease_s:
            return
        self._say(
            f"{link.get('host')} held this run a moment ago: waiting up to {say_seconds(lease_s)} to see whether it lives"
        )
        if not self._threads:
            self.check()
        until = time.monotonic() + lease_s
        while time.monotonic() < until:
            if should_stop():
                raise Interrupted("stopped while waiting for the lease")
            time.sleep(min(1.0, lease_s / 10))
            if self._newest_link(store) > number:
                raise Lost(self._holder(store, number + 1))

    def _newest_link(self, store: Store) -> int:
        numbers = [int(match[1]) for key in store.list("writers/") if (match := _LINK.fullmatch(key))]
        return max(numbers, default=0)

    def _link(self, store: Store, number: int) -> dict[str, Any]:
        try:
            link = json.loads(store.get(_link_key(number)))
            return link if isinstance(link, dict) else {}
        except (ValueError, NoSuchObject):
            return {}

    def _holder(self, store: Store, number: int) -> str:
        link = self._link(store, max(number, self._newest_link(store)))
        return f"{link.get('host', 'another machine')} is training this run in {link.get('folder', 'its folder')}"

    def _add_link(self, store: Store, number: int, epoch: int, released: bool = False) -> None:
        """Raises `Lost` when somebody else added this link, or later ones."""
        link = {
            "epoch": epoch,
            "writer": self._writer,
            "host": socket.gethostname(),
            "folder": str(self.folder),
            "at": time.time(),
            "lease_s": self.pace.lease_s,
            "released": released,
            "nonce": uuid.uuid4().hex,
            "ledger": self._ledger_now(),
        }
        data = json.dumps(link).encode()
        stalled = time.monotonic() - self._renewed_at > self.pace.lease_s
        if not store.create(_link_key(number), data) or (stalled and self._newest_link(store) != number):
            raise Lost(self._holder(store, number))
        self._n_link, self._renewed_at = number, time.monotonic()

    def renew(self, store: Store) -> None:
        """Hold the run for another while. Raises `Lost`, `StoreFault`."""
        with self._lease_lock:
            if self.epoch is None:  # the store was away at the start
                self._claim(store, self._stop.is_set)
                if any(epoch > self._seen_epoch() for epoch, _, _ in self._commits(store)):
                    raise Lost("the run has gone on elsewhere while the store could not be reached")
                self._write_seen()
            else:
                self._add_link(store, self._n_link + 1, self.epoch)
            with contextlib.suppress(StoreFault):
                if self._n_link > N_LINKS:
                    store.remove([_link_key(self._n_link - N_LINKS)])

    def _ledger_now(self) -> list[dict[str, Any]]:
        """The last word of every attempt: spending that no commit holds yet travels with the lease."""
        path = self.folder / LEDGER
        if not path.exists():
            return self._past_rows
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - (64 << 10)))
            tail = file.read().decode("utf-8", errors="replace").splitlines()
        rows = {row.get("attempt"): row for row in self._past_rows}
        for line in tail:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("attempt"), int):
                    rows[row["attempt"]] = row
        return list(rows.values())

    # ---- taking the newest commit ----

    def _catch_up(self, allow_restart: bool) -> int | None:
        store = self._patient(self.pace.deliver_s)
        commits = self._commits(store)
        seen = self._seen_epoch()
        has_checkpoint = any(_CHECKPOINT.fullmatch(path.name) for path in (self.folder / CHECKPOINTS).glob("*"))
        is_ahead = bool(commits) and (
            not (self.folder / RUN).exists() or commits[0][0] > seen or (commits[0][2] > 0 and not has_checkpoint)
        )
        taken = None
        if is_ahead:
            try:
                taken = self._take_newest(store, commits)
            except RunDamaged:
                if not allow_restart:
                    raise
                self._warn("nothing whole is in the store: starting without it, as asked")
        elif commits:  # ours
            with contextlib.suppress(Damaged, NoSuchObject):
                self._known[_commit_key(*commits[0])] = _objects(self._read_commit(store, commits[0]))
        if not commits and not (self.folder / RUN).exists():
            _merge_ledger(self.folder / LEDGER, self.folder / f"{LEDGER}{_DRAFT}store", self._past_rows)
        self._write_seen()
        return taken

    def _take_newest(self, store: Store, commits: list[tuple[int, int, int]]) -> int:
        for commit in commits:
            try:
                manifest = self._read_commit(store, commit)
                self._refuse_other_run(manifest)
                self._install(store, manifest)
            except (Damaged, NoSuchObject, Garbled) as error:
                self._warn(f"the copy of step {commit[2]} in the store is damaged ({error}); trying the one before")
                continue
            self._known[_commit_key(*commit)] = _objects(manifest)
            _merge_ledger(self.folder / LEDGER, self.folder / f"{LEDGER}{_DRAFT}store", self._past_rows)
            return commit[2]
        raise RunDamaged(
            f"none of the {len(commits)} commits in the store is whole",
            where=self._store.name,
            to_do="bring one back, or start from zero on purpose with --allow-restart",
        )

    def _read_commit(self, store: Store, commit: tuple[int, int, int]) -> dict[str, Any]:
        """A commit, its form checked. Raises `Damaged`, `RunChanged`, `StoreFault`."""
        data = store.get(_commit_key(*commit))
        try:
            manifest = unseal(data[:MAX_COMMIT_BYTES].decode("utf-8"), "its commit")
        except UnicodeDecodeError as error:
            raise Damaged(f"its commit can't be read: {error}") from error
        if isinstance(manifest.get("schema"), int) and manifest["schema"] > SCHEMA:
            raise RunChanged(
                f"written by a newer farthing (schema {manifest['schema']}, this one reads up to {SCHEMA})",
                where=self._store.name,
                to_do="pip install --upgrade farthing",
            )
        if [manifest.get(key) for key in ("epoch", "number", "step")] != list(commit):
            raise Damaged("its commit is another one's")
        for entry in manifest.get("files") or [{}]:
            path, object_key = entry.get("path"), entry.get("object")
            if not isinstance(path, str) or not _may_be_written(path):
                raise Damaged(f"its commit names a file outside the run: {path!r}")
            if not isinstance(object_key, str) or not object_key.startswith("data/") or ".." in object_key.split("/"):
                raise Damaged(f"its commit names an object outside its own: {object_key!r}")
            if not isinstance(entry.get("size"), int) or entry["size"] < 0 or not isinstance(entry.get("sha256"), str):
                raise Damaged(f"its commit gives no size and sha256 for {path}")
        return manifest

    def _refuse_other_run(self, manifest: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            ours = json.loads((self.folder / RUN).read_text(encoding="utf-8"))["run_id"]
            if ours != manifest.get("run_id"):
                raise RunChanged(
                    f"the store holds another run than {self.folder}",
                    where=f"output_store: {self._store.name}",
                    to_do="give this job another output_store, or the store's run an empty output_dir",
                )

    def _install(self, store: Store, manifest: dict[str, Any]) -> None:
        """Fetch every file, verify it, and only then put all of them in place, run.json last."""
        entries = manifest["files"]
        total = sum(entry["size"] for entry in entries)
        if shutil.disk_usage(self.folder).free < 2 * total:
            raise NoSpace(
                f"the copy in the store takes {say_bytes(total)}, and there is no room for it and the next",
                where=str(self.folder),
                to_do="make room, or set output_dir to a disk that has it",
            )
        draft = self.folder / f"restore{_DRAFT}{uuid.uuid4().hex[:8]}"
        sweep_drafts(self.folder)
        make_private(draft)
        try:
            for entry in entries:
                path = draft / entry["path"]
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                local = self.folder / entry["path"]
                is_here = (
                    not entry["path"].endswith(".jsonl")
                    and local.is_file()
                    and local.stat().st_size == entry["size"]
                    and sha256_of(local) == entry["sha256"]
                )
                if is_here:
                    _aside(local, draft, entry["path"])
                else:
                    store.fetch(entry["object"], path, entry["size"])
                size = path.stat().st_size
                if size != entry["size"]:
                    raise Damaged(f"{entry['path']} has {size} bytes, {entry['size']} were sent")
                if sha256_of(path) != entry["sha256"]:
                    raise Damaged(f"{entry['path']} differs from what was sent (sha256)")
            self._put_in_place(draft, manifest["step"])
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _put_in_place(self, draft: Path, step: int) -> None:
        checkpoints = make_private(self.folder / CHECKPOINTS)
        arrived = {path.name: path for path in (draft / CHECKPOINTS).glob("*")}
        for path in list(checkpoints.glob("step-*")):
            if _CHECKPOINT.fullmatch(path.name) and (path.name in arrived or int(path.name.split("-")[1]) >= step):
                if path.name not in arrived:
                    self._warn(f"{path.name} here is not what the run went on from elsewhere: set aside")
                    path.rename(path.with_name(f"{path.name}.elsewhere-{uuid.uuid4().hex[:4]}"))
                else:
                    discard(path)
        for name, path in arrived.items():
            path.rename(checkpoints / name)
        if (draft / MODEL).is_dir():
            if (self.folder / MODEL).exists():
                discard(self.folder / MODEL)
            (draft / MODEL).rename(self.folder / MODEL)
        if (draft / LEDGER).exists():
            (draft / LEDGER).rename(self.folder / f"{LEDGER}{_DRAFT}store")
        for name in (*(name for name in SMALL if name not in (RUN, LEDGER)), RUN):
            if (draft / name).exists():
                os.replace(draft / name, self.folder / name)

    def _commits(self, store: Store) -> list[tuple[int, int, int]]:
        """(epoch, number, step) of every commit, newest first."""
        matches = (_COMMIT.fullmatch(key) for key in store.list("commits/"))
        return sorted(((int(m[1]), int(m[2]), int(m[3])) for m in matches if m), reverse=True)

    def _seen_epoch(self) -> int:
        """The epoch this folder held last, in this store: commits of later ones were made elsewhere."""
        try:
            seen = json.loads((self.folder / SEEN).read_text(encoding="utf-8"))
            return int(seen["epoch"]) if seen["store"] == self._store.name else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _write_seen(self) -> None:
        write_json(self.folder / SEEN, {"store": self._store.name, "epoch": self.epoch})

    # ---- while the run goes on ----

    def offer(self, step: int, checkpoints: Iterable[Path] = (), *, with_model: bool = False) -> None:
        """Set aside what a commit of `step` needs, and let it be sent. Takes the time of some links. Never raises."""
        try:
            folder = self.folder / OUTBOX / uuid.uuid4().hex[:12]
            make_private(self.folder / OUTBOX)
            make_private(folder)
            files = []
            for source in checkpoints:
                for path in sorted(source.iterdir()):
                    files.append(_aside(path, folder, f"{CHECKPOINTS}/{source.name}/{path.name}"))
            if with_model and (self.folder / MODEL).is_dir():
                for path in sorted((self.folder / MODEL).rglob("*")):
                    if path.is_file() and not path.is_symlink():
                        files.append(_aside(path, folder, path.relative_to(self.folder).as_posix()))
            files += self._small_aside(folder)
        except OSError as error:
            self._say(f"the copy of step {step} could not be set aside for the store ({error}); training goes on")
            return
        self._post(_Parcel(folder, step, files))

    def offer_last_words(self) -> None:
        """The newest commit once more, with ledger and receipt as they are now. Never raises."""
        if self._newest is None or self._pending is not None:
            return
        folder = self.folder / OUTBOX / uuid.uuid4().hex[:12]
        carried = [entry for entry in self._newest["files"] if entry["path"] not in SMALL]
        with contextlib.suppress(OSError):
            make_private(folder)
            self._post(_Parcel(folder, self._newest["step"], self._small_aside(folder), carried=carried))

    def _small_aside(self, folder: Path) -> list[str]:
        names = [name for name in SMALL if (self.folder / name).exists()]
        for name in names:
            shutil.copyfile(self.folder / name, folder / name)
        return names

    def _post(self, parcel: _Parcel) -> None:
        with self._wake:
            replaced, self._pending = self._pending, parcel
            self._wake.notify_all()
        if replaced is not None:
            shutil.rmtree(replaced.folder, ignore_errors=True)

    def check(self) -> None:
        """Say what there is to say; raises `RunBusy` when another machine has taken the run over."""
        while self._said:
            self._warn(self._said.pop(0))
        if self._lost is not None:
            raise self._busy(self._lost)

    def _busy(self, holder: str) -> RunBusy:
        return RunBusy(
            holder,
            where=f"output_store: {self._store.name}",
            to_do="wait for it, stop it, or give this job another output_store and output_dir",
        )

    def _say(self, text: str) -> None:
        self._said.append(text)

    def _patient(self, total_s: float) -> Retrying:
        return Retrying(self._store, total_s, self._stop, pause_s=self.pace.pause_s)

    def _keep_lease(self) -> None:
        """A thread: a new link now and then."""
        while not self._stop.wait(self.pace.renew_s):
            try:
                if time.monotonic() - self._renewed_at >= self.pace.renew_s / 2:
                    self.renew(self._patient(self.pace.answer_s))
            except Lost as error:
                self._lost = str(error)
                return
            except Exception:  # the sender says aloud that the store is away
                continue

    def _keep_sending(self) -> None:
        """A thread: the newest parcel first; one that failed goes again unless there is a newer one."""
        while True:
            with self._wake:
                while self._pending is None and not self._stop.is_set():
                    self._wake.wait(1.0)
                if self._pending is None or self._stop.is_set():
                    return
                parcel, self._pending = self._pending, None
                self._sending = parcel
            try:
                self._send(parcel, self._patient(self.pace.deliver_s))
                if self._failing_since is not None:
                    self._say(f"the store is back: the copy of step {parcel.step} is in it")
                self._failing_since = None
            except Lost as error:
                self._lost = str(error)
                return
            except Damaged as error:
                self._say(f"the checkpoint of step {parcel.step} is damaged on this disk ({error}): not copied")
            except Exception as error:  # of whatever library: it must not end the run, nor in silence
                if self._failing_since is None:
                    self._failing_since = time.monotonic()
                    self._say(f"the copy of step {parcel.step} has not reached the store ({error}); training goes on")
                with self._wake:
                    if self._pending is None:
                        self._pending = parcel
                        parcel = None  # type: ignore[assignment]
                    self._sending = None
                    self._wake.notify_all()
                    if not self._stop.is_set():
                        self._wake.wait(self.pace.again_s)
            finally:
                if parcel is not None:
                    shutil.rmtree(parcel.folder, ignore_errors=True)
                with self._wake:
                    self._sending = None
                    self._wake.notify_all()

    def _send(self, parcel: _Parcel, store: Store) -> None:
        """Data first, the lease once more, the commit last; then what is older. Raises `Lost`, `StoreFault`, `Damaged`."""
        if self.epoch is None:
            self.renew(store)
        parcel.prefix = parcel.prefix or f"data/{self.epoch:08d}-{uuid.uuid4().hex}"
        checked: dict[str, str] = {}
        for name in {path.rpartition("/")[0] for path in parcel.files if path.startswith(f"{CHECKPOINTS}/")}:
            written = verify_folder(parcel.folder / name)
            checked |= {f"{name}/{entry['name']}": entry["sha256"] for entry in written["files"]}
        entries = list(parcel.carried)
        for path in parcel.files:
            local = parcel.folder / path
            entry = {"path": path, "size": local.stat().st_size, "sha256": checked.get(path) or sha256_of(local)}
            key = (path, str(entry["sha256"]))
            known = parcel.done.get(key) or next((o[key] for o in self._known.values() if key in o), None)
            if known is None:
                known = f"{parcel.prefix}/{path}"
                store.put(known, local)
            entries.append({**entry, "object": known})
            parcel.done[key] = known
        there = store.list(f"{parcel.prefix}/")
        for item in entries:
            found = there.get(str(item["object"]))
            if str(item["object"]).startswith(parcel.prefix) and (found is None or found.n_bytes != item["size"]):
                parcel.done.pop((str(item["path"]), str(item["sha256"])), None)
                raise StoreFault(f"{item['path']} did not arrive whole")
        self.renew(store)
        assert self.epoch is not None
        self._n_commits += 1
        commit = (self.epoch, self._n_commits, parcel.step)
        manifest = {
            "kind": "farthing commit",
            "schema": SCHEMA,
            "run_id": self._run_id(parcel.folder),
            "epoch": self.epoch,
            "number": self._n_commits,
            "step": parcel.step,
            "writer": self._writer,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": entries,
        }
        if not store.create(_commit_key(*commit), seal(manifest).encode()):
            raise Lost("another process committed in the name of this one")
        self._known[_commit_key(*commit)] = _objects(manifest)
        self.delivered_step, self._newest = parcel.step, manifest
        with contextlib.suppress(StoreFault):
            self._rotate(store)

    def _run_id(self, folder: Path) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads((folder / RUN).read_text(encoding="utf-8"))["run_id"])
        return None

    def _rotate(self, store: Store) -> None:
        """Remove commits older than the newest `keep`, then objects that no commit names: mine at once, others by age."""
        kept: dict[int, tuple[int, int, int]] = {}
        gone = []
        for commit in self._commits(store):
            if commit[2] in kept or len(kept) >= self._keep:
                gone.append(_commit_key(*commit))
            else:
                kept[commit[2]] = commit
        store.remove(gone)
        for commit in kept.values():
            key = _commit_key(*commit)
            if key not in self._known:
                try:
                    self._known[key] = _objects(self._read_commit(store, commit))
                except (Damaged, RunChanged):
                    self._known[key] = {}
        self._known = {_commit_key(*commit): self._known[_commit_key(*commit)] for commit in kept.values()}
        named = {name for objects in self._known.values() for name in objects.values()}
        store.remove(
            [key for key, entry in store.list("data/").items() if key not in named and self._is_old(key, entry)]
        )

    def _is_old(self, key: str, entry: Entry) -> bool:
        is_mine = key.startswith(f"data/{self.epoch:08d}-")
        return is_mine or (entry.at is not None and time.time() - entry.at > SAFE_AGE_S)

    # ---- at the end ----

    def wait(self, seconds: float) -> bool:
        """Wait until everything that was offered is in the store; False when time, or the store's chance, has run out."""
        began = time.monotonic()
        with self._wake:
            self._wake.notify_all()
            while self._pending is not None or self._sending is not None:
                now = time.monotonic()
                has_no_chance = self._failing_since is not None and now - began > self.pace.give_up_s
                left = began + seconds - now
                if left <= 0 or has_no_chance or self._lost is not None:
                    return False
                self._wake.wait(min(left, 0.5))
        return self._lost is None

    def close(self, seconds: float) -> None:
        """Wait for the rest, give the lease back, and end. Never raises."""
        if not self._threads:
            return
        if not self.wait(seconds) and self._lost is None:
            of = "none" if self.delivered_step is None else f"that of step {self.delivered_step}"
            self._say(f"the newest copy could not be brought to {self._store.name} (of this attempt {of} is there)")
        self._stop.set()
        is_held = self._lost is None and self.epoch is not None and self._failing_since is None
        if is_held and self._lease_lock.acquire(timeout=2.0):
            with contextlib.suppress(Lost, StoreFault):
                store = Retrying(self._store, min(5.0, seconds), pause_s=self.pace.pause_s)
                self._add_link(store, self._n_link + 1, self.epoch or 0, released=True)
            self._lease_lock.release()
        with self._wake:
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(1.0)
        shutil.rmtree(self.folder / OUTBOX, ignore_errors=True)
        while self._said:
            self._warn(self._said.pop(0))


# ---- names and rows ----


def _commit_key(epoch: int, number: int, step: int) -> str:
    return f"commits/{epoch:08d}-{number:06d}-{step:08d}.json"


def _link_key(number: int) -> str:
    return f"writers/{number:08d}.json"


def _objects(manifest: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(entry["path"], entry["sha256"]): entry["object"] for entry in manifest["files"]}


def _may_be_written(path: str) -> bool:
    """Whether a path of a commit is one that a run folder has."""
    parts = path.split("/")
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        return False
    if parts[0] == CHECKPOINTS:
        return len(parts) == 3 and _CHECKPOINT.fullmatch(parts[1]) is not None
    return (parts[0] == MODEL and len(parts) > 1) or path in SMALL


def _writer_of(folder: Path) -> str:
    """This folder on this boot of this machine: one lock on it means one process."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return hashlib.sha256(f"{socket.gethostname()}|{boot}|{folder.resolve()}".encode()).hexdigest()[:16]


def _aside(path: Path, folder: Path, name: str) -> str:
    """A link to a file that is never changed, which stays when the file goes; a copy where there are no links."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
    return name


def _last_rows(rows: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["attempt"]: row for row in rows if isinstance(row.get("attempt"), int)}


def _spent_s(row: dict[str, Any]) -> float:
    return float(sum(row.get("spans", {}).values()))


def _merge_ledger(here: Path, from_store: Path, spent: Any) -> None:
    """What the store knows, and what only this folder or the lease knows: no attempt is lost, none counted twice.

    Two attempts of the same number that began at different times (the store was away) are two: ours gets a new number.
    """
    theirs = list(JsonLines(from_store).rows()) if from_store.exists() else []
    attempts = _last_rows(theirs)
    lines = list(theirs)
    for row in spent if isinstance(spent, list) else []:
        if isinstance(row, dict) and isinstance(row.get("attempt"), int) and isinstance(row.get("spans"), dict):
            known = attempts.get(row["attempt"])
            if known is None or _spent_s(row) > _spent_s(known):
                lines.append({key: value for key, value in row.items() if key != "committed"})
                attempts[row["attempt"]] = row
    ours = list(JsonLines(here).rows()) if here.exists() else []
    for number, last in _last_rows(ours).items():
        known = attempts.get(number)
        began = [float(row["at"]) - _spent_s(row) for row in (last, known) if row]
        if known is not None and abs(began[0] - began[-1]) > 60:
            number, known = max(attempts) + 1, None
        if known is None:
            lines += [{**row, "attempt": number} for row in ours if row.get("attempt") == last["attempt"]]
        elif _spent_s(last) > _spent_s(known):
            lines.append(last)
        attempts[number] = last
    write_text(here, "".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in lines))
    from_store.unlink(missing_ok=True)
