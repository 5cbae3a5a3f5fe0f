"""RunPod: a pod with the moment of its own end, by GraphQL, the only door that has one (and spot)."""  # noqa: E501

from __future__ import annotations

import base64
import json

from farthing.launch.request import CREATED_AT, ENDS_AT, SCRIPT, LaunchRequest, script_of
from farthing.launch.target import Files, Target
from farthing.storage.files import Json

REQUEST = "pod.json"
_COMMAND = (
    "cd; echo $FARTHING_SCRIPT | base64 -d > run.sh && sh run.sh; "
    'runpodctl remove pod "$RUNPOD_POD_ID"; exec sleep infinity'
)
"""A pod begins again what has ended, so it waits to be removed, which it asks for itself."""
START = json.dumps({"entrypoint": ["sh", "-c"], "cmd": [_COMMAND]})
"""In place of the image's ENTRYPOINT and CMD; a plain string would be arguments to the former."""


def render(ask: LaunchRequest) -> Files:
    """The request. Spot is a bid at the planned price, on demand is what is listed; secrets are
    those of the account.
    """
    offer = ask.offer
    kind = "podRentInterruptable" if offer.is_spot else "podFindAndDeployOnDemand"
    of = "PodRentInterruptableInput" if offer.is_spot else "PodFindAndDeployOnDemandInput"
    script = script_of(ask)
    env = {**ask.settings, "FARTHING_SCRIPT": base64.b64encode(script.encode()).decode()}
    env |= {name: f"{{{{ RUNPOD_SECRET_{name} }}}}" for name in ask.secrets} | {
        CREATED_AT: f"${{{CREATED_AT}}}"
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
        "terminateAfter": f"${{{ENDS_AT}}}",
    }
    if offer.is_spot:
        pod["bidPerGpu"] = round(ask.usd_per_hour / offer.n_gpus, 4)
    request = {
        "query": f"mutation Rent($input: {of}!) {{ {kind}(input: $input) {{ id costPerHr }} }}",
        "variables": {"input": pod},
    }
    return {REQUEST: json.dumps(request, indent=1) + "\n", SCRIPT: script}


TARGET = Target(
    "runpod",
    "RunPod",
    render,
    ends="RunPod, at terminateAfter",
    is_rented=True,
    keys=("RUNPOD_API_KEY",),
    picks_gpus=True,
)
