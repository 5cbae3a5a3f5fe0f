"""Launches on this machine, on machines by ssh and under Slurm, for real; nothing here is a cloud.

The quick ones run a script that stands for farthing. The long ones train in network namespaces and
under a controller of Slurm; where the programs for that are missing they skip and say how to get
them.
"""

from __future__ import annotations

import os
import stat
import subprocess
import threading
import time
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

import launch_chains
import slurm_cluster
import ssh_machines
from farthing.config.load import load_job
from farthing.launch.driver import InstanceStatus, UnclearError
from farthing.launch.machines import Machine
from farthing.launch.prepare import Wishes, prepare
from farthing.launch.request import LaunchRequest
from farthing.launch.session import Session
from farthing.launch.targets.hosts import LOOK, HostDriver
from launch_chains import QUICK, environment, left_alone, saved_step, write_job
from offers import offer_of
from patience import titles_of_processes, until

FAKE = """#!/bin/sh
[ "$2" = needs ] && exit 0
echo "secret is ${#AWS_SECRET_ACCESS_KEY} long, asked at $FARTHING_CREATED_AT"
case "$(cat job.yaml)" in
  *leave*) exit 75 ;;
  *forever*) trap 'echo told; exit 75' TERM; echo listening; while :; do sleep 0.1; done ;;
esac
"""


