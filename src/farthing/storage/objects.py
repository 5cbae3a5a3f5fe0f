"""Where copies are kept that outlive a machine: a folder, or a bucket of S3, Google or Azure.

Six operations on objects, named by relative keys. An object is written whole or not at all, and
`create` writes only where nothing was: all that commits and leases need. `ObjectStore` tries each
operation once, within a time limit; `Retrying` tries again, with a deadline of its own. Credentials
come from the environment, or from where the cloud keeps them on a machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from farthing.addresses import is_remote, without_secrets
from farthing.errors import InputError
from farthing.storage.files import DamagedFileError, Json, fsync_path, make_private, unseal

TRY_S = 30.0
MOST_SMALL_BYTES = 16 << 20  # of what is read whole: leases and commits
PART_BYTES, N_AT_ONCE = 8 << 20, 4  # large objects travel in parts
LEAST_BYTES_PER_S = 250e3  # a transfer slower than this is broken off and tried again
MOST_PARTS = 9000  # S3 takes 10,000
PAUSE_S, MOST_PAUSE_S, MOST_TRIES = 0.5, 20.0, 8
MOST_REFUSALS = 5
BUCKETS = ("s3", "gs", "az")
# What the library's errors have no classes for, or not for each request: its text is matched.
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
_REFUSAL = re.compile(
    "status code: 40[13]|redirect|[Cc]redential|token request|privileges|[Pp]ermission denied"
)
_NO_LINKS = re.compile(rf"os error ({errno.EPERM}|{errno.ENOTSUP}|{errno.ENOSYS}|{errno.EMLINK})\b")
Result = TypeVar("Result")


class StoreError(Exception):
    """An operation failed, or nobody knows whether it did; it may work later."""


class StoreRefusedError(StoreError):
    """The store answered that it won't: credentials, permissions, or no such bucket."""


class NoSuchBucketError(StoreRefusedError):
    """The bucket of the store does not exist."""


class NoSuchObjectError(StoreError):
    """There is no object of that key."""


@dataclass(frozen=True)
class Entry:
    """What a list says of an object: its size, and when it was written in seconds since 1970."""

    n_bytes: int
    at: float
    tag: str = ""
    """Another one where the content is another."""


def open_store(address: str) -> ObjectStore:
    """The store at a folder or URL; nothing is asked of it yet. Raises `InputError`."""
    protocol, _, path = address.partition("://") if is_remote(address) else ("file", "", address)
    if protocol not in (*BUCKETS, "file"):
        raise InputError(
            f"{protocol}:// is no store",
            where=f"output_store: {without_secrets(address)}",
            to_do="name a folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
        )
    return ObjectStore(address if protocol in BUCKETS else path)


