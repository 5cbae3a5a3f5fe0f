"""Lambda: an instance with its script as user data. Nothing there ends it: only with somebody who
stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from farthing.launch.request import SCRIPT, LaunchRequest, script_of
from farthing.launch.target import Files, Target

REQUEST = "launch.json"
MOST_USER_DATA_BYTES = 1_000_000


def render(ask: LaunchRequest) -> Files:
    """The request. `ask.at` is REGION/SSH_KEY; the values of secrets are put before the script when
    it is sent.
    """
    region, _, key = ask.at.partition("/")
    request = {
        "region_name": region or (ask.offer.region if ask.offer.region != "any" else ""),
        "instance_type_name": ask.gpu_id,
        "ssh_key_names": [key],
        "name": ask.name,
        "user_data": script_of(ask),
    }
    return {REQUEST: json.dumps(request, indent=1) + "\n", SCRIPT: script_of(ask)}


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


TARGET = Target(
    "lambda",
    "Lambda",
    render,
    check=check,
    ends="",
    is_rented=True,
    at="REGION/SSH_KEY",
    keys=("LAMBDA_API_KEY",),
    picks_gpus=True,
)
