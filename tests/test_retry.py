"""Attempts until one ends: what is begun again, what is not, and that it comes to an end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import survive
from farthing.config.load import load_job
from farthing.run.accounts import Account, as_line, read_ledger
from farthing.run.group import until_it_ends
from farthing.run.opening import opened
from farthing.run.supervisor import RunStanding, Supervisor, standing
from held import Held
from patience import until
from workshop import job_file, read_json, train


def line(attempt: int, step: int, committed: int = -1, notice=None) -> str:
    """A line of the ledger."""
    account = Account(attempt, str(attempt), step, "running", 1000.0 * attempt + step)
    account.usd_per_hour, account.step, account.spans = 1.0, step, {"compute": float(step)}
    account.note({"committed": committed, "notice": notice})
    return as_line(account)


class Run:
    """A run folder whose attempts are told how to end: (exit code, step, newest committed step)."""

    def __init__(self, folder, *ends, notice=None):
        self.folder, self.ends, self.notice = folder, list(ends), notice
        self.n_started = 0
        self.said = []
        self.slept_s = 0.0
        self.told_s = []
        self.got = []
        self.while_running = self.while_starting = lambda: None

    def start(self, number):
        """Begin an attempt."""
        self.told_s.append(float(os.environ["FARTHING_PAUSED_S"]))
        assert number == self.n_started
        self.n_started += 1
        assert self.n_started <= len(self.ends), "begun again once too often"
        self.while_starting()
        return self

    def wait(self):
        """Let it end."""
        code, step, committed = self.ends[self.n_started - 1]
        self.while_running()
        with open(self.folder / "ledger.jsonl", "a") as file:
            file.write(line(self.n_started, step, committed, self.notice))
        return code

    def send_signal(self, number, /):
        """Get a signal."""
        self.got.append(number)

    def sleep(self, seconds):
        """Wait between attempts."""
        self.slept_s += seconds

    def supervised(self, **tries):
        """The exit code of it all."""
        code = Supervisor(
            self.folder, self.start, self.said.append, sleep=self.sleep, **tries
        ).run()
        assert not self.ends[self.n_started :] or self.got, "it ended too soon"
        return code


@pytest.mark.parametrize(
    ("ends", "tries", "code", "said"),
    [
        *(([(code, 5, 5)], 3, code, []) for code in (0, 2, 3)),
        (
            [(75, 3, 3), (1, 8, 6), (-9, 12, 12), (75, 20, 20), (0, 30, 30)],
            1,
            0,
            [
                "interrupted after step 3",
                "ended with 1 after step 8",
                "killed by SIGKILL after step 12",
                "interrupted after step 20",
            ],
        ),
        (
            [(75, 4, 4), (-9, 6, 4), (75, 4, 4), (-9, 5, 4)],
            None,
            1,
            [
                "interrupted after step 4",
                "killed by SIGKILL after step 6",
                "interrupted after step 4",
                "3 attempts in a row saved nothing new",
            ],
        ),
        *(
            (
                [(1, step, step)] * 2,
                9,
                1,
                [f"ended with 1 after step {step}", "it crashed twice in a row"],
            )
            for step in (0, 7)
        ),
        (
            [(1, 7, 4), (1, 9, 8), (-9, 9, 8), (1, 9, 8), (0, 12, 12)],
            9,
            0,
            [
                "ended with 1 after step 7",
                "ended with 1 after step 9",
                "killed by SIGKILL after step 9",
                "ended with 1 after step 9",
            ],
        ),
    ],
    ids=[
        *("finished", "a mistake", "a limit", "progress each time", "nothing new"),
        *("a crash at the start", "a crash at a step", "other crashes"),
    ],
)
def test_what_is_begun_again_and_when_it_ends(ends, tries, code, said, tmp_path):
    run = Run(tmp_path, *ends)
    assert run.supervised(**({"tries": tries} if tries else {})) == code
    assert run.n_started == len(ends)
    assert [text[: len(words)] for text, words in zip(run.said, said, strict=True)] == said


def test_progress_begins_the_count_anew_and_pauses_grow_without_it(tmp_path):
    run = Run(tmp_path, (-9, 0, 0), (-9, 3, 2), (-9, 3, 2), (-9, 3, 2))
    assert run.supervised(tries=2) == 1
    assert run.slept_s == pytest.approx(2 + 1 + 2, abs=0.3)
    (tmp_path / "without").mkdir()
    run = Run(tmp_path / "without", *[(-70, 3, 0)] * 8)
    assert run.supervised(tries=8) == 1
    assert run.slept_s == pytest.approx(2 + 4 + 8 + 16 + 32 + 60 + 60, abs=1)
    assert run.said[-1] == (
        "8 attempts in a row saved nothing new; stopped after killed by signal 70"
    )


def test_nothing_is_begun_on_a_machine_that_goes(tmp_path):
    said = {"what": "AWS spot: terminate", "source": "aws", "is_certain": True}
    run = Run(tmp_path, (75, 7, 7), notice=said)
    assert run.supervised() == 75
    assert "AWS spot: terminate" in run.said[-1]
    for number, other in enumerate(({"is_certain": False}, {"source": "signal"})):
        (tmp_path / str(number)).mkdir()
        risk = Run(tmp_path / str(number), (75, 8, 8), (0, 9, 9), notice={**said, **other})
        assert risk.supervised() == 0


@pytest.mark.parametrize(
    ("number", "at"),
    [
        *((each, "while_running") for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
        (signal.SIGTERM, "while_starting"),
    ],
)
def test_a_signal_is_handed_on_and_nothing_is_begun_after_it(number, at, tmp_path):
    before = signal.getsignal(number)
    run = Run(tmp_path, (75, 7, 7), (0, 9, 9))
    setattr(run, at, lambda: signal.raise_signal(number))
    assert run.supervised() == 75
    assert run.got == [number]
    assert run.n_started == 1
    assert signal.getsignal(number) is before


def test_a_signal_between_two_attempts_ends_the_pause(tmp_path):
    run = Run(tmp_path, (-9, 7, 7), (0, 9, 9))

    def sleep(seconds):
        signal.raise_signal(signal.SIGTERM)

    run.sleep = sleep  # type: ignore[method-assign]
    run.got.append(0)
    assert run.supervised() == 75
    assert run.n_started == 1


def test_where_a_run_stands_is_read_from_its_ledger(tmp_path):
    assert standing(tmp_path) == RunStanding()
    lines = line(1, 9, 8) + line(2, 8) + line(2, 10)
    (tmp_path / "ledger.jsonl").write_text(lines + '{"attempt": 3, "st')
    assert standing(tmp_path) == RunStanding(step=10, committed=8)


@pytest.mark.parametrize(("code", "left_with"), [(0, 0), (3, 3), (-9, 1)])
def test_an_attempt_that_is_not_tried_again_leaves_with_its_code(code, left_with, tmp_path):
    run = Run(tmp_path)
    run.wait = lambda: signal.raise_signal(signal.SIGTERM) or code  # type: ignore[method-assign]
    assert (until_it_ends(run), run.got) == (left_with, [signal.SIGTERM])


# ---- with real processes ----


@pytest.mark.slow
def test_a_run_that_is_killed_is_begun_again_and_ends_with_the_same_bits(tmp_path):
    path = job_file(tmp_path, save_steps=2, probe=False, size={"dropout": 0.1})
    held = Held(tmp_path / "hold", "step-00000004")
    command = [sys.executable, "-m", "farthing", "train", str(path), "--retry", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=held.environment
    )
    until(lambda: held.is_there() or process.poll() is not None)
    os.kill(attempt_of(process.pid), signal.SIGKILL)
    out, words = process.communicate(timeout=300)
    assert process.returncode == 0, words
    receipt = json.loads(out)
    assert [attempt["ended"] for attempt in receipt["attempts"]] == ["killed", "finished"]
    assert receipt["steps"] == 6
    assert receipt["restart_s"] > 0
    assert "killed by SIGKILL" in words
    alone = load_job(path, [f"output_dir={tmp_path / 'alone'}"])
    assert train(alone).state == "finished"
    left, right = (survive.result_of(tmp_path / name) for name in ("run", "alone"))
    assert survive.differences(left, right) == []


@pytest.mark.slow
def test_when_the_supervisor_dies_its_child_saves_and_leaves(tmp_path):
    path = job_file(tmp_path, max_steps=100_000, save_steps=1000, probe=False)
    log = tmp_path / "run/log.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "farthing", "train", str(path), "--retry"], stdout=subprocess.DEVNULL
    )
    until(lambda: log.exists() and log.read_bytes().count(b"\n") > 5)
    child = attempt_of(process.pid)
    process.kill()
    process.wait()
    words = Path(f"/proc/{child}/cmdline")
    until(lambda: not words.exists() or not words.read_bytes())
    receipt = read_json(tmp_path / "run/receipt.json")
    assert receipt["state"] == "interrupted"
    assert receipt["notices"][-1]["what"] == "SIGTERM"


def attempt_of(pid: int) -> int:
    """The process of an attempt below its supervisor, which its guard watches."""
    import psutil

    (supervisor,) = psutil.Process(pid).children()
    (attempt,) = supervisor.children()
    return attempt.pid


def test_pauses_between_attempts_are_on_the_bill(tmp_path, monkeypatch):
    """The machine is there meanwhile, and paid for."""
    monkeypatch.setenv("FARTHING_PAUSED_S", "0")
    run = Run(tmp_path, (75, 3, 3), (75, 5, 5), (0, 8, 8))
    code = Supervisor(
        tmp_path, run.start, run.said.append, sleep=run.sleep, clock=lambda: run.slept_s
    ).run()
    assert code == 0
    assert run.told_s[0] == 0
    assert sum(run.told_s) == pytest.approx(run.slept_s)
    (tmp_path / "ledger.jsonl").unlink()
    for pause in ("12.5", "no number", "-3", "3599", "3600"):
        monkeypatch.setenv("FARTHING_PAUSED_S", pause)
        with opened(tmp_path, 3600.0) as attempt:
            attempt.ledger.end("failed")
        assert "FARTHING_PAUSED_S" not in os.environ, "it is of one attempt"
    accounts = read_ledger(tmp_path / "ledger.jsonl").accounts
    assert [account.spans.get("idle", 0.0) for account in accounts] == pytest.approx(
        [12.5, 0, 0, 3599, 0], abs=0.5
    )
    assert accounts[0].usd > 12.5
