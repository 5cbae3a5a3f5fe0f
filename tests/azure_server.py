"""Azure Blob Storage in a dictionary: the requests that the store makes, with their conditions.

Written after the REST reference of the service (Put Blob, Put Block, Put Block List, Get Blob, List
Blobs), read 2026-11-23. Signatures are not checked.
"""

import email.utils
import hashlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Headers = dict[str, str]
ACCOUNT, KEY = "account", "Y2FuYXJ5LW9mLWEtc2VjcmV0"


class AzureServer:
    """A service with one container."""

    def __init__(self, container: str):
        self.container = container
        self.blobs = {}
        self._blocks = {}
        self._lock = threading.Lock()

    def serve(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, Headers]:
        with self._lock:
            return self.answer(request, body)

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, Headers]:
        url = urlsplit(request.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        container, _, key = unquote(url.path).lstrip("/").partition("/")
        if container != self.container:
            return _error(404, "ContainerNotFound")
        if asked.get("comp") == "list":
            return 200, self._list(asked.get("prefix", "")), {"Content-Type": "application/xml"}
        if asked.get("comp") == "batch":
            return self._delete_all(body.decode())
        if request.command == "PUT":
            return self._put(request, asked, key, body)
        if key not in self.blobs:
            return _error(404, "BlobNotFound")
        if request.command == "DELETE":
            del self.blobs[key]
            return 202, b"", {}
        data, at = self.blobs[key]
        headers = {"ETag": _tag(data), "Last-Modified": email.utils.formatdate(at, usegmt=True)}
        named = request.headers.get("x-ms-range") or request.headers.get("Range") or ""
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", named):
            start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            return 206, data[start:end], headers
        return 200, data, headers

    def _put(
        self, request: BaseHTTPRequestHandler, asked: dict[str, str], key: str, body: bytes
    ) -> tuple[int, bytes, Headers]:
        if asked.get("comp") == "block":
            self._blocks[key, asked["blockid"]] = body
            return 201, b"", {}
        if request.headers.get("If-None-Match") == "*" and key in self.blobs:
            return _error(409, "BlobAlreadyExists")
        if asked.get("comp") == "blocklist":
            blocks = re.findall(r"<(?:Latest|Uncommitted)>([^<]*)<", body.decode())
            body = b"".join(self._blocks.pop((key, block)) for block in blocks)
        self.blobs[key] = body, time.time()
        return 201, b"", {"ETag": _tag(body)}

    def _delete_all(self, batch: str) -> tuple[int, bytes, Headers]:
        replies = []
        for n, path in enumerate(re.findall(r"^DELETE (\S+) HTTP", batch, re.MULTILINE)):
            key = unquote(urlsplit(path).path).lstrip("/").partition("/")[2]
            was_there = self.blobs.pop(key, None) is not None
            status = "202 Accepted" if was_there else "404 The specified blob does not exist."
            code = "" if was_there else "x-ms-error-code: BlobNotFound\r\n"
            replies.append(
                "--batch\r\nContent-Type: application/http\r\n"
                f"Content-ID: {n}\r\n\r\nHTTP/1.1 {status}\r\n{code}\r\n\r\n"
            )
        text = "".join(replies) + "--batch--"
        return 202, text.encode(), {"Content-Type": "multipart/mixed; boundary=batch"}

    def _list(self, prefix: str) -> bytes:
        blobs = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties>"
            f"<Last-Modified>{email.utils.formatdate(at, usegmt=True)}</Last-Modified>"
            f"<Etag>{escape(_tag(data))}</Etag><Content-Length>{len(data)}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for key, (data, at) in sorted(self.blobs.items())
            if key.startswith(prefix)
        )
        return (
            f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>".encode()
        )


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _error(status: int, code: str) -> tuple[int, bytes, Headers]:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return status, text.encode(), {"x-ms-error-code": code, "Content-Type": "application/xml"}
