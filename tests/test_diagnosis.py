"""What holds a run back is said from its receipt alone: the cause, the figures, the key, and the
dollars.
"""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from farthing.config.load import load_job
from farthing.report.diagnosis import CHECKS, diagnose
from farthing.report.draw import draw
from farthing.report.receipt import build_receipt
from farthing.report.receipt_report import diagnosis
from farthing.report.receipt_types import Diagnosis, Finding, Receipt, Span
from farthing.report.timeline import OF_SPAN, grouped, seconds_of
from farthing.run.ledger import SPANS
from farthing.train.throughput import facts_of_lengths
from workshop import job_file, make_job, train

SPARE = {"n_steps": 100, "free_bytes": 16 << 30, "need_bytes": 1 << 30}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Receipt:
    """The receipt of a small run; its seconds are replaced by those of each case."""
    job = make_job(tmp_path_factory.mktemp("plain"), "llama", max_steps=3)
    return train(job).receipt


def case(
    plain: Receipt, seconds: dict[str, float], work: dict[str, Any] | None = None, **fields: Any
) -> Receipt:
    """A run of 100 steps at $3.60 an hour that has spent its seconds so."""
    wall_s = sum(seconds.values())
    spans = [Span(name, name, s, s / 1000, s / wall_s) for name, s in seconds.items()]
    values: dict[str, Any] = {
        "state": "finished",
        "steps": 100,
        "spans": spans,
        "wall_s": wall_s,
        "usd": wall_s / 1000,
    }
    values |= {
        "attempts": [{"spans": seconds}],
        "interruptions": 0,
        "redone_s": 0.0,
        "restart_s": 0.0,
        "mfu": None,
    }
    return replace(
        plain, **{**values, "work": SPARE | (work or {}), "tokens_per_s": None, **fields}
    )


def only(found: Diagnosis) -> Finding:
    assert len(found.findings) == 1, [finding.cause for finding in found.findings]
    assert found.largest == found.findings[0].cause
    return found.findings[0]


def test_a_run_that_computes_has_nothing_to_mend(plain: Receipt) -> None:
    found = diagnose(case(plain, {"compute": 95.0, "optimizer": 4.0, "data_wait": 1.0}))
    assert found.findings == []
    assert found.largest == ""


JOB_OF_16 = {"train": {"global_batch_size": 16}}
SHORT = [{"step": n, "micro_batch_tokens": 8192 >> n} for n in range(1, 10)]


@pytest.mark.parametrize(
    ("seconds", "more", "found", "saves_s"),
    [
        ({"compute": 60.0, "data_wait": 40.0}, {}, ("data", "slow storage", "cache_dir"), 40),
        (
            {"compute": 100.0},
            {"out_of_memory": SHORT},
            ("memory", "memory ran out", "train.micro_batch_tokens=16"),
            0,
        ),
        (
            {"compute": 100.0},
            {"work": {"share_beyond_long": 0.3, "longest": 4096, "long": 512}},
            ("compute", "max_length too long", "data.max_length=512"),
            30,
        ),
        (
            {"compute": 100.0},
            {"mfu": 0.1},
            ("compute", "utilisation under target", "train.probe=true"),
            75,
        ),
        (
            {"compute": 60.0, "ranks": 40.0},
            {"job": JOB_OF_16},
            ("communication", "waiting for other ranks", "train.global_batch_size=32"),
            20,
        ),
        (
            {"start_up": 4.0, "compile": 30.0, "compute": 66.0},
            {},
            ("start-up", "start-up", "train.torch_compile=false"),
            30,
        ),
        (
            {"compute": 100.0},
            {"interruptions": 3, "redone_s": 12.0, "restart_s": 8.0},
            ("waiting", "interruptions", "where.spot=true"),
            20,
        ),
    ],
)
def test_what_holds_a_run_back_is_named_with_its_key_and_its_dollars(
    plain: Receipt,
    seconds: dict[str, float],
    more: dict[str, Any],
    found: tuple[str, str, str],
    saves_s: float,
) -> None:
    if "job" in more:
        more = {**more, "job": {**(plain.job or {}), **more["job"]}}
    finding = only(diagnose(case(plain, seconds, **more)))
    assert (finding.area, finding.cause, finding.fix) == found
    assert (finding.saves_s, finding.saves_usd) == pytest.approx((saves_s, saves_s / 1000))
    assert finding.rest_s == 0, "it has ended"


