"""The whole way on a cloud that is none: RunPod's HTTP on this machine, whose pods are processes,
and a bucket of moto.

`farthing launch --yes` as a user types it: planned, inputs sent and tokenized here, a spot pod
rented and taken away, the next one rented, the run gone on from the bucket to the same bits,
everything deleted, one bill.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ssh_machines
from farthing.storage.objects import open_store
from launch_chains import left_alone, result_of, saved_step, write_job
from patience import until
from web import serving

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "canary-of-a-secret"}
NO_TOKENIZING = """
import farthing.data.tokens as tokens
def refuse(*args, **more):
    raise RuntimeError("data was tokenized on a rented machine")
assert tokens._make
tokens._make = refuse
import farthing.launch.agent as agent
agent.n_gpus_of_torch = lambda: 1
"""


def take_away(pods, number: str):
    """Kill everything of a pod."""
    if number in pods:
        _, process = pods.pop(number)
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)])  # its session
        process.wait()


@pytest.fixture
def cloud(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ssh_machines.PACE + NO_TOKENIZING)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    pods, bodies = dict[str, Any](), list[str]()

    def made(text):
        pod = json.loads(text)["variables"]["input"]
        number = f"pod{len(bodies)}"
        bodies.append(text)
        home = tmp_path / "pods" / number
        home.mkdir(parents=True)
        env = {each["key"]: each["value"] for each in pod["env"]}
        env |= {name: KEYS[name] for name in env if env[name] == f"{{{{ RUNPOD_SECRET_{name} }}}}"}
        start = json.loads(pod["dockerArgs"])
        process = subprocess.Popen(
            [*start["entrypoint"], *start["cmd"]],
            cwd=home,
            env={**environment, **env, "HOME": str(home)},
            start_new_session=True,
            stdout=open(home / "out.txt", "wb"),  # noqa: SIM115
            stderr=subprocess.STDOUT,
        )
        pods[number] = pod["name"], process
        return {"data": {"made": {"id": number}}}

    def answer(request, body):
        """The requests that our client of RunPod makes. A pod is a process group of its own with
        an empty home.
        """
        if request.command == "DELETE":
            take_away(pods, request.path.rsplit("/", 1)[1])
            return 200, b""
        there = list(pods.items())
        rows = [{"id": n, "name": name, "status": "RUNNING"} for n, (name, _) in there]
        found = made(body.decode()) if request.command == "POST" else {"pods": rows}
        return 200, json.dumps(found)

    with serving(answer) as address:
        yield SimpleNamespace(address=address, pods=pods, bodies=bodies)
        for number in list(pods):
            take_away(pods, number)


@pytest.mark.slow
def test_from_the_plan_to_the_bill_over_two_pods(cloud, tmp_path, monkeypatch):
    moto = pytest.importorskip(
        "moto.server", reason="moto[s3] is not installed: there is no bucket here"
    )
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    aws = {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in (KEYS | aws | {"AWS_EC2_METADATA_DISABLED": "true"}).items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"))
    reference = left_alone(tmp_path / "alone")
    job = write_job(tmp_path / "job", None)
    job.write_text(job.read_text() + "output_store: s3://bucket/run\n")
    words = [sys.executable, "-m", "farthing", "launch", str(job)]
    words += ["--on", "runpod", "--yes", "--json"]
    environment = {
        **os.environ,
        "FARTHING_LAUNCH_API": cloud.address,
        "RUNPOD_API_KEY": "canary-of-a-key",
    }
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        store = open_store("s3://bucket/run")
        until(lambda: saved_step(store) >= 36 or process.poll() is not None, 200.0)
        take_away(cloud.pods, "pod0")
        out, said = process.communicate(timeout=250)
    finally:
        process.kill()
        server.stop()
    assert process.returncode == 0, said
    assert cloud.pods == {}, "everything was given back"
    standing = json.loads(out)
    assert [row["state"] for row in standing["machines"]] == ["gone", "gone"]
    assert result_of(tmp_path / "job/run") == reference
    receipt = json.loads((tmp_path / "job/run/receipt.json").read_text())
    assert len(receipt["machines"]) == 2
    everything = said + out + "".join(cloud.bodies)
    files = [path for path in (tmp_path / "job").rglob("*") if path.is_file()]
    assert "canary-" not in everything
    assert not [path for path in files if b"canary-" in path.read_bytes()]
