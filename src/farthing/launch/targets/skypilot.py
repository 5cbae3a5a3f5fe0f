"""SkyPilot: a managed job on one offer at a time, begun again after 75 and after a lost machine."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from farthing.launch.driver import InstanceStatus, job_status
from farthing.launch.request import LaunchRequest, script_of
from farthing.launch.target import Commands, Target
from farthing.storage.files import Json

TASK, CONFIG = "task.sky.yaml", "config.sky.yaml"
PROVIDERS = (
    *("AWS", "GCP", "Azure", "Lambda", "RunPod", "Vast.ai", "Nebius", "Paperspace", "Oracle"),
    *("Cudo", "Verda", "Prime Intellect"),
)
"""Those of the price table that it knows."""
INFRA = {"Vast.ai": "vast", "Oracle": "oci", "Prime Intellect": "primeintellect"}
"""Its names of providers; of others in small letters."""
STRANGERS = ("runpod", "vast")
_OVER = re.compile("SUCCEEDED|CANCELLED|FAILED(_SETUP|_PRECHECKS|_NO_RESOURCE|_CONTROLLER)?")


def render(ask: LaunchRequest) -> dict[str, str]:
    """The task, for one resource: the cap and the time limit are those of its price. A
    configuration keeps the user's cloud credentials off hosts of strangers. The run has a `timeout`
    of its own: SkyPilot has none on the wall.
    """
    task: Json = {
        "name": ask.name,
        "resources": {
            **_resource(ask.offer, ask.gpu_id),
            "disk_size": max(50, ask.disk_gb),
            "job_recovery": {"recover_on_exit_codes": [75], "max_restarts_on_errors": 0},
        }
        | ({"image_id": f"docker:{ask.image}"} if ask.image else {}),
        "envs": dict(sorted(ask.settings.items())),
        "secrets": dict.fromkeys(ask.secrets),
        "run": script_of(ask),
    }
    task = {key: value for key, value in task.items() if value}
    config = {cloud: {"remote_identity": "NO_UPLOAD"} for cloud in STRANGERS}
    return {
        TASK: yaml.safe_dump(task, sort_keys=False),
        CONFIG: yaml.safe_dump(config),
    }


def _resource(offer: Any, gpu: str) -> Json:
    infra = INFRA.get(offer.provider, offer.provider.lower())
    if offer.region and offer.region not in ("any", "global"):
        infra = f"{infra}/{offer.region}"
    return {"infra": infra, "accelerators": f"{gpu}:{offer.n_gpus}", "use_spot": offer.is_spot}


def _submit(ask: LaunchRequest, folder: Path) -> list[str]:
    secrets = [word for name in ask.secrets for word in ("--secret", name)]
    config = ["--config", str(folder / CONFIG)]
    words = shlex.split("sky jobs launch --yes --detach-run")
    return [*words, *config, *secrets, str(folder / TASK)]


def _parse(text: str) -> list[InstanceStatus]:
    jobs = json.loads(text)
    found = []
    for job in jobs if isinstance(jobs, list) else jobs["jobs"]:
        state = str(job.get("status", "")).rpartition(".")[2]
        name = str(job.get("job_name") or job.get("name"))
        code = {"SUCCEEDED": 0, "FAILED_SETUP": 2, "FAILED_PRECHECKS": 2}.get(state)
        waits = state in ("PENDING", "SUBMITTED", "STARTING", "RECOVERING")
        found.append(
            job_status(
                name, str(job.get("job_id")), bool(_OVER.fullmatch(state)), waits=waits, code=code
            )
        )
    return found


COMMANDS = Commands(
    submit=_submit,
    id_of=lambda text: "",  # known by its name
    listing=lambda prefix: "sky jobs queue --all --refresh --output json",
    parse=_parse,
    destroy=lambda m: f"sky jobs cancel --yes --name {m.name}",
    log=lambda m: f"sky jobs logs --no-follow --name {m.name}",
)
TARGET = Target(
    "skypilot",
    "SkyPilot",
    ends=(
        "`timeout` around the run; SkyPilot's controller, a small machine of yours, then takes the"
        " rest down"
    ),
    render=render,
    is_rented=True,
    commands=lambda at: COMMANDS,
    program="sky",
    install=(
        "pip install 'skypilot[runpod]' (or [aws], [gcp] ...) in an environment of its own, then:"
        " sky check"
    ),
    picks_gpus=True,
    keeps_billing=("SkyPilot's jobs controller", "`sky status` names it, `sky down` ends it"),
    login=("sky check", "`sky check` shows each cloud's problem"),
    quota=(
        "each cloud has its own quota: sky show-gpus --infra CLOUD; a new account often has none"
    ),
    providers=PROVIDERS,
    takes_values=True,
)