class ObjectStore:
    """Objects by key: in a folder on a disk that outlives the machine, or in a bucket of S3 (or of
    what speaks it), Google Cloud Storage or Azure. Every operation raises `StoreError`.

    `create` is the bucket's own condition (If-None-Match, or a generation match), or a hard link in
    a folder; where there are none an exclusive open, which a kill can tear. Raises `InputError` for
    an address or a configuration that names no bucket.
    """

    def __init__(self, address: str) -> None:
        self.name, self._address = without_secrets(address.rstrip("/")), address
        """The name is the address for people."""
        if is_remote(address):
            self._small, self._bulk  # noqa: B018 - a wrong address is refused here

    @cached_property
    def _small(self) -> Any:
        return self._client(TRY_S)

    @cached_property
    def _bulk(self) -> Any:
        return self._client(TRY_S + N_AT_ONCE * PART_BYTES / LEAST_BYTES_PER_S)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object where none is, in one step; False when there is one already."""
        with contextlib.suppress(FileExistsError), self._writing(key):
            try:
                self._small.put(key, data, mode="create")
            except Exception as error:
                if is_remote(self._address) or not _NO_LINKS.search(str(error)):
                    raise
                path = Path(self._address, key)
                with open(path, "xb") as file:
                    try:
                        file.write(data)
                        file.flush()
                    except OSError:  # half an object would be one that another has written
                        path.unlink()
                        raise
            return True
        return False

    def put(self, key: str, content: Path | bytes) -> None:
        """Write a file, or a few bytes, over what may be there."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        part_bytes = max(PART_BYTES, size // MOST_PARTS)
        with self._writing(key):
            self._bulk.put(key, content, chunk_size=part_bytes, max_concurrency=N_AT_ONCE)

    def get(self, key: str) -> bytes:
        """Raises `NoSuchObjectError`, and `DamagedFileError` for more than `MOST_SMALL_BYTES`."""
        with self._faults():
            found = self._small.get(key)
            _refuse_larger(found.meta["size"], MOST_SMALL_BYTES, key)
            return bytes(found.bytes())

    def head(self, key: str) -> Entry:
        """What a list would say of an object. Raises `NoSuchObjectError`."""
        with self._faults():
            return _entry_of(self._small.head(key))

    def fetch(
        self,
        key: str,
        path: Path,
        n_bytes: int,
        progress: Callable[[int], None] = lambda n_bytes: None,
    ) -> None:
        """Into a file; `progress` gets the size of each part. Raises `NoSuchObjectError`,
        `DamagedFileError` for a larger object, of which nothing is fetched, and `OSError` where
        `path` can't be written.
        """
        size = self.head(key).n_bytes
        _refuse_larger(size, n_bytes, key)
        path.write_bytes(b"")

        def fetch_part(start: int) -> None:
            with self._faults():
                end = min(start + PART_BYTES, size)
                data = self._bulk.get_range(key, start=start, end=end)
            with open(path, "r+b") as file:
                file.seek(start)
                file.write(data)
            progress(end - start)

        with ThreadPoolExecutor(N_AT_ONCE) as pool:
            list(pool.map(fetch_part, range(0, size, PART_BYTES)))

    def list(self, prefix: str) -> dict[str, Entry]:
        """Every object whose key begins with `prefix`, which ends with a slash."""
        with self._faults():
            found = self._small.list(prefix).collect()
        return {each["path"]: _entry_of(each) for each in found}

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is gone already is no fault."""
        for key in keys:
            with contextlib.suppress(NoSuchObjectError), self._faults():
                self._small.delete(key)

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        """An object of a folder is its owner's alone, and forced to the disk."""
        with self._faults(is_write=True):
            path = Path(self._address, key)
            if not is_remote(self._address):
                self._small  # noqa: B018 - the store's own folder comes first
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            yield
            if not is_remote(self._address):
                fsync_path(path)
                fsync_path(path.parent)

    @contextlib.contextmanager
    def _faults(self, *, is_write: bool = False) -> Iterator[None]:
        """What the library's errors mean here. Raises `StoreError`, and `FileExistsError` where a
        condition does not hold."""
        from obstore import exceptions

        try:
            yield
        except (StoreError, FileExistsError):
            raise
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise FileExistsError from error
        except (exceptions.BaseError, OSError, ValueError) as error:
            text = str(error)
            is_absent = isinstance(error, FileNotFoundError)
            if (is_absent and is_write) or _NO_BUCKET.search(text):
                raise NoSuchBucketError(f"{self.name}: there is no such bucket") from error
            if is_absent:
                raise NoSuchObjectError(_first_line(error)) from error
            kind = StoreRefusedError if _REFUSAL.search(text) else StoreError
            raise kind(f"{self.name}: {_first_line(error)}") from error

    def _client(self, request_s: float) -> Any:
        """A client whose requests end within a time and are tried twice."""
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url

        if not is_remote(self._address):
            root = Path(self._address)
            try:
                return LocalStore(
                    root if root.exists() else make_private(root), automatic_cleanup=True
                )
            except OSError as error:
                raise NoSuchBucketError(f"{root}: {error.strerror or error}") from error
        options: dict[str, Any] = {
            "client_options": {
                "timeout": timedelta(seconds=request_s),
                "connect_timeout": timedelta(seconds=min(5.0, request_s)),
                "allow_http": True,  # where the environment names such an endpoint
            },
            "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=request_s)},
        }
        if self._address.startswith("s3://"):
            options["checksum_algorithm"] = "SHA256"  # of each request, held against what arrived
            if not os.environ.get("AWS_ACCESS_KEY_ID"):
                with contextlib.suppress(ImportError, ValueError):  # profiles and logins of ~/.aws
                    from obstore.auth.boto3 import Boto3CredentialProvider

                    options["credential_provider"] = Boto3CredentialProvider()
        try:
            return from_url(self._address, **options)
        except (BaseError, ValueError) as error:
            to_do = "check the address, and the variables of the environment with the credentials"
            if "Account must be specified" in str(error):
                to_do = "export AZURE_STORAGE_ACCOUNT_NAME=..., and AZURE_STORAGE_ACCOUNT_KEY=..."
            raise InputError(_first_line(error), where=self.name, to_do=to_do) from error


