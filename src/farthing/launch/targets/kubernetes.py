"""Kubernetes: a Job that ignores what is not its fault, with its script in a ConfigMap and its secrets by reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from farthing.durability.files import Json
from farthing.launch.ask import GRACE_S, SCRIPT, Ask, script_of
from farthing.launch.commands import Commands
from farthing.launch.driver import Seen, job_seen
from farthing.launch.target import Files, Target, missing, not_a_name

MANIFEST = "job.k8s.yaml"
SECRET = "farthing"
"""The Secret that the user makes, a key for each variable."""
MOST_CONFIG_BYTES = 1 << 20


def render(ask: Ask) -> Files:
    """A ConfigMap and a Job. `ask.at` is NAMESPACE, or NAMESPACE/CLAIM for a volume that holds the run folder."""
    namespace, _, claim = ask.at.partition("/")
    meta = {"name": ask.name, "labels": {"farthing-launch": ask.launch_id}}
    meta |= {"namespace": namespace} if namespace else {}
    env: list[Json] = [{"name": name, "value": value} for name, value in sorted(ask.settings.items())]
    env += [{"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": name}}} for name in ask.secrets]
    volumes: list[Json] = [
        {"name": "script", "configMap": {"name": ask.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "script", "mountPath": "/farthing"}, {"name": "shm", "mountPath": "/dev/shm"}]
    if claim:
        volumes.append({"name": "run", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "run", "mountPath": ask.folder})
    container = {
        "name": "train", "image": ask.image, "command": ["sh", f"/farthing/{SCRIPT}"], "env": env, "volumeMounts": mounts,
    } | ({"resources": {"limits": {"nvidia.com/gpu": ask.offer.n_gpus}}} if ask.offer.n_gpus else {})  # fmt: skip
    rules = [
        {"action": "Ignore", "onExitCodes": {"containerName": "train", "operator": "In", "values": [75]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [1, 2, 3]}},
    ]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "backoffLimit": 3,
            "activeDeadlineSeconds": ask.most_s,
            "ttlSecondsAfterFinished": 86400,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": meta["labels"]},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": GRACE_S,
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {SCRIPT: script_of(ask)}}
    return {MANIFEST: yaml.safe_dump_all([config, job], sort_keys=False), SCRIPT: script_of(ask)}


def check(files: Mapping[str, str]) -> list[str]:
    """Enums and rules across fields, which the schema does not hold, and what it does not require."""
    documents = list(yaml.safe_load_all(files.get(MANIFEST, "")))
    if [document.get("kind") for document in documents] != ["ConfigMap", "Job"]:
        return [f"{MANIFEST}: a ConfigMap and a Job are wanted"]
    config, job = documents
    pod = job["spec"]["template"]["spec"]
    found = missing(
        job, MANIFEST, "metadata.name", "spec.activeDeadlineSeconds", "spec.template.spec.containers.0.image"
    )
    found += not_a_name(job["metadata"]["name"])
    rules = job["spec"].get("podFailurePolicy", {}).get("rules", [])
    if rules and pod.get("restartPolicy") != "Never":
        found.append(f"{MANIFEST}: a podFailurePolicy needs restartPolicy: Never")
    for rule in rules:
        if rule.get("action") not in ("Ignore", "FailJob", "FailIndex", "Count"):
            found.append(f"{MANIFEST}: no such action: {rule.get('action')}")
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            found.append(f"{MANIFEST}: a rule has either onExitCodes or onPodConditions")
    names = {volume["name"] for volume in pod["volumes"]}
    found += [
        f"{MANIFEST}: no volume {m['name']}" for m in pod["containers"][0]["volumeMounts"] if m["name"] not in names
    ]
    if sum(len(text.encode()) for text in config["data"].values()) > MOST_CONFIG_BYTES:
        found.append(f"{MANIFEST}: a ConfigMap holds 1 MiB at most")
    return found


def _parse(text: str) -> list[Seen]:
    found = []
    for item in json.loads(text)["items"]:
        status = item.get("status", {})
        kinds = {c["type"] for c in status.get("conditions", []) if c.get("status") == "True"}
        name, is_over = item["metadata"]["name"], bool(kinds & {"Complete", "Failed"})
        waits = not status.get("ready") and not is_over
        found.append(job_seen(name, name, is_over, waits=waits, code=0 if "Complete" in kinds else None))
    return found


def _submit(ask: Any, folder: Path) -> list[str]:
    return ["kubectl", "apply", "--filename", str(folder / MANIFEST), "--output", "name"]


def commands(at: str) -> Commands:
    """How `kubectl` is used in a namespace."""
    space = ["--namespace", at.partition("/")[0]] if at else []
    return Commands(
        submit=_submit,
        id_of=lambda text: text.split()[-1].rpartition("/")[2],
        listing=lambda prefix: [
            *["kubectl", "get", "jobs", "-o", "json", "--selector"],
            f"farthing-launch={prefix}",
            *space,
        ],
        parse=_parse,
        destroy=lambda m: ["kubectl", "delete", "job,configmap", m.name, *space, "--ignore-not-found", "--wait=false"],
        log=lambda m: ["kubectl", "logs", f"job/{m.name}", *space, "--tail=200"],
    )


TARGET = Target(
    "kubernetes", "Kubernetes", render, check,
    ends="the cluster, at activeDeadlineSeconds",
    may_share_folders=True,
    at="[NAMESPACE[/CLAIM]]",
    program="kubectl",
    install="https://kubernetes.io/docs/tasks/tools/",
)  # fmt: skip
