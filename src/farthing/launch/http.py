"""Requests to a provider's API: JSON in and out, with a time limit and repeats that do no harm.

Keys travel in a header, never in an address. Redirects, which would carry the key elsewhere, are
not followed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from farthing.launch.driver import (
    ProviderError,
    RateLimitedError,
    ServerError,
    TimedOutError,
    UnclearError,
    refusal,
)
from farthing.storage.files import parse_json

TIMEOUT_S = 30.0
MOST_BYTES = 16 << 20


class Api:
    """A provider's API at an address. `headers` hold the key; `transport` replaces the network."""

    def __init__(
        self,
        base: str,
        headers: Mapping[str, str],
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "farthing", **headers}
        self._client = httpx.Client(
            headers=headers, timeout=TIMEOUT_S, transport=transport, follow_redirects=False
        )
        self._base, self._sleep, self._clock = base.rstrip("/"), sleep, clock
        self.clock_offset_s = 0.0
        """The provider's clock minus ours, by the Date of its newest answer."""

    def ask(self, method: str, path: str, body: Any = None, *, n_tries: int = 3) -> Any:
        """The answer. With `n_tries` 1 nothing is sent twice: for requests that make something.

        Raises `RefusedError`, `UnauthorizedError`, and `UnclearError` for no answer, 429, 5xx and
        answers that are not JSON.
        """
        data = None if body is None else json.dumps(body).encode()
        error: ProviderError = UnclearError("not asked")
        for n in range(n_tries):
            if n:
                self._sleep(2.0**n)
            try:
                status, text = self._send(method, path, data)
            except httpx.TimeoutException:
                error = TimedOutError(f"no answer within {TIMEOUT_S:.0f} s")
                continue
            except (httpx.HTTPError, httpx.InvalidURL) as cause:
                error = UnclearError(f"no answer ({type(cause).__name__})")
                continue
            if status == 404 and method == "DELETE":
                return None
            if 200 <= status < 300:
                try:
                    return parse_json(text) if text.strip() else None
                except ValueError:
                    error = UnclearError("an answer that is not JSON")
                    continue
            why = f"status {status}: {_words(text)}"
            if status == 429:
                error = RateLimitedError(why)
            elif status >= 500 or status == 408:
                error = ServerError(why)
            else:
                raise refusal(why, status)
        raise error

    def _send(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        with self._client.stream(method, self._base + path, content=data) as answer:
            text = b""
            for piece in answer.iter_bytes():
                text += piece
                if len(text) > MOST_BYTES:
                    break
            try:
                told = parsedate_to_datetime(answer.headers["date"]).timestamp()
            except (KeyError, ValueError, TypeError):
                pass
            else:
                self.clock_offset_s = told - self._clock()
            return answer.status_code, text[:MOST_BYTES]


def _words(text: bytes) -> str:
    """The reason that an answer gives, shortened."""
    said = " ".join(text.decode("utf-8", "replace").split())
    try:
        value = json.loads(said)
        said = next(
            str(value[key])
            for key in ("detail", "title", "msg", "message", "error")
            if value.get(key)
        )
    except (ValueError, AttributeError, StopIteration):
        pass
    return said[:200]
