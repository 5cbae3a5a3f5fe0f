"""Lambda: an instance with its script as user data. Nothing there ends it: only with somebody who
stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from farthing.launch.driver import Created, InstanceStatus, UnclearError, understood
from farthing.launch.http import Client, statuses, sure
from farthing.launch.machines import RentedMachine
from farthing.launch.request import LaunchRequest, script_of
from farthing.launch.target import Target
from farthing.storage.files import Json

REQUEST = "launch.json"
MOST_USER_DATA_BYTES = 1_000_000


def request_of(ask: LaunchRequest) -> Json:
    """`ask.at` is REGION/SSH_KEY; values of secrets are put before the script when sent."""
    region, _, key = ask.at.partition("/")
    return {
        "region_name": region or (ask.offer.region if ask.offer.region != "any" else ""),
        "instance_type_name": ask.gpu_id,
        "ssh_key_names": [key],
        "name": ask.name,
        "user_data": script_of(ask),
    }


def render(ask: LaunchRequest) -> Json:
    return {REQUEST: request_of(ask)}


def check(files: Mapping[str, str]) -> list[str]:
    """What --on, the offer or the job may lack, and its limits."""
    request = json.loads(files[REQUEST])
    kind = request["instance_type_name"]
    wrong = {
        "`region_name` is missing": not request["region_name"],
        "`ssh_key_names.0` is missing": request["ssh_key_names"] in ([], [""]),
        "more than 1 MB of user data": len(request["user_data"].encode()) > MOST_USER_DATA_BYTES,
        f"no such instance type: {kind}": not re.fullmatch(r"gpu_\d+x_\w+", kind),
    }
    return [f"{REQUEST}: {what}" for what, is_so in wrong.items() if is_so]


class Lambda(Client):
    """Instances, which nothing ends but us."""

    ends_by_itself = False

    @understood()
    def create(self, ask: LaunchRequest, asked_at: float) -> Created:
        body = request_of(ask)
        head, _, rest = body["user_data"].partition("\n")
        body["user_data"] = f"{head}\n{ask.exports(asked_at)}{rest}"
        answer = self._api.ask("POST", "/api/v1/instance-operations/launch", body, n_tries=1) or {}
        made = (answer.get("data") or {}).get("instance_ids") or []
        if not made:
            raise UnclearError("an answer without an instance")
        return Created(str(made[0]))

    @understood()
    def listed(self, prefix: str) -> list[InstanceStatus]:
        found = sure(self._api, "GET", "/api/v1/instances")["data"]
        return statuses(
            found,
            "name",
            "status",
            over=("unhealthy",),
            gone=("terminated", "preempted"),
            price=lambda row: row["instance_type"]["price_cents_per_hour"] / 100,
        )

    def delete(self, machine: RentedMachine) -> None:
        sure(
            self._api,
            "POST",
            "/api/v1/instance-operations/terminate",
            {"instance_ids": [machine.id]},
            may_be_gone=True,
        )


TARGET = Target(
    "lambda",
    "Lambda",
    ends="",
    render=render,
    check=check,
    is_rented=True,
    at="REGION/SSH_KEY",
    keys=("LAMBDA_API_KEY",),
    picks_gpus=True,
    api="https://cloud.lambda.ai",
    client=Lambda,
    providers=("Lambda",),
    rents_instances=True,
    takes_values=True,
)
