"""farthing from Python: the same jobs, plans and receipts as the command line, as values."""

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import farthing
from farthing import api
from farthing.errors import InputError, JobError
from farthing.events import StepTaken
from workshop import job_file

DATED = {"n_examples": 1000, "mean_tokens": 200.0, "is_local": False}
JOB = {
    "task": "causal-lm",
    "model": "Qwen/Qwen2.5-0.5B",
    "data": "data.jsonl",
    "output_dir": "runs/first",
}


def test_a_job_is_a_file_a_mapping_or_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = job_file(tmp_path)
    job = api.load_job(path, ["train.seed=7"])
    assert job.train.seed == 7
    assert api.load_job(job) is job
    assert api.load_job(path, "train.seed=7") == job
    assert api.load_job(JOB).output_dir == str(tmp_path / "runs/first")
    with pytest.raises(InputError, match="overrides of a job"):
        api.load_job(job, ["train.seed=8"])
    with pytest.raises(JobError, match="learning_rat"):
        api.load_job({**JOB, "train": {"learning_rat": 1}})


def test_a_plan_is_a_value_with_its_page_and_its_table():
    plan = api.plan(JOB, gpu="H100-80GB", budget_usd="$900", **DATED)
    assert plan.best
    assert {choice["gpu"] for choice in plan.choices} == {"H100-80GB"}
    assert plan.to_json()["best"] == plan.best
    assert plan.best["name"] in str(plan)
    assert plan.best["name"] in repr(plan)
    assert plan.to_html().startswith("<!doctype html>")
    assert "<iframe" in plan._repr_html_()
    nothing = api.plan({**JOB, "limits": {"max_usd": 0.0001}}, **DATED)
    assert nothing.best is None
    assert nothing.rejected
    assert str(nothing)
    with pytest.raises(InputError, match="no_such: no such option"):
        api.plan(JOB, no_such=1)
    with pytest.raises(InputError, match="kind: can't be 'spt'"):
        api.plan(JOB, kind="spt")


def test_a_run_gives_its_receipt_and_goes_on_when_it_is_called_again(tmp_path):
    path = job_file(tmp_path, max_steps=3, limits={"max_usd": 1000})
    heard = []
    receipt = api.fine_tune(api.load_job(path, ["where.usd_per_hour=0.36"]), on_event=heard.append)
    assert (receipt.state, receipt.content.steps) == ("finished", 3)
    assert [event.step for event in heard if isinstance(event, StepTaken)] == [1, 2, 3]
    assert 0 < receipt.usd == receipt.to_json()["usd"]
    assert "where the time went" in str(receipt)
    assert "where the time went" in receipt._repr_html_()
    assert "finished" in repr(receipt)
    assert farthing.fine_tune(path, quiet=True).content.steps == 3
    with pytest.raises(InputError, match="a split such as"):
        api.fine_tune(api.load_job(path, ["data.train_split='train[:9]'", "output_dir=other"]))
    for ask, what in (
        (lambda: api.evaluate(receipt, limit=0), "0 is too few"),
        (lambda: api.fine_tune(None), "job: can't be None"),
        (lambda: api.fine_tune(path, on_event=5), "`on_event` is a int"),
        (lambda: api.generate(receipt, [7]), "row 1 is a int"),
        (lambda: api.generate(receipt, "dat.jsonl"), "no such file"),
        (lambda: api.export_model(receipt, "out", format="gguf", max_kl="x"), "max_kl: can't be"),
    ):
        with pytest.raises(InputError, match=what):
            ask()


def test_runs_of_several_threads_take_turns(tmp_path):
    heard = []

    def train(name):
        api.fine_tune(job_file(tmp_path / name, max_steps=2), on_event=lambda _: heard.append(name))

    with ThreadPoolExecutor() as pool:
        list(pool.map(train, "ab"))
    assert sorted(heard) in (heard, heard[::-1])


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_the_first_alone_tells(rank, tmp_path, monkeypatch):
    def run(job, emit, **_):
        emit(rank)
        return SimpleNamespace(state="finished", reason="", receipt=None)

    launched = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    for name, value in {**launched, "CUDA_VISIBLE_DEVICES": "4,7"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("farthing.train.run.train", run)
    heard = []
    api.fine_tune(job_file(tmp_path), on_event=heard.append)
    assert (heard, os.environ["CUDA_VISIBLE_DEVICES"]) == ([[0], []][rank], "47"[rank])


def test_the_package_lists_what_it_offers():
    assert {"plan", "fine_tune", "load_job", "Receipt"} <= set(dir(farthing))
    assert all(hasattr(farthing, name) for name in dir(farthing))
