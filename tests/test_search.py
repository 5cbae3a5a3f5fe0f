"""Searches: halving, drawn settings, bills, and a search that is killed and resumed."""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from farthing.cli.parser import parse
from farthing.config.job import SearchSection
from farthing.config.load import load_job
from farthing.errors import InputError, JobError, LimitError, RunChangedError, RunDamagedError
from farthing.launch.machines import MachineLedger
from farthing.metrics import stderr_of_mean
from farthing.report.runs import row_of
from farthing.search.bill import priced
from farthing.search.curve import gain
from farthing.search.halving import best_score, interval, least_difference, paired, ranked, rungs_of
from farthing.search.pool import Worker, WorkerDiedError
from farthing.search.receipt import leave_receipt_of_copy
from farthing.search.record import SearchRecord
from farthing.search.report import in_words
from farthing.search.space import draw, n_choices, refuse_choices
from farthing.search.worker import train_segment
from patience import until
from searching import SEARCH, job_of, searched, told, weights_of
from small_models import make_model_folder


def test_rungs_are_powers_of_the_factor_and_end_at_the_whole():
    rungs = rungs_of(3, 0.1, 27)
    assert rungs.fractions == pytest.approx((1 / 9, 1 / 3, 1))
    assert rungs.n_trials(27) == [27, 9, 3]
    assert rungs.full_runs(27) == pytest.approx(27 / 9 + 9 * (2 / 9) + 3 * (2 / 3))
    assert len(rungs_of(3, 0.1, 4).fractions) == 2
    assert rungs_of(2, 1.0, 8).fractions == (1.0,)


def test_what_is_no_number_loses():
    scores = {0: 0.5, 1: None, 2: float("nan"), 3: 0.9, 4: 0.5}
    assert ranked(scores, greater_is_better=True) == [3, 0, 4]
    assert ranked(scores, greater_is_better=False) == [0, 4, 3]
    rows = [{"loss": 2.0}, {"loss": 1.0}, {"loss": 3.0}]
    assert best_score(rows, "loss", greater_is_better=False, best=True) == 1.0
    assert best_score(rows, "loss", greater_is_better=False, best=False) == 3.0
    assert best_score([*rows, {"loss": None}], "loss", greater_is_better=False, best=True) is None


def test_scores_have_the_noise_of_their_evaluation_set():
    row = {"accuracy": 0.8, "loss": 1.5, "loss_stderr": 0.1, "f1": 0.8, "n_examples": 100}
    assert interval("accuracy", row) == pytest.approx((0.711, 0.867), abs=1e-3)
    assert interval("loss", row) == pytest.approx((1.304, 1.696), abs=1e-3)
    assert interval("loss", {**row, "n_examples": 1}) is None
    assert interval("rewards/margins", {"rewards/margins": 2.0, "n_examples": 100}) is None
    low, high = interval("f1", {**row, "confusion": [[40, 10], [10, 40]]}) or (0.0, 0.0)
    assert 0.70 < low < 0.74
    assert 0.86 < high < 0.89
    assert stderr_of_mean(np.array([1.0, 2.0, 3.0]), np.ones(3)) == pytest.approx(1 / 3**0.5)


def test_the_same_examples_tell_settings_apart_that_their_intervals_do_not():
    hits = [1.0] * 70 + [0.0] * 30
    better = [1.0] * 76 + [0.0] * 24
    ones = [1.0] * 100
    low, high = paired((better, ones), (hits, ones)) or (0.0, 0.0)
    assert (low, high) == pytest.approx((0.0132, 0.1068), abs=1e-3)
    assert paired((better, ones), (hits, [1.0] * 99)) is None
    assert paired(([1.0], [1.0]), ([0.0], [1.0])) is None


def test_least_difference_of_two_shares():
    assert least_difference(400) == pytest.approx(0.0554, abs=1e-4)


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_settings_follow_from_the_seed_and_what_was_scored(sampler):
    vary = {"train.learning_rate": [1e-4, 1e-3, 1e-2], "method": ["full", "lora"]}
    section = SearchSection.model_validate({"vary": vary, "sampler": sampler, "seed": 3})
    assert n_choices(section) == 6
    drawn = []
    for number in range(6):
        settings = draw(section, number, drawn, greater_is_better=False)
        assert settings == draw(section, number, drawn, greater_is_better=False)
        assert settings is not None
        assert settings not in [each for each, _ in drawn]
        drawn.append((settings, None if number == 2 else 1.0 / (number + 1)))
    assert draw(section, 6, drawn, greater_is_better=False) is None


