"""A run that is looked at from outside: as it goes, in its folder and in its store, and all runs in
a list.
"""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from farthing.report.live import Watcher, line_of, lines_of, progress_of
from farthing.report.receipt import build_receipt
from farthing.report.receipt_types import RunReceipt
from farthing.run.commits import take_small
from farthing.storage.lease import newest_words
from farthing.storage.objects import open_store
from patience import until
from workshop import job_file, make_job, train


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of twelve steps, with a copy in a store beside it."""
    folder = tmp_path_factory.mktemp("watched")
    job = make_job(
        folder,
        "llama",
        max_steps=12,
        eval_steps=4,
        data={"eval_fraction": 0.2},
        save_steps=4,
        output_store="./store",
    )
    assert train(job).state == "finished"
    return Path(job.output_dir)


def running(receipt: RunReceipt) -> RunReceipt:
    """The same, as if it went on: killed is what a running run looks like from its files."""
    return replace(receipt, state="killed", work={**(receipt.work or {}), "n_steps": 48})


def test_progress_has_a_forecast_with_a_range_and_knows_silence(finished):
    receipt = build_receipt(finished)
    over = progress_of(receipt, receipt.seen_at)
    assert (over.state, over.is_over, over.left_s) == ("finished", True, None)
    going = progress_of(running(receipt), receipt.seen_at + 1)
    assert (going.state, going.step, going.n_steps) == ("running", 12, 48)
    low, likely, high = going.left_s
    assert 0 < low <= likely <= high
    assert likely == pytest.approx(36 * going.step_s)
    assert going.total_usd == pytest.approx(receipt.usd + likely * 3.6 / 3600)
    silent = progress_of(running(receipt), receipt.seen_at + 600)
    assert (silent.state, silent.silent_s) == ("silent", pytest.approx(600))
    assert "no sign of life for 10 min 00 s" in line_of(receipt, silent)


def test_a_log_has_a_line_now_and_then_and_a_terminal_a_picture(finished):
    receipt = running(build_receipt(finished))
    progress = progress_of(receipt, receipt.seen_at or 0.0)
    now, text = [0.0], io.StringIO()
    watcher = Watcher(Console(file=text, width=100), clock=lambda: now[0])
    for _ in range(1800):
        watcher.show(receipt, progress)
        now[0] += 2
    lines = text.getvalue().splitlines()
    assert 10 < len(lines) < 30, "an hour in a log: ever more seldom"
    assert lines[0].startswith("running · step 12/48 · loss ")
    picture = "\n".join(lines_of(receipt, progress))
    for words in ("12/48 (25%)", "to go (", "loss ", "eval ", "bill ", "in all", "device "):
        assert words in picture
    shown = io.StringIO()
    live = Watcher(Console(file=shown, width=100, force_terminal=True))
    live.show(receipt, progress)
    live.close()
    assert "12/48" in shown.getvalue()


@pytest.mark.slow
def test_a_running_run_is_watched_from_another_process_until_it_ends(tmp_path, cli):
    path = job_file(tmp_path, max_steps=30, save_steps=10)
    command = [sys.executable, "-m", "farthing", "train", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until((tmp_path / "run/ledger.jsonl").exists)
        seen = cli.out("watch", tmp_path / "run", "--json", "--every", "0.2")
        assert process.wait(300) == 0
    looks = [json.loads(line) for line in seen.splitlines()]
    assert (looks[-1]["state"], looks[-1]["step"]) == ("finished", 30)
    assert {look["state"] for look in looks[:-1]} <= {"running"}
    assert [look["usd"] for look in looks] == sorted(look["usd"] for look in looks)


def test_a_run_in_a_store_is_looked_at_without_its_checkpoints(finished, tmp_path, cli):
    place = finished.parent / "store"
    before, store = sorted(place.rglob("*")), open_store(str(place))
    fetch, fetched = store.fetch, []
    store.fetch = lambda *what: (fetched.append(what[0]), fetch(*what))  # type: ignore
    assert take_small(store, tmp_path, newest_words(store))
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "model").exists()
    there, here = build_receipt(tmp_path), build_receipt(finished)
    assert (there.steps, there.final_loss, there.state) == (here.steps, here.final_loss, here.state)
    at_the_end = next(span.usd for span in here.spans if span.name == "checkpoint")
    assert here.usd - at_the_end <= there.usd <= here.usd, "the last second is not in the store"
    n_first = len(fetched)
    assert take_small(store, tmp_path, [])
    assert len(fetched) < 2 * n_first, "pieces of the log are fetched once"
    cli("watch", place, "--once")
    assert sorted(place.rglob("*")) == before, "looking leaves no trace"
    assert not take_small(open_store(str(tmp_path / "empty")), tmp_path, [])


def test_what_can_not_be_watched_is_refused_in_words(tmp_path, cli):
    assert "not a run folder" in cli.err("watch", tmp_path, "--once")
    cli("watch", tmp_path, "--every", 0, code=2)
    cli("runs", tmp_path / "none", code=2)


def test_a_folder_that_can_not_be_read_is_named(tmp_path, monkeypatch, cli):
    closed = tmp_path / "closed"
    closed.mkdir()
    scan = os.scandir

    def scandir(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    (row,) = cli.json("runs", tmp_path)["runs"]
    assert (row["run"], row["state"], row["problem"]) == (
        str(closed),
        "unreadable",
        "Permission denied",
    )
    printed = cli.out("runs", closed)
    assert f"{closed}: Permission denied" in printed
    assert "0 runs" in printed
    assert "1 could not be read and are not counted" in printed
    monkeypatch.chdir(tmp_path)
    assert "closed: can't be read" in cli.err("launch", "status")


def test_all_runs_are_listed_with_what_the_month_has_cost(finished, tmp_path, cli):
    for name in ("a", "deep/b"):
        shutil.copytree(finished, tmp_path / name)
    shutil.copytree(finished.parent / "store", tmp_path / "store")
    broken = tmp_path / "broken"
    broken.mkdir()
    shutil.copy(finished / "ledger.jsonl", broken)
    (broken / "job.json").write_text("[1]")
    found = cli.json("runs", tmp_path)
    rows, total = found["runs"], found["totals"]
    assert found["stores"] == [str(tmp_path / "store")]
    problems = {Path(row["run"]).name: "job.json" in row["problem"] for row in rows}
    assert problems == {"a": False, "b": False, "broken": True}
    assert {row["state"] for row in rows} == {"finished"}
    receipt = build_receipt(finished)
    best = min(row["loss"] for row in receipt.curves.evaluation)
    assert (rows[0]["metric"], rows[0]["best"]) == ("loss", best)
    assert total["usd"] == pytest.approx(3 * receipt.usd)
    assert total["usd_by_month"] == {rows[0]["began"][:7]: pytest.approx(total["usd"])}
    table = list(csv.DictReader(io.StringIO(cli.out("runs", tmp_path, "--csv"))))
    assert [row["state"] for row in table] == [row["state"] for row in rows]
    text = cli.out("runs", tmp_path)
    assert "3 runs, $" in text
    assert "broken" in text
    (tmp_path / "deep/b/ledger.jsonl").unlink()
    assert "3 runs, $" in cli.out("runs", tmp_path), "its checkpoints know what it has cost"
    assert "no runs here" in cli.out("runs", finished / "checkpoints")
    assert "finished" in cli.out("runs", finished.parent / "store")
