"""Our own clients of RunPod, Vast.ai and Lambda: make, find, destroy. See `Driver`.

Money first: what can't be given an end is destroyed at once. Refuses to stop a machine instead of
destroying it: disks of stopped ones are paid for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from farthing.launch.driver import (
    Created,
    Driver,
    InstanceStatus,
    NotFoundError,
    OutOfStockError,
    ProviderError,
    RefusedError,
    UnclearError,
    refusal,
)
from farthing.launch.http import Api
from farthing.launch.request import CREATED_AT, ENDS_AT, LaunchRequest, values_of
from farthing.launch.targets import lambda_cloud, runpod, vast
from farthing.run.machines import Machine
from farthing.storage.files import Json

_PLACE = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")
RUNPOD, VAST, LAMBDA = "https://api.runpod.io", "https://console.vast.ai", "https://cloud.lambda.ai"
END_WINDOW_S = 3 * 3600
"""For how long Vast's scheduled job tries to delete."""


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """A request with what is known only now in place of each string that is ${NAME}, or has it in
    an address.
    """
    if isinstance(value, dict):
        return {key: filled(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, values) for item in value]
    if isinstance(value, str):
        whole = _PLACE.fullmatch(value)
        if whole and whole[1] in values:
            return values[whole[1]]
        if value.startswith("/"):
            return _PLACE.sub(lambda found: str(values.get(found[1], found[0])), value)
    return value


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """An answer of another form than a provider's own says nothing. Raises `UnclearError`."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnclearError(
            f"an answer that can't be read ({type(error).__name__}: {error})"
        ) from error


class Client(Driver):
    """A provider by its API."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @property
    def clock_offset_s(self) -> float:
        """See `Driver`."""
        return self._api.clock_offset_s


