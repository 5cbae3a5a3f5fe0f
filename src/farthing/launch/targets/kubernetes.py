"""Kubernetes: a Job that ignores what is not its fault, with its script in a ConfigMap and its
secrets by reference.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from farthing.launch.driver import InstanceStatus, job_status
from farthing.launch.request import GRACE_S, SCRIPT, LaunchRequest, script_of
from farthing.launch.target import Commands, Target
from farthing.storage.files import Json

MANIFEST = "job.k8s.yaml"
SECRET = "farthing"
"""The Secret that the user makes, a key for each variable."""
MOST_CONFIG_BYTES = 1 << 20
JOB = f"""
apiVersion: batch/v1
kind: Job
metadata: {{}}
spec:
  backoffLimit: 3
  ttlSecondsAfterFinished: 86400
  podFailurePolicy:
    rules:
    - action: Ignore
      onExitCodes: {{containerName: train, operator: In, values: [75]}}
    - action: Ignore
      onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
    - action: FailJob
      onExitCodes: {{containerName: train, operator: In, values: [1, 2, 3]}}
  template:
    metadata: {{}}
    spec:
      restartPolicy: Never
      containers:
      - name: train
        command: [sh, /farthing/{SCRIPT}]
        volumeMounts:
        - {{name: script, mountPath: /farthing}}
        - {{name: shm, mountPath: /dev/shm}}
      volumes:
      - name: script
      - {{name: shm, emptyDir: {{medium: Memory}}}}
"""


def render(ask: LaunchRequest) -> Json:
    """`ask.at` is NAMESPACE, or NAMESPACE/CLAIM for a volume that holds the run folder."""
    namespace, _, claim = ask.at.partition("/")
    script, job = script_of(ask), yaml.safe_load(JOB)
    meta = {"name": ask.name, "labels": {"farthing-launch": ask.launch_id}}
    meta |= {"namespace": namespace} if namespace else {}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {SCRIPT: script}}
    job["metadata"], job["spec"]["activeDeadlineSeconds"] = meta, ask.most_s
    job["spec"]["template"]["metadata"] = {"labels": meta["labels"]}
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    pod["terminationGracePeriodSeconds"] = GRACE_S
    pod["volumes"][0]["configMap"] = {"name": ask.name}
    container["image"] = ask.image
    container["env"] = [
        *({"name": name, "value": value} for name, value in sorted(ask.settings.items())),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": name}}}
            for name in ask.secrets
        ),
    ]
    if claim:
        pod["volumes"].append({"name": "run", "persistentVolumeClaim": {"claimName": claim}})
        container["volumeMounts"].append({"name": "run", "mountPath": ask.folder})
    if ask.offer.n_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": ask.offer.n_gpus}}
    return {MANIFEST: yaml.safe_dump_all([config, job], sort_keys=False)}


def check(files: Mapping[str, str]) -> list[str]:
    """A job may be too long for it."""
    is_too_long = len(files[SCRIPT].encode()) > MOST_CONFIG_BYTES
    return [f"{MANIFEST}: a ConfigMap holds 1 MiB at most"] if is_too_long else []


_STUCK = (
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
)
"""Why a pod waits that waits for ever: its image or its Secret is not there."""


def _parse(text: str) -> list[InstanceStatus]:
    found, stuck = [], dict[str, str]()
    items = json.loads(text)["items"]
    for pod in (item for item in items if item.get("kind") == "Pod"):
        for container in pod["status"].get("containerStatuses", []):
            waits = container.get("state", {}).get("waiting") or {}
            if waits.get("reason") in _STUCK:
                why = f"{waits['reason']}: {waits.get('message', '')}"
                stuck[pod["metadata"]["ownerReferences"][0]["name"]] = why[:300]
    for item in (item for item in items if item.get("kind") != "Pod"):
        status = item.get("status", {})
        kinds = {c["type"] for c in status.get("conditions", []) if c.get("status") == "True"}
        name, is_over = item["metadata"]["name"], bool(kinds & {"Complete", "Failed"})
        waits = not status.get("ready") and not is_over
        code = 0 if "Complete" in kinds else None
        seen = job_status(name, name, is_over, waits=waits, code=code)
        found.append(replace(seen, stuck=stuck.get(name, "")))
    return found


def _submit(ask: Any, folder: Path) -> list[str]:
    return ["kubectl", "apply", "--filename", str(folder / MANIFEST), "--output", "name"]


def commands(at: str) -> Commands:
    space = f"--namespace {shlex.quote(at.partition('/')[0])}" if at else ""
    return Commands(
        submit=_submit,
        id_of=lambda text: text.split()[-1].rpartition("/")[2],
        listing=lambda prefix: (
            f"kubectl get jobs,pods -o json --selector=farthing-launch={prefix} {space}"
        ),
        parse=_parse,
        destroy=lambda m: (
            f"kubectl delete job,configmap {m.name} {space} --ignore-not-found --wait=false"
        ),
        log=lambda m: f"kubectl logs job/{m.name} {space} --tail=200",
    )


TARGET = Target(
    "kubernetes",
    "Kubernetes",
    ends="the cluster, at activeDeadlineSeconds",
    render=render,
    check=check,
    at="[NAMESPACE[/CLAIM]]",
    commands=commands,
    program="kubectl",
    install="https://kubernetes.io/docs/tasks/tools/",
    login=(
        "kubectl auth can-i create jobs",
        "choose a context (kubectl config use-context) that may",
    ),
)
