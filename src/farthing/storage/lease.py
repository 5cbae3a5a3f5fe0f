"""Which machine holds a run: a chain of links in the store, each created only where none was.

    machine A     writers/00000006.json  00000007.json                       (suspended)  00000008?
    machine B                                          00000008.json  00000009.json

Whoever adds the next link holds the run. A renewal is the next link too, so it fails as soon as
somebody else has taken over; old links are removed, so a renewal also asks whether its link is the
newest. The number of the link that began a hold is its epoch, the fencing token of its commits. A
link carries the newest accounts of the ledger: money spent since the last commit is known to
whoever comes next. Who has lost the run leaves its own account in `bills/`. All are sealed: a
damaged link is one of somebody who may be alive.

No clock decides who holds a run. A claimer waits by its own clock whether the holder adds a link;
`Gaps` tells a holder that was suspended to ask before it continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import operator
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from farthing.clock import seconds_since_boot
from farthing.errors import RunInterruptedError
from farthing.storage.files import DamagedFileError, Json, seal
from farthing.storage.objects import NoSuchObjectError, Store, StoreError, get_sealed
from farthing.units import say_seconds

N_LINKS = 8
MOST_LEASE_S = 3600.0
STALE_S, LOOK_AGAIN_S = 30.0, 0.5
"""For so long, and so often, a list is asked for that has yet to show what was just written."""
_LINK = re.compile(r"writers/(\d{8})\.json")
_BILL = re.compile(r"bills/[0-9a-f-]{1,80}\.json")
Words = Callable[[], list[Json]]


class LeaseLostError(Exception):
    """Another machine holds the run now. The message says which."""


class Gaps:
    """Whether time has passed in which this process did not run: a suspended laptop, a stopped
    process, a clock that was set. `tick` from a thread, several times in each `most_s`.
    """

    def __init__(
        self,
        most_s: float,
        clocks: tuple[Callable[[], float], ...] = (seconds_since_boot, time.time),
    ) -> None:
        self._most_s, self._clocks = most_s, clocks
        self._last = [clock() for clock in clocks]
        self._was_gap = False
        self._lock = threading.Lock()

    def tick(self) -> None:
        with self._lock:
            now = [clock() for clock in self._clocks]
            passed = map(operator.sub, now, self._last)
            self._was_gap |= any(abs(seconds) > self._most_s for seconds in passed)
            self._last = now

    def taken(self) -> bool:
        """Whether there was a gap since this was last asked."""
        self.tick()
        with self._lock:
            was_gap, self._was_gap = self._was_gap, False
            return was_gap


class Lease:
    """The hold of the run in `folder`. `words` gives the ledger's rows; `say` is for waiting."""

    def __init__(
        self, folder: Path, lease_s: float, words: Words, say: Callable[[str], None]
    ) -> None:
        self.epoch = 0
        """The fencing token of this attempt; 0 until it has the run."""
        own = f"{socket.gethostname()}|{folder.resolve()}"
        with contextlib.suppress(OSError):  # containers may share host name and path
            own += f"|{folder.stat().st_dev}|{folder.stat().st_ino}"
            own += Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        self.writer = hashlib.sha256(own.encode()).hexdigest()[:16]
        """This folder on this boot of this machine: one lock on it means one process."""
        self.renewed_at = -math.inf
        """By the clock that counts suspended time."""
        self._folder, self._lease_s, self._words, self._say = folder, lease_s, words, say
        self._number, self._is_released = 0, False
        self._lock = threading.Lock()

    def claim(self, store: Store, should_stop: Callable[[], bool]) -> list[Json]:
        """Take the run, when nobody alive holds it; returns the words of who held it.

        A folder takes over from itself at once: its lock says that the other process is gone.
        Raises `LeaseLostError`,
        `StoreError`, `RunInterruptedError`.
        """
        number = _newest(store)
        link = _link(store, number) if number else {"released": True}
        if link.get("writer") != self.writer and not link.get("released"):
            number = self._wait_for_silence(store, number, link, should_stop)
        before = _words_until(store, number)
        self._add(store, number + 1, number + 1, before)
        self.epoch = number + 1
        key = f"writers/condition-{self.epoch:08d}"
        if store.create(key, b"first") and store.create(key, b"second"):
            self._say(
                f"{store.name} overwrites where it was told not to: it can't keep two machines"
                " apart"
            )
        store.remove([key])
        return before

    def renew(self, store: Store) -> None:
        """Hold the run for another while. Raises `LeaseLostError`, also where another thread has
        given it back meanwhile, and `StoreError`.
        """
        with self._lock:
            if self._is_released:
                raise LeaseLostError("this process has given the run back")
            self._add(store, self._number + 1, self.epoch, self._words())
            with contextlib.suppress(StoreError):
                if self._number > N_LINKS:
                    store.remove([_key(self._number - N_LINKS)])

    def release(self, store: Store) -> None:
        """So that others need not wait. Raises `LeaseLostError`, `StoreError`."""
        if self.epoch and self._lock.acquire(timeout=2.0):
            try:
                self._is_released = True
                self._add(store, self._number + 1, self.epoch, self._words(), is_last=True)
            finally:
                self._lock.release()

    def _add(
        self, store: Store, number: int, epoch: int, words: list[Json], *, is_last: bool = False
    ) -> None:
        link = {
            "epoch": epoch,
            "writer": self.writer,
            "host": socket.gethostname(),
            "folder": str(self._folder),
            "at": time.time(),
            "lease_s": self._lease_s,
            "released": is_last,
            "nonce": uuid.uuid4().hex,
            "ledger": words,
        }
        while not store.create(_key(number), seal(link).encode()):
            there = _link(store, number)
            if not there:
                raise StoreError(f"{_key(number)} is damaged")
            if (there.get("writer"), there.get("epoch")) != (self.writer, epoch):
                raise LeaseLostError(_holder_in_words(there))
            number += 1  # the answer to an earlier request was lost
        self._number = number  # also where the store does not answer what comes now
        until = seconds_since_boot() + STALE_S
        while (newest := _newest(store)) < number:
            if seconds_since_boot() > until:
                raise StoreError(
                    "the store's lists lack a new object: it can't keep two machines apart"
                )
            time.sleep(LOOK_AGAIN_S)
        if newest > number:
            raise LeaseLostError(_holder_in_words(_link(store, newest)))
        self.renewed_at = seconds_since_boot()

    def leave_bill(self, store: Store) -> None:
        """What this attempt has cost, for whoever holds the run now. Raises `StoreError`."""
        text = seal({"ledger": self._words(), "nonce": uuid.uuid4().hex})
        store.create(f"bills/{self.writer}-{uuid.uuid4().hex[:8]}.json", text.encode())

    def _wait_for_silence(
        self, store: Store, number: int, link: Json, should_stop: Callable[[], bool]
    ) -> int:
        """The newest link, once its holder is silent for its lease or has given it back."""
        told = link.get("lease_s")
        lease_s = min(told if isinstance(told, int | float) else self._lease_s, MOST_LEASE_S)
        who = link.get("host", f"somebody whose newest word, {_key(number)}, is damaged")
        self._say(
            f"{who} held this run last: waiting up to {say_seconds(lease_s)} to see whether it"
            " lives"
        )
        until = seconds_since_boot() + lease_s
        while seconds_since_boot() < until:
            if should_stop():
                raise RunInterruptedError("stopped while waiting for the lease")
            time.sleep(min(1.0, lease_s / 10))
            newest = _newest(store, number)
            if newest > number:
                other = _link(store, newest)
                if not other.get("released"):
                    raise LeaseLostError(_holder_in_words(other))
                return newest
        return number