def test_what_is_left_of_a_run_is_spared_what_recurs_and_not_the_start(plain: Receipt) -> None:
    seconds = {"tokenize": 30.0, "compute": 60.0, "data_wait": 30.0}
    data, tokenizer = diagnose(case(plain, seconds, {"n_steps": 400}, state="killed")).findings
    assert data.saves_s == pytest.approx(120)
    assert data.rest_s == pytest.approx(90)
    assert (tokenizer.cause, tokenizer.saves_s, tokenizer.rest_s) == ("slow tokenizer", 30.0, 0.0)


def test_activation_checkpointing_where_memory_has_room(plain: Receipt) -> None:
    work = {
        "checkpoint_every": 1,
        "recomputed_share": 0.25,
        "need_without_checkpointing_bytes": 8 << 30,
    }
    finding = only(diagnose(case(plain, {"compute": 100.0}, work)))
    assert (finding.area, finding.cause) == ("memory", "checkpointing not needed")
    assert finding.fix == "train.gradient_checkpointing=false"
    assert finding.saves_s == pytest.approx(25)
    measured = {**work, "forward_share": 0.4, "recomputed_of_forward": 0.8}
    assert only(diagnose(case(plain, {"compute": 100.0}, measured))).saves_s == pytest.approx(32), (
        "what was measured wins"
    )
    work["need_without_checkpointing_bytes"] = 15 << 30
    assert diagnose(case(plain, {"compute": 100.0}, work)).findings == [], "it would not fit"


