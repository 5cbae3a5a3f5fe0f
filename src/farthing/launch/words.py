"""What machines leave in the store for whoever watches: that they have booted, that they live, what they print, how they left.

    launch/NAME/booted.json   once, when farthing runs there
    launch/NAME/log.txt       the end of what was printed, anew every half minute: it is the beat too
    launch/NAME/left.json     the exit code, and why
    launch/LAUNCH/machines/NAME.json   the lines of a machine: other folders of the run count on from there
    launch/LAUNCH/stop.json   somebody wants the launch stopped, and whoever watches it heeds that

Where there is no store the shared run folder is one. Refuses to take such a word for a reason to train: the lease decides that.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path, PurePosixPath

from farthing.durability.accounts import Account, read_ledger, take_in
from farthing.durability.commits import list_commits
from farthing.durability.files import Damaged, Json, parse_json, seal, unseal
from farthing.durability.object_store import NoSuchObject, Store, StoreFault
from farthing.durability.run_folder import LEDGER
from farthing.errors import UserMistake
from farthing.launch.driver import Unclear
from farthing.launch.supervise import Word

BOOTED, LOG, LEFT, STOP, MACHINES = "booted.json", "log.txt", "left.json", "stop.json", "machines"


class StoreWords:
    """The words of machines in a store. `folder`: the run folder that all share, where the store is only that."""

    def __init__(self, store: Store, launch_id: str = "", folder: Path | None = None) -> None:
        self._store, self._launch, self._folder = store, f"launch/{launch_id}", folder

    def of(self, name: str) -> Word:
        """See `Words`."""
        place = f"launch/{name}"
        try:
            there = self._store.list(f"{place}/")
            left = self._get(f"{place}/{LEFT}") if f"{place}/{LEFT}" in there else {}
        except StoreFault as error:
            raise Unclear(str(error)) from error
        log = there.get(f"{place}/{LOG}")
        code = left.get("code")
        return Word(
            has_booted=f"{place}/{BOOTED}" in there,
            code=code if isinstance(code, int) else None,
            why=str(left.get("why") or "")[:200],
            beat="" if log is None else f"{log.n_bytes} {log.at}",
        )

    def log(self, name: str) -> str:
        """The end of what a machine has printed; empty where it has not yet."""
        try:
            return self._store.get(f"launch/{name}/{LOG}").decode("utf-8", "replace")
        except NoSuchObject:
            return ""
        except StoreFault as error:
            raise Unclear(str(error)) from error

    def is_stopped(self) -> bool:
        """See `Words`."""
        try:
            return f"{self._launch}/{STOP}" in self._store.list(f"{self._launch}/")
        except StoreFault as error:
            raise Unclear(str(error)) from error

    def ask_to_stop(self, *, is_wanted: bool) -> None:
        """Leave word that the launch be stopped, or take it back. Raises `Unclear`."""
        try:
            if is_wanted:
                self._store.create(f"{self._launch}/{STOP}", json.dumps({"at": time.time()}).encode())
            else:
                self._store.remove([f"{self._launch}/{STOP}"])
        except StoreFault as error:
            raise Unclear(str(error)) from error

    def committed(self) -> int:
        """See `Words`."""
        if self._folder is not None:
            return max([0, *(account.committed for account in self.accounts())])
        try:
            return max((commit.step for commit in list_commits(self._store)), default=0)
        except StoreFault as error:
            raise Unclear(str(error)) from error

    def accounts(self) -> list[Account]:
        """See `Words`. The newest link of the lease has the account of every attempt."""
        if self._folder is not None:
            return read_ledger(self._folder / LEDGER).ordered
        try:
            links = sorted(key for key in self._store.list("writers/") if key.endswith(".json"))
            rows = self._get(links[-1]).get("ledger") if links else []
        except StoreFault as error:
            raise Unclear(str(error)) from error
        told: dict[int, Account] = {}
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict):
                take_in(told, row)
        return [told[number] for number in sorted(told)]

    def keep(self, name: str, rows: list[Json]) -> None:
        """See `Words`. Where machines share a folder there is one ledger anyway."""
        if self._folder is None:
            text = seal({"kind": "farthing machine", "rows": rows})
            if not put_text(self._store, f"{self._launch}/{MACHINES}/{name}.json", text):
                raise Unclear("it does not take what is known of a machine")

    def kept(self) -> dict[str, list[Json]]:
        """See `Words`. Raises `UserMistake` for lines that are damaged: without them the cap can't be held."""
        found: dict[str, list[Json]] = {}
        try:
            for key in self._store.list(f"{self._launch}/{MACHINES}/") if self._folder is None else ():
                found[PurePosixPath(key).stem] = unseal(self._store.get(key).decode(), key)["rows"]
        except StoreFault as error:
            raise Unclear(str(error)) from error
        except (Damaged, KeyError, TypeError, UnicodeDecodeError) as error:
            raise UserMistake(
                f"what is known of a machine is damaged ({error})", where=f"{self._store.name}: {key}",
                to_do="look at the provider's bill for that machine, then remove the object",
            ) from error  # fmt: skip
        return found

    def _get(self, key: str) -> Json:
        with contextlib.suppress(NoSuchObject, ValueError):
            value = parse_json(self._store.get(key))
            if isinstance(value, dict):
                return value
        return {}


class Speaker:
    """The machine's side: what it leaves for us. Nothing here ends a run: a store that is away is tried again later."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._place = store, f"launch/{name}"

    def booted(self) -> None:
        """Say that farthing runs here; forget how an earlier try on this machine has left."""
        with contextlib.suppress(StoreFault):
            self._store.remove([f"{self._place}/{LEFT}"])
        self._put(BOOTED, json.dumps({"at": time.time()}))

    def beat(self, log: str) -> None:
        """The newest of what was printed."""
        self._put(LOG, log)

    def left(self, code: int, why: str) -> None:
        """Say how it ended, for as long as it takes to be heard: a quarter of a minute at most."""
        for _ in range(5):
            if self._put(LEFT, json.dumps({"code": code, "why": why, "at": time.time()})):
                return
            time.sleep(3.0)

    def _put(self, name: str, text: str) -> bool:
        return put_text(self._store, f"{self._place}/{name}", text)


def put_text(store: Store, key: str, text: str) -> bool:
    """Write a small object over what was there; whether the store took it."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            store.put(key, Path(file.name))
            return True
        except (StoreFault, OSError):
            return False
