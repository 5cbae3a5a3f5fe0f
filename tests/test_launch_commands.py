"""Targets that are driven by their own command, with programs in its place that print what the real
ones print.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from canaries import CANARIES
from farthing.launch.commands import CommandDriver
from farthing.launch.driver import InstanceStatus, RefusedError, UnclearError
from farthing.launch.machines import RentedMachine
from farthing.launch.request import LaunchRequest
from farthing.launch.target import Commands
from farthing.launch.targets import hf_jobs, kubernetes, skypilot, slurm, vertex
from launch_matrix import FILES_OF_CASE

NAME = "farthing-12345678-1"
JOB = {"metadata": {"name": NAME}, "status": {"active": 1, "ready": 1}}
FAILED = {
    "metadata": {"name": NAME},
    "status": {"conditions": [{"type": "Failed", "status": "True"}]},
}
PATH = "projects/p/locations/us-central1/customJobs/7"
CASES: dict[str, tuple[Commands, str, str, str, InstanceStatus, list[str]]] = {
    "slurm": (
        slurm.COMMANDS,
        "17;cluster",
        "17",
        f"17|{NAME}|PENDING\n16|other|RUNNING\n",
        InstanceStatus(NAME, "17", is_waiting=True),
        ["scancel --full 17"],
    ),
    "kubernetes": (
        kubernetes.commands("ml"),
        f"configmap/{NAME}\njob.batch/{NAME}",
        NAME,
        json.dumps({"items": [JOB]}),
        InstanceStatus(NAME, NAME),
        [f"kubectl delete job,configmap {NAME} --namespace ml --ignore-not-found --wait=false"],
    ),
    "kubernetes, failed": (
        kubernetes.commands(""),
        f"job.batch/{NAME}",
        NAME,
        json.dumps({"items": [FAILED]}),
        InstanceStatus(NAME, NAME, is_over=True, is_paid=False),
        [],
    ),
    "vertex": (
        vertex.commands("p/us-central1"),
        PATH,
        PATH,
        json.dumps([{"displayName": NAME, "name": PATH, "state": "JOB_STATE_RUNNING"}]),
        InstanceStatus(NAME, PATH),
        [f"gcloud ai custom-jobs cancel {PATH} --project=p --region=us-central1"],
    ),
    "skypilot": (
        skypilot.COMMANDS,
        "Managed job submitted",
        NAME,
        json.dumps([{"job_id": 3, "job_name": NAME, "status": "ManagedJobStatus.RUNNING"}]),
        InstanceStatus(NAME, "3"),
        [f"sky jobs cancel --yes --name {NAME}"],
    ),
    "skypilot, done": (
        skypilot.COMMANDS,
        "",
        NAME,
        json.dumps([{"job_id": 3, "job_name": NAME, "status": "SUCCEEDED"}]),
        InstanceStatus(NAME, "3", is_over=True, code=0, is_paid=False),
        [],
    ),
    "hf": (
        hf_jobs.commands("team"),
        "6a1b",
        "6a1b",
        json.dumps([{"id": "6a1b", "labels": {"name": NAME}, "status": {"stage": "RUNNING"}}]),
        InstanceStatus(NAME, "6a1b"),
        ["hf jobs cancel 6a1b --namespace team"],
    ),
}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Each program prints the file of what it is asked, and notes how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = f"""#!/bin/sh
echo "$(basename "$0") $*" >> {tmp_path}/called
case " $* " in
  *" list "*|*" get "*|*" queue "*|*" ps "*|*format=%i*) cat {tmp_path}/listed ;;
  *cancel*|*delete*|*--full*) ;;
  *show*) echo "   StdOut={tmp_path}/log" ;;
  *logs*|*logging*) cat {tmp_path}/log ;;
  *) cat {tmp_path}/submitted ;;
esac
"""
    (tmp_path / "log").write_text("step 1\n")
    for name in ("sbatch", "squeue", "scancel", "scontrol", "kubectl", "gcloud", "sky", "hf"):
        (folder / name).write_text(script)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path


def ask_of(target: str) -> Any:
    """An ask as far as a command looks at it."""
    return type(
        "Ask",
        (),
        {
            "name": NAME,
            "launch_id": NAME.rpartition("-")[0],
            "secrets": ("HF_TOKEN",),
            "target": target,
        },
    )()


def files_of(target: str, folder: Path) -> Path:
    """The files of a launch, written."""
    for name, text in FILES_OF_CASE(target).items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_job_is_made_found_and_ended(case, programs, monkeypatch):
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    commands, submitted, number, listed, expected, ended = CASES[case]
    (programs / "submitted").write_text(submitted)
    (programs / "listed").write_text(listed)
    target = case.partition(",")[0]
    driver = CommandDriver(commands, lambda ask: files_of(target, programs), restarts=True)
    ask: LaunchRequest = ask_of(target)
    assert driver.create(ask, 1.0).id == number
    machine = RentedMachine(NAME, id=number)
    assert driver.look(machine) == expected
    assert driver.look(RentedMachine("farthing-12345678-2")) is None
    assert driver.names("farthing-12345678") == ({NAME: expected.id} if expected.is_paid else {})
    assert "step 1" in driver.log(machine)
    assert "canary-" not in (programs / "called").read_text(), "nor in any argument"
    (programs / "called").write_text("")
    driver.destroy(machine)
    called = (programs / "called").read_text().splitlines()
    assert not any(
        b"canary-" in path.read_bytes() for path in programs.rglob("*") if path.is_file()
    )
    assert [
        line
        for line in called
        if line.split()[0] == "scancel" or "cancel" in line or "delete" in line
    ] == ended


def test_what_can_not_be_read_is_unclear(programs):
    (programs / "listed").write_text("an error page")
    (programs / "submitted").write_text("")
    for commands in (
        kubernetes.commands(""),
        vertex.commands("p/r"),
        skypilot.COMMANDS,
        hf_jobs.commands(""),
    ):
        driver = CommandDriver(commands, lambda ask: programs, restarts=True)
        with pytest.raises(UnclearError):
            driver.look(RentedMachine(NAME))


def test_a_command_that_fails_is_unclear_and_one_that_is_not_there_refused(programs, monkeypatch):
    (programs / "bin" / "sbatch").write_text("#!/bin/sh\necho 'Socket timed out' >&2\nexit 1\n")
    driver = CommandDriver(slurm.COMMANDS, lambda ask: programs, restarts=True)
    with pytest.raises(UnclearError, match="Socket timed out"):
        driver.create(ask_of("slurm"), 1.0)
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(RefusedError, match="no command `sbatch`"):
        driver.create(ask_of("slurm"), 1.0)