def test_a_range_is_drawn_within_its_bounds():
    vary = {"method.lora_r": {"low": 4, "high": 64, "log": True}}
    section = SearchSection.model_validate({"vary": vary, "sampler": "random"})
    drawn = [draw(section, number, [], greater_is_better=True) for number in range(20)]
    ranks = [each["method.lora_r"] for each in drawn if each]
    assert all(isinstance(rank, int) and 4 <= rank <= 64 for rank in ranks)
    assert len(set(ranks)) > 5


def test_a_power_law_is_found_again_and_not_taken_further_than_twice():
    points = [(n, 0.9 - 2.0 * n**-0.5) for n in (250, 500, 1000)]
    found = gain(points, 2000, [0.0, 0.0, 0.0], greater_is_better=True)
    assert found.likely == pytest.approx(2.0 * (1000**-0.5 - 2000**-0.5), rel=0.05)
    noisy = gain(points, 2000, [0.02, 0.02, 0.02], greater_is_better=True)
    assert noisy.low < found.likely < noisy.high
    assert gain(points, 2001, [0.0, 0.0, 0.0], greater_is_better=True) is None
    assert gain(points[:2], 600, [0.0, 0.0], greater_is_better=True) is None  # three points


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"vary": {"train.learning_rat": [1]}}, "did you mean train.learning_rate"),
        ({"vary": {"limits.max_usd": [1]}}, "no key that can vary"),
        ({"vary": {"train.eval_steps": [1]}}, "decides how trials are scored"),
        ({"vary": {"train.learning_rate": []}}, "name at least one"),
        ({"vary": {"train.learning_rate": {"low": 3, "high": 1}}}, r"rate`: low 3 is not below"),
        ({"vary": {"train.learning_rate": {"low": 3, "hi": 4}}}, r"rate\.high` is missing"),
        ({"vary": {"data": ["./a.jsonl", "./b.jsonl"]}}, "holds out other examples"),
        ({"vary": {"train.seed": [1, 2]}}, "holds out other examples"),
        ({"sampler": "grid", "vary": {"train.weight_decay": {"low": 0, "high": 0.1}}}, "grid"),
        ({"vary": {"method": ["full"]}, "data_fraction": [0.5]}, "two shares"),
        ({"data_fraction": [0.5, 0.2], "stop_at": {"loss": 1}}, "exclude each other"),
    ],
)
def test_a_section_that_can_not_be_searched_is_refused(section, words, tmp_path):
    with pytest.raises(JobError, match=words):
        load_job(job_of(tmp_path, section))


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ({"data.max_length": [8, 16]}, "losses under different"),
        ({"data.max_eval_samples": [8, 16]}, "scored on different examples"),
        ({"data": [{"train": "a", "eval": "b"}, {"train": "a"}]}, "scored on different examples"),
        ({"train.seed": [8, 16], "data.max_train_samples": [8, 16]}, ""),
    ],
)
def test_scores_of_other_examples_are_not_compared(vary, words, tmp_path):
    with pytest.raises(JobError, match=words) if words else nullcontext():
        load_job(job_of(tmp_path, {"vary": vary}, data={"eval": "./data.jsonl"}))


def refused(path: Path, words: str):
    """Such a search is; another choice may take the same folder."""
    with pytest.raises(InputError, match=words):
        searched(path)
    assert not (path.parent / "run").exists()


@pytest.mark.slow
def test_losses_of_other_tokens_are_not_compared(tmp_path):
    make_model_folder(tmp_path / "other", ["of other words"])
    refused(job_of(tmp_path, {"vary": {"model": ["./base", "./other"]}}), "other tokens")


