"""Server files for an exported model: command and compose file for vLLM, or requests for Vertex AI.

The machine and the dollars of a month come from `planner.serving`. Writes files and calls nobody.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

from farthing.clock import today
from farthing.config.job import Job
from farthing.errors import InputError
from farthing.export.folders import tuned_config
from farthing.launch.registry import TARGETS, called
from farthing.models.shapes import Shape, read_shape
from farthing.objectives.registry import objective_of
from farthing.planner.serving import (
    MEMORY_SHARE,
    Served,
    Traffic,
    on_share,
    parse_traffic,
    serve,
)
from farthing.prices.catalog import read_catalog
from farthing.prices.gpus import gpus
from farthing.prices.offers import HOURS_PER_MONTH, Offer
from farthing.report.plan_words import say_cost
from farthing.report.training_log import TrainingLog, read_log
from farthing.run.folder import LOG, MODEL, kept_job
from farthing.storage.files import Json, write_text
from farthing.tables import facts

FORMATS = {"bf16": "merged", "fp8": "fp8", "int8": "w8a16", "int4": "w4a16"}
"""Precisions that servers compute in -> the formats that they are loaded from."""
FOLDER = "serve"
"""Beside the model, in its folder."""
IDLE_S = 300
"""Vertex AI keeps a machine at least so long after the last request (`ScaleToZeroSpec`)."""
STARTING_S = 300
"""From zero to the first answer on Vertex AI: by assumption."""
PORT = 8080


@dataclass(frozen=True)
class Endpoint:
    """`vllm`, or `vertex:PROJECT/REGION/BUCKET`."""

    server: str
    project: str = ""
    region: str = ""
    bucket: str = ""

    def offers(self) -> list[Offer]:
        offers, vertex = read_catalog(None, today()).offers, TARGETS["vertex"]
        if self.server == "vllm":
            return list(offers)
        known = (one for one in offers if one.provider in vertex.providers)
        return [one for one in known if called(vertex, one) is not None]


@dataclass(frozen=True)
class Deployment:
    place: Endpoint
    name: str
    task: str
    offer: Offer
    export_format: str
    served: Served | None
    """None where serving was never calculated for such a model: only its memory is known."""
    max_model_len: int = 0


def parse_place(text: str) -> Endpoint:
    """Raises `InputError`."""
    server, _, rest = text.partition(":")
    parts = [part for part in rest.removeprefix("gs://").split("/") if part]
    if server == "vllm" and not parts:
        return Endpoint(server)
    if server == "vertex" and len(parts) >= 3:
        return Endpoint(server, parts[0], parts[1], "/".join(parts[2:]))
    raise InputError(
        f"{text!r} names no server",
        where="--serve",
        to_do="use vllm, or vertex:PROJECT/REGION/BUCKET",
    )


def plan_deployment(
    run: Path, serve_at: str, export_format: str | None, traffic: str | None
) -> Deployment:
    """The cheapest machine for the model of a run, and the format to export it in.

    Raises `InputError` for a format that the server does not load, and where no machine will do.
    """
    place, where = parse_place(serve_at), f"--serve {serve_at}"
    if export_format not in (None, *FORMATS.values()):
        raise InputError(
            f"servers do not load the format {export_format}",
            where="--format",
            to_do=f"use one of {', '.join(FORMATS.values())}, or leave it out",
        )
    job, name = Job.model_validate(kept_job(run)), run.resolve().name.lower().replace("_", "-")
    task = job.task
    shape = read_shape(tuned_config(run / MODEL), task, n_labels=2)
    if shape.attention != "causal" or not shape.scores_tokens:
        if place.server == "vllm":
            raise InputError(
                f"farthing does not know how to serve {task} there",
                where=where,
                to_do="export it with --format merged and load it with transformers",
            )
        return Deployment(place, name, task, _smallest(shape, place.offers()), "merged", None)
    usual = _traffic_of(job, read_log(run / LOG))
    asked = usual if traffic is None else parse_traffic(traffic)
    found, _ = serve(shape, asked, place.offers())
    wanted = [one for one in found if export_format in (None, FORMATS[one.server.precision])]
    if not wanted:
        raise InputError(
            "no machine of the price table can serve the model so",
            where=where,
            to_do="leave --format out, or ask for a smaller traffic with --traffic",
        )
    best, server = wanted[0], wanted[0].server
    room = int(server.room_bytes / server.cache_bytes_per_token)
    longest = min(room, shape.max_positions or room)
    if asked.input_tokens + asked.output_tokens > longest:
        what = f"the model or the machine holds requests of {longest:,} tokens at most"
        raise InputError(what, where="--traffic", to_do="ask for shorter ones")
    form = FORMATS[server.precision]
    return Deployment(place, name, task, best.offer, form, best, longest)


def _traffic_of(job: Job, log: TrainingLog) -> Traffic:
    """Requests as long as the run's examples: what was learned is written, the rest is read."""
    n_examples = log.step * job.global_batch_size
    if not n_examples or not log.n_targets:
        return Traffic()
    n_out = max(1.0, log.n_targets / n_examples)
    n_in = max(1.0, log.n_tokens / n_examples - n_out)
    return Traffic(input_tokens=n_in, output_tokens=n_out)


