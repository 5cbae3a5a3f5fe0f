"""Whole receipts of run folders that stand in `receipts/`: each figure, and the terminal's text.

`python tests/test_receipts.py` writes what is expected anew; read the difference before it is kept.
"""

import contextlib
import io
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter
from rich.console import Console

from farthing.errors import InputError
from farthing.report.draw import draw
from farthing.report.receipt import build_receipt, compare
from farthing.report.receipt_report import compared_rows, receipt_report
from farthing.report.runs import row_of
from farthing.report.timeline import timeline_of
from farthing.run.accounts import Account, as_line
from farthing.run.folder import keep
from farthing.storage.files import write_json
from farthing.storage.logs import line_of

RECEIPTS = Path(__file__).parent / "receipts"
CASES = sorted(RECEIPTS.glob("*.yaml"))


def receipt_of(case):
    """The receipt of a run with these files, as plain values and as the terminal shows it, here."""
    folder = Path("run")
    folder.mkdir()
    for name, value in case["files"].items():
        write = write_json if name == "job.json" else keep
        write(folder / name, value)
    accounts = TypeAdapter(list[Account]).validate_python(case["attempts"])
    (folder / "ledger.jsonl").write_text("".join(map(as_line, accounts)) + case.get("torn", ""))
    for name in ("log", "machines"):
        lines = [line_of(row) + "\n" for row in case.get(name, [])]
        (folder / f"{name}.jsonl").write_text("".join(lines)) if lines else None
    with open(folder / "log.jsonl", "a") as log:
        log.write(case.get("damaged_log", ""))
    receipt = build_receipt(folder)
    console = Console(file=io.StringIO(), width=80, legacy_windows=False)
    draw(console, receipt_report(receipt))
    values = receipt.to_json()
    assert (values.pop("kind"), values.pop("version")) == ("farthing receipt", 1)
    del values["written"]
    values["usd_of_months"] = row_of(folder, 0.0, name="").usd_by_month
    return json.loads(json.dumps(values)), console.file.getvalue()  # type: ignore[attr-defined]