def test_the_best_settings_win(tmp_path, cli):
    path, folder = job_of(tmp_path), tmp_path / "run"
    outcome = searched(path)
    receipt = outcome.receipt
    assert (outcome.state, outcome.exit_code) == ("finished", 0)
    assert receipt["winner"]["settings"] == {"train.learning_rate": 3.0e-3}
    assert receipt["winner"]["fraction"] == 1.0
    for command in receipt["next"]:
        parse(command.split()[1:])
    by_rate = {each["settings"]["train.learning_rate"]: each for each in receipt["trials"]}
    failed = by_rate[1.0e9]
    if failed["state"] == "diverged":
        assert failed["reason"] == "its loss is not a number"
    assert failed["state"] in ("failed", "diverged")
    assert failed["score"] is None
    assert failed["usd"] > 0
    assert [each["n_trials"] for each in receipt["rungs"]] == [4, 2, 1]
    in_rungs = sum(each["usd"] for each in receipt["rungs"])
    assert in_rungs == pytest.approx(receipt["usd_in_trials"])
    assert receipt["usd_in_trials"] <= receipt["usd"] <= 5
    assert receipt["front"][-1] == receipt["winner"]["trial"]
    page = (folder / "search.html").read_text()
    assert "Learning curves" in page
    assert "0.003" in page
    assert load_job(folder / "winner.yaml").train.learning_rate == 3.0e-3
    winner = f"trials/{receipt['winner']['trial']:03d}"
    assert list(weights_of(folder)) == [f"{winner}/model/model.safetensors"]
    said = cli.err("export", folder, "--output", tmp_path / "exported")
    assert f"the best is {folder / winner}" in said

    ledger = (folder / "ledger.jsonl").read_bytes()
    heard = []
    assert searched(path, "search.trials=2", tell=heard.append).receipt == json.loads(
        json.dumps(receipt)
    )
    assert "began with 4 trials" in heard[0]["warning"]
    assert row_of(folder, 0.0, name="run").usd == receipt["usd"]  # seconds of the closing too
    assert (folder / "ledger.jsonl").read_bytes() == ledger  # asking again costs nothing
    with pytest.raises(RunChangedError, match=r"train\.seed"):
        searched(path, "train.seed=7")
    whole = (folder / "search.json").read_text()
    (folder / "search.json").write_text(whole.replace('"n_trials": 4', '"n_trials": 5'))
    assert "search can't be read" in cli.err("report", folder)
    (folder / "search.json").unlink()  # as after a kill
    assert "`farthing search` with its job continues it" in cli.out("report", folder)


@pytest.mark.slow
def test_a_search_that_is_capped_and_killed_ends_as_one_left_alone(tmp_path):
    path = job_of(tmp_path / "straight")
    receipt = searched(path).receipt
    cap_usd = 0.009  # 9 seconds: less than all trials take
    other = job_of(tmp_path / "other", limits={"max_usd": cap_usd})
    stopped = searched(other)
    assert (stopped.state, stopped.exit_code) == ("limit", 3)
    assert stopped.receipt["usd"] <= cap_usd
    for n_lines in (3, 7):
        kill_when(other, n_lines)
    resumed = searched(other, "limits.max_usd=5")
    assert told(resumed.receipt) == told(receipt)
    assert resumed.receipt["winner"]["trial"] == receipt["winner"]["trial"]
    assert weights_of(tmp_path / "other/run") == weights_of(tmp_path / "straight/run")


