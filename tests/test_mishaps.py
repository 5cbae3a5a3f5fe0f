"""What else goes wrong while training: trackers that fail, memory that ends, crashes."""

import threading

import pytest

from farthing.events import StepTaken
from farthing.report.receipt import build_receipt
from interrupted import job_in
from mishaps import fail_at
from workshop import Heard, make_job, room_for, steps_of, train


def test_a_tracker_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    is_over = threading.Event()
    hanging = {"tensorboard": lambda *_: (lambda *told: is_over.wait(600), lambda: None)}
    monkeypatch.setattr("farthing.train.trackers.OPENERS", hanging)
    monkeypatch.setattr("farthing.train.trackers.MOST_WAITING", 3)
    monkeypatch.setattr("farthing.train.trackers.PATIENCE_S", 0.2)
    heard = Heard()
    assert train(job_in(tmp_path, "run", report_to=["tensorboard"]), heard).exit_code == 0
    assert not is_over.is_set(), "the tracker still hangs"
    is_over.set()
    assert [event.step for event in heard.of(StepTaken)] == list(range(1, 13))
    assert "events behind" in heard.warnings


def test_memory_that_runs_out_halves_the_micro_batch_and_not_the_step(tmp_path, monkeypatch):
    keys = {"max_steps": 6, "n_rows": 64, "global_batch_size": 16}
    plain = make_job(tmp_path / "plain", **keys)
    train(plain)
    heard = Heard()
    job = make_job(tmp_path / "short", **keys)
    asked = room_for(200, monkeypatch)
    outcome = train(job, heard)
    assert outcome.state == "finished"
    assert max(asked[-3:]) <= 200 < max(asked)
    ours, theirs = steps_of(job), steps_of(plain)
    assert [row["examples"] for row in ours] == [row["examples"] for row in theirs]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-4)
    sizes = [event["micro_batch_tokens"] for event in outcome.receipt.out_of_memory]
    assert sizes
    assert sizes == sorted(set(sizes), reverse=True), "what had no room is not tried again"
    assert "out of memory; continuing" in heard.warnings


@pytest.mark.slow
def test_one_example_without_room_is_computed_again_in_parts_and_then_said(
    tmp_path, monkeypatch, cli
):
    job_in(tmp_path, "run")
    room_for(1, monkeypatch)
    words = cli.err("train", tmp_path / "run.yaml", code=1)
    assert "data.max_length" in words
    assert "Traceback" not in words
    events = build_receipt(tmp_path / "run").out_of_memory
    assert [event["checkpoint_every"] for event in events][-2:] == [2, 1]
    monkeypatch.undo()
    cli("train", tmp_path / "run.yaml")


def test_a_crash_keeps_what_was_saved_and_says_how_to_go_on(tmp_path, monkeypatch, cli):
    job_in(tmp_path, "run")
    fail_at(6, monkeypatch)
    words = cli.err("train", tmp_path / "run.yaml", code=1)
    assert "farthing: crashed: ZeroDivisionError: of our own" in words
    assert "the same command resumes" in words
    monkeypatch.undo()
    receipt = cli.json("report", tmp_path / "run")
    assert receipt["state"] == "failed"
    assert receipt["steps"] == 5
    assert "resumed" in cli.out("train", tmp_path / "run.yaml")
