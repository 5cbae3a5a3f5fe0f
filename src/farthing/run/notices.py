"""Is this machine about to be taken? The metadata services of AWS, Google Cloud and Azure, asked
from a thread.

A notice only sets the flag of `Notice`, with the moment that it announces; the loop does the rest.
Whose machine this is is read from files of the firmware, never asked of the network; only a job
that says so (`where.spot`, `where.notices`) makes us ask blindly. A service that does not answer is
given up after a few tries and never holds a run up.

FARTHING_METADATA is for tests: a port of this machine (http://127.0.0.1:PORT) to ask instead.
"""

from __future__ import annotations

import http.client
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
"""`ask(method, path, headers)` gives (status, body, headers in lower case). Raises `OSError`,
`http.client.HTTPException`.
"""


class Aws:
    """EC2, by IMDSv2: a token first, renewed at half its life or when it is refused."""

    name, every_s = "aws", 5.0
    LIFE_S = 21600
    ACTIONS = ("terminate", "stop", "hibernate")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._token, self._until = "", 0.0

    def look(self, ask: Ask) -> Iterator[Sign]:
        """The interruption (`spot/instance-action`) and the risk of one (`rebalance`)."""
        if (body := self._get(ask, "/latest/meta-data/spot/instance-action")) is not None:
            value = _json(body)
            if value.get("action") not in self.ACTIONS:
                raise UnreadableAnswerError("instance-action: no action")
            yield Sign(f"AWS spot: {value['action']}", _moment(value.get("time")))
        path = "/latest/meta-data/events/recommendations/rebalance"
        if (body := self._get(ask, path)) is not None:
            if "noticeTime" not in _json(body):
                raise UnreadableAnswerError("rebalance: no time")
            yield Sign("AWS rebalance recommendation", is_certain=False)

    def _get(self, ask: Ask, path: str) -> bytes | None:
        """The body; None where there is nothing (404)."""
        for _ in range(2):
            if self._clock() >= self._until:
                self._renew(ask)
            status, body, _ = ask("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if status in (200, 404):
                return body if status == 200 else None
            if status != 401:
                break
            self._until = 0.0
        raise UnreadableAnswerError(f"{path}: HTTP {status}")

    def _renew(self, ask: Ask) -> None:
        status, body, _ = ask(
            "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(self.LIFE_S)}
        )
        token = body.decode("ascii", "replace").strip()
        if status != 200 or not re.fullmatch("[ -~]{1,1024}", token):
            raise UnreadableAnswerError(f"no token: HTTP {status}")
        self._token, self._until = token, self._clock() + self.LIFE_S / 2


class Gcp:
    """Google Cloud: `instance/preempted` is TRUE from the notice on; 30 seconds are left, or less.

    Machines with GPUs are stopped for maintenance of their host an hour after
    `instance/maintenance-event` says so, others after a minute
    (cloud.google.com/compute/docs/gpus/gpu-host-maintenance): nobody says when.
    """

    name, every_s = "gcp", 2.0

    def look(self, ask: Ask) -> Iterator[Sign]:
        """Whether it is preempted, or will be stopped for maintenance."""
        status, word, headers = self._get(ask, "preempted")
        if (
            status != 200
            or headers.get("metadata-flavor") != "Google"
            or word not in (b"TRUE", b"FALSE")
        ):
            raise UnreadableAnswerError(f"preempted: HTTP {status}")
        if word == b"TRUE":
            yield Sign("Google Cloud preemption")
        status, word, _ = self._get(ask, "maintenance-event")
        if status == 200 and word == b"TERMINATE_ON_HOST_MAINTENANCE":
            yield Sign("Google Cloud host maintenance", is_certain=False)

    def _get(self, ask: Ask, key: str) -> tuple[int, bytes, dict[str, str]]:
        status, body, headers = ask(
            "GET", f"/computeMetadata/v1/instance/{key}", {"Metadata-Flavor": "Google"}
        )
        return status, body.strip().upper(), headers


class Azure:
    """Azure's scheduled events: of this machine, and only those that end its work."""

    name, every_s = "azure", 2.0
    ENDING = ("Preempt", "Terminate", "Reboot", "Redeploy")

    def __init__(self) -> None:
        self._own_name: str | None = None

    def look(self, ask: Ask) -> Iterator[Sign]:
        """Events that are coming; they name every machine of a set."""
        if self._own_name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            status, body, _ = ask("GET", path, {"Metadata": "true"})
            self._own_name = body.decode("utf-8", "replace").strip() if status == 200 else ""
        status, body, _ = ask(
            "GET", "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}
        )
        if status != 200:
            raise UnreadableAnswerError(f"scheduledevents: HTTP {status}")
        events = _json(body).get("Events")
        if not isinstance(events, list):
            raise UnreadableAnswerError("scheduledevents: no list of events")
        for event in events:
            if (
                isinstance(event, dict)
                and event.get("EventType") in self.ENDING
                and self._is_ours(event)
            ):
                yield Sign(f"Azure {event['EventType']}", _moment(event.get("NotBefore")))

    def _is_ours(self, event: Json) -> bool:
        names = event.get("Resources")
        return not self._own_name or not isinstance(names, list) or self._own_name in names


Service = Aws | Gcp | Azure
"""What one cloud says now, the worst first. Raises `UnreadableAnswerError`."""
SERVICES: dict[str, Callable[[], Service]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
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
        self._services = [SERVICES[name]() for name in names]
        self._notice, self._pause_s = notice, pause_s
        self._address = _address(base or os.environ.get(ENVIRONMENT))
        self._is_known = len(names) == 1
        self._told: set[tuple[str, bool]] = set()
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def start(self) -> None:
        """Begin to ask, without waiting for an answer."""
        if self._services:
            self.thread.start()

    def stop(self) -> None:
        """Ask no more. An answer that is waited for is not waited for here."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._ask_until_told()
        except Exception as error:  # a run continues without its watch, and says so
            self._notice.warnings.append(
                f"notices of the cloud are no longer watched: {type(error).__name__}: {error}"
            )

    def _ask_until_told(self) -> None:
        n_failures = 0
        while self._services and not self._stop.is_set():
            answered = [service for service in self._services if self._look(service)]
            if answered and not self._is_known:
                self._services, self._is_known = answered[:1], True
            n_failures = 0 if answered else n_failures + 1
            if n_failures >= FAILURES_UNTIL_GIVEN_UP and not self._is_known:
                return  # no cloud's machine, or a container that can't reach the service
            if n_failures == FAILURES_UNTIL_GIVEN_UP:
                self._notice.warnings.append(
                    f"the metadata service ({self._services[0].name}) does not answer; asking on,"
                    " less often"
                )
            slowed = 12 if n_failures >= FAILURES_UNTIL_GIVEN_UP else 1
            pause_s = self._services[0].every_s if self._pause_s is None else self._pause_s
            self._stop.wait(pause_s * slowed)

    def _look(self, service: Service) -> bool:
        """Ask one service and pass on what is new; False where it gave no readable answer."""
        try:
            for sign in service.look(self._ask):
                self._pass_on(service.name, sign)
        except (OSError, http.client.HTTPException, UnreadableAnswerError):
            return False
        return True

    def _pass_on(self, cloud: str, sign: Sign) -> None:
        is_near = sign.leaves_at is None or sign.leaves_at - time.time() <= LEAVE_BEFORE_S
        sign = replace(sign, is_certain=sign.is_certain and is_near)
        if (sign.what, sign.is_certain) not in self._told and not self._stop.is_set():
            self._told.add((sign.what, sign.is_certain))
            self._notice.say(sign.what, cloud, sign.leaves_at, is_certain=sign.is_certain)

    def _ask(
        self, method: str, path: str, headers: dict[str, str]
    ) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            body = answer.read(LONGEST_ANSWER + 1)
            if len(body) > LONGEST_ANSWER:
                raise UnreadableAnswerError("too long an answer")
            return answer.status, body, {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()


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


def _json(body: bytes) -> Json:
    try:
        value = parse_json(body)
    except ValueError as error:
        raise UnreadableAnswerError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableAnswerError("no JSON object")
    return value


def _moment(value: Any) -> float | None:
    """Of ISO 8601 or of an HTTP date, in seconds since 1970; None where it is neither."""
    if not isinstance(value, str) or not value:
        return None
    try:
        moment = (
            datetime.fromisoformat(value) if value[:1].isdigit() else parsedate_to_datetime(value)
        )
        return moment.timestamp() if moment.tzinfo else moment.replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError, IndexError):
        return None
