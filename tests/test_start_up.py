"""Start-up is paid for: what a process has cost when it is killed before its libraries are there,
and after its last step.

The slow import is a torch of our own that sleeps; twenty kills of real processes are in the long
tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import workshop
from command import in_python
from farthing.config.load import load_job
from farthing.errors import RunChangedError
from farthing.run.accounts import read_ledger
from patience import until
from workshop import job_file


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job file."""
    return job_file(tmp_path_factory.mktemp("job"), max_steps=100_000, save_steps=50, probe=False)


@pytest.fixture
def slow(tmp_path):
    """An environment where importing torch never ends, and leaves the file `importing`."""
    (tmp_path / "slow/torch").mkdir(parents=True)
    (tmp_path / "slow/torch/__init__.py").write_text(
        f"import ctypes, pathlib\npathlib.Path({str(tmp_path / 'importing')!r}).touch()\n"
        # no other thread runs meanwhile, as where a library is loaded
        "while True: ctypes.PyDLL(None).usleep(900_000)\n"
    )
    return {**os.environ, "PYTHONPATH": str(tmp_path / "slow")}


def train(
    job: Path, run: Path, *words: str, env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """`farthing train` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "farthing",
        "train",
        str(job),
        "--set",
        f"output_dir={run}",
        *words,
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)


def test_a_process_that_is_killed_while_it_imports_torch_is_on_the_bill_and_under_the_cap(
    job, slow, tmp_path
):
    run, importing = tmp_path / "run", tmp_path / "importing"

    def spent_s():
        (account,) = read_ledger(run / "ledger.jsonl").accounts
        return account.wall_s

    process = train(job, run, env=slow)
    until(importing.exists)
    seen_s = spent_s()
    until(lambda: spent_s() > seen_s + 0.15)
    process.kill()
    process.communicate()
    assert spent_s() > 0.2
    importing.unlink()
    capped = train(job, run, "--set", f"limits.max_hours={spent_s()}s", env=slow)
    _, words = capped.communicate(timeout=300)
    assert capped.returncode == 3, words
    assert not importing.exists(), "the cap is known before torch is"


@pytest.mark.slow
def test_asked_to_leave_while_it_imports_torch_a_process_says_so_on_the_ledger(job, slow, tmp_path):
    process = train(job, tmp_path / "run", env=slow)
    until((tmp_path / "importing").exists)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=300)
    assert process.returncode == 75, words
    assert read_ledger(tmp_path / "run/ledger.jsonl").accounts[0].state == "interrupted"


@pytest.mark.slow
def test_a_run_imports_what_it_uses_and_a_finished_one_is_answered_without_torch_at_no_cost(
    tmp_path,
):
    path = job_file(tmp_path, max_steps=2)
    run = tmp_path / "run"
    code = (
        f"import gc, sys, farthing.cli\ncode = farthing.cli.main(['train', {str(path)!r},"
        " *sys.argv[1:]])\nheavy = ['torch', 'transformers', 'transformers.trainer_utils', 'peft',"
        " 'datasets', 'pandas']\nprint(','.join(name for name in heavy if"
        " name in sys.modules) or '-', file=sys.stderr)\nprint(sum(each['collections'] for each in"
        " gc.get_stats()), file=sys.stderr)\nsys.exit(code)\n"
    )

    def again(*words):
        done = in_python(code, *words)
        *_, heavy, n_collections = done.stderr.split()
        return done.returncode, done.stdout, heavy, int(n_collections)

    returncode, _, heavy, n_collections = again("--json")
    assert (returncode, heavy) == (0, "torch,transformers"), "a full run has no use for the others"
    assert n_collections < 100, "garbage was looked for while libraries were imported"
    before = {
        name: (run / name).read_bytes()
        for name in ("ledger.jsonl", "receipt.json", "run.json", "log.jsonl")
    }
    returncode, printed, heavy, _ = again("--json")
    assert (returncode, heavy) == (0, "-")
    assert json.loads(printed)["usd"] == pytest.approx(
        json.loads(before["receipt.json"])["usd"], rel=0.05
    )
    assert before == {name: (run / name).read_bytes() for name in before}
    data = tmp_path / "data.jsonl"
    os.utime(data)  # not as it was: looked at in full, found the same, and still nothing is added
    assert workshop.train(load_job(path)).state == "finished"
    assert [a.state for a in read_ledger(run / "ledger.jsonl").accounts] == ["finished"]
    data.write_text(data.read_text() + data.read_text().splitlines()[0] + "\n")
    for words in ([], ["train.learning_rate=0.02"]):
        with pytest.raises(RunChangedError):  # though it is finished
            workshop.train(load_job(path, words))
    assert [a.state for a in read_ledger(run / "ledger.jsonl").accounts] == ["finished"]
