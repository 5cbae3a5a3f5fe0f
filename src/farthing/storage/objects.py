"""Where copies are kept that outlive a machine: a local folder, or a bucket that fsspec reaches.

Six operations on objects, named by relative keys. An object is written whole or not at all, and
`create` writes only where nothing was: all that commits and leases need. `LocalStore` and
`BucketStore` try each operation once, within a time limit; `Retrying` tries again, with a deadline
of its own. Refuses to know what the objects mean, and to take credentials from anywhere but the
environment, or what the cloud's own library finds there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

from farthing.addresses import is_remote, without_secrets
from farthing.errors import InputError
from farthing.storage.files import DRAFT, Json, draft_of, fsync_path, parse_json

TRY_S = 30.0
MOST_SMALL_BYTES = 16 << 20  # of what is read whole: leases and commits
LEAST_BYTES_PER_S = 250e3  # a transfer slower than this is broken off and tried again
PAUSE_S, MOST_PAUSE_S, MOST_TRIES = 0.5, 20.0, 8
MOST_REFUSALS = 5

# The libraries' own retries are few: parts of a large object are worth one, all else is for
# `Retrying`.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": 5,
            "read_timeout": TRY_S,
            "retries": {"max_attempts": 0},
        }
    },
    "gs": {"consistency": "md5"},  # of what arrived, held against what was sent
}
_SAME = {"s3a": "s3", "gcs": "gs"}
# gcsfs asks by gRPC what kind of bucket it is unless told not to: no call here needs to know, and
# where gRPC is blocked each waits for a minute
_ENVIRONMENT = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
_LIBRARY_TRIES = 2
_EXTRA = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
Result = TypeVar("Result")


class StoreError(Exception):
    """An operation failed, or nobody knows whether it did; it may work later."""


class StoreRefuses(StoreError):
    """The store answered that it won't: credentials, permissions, or no such bucket."""


class NoSuchBucket(StoreRefuses):
    """The bucket of the store does not exist."""


class NoSuchObject(StoreError):
    """There is no object of that key."""


class Garbled(StoreError):
    """What arrived is not what the store says it holds."""


class TooLarge(Garbled):
    """An object has more bytes than anything of its kind; none of them was fetched."""


@dataclass(frozen=True)
class Entry:
    """An object in a list: its size, and when it was written in seconds since 1970 (None where
    unknown).
    """

    n_bytes: int
    at: float | None = None