def kill_when(path: Path, n_lines: int):
    """Kill a search without notice when its record has so many lines."""
    words = ["search", str(path), "--set", "limits.max_usd=5"]
    child = subprocess.Popen(
        [sys.executable, "-m", "farthing", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    record = path.parent / "run/search.jsonl"
    until(
        lambda: (
            child.poll() is not None
            or (record.exists() and record.read_bytes().count(b"\n") >= n_lines)
        ),
        600.0,
    )
    child.kill()
    child.wait()


def bill_of(path: Path, *overrides: str):
    return priced(load_job(path, list(overrides)), str(path))


def test_a_search_is_priced_before(tmp_path):
    path = job_of(tmp_path)
    bill = bill_of(path)
    found = bill.of(bill.n_trials(27))
    assert found["trials"] == 4
    assert [each["trials"] for each in found["rungs"]] == [4, 2, 1]
    assert found["full_trainings"] == pytest.approx(4 / 4 + 2 / 4 + 1 / 2)
    assert found["here"]["usd"] > 0
    poor = bill_of(path, "limits.max_usd=0.001")
    assert "would stop" in " ".join(poor.of(4)["warnings"])
    both = bill_of(path, "where.gpus=2").of(4)
    assert both["here"]["hours"] < found["here"]["hours"]  # trials side by side
    assert {row["kind"] for row in found["machines"]} >= {"here", "spot", "on-demand"}
    for bill, size in ((found, "1x"), (both, "2x")):
        names = [row["name"] for row in bill["machines"] if row["kind"] == "spot"]
        assert all(name.startswith(size) for name in names)


def test_models_that_are_tried_one_by_one_have_a_winner_each_on_the_bill(tmp_path):
    make_model_folder(tmp_path / "large", ["a b c"], hidden=128, layers=2)
    vary = {"model": ["./large", "./base"], "train.learning_rate": [1.0e-2, 1.0e-9]}
    path = job_of(tmp_path, {"vary": vary})
    for overrides, n_trials in (([], [12, 4, 1]), (["search.stop_at={loss: 0.1}"], [12, 4])):
        rungs = bill_of(path, *overrides).of(12)["rungs"]
        assert [each["trials"] for each in rungs] == n_trials


def test_a_search_is_refused_where_one_run_is_wanted(tmp_path, cli):
    path = job_of(tmp_path)
    assert "search" in cli.err("train", path)
    assert not (tmp_path / "run/trials").exists()


@pytest.mark.slow
def test_the_smaller_model_that_is_good_enough_ends_the_search(tmp_path):
    section = {
        "vary": {"model": ["./large", "./base"], "train.learning_rate": [1.0e-2, 1.0e-9]},
        "trials": 4,
        "stop_at": {"accuracy": 0.1},
    }
    keys = {"family": "bert", "n_rows": 150, "metric_for_best_model": "accuracy", "max_steps": 40}
    make_model_folder(tmp_path / "large", ["a b c"], "bert", hidden=128, layers=2)
    path = job_of(tmp_path, section, **keys, data={"eval_fraction": 0.4})
    outcome = searched(path)
    winner = outcome.receipt["winner"]
    assert winner["settings"]["model"] == "./base"
    (confirmed,) = outcome.receipt["confirmed"]
    assert confirmed["score"] >= 0.1
    assert confirmed["n_examples"] == 30
    assert winner["n_examples"] == 30
    assert winner["interval"][0] < winner["score"]
    small, large = outcome.receipt["models"]
    assert (small["model"], small["trial"]) == ("./base", winner["trial"])
    unknown = {"trial": None, "score": None, "usd_per_million_tokens": None}
    assert large.items() >= ({"model": "./large"} | unknown).items()  # no classifier is served
    assert "./large" in next(line for line in in_words(outcome.receipt) if "not tried" in line)

    vary = {"train.learning_rate": [1.0e-2, 1.0e-9], "data.max_train_samples": [90]}
    part = {"vary": vary, "data_fraction": [0.25, 0.5]}
    path = job_of(tmp_path, part, **keys, data={"eval": "./data.jsonl"}, output_dir="./more")
    receipt = searched(path).receipt
    assert sorted(each["n_rows"] for each in receipt["trials"] if each["n_rows"]) == [22, 45]
    (rows,) = receipt["gains"]  # a curve of one evaluation says nothing of epochs
    assert (rows["of"], rows["more"]) == ("rows", 90)
    assert any("90 more rows should add" in line for line in in_words(receipt))
    of_loss = in_words({**receipt, "metric": "loss", "greater_is_better": False})
    assert any("90 more rows should lower the loss by" in line for line in of_loss)
    assert rows["low"] <= rows["likely"] <= rows["high"] <= 1 - receipt["winner"]["score"]


@pytest.mark.slow
def test_a_winner_that_has_stopped_early_is_whole(tmp_path):
    rates = [0.01 + n / 100 for n in range(9)]
    stops = {"early_stopping_patience": 1, "early_stopping_threshold": 9, "max_steps": 18}
    path = job_of(tmp_path, {"vary": {"train.learning_rate": rates}, "trials": 9}, **stops)
    receipt = searched(path, n_at_a_time=2).receipt
    assert receipt["is_trained_in_full"]
    assert weights_of(tmp_path / "run")
    results = SearchRecord(tmp_path / "run").results
    usd = sum(results[trial, 0]["usd"] for trial, rung in results if rung == 1)  # none went on
    assert receipt["saved"]["promotion_usd"] == pytest.approx(usd)
    tokenizing = [row["spans"].get("tokenize", 0.0) for row in results.values() if not row["rung"]]
    usd = (9 * max(tokenizing) - sum(tokenizing)) * 0.001 / 2
    assert receipt["saved"]["sharing_usd"] == pytest.approx(usd)


def test_a_bill_that_can_not_be_made_ends_the_search_before_a_cent(tmp_path, monkeypatch):
    """Prices that can't be read: it searched on without a bill."""

    def fails(*_):
        raise InputError("a line is damaged", where="prices.csv", to_do="mend it")

    monkeypatch.setattr("farthing.search.run.priced", fails)
    refused(job_of(tmp_path), "a line is damaged")


def test_a_worker_that_dies_within_a_line_has_died(tmp_path, monkeypatch):
    begin, torn = subprocess.Popen, "import os; os.write(1, b'{\"done\": {'); os._exit(7)"
    dies = lambda words, **how: begin([sys.executable, "-c", torn], **how)  # noqa: E731
    monkeypatch.setattr(subprocess, "Popen", dies)
    with pytest.raises(WorkerDiedError, match="ended with 7"):
        Worker(tmp_path / "log", {}).call({}, print)


@pytest.mark.parametrize(("usd", "state"), [(0.0, "not begun"), (0.5, "paused")])
def test_a_trial_that_the_limit_stops_has_not_failed(usd, state, tmp_path, monkeypatch):
    monkeypatch.setattr("farthing.search.receipt.usd_of", lambda folder: usd)
    late = {"state": "failed", "kind": "InputError", "where": "limits", "error": "0.0 s left"}
    clock, until = time.time, []

    def call(worker, task, tell):
        monkeypatch.setattr(time, "time", lambda: clock() + 36_000)
        with pytest.raises(LimitError):
            train_segment(task | {"n_steps": 8}, tell)
        return late

    def began(job, tell):
        until.append(job.limits.deadline.timestamp())
        raise LimitError("enough")

    monkeypatch.setattr("farthing.train.run.train", began)
    monkeypatch.setattr("farthing.search.pool.Worker.start", lambda worker: None)
    monkeypatch.setattr("farthing.search.pool.Worker.end", lambda worker: None)
    monkeypatch.setattr("farthing.search.pool.Worker.call", call)
    reads, writes = os.pipe()
    monkeypatch.setenv("FARTHING_GUARD", str(writes))
    path = job_of(tmp_path)
    outcome = searched(path)
    os.close(writes)
    assert (outcome.state, outcome.exit_code) == ("limit", 3)
    with open(reads) as guard:
        assert 4900 < json.loads(guard.readline())["left_s"] < 5000, "who watches knows the cap"
    found = {(each["state"], each["usd"]) for each in outcome.receipt["trials"]}
    assert found == {(state, usd)}  # a search that is resumed trains it
    assert sum(each["usd"] for each in outcome.receipt["rungs"]) == usd
    assert until[0] > clock() + 36_000, "its limit counts from the clock that it begins with"
    machines = MachineLedger(tmp_path / "run")
    machines.note("farthing-1-1", "asked", 1e9, number=1, usd_per_hour=2.0)
    machines.note("farthing-1-1", "gone", 1e9 + 1800)
    leave_receipt_of_copy(load_job(path))
    assert "; $1.00 for 1 machine." in (tmp_path / "run/search.html").read_text()
    (tmp_path / "run/ledger.jsonl").write_text("x" * 99)
    with pytest.raises(RunDamagedError, match="its cost so far is unknown"):
        searched(path)


@pytest.mark.parametrize(
    ("section", "keys", "words"),
    [
        ({"vary": {"train.learning_rate": ["fast", 1e-3]}}, {}, "'fast'"),
        ({"vary": {"method.lora_r": [8, -1], "method": ["lora"]}}, {}, "-1"),
        ({"vary": {"model": ["./base", "./nowhere"]}}, {}, "nowhere"),
        (SEARCH, {"limits": {"max_usd": 0.002}}, "a start takes"),  # 2 seconds
        (
            {"vary": {"train.weight_decay": [0, 1]}, "stop_at": {"accuracy": 85}},
            {"family": "bert"},
            "at most 1",
        ),
    ],
)
def test_what_can_never_work_is_refused_before_a_cent(section, keys, words, tmp_path):
    refused(job_of(tmp_path, section, **keys), words)


def test_a_choice_may_need_the_choice_of_another_key(tmp_path):
    vary = {"method": ["full", "lora"], "method.lora_r": [4, 8]}
    path = job_of(tmp_path, {"vary": vary})
    refuse_choices(load_job(path), str(path))
