"""What machines of Vast.ai and Vertex AI run before and after farthing, with a real shell and
providers that are none.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from farthing.launch.targets import runpod, vast, vertex
from launched import ask_of
from patience import titles_of_processes, until
from web import serving

REDIRECT = """
import os, urllib.request as web
send = web.urlopen
def to_the_test(request, *args, **more):
    request.full_url = request.full_url.replace("https://console.vast.ai", os.environ["CONSOLE"])
    return send(request, *args, **more)
web.urlopen = to_the_test
"""
KEY = "canary-of-the-instance"


def container(folder: Path, farthing: str, site: str):
    """The environment of a container, with something else in the place of farthing, and of the
    network.
    """
    for name, text in (("bin/farthing", farthing), ("site/sitecustomize.py", site)):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    (folder / "bin/farthing").chmod(0o755)
    path = {"PATH": f"{folder}/bin:/usr/bin:/bin", "PYTHONPATH": f"{folder}/site"}
    return path | {"HOME": str(folder)}


@pytest.fixture
def console(tmp_path, monkeypatch):
    monkeypatch.setattr(vast, "AGAIN_S", 0.5)
    console = SimpleNamespace(asked=[], begun=[], done=tmp_path / "done")

    def answer(request, _):
        """Of a deletion its path, its key, and whether farthing has ended; the second is taken."""
        said = request.path, request.headers["Authorization"], console.done.exists()
        console.asked.append(said)
        return 500 if len(console.asked) == 1 else 200, b""

    with serving(answer) as console.address:
        yield console
        for process in console.begun:  # what is left of a container ends with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def begun(tmp_path: Path, console, farthing: str, most_s: int, created_at: float):
    """The container's command, with something else in the place of farthing."""
    program = f'#!/bin/sh\n[ "$2" = needs ] && exit 0\n{farthing}\n'
    words = vast.render(ask_of("vast", most_s=most_s))["create.json"]["args"]
    values = container(tmp_path, program, REDIRECT) | {
        "CONSOLE": console.address,
        "CONTAINER_ID": "77",
        "CONTAINER_API_KEY": KEY,
        "DONE": str(console.done),
        "FARTHING_CREATED_AT": f"{created_at:.0f}",
    }
    process = subprocess.Popen(words, env=values, start_new_session=True)
    console.begun.append(process)
    return process


@pytest.mark.parametrize("created_at", [0.0, 4e9])
def test_an_instance_deletes_itself_when_its_run_has_ended_and_asks_again(
    tmp_path, console, created_at
):
    process = begun(tmp_path, console, 'sleep 0.2; touch "$DONE"', 3600, created_at)
    assert process.wait(120) == 0
    assert console.asked == [("/api/v0/instances/77/", f"Bearer {KEY}", True)] * 2, (
        "not before its run had ended"
    )


def test_an_instance_deletes_itself_at_its_end_though_its_run_hangs(tmp_path, console):
    process = begun(tmp_path, console, "trap '' TERM; while :; do sleep 0.1; done", 2, time.time())
    until(lambda: len(console.asked) == 2)
    assert process.poll() is None
    assert not any(KEY.encode() in title for title in titles_of_processes())


def test_an_instance_that_is_taken_away_saves_first(tmp_path, console):
    farthing = (
        """trap 'touch "$DONE"; exit 75' TERM; touch "$DONE.up"; while :; do sleep 0.05; done"""
    )
    process = begun(tmp_path, console, farthing, 3600, time.time())
    until((tmp_path / "done.up").exists)
    process.terminate()
    assert process.wait(120) == 75
    assert [is_done for _, _, is_done in console.asked] == [True, True]


def test_an_image_with_an_entrypoint_runs_our_command_and_not_its_own():
    create = vast.render(ask_of("vast"))["create.json"]
    done = subprocess.run(
        [create["onstart"], "sh", "-c", "echo it ran"], capture_output=True, text=True, check=True
    )
    assert (create["args"][:2], done.stdout) == (["sh", "-c"], "it ran\n")
    request = runpod.render(ask_of("runpod"))["pod.json"]
    start = json.loads(request["variables"]["input"]["dockerArgs"])
    assert (start["entrypoint"], len(start["cmd"])) == (["sh", "-c"], 1)


GOOGLE = """
import base64, io, json, urllib.request as web
def answer(request, timeout):
    headers = {name.lower(): value for name, value in request.header_items()}
    if request.full_url.startswith("http://metadata.google.internal/"):
        assert headers["metadata-flavor"] == "Google"
        return io.BytesIO(json.dumps({"access_token": "t"}).encode())
    assert headers["authorization"] == "Bearer t"
    place = "https://secretmanager.googleapis.com/v1/projects/project/secrets/HF_TOKEN/versions/latest:access"
    if request.full_url != place:
        raise OSError(404)
    return io.BytesIO(json.dumps({"payload": {"data": base64.b64encode(b"canary").decode()}}).encode())
web.urlopen = answer
"""  # noqa: E501


@pytest.mark.parametrize(
    ("secrets", "code"), [(("HF_TOKEN",), 0), (("AWS_SECRET_ACCESS_KEY", "HF_TOKEN"), 2)]
)
def test_secrets_of_vertex_are_read_by_name_when_the_machine_starts(tmp_path, secrets, code):
    how = {"at": "project/us-central1", "machine_type": "g2-standard-8", "secrets": secrets}
    files = vertex.render(ask_of("vertex", **how))
    spec = files["custom_job.json"]["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    values = container(tmp_path, '#!/bin/sh\necho "$HF_TOKEN has come"\n', GOOGLE)
    words = [*spec["command"], *spec["args"]]
    done = subprocess.run(words, env=values, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("canary has come" in done.stdout) == (code == 0)
    assert (
        code == 0
        or "the secret AWS_SECRET_ACCESS_KEY of project project can not be read" in done.stderr
    )
