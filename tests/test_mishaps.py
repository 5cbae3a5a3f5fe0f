"""What else goes wrong while training: trackers that fail, memory that ends, crashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import farthing.train
from farthing.cli import main
from farthing.track import with_trackers
from farthing.train import train
from test_survive import job_in, quiet


def test_tensorboard_gets_losses_and_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(job_in(tmp_path, "run", report_to=["tensorboard"]), quiet)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert losses == [(row["step"], pytest.approx(row["loss"])) for row in log if "examples" in row]
    assert [event.step for event in events.Scalars("eval/perplexity")] == [4, 8, 12]


def test_a_tracker_that_fails_is_dropped_and_training_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    heard: list[tuple[str, dict[str, Any]]] = []
    tell = with_trackers(lambda kind, facts: heard.append((kind, facts)), ("tensorboard",), tmp_path / "board")
    (tmp_path / "board").write_text("a file where the folder should be")
    for step in (1, 2):
        tell("step", dict.fromkeys(("loss", "lr", "grad_norm", "usd"), 1.0) | {"step": step})
    assert [kind for kind, _ in heard] == ["step", "warning", "step"]
    assert "is off" in heard[1][1]["text"]


def fail_at(step: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = farthing.train.seed_everything, []

    def seed(*numbers: int) -> None:
        calls.append(numbers)
        if len(calls) == step:
            raise error
        real(*numbers)

    monkeypatch.setattr(farthing.train, "seed_everything", seed)


def test_memory_that_ends_is_said_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job_in(tmp_path, "run")
    fail_at(6, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), monkeypatch)
    assert main(["train", str(tmp_path / "run.yaml")]) == 1
    words = capsys.readouterr().err
    assert "per_device_train_batch_size" in words
    assert "Traceback" not in words
    monkeypatch.undo()
    assert main(["train", str(tmp_path / "run.yaml"), "--set", "train.per_device_train_batch_size=1"]) == 0
    assert "resumed" in capsys.readouterr().out


def test_a_crash_keeps_what_was_saved_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job_in(tmp_path, "run")
    fail_at(6, ZeroDivisionError("of our own"), monkeypatch)
    assert main(["train", str(tmp_path / "run.yaml")]) == 1
    words = capsys.readouterr().err
    assert "farthing: crashed: ZeroDivisionError: of our own" in words
    assert "the same command goes on" in words
    monkeypatch.undo()
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["state"] == "failed"
    assert receipt["steps"] == 5
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert "resumed" in capsys.readouterr().out
