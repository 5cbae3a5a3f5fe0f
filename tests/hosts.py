"""This machine as a host of launches, with a script in the place of farthing."""

import stat

import pytest

from farthing.launch.machines import RentedMachine
from farthing.launch.request import LaunchRequest
from farthing.launch.targets.hosts import HostDriver
from offers import offer_of

FAKE = """#!/bin/sh
[ "$2" = needs ] && exit 0
echo "secret is ${#AWS_SECRET_ACCESS_KEY} long, asked at $FARTHING_CREATED_AT"
case "$(cat job.yaml)" in
  *leave*) exit 75 ;;
  *forever*) trap 'echo told; exit 75' TERM; echo listening; while :; do sleep 0.1; done ;;
esac
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """This machine, with something else in the place of farthing."""
    program = tmp_path / "bin/farthing"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(
        "farthing.launch.targets.hosts.sys.executable", str(tmp_path / "bin/python")
    )
    monkeypatch.setenv("FARTHING_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-a-secret")
    return HostDriver(["local"])


def ask_for(text: str) -> LaunchRequest:
    """A machine that runs a job of this text."""
    offer = offer_of("", 1.0, 0, provider="this machine", instance="local")
    return LaunchRequest(
        "farthing-12345678-1",
        "local",
        "",
        offer,
        1.0,
        60,
        text,
        {"name": "x"},
        secrets=("AWS_SECRET_ACCESS_KEY",),
    )


def machine_of(ask: LaunchRequest, number: str = "") -> RentedMachine:
    """As the ledger has it."""
    return RentedMachine(ask.name, id=number, instance="local")