def newest_words(store: Store) -> list[Json]:
    """The ledger rows of whoever holds the run, or held it last. Raises `StoreError`."""
    return _words_until(store, _newest(store))


def bills_left(store: Store, known: set[str], say: Callable[[str], None]) -> list[Json]:
    """The ledger rows of attempts that lost the run; `known` keys are passed over."""
    rows: list[Json] = []
    for key in store.list("bills/"):
        if key not in known and _BILL.fullmatch(key):
            try:
                rows += _words_of(get_sealed(store, key))
            except DamagedFileError as error:
                say(f"what another machine has spent on this run is not on its bill: {error}")
            known.add(key)
    return rows


def _words_until(store: Store, number: int) -> list[Json]:
    """Of the newest whole link up to a number."""
    links = (_link(store, each) for each in range(number, max(0, number - N_LINKS), -1))
    return next((_words_of(link) for link in links if link), [])


def _words_of(link: Json) -> list[Json]:
    rows = link.get("ledger")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _link(store: Store, number: int) -> Json:
    """Empty where there is none, or it is damaged. Raises `StoreError`."""
    with contextlib.suppress(NoSuchObjectError, DamagedFileError):
        return get_sealed(store, _key(number))
    return {}


def _key(number: int) -> str:
    return f"writers/{number:08d}.json"


def _newest(store: Store, known: int = 0) -> int:
    """0 when there is none. A list may lack the last links: the next are asked for by number."""
    numbers = (int(match[1]) for key in store.list("writers/") if (match := _LINK.fullmatch(key)))
    newest = max(numbers, default=known)
    with contextlib.suppress(NoSuchObjectError):
        while newest:
            store.get(_key(newest + 1))
            newest += 1
    return newest


def _holder_in_words(link: Json) -> str:
    return (
        f"{link.get('host', 'another machine')} is training this run in"
        f" {link.get('folder', 'its folder')}"
    )
