"""A run that hangs past a limit is ended with exit code 3, in whatever phase and however it hangs.

A `sitecustomize` beside the process hangs it when a function is called; what the user's command
sees and does afterwards is here too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import yaml

import farthing.train.run as run_module
import workshop
from command import in_python, sets
from farthing.errors import InputError, LimitError
from farthing.run.accounts import read_ledger
from farthing.run.guard import Told, watch
from farthing.run.ledger import Ledger, Meter
from farthing.run.stillness import Stillness
from farthing.train.budget import RunLimits, say_what_bills_on
from farthing.train.watchdog import Watchdog
from hangs import hanging, stuck_file_system
from patience import until
from thinned import thinned

PHASES = [
    "farthing.train.resolve:tokenize",
    "farthing.train.build:build_model",
    "farthing.train.loop:take_step",
    "farthing.train.evaluate:evaluate",
    "farthing.run.checkpoint:commit_folder",
    "farthing.train.saver:export_model",
]
WAYS = ["sleep", "lock", "stop", "fifo"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job file."""
    return workshop.job_file(
        tmp_path_factory.mktemp("job"),
        max_steps=100_000,
        save_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        eval_rows=workshop.rows_of("llama", 8, 3),
        probe=False,
    )


def train(job: Path, run: Path, environ, *words: str):
    command = [sys.executable, "-m", "farthing", "train", str(job), "--set", f"output_dir={run}"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # not pipes: who waits in the kernel keeps those open
        done = subprocess.run(
            [*command, *words],
            env={**os.environ, **environ},
            stdout=out,
            stderr=err,
            timeout=900,  # longer than the longest cap: under load a start takes minutes
        )
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())


def hung(where: Path, begin):
    """What `begin(run folder, cap)` gave under the first cap that lasted until the hang, the
    folder, and the cap: on a machine with other work a start takes long.
    """
    for n in range(5):
        run, cap_usd = where / f"run-{n}", 0.03 * 2**n
        done = begin(run, cap_usd)
        if (where / "hung").exists():
            return done, run, cap_usd
    raise AssertionError(done.stderr)


def train_until_hung(job: Path, where: Path, environ, *keys: str):
    def begin(run, cap_usd):
        ours = [f"cache_dir={run}-cache", f"limits.max_usd={cap_usd}", *keys]
        return train(job, run, environ, *sets(*ours))

    return hung(where, begin)


@pytest.mark.parametrize(
    ("phase", "way"), thinned([(phase, way) for phase in PHASES for way in WAYS], 99)
)
def test_a_hang_is_ended_by_the_cap_and_is_on_the_bill(phase, way, job, tmp_path):
    done, run, cap_usd = train_until_hung(job, tmp_path, hanging(tmp_path, phase, way))
    assert done.returncode == 3, done.stderr
    (account,) = read_ledger(run / "ledger.jsonl").accounts
    assert account.state == "limit"
    assert account.usd > cap_usd, "the hang is paid for"
    assert workshop.read_json(run / "receipt.json")["state"] == "limit"
    if "take_step" in phase:
        assert list((run / "checkpoints").glob("step-*")), "what was committed stays"


@pytest.mark.slow
def test_who_waits_in_the_kernel_is_named_and_the_machine_can_be_ended(job, tmp_path):
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(stuck_file_system(tmp_path / "stuck"))
    except OSError:
        pytest.skip("this user may not mount a file system")
    with stack:
        environ = hanging(tmp_path, "farthing.train.resolve:tokenize", "stuck")
        when_done = f"when_done=touch {tmp_path / 'ended'}"
        done, run, _ = train_until_hung(job, tmp_path, environ, when_done)
    assert done.returncode == 3, done.stderr
    assert "can't be killed" in done.stderr
    assert (tmp_path / "ended").exists()
    assert workshop.read_json(run / "receipt.json")["state"] == "limit"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lock", "stop"])
def test_a_python_program_that_hangs_is_killed_and_is_on_the_bill(way, job, tmp_path):
    environ = {**os.environ, **hanging(tmp_path, "farthing.train.resolve:tokenize", way)}

    def begin(run, cap_usd):
        own = {"limits": {"max_usd": cap_usd}, "output_dir": str(run), "cache_dir": f"{run}-cache"}
        other = job.with_name(f"{way}.yaml")
        other.write_text(yaml.safe_dump(yaml.safe_load(job.read_text()) | own))
        program = f"import farthing; farthing.fine_tune({str(other)!r}, quiet=True)"
        return in_python(program, env=environ, timeout=600)

    done, run, cap_usd = hung(tmp_path, begin)
    assert done.returncode == -signal.SIGKILL
    assert "stopped by the cap of" in done.stderr
    (account,) = read_ledger(run / "ledger.jsonl").accounts
    assert (account.state, account.usd > cap_usd) == ("limit", True)


