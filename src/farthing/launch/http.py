"""Requests to a provider's API: JSON in and out, with a time limit and repeats that do no harm.

Keys travel in a header, never in an address. Redirects, which would carry the key elsewhere, are
not followed. A provider's client is a class in its file of `targets/`; what they share is here.
Money first: what can't be given an end is destroyed at once. A machine is destroyed, never stopped:
disks of stopped ones are paid for.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from farthing.launch.driver import (
    InstanceStatus,
    ListingDriver,
    NotFoundError,
    RateLimitedError,
    RefusedError,
    ServerError,
    TimedOutError,
    UnclearError,
    refusal,
)
from farthing.run.ledger import steady_clock
from farthing.storage.files import Json, parse_json

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
        clock: Callable[[], float] | None = None,
    ) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "farthing", **headers}
        self._client = httpx.Client(
            headers=headers, timeout=TIMEOUT_S, transport=transport, follow_redirects=False
        )
        self._base, self._sleep = base.rstrip("/"), sleep
        # as the launch counts: ours may be set meanwhile
        self._clock = clock or steady_clock()
        self._offsets = deque[float](maxlen=9)

    @property
    def clock_offset_s(self) -> float:
        """The provider's clock minus ours, by the Date of its answers: the middle of the newest,
        since one may come from a cache or from a server whose clock is off."""
        return sorted(self._offsets)[len(self._offsets) // 2] if self._offsets else 0.0

    def ask(self, method: str, path: str, body: Any = None, *, n_tries: int = 3) -> Any:
        """The answer. With `n_tries` 1 nothing is sent twice: for requests that make something.

        Raises `RefusedError`, `UnauthorizedError`, and `UnclearError` for no answer, 429, 5xx and
        answers that are not JSON.
        """
        for n in range(1, n_tries + 1):
            try:
                return self._asked(method, path, body)
            except UnclearError:
                if n == n_tries:
                    raise
                self._sleep(2.0**n)
        raise AssertionError

    def _asked(self, method: str, path: str, body: Any) -> Any:
        data, text = None if body is None else json.dumps(body).encode(), b""
        try:
            with self._client.stream(method, self._base + path, content=data) as answer:
                for piece in answer.iter_bytes():
                    text += piece
                    if len(text) > MOST_BYTES:
                        raise UnclearError("an answer that is too long")
        except httpx.TimeoutException as error:
            raise TimedOutError(f"no answer within {TIMEOUT_S:.0f} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnclearError(f"no answer ({type(error).__name__})") from error
        with contextlib.suppress(KeyError, ValueError, TypeError):
            told = parsedate_to_datetime(answer.headers["date"]).timestamp()
            self._offsets.append(told - self._clock())
        status = answer.status_code
        if status == 404 and method == "DELETE":
            return None
        if answer.is_success:
            try:
                return parse_json(text) if text.strip() else None
            except ValueError as error:
                raise UnclearError("an answer that is not JSON") from error
        why = f"status {status}: {_words(text)}"
        if status == 429:
            raise RateLimitedError(why)
        raise ServerError(why) if status >= 500 or status == 408 else refusal(why, status)


def _words(text: bytes) -> str:
    said = " ".join(text.decode("utf-8", "replace").split())
    with contextlib.suppress(ValueError, AttributeError, StopIteration):
        value = json.loads(said)
        keys = ("detail", "title", "msg", "message", "error")
        said = next(str(value[key]) for key in keys if value.get(key))
    return said[:200]


class Client(ListingDriver):
    """A provider by its API."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @property
    def clock_offset_s(self) -> float:
        return self._api.clock_offset_s


def statuses(
    rows: list[Json],
    name: str,
    state: str,
    *,
    over: Sequence[str],
    gone: Sequence[str] = (),
    price: Callable[[Json], Any],
) -> list[InstanceStatus]:
    """Machines as a provider lists them, by the names of its fields."""
    found = []
    for row in rows:
        usd_per_hour = None
        with contextlib.suppress(LookupError, TypeError):
            usd_per_hour = price_of(price(row))
        seen = InstanceStatus(
            str(row.get(name)),
            str(row["id"]),
            is_over=row.get(state) in over,
            usd_per_hour=usd_per_hour,
        )
        if row.get(state) not in gone:
            found.append(seen)
    return found


def price_of(value: Any) -> float | None:
    """Dollars an hour as a provider tells them; None for what is no price."""
    try:
        usd = float(value)
    except (TypeError, ValueError):
        return None
    return usd if 0 < usd < 100_000 else None


def sure(api: Api, method: str, path: str, body: Any = None, *, may_be_gone: bool = False) -> Any:
    """`Api.ask` of what is asked or deleted: a refusal settles nothing, nor does an error under
    status 200. Raises `UnclearError`.
    """
    try:
        answer = api.ask(method, path, body)
    except RefusedError as error:
        if may_be_gone and isinstance(error, NotFoundError):
            return None
        raise UnclearError(str(error)) from error
    is_dict = isinstance(answer, dict)
    if is_dict and (answer.get("success") is False or answer.get("error") or answer.get("errors")):
        raise UnclearError(_words(json.dumps(answer).encode()))
    return answer
