"""Files behind an address, fetched into the cache: of buckets by `storage.objects`, of the web by
httpx.

Hosts of the web are checked before they are asked, redirects and names that lead elsewhere too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from farthing.addresses import is_metadata_host, without_secrets
from farthing.errors import DataError
from farthing.storage.files import Warn, belongs_to_another, own_folder, sha256_of
from farthing.storage.objects import BUCKETS, NoSuchObjectError, ObjectStore, StoreError

if TYPE_CHECKING:
    import httpx

_PIECE_BYTES = 1 << 20


Copy = Callable[[Path, Callable[[int, int | None], None]], None]
"""The bytes of a remote file written to a file, told of how many more and how many in all."""


def fetch(
    url: str,
    cache_dir: Path,
    progress: Callable[[str, int, int | None], None] = lambda what, done, total: None,
    warn: Warn = lambda text: None,
) -> Path:
    """Copy a remote file into the cache, never stale: the copy is named by URL and version (ETag
    and the like).

    Without a version it is fetched each time and named by its content. `progress(what, bytes done,
    bytes in all or None)`. Raises `DataError`.
    """
    import httpx

    shown, scheme, done = without_secrets(url), url.partition("://")[0].lower(), 0
    refuse_metadata(url)
    if scheme not in (*BUCKETS, "http", "https"):
        raise DataError(
            f"no file is read from {scheme}://",
            where=shown,
            to_do="use s3://, gs://, az://, https://, the name of a data set, or a path here",
        )

    def add(n_bytes: int, total: int | None) -> None:
        nonlocal done
        done += n_bytes
        progress(f"downloading {shown}", done, total)

    folder = own_folder(cache_dir / "downloads", warn)
    draft = folder / f"{uuid.uuid4().hex}.draft-"
    try:
        with (_object if scheme in BUCKETS else _page)(url) as (version, copy):
            path = _named(folder, url, version)
            if path.exists() and belongs_to_another(path):
                path.unlink()
            if not version or not path.exists():
                copy(draft, add)
                path = path if version else _named(folder, url, sha256_of(draft))
                os.replace(draft, path)
        return path
    except (StoreError, httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise _error(error, url) from error
    finally:
        draft.unlink(missing_ok=True)


def _named(folder: Path, url: str, version: str) -> Path:
    # the query is part of what is asked for; user and password are not
    asked = re.sub(r"://[^/?#]*@", "://", url)
    endings = "".join(Path(urlsplit(without_secrets(url)).path).suffixes[-2:])
    digest = hashlib.sha256(f"{asked}\n{version}".encode()).hexdigest()
    return folder / (digest[:32] + endings)


@contextlib.contextmanager
def _object(url: str) -> Iterator[tuple[str, Copy]]:
    """(version, copy) of an object in a bucket."""
    folder, _, key = url.rpartition("/")
    store = ObjectStore(folder)
    entry = store.head(key)
    n = entry.n_bytes
    yield entry.tag, lambda draft, add: store.fetch(key, draft, n, lambda more: add(more, n))


@contextlib.contextmanager
def _page(url: str) -> Iterator[tuple[str, Copy]]:
    """(version, copy) of a file of a web server."""
    import httpx

    wait = httpx.Timeout(60.0, connect=20.0)  # of silence: a download may take long
    hooks: dict[str, list[Callable[..., None]]] = {
        "request": [_refuse_to_ask],
        "response": [_refuse_answer],
    }
    headers = {"Accept-Encoding": "identity"}
    with (
        httpx.Client(
            event_hooks=hooks, headers=headers, timeout=wait, follow_redirects=True, trust_env=False
        ) as client,
        client.stream("GET", url) as answer,
    ):
        answer.raise_for_status()
        total = int(answer.headers.get("Content-Length") or 0) or None
        # a server may say of a file's own packing that it is one of the way
        pieces = answer.iter_raw if answer.url.path.endswith(".gz") else answer.iter_bytes

        def copy(draft: Path, add: Callable[[int, int | None], None]) -> None:
            with open(draft, "wb") as file:
                for piece in pieces(_PIECE_BYTES):
                    file.write(piece)
                    add(len(piece), total)

        yield answer.headers.get("ETag", ""), copy


def _refuse_to_ask(request: httpx.Request) -> None:
    """Refuse hosts that are, or whose names lead to, where credentials are kept."""
    import httpx

    host = request.url.host
    try:
        addresses = [str(found[4][0]) for found in socket.getaddrinfo(host, request.url.port)]
    except socket.gaierror as error:
        why = f"the name is not known ({error.strerror})"
        raise httpx.ConnectError(why, request=request) from error
    if any(map(is_metadata_host, (host, *addresses))):
        raise _metadata_error(str(request.url))


def _refuse_answer(answer: httpx.Response) -> None:
    """The same of who has answered, whatever a name meant meanwhile."""
    address = answer.extensions["network_stream"].get_extra_info("server_addr")
    if is_metadata_host(str(address[0])):
        raise _metadata_error(str(answer.url))


def refuse_metadata(url: str) -> None:
    """Raise `DataError` for an address, or a part of a chain of them, at which a machine keeps its
    credentials.
    """
    for scheme, place in re.findall(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)", url):
        place = place.rpartition("@")[2]
        bare = place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]
        if scheme.lower() not in BUCKETS and is_metadata_host(bare):
            raise _metadata_error(url)


def _metadata_error(url: str) -> DataError:
    return DataError(
        "an address at which machines keep their credentials, or one that leads there",
        where=without_secrets(url),
        to_do=(
            "data is never read from link-local and metadata addresses; name the server that has"
            " the file"
        ),
    )


def _error(error: Exception, url: str) -> DataError:
    import httpx

    shown, to_do = without_secrets(url), "check the address, the network and the credentials"
    status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
    host = error.request.url.netloc.decode() if isinstance(error, httpx.HTTPError) else ""
    if isinstance(error, NoSuchObjectError) or status == 404:
        what, to_do = "no such file", "check the address in `data:`"
    elif status:
        what = f"{host} answers {status}"
    elif isinstance(error, httpx.TransportError):
        what = f"no connection to {host}: {error or 'no answer in time'}"
    else:
        what = f"can't be read ({_without_secrets_of(url, str(error))})"
    return DataError(what, where=shown, to_do=to_do)


def _without_secrets_of(url: str, text: str) -> str:
    """A text without what an address keeps secret, however it is repeated there."""
    text = text.replace(url, without_secrets(url))
    for secret in re.findall(r"://([^/?#]*)@", url):
        for part in sorted({secret, *secret.split(":", 1)[1:]} - {""}, key=len, reverse=True):
            text = text.replace(part, "***")
    return re.sub(r"(https?://[^\s'\"?]*)\?[^\s'\"]*", r"\1", text)[:300]
