"""An HTTP proxy that breaks what it is told to break, in front of a store's emulator.

`begin` is given what is asked about every request (number from 1, method, path) and names a
fault, or None. What the emulator does not check itself (the SHA-256 of what is sent) is checked
here, as S3 does.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

from web import serving

Fault = Callable[[int, str, str], str | None]
Reply = tuple[int, list[tuple[str, str]], bytes]
REFUSALS = {"503": "SlowDown", "403": "AccessDenied"}


class FaultProxy:
    """A proxy on a free port of this machine, as a context, for a server on another port."""

    def __init__(self, backend_port: int):
        self.backend_port, self.is_over = backend_port, threading.Event()
        self.is_asking = threading.Lock()  # moto looks and writes in two steps, as no store does
        self.begin()
        self.serving = serving(self.serve, "HTTP/1.1")

    def __enter__(self) -> FaultProxy:
        self.url = self.serving.__enter__()
        return self

    def __exit__(self, *error):
        self.is_over.set()
        self.serving.__exit__(*error)

    def begin(self, fault: Fault = lambda number, method, path: None):
        """Count from 1 again, under another fault."""
        self.numbers, self.n_requests, self.fault = itertools.count(1), 0, fault

    def serve(self, request: BaseHTTPRequestHandler, body: bytes):
        """Answer one request, or do to it what is due."""
        self.n_requests = next(self.numbers)
        fault = self.fault(self.n_requests, request.command, request.path)
        if fault == "hang":
            self.is_over.wait(60)
        if fault in ("hang", "reset"):
            return reset(request)
        if fault in REFUSALS:
            return answer(request, error(int(fault), REFUSALS[fault]))
        if fault == "slow":
            time.sleep(0.3)
        if fault == "flip" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        checksum = request.headers.get("x-amz-checksum-sha256")
        if checksum is not None and base64.b64decode(checksum) != hashlib.sha256(body).digest():
            return answer(request, error(400, "BadDigest"))
        reply = self.pass_on(request, body)
        if fault == "lost reply":
            return reset(request)
        answer(request, reply, is_cut=fault == "truncate")
        return reset(request) if fault == "truncate" else None

    def pass_on(self, request: BaseHTTPRequestHandler, body: bytes) -> Reply:
        hop = ("connection", "expect")
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in hop
        }
        backend = http.client.HTTPConnection("127.0.0.1", self.backend_port, timeout=60)
        with self.is_asking, contextlib.closing(backend) as connection:
            connection.request(request.command, request.path, body=body or None, headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.getheaders(), reply.read()


def error(status: int, code: str) -> Reply:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return status, [("Content-Type", "application/xml")], text.encode()


def answer(request: BaseHTTPRequestHandler, reply: Reply, is_cut: bool = False):
    status, headers, body = reply
    sent = {name.lower(): value for name, value in headers}
    is_head = request.command == "HEAD"
    length = sent.pop("content-length", len(body)) if is_head else len(body)
    request.send_response_only(status)
    for name in sent.keys() - {"transfer-encoding", "connection", "content-length"}:
        request.send_header(name, sent[name])
    request.send_header("Content-Length", str(length))
    request.end_headers()
    if not is_head:
        request.wfile.write(body[: len(body) // 2] if is_cut else body)
        request.wfile.flush()


def reset(request: BaseHTTPRequestHandler):
    """Close with a reset instead of a farewell."""
    request.close_connection = True
    linger = struct.pack("ii", 1, 0)
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    request.connection.close()