class Store(Protocol):
    """Objects by key. Every operation raises `StoreError`."""

    name: str
    """The address for people, without secrets."""

    def create(self, key: str, data: bytes) -> bool:
        """Write an object where none is, in one step; False when there is one already."""

    def put(self, key: str, path: Path) -> None:
        """Write a file as an object."""

    def get(self, key: str) -> bytes:
        """A small object whole. Raises `NoSuchObject`, and `TooLarge` for more than
        `MOST_SMALL_BYTES`.
        """

    def fetch(self, key: str, path: Path, n_bytes: int) -> None:
        """An object of `n_bytes` into a file. Raises `NoSuchObject`, and `TooLarge` before it
        fetches more.
        """

    def list(self, prefix: str) -> dict[str, Entry]:
        """Every object whose key begins with `prefix`, which ends with a slash."""

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; one that is gone already is no fault."""


def open_store(address: str) -> Store:
    """The store at a folder or URL; nothing is asked of it yet. Raises `InputError`."""
    if not is_remote(address):
        return LocalStore(Path(address))
    protocol, _, path = address.partition("://")
    if protocol in ("file", "local"):
        return LocalStore(Path(path))
    try:
        return BucketStore(address)
    except (ImportError, ValueError) as error:
        package = _EXTRA.get(protocol)
        raise InputError(
            f"this store can't be reached from here: {error}",
            where=f"output_store: {without_secrets(address)}",
            to_do=f"pip install {package}"
            if package
            else "use a folder, s3://, gs:// or another scheme fsspec knows",
        ) from error


class LocalStore:
    """A folder, on a disk that outlives the machine."""

    def __init__(self, root: Path) -> None:
        self.root, self.name = root, str(root)

    def create(self, key: str, data: bytes) -> bool:
        """See `Store`. By a hard link; a file system without them gets an exclusive open, which a
        kill can tear.
        """
        final = self._path(key)
        with _draft_for(final) as draft, contextlib.suppress(FileExistsError):
            _write(draft, data)
            try:
                os.link(draft, final)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                _write(final, data)
            return True
        return False

    def put(self, key: str, path: Path) -> None:
        """See `Store`."""
        final = self._path(key)
        with _draft_for(final) as draft:
            shutil.copyfile(path, draft)
            fsync_path(draft)
            os.replace(draft, final)

    def get(self, key: str) -> bytes:
        """See `Store`."""
        with _os_faults(self._path(key)):
            _refuse_larger(self._path(key).stat().st_size, MOST_SMALL_BYTES, key)
            return self._path(key).read_bytes()

    def fetch(self, key: str, path: Path, n_bytes: int) -> None:
        """See `Store`."""
        with _os_faults(self._path(key)):
            _refuse_larger(self._path(key).stat().st_size, n_bytes, key)
            shutil.copyfile(self._path(key), path)

    def list(self, prefix: str) -> dict[str, Entry]:
        """See `Store`."""
        found = {}
        with _os_faults(self.root):
            for path in self._path(prefix).rglob("*"):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if path.is_file() and DRAFT not in path.name:
                        facts = path.stat()
                        found[path.relative_to(self.root).as_posix()] = Entry(
                            facts.st_size, facts.st_mtime
                        )
        return found

    def remove(self, keys: Iterable[str]) -> None:
        """See `Store`."""
        for key in keys:
            with _os_faults(self.root):
                path = self._path(key)
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # the last one takes its folder along
                    path.parent.rmdir()

    def _path(self, key: str) -> Path:
        return self.root / key


class BucketStore:
    """A bucket (or anything else) that fsspec reaches.

    `create` is the bucket's own condition (If-None-Match, a generation match) where the library can
    express it as mode="create". Where it can't, the key is looked up first and what was written is
    read back: two writers at the same instant can then both believe that they were first until they
    read.
    """

    def __init__(self, address: str) -> None:
        protocol = address.partition("://")[0]
        options = _OPTIONS.get(_SAME.get(protocol, protocol), {})
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import fsspec  # a third of a second, which a folder does not take

        kind = fsspec.get_filesystem_class(protocol)
        self.name = without_secrets(address.rstrip("/"))
        self._fs = kind(skip_instance_cache=True, use_listings_cache=False, **options)
        self._root = str(kind._strip_protocol(address)).rstrip("/")
        if hasattr(self._fs, "retries"):
            self._fs.retries = _LIBRARY_TRIES
        # gcsfs fixes its six tries, 33 s of pauses, when its class is made
        request = getattr(getattr(kind, "_request", None), "__wrapped__", None)
        if _SAME.get(protocol, protocol) == "gs" and request is not None:
            self._fs._request = import_module("gcsfs.retry").retry_request(retries=_LIBRARY_TRIES)(
                request.__get__(self._fs)
            )

    def create(self, key: str, data: bytes) -> bool:
        """See `Store`."""
        path = self._path(key)
        try:
            self._within(len(data), lambda: self._fs.pipe_file(path, data, mode="create"))
            return True
        except _Exists:
            return False
        except NoSuchObject as error:
            raise self._no_bucket() from error
        except _CanNot:
            if self._within(0, lambda: self._fs.exists(path)):
                return False
            self._within(len(data), lambda: self._fs.pipe_file(path, data))
            return self.get(key) == data

    def put(self, key: str, path: Path) -> None:
        """See `Store`."""
        n_bytes = path.stat().st_size
        try:
            if n_bytes < 1 << 20:  # one request, whatever the library does with files
                data = path.read_bytes()
                self._within(n_bytes, lambda: self._fs.pipe_file(self._path(key), data))
            else:
                self._within(n_bytes, lambda: self._fs.put_file(str(path), self._path(key)))
        except NoSuchObject as error:
            raise self._no_bucket() from error

    def get(self, key: str) -> bytes:
        """See `Store`."""
        path = self._path(key)
        _refuse_larger(self._within(0, lambda: self._fs.size(path)), MOST_SMALL_BYTES, key)
        return bytes(self._within(1 << 20, lambda: self._fs.cat_file(path)))

    def fetch(self, key: str, path: Path, n_bytes: int) -> None:
        """See `Store`."""
        _refuse_larger(self._within(0, lambda: self._fs.size(self._path(key))), n_bytes, key)
        self._within(n_bytes, lambda: self._fs.get_file(self._path(key), str(path)))

    def list(self, prefix: str) -> dict[str, Entry]:
        """See `Store`."""
        folder = self._path(prefix.rstrip("/"))

        def find() -> dict[str, Json]:
            self._fs.invalidate_cache()
            try:
                return dict(self._fs.find(folder, detail=True))
            except FileNotFoundError:
                return {}

        start = len(self._root.lstrip("/")) + 1
        return {
            name.lstrip("/")[start:]: Entry(int(facts["size"]), _seconds_of(facts))
            for name, facts in self._within(0, find).items()
            if facts.get("type") != "directory"
        }

    def remove(self, keys: Iterable[str]) -> None:
        """See `Store`."""
        for key in keys:
            with contextlib.suppress(NoSuchObject):
                self._within(0, partial(self._fs.rm_file, self._path(key)))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _no_bucket(self) -> StoreRefuses:
        """What it means that nothing is found where something is written."""
        return NoSuchBucket(f"{self.name}: there is no such bucket")

    def _within(self, n_bytes: int, operation: Callable[[], Result]) -> Result:
        """Do it in a thread of its own, which is left to itself when it takes too long. Raises
        `StoreError`.
        """
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((operation(), None))
            except BaseException as error:
                outcome.append((None, error))

        limit_s = TRY_S + n_bytes / LEAST_BYTES_PER_S
        thread = threading.Thread(target=run, name="store operation", daemon=True)
        thread.start()
        thread.join(limit_s)
        if not outcome:
            raise StoreError(f"{self.name}: no answer in {limit_s:.0f} s")
        result, error = outcome[0]
        if error is not None:
            raise _as_fault(error, self.name) from error
        return result


class _Exists(StoreError):
    """A conditional write found an object."""


class _CanNot(StoreError):
    """The library has no conditional write."""


class Retrying:
    """A store whose faults are waited out: jittered pauses that double, `total_s` for each thing
    that is asked.

    `stop` breaks a pause off. A refusal is retried too: a role's credentials come late, a 403
    passes.
    """

    def __init__(
        self,
        store: Store,
        total_s: float,
        stop: threading.Event | None = None,
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.name, self._store = store.name, store
        self._stop, self._pause_s = stop or threading.Event(), pause_s
        self._total_s = total_s
        self.has_answered = False
        """Whether the store has ever done what was asked: then a refusal may pass."""

    def create(self, key: str, data: bytes) -> bool:
        """See `Store`. What stands there already is read: if it is `data`, a reply was lost and it
        was this very write.

        So no two writers may create the same data.
        """
        return self._retried(lambda: self._store.create(key, data) or self._store.get(key) == data)

    def put(self, key: str, path: Path) -> None:
        """See `Store`."""
        self._retried(lambda: self._store.put(key, path))

    def get(self, key: str) -> bytes:
        """See `Store`."""
        return self._retried(lambda: self._store.get(key))

    def fetch(self, key: str, path: Path, n_bytes: int) -> None:
        """See `Store`."""
        self._retried(lambda: self._store.fetch(key, path, n_bytes))

    def list(self, prefix: str) -> dict[str, Entry]:
        """See `Store`."""
        return self._retried(lambda: self._store.list(prefix))

    def remove(self, keys: Iterable[str]) -> None:
        """See `Store`."""
        keys = list(keys)
        self._retried(lambda: self._store.remove(keys))

    def _retried(self, operation: Callable[[], Result]) -> Result:
        n_tries, until = 0, time.monotonic() + self._total_s
        while True:
            try:
                found = operation()
                self.has_answered = True
                return found
            except (NoSuchObject, TooLarge):
                self.has_answered = True
                raise
            except StoreError as fault:
                n_tries += 1
                most = MOST_REFUSALS if isinstance(fault, StoreRefuses) else MOST_TRIES
                pause_s = min(MOST_PAUSE_S, self._pause_s * 2 ** (n_tries - 1)) * random.uniform(
                    0.5, 1.5
                )
                late = time.monotonic() + pause_s > until
                if n_tries >= most or late or self._stop.wait(pause_s):
                    raise


def get_json(store: Store, key: str) -> Json:
    """A small object that others may have written; empty where none is there, or is understood.
    Raises `StoreError`.
    """
    with contextlib.suppress(NoSuchObject, TooLarge, ValueError):
        value = parse_json(store.get(key))
        if isinstance(value, dict):
            return value
    return {}


# ---- faults in words ----


@contextlib.contextmanager
def _os_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NoSuchObject(f"{path}: {error.strerror}") from error
    except PermissionError as error:
        raise StoreRefuses(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _draft_for(final: Path) -> Iterator[Path]:
    """A draft beside a file that is to be; nothing of it is left, and the folder's entries are on
    the disk.
    """
    with _os_faults(final):
        _make_folders(final.parent)
        draft = draft_of(final)
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)
        fsync_path(final.parent)


def _as_fault(error: BaseException, name: str) -> StoreError:
    """What an error of fsspec and the libraries below it means here."""
    if isinstance(error, StoreError):
        return error
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    code = str(getattr(error, "code", None) or getattr(error, "status", None) or "")
    seen = f"{text} {code} {getattr(error.__cause__, 'response', '')}"
    if isinstance(error, FileExistsError) or "PreconditionFailed" in seen or "412" in code:
        return _Exists(text)
    if isinstance(error, NotImplementedError) or (isinstance(error, TypeError) and "mode" in text):
        return _CanNot(text)
    if "Checksum" in text or "checksum" in text:
        return Garbled(f"{name}: {text}")
    no_bucket = "NoSuchBucket" in seen or "bucket does not exist" in text
    if isinstance(error, FileNotFoundError):
        return NoSuchBucket(f"{name}: {text}") if no_bucket else NoSuchObject(text)
    is_refusal = "Credential" in text or "OSError: Forbidden" in text or code in ("401", "403")
    if isinstance(error, PermissionError | FileNotFoundError) or is_refusal:
        return StoreRefuses(f"{name}: {text}")
    return StoreError(f"{name}: {text}")


def _seconds_of(facts: Json) -> float | None:
    for key in ("LastModified", "updated", "mtime", "created"):
        value = facts.get(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def _refuse_larger(n_bytes: int | None, most: int, key: str) -> None:
    if n_bytes is not None and n_bytes > most:
        raise TooLarge(f"{key} has {n_bytes:,} bytes, no more than {most:,} are expected")


def _make_folders(folder: Path) -> None:
    """Make a folder and what it is missing above it, each for its owner alone."""
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
