"""Seconds and dollars: spans that add up, prices that follow the attempt, ledgers torn by kills."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attempts import Clock, attempt
from farthing.run.accounts import Account, read_ledger, with_redone
from farthing.run.ledger import SPANS, Ledger, Meter


def read_attempts(path: Path) -> list[Account]:
    """The attempts of a ledger."""
    return with_redone(read_ledger(path).ordered)


def test_spans_add_up_to_the_wall_time_however_they_nest() -> None:
    clock = Clock()
    meter = Meter(already_s=2.0, clock=clock)
    clock.now += 1
    with meter.span("evaluation"):
        clock.now += 3
        with meter.span("data_wait"):
            clock.now += 0.5
        clock.now += 2
    meter.enter("idle")
    clock.now += 4
    assert meter.wall_s == pytest.approx(12.5)
    assert meter.spans == pytest.approx(
        {"start_up": 3.0, "evaluation": 5.0, "data_wait": 0.5, "idle": 4.0}
    )


def test_a_span_ends_with_an_error_too() -> None:
    clock = Clock()
    meter = Meter(clock=clock)

    def fail() -> None:
        with meter.span("compute"):
            clock.now += 1
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    clock.now += 2
    assert meter.wall_s == 3
    assert meter.spans == {"start_up": 2.0, "compute": 1.0}


def test_a_span_without_a_name_on_the_receipt_is_refused() -> None:
    with pytest.raises(KeyError), Meter().span("coffee"):
        pass
    assert "compute" in SPANS


def test_each_attempt_is_priced_at_its_own_rate(tmp_path: Path) -> None:
    clock = Clock()
    attempt(tmp_path / "l", clock, 3.6, 0, 5)
    clock.now += 5000  # away: not this machine's time
    ledger = attempt(tmp_path / "l", clock, 36.0, 5, 8, end="finished")
    assert ledger.spent_s == pytest.approx(80)
    assert ledger.spent_usd == pytest.approx(50 * 0.001 + 30 * 0.01)
    first, second = read_attempts(tmp_path / "l")
    assert (first.ended, second.ended) == ("killed", "finished")
    assert (first.usd, second.usd) == pytest.approx((0.05, 0.3))


def test_work_done_again_is_counted_once_as_redone(tmp_path: Path) -> None:
    clock = Clock()
    attempt(tmp_path / "l", clock, 1, 0, 10)
    attempt(tmp_path / "l", clock, 1, 8, 9)  # lost steps 9 and 10 of the first
    attempt(tmp_path / "l", clock, 1, 4, 20, end="finished")  # lost all after step 4
    redone = [a.redone_s for a in read_attempts(tmp_path / "l")]
    assert redone == pytest.approx([60, 10, 0])


def test_an_attempt_that_never_began_loses_no_work(tmp_path: Path) -> None:
    clock = Clock()
    attempt(tmp_path / "l", clock, 1, 0, 10)
    Ledger(tmp_path / "l", Meter(clock=clock), 1).write("starting")
    attempt(tmp_path / "l", clock, 1, 10, 12, end="finished")
    attempts = read_attempts(tmp_path / "l")
    assert [a.began for a in attempts] == [True, False, True]
    assert sum(a.redone_s for a in attempts) == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_line_torn_by_a_kill_leaves_the_one_before_and_nothing_is_said(
    share: float, tmp_path: Path
) -> None:
    clock = Clock()
    ledger = attempt(tmp_path / "l", clock, 1, 0, 3)
    place, size = ledger._places[ledger._mine.line % 2], ledger._place_bytes
    content = bytearray((tmp_path / "l").read_bytes())
    cut = place + int(share * 300)
    content[cut : place + 300] = b"#" * (place + 300 - cut)  # overwritten in part
    assert len(content) == 2 * size
    (tmp_path / "l").write_bytes(content)
    found = read_ledger(tmp_path / "l")
    assert (found.accounts[1].step, found.is_damaged) == (2, False)
    attempt(tmp_path / "l", clock, 1, 2, 4, end="finished")
    assert [a.step for a in read_attempts(tmp_path / "l")] == [2, 4]


def test_ledgers_of_earlier_versions_are_read_to_the_same_sums(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for number, first, last in ((1, 0, 9), (2, 8, 12)):
        for step in range(first, last + 1):
            spans = {"start_up": 2.5, "compute": 10.0 * (step - first)}
            row = {
                "attempt": number,
                "at": 1e9 + 1e4 * number + sum(spans.values()),
                "usd_per_hour": 3.6 * number,
            }
            state = "started" if step == first else "running"
            rows.append(
                {
                    **row,
                    "state": state,
                    "first_step": first,
                    "step": step,
                    "spans": spans,
                    "committed": first,
                }
            )
    (tmp_path / "l").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"attempt": 3, "st'
    )
    found = read_ledger(tmp_path / "l")
    assert not found.is_damaged
    before = with_redone(found.ordered)
    assert [(a.wall_s, round(a.usd, 6), a.redone_s) for a in before] == [
        (92.5, 0.0925, 10.0),
        (42.5, 0.085, 0.0),
    ]
    ledger = Ledger(tmp_path / "l", Meter(clock=Clock()), 1)
    ledger.write("starting")
    assert ledger.number == 3
    assert ledger.committed_step == 8
    again = [
        replace(a, line=0, past_s=0.0, past_usd=0.0) for a in read_attempts(tmp_path / "l")[:2]
    ]
    assert again == [replace(a, line=0) for a in before], "and written again they are the same"


def test_the_first_forecast_is_the_one_that_is_kept(tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(tmp_path / "l", Meter(clock=clock), 1)
    ledger.begin_at(0)
    ledger.at_step(1, {}, {"wall_s": 10})
    ledger.at_step(2, {}, {"wall_s": 20})
    assert Ledger(tmp_path / "l", Meter(clock=clock), 1).forecast == {"wall_s": 10}
