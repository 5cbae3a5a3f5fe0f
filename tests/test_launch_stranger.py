"""`farthing launch` as somebody uses it who has not read the manual: what is answered, and by which
exit code.
"""

from pathlib import Path

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
    return job_at(tmp_path, tiny_folders, output_store=str(tmp_path / "store"))


@pytest.fixture
def ssh(job, monkeypatch):
    """Gives ssh that says this and fails."""

    def fails(says):
        program = job.parent / "ssh"
        program.write_text(f"#!/bin/sh\necho '{says}' >&2; exit 255\n")
        program.chmod(0o755)
        monkeypatch.setenv("FARTHING_SSH", str(program))

    return fails


def answer(capsys, job: Path, *words: str):
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


def test_another_folder_finds_the_launch_by_the_store(job, ssh, capsys, monkeypatch):
    def ctrl_c(self, machine):
        raise KeyboardInterrupt

    ssh("Connection reset by peer")
    monkeypatch.setattr(Launch, "_found", ctrl_c)
    first, second = (["--set", f"output_dir={job.parent}/{name}"] for name in ("first", "second"))
    code, said = answer(capsys, job, "--yes", "--on", "ssh:a", *first)
    assert code == 75
    assert "STILL BILLED: farthing-" in said
    assert "launch stop JOB" in said
    code, said = answer(capsys, job, "status", *second)
    assert code == 0
    assert "asked    machines by ssh a" in said, "known by the store, asked by ssh without --on"
    assert not (job.parent / "second/machines.jsonl").exists(), "who looks writes nothing"


def test_a_host_that_was_never_reached_is_refused_at_once(job, ssh, capsys):
    ssh("ssh: Could not resolve hostname nowhere: Name or service not known")
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
    for words, expected in (([], 2), (["--yes"], 3)):
        code, said = answer(capsys, job, "--on", "local", *words)
        assert (code, "limits.max_usd ($2.00) leaves 0.0 s" in said) == (expected, True)


def test_launches_are_found_in_and_below_this_folder_without_a_job(job, ssh, cli, monkeypatch):
    monkeypatch.chdir(job.parent)
    for verb in ("logs", "stop", "attach"):
        said = cli.err("launch", verb)
        assert "no launch was made in this folder" in said
        assert f"to do: name the job: farthing launch {verb} job.yaml" in said
    assert cli.out("launch", "status") == "nothing has been launched yet\n"
    ssh("ssh: Could not resolve hostname")
    for name in ("one", "two"):
        more = ["--set", f"output_dir={name}", "--set", f"output_store={job.parent}/store-{name}"]
        cli("launch", job, "--yes", "--on", "ssh:a", *more, code=75)
        ledger = MachineLedger(job.parent / name)
        asked = {"number": 7, "target": "ssh", "on": "ssh:a", "usd_per_hour": 1.0}
        ledger.note(f"farthing-{name}-7", "asked", 1e9, **asked)
        ledger.note(f"farthing-{name}-7", "gone", 1e9 + (3600 if name == "one" else 7200))
        ledger.close()
    with (job.parent / "one/machines.jsonl").open("a") as lines:
        lines.write("{\n")
    assert "machines.jsonl has 1 damaged line" in cli.err("launch", "status", code=0)
    kept = job.parent / "store-one/launch" / "farthing-one-7/log.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("step 3 of 4\n")
    printed = cli.out("launch", "one/launch/launched.yaml", "logs")
    assert printed.strip() == "step 3 of 4", "the store's words come before those of the host"
    (job.parent / "two").rename("zwei")
    found = cli.json("launch", "status")
    assert (found["kind"], found["usd"]) == ("farthing launches", 3.0)
    assert [Path(each["run"]).name for each in found["launches"]] == ["one", "zwei"]
    said = cli.out("launch", "status")
    assert "one:\n" in said
    assert "farthing-two-7" in said
    (job.parent / "one/launch/launched.yaml").write_text("task: ?")
    out, err = cli("launch", "status", code=2)
    assert ("one/launch/launched.yaml" in err, "farthing-two-7" in out) == (True, True)
    found = "2 job files: one/launch/launched.yaml, zwei/launch/launched.yaml"
    assert found in cli.err("launch", "logs")
