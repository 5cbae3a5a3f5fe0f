"""Hugging Face Jobs: one command with a time limit; its secrets by name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from farthing.launch.driver import InstanceStatus, job_status
from farthing.launch.request import LaunchRequest, script_of
from farthing.launch.target import Commands, Target
from farthing.storage.files import Json

CALL = "run_job.json"
_OVER = {"COMPLETED": 0, "CANCELED": None, "ERROR": None, "DELETED": None}


def render(ask: LaunchRequest) -> Json:
    """`ask.at` is the namespace. The default limit is 30 minutes: one is always set."""
    call = {
        "image": ask.image,
        "command": ["sh", "-c", script_of(ask)],
        "env": dict(sorted(ask.settings.items())),
        "secrets": list(ask.secrets),
        "flavor": ask.gpu_id,
        "timeout": f"{ask.most_s}s",
        "name": ask.name,
        "labels": {"farthing-launch": ask.launch_id},
    }
    call |= {"namespace": ask.at} if ask.at else {}
    return {CALL: call}


def _submit(ask: LaunchRequest, folder: Path) -> list[str]:
    call = json.loads((folder / CALL).read_text(encoding="utf-8"))
    pairs = [
        *((key, call[key]) for key in ("flavor", "timeout", "name", "namespace") if key in call),
        *(("label", f"{key}={value}") for key, value in call["labels"].items()),
        *(("env", f"{key}={value}") for key, value in call["env"].items()),
        *(("secrets", name) for name in call["secrets"]),
    ]
    options = [word for key, value in pairs for word in (f"--{key}", value)]
    return ["hf", "jobs", "run", *options, "--detach", "--quiet", call["image"], *call["command"]]


def _parse(text: str) -> list[InstanceStatus]:
    found = []
    for job in json.loads(text or "[]"):
        status = job.get("status") or {}
        stage = str(status.get("stage") if isinstance(status, dict) else status)
        name, is_over = (job.get("labels") or {}).get("name", job.get("name", "")), stage in _OVER
        code = _OVER.get(stage) if is_over else None
        found.append(job_status(name, job["id"], is_over, waits=stage == "SCHEDULING", code=code))
    return found


def commands(at: str) -> Commands:
    space = f"--namespace {shlex.quote(at)}" if at else ""
    return Commands(
        submit=_submit,
        id_of=lambda text: text.split()[-1],
        listing=lambda prefix: f"hf jobs ps --all --label farthing-launch={prefix} --json {space}",
        parse=_parse,
        destroy=lambda m: f"hf jobs cancel {m.id} {space}",
        log=lambda m: f"hf jobs logs {m.id} --tail 200 {space}",
    )


TARGET = Target(
    "hf",
    "Hugging Face Jobs",
    ends="Hugging Face, at the timeout of the job",
    render=render,
    is_rented=True,
    at="[NAMESPACE]",
    commands=commands,
    program="hf",
    install="pip install huggingface-hub, then: hf auth login",
    picks_gpus=True,
    login=("hf auth whoami", "hf auth login"),
    quota="Jobs need a Pro, Team or Enterprise account",
    takes_values=True,
)
