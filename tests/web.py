"""Servers of this machine."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Quiet(BaseHTTPRequestHandler):
    """Writes nothing to the terminal."""

    def log_message(self, *_: Any):
        """Nothing."""


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    """A server with this handler, by its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Pages:
    """What a server says on each path, and what it was asked: bytes, a status with bytes, or a
    function of the request that answers by itself. 404 for the rest.
    """

    def __init__(self, says: dict[str, Any]):
        self.says = says
        self.asked = []
        self.address = ""

    @contextmanager
    def served(self) -> Iterator[None]:
        """While it answers, at its address."""
        pages = self

        class Answers(Quiet):
            def do_GET(self):
                """What is said on a path."""
                pages.asked.append((self.path, self.headers.get("Authorization")))
                said = pages.says.get(self.path, (404, b""))
                if callable(said):
                    said(self)
                    return
                status, body = (200, said) if isinstance(said, bytes) else said
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        with serving(Answers) as self.address:
            yield


class Files:
    """Files on a web server, by path without the slash and `.jsonl`, each with an ETag of its
    content; the query counts where a file has one in its name.
    """

    def __init__(self, with_etag: bool = True, **files: bytes):
        self.with_etag, self.files = with_etag, files

    @contextmanager
    def served(self) -> Iterator[str]:
        """The server's address."""
        files, with_etag = self.files, self.with_etag

        class Answers(Quiet):
            def do_GET(self):
                """A file, or 404."""
                name, _, more = self.path.lstrip("/").partition(".")
                body = files.get(f"{name}?{more.partition('?')[2]}", files.get(name))
                self.send_response(404 if body is None else 200)
                if with_etag:
                    self.send_header("ETag", str(zlib.crc32(body or b"")))
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

        with serving(Answers) as address:
            yield address
