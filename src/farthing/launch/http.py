"""A request to a provider's API: JSON in and out, within a time limit, tried again where that can
do no harm.

Keys go into a header, never into an address. Refuses to follow redirects, which would carry the key
elsewhere.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from farthing.launch.driver import UnclearError, refusal
from farthing.storage.files import parse_json

TIMEOUT_S = 30.0
MOST_BYTES = 16 << 20
Transport = Callable[[str, str, Mapping[str, str], bytes | None, float], tuple[int, bytes]]
"""(method, address, headers, body, seconds) -> (status, body). Raises `OSError` where there was no
answer.
"""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None: the redirect is an error."""


def transport(
    method: str, url: str, headers: Mapping[str, str], body: bytes | None, seconds: float
) -> tuple[int, bytes]:
    """Over the network."""
    request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=seconds) as answer:
            return answer.status, answer.read(MOST_BYTES)
    except urllib.error.HTTPError as error:
        return error.code, error.read(MOST_BYTES)


class Api:
    """A provider's API at an address. `headers` hold the key."""

    def __init__(
        self,
        base: str,
        headers: Mapping[str, str],
        *,
        send: Transport = transport,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._base, self._send, self._sleep = base.rstrip("/"), send, sleep
        self._headers = {"Content-Type": "application/json", "User-Agent": "farthing", **headers}

    def ask(self, method: str, path: str, body: Any = None, *, n_tries: int = 3) -> Any:
        """The answer. With `n_tries` 1 nothing is sent twice: for requests that make something.

        Raises `RefusedError` (4xx: the provider will not), `UnclearError` (no answer, 5xx, or one
        that is not JSON).
        """
        data = None if body is None else json.dumps(body).encode()
        why = ""
        for n in range(n_tries):
            if n:
                self._sleep(2.0**n)
            try:
                status, text = self._send(method, self._base + path, self._headers, data, TIMEOUT_S)
            except (OSError, ValueError) as error:
                why = f"no answer ({type(error).__name__})"
                continue
            if status == 404 and method == "DELETE":
                return None
            if 200 <= status < 300:
                try:
                    return parse_json(text) if text.strip() else None
                except ValueError:
                    why = "an answer that is not JSON"
                    continue
            why = f"status {status}: {_words(text)}"
            if 300 <= status < 500 and status not in (408, 429):
                raise refusal(why)
        raise UnclearError(why)


def _words(text: bytes) -> str:
    """What an error says, shortened."""
    said = " ".join(text.decode("utf-8", "replace").split())
    try:
        value = json.loads(said)
        said = next(
            (
                str(value[key])
                for key in ("detail", "title", "msg", "message", "error")
                if value.get(key)
            ),
            said,
        )
    except (ValueError, AttributeError):
        pass
    return said[:200]
