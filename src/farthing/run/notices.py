"""Is this machine about to be taken? The metadata services of AWS, Google Cloud and Azure, asked
from a thread.

A notice only sets the flag of `Notice`, with the moment that it announces; the loop does the rest.
Whose machine this is is read from files of the firmware, never asked of the network; only
`where.spot` or `where.notices` in the job makes us ask blindly. A service that does not answer is
given up after a few tries and never holds a run up.

FARTHING_METADATA is for tests: a port of this machine (http://127.0.0.1:PORT) to ask instead.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from farthing.errors import InputError
from farthing.run.signals import Notice
from farthing.storage.files import Json, parse_json

ADDRESS = "169.254.169.254:80"
TIMEOUT_S = 1.0
FAILURES_UNTIL_GIVEN_UP = 5
LONGEST_ANSWER = 64 << 10
LEAVE_BEFORE_S = 120.0  # what is announced for later is a reason to save now, and to leave then
ENVIRONMENT = "FARTHING_METADATA"


class UnreadableAnswerError(Exception):
    """An answer that can't be used: no notice, and no reason to disturb a run."""


@dataclass(frozen=True)
class Sign:
    """What a service says. `leaves_at` is in seconds since 1970; None: at any moment."""

    what: str
    leaves_at: float | None = None
    is_certain: bool = True
    """False: a machine at risk. It is saved sooner, and continues."""


Ask = Callable[..., tuple[int, bytes, dict[str, str]]]
"""`ask(path, method, **headers)` gives (status, body, headers in lower case). Raises `OSError`,
`http.client.HTTPException`.
"""


def _aws(ask: Ask) -> Iterator[Sign]:
    """EC2, by IMDSv2: the interruption (`spot/instance-action`), the risk of one (`rebalance`)."""
    # a token first, for as long as this look takes
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    status, token, _ = ask("/latest/api/token", "PUT", **lifetime)
    if status != 200 or not re.fullmatch(b"[ -~]{1,1024}", token.strip()):
        raise UnreadableAnswerError(f"no token: HTTP {status}")
    own = {"X-aws-ec2-metadata-token": token.strip().decode()}
    status, body, _ = ask("/latest/meta-data/spot/instance-action", **own)
    if status != 404:
        value = _json(status, body)
        if value.get("action") not in ("terminate", "stop", "hibernate"):
            raise UnreadableAnswerError("instance-action: no action")
        yield Sign(f"AWS spot: {value['action']}", _moment(value.get("time")))
    status, body, _ = ask("/latest/meta-data/events/recommendations/rebalance", **own)
    if status != 404 and "noticeTime" in _json(status, body):
        yield Sign("AWS rebalance recommendation", is_certain=False)


def _gcp(ask: Ask) -> Iterator[Sign]:
    """Google Cloud: `instance/preempted` is TRUE from the notice on; 30 seconds are left, or less.

    Machines with GPUs are stopped for maintenance of their host an hour after
    `instance/maintenance-event` announces it, others after a minute
    (cloud.google.com/compute/docs/gpus/gpu-host-maintenance): no moment is given.
    """
    place, own = "/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
    status, body, headers = ask(f"{place}/preempted", **own)
    word = body.strip().upper()
    is_google = headers.get("metadata-flavor") == "Google"
    if status != 200 or not is_google or word not in (b"TRUE", b"FALSE"):
        raise UnreadableAnswerError(f"preempted: HTTP {status}")
    if word == b"TRUE":
        yield Sign("Google Cloud preemption")
    status, body, _ = ask(f"{place}/maintenance-event", **own)
    if status == 200 and body.strip() == b"TERMINATE_ON_HOST_MAINTENANCE":
        yield Sign("Google Cloud host maintenance", is_certain=False)


def _azure(ask: Ask) -> Iterator[Sign]:
    """Azure's scheduled events that end work here; they name every machine of a set."""
    own = {"Metadata": "true"}
    status, body, _ = ask("/metadata/scheduledevents?api-version=2020-07-01", **own)
    events = _json(status, body).get("Events")
    if not isinstance(events, list):
        raise UnreadableAnswerError("scheduledevents: no list of events")
    place = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    status, body, _ = ask(place, **own) if events else (404, b"", {})
    name = body.decode("utf-8", "replace").strip() if status == 200 else ""
    for event in events:
        if not isinstance(event, dict) or event.get("EventType") not in _AZURE_ENDS:
            continue
        names = event.get("Resources")
        if not name or not isinstance(names, list) or name in names:
            yield Sign(f"Azure {event['EventType']}", _moment(event.get("NotBefore")))


