"""Exit codes, one table for all verbs: 0 finished, 1 crash, 2 mistake, 3 stopped by a limit, 75
interrupted.
"""

import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import farthing.train.run
from command import in_python
from farthing.cli import main
from farthing.cli.parser import verb_module
from farthing.errors import (
    DataError,
    DiskFullError,
    FarthingError,
    FeedsUnavailableError,
    HardwareError,
    InputError,
    JobError,
    ModelError,
    NotFiniteError,
    OutOfMemoryError,
    RunBusyError,
    RunChangedError,
    RunDamagedError,
    RunInterruptedError,
    SaveError,
)
from mishaps import fail_at
from thinned import thinned
from workshop import job_file, read_json

COMMANDS = [
    "init x.yaml",
    "plan job.yaml",
    "train job.yaml",
    "probe job.yaml",
    "report run",
    "export run --output x",
    "prices",
    "doctor",
    "import x.yaml",
    "completion bash",
    "profile job.yaml",
    "launch job.yaml",
    "search job.yaml",
    "watch run",
    "runs",
    "eval run",
    "chat run",
    "predict run x.jsonl -o y.jsonl",
]
VERBS = {line.split()[0]: line.split() for line in COMMANDS}


def raises(error: BaseException) -> Callable[[Any], int]:
    def run(arguments):
        raise error

    return run


def test_the_table_has_every_verb(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    shown = {
        line.split()[0]
        for line in said.split("VERB")[-1].splitlines()
        if line.startswith("    ") and line[4] != " "
    }
    assert shown == set(VERBS)


ERRORS: dict[int, list[BaseException]] = {
    0: [BrokenPipeError()],
    1: [
        ZeroDivisionError("of our own"),
        ModuleNotFoundError("of our own", name="farthing.gone"),
        *(kind("x") for kind in (OutOfMemoryError, NotFiniteError, FarthingError)),
    ],
    2: [
        ModuleNotFoundError("No module named 'torch'", name="torch"),
        PermissionError(13, "Permission denied", "x"),
        JobError([InputError("wrong")]),
        *(kind("x") for kind in (InputError, DataError, ModelError, HardwareError)),
        *(kind("x") for kind in (RunChangedError, RunDamagedError, RunBusyError)),
        FeedsUnavailableError("no network"),
    ],
    75: [
        KeyboardInterrupt(),
        *(kind("x") for kind in (SaveError, DiskFullError, RunInterruptedError)),
    ],
}


@pytest.mark.parametrize("verb", thinned(VERBS, 6))
@pytest.mark.parametrize(
    ("error", "code"),
    [(error, code) for code, errors in ERRORS.items() for error in errors],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_what_a_verb_raises_is_its_exit_code(verb, error, code, monkeypatch, capsys):
    monkeypatch.setattr(verb_module(verb), "run", raises(error))
    if isinstance(error, BrokenPipeError) and verb in ("train", "probe", "launch", "search"):
        code = 1  # they go on when nobody reads: it is another pipe
    assert main(VERBS[verb]) == code
    words = capsys.readouterr().err
    assert ("Traceback" in words) == (code == 1 and not isinstance(error, FarthingError))
    if isinstance(error, FarthingError):
        assert error.what in words


def piped(command: str, folder: Path) -> tuple[list[int], str]:
    """The exit codes of both ends of `farthing ... | head -1`, and what was said to stderr."""
    line = (
        f"{shlex.quote(sys.executable)} -m farthing {command} | head -1 >/dev/null; echo"
        " ${PIPESTATUS[@]}"
    )
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=folder, timeout=300
    )
    return [int(code) for code in done.stdout.split()], done.stderr


@pytest.mark.parametrize(
    "command",
    thinned(["--help", "plan job.yaml", "report run", "prices --json"], 3),
)
def test_a_reader_of_stdout_that_stops_reading_causes_no_crash(command, bench):
    assert piped(command, bench) == ([0, 0], "")


@pytest.mark.slow
def test_training_goes_on_when_nobody_reads_and_keeps_its_exit_code(tmp_path):
    job_file(tmp_path, max_steps=8, logging_steps=1)
    codes, said = piped("train job.yaml", tmp_path)
    assert (codes[0], "Traceback" in said) == (0, False)
    assert read_json(tmp_path / "run/receipt.json")["steps"] == 8


def test_a_launch_of_several_jobs_asks_for_one(cli):
    assert "name one: farthing launch job.yaml" in cli.err("launch", "a", "b", "c")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pln", "there is no verb 'pln'; did you mean plan?"),
        ("xyz", "there is no verb 'xyz'\n"),
        ("", "which verb?"),
        ("--jsn", "no such option: --jsn"),
        ("plan --budgt 5 job.yaml", "no such option: --budgt; did you mean --budget?"),
        ("plan --budgt=5", "no such option: --budgt; did you mean --budget?"),
        ("prices updte", "'updte' is not one of update; did you mean update?"),
        ("init --task causal", "did you mean causal-lm?"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest_one(words, said, capsys):
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True), err
    if words in ("", "pln", "xyz"):
        assert all(f"\n    {verb}" in err for verb in VERBS), "the help comes with it"


def test_completion_knows_every_verb_and_its_options(cli):
    if importlib.util.find_spec("shtab") is None:
        assert "pip install 'farthing[completion]'" in cli.err("completion", "bash")
        return
    script = cli.out("completion", "bash")
    assert all(word in script for word in (*VERBS, "--samples-per-min", "--allow-restart"))


def test_a_beginning_of_an_option_and_words_behind_two_dashes_are_taken(cli):
    cli("init", "--sch")
    assert "no such option" not in cli.err("plan", "--", "--no-such-file")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A folder with a job that has run: job.yaml, run/."""
    folder = tmp_path_factory.mktemp("bench")
    path = job_file(folder, max_steps=2)
    assert main(["train", str(path), "--json"]) == 0
    return folder


def test_a_character_that_the_terminal_lacks_ends_nothing(bench):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = "from farthing.cli import entry; entry()"
    done = in_python(code, "report", str(bench / "run"), env=env)
    assert (done.returncode, "?" in done.stdout) == (0, True)


def test_train_has_every_code(tmp_path, monkeypatch, cli):
    path = job_file(tmp_path, max_steps=6, save_steps=2)
    real = farthing.train.step.Step.take

    def told(steps, step):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(steps, step)

    def trained(code, *more):
        cli("train", path, *more, code=code)

    with monkeypatch.context() as patch:
        patch.setattr("farthing.train.step.Step.take", told)
        trained(75)
    with monkeypatch.context() as patch:
        fail_at(2, patch)
        trained(1)
    spent = "--set", "limits.max_hours=0.001s"
    for code in (3, 3):
        trained(code, *spent)
    trained(2, "--set", "train.seed=7")
    for more in ((), spent):  # finished: the second time the run had finished already
        trained(0, *more)
    receipt = cli.json("report", tmp_path / "run")
    ended = [attempt["ended"] for attempt in receipt["attempts"]]
    assert ended == ["interrupted", "failed", "limit", "finished"], (
        "what was refused or had nothing to do is none"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_behind_a_page_or_stdout_can_be_tried_again(bench, cli, capsys, monkeypatch):
    assert "make room" in cli.err("report", bench / "run", "--html", "/dev/full", code=75)
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails
    monkeypatch.setattr("sys.stdout", full)
    assert main(["prices"]) == 75
    assert "make room" in capsys.readouterr().err
    with contextlib.suppress(OSError):
        full.close()
