"""A run of a month leaves files that stay small and are read in little memory: by bytes, lines and
traced memory.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from farthing.report.receipt import build_receipt
from farthing.report.run_page import run_page
from farthing.report.training_log import Curve, keep_digest, read_log
from farthing.storage.logs import line_of
from long_run import make_run


def traced_peak_bytes(folder: Path) -> int:
    """Peak memory of building the receipt."""
    tracemalloc.start()
    try:
        build_receipt(folder)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_long_run_has_a_small_ledger_and_a_receipt_in_little_memory(tmp_path):
    usd = make_run(tmp_path / "long", n_steps=20_000, n_evaluations=20, n_attempts=200)
    make_run(tmp_path / "short", n_steps=2_000, n_evaluations=20, n_attempts=200)
    ledger = tmp_path / "long" / "ledger.jsonl"
    assert ledger.read_bytes().count(b"\n") == 201, "a line an attempt, and the two of the last"
    assert ledger.stat().st_size < 200 * 1800
    receipt = build_receipt(tmp_path / "long")
    assert receipt.usd == pytest.approx(usd, abs=0.001)
    assert sum(span.usd for span in receipt.spans) == pytest.approx(receipt.usd, rel=1e-9)
    assert len(receipt.attempts) == 200
    assert len(run_page(receipt).encode()) < 350_000
    more_bytes = traced_peak_bytes(tmp_path / "long") - traced_peak_bytes(tmp_path / "short")
    assert more_bytes < 18_000 * 50, "a step costs its place in the curve, not its line"


def test_a_log_is_read_fast_to_what_reading_every_line_as_json_gives(tmp_path):
    make_run(tmp_path / "run", n_steps=300, n_evaluations=30, n_attempts=2)
    path = tmp_path / "run" / "log.jsonl"
    odd = [
        {
            "step": 301,
            "loss": None,
            "grad_norm": None,
            "lr": 1e-4,
            "n_targets": 5,
            "n_tokens": 7,
            "examples": [1],
        },
        {"step": 301, "skipped": "the loss is", "samples": ["a.jsonl:7"]},
        {
            "step": 303,
            "loss": 2.0,
            "grad_norm": 1.0,
            "lr": 1e-4,
            "n_targets": 1,
            "n_tokens": 2,
            "examples": [],
        },
    ]
    torn = (
        '{"step": 304, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "n_targets": 3, "n_tokens": 9,'
        ' "examples": [1, 2'
    )
    with open(path, "a") as file:
        file.write("".join(line_of(row) + "\n" for row in odd) + "no json\n[1]\n" + torn)
    rows = []
    for line in path.read_text().splitlines()[:-1]:
        if line.startswith("{"):
            rows.append(json.loads(line))
            rows[-1].pop("crc32")
    steps = [row for row in rows if "examples" in row]
    log = read_log(path)
    assert (log.step, log.loss) == (303, 2.0)
    assert log.n_tokens == sum(row["n_tokens"] for row in steps)
    assert log.n_targets == sum(row["n_targets"] for row in steps)
    with_loss = [row for row in steps if row["loss"] is not None]
    assert log.losses.means(1024) == [[row["step"], row["loss"]] for row in with_loss]
    assert log.evaluations == [row for row in rows if "metrics" in row]
    assert log.n_skipped == 1


def test_a_digest_changes_nothing_of_what_a_log_says(tmp_path):
    make_run(tmp_path / "run", n_steps=5_000, n_evaluations=5, n_attempts=2)
    path, digest = tmp_path / "run" / "log.jsonl", tmp_path / "run" / "log.digest.json"
    digest.unlink(missing_ok=True)
    whole, lines = read_log(path), path.read_bytes().splitlines(keepends=True)
    assert not digest.exists(), "reading writes nothing"
    for n_lines in (1, 1023, 2500, len(lines) - 1):
        path.write_bytes(b"".join(lines[:n_lines]) + lines[n_lines][:40])
        end = keep_digest(path, worth_bytes=0)
        assert end == sum(map(len, lines[:n_lines])), "a torn line is not in it"
        path.write_bytes(b"".join(lines))
        assert read_log(path) == whole
    assert keep_digest(path, end, worth_bytes=1 << 30) == end, "not worth writing"
    path.write_bytes(b"".join(lines[1:]))  # another log
    assert read_log(path) != whole
    path.write_bytes(b"".join(lines))
    good = digest.read_bytes()
    for damaged in (
        b"",
        good[:-9],
        good.replace(b'"n_tokens": ', b'"n_tokens": 1', 1),
        b'{"version": 1}',
    ):
        digest.write_bytes(damaged)
        assert read_log(path) == whole
    digest.write_bytes(good)
    path.write_bytes(b"".join(lines[:-2]))  # a resume has taken steps back
    assert read_log(path).step < whole.step


def test_a_curve_keeps_its_sums_and_both_ends():
    curve, values = Curve(), [float(i % 7) for i in range(100_003)]
    for step, value in enumerate(values, 1):
        curve.add(step, value)
    assert len(curve.stretches) <= 1024
    assert sum(n for _, n, *_ in curve.stretches) == len(values)
    assert sum(total for _, _, total, *_ in curve.stretches) == sum(values)
    assert curve.first == [1, 0.0]
    assert curve.stretches[-1][0] == len(values)
    assert len(curve.means(60)) <= 60
