"""Trackers by their own libraries: a run that goes on goes on in the same run of theirs, and no
step is in it twice.
"""

import json
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farthing.config.job import Job
from farthing.events import Evaluated, Note, Warned, figures_of
from farthing.train import trackers as track
from farthing.train.trackers import tracked
from mishaps import crash
from patience import until
from workshop import Heard, losses_of, make_job, read_json, step_taken, train


def crashed_and_continued(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Job:
    """A run of 10 steps that crashes in its seventh, goes on from the fourth, and ends."""
    job = make_job(
        folder,
        "llama",
        max_steps=10,
        save_steps=4,
        eval_steps=5,
        data={"eval_fraction": 0.2},
        report_to=[name],
    )
    monkeypatch.setattr(track, "PATIENCE_S", 300.0)
    crash(job, 7)
    heard = Heard()
    assert train(job, heard).state == "finished"
    assert heard.warnings == ""
    return job


def losses_in_log(job: Job) -> dict[int, float]:
    return dict(enumerate(losses_of(job), 1))


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a file of wandb: a header of 7 bytes, then LevelDB's log format, blocks of 32
    KiB with fragments.
    """
    at, whole = 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        whole = (b"" if kind in (1, 2) else whole) + content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole


def test_wandb_has_each_step_once(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    job = crashed_and_continued(tmp_path, monkeypatch, "wandb")
    steps, evaluated, ids = [], [], set[str]()
    for path in sorted(Path(job.output_dir).glob("wandb/offline-run-*/*.wandb")):
        for data in records_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            ids |= {record.run.run_id} - {""}
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "train/loss" in items:
                steps.append(items["step"])
                assert items["train/loss"] == pytest.approx(losses_in_log(job)[items["step"]])
                assert {"train/usd", "train/run_tokens"} <= set(items)
            if "eval/loss" in items:
                evaluated.append(items["step"])
    assert steps == list(range(1, 11))
    assert evaluated == [5, 10]
    assert len(ids) == 1, "one run, in two parts"


def test_mlflow_has_each_step_once(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    job = crashed_and_continued(tmp_path, monkeypatch, "mlflow")
    client = MlflowClient(f"sqlite:///{job.output_dir}/mlflow.db")
    experiment = client.get_experiment_by_name("farthing")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, 11))
    assert {p.step: p.value for p in history} == pytest.approx(losses_in_log(job))
    assert [point.step for point in client.get_metric_history(run.info.run_id, "eval/loss")] == [
        5,
        10,
    ]
    assert {"train/usd", "train/run_tokens"} <= set(run.data.metrics)
    assert run.data.params["method.name"] == "full"
    assert run.info.status == "FINISHED"


def test_trackio_has_each_step_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which its import reads
    pytest.importorskip("trackio")
    job = crashed_and_continued(tmp_path, monkeypatch, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("farthing")
    rows = [row for row in SQLiteStorage.get_logs("farthing", name) if "train/loss" in row]
    assert sorted(row["step"] for row in rows) == list(range(1, 11))
    assert {row["step"]: row["train/loss"] for row in rows} == pytest.approx(losses_in_log(job))


Everything = list[tuple[int, dict[str, float]]]


def noting(everything: Everything) -> Callable[[Any], Any]:
    """What opens a tracker that notes what it was told in a list."""
    return lambda *_: (lambda figures, step: everything.append((step, figures)), lambda: None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_each_step_once(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = crashed_and_continued(tmp_path, monkeypatch, "tensorboard")
    events = EventAccumulator(str(Path(job.output_dir) / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 11))
    assert {event.step: event.value for event in events.Scalars("train/loss")} == pytest.approx(
        losses_in_log(job)
    )
    assert [event.step for event in events.Scalars("eval/loss")] == [5, 10]


def test_steps_that_are_taken_again_are_told_once(tmp_path, monkeypatch):
    everything = []
    monkeypatch.setattr("farthing.train.trackers.OPENERS", {"tensorboard": noting(everything)})
    job = crashed_and_continued(tmp_path, monkeypatch, "tensorboard")
    assert [step for step, figures in everything if "train/loss" in figures] == list(range(1, 11))
    assert [step for step, figures in everything if "eval/loss" in figures] == [5, 10]
    (mark,) = (Path(job.output_dir) / "trackers").glob("tensorboard-*")
    assert read_json(mark) == {"train": 10, "eval": 10}
    mark.write_text("damaged")
    with tracked(Heard(), ("tensorboard",), Path(job.output_dir)) as emit:
        emit(replace(step_taken(), step=11))
    assert everything[-1][0] == 11, "what can't be read is no reason to say nothing"


def test_one_that_hangs_does_not_keep_another_from_its_figures(tmp_path, monkeypatch):
    is_over, heard = threading.Event(), Heard()

    everything = []

    def fails(*_):
        raise ConnectionError("no server")

    hangs = lambda *_: (is_over.wait(600), None)  # noqa: E731
    opens = {"tensorboard": noting(everything), "wandb": hangs, "mlflow": fails}
    monkeypatch.setattr("farthing.train.trackers.OPENERS", opens)
    monkeypatch.setattr(track.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(track, "PATIENCE_S", 0.5)
    with tracked(heard, ("tensorboard", "wandb", "mlflow"), tmp_path) as emit:
        for step in range(1, 6):
            emit(replace(step_taken(), step=step))
        # at the end they have half a second, which may pass without them
        until(lambda: len(everything) == 5)
        until(lambda: emit(Note("")) or heard.of(Warned))  # type: ignore[func-returns-value]
    assert [step for step, _ in everything] == [1, 2, 3, 4, 5]
    said = {warned.text.split()[1]: warned.text for warned in heard.of(Warned)}
    assert set(said) == {"wandb", "mlflow"}
    assert "within 0.5 s" in said["wandb"]
    assert "no server" in said["mlflow"]
    is_over.set()


def test_figures_are_numbers_with_dollars_and_useful_tokens():
    prefix, _, figures = figures_of(replace(step_taken(), loss=None, usd=1.5, run_tokens=70))
    assert prefix == "train"
    assert (figures["usd"], figures["run_tokens"]) == (1.5, 70)
    assert "loss" not in figures, "what is not a number is not drawn"
    metrics = {"loss": 1.0, "n_examples": 3, "per_class": {"a": {}}}
    assert figures_of(Evaluated(4, metrics, True)) == ("eval", 4, {"loss": 1.0, "n_examples": 3})
