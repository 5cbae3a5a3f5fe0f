"""What comes after a run, from Python: evaluate, generate, export_model, history; rows too."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest

import farthing
import workshop
from farthing.errors import DataError, InputError
from thinned import thinned
from workshop import TASK, losses_of, make_folder, make_job, read_rows, rows_of


def job_of(folder: Path, family: str, data, **train) -> dict[str, Any]:
    """The keys of a small job of rows in memory."""
    make_folder(folder / "base", family, pretrained=True)
    return {
        "task": TASK[family],
        "model": {"model_name_or_path": folder / "base"},
        "data": data,
        "method": "full",
        "where": {"device": "cpu"},
        "output_dir": folder / "run",
        "cache_dir": str(folder / "cache"),
        "train": {"max_steps": 4, "global_batch_size": 8, "learning_rate": 0.01, **train},
    }


FORMS = {"list": list, "dataset": datasets.Dataset.from_list, "frame": pandas.DataFrame}


@pytest.mark.parametrize("form", thinned(FORMS, 9))
def test_rows_in_memory_train_and_are_asked_as_a_file_of_them(form, tmp_path):
    rows = rows_of("llama", 24)
    data = {"train": FORMS[form](rows), "eval": datasets.Dataset.from_list(rows[:6])}
    receipt = farthing.fine_tune(job_of(tmp_path, "llama", data), quiet=True)
    assert receipt.state == "finished"
    usual = {"max_steps": 4, "warmup_ratio": 0.03, "lr_scheduler_type": "linear"}
    base = {"model_name_or_path": str(tmp_path / "base")}
    of_file = make_job(tmp_path / "file", rows=rows, pretrained=True, model=base, **usual)
    workshop.train(of_file)
    logged = farthing.history(receipt)
    assert [row["loss"] for row in logged if "loss" in row] == losses_of(of_file)
    assert {"loss", "lr", "grad_norm", "n_tokens"} <= set(logged[0])
    assert [row["metrics"]["n_examples"] for row in logged if "metrics" in row][-1] == 6
    again = farthing.fine_tune(job_of(tmp_path, "llama", data), quiet=True)
    assert again.reason.startswith("the run had finished already")
    prompt = rows[0]["prompt"] * 20  # longer than a name of a file may be
    (answer,) = farthing.generate(receipt, prompt, max_new_tokens=5)
    assert [answer] == farthing.generate(receipt, [{"prompt": prompt}], max_new_tokens=5)
    assert answer["prompt"] == prompt, "a text is asked as the run was trained"


def test_values_of_numpy_and_pandas_become_plain(tmp_path):
    from farthing.data.memory import write_rows

    frame = pandas.DataFrame({"text": ["a", None], "label": [1, 2], "x": [0.5, float("nan")]})
    rows = [{"v": np.float32(2.0), "w": np.array([1, 2]), "n": pandas.NA, "t": (1, "b")}]
    read = [read_rows(write_rows(value, tmp_path)) for value in (frame, rows)]
    assert read[0] == [{"text": "a", "label": 1, "x": 0.5}, {"label": 2}]
    assert read[1] == [{"v": 2.0, "w": [1, 2], "t": [1, "b"]}]
    assert write_rows(rows, tmp_path) == write_rows(rows, tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([{"text": "a", "label": pandas.Timestamp("2026-01-01")}], "`label` is a Timestamp"),
        ([{"text": b"raw", "label": "a"}], "row 1: `text` is a bytes"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list([{"a": 1}])}), "several sets"),
        (pandas.DataFrame({"text": []}), "there are no rows"),
    ],
)
def test_rows_that_no_file_can_hold_are_refused(data, words, tmp_path):
    with pytest.raises(DataError, match=words):
        farthing.load_job(job_of(tmp_path, "bert", {"train": data}))


def test_sources_with_keys_of_their_own_are_still_sources(tmp_path):
    from farthing.tiny import write_jsonl

    path = write_jsonl(tmp_path / "a.jsonl", rows_of("llama", 4))
    job = farthing.load_job(job_of(tmp_path, "llama", {"train": [{"path": path, "weight": 2.0}]}))
    assert job.data.of_train[0].weight == 2.0


@pytest.mark.slow
def test_what_comes_after_a_run(tmp_path, cli):
    rows = rows_of("bert", 36)
    job = job_of(tmp_path, "bert", {"train": rows, "eval": rows[:9]}, learning_rate=0.001)
    receipt = farthing.fine_tune(job, quiet=True)
    run = str(tmp_path / "run")
    found = farthing.evaluate(receipt, base=True)
    assert found == cli.json("eval", run, "--base")
    assert farthing.evaluate(run, rows[:5])["n_examples"] == 5
    assert farthing.export_model(run, tmp_path / "out")["format"] == "merged"
    with pytest.raises(InputError, match="has no --bits"):
        farthing.export_model(run, tmp_path / "more", bits="q8_0")
    for call in (farthing.history, farthing.evaluate):
        with pytest.raises(InputError, match="no such run folder"):
            call(tmp_path / "nowhere")
