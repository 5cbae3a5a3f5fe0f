"""The pre-flight list of a job, and a trial that really trains, is killed, resumes and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import farthing.train.trial
from command import Cli
from farthing.cli import main
from farthing.doctor import check_choices
from workshop import job_file, make_job


def choices(folder: Path, **keys: Any) -> dict[str, Any]:
    return {check.name: check for check in check_choices(make_job(folder, "llama", **keys))}


def test_the_list_answers_by_name_what_was_chosen_and_what_is_missing(tmp_path: Path) -> None:
    plain = choices(tmp_path)
    names = [
        "GPU choice",
        "spot",
        "method",
        "precision",
        "activation checkpointing",
        "micro-batch",
        "save interval",
    ]
    assert list(plain) == [*names, "store", "cap"]
    assert plain["cap"].state == "warning", "there is a price and no limit"
    assert plain["store"].state == "ok"
    keys: dict[str, Any] = {
        "method": "lora",
        "limits": {"max_usd": 5, "max_hours": 2},
        "save_steps": 7,
        "bf16": True,
    }
    found = choices(
        tmp_path,
        **keys,
        where={"spot": True, "gpu": ["L4"]},
        micro_batch_tokens=512,
        gradient_checkpointing=2,
    )
    assert "cap" not in found, "there is one"
    assert found["store"].state == "warning", "a spot machine and nothing that outlives it"
    assert "512 tokens at once" in found["micro-batch"].found
    assert "every 7 steps" in found["save interval"].found
    assert "every 2 layers" in found["activation checkpointing"].found
    assert found["GPU choice"].found.startswith("L4")
    assert "r 16" in found["method"].found
    assert found["precision"].found == "bf16"


def test_a_trial_goes_through_train_save_kill_resume_and_export(tmp_path: Path, cli: Cli) -> None:
    path = job_file(tmp_path, "llama", method="lora", pretrained=True, num_train_epochs=3)
    found = {check["name"]: check for check in cli.json("doctor", path, "--try", "12")["checks"]}
    trial = {
        name.removeprefix("trial: "): check["found"]
        for name, check in found.items()
        if name.startswith("trial")
    }
    assert list(trial) == ["train and save", "kill", "resume", "export", "bill of the trial"]
    assert "is safe" in trial["train and save"]
    assert "4 steps done over 1 interruption" in trial["resume"]
    assert trial["bill of the trial"].startswith("$")
    assert not (tmp_path / "run").exists(), "the job's own folder is not touched"


@pytest.mark.slow
def test_a_trial_that_fails_says_where(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, honest = job_file(tmp_path, "llama"), farthing.train.trial.begin

    def without_data(words: list[str], **pipes: Any) -> Any:
        (tmp_path / "data.jsonl").unlink(missing_ok=True)
        return honest(words, **pipes)

    monkeypatch.setattr(farthing.train.trial, "begin", without_data)
    found = {
        check["name"]: check for check in cli.json("doctor", path, "--try", "8", code=2)["checks"]
    }
    assert found["trial: train and save"]["state"] == "failed"
    assert "trial: resume" not in found
    assert main(["doctor", "--try", "8"]) == 2
    assert main(["doctor", str(path), "--try", "1"]) == 2
