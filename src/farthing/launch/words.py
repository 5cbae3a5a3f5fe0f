"""What machines leave in the store for whoever watches: that they have booted, that they live, what
they print, how they left.

    launch/NAME/booted.json   once, when farthing runs there
    launch/NAME/log.txt       the end of what was printed, anew every half minute: it is the beat
    too
    launch/NAME/left.json     the exit code, and why
    launch/NAME/price.json    what the provider charges for it, told by whoever watches
    launch/LAUNCH/machines/NAME.json   the lines of a machine: other folders of the run count on
    from there
    launch/LAUNCH/stop.json   somebody wants the launch stopped, and whoever watches it heeds that

Where there is no store the shared run folder is one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from farthing.errors import InputError, RunChangedError
from farthing.launch.driver import UnclearError
from farthing.run.accounts import Account, accounts_of, read_ledger
from farthing.run.commits import list_commits, read_commit
from farthing.run.folder import LEDGER
from farthing.storage.files import DamagedFileError, Json, parse_json, read_json, seal
from farthing.storage.lease import newest_words
from farthing.storage.objects import NoSuchObjectError, Store, StoreError, get_sealed

BOOTED, LOG, LEFT, STOP, MACHINES = "booted.json", "log.txt", "left.json", "stop.json", "machines"
PRICE = "price.json"


@dataclass(frozen=True)
class Word:
    """What a machine has said of itself in the store."""

    has_booted: bool = False
    code: int | None = None
    why: str = ""
    beat: str = ""
    """Changes as long as the machine lives."""


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """Also as a decorator. Raises `UnclearError` where the store does not answer."""
    try:
        yield
    except StoreError as error:
        raise UnclearError(str(error)) from error


class StoreWords:
    """The words of machines in a store. `folder`: the run folder that all share, where the store is
    only that. Every call may raise `UnclearError`.
    """

    def __init__(self, store: Store, launch_id: str = "", folder: Path | None = None) -> None:
        self._store, self._launch, self._folder = store, f"launch/{launch_id}", folder

    @_answered()
    def of(self, name: str) -> Word:
        place = f"launch/{name}"
        there = self._store.list(f"{place}/")
        left: Json = {}
        if f"{place}/{LEFT}" in there:
            with contextlib.suppress(NoSuchObjectError, DamagedFileError):
                left = get_sealed(self._store, f"{place}/{LEFT}")
        log, code = there.get(f"{place}/{LOG}"), left.get("code")
        return Word(
            has_booted=f"{place}/{BOOTED}" in there,
            code=code if isinstance(code, int) else None,
            why=str(left.get("why") or "")[:200],
            beat="" if log is None else f"{log.n_bytes} {log.at}",
        )

    @_answered()
    def tell_price(self, name: str, usd_per_hour: float) -> None:
        """Leave the price that the provider charges where the machine finds it."""
        text = seal({"usd_per_hour": usd_per_hour})
        self._store.put(f"launch/{name}/{PRICE}", text.encode())

    @_answered()
    def log(self, name: str) -> str:
        """The end of what a machine has printed; empty where it has not yet."""
        with contextlib.suppress(NoSuchObjectError):
            return self._store.get(f"launch/{name}/{LOG}").decode("utf-8", "replace")
        return ""

    @_answered()
    def is_stopped(self) -> bool:
        """Whether somebody has asked, from anywhere, that the launch be stopped."""
        return f"{self._launch}/{STOP}" in self._store.list(f"{self._launch}/")

    @_answered()
    def ask_to_stop(self, *, is_wanted: bool) -> None:
        """Leave word that the launch be stopped, or take it back. Raises `UnclearError`."""
        if is_wanted:
            self._store.put(f"{self._launch}/{STOP}", json.dumps({"at": time.time()}).encode())
        else:
            self._store.remove([f"{self._launch}/{STOP}"])

    @_answered()
    def committed(self) -> int:
        if self._folder is not None:
            return max([0, *(account.committed for account in self.accounts())])
        return max((commit.step for commit in list_commits(self._store)), default=0)

    @_answered()
    def accounts(self) -> list[Account]:
        """What each attempt has cost: the newest link of the lease has every account."""
        if self._folder is not None:
            return read_ledger(self._folder / LEDGER).accounts
        return accounts_of(newest_words(self._store))

    @_answered()
    def run_file(self, name: str) -> Json:
        """What a small file of the run says; empty where it can't be read."""
        if self._folder is not None:
            with contextlib.suppress(OSError, ValueError):
                return dict(read_json(self._folder / name))
            return {}
        for commit in list_commits(self._store):
            with contextlib.suppress(
                DamagedFileError, NoSuchObjectError, RunChangedError, ValueError, TypeError
            ):
                for entry in read_commit(self._store, commit)["files"]:
                    if entry["path"] == name:
                        data = self._store.get(entry["object"])
                        if hashlib.sha256(data).hexdigest() == entry["sha256"]:
                            return dict(parse_json(data))
        return {}

    @_answered()
    def keep(self, name: str, rows: list[Json]) -> None:
        """Leave the lines of a machine where other folders of this run find them."""
        if self._folder is None:
            text = seal({"kind": "farthing machine", "rows": rows})
            self._store.put(f"{self._launch}/{MACHINES}/{name}.json", text.encode())

    @_answered()
    def kept(self) -> dict[str, list[Json]]:
        """The lines of every machine of this run, whichever folder it was asked for from.

        Raises `InputError` for lines that are damaged: without them the cap can't be held.
        """
        found: dict[str, list[Json]] = {}
        there = self._store.list(f"{self._launch}/{MACHINES}/") if self._folder is None else {}
        for key in there:
            try:
                found[PurePosixPath(key).stem] = get_sealed(self._store, key)["rows"]
            except (DamagedFileError, KeyError) as error:
                raise InputError(
                    f"the record of a machine is damaged ({error})",
                    where=f"{self._store.name}: {key}",
                    to_do="look at the provider's bill for that machine, then remove the object",
                ) from error
        return found


class Speaker:
    """What a machine leaves for us. A store that is away is tried again, and ends no run."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._place = store, f"launch/{name}"

    def booted(self) -> None:
        """Say that farthing runs here; forget how an earlier try on this machine has left."""
        with contextlib.suppress(StoreError):
            self._store.remove([f"{self._place}/{LEFT}"])
        self._put(BOOTED, json.dumps({"at": time.time()}))

    def price(self) -> float | None:
        """Dollars an hour that this machine costs, where whoever watches has told them."""
        with contextlib.suppress(StoreError, DamagedFileError, KeyError, TypeError, ValueError):
            told = float(get_sealed(self._store, f"{self._place}/{PRICE}")["usd_per_hour"])
            return told if 0 < told < 100_000 else None
        return None

    def beat(self, log: str) -> None:
        self._put(LOG, log)

    def left(self, code: int, why: str) -> None:
        """Say how it ended, for as long as it takes to be heard: a quarter of a minute at most."""
        for _ in range(5):
            if self._put(LEFT, seal({"code": code, "why": why, "at": time.time()})):
                return
            time.sleep(3.0)

    def _put(self, name: str, text: str) -> bool:
        with contextlib.suppress(StoreError, OSError):
            self._store.put(f"{self._place}/{name}", text.encode())
            return True
        return False
