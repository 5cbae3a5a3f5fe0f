"""The page of a run, and of several: whole HTML, nothing from elsewhere, escaped, small, and laid
out by a browser.
"""

import re
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest

import browser
from farthing.errors import InputError
from farthing.report.blocks import Section
from farthing.report.chart import Axes, Line, curves, ticks
from farthing.report.html import page
from farthing.report.receipt import build_receipt, compare
from farthing.report.run_page import compared_page, run_page
from pages import NASTY, Read, nasty
from thinned import thinned
from workshop import make_job, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of one job: the second saves and evaluates more often."""
    folder = tmp_path_factory.mktemp("runs")
    found = []
    for name, every in (("calm", 8), ("busy", 2)):
        keys = {
            "max_steps": 16,
            "eval_steps": every,
            "save_steps": every,
            "output_dir": f"./{name}",
        }
        job = make_job(folder, n_rows=60, data={"eval_fraction": 0.2}, **keys)
        assert train(job).state == "finished"
        found.append(Path(job.output_dir))
    return found


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 5e-324), (1.0, 1.0), (0.0, 1e-300), (0.0, float("nan"))]
)
def test_values_that_are_next_to_equal_have_ticks(low, high):
    assert 1 <= len(ticks(low, high, 5)) <= 6


def test_the_last_mark_of_an_axis_ends_at_the_edge_of_the_drawing():
    axes = Axes((0, 10), (0, 1), str, str, [0, 10], [0, 1])
    drawn = curves("Loss", "", [Line("loss", [(0, 1), (10, 0)])], axes).svg
    assert re.search(r'x="846.0" y="\d+" text-anchor="end">10<', drawn)
    assert re.search(r'x="62.0" y="\d+" text-anchor="middle">0<', drawn)


def test_a_run_leaves_its_page_and_it_is_whole(runs):
    text = (runs[0] / "report.html").read_text()
    read, receipt = Read(text), build_receipt(runs[0])
    read.must_be_whole(text)
    for words in (
        "Where the time went",
        "Loss",
        "Where each second went",
        "The same again",
        "evaluation loss",
    ):
        assert words in read.text
    for span in receipt.spans:
        if span.seconds >= 0.005:
            assert span.what in read.text
    assert f"best: {receipt.metrics['loss']:.4g}, step {receipt.best_step}" in read.text  # type: ignore[index]


def test_runs_are_compared_on_one_page(runs, tmp_path, cli):
    out = tmp_path / "both.html"
    cli("report", *runs, runs[0], "--html", out)
    read, (calm, busy) = Read(out.read_text()), map(build_receipt, runs)
    assert "Side by side" in read.text
    assert f"{calm.final_loss:,.4g}" in read.text
    assert f"{busy.final_loss:,.4g}" in read.text
    assert "than busy" in read.text
    assert "the run costs $" in cli.out("report", *runs)
    assert cli.json("report", *runs)["is_same_work"]
    assert "--html" in cli.err("report", *runs, runs[0])
    cli("report", runs[0], "--html", tmp_path / "no/where.html", code=2)


def test_runs_of_two_tasks_are_not_compared(runs):
    receipt = build_receipt(runs[0])
    other = replace(receipt, job={**(receipt.job or {}), "task": "seq2seq"})
    with pytest.raises(InputError, match="one run is causal-lm, the other seq2seq"):
        compare(receipt, other)


def test_what_comes_from_outside_is_only_text(runs):
    receipt = build_receipt(runs[0])
    job = receipt.job or {}
    changed = replace(
        receipt,
        run=receipt.run + NASTY,
        job=nasty(job),
        machine=nasty(receipt.machine) | {f"device{NASTY}": "cpu"},
        settings=nasty(receipt.settings),
    )
    for drawn in (
        run_page(changed),
        compared_page([changed, changed], [compare(changed, changed)]),
    ):
        read = Read(drawn)
        assert read.count("script") == 0
        assert NASTY in read.text


def test_a_block_that_no_page_knows_is_not_left_out():
    with pytest.raises(jinja2.UndefinedError, match="drawn_on_a_page"):
        page("farthing", "title", [Section("", (object(),))], "end")


def test_a_run_that_has_done_nothing_has_a_page(tmp_path):
    (tmp_path / "ledger.jsonl").write_text("")
    read = Read(run_page(build_receipt(tmp_path)))
    assert "Not finished" in read.text


@pytest.mark.parametrize("width", thinned([390, 768, 1280], 3))
def test_a_browser_lays_the_page_out_without_a_sideways_scroll(runs, tmp_path, width):
    one, two = map(build_receipt, runs)
    compared = compared_page([one, two], [compare(one, two)])
    for name, text in (("one", run_page(one)), ("two", compared)):
        path = tmp_path / f"{name}.html"
        path.write_text(text)
        there, needed = browser.overflow_of(path, width)
        assert there == width
        assert needed <= width, f"{name}: {needed} pixels are needed"