_AZURE_ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
SERVICES: dict[str, tuple[Callable[[Ask], Iterator[Sign]], float]] = {
    "aws": (_aws, 5.0),
    "gcp": (_gcp, 2.0),
    "azure": (_azure, 2.0),
}
"""What one cloud says now, the worst first, and how often it is asked, in seconds. Raises
`UnreadableAnswerError`.
"""
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"  # the chassis tag of Azure's machines


def services_for(
    wanted: str, *, is_spot: bool, firmware: Path = Path("/sys/class/dmi/id")
) -> list[str]:
    """Whom to ask: `wanted` is `where.notices` of a job. Asks nobody."""
    if wanted != "auto":
        return [] if wanted == "off" else [wanted]
    if here := cloud_here(firmware):
        return [here]
    return list(SERVICES) if is_spot else []


def cloud_here(firmware: Path) -> str | None:
    """Whose machine this is, by what the firmware says of itself; None where it does not say."""

    def says(name: str) -> str:
        try:
            return (firmware / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    if "Amazon EC2" in (says("sys_vendor"), says("bios_vendor"), says("board_vendor")):
        return "aws"
    if "Google Compute Engine" in says("product_name"):
        return "gcp"
    return "azure" if says("chassis_asset_tag") == AZURE_TAG else None


class Watch:
    """Asks until `stop`, and tells `notice`; of several services the first that answers."""

    def __init__(
        self,
        names: list[str],
        notice: Notice,
        *,
        base: str | None = None,
        pause_s: float | None = None,
    ) -> None:
        self._names, self._notice, self._pause_s = names, notice, pause_s
        self._address = _address(base or os.environ.get(ENVIRONMENT))
        self._told: set[tuple[str, bool]] = set()
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def start(self) -> None:
        """Begin to ask, without waiting for an answer."""
        if self._names:
            self.thread.start()

    def stop(self) -> None:
        """Ask no more. An answer that is waited for is not waited for here."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._ask_until_told()
        except Exception as error:  # a run continues without its watch, with a warning
            self._notice.warnings.append(
                f"notices of the cloud are no longer watched: {type(error).__name__}: {error}"
            )

    def _ask_until_told(self) -> None:
        names, n_failures, is_known = self._names, 0, len(self._names) == 1
        while not self._stop.is_set():
            answered = [name for name in names if self._look(name)]
            if answered and not is_known:
                names, is_known = answered[:1], True
            n_failures = 0 if answered else n_failures + 1
            is_silent = n_failures >= FAILURES_UNTIL_GIVEN_UP
            if is_silent and not is_known:
                return  # no cloud's machine, or a container that can't reach the service
            if n_failures == FAILURES_UNTIL_GIVEN_UP:
                self._notice.warnings.append(
                    f"the metadata service ({names[0]}) does not answer; asking on, less often"
                )
            pause_s = SERVICES[names[0]][1] if self._pause_s is None else self._pause_s
            self._stop.wait(pause_s * (12 if is_silent else 1))

    def _look(self, name: str) -> bool:
        """Ask one service and pass on what is new; False where it gave no readable answer."""
        try:
            for sign in SERVICES[name][0](self._ask):
                leaves_at = sign.leaves_at or 0.0
                is_certain = sign.is_certain and leaves_at - time.time() <= LEAVE_BEFORE_S
                if (sign.what, is_certain) not in self._told and not self._stop.is_set():
                    self._told.add((sign.what, is_certain))
                    self._notice.say(sign.what, name, sign.leaves_at, is_certain=is_certain)
        except (OSError, http.client.HTTPException, UnreadableAnswerError):
            return False
        return True

    def _ask(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            body = answer.read(LONGEST_ANSWER + 1)
            if len(body) > LONGEST_ANSWER:
                raise UnreadableAnswerError("too long an answer")
            return answer.status, body, {name.lower(): value for name, value in answer.getheaders()}


def _address(base: str | None) -> str:
    """host:port to ask. Only this machine may stand in for the service. Raises `InputError`."""
    if base is None:
        return ADDRESS
    parts = urlsplit(base)
    if parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost") or not parts.port:
        raise InputError(
            "is not an address of this machine",
            where=ENVIRONMENT,
            to_do="unset it; tests give http://127.0.0.1:PORT",
        )
    return f"{parts.hostname}:{parts.port}"


def _json(status: int, body: bytes) -> Json:
    try:
        value = parse_json(body) if status == 200 else None
    except ValueError as error:
        raise UnreadableAnswerError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableAnswerError(f"no JSON object: HTTP {status}")
    return value


def _moment(value: Any) -> float | None:
    """Of ISO 8601 or of an HTTP date, in seconds since 1970; None where it is neither."""
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError, IndexError):
            moment = read(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return None
