"""Targets that are driven by their own command, with programs in its place that print what the real
ones print.
"""

from __future__ import annotations

import json
import stat

import pytest

from canaries import CANARIES
from farthing.launch.commands import CommandDriver
from farthing.launch.driver import InstanceStatus, RefusedError, UnclearError
from farthing.launch.machines import RentedMachine
from farthing.launch.registry import find_target
from farthing.launch.request import LaunchRequest
from farthing.launch.target import Commands
from launch_matrix import FILES_OF_CASE
from offers import offer_of

NAME = "farthing-12345678-1"


def of(place: str) -> Commands:
    """The commands of a target."""
    target, at = find_target(place)
    assert target.commands is not None
    return target.commands(at)


JOB = {"metadata": {"name": NAME}, "status": {"active": 1, "ready": 1}}
FAILED = {
    "metadata": {"name": NAME},
    "status": {"conditions": [{"type": "Failed", "status": "True"}]},
}
PATH = "projects/p/locations/us-central1/customJobs/7"
CASES: dict[str, tuple[Commands, str, str, str, InstanceStatus]] = {
    "slurm": (
        of("slurm"),
        "17;cluster",
        "17",
        f"17|{NAME}|PENDING\n16|other|RUNNING\n",
        InstanceStatus(NAME, "17", is_waiting=True),
    ),
    "kubernetes": (
        of("kubernetes:ml"),
        f"configmap/{NAME}\njob.batch/{NAME}",
        NAME,
        json.dumps({"items": [JOB]}),
        InstanceStatus(NAME, NAME),
    ),
    "kubernetes, failed": (
        of("kubernetes"),
        f"job.batch/{NAME}",
        NAME,
        json.dumps({"items": [FAILED]}),
        InstanceStatus(NAME, NAME, is_over=True, is_paid=False),
    ),
    "vertex": (
        of("vertex:p/us-central1"),
        PATH,
        PATH,
        json.dumps([{"displayName": NAME, "name": PATH, "state": "JOB_STATE_RUNNING"}]),
        InstanceStatus(NAME, PATH),
    ),
    "skypilot": (
        of("skypilot"),
        "Managed job submitted",
        NAME,
        json.dumps([{"job_id": 3, "job_name": NAME, "status": "ManagedJobStatus.RUNNING"}]),
        InstanceStatus(NAME, "3"),
    ),
    "skypilot, done": (
        of("skypilot"),
        "",
        NAME,
        json.dumps([{"job_id": 3, "job_name": NAME, "status": "SUCCEEDED"}]),
        InstanceStatus(NAME, "3", is_over=True, code=0, is_paid=False),
    ),
    "hf": (
        of("hf:team"),
        "6a1b",
        "6a1b",
        json.dumps([{"id": "6a1b", "labels": {"name": NAME}, "status": {"stage": "RUNNING"}}]),
        InstanceStatus(NAME, "6a1b"),
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


def ask_of(target: str) -> LaunchRequest:
    offer, secrets = offer_of("A40", 1.0), ("HF_TOKEN",)
    return LaunchRequest(NAME, target, "", offer, 1.0, 60, "task: x", {}, secrets=secrets)


@pytest.mark.parametrize("case", CASES)
def test_a_job_is_made_found_and_ended(case, programs, monkeypatch):
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    commands, submitted, number, listed, expected = CASES[case]
    (programs / "submitted").write_text(submitted)
    (programs / "listed").write_text(listed)
    target = case.partition(",")[0]
    for name, text in FILES_OF_CASE(target).items():
        (programs / name).write_text(text)
    driver = CommandDriver(commands, lambda ask: programs, restarts=True)
    assert driver.create(ask_of(target), 1.0).id == number
    machine = RentedMachine(NAME, id=number)
    assert driver.look(machine) == expected
    assert driver.look(RentedMachine("farthing-12345678-2")) is None
    assert driver.names("farthing-12345678") == ({NAME: expected.id} if expected.is_paid else {})
    assert "step 1" in driver.log(machine)
    driver.destroy(machine)
    last = (programs / "called").read_text().splitlines()[-1]
    assert any(word in last for word in ("cancel", "delete")) == expected.is_paid
    files = [path.read_text() for path in programs.rglob("*") if path.is_file()]
    assert "canary-" not in "".join(files), "nor in any argument"


def test_what_can_not_be_read_is_unclear(programs):
    (programs / "listed").write_text("an error page")
    (programs / "submitted").write_text("")
    for place in ("kubernetes", "vertex:p/r", "skypilot", "hf"):
        driver = CommandDriver(of(place), lambda ask: programs, restarts=True)
        with pytest.raises(UnclearError):
            driver.look(RentedMachine(NAME))


def test_a_command_that_fails_is_unclear_and_one_that_is_not_there_refused(programs, monkeypatch):
    (programs / "bin" / "sbatch").write_text("#!/bin/sh\necho 'Socket timed out' >&2\nexit 1\n")
    driver = CommandDriver(of("slurm"), lambda ask: programs, restarts=True)
    with pytest.raises(UnclearError, match="Socket timed out"):
        driver.create(ask_of("slurm"), 1.0)
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(RefusedError, match="no command `sbatch`"):
        driver.create(ask_of("slurm"), 1.0)
