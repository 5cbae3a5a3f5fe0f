"""Servers of this machine."""

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serving(answer: Callable[[Any, bytes], Any], protocol: str = "HTTP/1.0") -> Iterator[str]:
    """A server by its address.

    To a request and its body `answer` is a status, bytes or text, and perhaps headers; None where
    it has written by itself.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = protocol

        def log_message(self, *_):
            """Nothing is written to the terminal."""

        def reply(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with contextlib.suppress(OSError):  # who has asked may be gone
                if (said := answer(self, body)) is None:
                    return
                status, content, headers = (*said, {})[:3]
                content = content.encode() if isinstance(content, str) else content
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = reply

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Pages:
    """What a server says on each path (or path with query), and what it was asked: bytes, a status
    with bytes, or a function of the request that says so, or answers by itself. 404 for the rest.
    """

    def __init__(self, says: dict[str, Any] | None = None, has_etags: bool = False):
        self.says, self.headers, self.has_etags = says or {}, dict[str, str](), has_etags
        self.asked = []
        self.address = ""

    def count(self, path: str) -> int:
        """How often a path was asked for."""
        return sum(each == path for each, _ in self.asked)

    def _answer(self, request, _: bytes):
        path = request.path.partition("?")[0]
        self.asked.append((path, request.headers.get("Authorization")))
        said = self.says.get(request.path, self.says.get(path, (404, b"")))
        said = said(request) if callable(said) else said
        if said is None:
            return None
        status, content = (200, said) if isinstance(said, bytes) else said
        etag = {"ETag": str(zlib.crc32(content))} if self.has_etags else {}
        return status, content, self.headers | etag

    @contextmanager
    def served(self) -> Iterator[str]:
        """While it answers, at its address."""
        with serving(self._answer) as self.address:
            yield self.address
