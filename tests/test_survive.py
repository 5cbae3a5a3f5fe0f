"""Whole runs that are killed, stopped, damaged and continued end bit-identical to runs that were
left alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import survive
from farthing.errors import RunBusyError, RunDamagedError
from farthing.events import Decided, Evaluating, Restored, Saved, StepTaken, Tokenizing
from farthing.storage.files import only_writer
from farthing.train.run import train
from interrupted import LeavesAt, job_in, quiet, terminate, when
from thinned import thinned
from workshop import read_json


@pytest.fixture
def alone(tmp_path):
    job = job_in(tmp_path, "alone")
    assert train(job, quiet).exit_code == 0
    return survive.result_of(Path(job.output_dir))


def chains(*arguments: str) -> dict[str, Any]:
    """`bench/survive.py` in a process of its own: it forks, which is safe only where no thread has
    run yet.
    """
    command = [sys.executable, survive.__file__, "--json", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    result = json.loads(done.stdout)
    assert (done.returncode == 0) == (result["survived"] == result["seeds"])
    assert sum(result["kills_by_place"].values()) == result["kills"]
    assert (
        result["steps_repeated"]
        == result["steps_skipped"]
        == result["finished_runs_trained_further"]
        == 0
    )
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "how"),
    [(10, []), (1, ["--next-day"]), (2, ["--spawn"]), (5, ["--new-machine"])],
)
def test_a_chain_of_kills_changes_nothing(n, how):
    result = chains("--seeds", str(n), *how)
    assert [chain["differences"] for chain in result["chains"]] == [[]] * n
    assert result["kills"] > n
    assert how != ["--new-machine"] or result["kills_by_place"]["upload"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (StepTaken, 1),
        (StepTaken, 5),
        (Evaluating, None),
        (Tokenizing, None),
        (Saved, 4),
        (Decided, None),
    ],
)
def test_a_stop_signal_at_any_time_can_be_continued(kind, step, alone, tmp_path):
    shutil.rmtree(tmp_path / "cache")
    job = job_in(tmp_path, "stopped")
    outcome = train(job, when(kind, step, terminate))
    assert outcome.exit_code == 75
    assert outcome.receipt.state == "interrupted"
    if kind is StepTaken:
        assert outcome.receipt.steps == step, "the last step that was done is saved"
    assert train(job, quiet).exit_code == 0
    assert survive.differences(alone, survive.result_of(Path(job.output_dir))) == []


@pytest.mark.parametrize("how", thinned(["damaged", "removed"], 2))
def test_without_a_whole_checkpoint_a_restart_has_to_be_asked_for(how, alone, tmp_path):
    job = job_in(tmp_path, "lost")
    train(job, when(StepTaken, 7, terminate))
    newest = max((tmp_path / "lost/checkpoints").glob("step-*")) / "optimizer.safetensors"
    os.truncate(newest, newest.stat().st_size // 2)
    assert train(job, heard := LeavesAt(step=8)).exit_code == 75
    assert "step 7 is damaged" in heard.warnings
    assert [event.step for event in heard.of(Restored)] == [6], "it goes on from the one before"
    for folder in (tmp_path / "lost/checkpoints").glob("step-*"):
        if how == "damaged":
            (folder / "state.json").write_text("{}")
        else:
            shutil.rmtree(folder)
    with pytest.raises(RunDamagedError, match=r"none of|is gone"):
        train(job, quiet)
    assert train(job, quiet, allow_restart=True).exit_code == 0
    assert survive.differences(alone, survive.result_of(tmp_path / "lost")) == []


def test_two_processes_never_train_in_one_folder(tmp_path):
    job = job_in(tmp_path, "run")
    Path(job.output_dir).mkdir()
    with (
        only_writer(Path(job.output_dir)),
        pytest.raises(RunBusyError, match=f"another process.*pid {os.getpid()}"),
    ):
        train(job, quiet)


@pytest.mark.slow
def test_the_receipt_has_the_interval_of_its_checkpoints(tmp_path):
    planned = train(job_in(tmp_path, "planned", save_steps=None), quiet).receipt
    promise = read_json(tmp_path / "planned/plan.json")
    assert planned.checkpoints.interval_s == promise["interval_s"] > 0