CHECKED = """#!/bin/sh
[ "$2" = needs ] || exit 0
echo "$@" >> asked; [ -e installed ]
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """This machine, with something else in the place of farthing."""
    program = tmp_path / "bin" / "farthing"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(
        "farthing.launch.targets.hosts.sys.executable", str(tmp_path / "bin" / "python")
    )
    monkeypatch.setenv("FARTHING_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-a-secret")
    return HostDriver(["local"])


def ask_for(text: str, most_s: int = 60) -> LaunchRequest:
    """A machine that runs a job of this text."""
    offer = offer_of("", 1.0, 0, provider="this machine", instance="local")
    return LaunchRequest(
        "farthing-12345678-1",
        "local",
        "",
        offer,
        1.0,
        most_s,
        text,
        {"name": "x"},
        secrets=("AWS_SECRET_ACCESS_KEY",),
    )


def machine_of(ask: LaunchRequest, number: str = "") -> Machine:
    """As the ledger has it."""
    return Machine(ask.name, id=number, instance="local")


def over(host: HostDriver, ask: LaunchRequest) -> InstanceStatus:
    """How it ended."""
    return until(lambda: (seen := host.look(machine_of(ask))) is not None and seen.is_over and seen)  # type: ignore[no-any-return]


def test_the_exit_code_is_read_of_a_script_that_ends_while_it_is_looked_at(tmp_path: Path) -> None:
    run, search = tmp_path / "run", tmp_path / "pgrep"
    run.mkdir()
    (run / "pid").write_text("1")
    (run / "boot").write_text(Path("/proc/sys/kernel/random/boot_id").read_text())
    search.write_text(f"#!/bin/sh\necho 75 > {run}/code\nexit 1\n")
    search.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    seen = subprocess.run(
        ["sh", "-c", f"{LOOK}\none {run}"], env=path, capture_output=True, text=True, check=True
    )
    assert seen.stdout.split() == ["over", "75"]


def test_a_dead_process_that_nobody_waits_for_is_over(tmp_path: Path) -> None:
    """The first process of a container may wait for none: killed and not confirmed gone, a run was
    paid for without end.
    """
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        (tmp_path / "pid").write_text(str(process.pid))
        (tmp_path / "boot").write_text(Path("/proc/sys/kernel/random/boot_id").read_text())

        def look() -> list[str]:
            done = subprocess.run(
                ["sh", "-c", f"{LOOK}\none {tmp_path}"], capture_output=True, text=True, check=True
            )
            return done.stdout.split()

        assert look() == ["alive"]
        process.kill()
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert look() == ["over"]


def test_a_script_runs_on_its_own_and_its_exit_code_is_kept(
    host: HostDriver, tmp_path: Path
) -> None:
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
def test_what_a_job_needs_is_installed_where_a_host_lacks_it(
    install: str, code: int, host: HostDriver, tmp_path: Path
) -> None:
    (tmp_path / "bin" / "farthing").write_text(CHECKED)
    ask = replace(ask_for("x"), install=install, needs=("0.1.0", "bitsandbytes"))
    host.create(ask, time.time())
    assert over(host, ask).code == code
    asked = (tmp_path / "home" / ask.name / "asked").read_text().splitlines()
    assert set(asked) == {"launch needs 0.1.0 bitsandbytes"}


def test_the_same_request_again_does_not_start_it_twice(host: HostDriver) -> None:
    ask = ask_for("forever")
    number = host.create(ask, 1.0).id
    assert host.create(ask, 2.0).id == number
    assert host.names("farthing-12345678") == {ask.name: f"local {number}"}
    until(lambda: "listening" in host.log(machine_of(ask)))
    host.destroy(machine_of(ask))
    assert over(host, ask).code == 75, "it was asked politely and had time to save"
    assert "told" in host.log(machine_of(ask))


@pytest.mark.slow
def test_time_ends_it_when_nobody_of_ours_lives(host: HostDriver) -> None:
    ask = ask_for("forever", most_s=1)
    host.create(ask, 1.0)
    assert over(host, ask).code in (3, 75)


def test_what_does_not_leave_is_killed_in_the_end(
    host: HostDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "farthing"
    program.write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 0.1; done\n")
    monkeypatch.setattr("farthing.launch.targets.hosts.KILL_AFTER_S", 0)
    ask = ask_for("stubborn")
    host.create(ask, 1.0)

    def is_gone() -> bool:
        host.destroy(machine_of(ask))  # asked again and again, as the supervisor does
        seen = host.look(machine_of(ask))
        return seen is not None and seen.is_over and seen.code is None

    assert until(is_gone)
    assert host.names("farthing-12345678") == {}


def test_no_secret_is_in_a_list_of_processes(host: HostDriver) -> None:
    ask = ask_for("forever")
    host.create(ask, 1.0)
    until(lambda: "secret is" in host.log(machine_of(ask)))
    titles = titles_of_processes()
    host.destroy(machine_of(ask))
    assert any(b"farthing" in title for title in titles)
    assert not any(b"canary-of-a-secret" in title for title in titles)
    over(host, ask)


def test_a_host_that_is_not_there_is_unclear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARTHING_SSH", "false")
    with pytest.raises(UnclearError):
        HostDriver(["nowhere"]).look(Machine("farthing-12345678-1", instance="nowhere"))
    assert HostDriver(["nowhere"]).names("farthing-12345678") == {}


def test_a_launch_here_from_the_start_to_the_log(host: HostDriver, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", None)
    said: list[str] = []
    session = Session(prepare(load_job(job), Wishes(on="local"), datetime.now(UTC)), said.append)
    program = tmp_path / "bin" / "farthing"
    program.write_text("#!/bin/sh\n[ $2 = needs ] && exit 0\necho hello from there\nexit 3\n")
    assert session.run(is_attended=False, tokenize=list, patience=replace(QUICK, poll_s=0.1)) == 3
    standing = session.standing()
    assert [row["state"] for row in standing["machines"]] == ["gone"]
    assert standing["there_now"] == {}
    assert session.log().strip() == "hello from there"
    program.write_text(
        "#!/bin/sh\n[ $2 = needs ] && exit 0\ntrap 'exit 75' TERM\nwhile :; do sleep 0.1; done\n"
    )
    thread = threading.Thread(
        target=lambda: session.run(
            is_attended=False, tokenize=list, patience=replace(QUICK, poll_s=0.1)
        )
    )
    thread.start()
    until(lambda: session.standing()["there_now"])
    again = Session(session.prepared, said.append)
    again.stop(replace(QUICK, poll_s=0.1))
    thread.join(120.0)
    assert not thread.is_alive(), "whoever watched has heard of it"
    assert Session(session.prepared, said.append).standing()["there_now"] == {}
    assert len(Session(session.prepared, said.append).ledger.machines) == 2, (
        "and has rented nothing more"
    )


# ---- long ----


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the job of the chains comes to when it is left alone."""
    return left_alone(tmp_path_factory.mktemp("alone") / "job")


