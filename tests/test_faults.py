"""Faults that no other file has, injected into whole runs: full disks, late kills, stale lists, and
formats of the past.

Unless it says otherwise, what comes out is held to the bit against a run that was left alone.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import survive
from farthing.config.load import load_job
from farthing.errors import DiskFullError, SaveError
from farthing.events import Emit, Restored, StepTaken
from farthing.model.hardware import choose_numerics
from farthing.run.checkpoint import Checkpoints, saves_in
from farthing.storage.logs import SummedLines
from farthing.train.evaluate import Sweep
from farthing.train.run import train
from interrupted import job_in, quiet, when
from mirrored import QUICK, Model, delivered, folder_of_run, mirror_of, step_done, taken
from patience import until
from thinned import thinned
from workshop import Heard, file_system

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def alone(tmp_path):
    assert train(job_in(tmp_path, "alone"), quiet).exit_code == 0
    return survive.result_of(tmp_path / "alone")


def ends_like(alone: dict[str, Any], run: Path) -> bool:
    return survive.differences(alone, survive.result_of(run)) == []


# ---- disks ----


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB."""
    with file_system(tmp_path / "small disk", "size=8m") as folder:
        yield folder


def fill(folder: Path):
    """Leave no byte free."""
    with open(folder / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
    assert shutil.disk_usage(folder).free == 0


def once_committed(run: Path, step: int, action: Callable[[], None]) -> Emit:
    """Do something when the checkpoint of `step` is on the disk and no later one is begun: a save
    that is written in the background is told of only when the next one has begun."""

    def act():
        until(lambda: step in [save.step for save in saves_in(run / "checkpoints")])
        action()

    return when(StepTaken, step + 1, act)


def test_a_disk_that_is_full_in_the_middle_of_a_run_loses_nothing(small_disk, alone, tmp_path, cli):
    """Log, ledger and checkpoints meet a real ENOSPC; with room again, the same command resumes to
    the same bits.
    """
    job_in(tmp_path, "run")
    path = tmp_path / "run.yaml"
    path.write_text(
        path.read_text().replace("output_dir: run", f"output_dir: {small_disk / 'run'}")
    )
    tell = once_committed(small_disk / "run", 4, lambda: fill(small_disk))
    with pytest.raises((DiskFullError, SaveError), match="No space left"):
        train(load_job(path), tell)
    said = cli.err("train", path, code=75)
    assert "Traceback" not in said
    assert "make room" in said
    (small_disk / "filler").unlink()
    heard = Heard()
    assert train(load_job(path), heard).exit_code == 0
    assert [event.step for event in heard.of(Restored)] == [4]
    assert ends_like(alone, small_disk / "run")


@pytest.mark.parametrize("number", thinned([errno.EIO, errno.EROFS, errno.ESTALE, errno.EDQUOT], 4))
def test_a_log_that_can_not_be_written_ends_the_run_in_words(
    number, alone, tmp_path, monkeypatch, cli
):
    real = SummedLines.append

    def append(lines, row):
        if lines.path.name == "log.jsonl" and row["step"] == 6:
            raise OSError(number, os.strerror(number))
        real(lines, row)

    job = job_in(tmp_path, "run")
    with monkeypatch.context() as patch:
        patch.setattr(SummedLines, "append", append)
        said = cli.err("train", tmp_path / "run.yaml", code=75)
    assert f"the disk fails: {os.strerror(number)}; saved checkpoints are intact" in said
    assert "Traceback" not in said
    assert train(job, quiet).exit_code == 0
    assert ends_like(alone, tmp_path / "run")


# ---- memory ----


def test_an_evaluation_without_room_is_tried_again_and_then_with_half_as_much():
    asked, said = [], []

    def split(tokens, examples, n_tokens):
        asked.append(n_tokens)
        return np.array_split(examples, 512 // n_tokens)

    def look(part):
        if len(asked) < 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"n": [len(part)]}

    here = SimpleNamespace(numerics=choose_numerics("cpu", None, None), split=split)
    sweep = Sweep(here, None, np.arange(8), 512, warn=said.append)
    assert sweep.look(look)[1] == {"n": [1] * 8}
    assert asked == [512, 512, 256, 128, 64], "memory is given back, then halved"
    assert len(said) == 3
    assert "out of memory in the evaluation; it begins again with 256 tokens" in said[0]


# ---- stores ----


class Late(Model):
    """As stores of the past had it: data is in no list until long after it was written."""

    is_late = True

    def list(self, prefix):
        return {} if self.is_late and prefix == "data/" else super().list(prefix)


def test_what_no_list_has_is_in_no_commit(tmp_path):
    store, run, said = Late(), folder_of_run(tmp_path / "run"), []  # type: ignore[var-annotated]
    mirror = mirror_of(store, run, said, pace=QUICK)
    mirror.bring_back()
    assert not delivered(mirror, 1, step_done(run, 1), seconds=0.5)
    until(lambda: (mirror.check(), said)[1])  # type: ignore[func-returns-value]
    assert "did not arrive whole" in said[0]
    assert store.list("commits/") == {}
    store.is_late = False
    assert mirror.wait(60)
    mirror.close(5)
    assert taken(store, tmp_path / "empty") == 1


# ---- formats of the past ----


class Kept:
    """A part of the golden checkpoint."""

    def state(self):
        return (
            {
                "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
                "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            },
            {"step": 7, "best_metric": 0.25, "stopped_early": False, "best_step": None},
        )

    def restore(self, tensors, values):
        wanted, values_wanted = self.state()
        assert values == values_wanted
        assert tensors.keys() == wanted.keys()
        assert all(
            torch.equal(tensors[name], wanted[name]) and tensors[name].dtype == wanted[name].dtype
            for name in wanted
        )
        self.was_restored = True


def test_a_checkpoint_of_schema_1_is_read(tmp_path):
    shutil.copytree(GOLDEN / "checkpoints", tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints", "golden", 2, warn=print)
    assert checkpoints.newest_valid() == 7
    part = Kept()
    (folder,) = (tmp_path / "checkpoints").glob("step-*7*")
    checkpoints.restore(folder, {"part": part})
    assert part.was_restored
