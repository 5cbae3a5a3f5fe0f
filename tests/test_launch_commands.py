"""Targets that are driven by their own command, with programs in its place that print what the real
ones print.
"""

import json
import stat
from pathlib import Path

import pytest

from canaries import CANARIES
from farthing.launch.check import check_target
from farthing.launch.commands import CommandDriver, ended
from farthing.launch.driver import (
    InstanceStatus,
    RefusedError,
    TimedOutError,
    UnauthorizedError,
    UnclearError,
)
from farthing.launch.machines import RentedMachine
from farthing.launch.registry import called, find_target, target_of
from farthing.launch.target import Commands
from launch_matrix import FILES_OF_CASE
from launched import ask_of
from offers import offer_of

NAME = "farthing-12345678-1"


def of(place: str) -> Commands:
    """The commands of a target."""
    target, at = find_target(place)
    return target.commands(at)


def driver_in(folder: Path, commands: Commands) -> CommandDriver:
    """Runs them with the files of a folder."""
    return CommandDriver(commands, lambda ask: folder, restarts=True)


JOB = {"metadata": {"name": NAME}, "status": {"active": 1, "ready": 1}}
FAILED = {
    "metadata": {"name": NAME},
    "status": {"conditions": [{"type": "Failed", "status": "True"}]},
}
PULLS = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
POD = {
    "kind": "Pod",
    "metadata": {"ownerReferences": [{"name": NAME}]},
    "status": {"containerStatuses": [{"state": PULLS}]},
}
PATH = "projects/p/locations/us-central1/customJobs/7"
CASES = {
    "slurm": (
        of("slurm"),
        "17;cluster",
        "17",
        f"12|{NAME}|TIMEOUT\n17|{NAME}|PENDING\n16|other|RUNNING\n",
        InstanceStatus(NAME, "17", is_waiting=True),
    ),
    "slurm, preempted": (
        of("slurm"),
        "17",
        "17",
        f"17|{NAME}|PREEMPTED\n",
        InstanceStatus(NAME, "17", is_over=True, is_paid=False),
    ),
    "kubernetes": (
        of("kubernetes:ml"),
        f"configmap/{NAME}\njob.batch/{NAME}",
        NAME,
        json.dumps({"items": [JOB, POD]}),
        InstanceStatus(NAME, NAME, stuck="ImagePullBackOff: no such image"),
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
        "ok",
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
  *cancel*|*" delete "*|*--full*) ;;
  *show*) echo "   Command={tmp_path}/100%/run.sbatch" ;;
  *logs*|*logging*) cat {tmp_path}/log ;;
  *) cat {tmp_path}/submitted ;;
esac
"""
    (tmp_path / "log").write_text("step 1\n")
    (tmp_path / "100%").mkdir()
    (tmp_path / "100%/log.txt").write_text("step 1\n")
    for name in (
        "sbatch",
        "squeue",
        "scancel",
        "scontrol",
        "kubectl",
        "gcloud",
        "sky",
        "hf",
        "ssh",
    ):
        (folder / name).write_text(script)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path


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
    driver = driver_in(programs, commands)
    assert driver.create(ask_of(target, secrets=("HF_TOKEN",)), 1.0).id == number
    machine = RentedMachine(NAME, id=number)
    assert driver.look(machine) == expected
    assert driver.look(RentedMachine("farthing-12345678-2")) is None
    assert driver.names("farthing-12345678") == ({NAME: expected.id} if expected.is_paid else {})
    assert "step 1" in driver.log(machine)
    driver.destroy(machine)
    last = (programs / "called").read_text().splitlines()[-1]
    assert any(word in last for word in ("cancel", "delete")) == expected.is_paid
    (programs / "listed").write_text(listed.replace(NAME, "farthing-1-1"))
    driver.destroy(machine)
    last = (programs / "called").read_text().splitlines()[-1]
    assert any(word in last for word in ("cancel", "delete")), "though its list lacks it"
    files = [path.read_text() for path in programs.rglob("*") if path.is_file()]
    assert "canary-" not in "".join(files), "nor in any argument"


def test_what_can_not_be_read_is_unclear(programs):
    (programs / "listed").write_text("an error page")
    (programs / "submitted").write_text("")
    for place in ("kubernetes", "vertex:p/r", "skypilot", "hf"):
        driver = driver_in(programs, of(place))
        with pytest.raises(UnclearError):
            driver.look(RentedMachine(NAME))
    with pytest.raises(UnclearError, match="it printed nothing"):
        driver_in(programs, of("slurm")).create(ask_of("slurm"), 1.0)


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ("echo Socket timed out >&2", UnclearError),
        ("echo You are not logged in", UnauthorizedError),
        (f"echo {'x' * 400} 1>&2", UnclearError),
    ],
)
def test_a_command_that_fails_tells_why_and_one_that_is_not_there_is_refused(
    says, kind, programs, monkeypatch
):
    (programs / "bin/sbatch").write_text(f"#!/bin/sh\n{says}\nexit 1\n")
    driver = driver_in(programs, of("slurm"))
    with pytest.raises(kind) as caught:
        driver.create(ask_of("slurm"), 1.0)
    said = says.removeprefix("echo ").partition(" >")[0].partition(" 1>")[0][-300:]
    assert str(caught.value) == f"`sbatch` ended with 1: {said}"
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(RefusedError, match="no command `sbatch`"):
        driver.create(ask_of("slurm"), 1.0)


def test_a_command_that_takes_too_long_is_named():
    for who, name in (("", "`sleep`"), ("host a", "host a")):
        with pytest.raises(TimedOutError, match=f"^{name} has not answered in 0 s"):
            ended(["sleep", "9"], timeout_s=0.05, who=who)


def test_an_offer_is_rented_by_our_own_client_else_by_skypilot():
    found = [target_of(offer_of("H100-80GB", 1, provider=name)) for name in ("RunPod", "AWS", "X")]
    assert [target and target.name for target in found] == ["runpod", "skypilot", None]
    for place, n, name in (("vertex:p/r", 2, "a2-highgpu-2g"), ("vertex:p/r", 3, None)):
        calls = called(find_target(place)[0], offer_of("A100-40GB", 1, n))
        assert (calls and calls.machine_type) == name


@pytest.mark.parametrize(
    ("place", "states"),
    [
        ("hf", "command ok, login ok, store ok, quota warning, image warning"),
        ("slurm:long", "command ok, login failed"),
        ("lambda", "key failed, store ok, image warning"),
        ("ssh", "command ok"),
        ("ssh:a", "command ok, a failed"),
    ],
)
def test_a_target_is_looked_at_before_a_launch(place, states, programs, monkeypatch):
    monkeypatch.setenv("FARTHING_SSH", "false")
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "no key")
    for says in ("me", ""):
        (programs / "submitted").write_text(says)
        ended_by = "warning" if place == "lambda" else "ok"
        found = ", ".join(f"{check.name} {check.state}" for check in check_target(place))
        wanted = states if says else states.replace("login ok", "login failed")
        assert found == f"target ok, ended by {ended_by}, {wanted}"