@pytest.mark.slow
def test_a_close_that_hangs_past_the_cap_ends_by_the_limit(tmp_path, monkeypatch):
    honest, calls = run_module.leave_receipt, []

    def hangs_once(folder, *log):
        calls.append(folder)
        if len(calls) == 1:
            threading.Event().wait(300)
        return honest(folder, *log)

    monkeypatch.setattr(run_module, "leave_receipt", hangs_once)
    monkeypatch.setattr("farthing.run.opening.uncounted_age_s", lambda: 0.0)
    job = workshop.make_job(tmp_path, max_steps=2, limits={"max_hours": "6s"})
    outcome = run_module.train(job, lambda event: None)
    assert (outcome.state, outcome.exit_code) == ("limit", 3)
    assert outcome.reason.startswith("the cap of 6.0 s")
    assert len(calls) > 1


def test_who_watches_from_beside_kills_nobody_but_who_began_it():
    """The number of a process that died may be a stranger's, while a child of it holds the pipe."""
    with subprocess.Popen(["sleep", "600"]) as stranger:
        program = [sys.executable, "-m", "farthing.report.last_words", str(stranger.pid)]
        with subprocess.Popen(program, stdin=subprocess.PIPE) as watcher:
            watcher.stdin.write(b'{"left_s": -100}\n')
            watcher.stdin.flush()
            assert watcher.wait(60) == 0
            assert stranger.poll() is None
        stranger.kill()


@pytest.mark.slow
def test_the_command_of_when_done_runs_once_after_the_end(job, tmp_path):
    said = tmp_path / "said"
    words = sets("train.max_steps=2", f"when_done=echo $FARTHING_EXIT_CODE $FARTHING_RUN >> {said}")
    for _ in range(2):
        assert train(job, tmp_path / "run", {}, *words).returncode == 0
    assert said.read_text() == f"0 {tmp_path / 'run'}\n"


@pytest.mark.slow
def test_a_dry_run_shows_the_command_and_begins_nothing(job, tmp_path):
    keys = sets("when_done=no-such-program now", "limits.max_usd=5")
    done = train(job, tmp_path / "run", {}, *keys, "--dry-run")
    assert done.returncode == 0
    assert "it stops at $5.00" in done.stdout
    assert "this command runs once: no-such-program now" in done.stdout
    assert "`no-such-program` of when_done is not found" in done.stdout
    assert not (tmp_path / "run").exists()
    wrong = sets(f"when_done=touch {tmp_path / 'said'}", "train.max_step=2")
    assert train(job, tmp_path / "run", {}, *wrong, "--dry-run").returncode == 2
    assert not (tmp_path / "said").exists()


def test_a_cap_without_a_price_is_refused(tmp_path):
    job = workshop.make_job(tmp_path, limits={"max_usd": 5}, where={"usd_per_hour": 0})
    with pytest.raises(InputError, match="never fires"):
        workshop.train(job)
    assert not Path(job.output_dir).exists()
    priced = workshop.make_job(tmp_path, limits={"max_usd": 5})
    assert "costs $3.60 an hour until you end it" in "\n".join(say_what_bills_on(priced))


def guarded(tmp_path: Path, work: str) -> subprocess.CompletedProcess[str]:
    """A guarded process whose work is this code; `when_done` adds a line to `done`."""
    code = (
        "import os, signal, subprocess, sys, time\nfrom farthing.run import guard\n"
        "from farthing.run.guard import forget_done, guarded, tell\nguard.ORPHANS_S = 0.0\n"
        f"def work():\n    tell(folder={str(tmp_path)!r}, why='the cap',"
        f" when_done='echo $FARTHING_EXIT_CODE >> {tmp_path}/done; exit 7')\n    {work}\n"
        "def last_words(folder, why, late_s):\n"
        f"    said = open({str(tmp_path / 'words')!r}, 'w')\n"
        "    said.write(f'{folder} {why} {late_s < 300}')\n"
        "sys.exit(guarded(work, last_words))\n"
    )
    return in_python(code)


@pytest.mark.parametrize(
    ("work", "code", "done"),
    [
        ("return 0", 0, "0\n"),
        ("return 1", 1, "1\n"),
        ("return 2", 2, "2\n"),
        ("return 3", 3, "3\n"),
        ("subprocess.Popen(['sleep', '60']); return 0", 0, "0\n"),
        ("return 75", 75, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)", -15, ""),
        ("tell(left_s=-5.5); time.sleep(60)", 3, "3\n"),
        ("tell(left_s=9, deadline_s=-5.5); time.sleep(60)", 3, "3\n"),
    ],
)
def test_a_machine_is_ended_once_where_nothing_is_to_be_tried_again(work, code, done, tmp_path):
    for _ in range(2):
        found = guarded(tmp_path, work)
        assert found.returncode == code, found.stderr
        assert "can't be killed" not in found.stderr
        ran = tmp_path / "done"
        assert (ran.read_text() if ran.exists() else "") == done
    assert ("left_s" in work) == (tmp_path / "words").exists()
    if "left_s" in work:
        assert "stopped by the cap: the run had not ended by itself" in found.stderr
        assert (tmp_path / "words").read_text() == f"{tmp_path} the cap True"
    if done:
        guarded(tmp_path, f"forget_done(__import__('pathlib').Path({str(tmp_path)!r})); {work}")
        assert (tmp_path / "done").read_text() == 2 * done


