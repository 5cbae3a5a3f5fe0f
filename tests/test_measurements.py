"""What runs leave behind for later plans: whole lines, true numbers, no secrets, and never a failed
run.
"""

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

import farthing.train.run
from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.data.packing import MicroBatchCost
from farthing.events import Decided, Saved
from farthing.local.machine import local_machine
from farthing.local.measurements import (
    Measurement,
    Record,
    append_measurement,
    matching,
    read_measurements,
)
from farthing.model.forward import Forward
from farthing.model.hardware import hardware_key
from farthing.models.shapes import read_shape
from farthing.storage.logs import line_of
from interrupted import LeavesAt
from thinned import thinned
from workshop import TASK, Heard, job_file, make_job, read_json, rows_of, train

VALUES = {
    "str": "x",
    "int": 3,
    "float": 1.5,
    "bool": True,
    "dict[str, float]": {"mean": 1.0, "mean_of_squares": 1.0, "mean_target": 0.0},
    "dict[str, Any]": {"usd": 1},
    "list[list[int]]": [[1, 2]],
}


def some(**changes) -> Measurement:
    """A measurement with a value in every field."""
    fields = {
        f.name: VALUES[str(f.type)] for f in dataclasses.fields(Measurement) if f.name != "version"
    }
    return Measurement(**fields | changes)


def kept(job: Job) -> list[Measurement]:
    found = read_measurements(Path(job.cache_dir) / "measurements.jsonl")
    assert found.n_skipped == 0
    return found


# ---- the file ----


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "new" / "measurements.jsonl"
    assert read_measurements(path) == []
    wanted = [
        some(hardware="a"),
        some(hardware="b", when="é"),
        some(promised={"any": ["thing", None]}),
    ]
    for each in wanted:
        append_measurement(path, each)
    found = read_measurements(path)
    assert found == wanted
    assert found.n_skipped == 0
    assert path.stat().st_mode & 0o077 == 0
    assert read_measurements(tmp_path) == [], "a folder holds none"


def test_torn_and_foreign_lines_are_skipped_and_counted(tmp_path):
    path = tmp_path / "measurements.jsonl"
    good = dataclasses.asdict(some())
    bad = [
        "{",
        "[1]",
        "{}",
        b"\xff\xfe",
        good | {"version": 0},
        good | {"n_steps": -1},
        good | {"n_steps": 0},
        good | {"lengths": {"mean": 1.0}},
        good | {"n_steps": 1.5},
        good | {"compute_s": "1"},
        good | {"hardware": 5},
        good | {"spans": {"compute": "x"}},
        good | {"lengths": []},
        good | {"peak_bytes_by_step": [[1]]},
        {key: value for key, value in good.items() if key != "vocab"},
        json.dumps(good).replace("1.5", "NaN"),
        line_of(good).replace("1.5", "2.5"),
        "[" * 100_000,
    ]
    with open(path, "wb") as file:
        for line in bad:
            line = line_of(line) if isinstance(line, dict) else line
            file.write((line if isinstance(line, bytes) else str(line).encode()) + b"\n")
        file.write(line_of(good | {"a later field": 1}).encode() + b"\n\n")
        file.write(json.dumps(good).encode()[:100])  # torn by a kill
    append_measurement(path, some(hardware="after"))
    found = read_measurements(path)
    assert [each.hardware for each in found] == ["x", "after"]
    assert found.n_skipped == len(bad) + 1


def append_forty(path: Path, name: str):
    for number in range(40):
        append_measurement(path, some(hardware=f"{name}-{number}", when="w" * 3000))