@pytest.mark.slow
def test_a_lost_machine_is_followed_by_another_to_the_same_bits(
    reference: dict[str, Any], tmp_path: Path
) -> None:
    if why := ssh_machines.why_not():
        pytest.skip(why)
    chain = launch_chains.run_ssh(range(3, 4), tmp_path, reference)[0]
    assert chain["lost"]
    assert chain["wrong"] == [], chain


@pytest.mark.slow
def test_slurm_preempts_and_loses_nodes_and_the_run_ends_the_same(
    reference: dict[str, Any], tmp_path: Path
) -> None:
    if why := slurm_cluster.why_not():
        pytest.skip(why)
    chain = slurm_cluster.run_slurm(range(0, 1), tmp_path, reference)[0]
    assert chain["lost"]
    assert chain["wrong"] == [], chain


@pytest.mark.slow
def test_a_machine_that_is_cut_off_stops_at_its_lease_and_is_counted_until_it_is_gone(
    reference: dict[str, Any], tmp_path: Path
) -> None:
    if why := ssh_machines.why_not():
        pytest.skip(why)
    moto = pytest.importorskip(
        "moto.server", reason="moto[s3] is not installed: nothing can be cut off from a folder"
    )
    server = moto.ThreadedMotoServer(ip_address="0.0.0.0", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    keys = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with ssh_machines.Fleet(
            tmp_path / "fleet", 2, {"AWS_EC2_METADATA_DISABLED": "true"}
        ) as fleet:
            # a machine reaches the store by its own cable alone; here it is on the loopback
            for machine in fleet.machines:
                fleet.environment["AWS_ENDPOINT_URL"] = f"http://{machine.gateway}:{port}"
                machine.lose()
                machine.boot()
            with environment(
                FARTHING_SSH=" ".join(fleet.ssh), AWS_EC2_METADATA_DISABLED="true", **keys
            ):
                _cut_off(fleet, reference, tmp_path, port)
    finally:
        server.stop()


def _cut_off(
    fleet: ssh_machines.Fleet, reference: dict[str, Any], tmp_path: Path, port: int
) -> None:
    import farthing.launch.prepare as prepare_module
    from farthing.storage.objects import open_store

    with (
        environment(AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(prepare_module, "SETTINGS", ())  # each machine has its own way to the store
        bucket = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        urllib.request.urlopen(bucket)
        job = write_job(tmp_path / "job", None)
        job.write_text(job.read_text() + "output_store: s3://bucket/run\n")
        first, _ = fleet.machines
        said: list[str] = []
        session = Session(
            prepare(load_job(job), Wishes(on="ssh:m1,m2"), datetime.now(UTC)), said.append
        )
        store: Any = open_store("s3://bucket/run")

        def cut() -> None:
            while saved_step(store) < 24:
                time.sleep(0.1)
            first.cut()
            until(lambda: any("m2" in line and "made" in line for line in said), 200.0)
            time.sleep(5.0)
            first.mend()

        thread = threading.Thread(target=cut)
        thread.start()
        patient = replace(QUICK, farewell_s=120.0)
        code = session.run(is_attended=True, tokenize=list, patience=patient)
        thread.join()
    assert launch_chains.judged(session, code, reference) == [], said
    old, new = session.ledger.machines.values()
    assert old.gone_at is not None
    assert new.created_at is not None
    assert old.gone_at > new.created_at, "it was there, out of reach, while the other trained"
    assert old.usd(time.time()) == pytest.approx((old.gone_at - old.asked_at) / 3600 * 3.6)
