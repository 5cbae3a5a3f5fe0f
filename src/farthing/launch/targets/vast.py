"""Vast.ai: the search for an offer, the request for it, the instance's own end, and the scheduled
job that deletes it too.

A request that was never answered leaves an instance for which nobody has scheduled anything. It
ends itself: Vast.ai puts a key into every instance (CONTAINER_API_KEY, CONTAINER_ID) that can
destroy this one and nothing else.
"""

from __future__ import annotations

import json
from urllib.parse import quote

from farthing.launch.driver import (
    Created,
    InstanceStatus,
    OutOfStockError,
    RefusedError,
    refusal,
    understood,
)
from farthing.launch.http import Client, price_of, statuses, sure
from farthing.launch.machines import RentedMachine
from farthing.launch.request import (
    CREATED_AT,
    ENDS_AT,
    MOST_OVER,
    LaunchRequest,
    Value,
    placeholder,
    script_of,
    values_of,
)
from farthing.launch.target import Target
from farthing.storage.files import Json

SEARCH, CREATE, END = "search.json", "create.json", "schedule.json"
INSTANCE = "FARTHING_INSTANCE"
END_WINDOW_S = 3 * 3600
"""For how long the scheduled job tries to delete."""
LEAST_RELIABILITY = 0.95
_END_IT = (
    'import os, urllib.request as web; url = "https://console.vast.ai/api/v0/instances/" +'
    ' os.environ["CONTAINER_ID"] + "/"; key = {"Authorization": "Bearer " +'
    ' os.environ["CONTAINER_API_KEY"], "Content-Type": "application/json"};'
    ' web.urlopen(web.Request(url, b"{}", key, method="DELETE"), timeout=30)'
)
AGAIN_S = 20


def own_end(script: str, most_s: int) -> str:
    """A script that deletes its instance when it ends, at the latest `most_s` after it was asked
    for, whatever it hangs in; asked again until nothing is left to ask. A clock that is off counts
    as just asked for."""
    return f"""#!/bin/sh
end_it() {{
  until python3 -c '{_END_IT}' 2>/dev/null; do sleep {AGAIN_S}; done
}}
left=$(({CREATED_AT} + {most_s} - $(date +%s)))
[ "$left" -gt 0 ] && [ "$left" -le {most_s} ] || left={most_s}
(sleep "$left"; end_it) &
trap end_it EXIT
{script.removeprefix("#!/bin/sh" + chr(10))}"""


def search_of(ask: LaunchRequest) -> Json:
    """An offer lives for seconds, so it is searched for when it is wanted."""
    return {
        "verified": {"eq": True},
        "external": {"eq": False},
        "rentable": {"eq": True},
        "rented": {"eq": False},
        "gpu_name": {"eq": ask.gpu_id},
        "num_gpus": {"eq": ask.offer.n_gpus},
        "disk_space": {"gte": ask.disk_gb},
        "reliability2": {"gte": LEAST_RELIABILITY},
        "dph_total": {"lte": round(ask.usd_per_hour * MOST_OVER, 4)},
        "type": "bid" if ask.offer.is_spot else "on-demand",
        "order": [["dph_total", "asc"]],
        "limit": 10,
        "allocated_storage": ask.disk_gb,
    }


def creation_of(ask: LaunchRequest, value: Value) -> Json:
    """With `price` it is a bid.

    The command comes with a replacement for the image's ENTRYPOINT (`onstart`, as `vastai
    create instance --entrypoint` sends it): `nice`, which runs it, and does no harm where it were
    taken for a command of its own.
    """
    env = {**ask.settings, **{name: value(name) for name in (*ask.secrets, CREATED_AT)}}
    create: Json = {
        "client_id": "me",
        "image": ask.image,
        "env": dict(sorted(env.items())),
        "disk": ask.disk_gb,
        "label": ask.name,
        "runtype": "args",
        "onstart": "nice",
        "args": ["sh", "-c", own_end(script_of(ask), ask.most_s)],
        "cancel_unavail": True,
    }
    return create | ({"price": round(ask.usd_per_hour, 4)} if ask.offer.is_spot else {})


def end_of(value: Value) -> Json:
    """The scheduled job that deletes an instance."""
    return {
        "start_time": value(ENDS_AT),
        "end_time": value(f"{ENDS_AT}_LATER"),
        "api_endpoint": f"/api/v0/instances/{value(INSTANCE)}/",
        "request_method": "DELETE",
        "request_body": {},
        "day_of_the_week": None,
        "hour_of_the_day": None,
        "frequency": "HOURLY",
        "instance_id": value(INSTANCE),
    }


def render(ask: LaunchRequest) -> Json:
    return {
        SEARCH: search_of(ask),
        CREATE: creation_of(ask, placeholder),
        END: end_of(placeholder),
    }


class Vast(Client):
    """Instances: searched, asked for, and given a scheduled deletion at once."""

    @understood()
    def create(self, ask: LaunchRequest, asked_at: float) -> Created:
        answer = sure(self._api, "POST", "/api/v0/bundles/", search_of(ask)) or {}
        found = answer.get("offers") or []
        if not found:
            raise OutOfStockError("no host offers it at this price now")
        values = {**values_of(ask.secrets), CREATED_AT: f"{asked_at:.0f}"}
        body = creation_of(ask, values.__getitem__)
        answer = self._api.ask("PUT", f"/api/v0/asks/{found[0]['id']}/", body, n_tries=1) or {}
        if not answer.get("success") or not answer.get("new_contract"):
            why = str(answer.get("msg") or answer.get("error") or answer)[:200]
            raise refusal(why)
        price = None if ask.offer.is_spot else price_of(found[0].get("dph_total"))
        return Created(str(answer["new_contract"]), price)

    def secure(self, machine: RentedMachine) -> None:
        """Status 422: such a job is there already."""
        ends = machine.asked_at + machine.most_s
        number = int(machine.id)
        values = {ENDS_AT: ends, f"{ENDS_AT}_LATER": ends + END_WINDOW_S, INSTANCE: number}
        try:
            self._api.ask("POST", "/api/v0/commands/schedule_job/", end_of(values.__getitem__))
        except RefusedError as error:
            if "status 422" not in str(error):
                raise

    @understood()
    def listed(self, prefix: str) -> list[InstanceStatus]:
        found: list[Json] = []
        path = "/api/v1/instances/?limit=25"
        for _ in range(200):
            answer = sure(self._api, "GET", path)
            found += answer["instances"]
            if not answer.get("next_token"):
                break
            path = f"/api/v1/instances/?limit=25&after_token={quote(answer['next_token'])}"
        return statuses(
            found,
            "label",
            "actual_status",
            over=("exited", "offline", "dead"),
            price=lambda row: row.get("dph_total"),
        )

    def delete(self, machine: RentedMachine) -> None:
        sure(self._api, "DELETE", f"/api/v0/instances/{machine.id}/", {})

    def log(self, machine: RentedMachine) -> str:
        return json.dumps(
            sure(self._api, "PUT", f"/api/v0/instances/request_logs/{machine.id}/", {"tail": "200"})
        )


TARGET = Target(
    "vast",
    "Vast.ai",
    ends="the instance, with its own key, and a scheduled job at Vast.ai: either deletes it",
    render=render,
    is_rented=True,
    keys=("VAST_API_KEY",),
    picks_gpus=True,
    api="https://console.vast.ai",
    client=Vast,
    providers=("Vast.ai",),
    takes_values=True,
)
