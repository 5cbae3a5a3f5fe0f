"""Which machine holds a run: a chain of links in the store, each created only where none was.

    writers/00000007.json

Whoever adds the next link holds the run; a renewal is the next link too, so it fails as soon as
somebody else has taken over. The number of the link that began a hold is its epoch, the fencing
token of its commits. A link also carries the last word of every attempt's ledger, so that money
spent since the last commit is known to whoever comes next. Refuses to trust clocks: one that is off
costs time, never two holders.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from farthing.errors import RunInterruptedError
from farthing.storage.files import Json
from farthing.storage.objects import Store, StoreError, get_json
from farthing.units import say_seconds

N_LINKS = 8
_LINK = re.compile(r"writers/(\d{8})\.json")
Words = Callable[[], list[Json]]


class LeaseLostError(Exception):
    """Another machine holds the run now. The message says which."""


class Lease:
    """The hold of the run in `folder`. `words` gives the last ledger row of each attempt; `say` is
    for waiting.
    """

    def __init__(
        self, folder: Path, lease_s: float, words: Words, say: Callable[[str], None]
    ) -> None:
        self.epoch: int | None = None
        """The fencing token of this attempt; None until the store could be asked."""
        boot = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        self.writer = hashlib.sha256(
            f"{socket.gethostname()}|{boot}|{folder.resolve()}".encode()
        ).hexdigest()[:16]
        """This folder on this boot of this machine: one lock on it means one process."""
        self.renewed_at = -1e9
        self._folder, self._lease_s, self._words, self._say = folder, lease_s, words, say
        self._number = 0
        self._lock = threading.Lock()

    def claim(self, store: Store, should_stop: Callable[[], bool]) -> list[Json]:
        """Take the run, when nobody alive holds it; returns the words of who held it.

        A folder takes over from itself at once: its lock says that the other process is gone.
        Raises `LeaseLostError`,
        `StoreError`, `RunInterruptedError`.
        """
        number, before = _newest(store), []
        if number:
            link = get_json(store, _key(number))
            if link.get("writer") != self.writer and not link.get("released"):
                number, link = self._wait_for_silence(store, number, link, should_stop)
            before = _words_of(link)
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
        """Hold the run for another while. Raises `LeaseLostError`, `StoreError`."""
        assert self.epoch is not None
        with self._lock:
            self._add(store, self._number + 1, self.epoch, self._words())
            with contextlib.suppress(StoreError):
                if self._number > N_LINKS:
                    store.remove([_key(self._number - N_LINKS)])

    def release(self, store: Store) -> None:
        """Give the run back, so that others need not wait. Raises `LeaseLostError`, `StoreError`."""  # noqa: E501
        if self.epoch is not None and self._lock.acquire(timeout=2.0):
            try:
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
        stalled = (
            time.monotonic() - self.renewed_at > self._lease_s
        )  # so long that this number may be gone again
        is_new = store.create(_key(number), json.dumps(link).encode())
        newest = _newest(store) if stalled or not is_new else number
        if is_new and newest < number:
            raise StoreError(
                "what was just written is in no list of the store: it can't keep two machines apart"
            )
        if not is_new or newest > number:
            raise LeaseLostError(_holder_in_words(get_json(store, _key(max(number, newest)))))
        self._number, self.renewed_at = number, time.monotonic()

    def _wait_for_silence(
        self, store: Store, number: int, link: Json, should_stop: Callable[[], bool]
    ) -> tuple[int, Json]:
        """The newest link, once its holder has added none for as long as its lease, or has given
        the run back.
        """
        lease_s = min(float(link.get("lease_s", 0.0)), 3600.0)
        if time.time() - float(link.get("at", 0.0)) > 2 * lease_s:
            return number, link
        self._say(
            f"{link.get('host')} held this run a moment ago: waiting up to {say_seconds(lease_s)}"
            " to see whether it lives"
        )
        until = time.monotonic() + lease_s
        while time.monotonic() < until:
            if should_stop():
                raise RunInterruptedError("stopped while waiting for the lease")
            time.sleep(min(1.0, lease_s / 10))
            newest = _newest(store)
            if newest > number:
                other = get_json(store, _key(newest))
                if not other.get("released"):
                    raise LeaseLostError(_holder_in_words(other))
                return newest, other
        return number, link


def newest_words(store: Store) -> list[Json]:
    """The ledger rows that whoever holds the run, or held it last, has told the store. Raises
    `StoreError`.
    """
    return _words_of(get_json(store, _key(number))) if (number := _newest(store)) else []


def _words_of(link: Json) -> list[Json]:
    rows = link.get("ledger")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _key(number: int) -> str:
    return f"writers/{number:08d}.json"


def _newest(store: Store) -> int:
    """The number of the newest link; 0 when there is none."""
    return max(
        (int(match[1]) for key in store.list("writers/") if (match := _LINK.fullmatch(key))),
        default=0,
    )


def _holder_in_words(link: Json) -> str:
    return (
        f"{link.get('host', 'another machine')} is training this run in"
        f" {link.get('folder', 'its folder')}"
    )
