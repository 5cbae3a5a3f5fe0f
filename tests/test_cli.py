"""The verbs as a person or a program calls them: what they print, what they write, and how they
exit.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml

import farthing.train.loop
import farthing.train.run
from command import sets
from farthing.cli import main
from farthing.config.load import load_job
from farthing.objectives.registry import objective_of
from workshop import job_file, log_of, losses_of, read_json, rows_of

# ---- init ----


@pytest.mark.parametrize("task", ["causal-lm", "seq2seq", "classification"])
def test_init_writes_a_starter_of_few_keys_that_is_a_valid_job(task, tmp_path, cli):
    path = tmp_path / "job.yaml"
    said = cli.out("init", path, "--task", task)
    job = load_job(path)
    assert job.task == task
    assert job.train.metric_for_best_model in objective_of(task).metrics
    assert f"wrote {path}" in said
    assert f"farthing doctor {path}" in said
    assert "#" in path.read_text()


def test_init_overwrites_nothing(tmp_path, cli):
    path = tmp_path / "job.yaml"
    path.write_text("mine")
    cli.out("init", path, code=2)
    assert path.read_text() == "mine"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/mine").touch()
    cli.out("init", tmp_path / "demo", "--demo", code=2)
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["mine"]
    cli.out("init", tmp_path / "nowhere/job.yaml", code=2)


def test_init_writes_a_demo_that_the_doctor_finds_fit(tmp_path, cli):
    written = cli.json("init", "--demo", tmp_path / "a demo")
    assert written["next"] == f"farthing train '{tmp_path}/a demo/job.yaml'"
    said = cli.out("doctor", written["written"])
    assert "format prompt/completion; 1,200 rows tried" in said
    assert f"next: {written['next']}" in said
    assert not (tmp_path / "a demo/run").exists(), "nothing was trained"


# ---- train ----


def test_train_with_json_prints_the_receipt_alone(tmp_path, cli):
    path = job_file(tmp_path, max_steps=3)
    receipt = cli.json("train", path)
    assert (receipt["kind"], receipt["state"], receipt["steps"]) == (
        "farthing receipt",
        "finished",
        3,
    )
    written = read_json(tmp_path / "run/receipt.json")
    assert (len(written.pop("sha256")), written.pop("file")) == (64, "receipt.json")  # its seal
    assert {**receipt, "written": ""} == {**written, "written": ""}


def test_a_limit_stops_with_3_and_a_higher_one_goes_on(tmp_path, cli):
    path = job_file(tmp_path, max_steps=4, limits={"max_usd": "$0.000001"})
    said = cli.out("train", path, code=3)
    assert "raise the limit and run the same command to continue" in said
    cli.out("train", path, code=3)
    assert "finished" in cli.out("train", path, "--set", "limits.max_usd=5")
    assert len(losses_of(load_job(path))) == 4


def test_a_new_run_whose_deadline_has_passed_is_refused(tmp_path, cli):
    path = job_file(tmp_path, max_steps=4, limits={"deadline": "2001-01-01T00:00:00"})
    error = cli.json("train", path, code=2)
    assert "the deadline 2001-01-01 00:00 leaves 0.0 s" in json.dumps(error)
    assert not (tmp_path / "run").exists()


def test_the_scaling_rule_is_offered_when_the_batch_changes(tmp_path, cli):
    path = job_file(tmp_path, max_steps=1, learning_rate=0.004, global_batch_size=8)
    said = cli.out("train", path, "--set", "train.global_batch_size=16")
    assert "the global batch is 16 instead of 8" in said
    assert "learning rate 0.008: --set train.learning_rate_batch_size=8" in said
    for number, more in enumerate(("learning_rate_batch_size=8", "learning_rate=0.008")):
        keys = "train.global_batch_size=16", f"train.{more}", f"output_dir={tmp_path / str(number)}"
        assert "linear scaling" not in cli.out("train", path, *sets(*keys))


# ---- what is not a number ----


def spoil(monkeypatch: pytest.MonkeyPatch, *steps: int):
    """Make the loss of these steps (from 1) not a number."""
    honest, take = farthing.model.forward.Forward.loss, farthing.train.loop.take_step
    now = {"step": 0}

    def take_step(attempt):
        now["step"] = attempt.progress.step + 1
        take(attempt)
        now["step"] = 0

    def spoilt(*args):
        loss, figures = honest(*args)
        return (loss * torch.nan if now["step"] in steps else loss), figures

    monkeypatch.setattr(farthing.train.loop, "take_step", take_step)
    monkeypatch.setattr(farthing.model.forward.Forward, "loss", spoilt)


def test_a_loss_that_is_not_a_number_is_skipped_and_its_samples_named(tmp_path, cli, monkeypatch):
    spoil(monkeypatch, 2, 4)
    path = job_file(tmp_path, max_steps=6, n_rows=12)
    said = cli.out("train", path)
    rows = [row for row in log_of(load_job(path)) if "examples" in row]
    assert [row["loss"] is None for row in rows] == [False, True, False, True, False, False]
    assert all(row["loss"] > 0 for row in rows if row["loss"] is not None)
    receipt = read_json(tmp_path / "run/receipt.json")
    assert receipt["skipped_steps"] == 2
    assert "2 steps whose loss or gradient was not a number" in said
    (line,) = (line for line in said.splitlines() if "step 2: the loss is not a number" in line)
    skipped = {row["step"]: row["samples"] for row in log_of(load_job(path)) if row.get("skipped")}
    assert len(skipped[2]) == 4  # the second and last step of an epoch of 12
    assert all(place.startswith(str(tmp_path / "data.jsonl:")) for place in skipped[2])
    assert skipped[2][0] in line


def test_too_many_in_a_row_end_the_run_with_1_and_words(tmp_path, cli, monkeypatch):
    spoil(monkeypatch, 2, 4, 5, 6)
    path = job_file(tmp_path, max_steps=9, max_skipped_steps=3)
    error = cli.err("train", path, code=1)
    assert "3 steps in a row had a loss or gradient that is not a number" in error
    assert f"{tmp_path / 'data.jsonl'}:" in error
    assert "lower learning_rate" in error
    assert len(losses_of(load_job(path))) == 6
    assert not (tmp_path / "run/model").exists()


# ---- report ----


def test_report_prints_the_receipt_again(tmp_path, cli):
    rows = rows_of("bert", 9, seed=1)
    cli.out("train", job_file(tmp_path, "bert", max_steps=2, eval_rows=rows))
    said = cli.out("report", tmp_path / "run")
    for words in ("forward and backward", "100 %", "accuracy", "class", "weather", "estimated"):
        assert words in said
    receipt = cli.json("report", tmp_path / "run")
    assert receipt["state"] == "finished"
    assert sum(span["seconds"] for span in receipt["spans"]) == pytest.approx(receipt["wall_s"])
    assert sum(span["usd"] for span in receipt["spans"]) == pytest.approx(receipt["usd"])


# ---- export ----


def test_export_refuses_what_it_can_not_do(tmp_path, cli):
    cli.out("train", job_file(tmp_path, max_steps=1))
    run = tmp_path / "run"
    said = cli.json("export", run, "--output", tmp_path / "a", "--format", "adapter", code=2)
    assert said["to_do"] == "use --format merged"
    said = cli.json("export", run, "--output", tmp_path / "base", code=2)
    assert said["error"] == "the folder is not empty"
    cli("export", run, "--output", tmp_path / "job.yaml/a", code=2)
    cli("export", tmp_path / "none", "--output", tmp_path / "a", code=2)
    shutil.rmtree(run / "model")
    said = cli.json("export", run, "--output", tmp_path / "a", code=2)
    assert said["error"] == "this run has exported no model yet"
    assert not (tmp_path / "a").exists()


def test_the_model_card_holds_metadata_metrics_and_no_path(tmp_path, cli):
    rows = [{**row, "label": row["label"] + "|x"} for row in rows_of("bert", 9)]
    cli.out("train", job_file(tmp_path, "bert", method="lora", rows=rows, eval_rows=rows))
    cli.out("export", tmp_path / "run", "--output", tmp_path / "merged")
    _, front, _ = (tmp_path / "merged/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    _, front, body = (tmp_path / "run/model/README.md").read_text().split("---\n", 2)
    meta = yaml.safe_load(front)
    assert (meta["pipeline_tag"], meta["library_name"]) == ("text-classification", "peft")
    assert {"farthing", "lora"} <= set(meta["tags"])
    receipt = read_json(tmp_path / "run/receipt.json")
    assert f"| accuracy | {receipt['metrics']['accuracy']:.4f} |" in body
    assert "| learning rate | 0.01, constant |" in body
    assert "| food\\|x | " in body
    assert str(tmp_path) not in body
    classes = body.split("| class |")[1].split("\n\n")[0].replace("\\|", "")
    assert {line.count("|") for line in classes.splitlines()[1:]} == {6}


# ---- doctor ----


def test_doctor_looks_at_the_machine(cli):
    found = cli.json("doctor")
    names = [check["name"] for check in found["checks"]]
    assert found["ok"]
    assert {"python", "torch", "cpu", "memory", "disk", "compiler", "liger_kernel"} <= set(names)
    assert "nothing failed" in cli.out("doctor")


def test_doctor_warns_of_rows_that_are_no_use_and_of_a_missing_price(tmp_path, cli):
    rows = [*rows_of("llama", 9), {"prompt": "x", "completion": None}]
    path = job_file(tmp_path, rows=rows, where={"usd_per_hour": 0})
    said = cli.out("doctor", path, "--set", "data.max_bad_rows=0.2")
    assert "10 rows tried; 1 can't be used" in said
    assert "1 of 10 rows can't be used" in cli.out("doctor", path, code=2), "as training would say"
    assert "where.usd_per_hour" in said
    (tmp_path / "run/model").mkdir(parents=True)
    assert "it is not known which run this is" in cli.out("doctor", path, code=2)
    (tmp_path / "run/model").rmdir()
    (tmp_path / "run/run.json").write_text("{")
    for verb in ("train", "train", "doctor"):
        assert "the ledger of this run is gone" in "".join(cli(verb, path, code=2))
    useless = job_file(tmp_path, rows=[{"prompt": "x", "completion": None}] * 3)
    assert "no row can be used: line 1: no `completion`" in cli.out("doctor", useless, code=2)


# ---- help ----


@pytest.mark.parametrize(
    ("verb", "rare"), [("plan", "--traces"), ("train", "--deepspeed"), ("launch", "--boot-limit")]
)
def test_rare_options_are_shown_when_all_are_asked_for(verb, rare, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def shown(option):
        with pytest.raises(SystemExit) as left:
            main([verb, option])
        assert left.value.code == 0
        return capsys.readouterr().out

    short = shown("--help")
    assert (rare in short, "--help-all" in short) == (False, True)
    assert len(short.splitlines()) <= (24 if verb == "plan" else 50)
    assert rare in shown("--help-all")
