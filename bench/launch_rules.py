"""What a target would refuse or misunderstand in files that `farthing launch` has rendered, where
its schema is blind.

Fields that it does not know, values that exclude each other, ends that are missing: these rules
hold the rendering. What the words of a user can bring about is refused by `farthing.launch` itself,
see `Target.check`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from farthing.launch.request import SCRIPT
from farthing.launch.targets import (
    hf_jobs,
    kubernetes,
    lambda_cloud,
    runpod,
    skypilot,
    slurm,
    vast,
    vertex,
)

RUNPOD_FIELDS = {
    "name",
    "imageName",
    "dockerArgs",
    "gpuTypeId",
    "gpuCount",
    "cloudType",
    "containerDiskInGb",
    "volumeInGb",
    "env",
    "terminateAfter",
    "bidPerGpu",
    "dataCenterId",
}
"""Of its input types, those that are used."""
VAST_FIELDS = {
    *(
        "client_id",
        "image",
        "env",
        "price",
        "disk",
        "label",
        "onstart",
        "runtype",
        "args",
        "cancel_unavail",
        "force",
    ),
}
HF_FIELDS = {
    "image",
    "command",
    "env",
    "secrets",
    "flavor",
    "timeout",
    "labels",
    "name",
    "namespace",
}
FAMILIES = {
    "g2": "L4",
    "a2": "A100",
    "a3": "H100|H200",
    "n1": "T4|V100|P100|K80",
    "g4": "RTX_PRO",
    "a4": "B200",
}
"""Which accelerators a family of machine types has: the prefix of the type, and words of the
accelerator's name.
"""


def _missing(value: Any, where: str, *paths: str) -> list[str]:
    """Which of the dotted paths lead to nothing in a document: what a schema without required
    fields lets pass.
    """
    found = []
    for path in paths:
        at = value
        for part in path.split("."):
            if isinstance(at, list):
                at = at[int(part)] if part.isdigit() and int(part) < len(at) else None
            else:
                at = at.get(part) if isinstance(at, dict) else None
        if at in (None, "", [], {}):
            found.append(f"{where}: `{path}` is missing")
    return found


def _not_a_name(name: str, most: int = 63) -> list[str]:
    """A complaint about a name that is none for DNS: what most targets ask of the names of jobs."""
    is_name = re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= most
    return (
        []
        if is_name
        else [f"`{name}` is no name: small letters, digits and dashes, at most {most}"]
    )


def _hosts(files: Mapping[str, str]) -> list[str]:
    """What our own rules find wrong."""
    script = files.get(SCRIPT, "")
    found = [] if script.startswith("#!/bin/sh\n") else [f"{SCRIPT}: no shell script"]
    return found + (
        [] if "\ntimeout --signal=TERM" in script else [f"{SCRIPT}: nothing ends it in time"]
    )


def _slurm(files: Mapping[str, str]) -> list[str]:
    """What our own rules find wrong; `sbatch --test-only` knows more, where there is a controller."""  # noqa: E501
    text = files.get(slurm.BATCH, "")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE))
    found = [
        f"{slurm.BATCH}: --{name} is missing"
        for name in ("job-name", "output", "requeue", "signal", "open-mode")
        if name not in options
    ]
    if not options.get("output", "").startswith("/"):
        found.append(
            f"{slurm.BATCH}: --output has to be an absolute path on the shared file system"
        )
    lines = text.splitlines()
    first = next(
        (at for at, line in enumerate(lines) if line and not line.startswith("#")), len(lines)
    )
    if any(line.startswith("#SBATCH") for line in lines[first:]):
        found.append(f"{slurm.BATCH}: an #SBATCH line behind the first command is ignored")
    if "scontrol requeue" not in text:
        found.append(f"{slurm.BATCH}: nothing queues it again after 75")
    return found + _not_a_name(options.get("job-name", ""))


def _kubernetes(files: Mapping[str, str]) -> list[str]:
    """Enums and rules across fields, which the schema does not hold, and what it does not require."""  # noqa: E501
    documents = list(yaml.safe_load_all(files.get(kubernetes.MANIFEST, "")))
    if [document.get("kind") for document in documents] != ["ConfigMap", "Job"]:
        return [f"{kubernetes.MANIFEST}: a ConfigMap and a Job are wanted"]
    config, job = documents
    pod = job["spec"]["template"]["spec"]
    found = _missing(
        job,
        kubernetes.MANIFEST,
        "metadata.name",
        "spec.activeDeadlineSeconds",
        "spec.template.spec.containers.0.image",
    )
    found += _not_a_name(job["metadata"]["name"])
    rules = job["spec"].get("podFailurePolicy", {}).get("rules", [])
    if rules and pod.get("restartPolicy") != "Never":
        found.append(f"{kubernetes.MANIFEST}: a podFailurePolicy needs restartPolicy: Never")
    for rule in rules:
        if rule.get("action") not in ("Ignore", "FailJob", "FailIndex", "Count"):
            found.append(f"{kubernetes.MANIFEST}: no such action: {rule.get('action')}")
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            found.append(f"{kubernetes.MANIFEST}: a rule has either onExitCodes or onPodConditions")
    names = {volume["name"] for volume in pod["volumes"]}
    found += [
        f"{kubernetes.MANIFEST}: no volume {m['name']}"
        for m in pod["containers"][0]["volumeMounts"]
        if m["name"] not in names
    ]
    return found + kubernetes.check({SCRIPT: config["data"][SCRIPT]})


def _vertex(files: Mapping[str, str]) -> list[str]:
    """What its schema lets pass: missing fields, and machine types that do not have the
    accelerator.
    """
    document = json.loads(files.get(vertex.DOCUMENT, "{}"))
    spec = "jobSpec.workerPoolSpecs.0"
    found = _missing(
        document,
        vertex.DOCUMENT,
        "displayName",
        f"{spec}.machineSpec.machineType",
        f"{spec}.replicaCount",
        f"{spec}.containerSpec.imageUri",
        "jobSpec.scheduling.timeout",
    )
    if found:
        return found
    if not re.fullmatch(r"[1-9]\d*s", document["jobSpec"]["scheduling"]["timeout"]):
        found.append(f"{vertex.DOCUMENT}: timeout is seconds, as in 3600s")
    machine = document["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]
    family, accelerator = (
        machine["machineType"].partition("-")[0],
        machine.get("acceleratorType", ""),
    )
    if accelerator and not re.search(FAMILIES.get(family, "no such"), accelerator):
        found.append(f"{vertex.DOCUMENT}: machines {machine['machineType']} have no {accelerator}")
    return found


def _skypilot(files: Mapping[str, str]) -> list[str]:
    """What its schema lets pass."""
    task = yaml.safe_load(files.get(skypilot.TASK, "")) or {}
    found = _missing(
        task,
        skypilot.TASK,
        "name",
        "run",
        "resources.accelerators",
        "resources.infra",
    )
    recovery = (task.get("resources") or {}).get("job_recovery") or {}
    if recovery.get("recover_on_exit_codes") != [75] or recovery.get("max_restarts_on_errors") != 0:
        found.append(f"{skypilot.TASK}: 75, and nothing else, has to begin the job again")
    for several in ("any_of", "ordered"):
        if several in (task.get("resources") or {}):
            found.append(f"{skypilot.TASK}: `{several}` may rent another price than the cap's")
    if any((task.get("secrets") or {}).values()):
        found.append(f"{skypilot.TASK}: the value of a secret stands in it")
    if "\ntimeout --signal=TERM" not in task.get("run", ""):
        found.append(f"{skypilot.TASK}: nothing ends it in time")
    config = yaml.safe_load(files.get(skypilot.CONFIG, "")) or {}
    found += [
        f"{skypilot.CONFIG}: {cloud} would get the credentials of this machine"
        for cloud in skypilot.STRANGERS
        if config.get(cloud, {}).get("remote_identity") != "NO_UPLOAD"
    ]
    return found + _not_a_name(task.get("name", ""))


def _runpod(files: Mapping[str, str]) -> list[str]:
    """Fields that it does not know, and those that it needs."""
    request = json.loads(files.get(runpod.REQUEST, "{}"))
    pod = request.get("variables", {}).get("input", {})
    found = _missing(
        pod,
        runpod.REQUEST,
        "name",
        "imageName",
        "gpuTypeId",
        "gpuCount",
        "terminateAfter",
        "containerDiskInGb",
    )
    found += [
        f"{runpod.REQUEST}: no such field: {name}" for name in sorted(set(pod) - RUNPOD_FIELDS)
    ]
    if pod.get("cloudType") not in ("SECURE", "COMMUNITY", "ALL"):
        found.append(f"{runpod.REQUEST}: no such cloudType: {pod.get('cloudType')}")
    if ("Interruptable" in request.get("query", "")) != ("bidPerGpu" in pod):
        found.append(f"{runpod.REQUEST}: spot, and nothing else, has a bidPerGpu")
    if "entrypoint" not in str(pod.get("dockerArgs")):
        found.append(
            f"{runpod.REQUEST}: the ENTRYPOINT of an image would get the command as its arguments"
        )
    if pod.get("volumeInGb"):
        found.append(f"{runpod.REQUEST}: a volume is paid for after the pod is gone")
    return found


def _vast(files: Mapping[str, str]) -> list[str]:
    """Fields that it does not know, and those that it needs."""
    search, create, end = (
        json.loads(files.get(name, "{}")) for name in (vast.SEARCH, vast.CREATE, vast.END)
    )
    found = _missing(create, vast.CREATE, "image", "label", "disk", "args.2", "onstart")
    found += _missing(search, vast.SEARCH, "gpu_name.eq", "num_gpus.eq", "dph_total.lte")
    found += _missing(end, vast.END, "start_time", "api_endpoint", "request_method", "instance_id")
    found += [f"{vast.CREATE}: no such field: {name}" for name in sorted(set(create) - VAST_FIELDS)]
    if (search.get("type") == "bid") != ("price" in create):
        found.append(f"{vast.CREATE}: a bid, and nothing else, has a price")
    if create.get("cancel_unavail") is not True:
        found.append(
            f"{vast.CREATE}: without cancel_unavail an instance that can't start is paid for"
        )
    if not re.search(
        r'^\(sleep "\$left"; end_it\) &$', "".join(create.get("args", [])), re.MULTILINE
    ):
        found.append(f"{vast.CREATE}: nothing in the instance ends it")
    return found


def _lambda(files: Mapping[str, str]) -> list[str]:
    """What it needs, and its limits."""
    request = json.loads(files.get(lambda_cloud.REQUEST, "{}"))
    found = _missing(
        request,
        lambda_cloud.REQUEST,
        "region_name",
        "instance_type_name",
        "ssh_key_names.0",
        "name",
    )
    if len(request.get("ssh_key_names", [])) != 1:
        found.append(f"{lambda_cloud.REQUEST}: exactly one ssh key")
    return found + (lambda_cloud.check(files) if not found else [])


def _hf(files: Mapping[str, str]) -> list[str]:
    """What it needs."""
    call = json.loads(files.get(hf_jobs.CALL, "{}"))
    found = _missing(call, hf_jobs.CALL, "image", "command.2", "flavor", "timeout", "name")
    found += [f"{hf_jobs.CALL}: no such field: {name}" for name in sorted(set(call) - HF_FIELDS)]
    return found + (
        [] if isinstance(call.get("secrets"), list) else [f"{hf_jobs.CALL}: secrets are names"]
    )


AT = {
    "ssh": "ssh:gpu1.example",
    "vertex": "vertex:project/us-central1",
    "lambda": "lambda:us-east-1/key",
    "slurm": "slurm:gpu",
    "kubernetes": "kubernetes:ml",
    "hf": "hf:team",
}
"""Where, for targets that are told."""
RULES: dict[str, Callable[[Mapping[str, str]], list[str]]] = {
    "local": _hosts,
    "ssh": _hosts,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "vertex": _vertex,
    "skypilot": _skypilot,
    "runpod": _runpod,
    "vast": _vast,
    "lambda": _lambda,
    "hf": _hf,
}
"""By target: what is wrong with its files."""