def rounded(value):
    """Floats to nine digits, which a sum in another order keeps."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_figure_and_line_of_a_receipt(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values, text = receipt_of(yaml.safe_load(path.read_text()))
    expected = json.loads(path.with_suffix(".json").read_text())
    assert rounded(values) == expected
    assert text.splitlines() == path.with_suffix(".txt").read_text().splitlines()


def test_two_receipts_side_by_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    receipt_of(yaml.safe_load((RECEIPTS / "spot.yaml").read_text()))
    run = build_receipt(Path("run"))
    other = replace(
        run,
        run="other",
        usd=1.66,
        wall_s=2100.0,
        metrics={"loss": 4.5},
        final_loss=3.0,
        tokens_per_s=12345.6,
    )
    found = compare(run, other)
    assert list(compared_rows([found])) == [
        ("cost", "$0.83", "$1.66", "0.500"),
        ("time", "17 min 30 s", "35 min 00 s", "0.500"),
        ("steps", "200", "200", "1.000"),
        ("tokens", "80,000", "80,000", "1.000"),
        ("useful tokens/s", "110", "12,346", "0.009"),
        ("a million tokens", "$10.37", "$10.37", "1.000"),
        ("peak memory", "906.0 MiB", "906.0 MiB", "1.000"),
        ("interruptions", "2", "2", "1.000"),
        ("last training loss", "1.5", "3", "0.500"),
        ("evaluation loss", "2.25", "4.5", "0.500"),
    ]
    assert found.notes == []
    words = "the run costs $0.83 (50%) less and takes 17 min 30 s less than the baseline"
    assert found.in_words() == words
    shares = found.saved_share, found.saved_share_per_token
    assert (found.saved_s, *shares) == (1050.0, pytest.approx(0.5), pytest.approx(0.5))
    assert compare(run, replace(other, steps=100)).rows["usd"].ratio is None
    unlike = {
        "identity": {"data.train (content)": "x", "model (content)": "y"},
        "job": {"task": "causal-lm", "model": {"model_name_or_path": "other/model"}},
        "steps": 100,
        "tokens": 40000,
        "usd_is_known": False,
        "state": "limit",
    }
    found = compare(run, replace(other, **unlike))
    assert [name for name, row in found.rows.items() if row.ratio is not None] == [
        "steps",
        "tokens",
        "tokens_per_s",
        "peak_bytes",
        "interruptions",
    ]
    assert found.notes == [
        "they trained on other data, or other tokens of it: the last training loss can't be"
        " compared",
        "they were evaluated on other examples, or other tokens of them: the metrics can't be"
        " compared",
        "the baseline has no price: dollars can't be compared",
        "they did not do the same work (200 steps and 100 steps): compare their costs a token, not"
        " their totals",
        "they trained other models (some/model and other/model): a token is not the same work for"
        " both",
        "not both have finished: the figures are as far as they came",
    ]
    assert (found.saved_usd, found.saved_s) == (None, 1050.0)
    assert found.in_words() == "by the token the run takes 75% less than the baseline"


def test_a_folder_without_a_run_has_no_receipt(tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        build_receipt(tmp_path)


@pytest.fixture(scope="module")
def rented(tmp_path_factory):
    with contextlib.chdir(tmp_path_factory.mktemp("rented")):
        receipt_of(yaml.safe_load((RECEIPTS / "rented.yaml").read_text()))
        return build_receipt(Path("run"))


HELD_OUT = {"data.eval (content)": "a file"}


@pytest.mark.parametrize(
    ("both", "key", "unlike"),
    [
        ({}, "data.train (content)", "final_loss loss"),
        ({}, "data.eval_fraction", "final_loss loss"),
        ({}, "tokenization.x", "final_loss loss"),
        ({}, "data.max_train_samples", "final_loss"),
        ({}, "data.max_eval_samples", "loss"),
        ({}, "train.seed", "loss"),
        (HELD_OUT, "data.eval (content)", "loss"),
        (HELD_OUT, "data.eval_fraction", "final_loss"),
        (HELD_OUT, "train.seed", ""),
    ],
)
def test_losses_are_compared_where_their_examples_are_the_same(rented, both, key, unlike):
    one, other = (replace(rented, identity=both | more) for more in ({}, {key: "other"}))
    rows = compare(one, other).rows
    assert [name for name in ("final_loss", "loss") if rows[name].ratio is None] == unlike.split()
    assert rows["usd"].ratio == 1


@pytest.mark.parametrize("nothing", [{"tokens": 0}, {"usd": 0.0}])
def test_nothing_is_saved_against_a_run_of_nothing(rented, nothing):
    found = compare(rented, replace(rented, **nothing))
    assert found.saved_share_per_token is None
    assert (found.saved_share is None) == ("usd" in nothing)


def test_a_long_run_is_thinned_evenly():
    run = [
        Account(n, began=True, first_step=n - 1, step=n, spans={"compute": 10.0}, usd_per_hour=36)
        for n in range(1, 301)
    ]
    found = timeline_of(run, range(1, 301))
    assert len(found.columns) == 96
    assert [one.end_s for one in found.columns[:-1]] == [one.begin_s for one in found.columns[1:]]
    assert {one.end_s - one.begin_s for one in found.columns} == {30.0, 40.0}
    assert sum(one.seconds["forward and backward"] for one in found.columns) == 3000
    assert sum(one.usd for one in found.columns) == pytest.approx(30)
    assert (found.columns[0].step, found.columns[-1].step) == (3, 300)
    evaluated = [(mark.step, mark.at_s) for mark in found.marks if mark.kind == "evaluation"]
    assert len(evaluated) == 120
    assert (evaluated[:2], evaluated[-1]) == ([(1, 10.0), (4, 40.0)], (300, 3000.0))


if __name__ == "__main__":
    for each in CASES:
        with tempfile.TemporaryDirectory() as top, contextlib.chdir(top):
            found, words = receipt_of(yaml.safe_load(each.read_text()))
        each.with_suffix(".json").write_text(json.dumps(rounded(found), indent=1) + "\n")
        each.with_suffix(".txt").write_text(words)
        sys.stdout.write(f"{each.stem}: read the difference before you keep it\n")
