"""Launches at the edges: a closed terminal, prices that differ a little, providers that forget."""

from __future__ import annotations

import os
import pty
import signal
import sys
import textwrap
import time

import httpx
import pytest

from fake_clouds import Machine as CloudMachine
from farthing.launch.machines import MachineLedger, RentedMachine
from farthing.launch.targets.lambda_cloud import Lambda
from launch_faults import Fate, Killed
from launched import Answers, Course, api_of, job_at
from launched import keys as keys


def test_an_instance_that_its_provider_has_forgotten_is_gone():
    answers = Answers((404, {"error": "Specified instance does not exist."}), (200, {"data": []}))
    Lambda(api_of(answers)).destroy(RentedMachine("farthing-1-1", id="i1"))


@pytest.mark.parametrize("is_away", [False, True])
def test_a_machine_that_came_and_went_while_nobody_saw_it_is_counted(is_away, tmp_path):
    """Its watcher sleeps for hours, or asks for hours a provider that does not answer."""
    course = Course(tmp_path, max_usd=0.7, script=["create never answers after creating"])
    world = course.world
    handle, n_looks, until = world.handle, 0, 0.0

    def unseen(request):
        nonlocal n_looks, until
        n_looks += request.method == "GET" and bool(world.machines)
        if n_looks == 1:
            n_looks, until = 2, world.now + 30_000
            world.sleep(0 if is_away else 30_000)
        if world.now < until:
            raise httpx.ConnectError("away")
        return handle(request)

    world.handle = unseen  # type: ignore[method-assign]
    assert (course.goes(), world.usd > 0.6) == (3, True)
    course.is_counted(rel=0.1)
    assert world.usd <= 0.7


def test_a_machine_that_several_processes_looked_for_in_vain_costs_nothing(tmp_path):
    course = Course(tmp_path, "lambda", 0.7, n_steps=120, script=["create never answers"])
    for n_calls, pause_s in ((33, 30), (18, 30), (23, 4000)):
        with pytest.raises(Killed):
            course.goes(Fate(n_calls, is_before=True))
        with course.world.unattended():
            course.world.sleep(pause_s)
    assert course.goes() == 0
    assert [each.state for each in course.ledger.machines.values()] == ["refused", "gone"]
    course.is_counted(rel=0.01)


def test_an_old_price_names_what_gives_newer_ones(tmp_path, tiny_folders, cli, monkeypatch):
    monkeypatch.setenv("FARTHING_TODAY", "2027-11-22")
    (tmp_path / "own.csv").write_text(
        "provider,instance,gpu,n_gpus,region,kind,unit,usd,source,date\n"
        "RunPod,1x RTX 4090 secure,RTX 4090,1,any,on-demand,machine_hour,0.4,me,2026-11-20\n"
    )
    job = job_at(tmp_path, tiny_folders, output_store="s3://bucket/run", where={})
    words = job, "--prices", tmp_path / "own.csv"
    out = cli.out("launch", *words, "--on", "runpod")
    assert f"is 367 days old: renew {tmp_path}/own.csv" in out
    assert f"days old: renew {tmp_path}" in " ".join(cli.out("plan", *words).split())


# ---- the command ----

STAND_IN = """
    import signal, sys, time
    from types import SimpleNamespace
    import farthing.cli.launch as command
    from farthing.launch.machines import RentedMachine

    machine = RentedMachine("farthing-1-1", usd_per_hour=2.0)

    class Session:
        prepared = SimpleNamespace(job=SimpleNamespace(output_dir="run"))
        ledger = SimpleNamespace(open=[machine])
        def driver(self): return SimpleNamespace(ends_by_itself=False)
        def run(self, **more):
            open("watching", "w").close()
            time.sleep(60)
        def stop(self):
            time.sleep(0.5)
            open("ended", "w").close()
            self.ledger.open = []
        def open_in_words(self): return [each.name for each in self.ledger.open]

    sys.exit(command._do(Session(), "", SimpleNamespace(attended=True, json=False)))
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_the_command_ends_what_nothing_else_would_end(number, tmp_path):
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-c", textwrap.dedent(STAND_IN)])
    until = time.monotonic() + 60
    while not (tmp_path / "watching").exists() and time.monotonic() < until:
        time.sleep(0.05)
    if number == signal.SIGTERM:
        os.kill(child, number)
        time.sleep(0.2)
    os.close(terminal)  # SIGHUP, and nothing more can be written
    time.sleep(0.2)
    for again in (signal.SIGHUP, signal.SIGTERM):  # the shell sends another, a service manager too
        os.kill(child, again)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
    assert (tmp_path / "ended").exists()


# ---- two processes, one number ----


def asked(ledger: MachineLedger, at: float, **more):
    ledger.note("farthing-1-2", "asked", at, number=2, usd_per_hour=1.0, **more)


def test_a_request_that_was_never_sent_gives_its_name_to_the_machine_of_another_process(tmp_path):
    here, other = MachineLedger(tmp_path / "a"), MachineLedger(tmp_path / "b")
    asked(here, 1000.0, provider="A")
    asked(other, 2000.0, provider="B")
    other.note("farthing-1-2", "created", 2010.0, id="7")
    here.take_over(other.rows)
    for ledger in (here, MachineLedger(tmp_path / "a")):
        (machine,) = ledger.machines.values()
        assert (machine.name, machine.provider, machine.id) == ("farthing-1-2", "B", "7")
        assert machine.usd(5600.0) == 1.0
        assert ledger.rows == other.rows, "so that nothing of it is shared again"


def test_a_machine_that_is_asked_for_twice_is_billed_from_the_first_time(tmp_path):
    ledger = MachineLedger(tmp_path)
    asked(ledger, 1000.0)
    ledger.note("farthing-1-2", "created", 1001.0, id="7")
    asked(ledger, 1900.0, why="asked for elsewhere")
    assert ledger.machines["farthing-1-2"].usd(4600.0) == 1.0


# ---- what an earlier watcher left ----


def there(course: Course, number: int, *events: str) -> CloudMachine:
    """A machine that an earlier watcher asked for: in its ledger, in the store and in the cloud."""
    world, ledger = course.world, course.ledger
    name = f"{course.prepared.launch_id}-{number}"
    asked = {"target": "runpod", "provider": "RunPod", "usd_per_hour": 0.4, "left_usd": 4.0}
    ledger.note(name, "asked", world.now, number=number, most_s=30_000, **asked)
    for event in events:
        ledger.note(name, event, world.now, **({"id": str(number)} if event == "created" else {}))
    world.keep(name, ledger.rows[name])
    ledger.close()
    machine = CloudMachine(str(number), name, "", world.now, 0.4, world.now + 30_000, None, 4.0)
    machine.prices = [(world.now, 0.4)]
    world.machines.append(machine)
    return machine


def test_of_two_machines_the_younger_is_adopted_and_the_older_is_ended(tmp_path):
    course = Course(tmp_path, n_steps=240)
    older, younger = (there(course, number, "created") for number in (1, 2))
    began = course.world.now
    assert course.goes() == 0
    assert older.gone_at - began < 60, "before the younger one trained"
    assert younger.trained_s > 0
    assert (len(course.world.machines), course.world.n_alive) == (2, 0)


def test_a_machine_that_was_left_and_not_ended_is_ended_before_another_is_rented(tmp_path):
    course = Course(tmp_path, n_steps=24)
    left = there(course, 1, "created", "left")
    assert course.goes() == 0
    assert left.gone_at <= course.world.machines[1].made_at
    assert course.world.n_alive == 0
