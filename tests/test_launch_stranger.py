"""`farthing launch` as somebody uses it who has not read the manual: what is answered, and by which
exit code.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from farthing.cli import main
from farthing.launch.machines import MachineLedger
from farthing.launch.supervise import Launch
from launched import job_at

KEYS = (
    "RUNPOD_API_KEY",
    "VAST_API_KEY",
    "LAMBDA_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
)


@pytest.fixture
def job(tiny_folders, tmp_path, monkeypatch):
    """A job with a store that is a folder, and an environment without any key."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    here = {"where": {"device": "cpu", "usd_per_hour": 1}, "output_store": str(tmp_path / "store")}
    return job_at(tmp_path, tiny_folders, **here)


def answer(capsys: Any, job: Path, *words: str) -> tuple[int, str]:
    """The exit code, and what was said on both."""
    action = [word for word in words if word in ("status", "logs", "stop", "attach")]
    rest = [word for word in words if word not in action]
    code = main(["launch", *action, str(job), *rest])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("verb", ["logs", "stop", "attach"])
def test_what_was_never_launched_is_not_looked_for_at_a_provider(job, verb, capsys):
    code, said = answer(capsys, job, verb)
    assert (code, len(said.splitlines())) == (2, 2)
    assert "no launch is recorded in this folder or in the store" in said
    assert answer(capsys, job, "status") == (0, "nothing has been launched yet\n")


@pytest.mark.slow
def test_a_launch_is_looked_for_where_its_machine_is(job, capsys, monkeypatch):
    monkeypatch.setattr("farthing.launch.session.LOOK_S", 0.1)
    ledger = MachineLedger(job.parent / "run")
    ledger.note(
        "farthing-1-1",
        "asked",
        time.time(),
        number=1,
        target="runpod",
        on="runpod",
        usd_per_hour=1.0,
    )
    ledger.note("farthing-1-1", "created", time.time(), id="pod")
    code, said = answer(capsys, job, "stop", "--set", "output_store=s3://bucket/run")
    assert (code, "RUNPOD_API_KEY is not set" in said) == (2, True)
    too_little = (
        "stop",
        "--set",
        "output_store=s3://bucket/run",
        "--set",
        "limits.max_usd=0.000001",
        "--set",
        "data=./gone",
    )
    assert "RUNPOD_API_KEY is not set" in answer(capsys, job, *too_little)[1], (
        "needs neither an offer nor the data"
    )
    code, said = answer(capsys, job, "stop", "--on", "ssh:nowhere")
    assert (code, "farthing-1-1 of this launch is at runpod" in said) == (2, True)
    code, said = answer(capsys, job, "--yes", "--on", "ssh:nowhere")
    assert (code, "name it: --on runpod" in said) == (2, True), said
    assert [machine.state for machine in MachineLedger(job.parent / "run").open] == ["created"], (
        "not taken for gone"
    )


def test_another_folder_finds_the_launch_by_the_store(job, capsys, monkeypatch):
    ssh = job.parent / "ssh"
    ssh.write_text("#!/bin/sh\necho 'Connection reset by peer' >&2; exit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("FARTHING_SSH", str(ssh))
    monkeypatch.setattr(
        Launch, "_found", lambda self, machine: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    code, said = answer(
        capsys, job, "--yes", "--on", "ssh:a", "--set", f"output_dir={job.parent}/first"
    )
    assert (code, "STILL BILLED: farthing-" in said, "launch stop JOB" in said) == (
        75,
        True,
        True,
    )
    code, said = answer(capsys, job, "status", "--set", f"output_dir={job.parent}/second")
    assert code == 0
    assert "asked    machines by ssh a" in said, (
        "known by the store, and asked for over ssh without --on"
    )
    assert not (job.parent / "second" / "machines.jsonl").exists(), "who looks writes nothing"


def test_a_host_that_was_never_reached_is_refused_at_once(job, capsys, monkeypatch):
    ssh = job.parent / "ssh"
    ssh.write_text(
        "#!/bin/sh\necho 'ssh: Could not resolve hostname nowhere: Name or service not known' >&2;"
        " exit 255\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("FARTHING_SSH", str(ssh))
    code, said = answer(capsys, job, "--yes", "--on", "ssh:nowhere")
    assert code == 75
    assert "refused by machines by ssh: nowhere: ssh: Could not resolve hostname nowhere" in said
    assert MachineLedger(job.parent / "run").open == []


def test_a_cap_that_is_spent_is_a_limit_and_no_crash(job, capsys):
    ledger = MachineLedger(job.parent / "run")
    ledger.note(
        "farthing-1-1", "asked", 1e9, number=1, target="local", on="local", usd_per_hour=1.0
    )
    ledger.note("farthing-1-1", "gone", 1e9 + 8000)
    for words in (["--on", "local"], ["--yes", "--on", "local"]):
        code, said = answer(capsys, job, *words)
        assert (code, "limits.max_usd ($2.00) leaves 0.0 s" in said) == (
            3 if "--yes" in words else 2,
            True,
        )


def test_launches_are_found_in_and_below_this_folder_without_a_job(job, capsys, cli, monkeypatch):
    monkeypatch.chdir(job.parent)
    for verb in ("logs", "stop", "attach"):
        assert main(["launch", verb]) == 2
        assert f"to do: name one: farthing launch {verb} job.yaml" in capsys.readouterr().err
    assert main(["launch", "status"]) == 0
    assert capsys.readouterr().out == "nothing has been launched yet\n"
    ssh = job.parent / "ssh"
    ssh.write_text("#!/bin/sh\necho 'ssh: Could not resolve hostname' >&2; exit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("FARTHING_SSH", str(ssh))
    for name in ("one", "two"):
        more = ["--set", f"output_dir={name}", "--set", f"output_store={job.parent}/store-{name}"]
        assert main(["launch", str(job), "--yes", "--on", "ssh:a", *more]) == 75
        ledger = MachineLedger(job.parent / name)
        asked = {"number": 7, "target": "ssh", "on": "ssh:a", "usd_per_hour": 1.0}
        ledger.note(f"farthing-{name}-7", "asked", 1e9, **asked)
        ledger.note(f"farthing-{name}-7", "gone", 1e9 + (3600 if name == "one" else 7200))
        ledger.close()
    capsys.readouterr()
    found = cli.json("launch", "status")
    assert (found["kind"], found["usd"]) == ("farthing launches", 3.0)
    assert [Path(each["run"]).name for each in found["launches"]] == ["one", "two"]
    assert main(["launch", "status"]) == 0
    said = capsys.readouterr().out
    assert "one:\n" in said
    assert "farthing-two-7" in said
    (job.parent / "one" / "launch" / "launched.yaml").write_text("task: ?")
    assert main(["launch", "status"]) == 2
    said = capsys.readouterr()
    assert ("one/launch/launched.yaml" in said.err, "farthing-two-7" in said.out) == (True, True)
    assert main(["launch", "logs"]) == 2
    assert (
        "2 job files: one/launch/launched.yaml, two/launch/launched.yaml" in capsys.readouterr().err
    )
