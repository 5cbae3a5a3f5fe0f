"""An HTTP proxy that breaks what it is told to break, in front of a store's emulator.

`proxy.fault` is asked about every request (number from 1, method, path) and names a fault, or None.
What the emulator does not check itself (the SHA-256 of what is sent) is checked here, as S3 does.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[[int, str, str], str | None]
FAULTS = (
    "503",
    "403",
    "reset",
    "hang",
    "slow",
    "lost reply",
    "truncate",
    "flip",
    "kill",
    "kill after",
)


class FaultProxy:
    """A proxy on a free port of this machine, as a context."""

    def __init__(self, backend_port: int) -> None:
        self.backend_port = backend_port
        self.fault: Fault = lambda number, method, path: None
        self.n_requests = 0
        self.requests: list[tuple[str, str]] = []
        self.pid = 0
        """The process that "kill" (before the request is passed on) and "kill after" (it was, no
        reply) kill.
        """
        self.is_over = threading.Event()
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                proxy.serve(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

            def log_message(self, format: str, *args: Any) -> None:
                """Silence."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()

    def begin(self, fault: Fault | None = None) -> None:
        """Count from 1 again, under another fault."""
        with self._lock:
            self.n_requests, self.requests = 0, []
            self.fault = fault or (lambda number, method, path: None)

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request, or do to it what is due."""
        method, path = request.command, request.path
        with self._lock:
            self.n_requests += 1
            number = self.n_requests
            self.requests.append((method, path))
            fault = self.fault(number, method, path)
        assert fault is None or fault in FAULTS, fault
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        with contextlib.suppress(OSError):
            self._answer(request, body, fault)

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes, fault: str | None) -> None:
        if fault == "kill":
            self._kill()
            return self._reset(request)
        if fault == "hang":
            self.is_over.wait(60)
            return self._reset(request)
        if fault == "reset":
            return self._reset(request)
        if fault in ("503", "403"):
            code = "SlowDown" if fault == "503" else "AccessDenied"
            return self._error(request, int(fault), code)
        if fault == "slow":
            time.sleep(0.3)
        if fault == "flip" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        checksum = request.headers.get("x-amz-checksum-sha256")
        if checksum is not None and base64.b64decode(checksum) != hashlib.sha256(body).digest():
            return self._error(request, 400, "BadDigest")
        status, headers, reply = self._pass_on(request, body)
        if fault == "kill after":
            self._kill()
        if fault in ("kill after", "lost reply"):
            return self._reset(request)
        request.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                request.send_header(name, value)
        is_head = request.command == "HEAD"
        length = (
            next((v for n, v in headers if n.lower() == "content-length"), len(reply))
            if is_head
            else len(reply)
        )
        request.send_header("Content-Length", str(length))
        request.end_headers()
        if not is_head:
            request.wfile.write(reply[: len(reply) // 2] if fault == "truncate" else reply)
            request.wfile.flush()
        if fault == "truncate":
            self._reset(request)
        return None

    def _pass_on(
        self, request: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.backend_port, timeout=60)
        try:
            headers = {
                k: v
                for k, v in request.headers.items()
                if k.lower() not in ("connection", "expect")
            }
            connection.request(request.command, request.path, body=body or None, headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.getheaders(), reply.read()
        finally:
            connection.close()

    def _kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _error(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()  # noqa: E501
        request.send_response_only(status)
        request.send_header("Content-Type", "application/xml")
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(text)
            request.wfile.flush()

    def _reset(self, request: BaseHTTPRequestHandler) -> None:
        """Close with a reset instead of a farewell."""
        request.close_connection = True
        with contextlib.suppress(OSError):
            request.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            request.connection.close()