class RunPod(Client):
    """Pods: made by GraphQL, which knows an end; found and deleted by REST v2, which has no list of
    words but a stream.
    """

    @_understood()
    def create(self, ask: LaunchRequest, asked_at: float) -> Created:
        """See `Driver`."""
        ends = datetime.fromtimestamp(asked_at + ask.most_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        request = json.loads(runpod.render(ask)[runpod.REQUEST])
        body = filled(request, {CREATED_AT: f"{asked_at:.0f}", ENDS_AT: ends})
        answer = self._api.ask("POST", "/graphql", body, n_tries=1) or {}
        errors = answer.get("errors")
        if errors:
            why = "; ".join(str(error.get("message", error)) for error in errors)[:300]
            raise refusal(why)
        made = next(iter((answer.get("data") or {}).values()), None)
        if not made:
            raise OutOfStockError("no such machine is free")
        return Created(str(made["id"]), _price(made.get("costPerHr")))

    @_understood()
    def listed(self, prefix: str) -> list[InstanceStatus]:
        """See `Driver`."""
        answer = _sure(self._api, "GET", "/v2/pods")
        pods = (
            answer.get("pods") or answer.get("data") or []
            if isinstance(answer, dict)
            else answer or []
        )
        return _seen(
            pods,
            "name",
            "status",
            over=("EXITED", "ERROR"),
            gone=("TERMINATED",),
            price=lambda row: row.get("costPerHr"),
        )

    def delete(self, machine: Machine) -> None:
        """See `Driver`."""
        _sure(self._api, "DELETE", f"/v2/pods/{machine.id}")


class Vast(Client):
    """Instances: searched, asked for, and given a scheduled deletion at once."""

    @_understood()
    def create(self, ask: LaunchRequest, asked_at: float) -> Created:
        """See `Driver`. An instance that can't be given its end is destroyed at once, and the offer
        refused.
        """
        files = vast.render(ask)
        found = (
            _sure(self._api, "POST", "/api/v0/bundles/", json.loads(files[vast.SEARCH])) or {}
        ).get("offers") or []
        if not found:
            raise OutOfStockError("no host offers it at this price now")
        body = filled(
            json.loads(files[vast.CREATE]),
            {**values_of(ask.secrets), CREATED_AT: f"{asked_at:.0f}"},
        )
        answer = self._api.ask("PUT", f"/api/v0/asks/{found[0]['id']}/", body, n_tries=1) or {}
        if not answer.get("success") or not answer.get("new_contract"):
            why = str(answer.get("msg") or answer.get("error") or answer)[:200]
            raise refusal(why)
        made = Machine(
            ask.name, id=str(answer["new_contract"]), asked_at=asked_at, most_s=ask.most_s
        )
        try:
            self.secure(made)
        except ProviderError as error:
            self.destroy(made)
            raise RefusedError(
                f"its end could not be scheduled ({error}), so it was destroyed at once"
            ) from error
        return Created(made.id, None if ask.offer.is_spot else _price(found[0].get("dph_total")))

    def secure(self, machine: Machine) -> None:
        """See `Driver`. Status 422: such a job is there already."""
        ends = machine.asked_at + machine.most_s
        number = int(machine.id)
        values = {ENDS_AT: ends, f"{ENDS_AT}_LATER": ends + END_WINDOW_S, vast.INSTANCE: number}
        try:
            self._api.ask(
                "POST", "/api/v0/commands/schedule_job/", filled(vast.END_REQUEST, values)
            )
        except RefusedError as error:
            if "status 422" not in str(error):
                raise

    @_understood()
    def listed(self, prefix: str) -> list[InstanceStatus]:
        """See `Driver`. Page by page."""
        found: list[Json] = []
        path = "/api/v1/instances/?limit=25"
        for _ in range(200):
            answer = _sure(self._api, "GET", path) or {}
            found += answer.get("instances") or []
            if not answer.get("next_token"):
                break
            path = f"/api/v1/instances/?limit=25&after_token={answer['next_token']}"
        return _seen(
            found,
            "label",
            "actual_status",
            over=("exited", "offline", "dead"),
            price=lambda row: row.get("dph_total"),
        )

    def delete(self, machine: Machine) -> None:
        """See `Driver`."""
        _sure(self._api, "DELETE", f"/api/v0/instances/{machine.id}/", {})

    def log(self, machine: Machine) -> str:
        """See `Driver`."""
        return json.dumps(
            _sure(
                self._api, "PUT", f"/api/v0/instances/request_logs/{machine.id}/", {"tail": "200"}
            )
        )


class Lambda(Client):
    """Instances, which nothing ends but us."""

    ends_by_itself = False

    @_understood()
    def create(self, ask: LaunchRequest, asked_at: float) -> Created:
        """See `Driver`."""
        body = json.loads(lambda_cloud.render(ask)[lambda_cloud.REQUEST])
        values = {**ask.settings, **values_of(ask.secrets), CREATED_AT: f"{asked_at:.0f}"}
        exports = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in sorted(values.items())
        )
        body["user_data"] = f"#!/bin/sh\n{exports}" + body["user_data"].partition("\n")[2]
        answer = self._api.ask("POST", "/api/v1/instance-operations/launch", body, n_tries=1) or {}
        made = (answer.get("data") or {}).get("instance_ids") or []
        if not made:
            raise UnclearError("an answer without an instance")
        return Created(str(made[0]))

    @_understood()
    def listed(self, prefix: str) -> list[InstanceStatus]:
        """See `Driver`."""
        found = (_sure(self._api, "GET", "/api/v1/instances") or {}).get("data") or []
        return _seen(
            found,
            "name",
            "status",
            over=("unhealthy",),
            gone=("terminated", "preempted"),
            price=lambda row: row["instance_type"]["price_cents_per_hour"] / 100,
        )

    def delete(self, machine: Machine) -> None:
        """See `Driver`."""
        _sure(
            self._api,
            "POST",
            "/api/v1/instance-operations/terminate",
            {"instance_ids": [machine.id]},
            may_be_gone=True,
        )


def _seen(
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
        if row.get(state) in gone:
            continue
        try:
            usd_per_hour = _price(price(row))
        except (LookupError, TypeError):
            usd_per_hour = None
        found.append(
            InstanceStatus(
                str(row.get(name)),
                str(row["id"]),
                is_over=row.get(state) in over,
                usd_per_hour=usd_per_hour,
            )
        )
    return found


def _price(value: Any) -> float | None:
    """Dollars an hour as a provider tells them; None for what is no price."""
    try:
        usd = float(value)
    except (TypeError, ValueError):
        return None
    return usd if 0 < usd < 100_000 else None


def _sure(api: Api, method: str, path: str, body: Any = None, *, may_be_gone: bool = False) -> Any:
    """The answer to a question or a deletion, whose refusal settles nothing. Raises `UnclearError`,
    `UnauthorizedError`.
    """
    try:
        return api.ask(method, path, body)
    except RefusedError as error:
        if may_be_gone and isinstance(error, NotFoundError):
            return None
        raise UnclearError(str(error)) from error


def connect(target: str) -> Driver:
    """The client of a target, with the key from the environment. Raises `InputError`.

    FARTHING_LAUNCH_API names another address, for tests.
    """
    other = os.environ.get("FARTHING_LAUNCH_API", "")

    def api(base: str, key: str) -> Api:
        return Api(
            other or base, {"Authorization": f"Bearer {values_of([key], 'your account')[key]}"}
        )

    if target == "runpod":
        return RunPod(api(RUNPOD, "RUNPOD_API_KEY"))
    return (
        Vast(api(VAST, "VAST_API_KEY"))
        if target == "vast"
        else Lambda(api(LAMBDA, "LAMBDA_API_KEY"))
    )
