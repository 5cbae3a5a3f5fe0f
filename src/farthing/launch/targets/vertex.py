"""Vertex AI: a CustomJob with a time limit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from farthing.launch.driver import InstanceStatus, job_status
from farthing.launch.machines import RentedMachine
from farthing.launch.request import SCRIPT, LaunchRequest, script_of
from farthing.launch.target import Commands, Target
from farthing.storage.files import Json

DOCUMENT = "custom_job.json"
_OVER = ("JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED")
_WAITS = ("JOB_STATE_QUEUED", "JOB_STATE_PENDING")
_SECRET = (
    "import base64, json, sys, urllib.request as web\ndef get(url, **headers):\n    return"
    " json.load(web.urlopen(web.Request(url, headers=headers), timeout=30))\nown ="
    " 'http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default"
    "/token'\n"
    "key = get(own, **{'Metadata-Flavor': 'Google'})['access_token']\nurl ="
    " 'https://secretmanager.googleapis.com/v1/projects/%s/secrets/%s/versions/latest:access' %"
    " tuple(sys.argv[1:])\nfound = get(url, Authorization='Bearer ' +"
    " key)\nsys.stdout.write(base64.b64decode(found['payload']['data']).decode())\n"
)
"""Prints a secret of Secret Manager, read as the job's service account."""


def with_secrets(ask: LaunchRequest) -> str:
    """The script, which first fetches its secrets by name: the document has no place for them."""
    script, project = script_of(ask), ask.at.partition("/")[0]
    lines = "".join(
        f'{name}=$(python3 -c "$read" {shlex.quote(project)} {name}) && export {name} || {{ '
        f'echo "the secret {name} of project {project} can not be read" >&2; exit 2; }}\n'
        for name in ask.secrets
    )
    head, _, rest = script.partition("\n")
    return f"{head}\nread={shlex.quote(_SECRET)}\n{lines}{rest}" if lines else script


def render(ask: LaunchRequest) -> Json:
    """The job. `ask.at` is PROJECT/REGION, with /SERVICE_ACCOUNT where that is another than the
    default.

    Credentials of a gs:// store are the service account's; other secrets are those of the project's
    Secret Manager.
    """
    account, script = ask.at.split("/")[2:], with_secrets(ask)
    machine: Json = {"machineType": ask.machine_type}
    if ask.gpu_id:
        machine |= {"acceleratorType": ask.gpu_id, "acceleratorCount": ask.offer.n_gpus}
    job: Json = {
        "workerPoolSpecs": [
            {
                "machineSpec": machine,
                "replicaCount": "1",
                "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": max(100, ask.disk_gb)},
                "containerSpec": {
                    "imageUri": ask.image,
                    "command": ["sh", "-c"],
                    "args": [script],
                    "env": [
                        {"name": name, "value": value}
                        for name, value in sorted(ask.settings.items())
                    ],
                },
            }
        ],
        "scheduling": {
            "timeout": f"{ask.most_s}s",
            "strategy": "SPOT" if ask.offer.is_spot else "STANDARD",
            "restartJobOnWorkerRestart": True,
            "disableRetries": False,
        },
    }
    job |= {"serviceAccount": account[0]} if account else {}
    document = {
        "displayName": ask.name,
        "labels": {"farthing-launch": ask.launch_id},
        "jobSpec": job,
    }
    return {
        DOCUMENT: document,
        "job_spec.json": job,
        SCRIPT: script,
    }


def _parse(text: str) -> list[InstanceStatus]:
    return [
        job_status(
            job["displayName"],
            job["name"],
            job["state"] in _OVER,
            waits=job["state"] in _WAITS,
            code=0 if job["state"] == "JOB_STATE_SUCCEEDED" else None,
        )
        for job in json.loads(text)
    ]


def commands(at: str) -> Commands:
    project, region = map(shlex.quote, [*at.split("/"), "", ""][:2])
    place = f"--project={project} --region={region}"
    ai = "gcloud ai custom-jobs"

    def submit(ask: LaunchRequest, folder: Path) -> list[str]:
        named = f"--display-name={ask.name} --labels=farthing-launch={ask.launch_id}"
        command = f"{ai} create {place} {named} '--format=value(name)'"
        return [*shlex.split(command), f"--config={folder / 'job_spec.json'}"]

    def log(machine: RentedMachine) -> str:
        job = machine.id.rpartition("/")[2]
        of = f'resource.type="ml_job" AND resource.labels.job_id="{job}"'
        read = "gcloud logging read --limit=200 --order=asc '--format=value(jsonPayload.message)'"
        return f"{read} {shlex.quote(of)} --project={project}"

    return Commands(
        submit=submit,
        id_of=lambda text: text.split()[-1],
        listing=lambda prefix: (
            f"{ai} list {place} --filter=labels.farthing-launch={prefix} --format=json"
        ),
        parse=_parse,
        destroy=lambda m: f"{ai} cancel {m.id} {place}",
        log=log,
    )


TARGET = Target(
    "vertex",
    "Vertex AI",
    ends="Vertex, at scheduling.timeout",
    render=render,
    is_rented=True,
    at="PROJECT/REGION[/SERVICE_ACCOUNT]",
    commands=commands,
    program="gcloud",
    install="https://cloud.google.com/sdk/docs/install",
    picks_gpus=True,
    login=(
        "gcloud auth list --filter=status:ACTIVE --format=value(account)",
        "gcloud auth login",
    ),
    quota=(
        "Vertex AI has a quota for each accelerator and for spot: console, IAM & Admin, Quotas,"
        " `custom_model_training`"
    ),
    providers=("GCP",),
)