def test_what_a_worker_tells_just_before_it_ends_is_heard():
    reads, writes = os.pipe()
    os.write(writes, b'{"when_done": "poweroff"}\n')
    os.close(writes)
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert watch(pid, reads)[1].when_done == "poweroff"


def test_who_sits_at_the_terminal_may_keep_the_machine(tmp_path):
    at_a_terminal = (
        "return 0\nsys.stderr.isatty = lambda: True\n"
        "def pressed(seconds):\n    if seconds > 5:\n        raise KeyboardInterrupt\n"
        "time.sleep = pressed"
    )
    found = guarded(tmp_path, at_a_terminal)
    assert "when_done in 10 s: echo" in found.stderr
    assert "when_done was not run: this machine may still cost money" in found.stderr
    assert (found.returncode, (tmp_path / "done").exists()) == (0, False)


def test_lines_of_a_worker_are_taken_as_they_come_and_it_has_five_seconds_more(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("farthing.run.guard.time.monotonic", lambda: now[0])
    reads, writes = os.pipe()
    told = Told(reads)
    for words, left_s in (
        (b'{"left_s": 2, "why": "th', float("inf")),
        (b'e cap"}\n{"left_s": 9', 2),
    ):
        os.write(writes, words)
        assert told.listen()
        assert told.left_s == left_s
    os.write(writes, b"}\n")
    assert told.listen()
    assert (told.left_s, told.why) == (2, "the cap"), "what was spent is not given back"
    os.close(writes)
    for at, may_continue in ((107.0, True), (107.25, False)):
        now[0] = at
        assert told.listen() == may_continue
    assert not told.is_open
    os.close(reads)


def begun(job: Path, run: Path):
    """A run that has taken a few steps: the command and its worker."""
    command = [sys.executable, "-m", "farthing", "train", str(job), "--set", f"output_dir={run}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, process_group=0)
    log = run / "log.jsonl"
    until(lambda: log.exists() and log.read_bytes().count(b"\n") > 3)
    (worker,) = psutil.Process(process.pid).children()
    return process, worker


@pytest.mark.slow
def test_a_killed_guard_takes_the_run_along(job, tmp_path):
    process, worker = begun(job, tmp_path / "run")
    process.kill()
    process.wait()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def test_a_hang_of_the_main_thread_is_raised_out_of_in_python_too(tmp_path, monkeypatch):
    monkeypatch.setattr("farthing.train.watchdog.RAISED_AFTER_S", 0.0)
    monkeypatch.setattr("farthing.train.watchdog.ENDED_AFTER_S", 1e6)
    job = workshop.make_job(tmp_path, limits={"max_hours": "1s"})
    reached = []
    ledger = Ledger(tmp_path / "ledger.jsonl", Meter(), 3.6)
    with (
        pytest.raises(LimitError, match="the cap of"),
        Watchdog(RunLimits(job, ledger), reached.append, lambda: None),
    ):
        threading.Event().wait(300)
    assert len(reached) == 1


def test_what_is_told_of_limits_is_kept_by_two_clocks(monkeypatch):
    now = {"mono": 0.0, "boot": 0.0}
    monkeypatch.setattr("farthing.run.guard.time.monotonic", lambda: now["mono"])
    monkeypatch.setattr("farthing.run.guard.seconds_since_boot", lambda: now["boot"])
    told = Told()
    assert told.left_s == float("inf")
    told.take(b'{"folder": "/x", "why": "the cap", "left_s": 10, "deadline_s": null}')
    told.take(b"garbage")
    told.take(b'{"left_s": "x"}')
    now["boot"] = 3600.0  # suspended: nothing was spent
    assert told.left_s == 10
    told.take(b'{"left_s": null, "deadline_s": 100}')
    now["boot"] += 3600.0
    assert told.left_s == -3500
    assert (told.folder, told.why) == ("/x", "the cap")


def test_signs_of_work_are_polls_cpu_time_and_bytes_read():
    now = {"at": 0.0, "cpu": 0.0, "read": 0}
    still = Stillness(lambda: now["at"], lambda: now["cpu"], lambda: now["read"])
    now["at"] = 50.0
    assert still.seconds() == 50.0
    for sign in ("cpu", "read", "poll"):
        now["at"] += 50.0
        if sign == "poll":
            still.poll()
        else:
            now[sign] += 5
        assert still.seconds() == 0.0, sign
    now["at"] += 50.0
    now["cpu"] += 0.1  # the threads that beat
    assert still.seconds() == 50.0
    still.is_waiting = True
    assert still.seconds() == 0.0, "for others, which are judged"


@pytest.mark.slow
def test_a_stop_from_the_terminal_stops_the_worker_and_its_kill_is_a_kill(job, tmp_path):
    process, worker = begun(job, tmp_path / "run")
    log = tmp_path / "run/log.jsonl"
    process.send_signal(signal.SIGTSTP)
    until(lambda: worker.status() == psutil.STATUS_STOPPED)
    n_lines = log.read_bytes().count(b"\n")
    process.send_signal(signal.SIGCONT)
    until(lambda: log.read_bytes().count(b"\n") > n_lines)
    worker.kill()
    assert process.wait() == -signal.SIGKILL