def test_runs_that_end_together_tear_nothing(tmp_path):
    path, context = tmp_path / "measurements.jsonl", multiprocessing.get_context("fork")
    writers = [context.Process(target=append_forty, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = read_measurements(path)
    assert (found.n_skipped, len({each.hardware for each in found})) == (0, 120)


def test_a_long_file_is_read_from_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("farthing.local.measurements._MOST_BYTES", 10_000)
    path = tmp_path / "measurements.jsonl"
    for number in range(30):
        append_measurement(path, some(hardware=str(number)))
    found = read_measurements(path)
    assert found[-1].hardware == "29"
    assert 0 < len(found) < 30
    assert found.n_skipped == 0


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"hardware": "a"}, ["2026-03", "2026-02", "2026-01"]),
        ({"hardware": "a", "method": "lora"}, ["2026-02", "2026-01"]),
        ({"hardware": "c"}, []),
    ],
)
def test_those_that_match_newest_first(wanted, found):
    rows = [("a", "01", "lora"), ("a", "03", "full"), ("a", "02", "lora"), ("b", "04", "lora")]
    measured = [some(hardware=on, when=f"2026-{month}", method=by) for on, month, by in rows]
    assert [m.when for m in matching(measured, **wanted)] == found
    with pytest.raises(AttributeError):
        matching(measured, hardware="a", no_such_field=1)


def test_a_record_leaves_the_first_step_out():
    record = Record(loaded_bytes=5, before_model_bytes=2)
    for step in range(6):
        assert record.measured() is None, "too few steps say nothing"
        spans = {"compute": 10.0 + step, "optimizer": 0.5 * step, "idle": 99.0}
        record.step_done(2, 10, 12, 3, 1.5, spans, peak_bytes=100 + step)
    measured = record.measured()
    expected = {"n_steps": 5, "n_micro_batches": 10, "n_tokens": 50, "n_padded_tokens": 60}
    expected |= {"n_target_tokens": 15, "compute_s": 5.0, "optimizer_s": 2.5, "data_wait_s": 0.0}
    expected |= {"first_step_s": 1.5, "first_step_peak_bytes": 100}
    assert measured.items() >= expected.items()
    assert measured["peak_bytes_by_step"] == [[1, 100], [2, 101], [4, 103]]


# ---- real runs ----