def evaluated(plain: Receipt, losses: list[float], **fields: Any) -> Receipt:
    rows = [{"step": (i + 1) * 100 // len(losses), "loss": loss} for i, loss in enumerate(losses)]
    return case(
        plain, fields.pop("seconds"), curves=replace(plain.curves, evaluation=rows), **fields
    )


def test_evaluations_and_saves_that_are_too_many(plain: Receipt) -> None:
    finding = only(
        diagnose(evaluated(plain, [1.0] * 50, seconds={"compute": 60.0, "evaluation": 40.0}))
    )
    assert finding.cause == "evaluation too often"
    assert finding.fix == "train.eval_steps=34"
    assert finding.saves_s == pytest.approx(40 * 47 / 50)
    saves = replace(plain.checkpoints, n=100)
    finding = only(diagnose(case(plain, {"compute": 70.0, "checkpoint": 30.0}, checkpoints=saves)))
    assert (finding.cause, finding.fix) == ("saves too often", "train.save_steps=25")
    assert finding.saves_s == pytest.approx(30 * 96 / 100)


def test_few_evaluations_that_take_too_long_have_too_many_examples(plain: Receipt) -> None:
    """The fix of `evaluation too often` leads here, never back to itself."""
    seconds = {"compute": 60.0, "evaluation": 40.0}
    metrics = {"loss": 1.0, "n_examples": 1000}
    often = only(diagnose(evaluated(plain, [1.0] * 10, seconds=seconds, metrics=metrics)))
    assert (often.cause, often.fix) == ("evaluation too often", "train.eval_steps=34")
    assert "data.max_eval_samples=250" in often.to_do
    assert often.saves_s == pytest.approx(40 * 7 / 10)
    few = only(diagnose(evaluated(plain, [1.0] * 3, seconds=seconds, metrics=metrics)))
    assert (few.cause, few.fix) == ("evaluation on too many examples", "data.max_eval_samples=75")
    assert few.saves_s == pytest.approx(40 - 0.05 * 60)
    thrifty = {"compute": 60.0, "evaluation": 3.0}
    assert diagnose(evaluated(plain, [1.0] * 3, seconds=thrifty, metrics=metrics)).findings == []


def test_findings_stand_in_the_order_data_memory_compute(plain: Receipt) -> None:
    work = {
        "checkpoint_every": 1,
        "recomputed_share": 0.25,
        "need_without_checkpointing_bytes": 1 << 30,
    }
    work |= {"share_beyond_long": 0.3, "longest": 4096, "long": 512}
    seconds = {"idle": 20.0, "data_wait": 20.0, "compute": 100.0, "start_up": 60.0}
    areas = [finding.area for finding in diagnose(case(plain, seconds, work)).findings]
    assert areas == sorted(areas, key=list(CHECKS).index)
    assert areas == ["data", "memory", "compute", "host", "start-up"]


def test_loss_that_still_falls_and_training_that_went_on_for_too_long(plain: Receipt) -> None:
    falling = evaluated(
        plain, [3.0, 2.0, 1.5], seconds={"compute": 100.0}, steps_per_epoch=50, epochs=2.0
    )
    (advice,) = diagnose(falling).advice
    assert "another epoch costs about $0.05" in advice.words
    assert "--set train.num_train_epochs=1" in advice.command
    late = evaluated(
        plain, [3.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8], seconds={"compute": 100.0}
    )
    (advice,) = diagnose(late).advice
    assert "best after step 20 of 100" in advice.words
    assert advice.usd == pytest.approx(0.05), (
        "three evaluations after the best it would have stopped"
    )
    flat = evaluated(plain, [1.5, 1.5, 1.4999], seconds={"compute": 100.0}, steps_per_epoch=50)
    assert diagnose(flat).advice == []


@pytest.mark.slow
def test_the_command_for_another_epoch_is_one_that_works(tmp_path: Path) -> None:
    job = make_job(
        tmp_path, "llama", max_steps=12, n_rows=40, eval_steps=4, data={"eval_fraction": 0.3}
    )
    receipt = train(job).receipt
    assert receipt.diagnosis is not None
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


def test_a_receipt_holds_its_diagnosis_and_the_terminal_shows_it(plain: Receipt) -> None:
    receipt = case(plain, {"compute": 60.0, "data_wait": 40.0})
    receipt = replace(receipt, diagnosis=diagnose(receipt))
    assert receipt.to_json()["diagnosis"]["findings"][0]["cause"] == "slow storage"
    text = io.StringIO()
    draw(Console(file=text, width=200), [diagnosis(receipt)])
    assert "data: slow storage, worth 40 s ($0.0400) in a run like this one" in text.getvalue()
    assert "training waited 40 s of 1 min 40 s (40%)" in text.getvalue()


# ---- what it is made from ----


@pytest.mark.slow
def test_a_run_measures_its_work_and_a_killed_one_has_it_too(tmp_path: Path) -> None:
    path = job_file(
        tmp_path, "llama", max_steps=6, micro_batch_tokens=40, gradient_checkpointing=True
    )
    work = train(load_job(path)).receipt.work
    assert work is not None
    assert work["n_measured_steps"] == 5, "the first one warms up"
    assert work["micro_batches_per_step"] > 1
    assert work["checkpoint_every"] == 1
    assert 0 < work["recomputed_share"] <= 0.25, (
        "a quarter of forward, forward and backward at most"
    )
    assert work["need_without_checkpointing_bytes"] > work["need_bytes"]
    assert 0.2 < work["recomputed_of_forward"] < 1
    assert 0 < work["forward_share"] < 1
    assert work["longest"] >= work["long"] > 0
    again = build_receipt(tmp_path / "run")
    assert again.work == work


def test_lengths_of_nothing_are_no_error() -> None:
    import numpy as np

    assert "longest" not in facts_of_lengths(np.empty(0, np.int64))


def test_every_span_of_the_bill_belongs_to_a_group_and_to_a_part_of_the_estimate() -> None:
    assert list(OF_SPAN) == list(SPANS)
    seconds = dict.fromkeys(SPANS, 1.0) | {"of another version": 1.0}
    assert sum(grouped(seconds).values()) == len(seconds)
    parts = {part for _, part in OF_SPAN.values() if part}
    assert sum(seconds_of(part, seconds) for part in parts) == len(SPANS) - 1, (
        "all but details that are lost"
    )