def _smallest(shape: Shape, offers: list[Offer]) -> Offer:
    """The cheapest machine on demand whose one GPU holds the weights in fp32, twice."""
    needed = 2 * 4.0 * shape.n_parameters
    fitting = [
        one
        for one in offers
        if one.n_gpus == 1
        and not one.is_spot
        and one.usd_per_hour is not None
        and gpus()[one.gpu].memory_bytes >= needed
    ]
    if not fitting:
        raise InputError(
            f"no single GPU there has {needed / 1e9:.0f} GB",
            where="--serve",
            to_do="export it with --format merged, and serve it elsewhere",
        )
    return min(fitting, key=lambda one: one.usd_per_hour or 0.0)


def write_deployment(plan: Deployment, folder: Path) -> list[str]:
    """Write the files into `folder/serve`; returns lines about the machine and its dollars."""
    files = _vllm_files(plan) if plan.place.server == "vllm" else _vertex_files(plan)
    (folder / FOLDER).mkdir()
    for name, text in files.items():
        write_text(folder / FOLDER / name, text)
    return [*_bill(plan), f"wrote {', '.join(f'{FOLDER}/{name}' for name in files)}; never run"]


def _image(server: str) -> str:
    return next(row["image"] for row in facts("serving_images") if row["server"] == server)


def _engine_options(plan: Deployment, served: Served) -> list[str]:
    """Options of vLLM with the memory, the precision and the streams of the plan."""
    options = [
        f"--served-model-name={plan.name}",
        f"--max-model-len={plan.max_model_len}",
        f"--max-num-seqs={served.n_streams}",
        f"--gpu-memory-utilization={MEMORY_SHARE:g}",
        f"--tensor-parallel-size={served.server.n_gpus}",
        "--dtype=bfloat16",
    ]
    return [*options, "--kv-cache-dtype=fp8"] if served.server.precision == "fp8" else options


def _vllm_files(plan: Deployment) -> dict[str, str]:
    assert plan.served is not None
    options = _engine_options(plan, plan.served)
    command = " \\\n  ".join(['exec vllm serve "$(dirname "$0")/.."', *map(shlex.quote, options)])
    devices = {"driver": "nvidia", "count": plan.offer.n_gpus, "capabilities": ["gpu"]}
    service = {
        "image": _image("vllm"),
        "command": ["--model=/model", *options],
        "ports": ["8000:8000"],
        "volumes": ["..:/model:ro"],
        "ipc": "host",
        "deploy": {"resources": {"reservations": {"devices": [devices]}}},
    }
    compose = yaml.safe_dump({"services": {"vllm": service}}, sort_keys=False)
    return {"serve.sh": f"#!/bin/sh\n{command}\n", "compose.yaml": compose}


def _vertex_files(plan: Deployment) -> dict[str, str]:
    """Requests of the API, and a script that sends them with the user's own `gcloud` login."""
    place, served, names = plan.place, plan.served, called(TARGETS["vertex"], plan.offer)
    assert names is not None
    parent = f"projects/{place.project}/locations/{place.region}"
    artifacts = f"gs://{place.bucket}/{plan.name}"
    container: Json = {
        "imageUri": _image("vertex-transformers"),
        "env": [{"name": "HF_TASK", "value": objective_of(plan.task).pipeline_tag}],
        "predictRoute": "/pred",
        "healthRoute": "/h",
    }
    if served is not None:
        own = ["--host=0.0.0.0", f"--port={PORT}", f"--model={artifacts}"]
        container = {
            "imageUri": _image("vertex-vllm"),
            "command": ["python", "-m", "vllm.entrypoints.api_server"],
            "args": [*own, *_engine_options(plan, served)],
            "predictRoute": "/generate",
            "healthRoute": "/ping",
        }
    container |= {"ports": [{"containerPort": PORT}], "sharedMemorySizeMb": "4096"}
    model = {"displayName": plan.name, "artifactUri": artifacts, "containerSpec": container}
    machine = {
        "machineType": names.machine_type,
        "acceleratorType": names.gpu_id,
        "acceleratorCount": plan.offer.n_gpus,
    }
    n_machines = served.n_machines if served else 1

    def deployed(**replicas: object) -> Json:
        one = {
            "displayName": plan.name,
            "model": f"{parent}/models/{plan.name}",
            "dedicatedResources": {
                "machineSpec": machine,
                **replicas,
                "maxReplicaCount": n_machines,
            },
        }
        return {"deployedModel": one, "trafficSplit": {"0": 100}}

    zero = {"minScaleupPeriod": f"{IDLE_S}s", "idleScaledownPeriod": f"{IDLE_S}s"}
    requests: dict[str, Json] = {
        "model.json": {"modelId": plan.name, "model": model},
        "endpoint.json": {"displayName": plan.name},
        "deploy.json": deployed(minReplicaCount=n_machines),
        "deploy_to_zero.json": deployed(
            minReplicaCount=0, initialReplicaCount=1, scaleToZeroSpec=zero
        ),
    }
    texts = {name: json.dumps(value, indent=1) + "\n" for name, value in requests.items()}
    return texts | {"deploy.sh": _script(plan, parent, artifacts)}


