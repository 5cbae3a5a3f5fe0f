"""RunPod: a pod with the moment of its own end, by GraphQL, the only door that has one (and
spot).
"""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

from farthing.launch.driver import Created, InstanceStatus, OutOfStockError, refusal, understood
from farthing.launch.http import Client, price_of, statuses, sure
from farthing.launch.machines import RentedMachine
from farthing.launch.request import (
    CREATED_AT,
    ENDS_AT,
    LaunchRequest,
    Value,
    placeholder,
    script_of,
)
from farthing.launch.target import Target
from farthing.storage.files import Json

REQUEST = "pod.json"
_COMMAND = (
    "cd; echo $FARTHING_SCRIPT | base64 -d > run.sh && sh run.sh; "
    'runpodctl remove pod "$RUNPOD_POD_ID"; exec sleep infinity'
)
"""A pod begins again what has ended, so it waits to be removed, which it asks for itself."""
START = json.dumps({"entrypoint": ["sh", "-c"], "cmd": [_COMMAND]})
"""In place of the image's ENTRYPOINT and CMD; a plain string would be arguments to the former."""


def request_of(ask: LaunchRequest, value: Value) -> Json:
    """Spot is a bid at the planned price; secrets are those of the account."""
    offer = ask.offer
    kind = "podRentInterruptable" if offer.is_spot else "podFindAndDeployOnDemand"
    of = "PodRentInterruptableInput" if offer.is_spot else "PodFindAndDeployOnDemandInput"
    script = base64.b64encode(script_of(ask).encode()).decode()
    env = {**ask.settings, "FARTHING_SCRIPT": script}
    env |= {name: f"{{{{ RUNPOD_SECRET_{name} }}}}" for name in ask.secrets} | {
        CREATED_AT: value(CREATED_AT)
    }
    pod: Json = {
        "name": ask.name,
        "imageName": ask.image,
        "dockerArgs": START,
        "gpuTypeId": ask.gpu_id,
        "gpuCount": offer.n_gpus,
        "cloudType": "COMMUNITY" if "community" in offer.instance else "SECURE",
        "containerDiskInGb": ask.disk_gb,
        "volumeInGb": 0,
        "env": [{"key": name, "value": value} for name, value in sorted(env.items())],
        "terminateAfter": value(ENDS_AT),
    }
    if offer.is_spot:
        pod["bidPerGpu"] = round(ask.usd_per_hour / offer.n_gpus, 4)
    return {
        "query": f"mutation Rent($input: {of}!) {{ {kind}(input: $input) {{ id costPerHr }} }}",
        "variables": {"input": pod},
    }


def render(ask: LaunchRequest) -> Json:
    return {REQUEST: request_of(ask, placeholder)}


class RunPod(Client):
    """Pods: made by GraphQL, which knows an end; found and deleted by REST."""

    @understood()
    def create(self, ask: LaunchRequest, asked_at: float) -> Created:
        ends = datetime.fromtimestamp(asked_at + ask.most_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = request_of(ask, {CREATED_AT: f"{asked_at:.0f}", ENDS_AT: ends}.__getitem__)
        answer = self._api.ask("POST", "/graphql", body, n_tries=1) or {}
        errors = answer.get("errors")
        if errors:
            why = "; ".join(str(error.get("message", error)) for error in errors)[:300]
            raise refusal(why)
        made = next(iter((answer.get("data") or {}).values()), None)
        if not made:
            raise OutOfStockError("no such machine is free")
        return Created(str(made["id"]), price_of(made.get("costPerHr")))

    @understood()
    def listed(self, prefix: str) -> list[InstanceStatus]:
        answer = sure(self._api, "GET", "/v2/pods")
        if isinstance(answer, dict):
            answer = answer["pods" if "pods" in answer else "data"]
        return statuses(
            answer,
            "name",
            "status",
            over=("EXITED", "ERROR"),
            gone=("TERMINATED",),
            price=lambda row: row.get("costPerHr"),
        )

    def delete(self, machine: RentedMachine) -> None:
        sure(self._api, "DELETE", f"/v2/pods/{machine.id}")


TARGET = Target(
    "runpod",
    "RunPod",
    ends="RunPod, at terminateAfter",
    render=render,
    is_rented=True,
    keys=("RUNPOD_API_KEY",),
    picks_gpus=True,
    api="https://api.runpod.io",
    client=RunPod,
    providers=("RunPod",),
    quota="an account spends at most $80 an hour unless its limit was raised",
)
