"""Whole receipts of run folders that stand in `receipts/`: each figure, and the terminal's text.

`python tests/test_receipts.py` writes what is expected anew; read the difference before it is kept.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter
from rich.console import Console

from farthing.report.draw import draw
from farthing.report.receipt import build_receipt
from farthing.report.receipt_report import receipt_report
from farthing.report.timeline import timeline_of
from farthing.run.accounts import Account, as_line
from farthing.storage.files import write_json
from farthing.storage.logs import line_of

CASES = sorted((Path(__file__).parent / "receipts").glob("*.yaml"))


def receipt_of(case: dict[str, Any]) -> tuple[Any, str]:
    """The receipt of a run with these files, as plain values and as the terminal shows it, here."""
    folder = Path("run")
    folder.mkdir()
    for name, value in case["files"].items():
        write_json(folder / name, value)
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
    values = {name: value for name, value in asdict(receipt).items() if name != "written"}
    return json.loads(json.dumps(values)), console.file.getvalue()  # type: ignore[attr-defined]


def rounded(value: Any) -> Any:
    """Floats to nine digits, which a sum in another order keeps."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_figure_and_line_of_a_receipt(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values, text = receipt_of(yaml.safe_load(path.read_text()))
    expected = json.loads(path.with_suffix(".json").read_text())
    assert rounded(values) == expected
    assert text.splitlines() == path.with_suffix(".txt").read_text().splitlines()


def test_a_long_run_is_thinned_evenly() -> None:
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
