"""Files behind an address, fetched into the cache.

Web addresses are checked where a connection is made, so that redirects and names that lead there
are refused too.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from farthing.addresses import is_metadata_host, without_secrets
from farthing.errors import DataError, InputError
from farthing.storage.files import belongs_to_another, own_folder, sha256_of
from farthing.storage.objects import BUCKETS, BucketStore, NoSuchObject, StoreError

_NO_HOSTS = (
    *BUCKETS,
    "s3a",
    "gcs",
    "abfs",
    "abfss",
    "adl",
    "hf",
    "memory",
    "file",
    "local",
    "github",
)
_PIECE_BYTES = 1 << 20


class _Refused(OSError):
    """A connection to where credentials are kept."""


def fetch(
    url: str,
    cache_dir: Path,
    progress: Callable[[str, int, int | None], None] = lambda what, done, total: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Path:
    """Copy a remote file into the cache, never stale: the copy is named by URL and version (ETag
    and the like).

    Without a version it is fetched each time and named by its content. `progress(what, bytes done,
    bytes in all or None)`. Raises `DataError`.
    """
    shown = without_secrets(url)
    refuse_metadata(url)
    try:
        source = _Object(url) if url.partition("://")[0] in BUCKETS else _File(url)
        folder = own_folder(cache_dir / "downloads", warn)
        endings = "".join(Path(urlsplit(shown).path).suffixes[-2:])

        def named(version: str) -> Path:
            # the query is part of what is asked for; user and password are not
            asked = re.sub(r"://[^/?#]*@", "://", url)
            return folder / (
                hashlib.sha256(f"{asked}\n{version}".encode()).hexdigest()[:32] + endings
            )

        path = named(source.version) if source.version else None
        if path is not None and path.exists() and belongs_to_another(path):
            path.unlink()
        if path is None or not path.exists():
            draft = folder / f"{uuid.uuid4().hex}.draft-"
            try:
                source.copy(
                    draft, lambda done, total: progress(f"downloading {shown}", done, total)
                )
                path = path or named(sha256_of(draft))
                os.replace(draft, path)
            finally:
                draft.unlink(missing_ok=True)
        return path
    except InputError:  # of an address that names no bucket
        raise
    except NoSuchObject as error:
        raise _no_file(shown) from error
    except StoreError as error:
        raise DataError(
            f"can't be read ({_redacted(str(error), url)})",
            where=shown,
            to_do="check the address, the network and the credentials",
        ) from error
    except ImportError as error:
        scheme = url.split(":", 1)[0]
        raise DataError(
            f"{scheme}:// needs a package that is not installed",
            where=shown,
            to_do=f"install the fsspec package for {scheme}://",
        ) from error
    except Exception as error:  # every fsspec backend has errors of its own
        raise _in_words(error, url, shown) from error


class _Object:
    """An object in a bucket."""

    def __init__(self, url: str) -> None:
        folder, _, self._key = url.rpartition("/")
        self._store = BucketStore(folder)
        entry = self._store.head(self._key)
        self._n_bytes, self.version = entry.n_bytes, entry.tag

    def copy(self, draft: Path, progress: Callable[[int, int | None], None]) -> None:
        """Write its bytes to a file, part by part."""
        done = 0

        def add(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            progress(done, self._n_bytes)

        self._store.fetch(self._key, draft, self._n_bytes, add)


class _File:
    """A file that fsspec reaches."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._filesystem, self._remote = fsspec.core.url_to_fs(url, **_guarded(url))
        self.version = _version(self._filesystem, self._remote)

    def copy(self, draft: Path, progress: Callable[[int, int | None], None]) -> None:
        """Write its bytes to a file, piece by piece."""
        done = 0
        with self._filesystem.open(self._remote, "rb") as source, open(draft, "wb") as target:
            total = getattr(source, "size", None)
            while piece := source.read(_PIECE_BYTES):
                target.write(piece)
                done += len(piece)
                progress(done, total if isinstance(total, int) and total > 0 else None)


def refuse_metadata(url: str) -> None:
    """Raise `DataError` for an address, or a part of a chain of them, at which a machine keeps its
    credentials.
    """
    for scheme, place in re.findall(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)", url):
        if scheme.lower().rpartition(":")[2] not in _NO_HOSTS and is_metadata_host(_host_of(place)):
            raise _metadata_error(without_secrets(url))


def _host_of(place: str) -> str:
    place = place.rpartition("@")[2]
    return place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]


