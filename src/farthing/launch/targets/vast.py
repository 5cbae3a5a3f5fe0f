"""Vast.ai: the search for an offer, the request for it, the instance's own end, and the scheduled
job that deletes it too.

A request that was never answered leaves an instance for which nobody has scheduled anything. It
ends itself: Vast.ai puts a key into every instance (CONTAINER_API_KEY, CONTAINER_ID) that can
destroy this one and nothing else.
"""

from __future__ import annotations

import json

from farthing.launch.request import (
    CREATED_AT,
    ENDS_AT,
    MOST_OVER,
    SCRIPT,
    LaunchRequest,
    script_of,
)
from farthing.launch.target import Files, Target
from farthing.storage.files import Json

SEARCH, CREATE, END = "search.json", "create.json", "schedule.json"
INSTANCE = "FARTHING_INSTANCE"
LEAST_RELIABILITY = 0.95
END_REQUEST: Json = {
    "start_time": f"${{{ENDS_AT}}}",
    "end_time": f"${{{ENDS_AT}_LATER}}",
    "api_endpoint": f"/api/v0/instances/${{{INSTANCE}}}/",
    "request_method": "DELETE",
    "request_body": {},
    "day_of_the_week": None,
    "hour_of_the_day": None,
    "frequency": "HOURLY",
    "instance_id": f"${{{INSTANCE}}}",
}
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


def render(ask: LaunchRequest) -> Files:
    """Three requests: an offer lives for seconds, so it is searched for when it is wanted. With
    `price` it is a bid.

    The command goes with what is to be in place of the image's ENTRYPOINT (`onstart`, as `vastai
    create instance
    --entrypoint` sends it): `nice`, which runs it, and does no harm where it were taken for a
    command of its own.
    """
    offer = ask.offer
    env = {
        **ask.settings,
        **{name: f"${{{name}}}" for name in ask.secrets},
        CREATED_AT: f"${{{CREATED_AT}}}",
    }
    search: Json = {
        "verified": {"eq": True},
        "external": {"eq": False},
        "rentable": {"eq": True},
        "rented": {"eq": False},
        "gpu_name": {"eq": ask.gpu_id},
        "num_gpus": {"eq": offer.n_gpus},
        "disk_space": {"gte": ask.disk_gb},
        "reliability2": {"gte": LEAST_RELIABILITY},
        "dph_total": {"lte": round(ask.usd_per_hour * MOST_OVER, 4)},
        "type": "bid" if offer.is_spot else "on-demand",
        "order": [["dph_total", "asc"]],
        "limit": 10,
        "allocated_storage": ask.disk_gb,
    }
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
    if offer.is_spot:
        create["price"] = round(ask.usd_per_hour, 4)
    values = {SEARCH: search, CREATE: create, END: END_REQUEST}
    return {name: json.dumps(value, indent=1) + "\n" for name, value in values.items()} | {
        SCRIPT: script_of(ask)
    }


TARGET = Target(
    "vast",
    "Vast.ai",
    render,
    ends="the instance, by a key of its own, and a scheduled job at Vast.ai: either deletes it",
    is_rented=True,
    keys=("VAST_API_KEY",),
    picks_gpus=True,
)