def _script(plan: Deployment, parent: str, artifacts: str) -> str:
    """Copies the model, then sends the requests; each waits for the operation before it."""
    host = f"https://{plan.place.region}-aiplatform.googleapis.com"
    model, endpoint = f"{parent}/models/{plan.name}", f"{parent}/endpoints/{plan.name}"
    return f"""#!/bin/sh
# sh deploy.sh: always on.  sh deploy.sh to-zero: no machine without requests (Google's preview).
set -eu
cd "$(dirname "$0")"
send() {{ # METHOD PATH FILE
  curl --fail-with-body -sS -X "$1" "{host}/$2" -H "Content-Type: application/json" -d "@$3" \\
    -H "Authorization: Bearer $(gcloud auth print-access-token)"
}}
wait_for() {{ # PATH
  until curl -fsS -o /dev/null "{host}/v1/$1" \\
    -H "Authorization: Bearer $(gcloud auth print-access-token)"; do sleep 10; done
}}
gcloud storage rsync --recursive --exclude='^serve/' .. {shlex.quote(artifacts)}
send POST "v1/{parent}/models:upload" model.json
wait_for "{model}"
send POST "v1/{parent}/endpoints?endpointId={plan.name}" endpoint.json
wait_for "{endpoint}"
if [ "${{1:-}}" = to-zero ]; then
  send POST "v1beta1/{endpoint}:deployModel" deploy_to_zero.json
else
  send POST "v1/{endpoint}:deployModel" deploy.json
fi
echo "It bills until you undeploy it:"
echo "  gcloud ai endpoints describe {plan.name} --project={plan.place.project} \\
--region={plan.place.region}   # its deployedModels[].id"
echo "  gcloud ai endpoints undeploy-model {plan.name} --project={plan.place.project} \\
--region={plan.place.region} --deployed-model-id=ID"
"""


def _bill(plan: Deployment) -> list[str]:
    """Dollars a month, and what goes to zero."""
    offer, served, is_vertex = plan.offer, plan.served, plan.place.server == "vertex"
    usd, several = offer.usd_per_hour or 0.0, f"{offer.n_gpus}x " if offer.n_gpus > 1 else ""
    price = f"{say_cost(usd)} an hour, price of {offer.date}"
    lines = [f"machine: {several}{offer.gpu} at {offer.provider} ({price})"]
    if served is None:
        month = say_cost(usd * HOURS_PER_MONTH)
        lines.append(f"always on: {month} a month; its requests a second are not known")
    else:
        traffic, precision = served.traffic, served.server.precision
        per_s = traffic.requests_per_s / served.n_machines
        on = on_share(per_s, served.alone_s, IDLE_S, STARTING_S)
        lines += [
            f"{traffic.requests_per_day:,.0f} requests a day of {traffic.input_tokens:,.0f} tokens"
            f" in and {traffic.output_tokens:,.0f} out, in {precision}: always on"
            f" {say_cost(served.always_on_usd)} a month",
            f"to zero after {IDLE_S // 60} minutes without requests:"
            f" {say_cost(served.always_on_usd * on)} a month; a request that finds no machine is"
            " lost, so clients must retry"
            if is_vertex
            else "vLLM stays on: nothing scales to zero by itself. A serverless provider would cost"
            f" about {say_cost(served.to_zero_usd())} a month",
        ]
    if is_vertex:
        lines.append("Vertex AI adds its own fee to the price of Compute Engine")
    return lines