def _metadata_error(shown: str) -> DataError:
    return DataError(
        "an address at which machines keep their credentials, or one that leads there",
        where=shown,
        to_do=(
            "data is never read from link-local and metadata addresses; name the server that has"
            " the file"
        ),
    )


def _guarded(url: str) -> dict[str, Any]:
    """What fsspec is told for the web addresses in a chain."""
    schemes = {part.partition("://")[0].lower() for part in url.split("::")}
    return {scheme: {"get_client": _client} for scheme in ("http", "https") if scheme in schemes}


async def _client(**settings: Any) -> Any:
    """A web client that connects to no metadata address. A download may take long, silence
    may not.
    """
    import aiohttp

    def guarded_socket(address: Any) -> socket.socket:
        if is_metadata_host(str(address[4][0]).partition("%")[0]):
            raise _Refused("a metadata address")
        return socket.socket(*address[:3])

    settings.pop("loop", None)
    wait = aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=60)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(socket_factory=guarded_socket), timeout=wait, **settings
    )


def _version(filesystem: Any, remote: str) -> str:
    """What changes when the file does; empty for a web server that gives no ETag."""
    if "http" in filesystem.protocol or "https" in filesystem.protocol:
        return str(filesystem.info(remote).get("ETag") or "")
    return str(filesystem.ukey(remote))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        yield at
        of_system = getattr(at, "os_error", None)
        if isinstance(of_system, OSError):
            yield of_system
        at = at.__cause__ or at.__context__


def _in_words(error: Exception, url: str, shown: str) -> DataError:
    """Which of the many: refused by us, no connection, an answer of the server, or no such file."""
    causes = list(_causes(error))
    if any(isinstance(cause, _Refused) or "a metadata address" in str(cause) for cause in causes):
        return _metadata_error(shown)
    for cause in causes:
        status = getattr(cause, "status", None)
        if isinstance(status, int) and status >= 400 and status != 404:
            to_do = (
                "check the credentials"
                if status in (401, 403)
                else "try again later, or fetch the file yourself"
            )
            return DataError(f"{_host(cause, shown)} answers {status}", where=shown, to_do=to_do)
    for cause in causes:
        reason = _no_connection(cause)
        if reason:
            what = f"no connection to {_host(cause, shown)}: {_redacted(reason, url)}"
            return DataError(
                what, where=shown, to_do="check the host and port in `data:`, and the network"
            )
    others = [
        cause
        for cause in causes
        if not isinstance(cause, FileNotFoundError) and getattr(cause, "status", 0) != 404
    ]
    if isinstance(error, FileNotFoundError) and not others:
        return _no_file(shown)
    first = others[0] if isinstance(error, FileNotFoundError) else error
    what = f"can't be read ({type(first).__name__}: {_redacted(str(first), url)})"
    return DataError(what, where=shown, to_do="check the address, the network and the credentials")


def _no_file(shown: str) -> DataError:
    return DataError("no such file", where=shown, to_do="check the address in `data:`")


def _no_connection(cause: BaseException) -> str:
    """Why there is no connection; nothing when that is not what is wrong."""
    if isinstance(cause, socket.gaierror):
        return f"the name is not known ({cause.strerror})"
    if isinstance(cause, ConnectionError | TimeoutError):
        return getattr(cause, "strerror", None) or str(cause) or "no answer in time"
    name = type(cause).__name__
    if name in (
        "EndpointConnectionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ClientConnectorError",
        "ClientConnectorDNSError",
        "ServerTimeoutError",
        "ConnectionTimeoutError",
        "ConnectError",
    ):
        return str(cause)
    return ""


def _host(cause: BaseException, shown: str) -> str:
    named = re.search(r"https?://([^/\s\"'?]+)", str(cause))
    host, port = getattr(cause, "host", None), getattr(cause, "port", None)
    if host:
        return f"{host}:{port}" if port else str(host)
    return named[1].rpartition("@")[2] if named else re.sub(r"^.*://", "", shown).partition("/")[0]


def _redacted(text: str, url: str) -> str:
    """An error's text without what the address keeps secret, in whatever form the text
    repeats it.
    """
    text = text.replace(url, without_secrets(url))
    for secret in re.findall(r"://([^/?#]*)@", url):
        for part in sorted({secret, *secret.split(":", 1)[1:]}, key=len, reverse=True):
            text = text.replace(part, "***") if part else text
    return re.sub(r"(https?://[^\s'\"?]*)\?[^\s'\"]*", r"\1", text)[:300]