def _entry_of(meta: Any) -> Entry:
    return Entry(meta["size"], meta["last_modified"].timestamp(), meta["e_tag"] or "")


def _refuse_larger(n_bytes: int, most: int, key: str) -> None:
    if n_bytes > most:
        raise DamagedFileError(f"{key} has {n_bytes:,} bytes, no more than {most:,} are expected")


def _first_line(error: BaseException) -> str:
    """An error of the library without its source, and without the queries that sign addresses."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    if asked := re.search(r"https?://([^/\s?]+)\S* in .* - (.*)", first):
        what = asked[2].partition(": <")[0].partition("status code: ")
        if "error sending request" in what[0]:
            return f"no connection to {asked[1]}"
        return f"{asked[1]} answers {what[2]}" if what[2] else f"{asked[1]}: {what[0]}"
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", first)[:300]


def _again(name: str) -> Any:
    """An operation of `ObjectStore`, tried until it is done."""
    return lambda self, *given: self._retried(lambda: getattr(self._store, name)(*given))


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
        self.name: str = store.name
        self._store = store
        self._stop, self._pause_s = stop or threading.Event(), pause_s
        self._total_s = total_s
        self.has_answered = False
        """Whether the store has ever done what was asked: then a refusal may pass."""

    def create(self, key: str, data: bytes) -> bool:
        """What stands there already is read: if it is `data`, a reply was lost and it was this very
        write.

        So no two writers may create the same data.
        """
        return self._retried(lambda: self._store.create(key, data) or self._store.get(key) == data)

    put, get, fetch = _again("put"), _again("get"), _again("fetch")
    list, remove = _again("list"), _again("remove")

    def _retried(self, operation: Callable[[], Result]) -> Result:
        n_tries, until = 0, time.monotonic() + self._total_s
        while True:
            try:
                found = operation()
                self.has_answered = True
                return found
            except (NoSuchObjectError, DamagedFileError):
                self.has_answered = True
                raise
            except StoreError as fault:
                n_tries += 1
                most = MOST_REFUSALS if isinstance(fault, StoreRefusedError) else MOST_TRIES
                pause_s = min(MOST_PAUSE_S, self._pause_s * 2 ** (n_tries - 1))
                pause_s *= random.uniform(0.5, 1.5)
                late = time.monotonic() + pause_s > until
                if n_tries >= most or late or self._stop.wait(pause_s):
                    raise


Store = ObjectStore | Retrying


def get_sealed(store: Store, key: str, name: str = "") -> Json:
    """What `seal` wrote, called `name`. Raises `DamagedFileError`, `StoreError`."""
    return twice_if_damaged(lambda: unseal(store.get(key).decode("utf-8", "replace"), name or key))


def twice_if_damaged(read: Callable[[], Result]) -> Result:
    """The first time it may have been the transfer. Raises `DamagedFileError`."""
    try:
        return read()
    except DamagedFileError:
        return read()
