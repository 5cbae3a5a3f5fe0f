"""Launches at the edges: a closed terminal, prices that differ a little, providers that forget."""

import os
import pty
import signal
import sys
import textwrap
import time

import pytest

from command import in_python
from farthing.launch.machines import MachineLedger, RentedMachine
from farthing.launch.targets.lambda_cloud import Lambda
from launch_faults import Fate, Killed
from launched import Answers, Course, api_of, job_at
from launched import keys as keys
from patience import until
from thinned import thinned


def test_an_instance_that_its_provider_has_forgotten_is_gone():
    answers = Answers((404, {"error": "Specified instance does not exist."}), (200, {"data": []}))
    Lambda(api_of(answers)).destroy(RentedMachine("farthing-1-1", id="i1"))


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


@pytest.mark.parametrize("number", thinned([signal.SIGHUP, signal.SIGTERM], 2))
def test_a_signal_to_the_command_ends_what_nothing_else_would_end(number, tmp_path):
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-c", textwrap.dedent(STAND_IN)])
    until((tmp_path / "watching").exists)
    if number == signal.SIGTERM:
        os.kill(child, number)
        time.sleep(0.2)
    os.close(terminal)  # SIGHUP, and nothing more can be written
    time.sleep(0.2)
    for again in (signal.SIGHUP, signal.SIGTERM):  # the shell sends another, a service manager too
        os.kill(child, again)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
    assert (tmp_path / "ended").exists()


def test_a_fault_of_ours_ends_what_nothing_else_would_end(tmp_path):
    crash = textwrap.dedent(STAND_IN).replace("time.sleep(60)", "raise KeyError('ours')")
    done = in_python(crash, cwd=tmp_path)
    assert done.returncode == 1
    assert "KeyError: 'ours'" in done.stderr
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
