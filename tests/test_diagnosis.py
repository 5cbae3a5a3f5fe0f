"""What holds a run back is said from its receipt alone: the cause, the figures, the key, and the
dollars.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from farthing.config.load import load_job
from farthing.report.diagnosis import diagnose
from farthing.report.receipt import build_receipt
from farthing.report.receipt_types import RunReceipt, Span
from farthing.report.timeline import OF_SPAN, foretold, grouped
from farthing.run.accounts import Account, as_line
from farthing.run.ledger import SPANS
from farthing.train.throughput import facts_of_lengths
from workshop import job_file, make_job, train

CASES = yaml.safe_load((Path(__file__).parent / "diagnoses.yaml").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The receipt of an attempt of no time; its figures are replaced by those of each case."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "ledger.jsonl").write_text(as_line(Account(1, "a", usd_per_hour=3.6)))
    return replace(build_receipt(folder), steps=100, state="finished", mfu=None)


def receipt_of(plain: RunReceipt, case: dict[str, Any]) -> RunReceipt:
    seconds, losses = case["seconds"], case.get("losses", [])
    losses = [1 - n / 1e6 for n in range(losses)] if isinstance(losses, int) else losses
    rows = [{"step": (i + 1) * 100 // len(losses), "loss": loss} for i, loss in enumerate(losses)]
    wall_s = sum(seconds.values())
    as_they_are = ("state", "out_of_memory", "tokens_per_s", "padded_tokens_per_s", "mfu")
    as_they_are += ("interruptions", "redone_s", "restart_s", "steps_per_epoch")
    return replace(
        plain,
        **{name: case[name] for name in as_they_are if name in case},
        spans=[Span(name, name, s, s / 1000, s / (wall_s or 1)) for name, s in seconds.items()],
        attempts=[{"spans": seconds}],
        wall_s=wall_s,
        usd=wall_s / 1000,
        work={"n_steps": 100, "free_bytes": 1000} | case.get("work", {}),
        job={"train": case.get("train", {})},
        metrics={"loss": 1.0, "n_examples": case.get("n_examples", 0)},
        curves=replace(plain.curves, evaluation=rows),
        checkpoints=replace(plain.checkpoints, n=case.get("checkpoints", 0)),
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_holds_a_run_back(plain, case):
    diagnosis = diagnose(receipt_of(plain, case))
    found = diagnosis.findings
    assert [[one.area, one.cause, one.fix, one.saves_s, one.rest_s] for one in found] == [
        [*words, pytest.approx(saves_s), pytest.approx(rest_s)]
        for *words, saves_s, rest_s in case["found"]
    ]
    for one in found:
        assert (one.saves_usd, one.rest_usd) == pytest.approx((one.saves_s / 1e3, one.rest_s / 1e3))
    largest = max(case["found"], key=lambda row: row[3], default=[None, ""])
    assert diagnosis.largest == largest[1]
    assert [one.evidence for one in found][: len(case.get("evidence", []))] == case.get(
        "evidence", []
    )
    assert [one.to_do for one in found][: len(case.get("to_do", []))] == case.get("to_do", [])
    assert [[one.usd, one.words] for one in diagnosis.advice] == [
        [pytest.approx(usd), words] for usd, words in case.get("advice", [])
    ]


@pytest.mark.slow
def test_the_command_for_another_epoch_is_one_that_works(tmp_path):
    job = make_job(tmp_path, max_steps=12, n_rows=40, eval_steps=4, data={"eval_fraction": 0.3})
    receipt = train(job).receipt
    (advice,) = (
        each for each in receipt.diagnosis.advice if each.command.startswith("farthing train")
    )
    words = advice.command.split()
    again = load_job(
        words[2], [word for before, word in itertools.pairwise(words) if before == "--set"]
    )
    assert again.model.model_name_or_path == str(Path(job.output_dir) / "model")
    assert again.output_dir != job.output_dir
    again = again.model_copy(update={"train": again.train.model_copy(update={"max_steps": 2})})
    assert train(again).state == "finished"


# ---- what it is made from ----


@pytest.mark.slow
def test_a_run_measures_its_work_and_a_killed_one_has_it_too(tmp_path):
    path = job_file(tmp_path, max_steps=6, micro_batch_tokens=40, gradient_checkpointing=True)
    work = train(load_job(path)).receipt.work
    assert work["n_measured_steps"] == 5, "the first one warms up"
    assert work["micro_batches_per_step"] > 1
    assert work["checkpoint_every"] == 1
    assert 0 < work["recomputed_share"] <= 0.25, (
        "a quarter of forward, forward and backward at most"
    )
    assert work["need_without_checkpointing_bytes"] > work["need_bytes"]
    assert work["longest"] >= work["long"] > 0
    again = build_receipt(tmp_path / "run")
    assert again.work == work


def test_lengths_of_nothing_are_no_error():
    import numpy as np

    assert "longest" not in facts_of_lengths(np.empty(0, np.int64))


def test_every_span_of_the_bill_belongs_to_a_group_and_to_a_part_of_the_estimate():
    assert list(OF_SPAN) == list(SPANS)
    seconds = dict.fromkeys(SPANS, 1.0) | {"of another version": 1.0}
    assert sum(grouped(seconds).values()) == len(seconds)
    parts = foretold(seconds)
    assert sum(parts.values()) - parts[""] == len(SPANS) - 1, "all but details that are lost"
