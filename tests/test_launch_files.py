"""What each target is sent for one machine, to the byte: its files, its commands, its requests.

`PYTHONPATH=bench python tests/test_launch_files.py` writes the file anew.
"""

import base64
import json
import os
from dataclasses import replace
from pathlib import Path

import httpx

from farthing.launch.http import Api
from farthing.launch.machines import RentedMachine
from farthing.launch.registry import TARGETS
from farthing.launch.request import LaunchRequest, script_of
from farthing.launch.target import Target
from offers import offer_of

GOLDEN = Path(__file__).parent / "golden/launch_files.json"
TRIED = ("local", "slurm", "kubernetes", "vertex", "skypilot", "runpod", "vast", "lambda", "hf")
PLACES = {
    "vertex": "project/europe-west4/me@project",
    "lambda": "us-east-1/key",
    "kubernetes": "ml/claim",
    "slurm": "long",
    "hf": "team",
}
ANSWERS = {
    "runpod": [
        {"data": {"podRentInterruptable": {"id": "p1", "costPerHr": 0.5}}},
        {"pods": [{"id": "p1", "name": "farthing-12345678-1", "status": "EXITED"}]},
        {"pods": [{"id": "p1", "name": "farthing-12345678-1", "status": "TERMINATED"}]},
        None,
    ],
    "vast": [
        {"offers": [{"id": 5, "dph_total": 0.5}, {"id": 6, "dph_total": 0.6}]},
        {"success": True, "new_contract": 7},
        {},
        {"instances": [{"id": 7, "label": "farthing-12345678-1", "actual_status": "dead"}]},
        {"instances": [], "next_token": "t+"},
        {"instances": [{"id": 7, "label": "farthing-12345678-1", "dph_total": 0.7}]},
        None,
    ],
    "lambda": [
        {"data": {"instance_ids": ["i1"]}},
        {
            "data": [
                {
                    "id": "i1",
                    "name": "farthing-12345678-1",
                    "status": "unhealthy",
                    "instance_type": {"price_cents_per_hour": 129},
                }
            ]
        },
        {"data": [{"id": "i1", "name": "farthing-12345678-1", "status": "preempted"}]},
        None,
    ],
}


def ask_of(target: Target, *, is_spot: bool = True) -> LaunchRequest:
    offer = offer_of(
        "A100-80GB", 2.0, 2, provider="Somewhere", region="eu", instance="2x a100", spot=is_spot
    )
    return LaunchRequest(
        "farthing-12345678-1",
        target.name,
        PLACES.get(target.name, ""),
        offer,
        usd_per_hour=2.0,
        most_s=7200,
        job_text="task: causal-lm\n",
        told={"name": "farthing-12345678-1", "most_s": 7200},
        gpu_id="A100",
        machine_type="a2-ultragpu-2g",
        image="an/image:1",
        install="pip install x",
        needs=("1.2.3", "wandb"),
        fetch="print('fetch')\n",
        folder="/shared/100% run" if target.name in ("slurm", "kubernetes") else "",
        secrets=("HF_TOKEN", "WANDB_API_KEY"),
        settings={"AWS_REGION": "eu", "HF_ENDPOINT": "https://hub"},
    )


def shortened(text: str, ask: LaunchRequest) -> str:
    """With the script, which is the same everywhere, by its name."""
    script = script_of(ask)
    body = script.removeprefix("#!/bin/sh\n")
    for long, name in (
        (base64.b64encode(script.encode()).decode(), "<script in base64>"),
        (json.dumps(script)[1:-1], "<script>"),
        (json.dumps(body)[1:-1], "<script>"),
        (script, "<script>"),
        (body, "<script>"),
        (body.removesuffix('exit "$code"\n'), "<script>"),
    ):
        text = text.replace(long, name)
    return text


def requests_of(target: Target, ask: LaunchRequest):
    """What a client sends from the creation to the deletion, and what it makes of the answers."""
    sent, answers = [], iter(ANSWERS[target.name])

    def answer(request):
        body = shortened(request.content.decode(), ask)
        sent.append([request.method, request.url.raw_path.decode(), body])
        return httpx.Response(200, json=next(answers))

    driver = target.client(Api("https://x", {}, transport=httpx.MockTransport(answer)))
    made = driver.create(ask, 1_800_000_000.0)
    machine = RentedMachine(ask.name, 1, id=made.id, asked_at=1_800_000_000.0, most_s=7200.0)
    driver.secure(machine)
    seen = [str(driver.look(machine)), str(driver.names("farthing-12345678"))]
    driver.destroy(machine)
    return [*sent, str(made), *seen]


def files_of(target: Target):
    ask = ask_of(target)
    found = {name: shortened(text, ask) for name, text in target.files(ask).items()}
    if target.commands is not None:
        commands, machine = target.commands(ask.at), RentedMachine(ask.name, id="id-7")
        found["commands"] = [
            commands.submit(ask, Path("/files")) if target.name != "hf" else "",
            commands.listing("farthing-12345678"),
            commands.destroy(machine),
            commands.log(machine),
        ]
    if target.client is not None:
        found["requests"] = requests_of(target, ask)
        found["requests, on demand"] = requests_of(target, replace(ask_of(target, is_spot=False)))
    return found


def all_of():
    os.environ |= {"HF_TOKEN": "a token", "WANDB_API_KEY": "a key"}
    return {
        "script": script_of(ask_of(TARGETS["vast"])),
        "shared": script_of(ask_of(TARGETS["slurm"])),
        **{name: files_of(TARGETS[name]) for name in TRIED},
    }


def test_each_target_is_sent_what_it_was_sent(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "")
    found, golden = json.loads(json.dumps(all_of())), json.loads(GOLDEN.read_text())
    for name, wanted in golden.items():
        assert found[name] == wanted, name


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(all_of(), indent=1) + "\n")
