"""Launches on this machine, on machines by ssh and under Slurm, for real; nothing here is a cloud.

The quick ones run a script that stands for farthing. The long ones train in network namespaces and
under a controller of Slurm; where the programs for that are missing they skip and say how to get
them.
"""

import contextlib
import os
import stat
import subprocess
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

import slurm_cluster
from farthing.config.load import load_job
from farthing.launch.driver import InstanceStatus, UnclearError
from farthing.launch.machines import RentedMachine
from farthing.launch.prepare import Wishes, prepare
from farthing.launch.request import LaunchRequest
from farthing.launch.session import Session
from farthing.launch.targets.hosts import HostDriver
from hosts import ask_for, machine_of
from hosts import host as host
from launch_chains import QUICK, left_alone, write_job
from patience import titles_of_processes, until

CHECKED = """#!/bin/sh
[ "$2" = needs ] || exit 0
echo "$@" >> asked; [ -e installed ]
"""


def over(host: HostDriver, ask: LaunchRequest) -> InstanceStatus:
    """How it ended."""
    return until(lambda: (seen := host.look(machine_of(ask))) is not None and seen.is_over and seen)  # type: ignore[no-any-return]


def begun(home: Path, pid: int) -> RentedMachine:
    """A machine of this host whose script is this process."""
    folder = home / "farthing-12345678-1"
    folder.mkdir(parents=True)
    (folder / "pid").write_text(str(pid))
    (folder / "boot").write_text(Path("/proc/sys/kernel/random/boot_id").read_text())
    return RentedMachine("farthing-12345678-1", instance="local")


def test_the_exit_code_is_read_of_a_script_that_ends_while_it_is_looked_at(
    host, tmp_path, monkeypatch
):
    machine, search = begun(tmp_path / "home", 1), tmp_path / "bin/pgrep"
    search.write_text(f"#!/bin/sh\necho 75 > {tmp_path}/home/{machine.name}/code\nexit 1\n")
    search.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    seen = host.look(machine)
    assert (seen.is_over, seen.code) == (True, 75)


def test_a_dead_process_that_nobody_waits_for_is_over(host, tmp_path):
    """The first process of a container may wait for none: killed and not confirmed gone, a run was
    paid for without end.
    """
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        machine = begun(tmp_path / "home", process.pid)
        assert not host.look(machine).is_over
        process.kill()
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert host.look(machine).is_over


def test_a_script_runs_on_its_own_and_its_exit_code_is_kept(host, tmp_path):
    ask = ask_for("leave")
    number = host.create(ask, 1_800_000_000.0).id
    seen = over(host, ask)
    assert (seen.id, seen.code, seen.is_paid) == (number, 75, False)
    assert host.log(machine_of(ask)).strip() == "secret is 18 long, asked at 1800000000"
    assert host.names("farthing-12345678") == {}
    texts = [path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert not any(b"canary" in text for text in texts), "the value went by standard input"
    assert stat.S_IMODE((tmp_path / "home" / ask.name / "run.sh").stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize(("install", "code"), [("touch installed", 0), ("true", 2), ("false", 2)])
def test_what_a_job_needs_is_installed_where_a_host_lacks_it(install, code, host, tmp_path):
    (tmp_path / "bin/farthing").write_text(CHECKED)
    ask = replace(ask_for("x"), install=install, needs=("0.1.0", "bitsandbytes"))
    host.create(ask, time.time())
    assert over(host, ask).code == code
    asked = (tmp_path / "home" / ask.name / "asked").read_text().splitlines()
    assert set(asked) == {"launch needs 0.1.0 bitsandbytes"}


def test_the_same_request_again_does_not_start_it_twice(host):
    ask = ask_for("forever")
    number = host.create(ask, 1.0).id
    assert host.create(ask, 2.0).id == number
    assert host.names("farthing-12345678") == {ask.name: f"local {number}"}
    until(lambda: "listening" in host.log(machine_of(ask)))
    titles = titles_of_processes()
    assert any(b"farthing" in title for title in titles)
    assert not any(b"canary-of-a-secret" in title for title in titles)
    host.destroy(machine_of(ask))
    assert over(host, ask).code == 75, "it was asked politely and had time to save"
    assert "told" in host.log(machine_of(ask))


def test_what_does_not_leave_is_killed_in_the_end(host, monkeypatch, tmp_path):
    program = tmp_path / "bin/farthing"
    program.write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 0.1; done\n")
    monkeypatch.setattr("farthing.launch.targets.hosts.KILL_AFTER_S", 0)
    ask = ask_for("stubborn")
    host.create(ask, 1.0)

    def is_gone():
        host.destroy(machine_of(ask))  # asked again and again, as the supervisor does
        seen = host.look(machine_of(ask))
        return seen is not None and seen.is_over and seen.code is None

    assert until(is_gone)
    assert host.names("farthing-12345678") == {}


def test_a_host_that_is_not_there_is_unclear_and_greetings_are_passed_over(monkeypatch, tmp_path):
    driver, machine = HostDriver(["nowhere"]), RentedMachine("farthing-12345678-1", instance="x")
    (tmp_path / "ssh").write_text("printf 'GPU 0 is free\\377\\n'; exec sh\n")
    for program in ("false", "true", f"sh {tmp_path}/ssh"):
        monkeypatch.setenv("FARTHING_SSH", program)
        assert driver.names("farthing-12345678") == {}
        with contextlib.suppress(UnclearError):
            assert driver.look(machine) is None
            assert program[:2] == "sh"


def test_a_launch_here_from_the_start_to_the_log(host, tmp_path):
    job, patience = write_job(tmp_path / "job", None), replace(QUICK, poll_s=0.1)
    session = Session(prepare(load_job(job), Wishes(on="local"), datetime.now(UTC)), print)

    def run():
        return session.run(is_attended=False, tokenize=list, patience=patience)

    program = tmp_path / "bin/farthing"
    program.write_text("#!/bin/sh\n[ $2 = needs ] && exit 0\necho hello from there\nexit 3\n")
    assert run() == 3
    standing = session.standing()
    assert [row["state"] for row in standing["machines"]] == ["gone"]
    assert standing["there_now"] == {}
    assert session.log().strip() == "hello from there"
    program.write_text(
        "#!/bin/sh\n[ $2 = needs ] && exit 0\ntrap 'exit 75' TERM\nwhile :; do sleep 0.1; done\n"
    )
    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: session.standing()["there_now"])
    Session(session.prepared, print).stop(patience)
    thread.join(120.0)
    assert not thread.is_alive(), "whoever watched has heard of it"
    again = Session(session.prepared, print)
    assert again.standing()["there_now"] == {}
    assert len(again.ledger.machines) == 2, "and has rented nothing more"


# ---- long ----


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What the job of the chains comes to when it is left alone."""
    return left_alone(tmp_path_factory.mktemp("alone") / "job")


@pytest.mark.slow
def test_slurm_preempts_and_loses_nodes_and_the_run_ends_the_same(reference, tmp_path):
    if why := slurm_cluster.why_not():
        pytest.skip(why)
    chain = slurm_cluster.run_slurm(range(0, 1), tmp_path, reference)[0]
    assert chain["lost"]
    assert chain["wrong"] == [], chain