@pytest.mark.parametrize("family", thinned(["llama", "t5", "bert"], 9))
def test_a_run_measures_what_it_did(family, tmp_path):
    job = make_job(
        tmp_path,
        family,
        n_rows=40,
        eval_rows=rows_of(family, 9, seed=1),
        method="lora",
        global_batch_size=8,
        per_device_train_batch_size=4,
        max_steps=8,
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        per_device_eval_batch_size=4,
        size={"hidden": 64},
    )
    heard = Heard()
    outcome = train(job, heard)
    assert "measured" not in heard.warnings
    (found,) = kept(job)
    receipt, decided = outcome.receipt, heard.of(Decided)[0]

    assert found.hardware == hardware_key(torch.device("cpu")) == local_machine().hardware
    config = read_json(tmp_path / "base" / "config.json")
    shape = read_shape(config, TASK[family], 3)
    log = (Path(job.output_dir) / "log.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, log) if "n_tokens" in row][1:]
    n_tokens = sum(row["n_tokens"] for row in rows)
    expected = {
        **{name: getattr(shape, name) for name in ("n_parameters", "hidden", "n_layers", "vocab")},
        **{"model_type": shape.model_type, "n_trainable": decided.n_trainable},
        **{"device": "cpu", "n_devices": 1, "precision": "fp32", "task": TASK[family]},
        **{"method": "lora", "lora_r": 16, "optim": "adamw_torch_fused", "first_layer": 0},
        **{"global_batch_size": 8, "checkpoint_every": 0, "is_packed": True, "n_steps": 7},
        **{"n_tokens": n_tokens, "n_padded_tokens": n_tokens, "n_eval_examples": 9},
        **{"n_target_tokens": sum(row["n_targets"] for row in rows), "n_evaluations": 2},
        **{"has_generated": family == "t5", "n_saves": 2},
        "save_bytes": heard.of(Saved)[-1].n_bytes,
    }
    values = dataclasses.asdict(found)
    assert {name: values[name] for name in expected} == expected
    assert found.lengths["n_examples"] == 40
    longest = found.lengths["longest"] + found.lengths["longest_target"]
    most = 4 * longest  # four of the longest, as the job says
    assert longest / 2 < found.largest_tokens <= found.micro_batch_tokens <= most

    spans = found.spans
    assert sum(spans.values()) <= receipt.wall_s + 0.01
    assert found.compute_s + found.first_step_s >= spans["compute"] - 0.01
    assert 0 < found.compute_s < spans["compute"]
    assert found.evaluation_s * 2 == pytest.approx(spans["evaluation"], rel=0.05)
    assert all(spans[name] > 0 for name in ("start_up", "checkpoint", "export"))
    assert 0 < receipt.checkpoints.held_up_s <= spans["checkpoint"] + 0.01
    assert found.before_model_bytes > 0
    assert found.first_step_peak_bytes <= found.peak_bytes
    assert [step for step, _ in found.peak_bytes_by_step] == [1, 2, 4, 8]
    of_run = read_json(Path(job.output_dir) / "measurements.json")
    assert of_run == [values]


@pytest.mark.slow
def test_the_padding_of_an_evaluation_is_counted(tmp_path, monkeypatch):
    sizes, to_device = [], Forward.to_device

    def seen(forward, arrays):
        if not torch.is_grad_enabled():
            sizes.append(arrays["input_ids"].size + arrays["labels"].size)
        return to_device(forward, arrays)

    monkeypatch.setattr(Forward, "to_device", seen)
    keys = {"per_device_eval_batch_size": 5, "size": {"hidden": 32, "layers": 1}}
    job = make_job(tmp_path, "t5", eval_rows=rows_of("t5", 33, seed=1), **keys)
    train(job)
    (found,) = kept(job)
    assert found.n_eval_padded_tokens == sum(sizes) / found.n_evaluations


@pytest.mark.slow
def test_every_attempt_is_measured_by_itself(tmp_path):
    job = make_job(tmp_path, n_rows=32, max_steps=30, save_steps=5)

    assert train(job, LeavesAt(step=3)).state == "interrupted"
    assert kept(job) == [], "two measured steps say nothing"
    assert train(job, LeavesAt(step=12)).state == "interrupted"
    assert train(job).state == "finished"
    first, second = kept(job)
    assert (first.n_steps, second.n_steps) == (8, 17)
    assert first.spans.get("export", 0) == 0 < second.spans["export"]
    assert len(read_json(Path(job.output_dir) / "measurements.json")) == 2
    train(job)  # it was finished already
    assert len(kept(job)) == 2


def test_the_run_is_cut_by_the_cost_that_its_plan_names(tmp_path, monkeypatch):
    asked = []
    real, cost = farthing.model.forward.split_padded, MicroBatchCost(4096, 64)

    def noted(*given, **named):
        asked.append(named["cost"])
        return real(*given, **named)

    monkeypatch.setattr("farthing.model.forward.split_padded", noted)
    monkeypatch.setattr("farthing.planner.search.ON_CPU", cost)
    path = job_file(tmp_path, "t5", max_steps=1, predict_with_generate=False)
    job = load_job(path, ["model.attn_implementation=eager"])  # padded
    train(job)
    assert set(asked) == {cost}
    settings = read_json(Path(job.output_dir) / "settings.json")
    assert (settings["least_tokens"], settings["more_tokens"]) == (4096, 64)


def test_a_run_is_cut_as_planned_and_keeps_what_was_promised_and_no_path(tmp_path):
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    job = make_job(tmp_path, global_batch_size=None, **cut)
    assert job.global_batch_size == 6
    train(job)
    (found,) = kept(job)
    promised = found.promised
    assert found.micro_batch_tokens == 2 * found.lengths["longest"]
    assert promised["settings"]["micro_batch_tokens"] == found.micro_batch_tokens
    plan = read_json(Path(job.output_dir) / "plan.json")
    assert promised | {"file": "plan.json", "sha256": ANY} == plan
    assert promised["wall_s"] > 0
    text = (Path(str(job.cache_dir)) / "measurements.jsonl").read_text()
    for secret in (str(tmp_path), "/", "jsonl", os.uname().nodename):
        assert secret not in text


def test_a_run_never_fails_for_its_measurement(tmp_path):
    job, heard = make_job(tmp_path), Heard()
    (Path(job.cache_dir) / "measurements.jsonl").mkdir(parents=True)
    assert train(job, heard).state == "finished"
    assert "the measurement could not be written" in heard.warnings
    assert read_measurements(Path(job.cache_dir) / "measurements.jsonl") == []
