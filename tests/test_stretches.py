"""Where an attempt's seconds went over time: the parts add up, few are kept, and a ledger carries
them.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from farthing.run.accounts import read_ledger
from farthing.run.ledger import Ledger, Meter
from farthing.run.stretches import Stretch, note, read


class Clock:
    """Seconds that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def sums_of(stretches: list[Stretch]) -> dict[str, float]:
    names = {name for stretch in stretches for name in stretch[3]}
    return {name: sum(stretch[3].get(name, 0.0) for stretch in stretches) for name in names}


def test_stretches_add_up_to_the_spans_however_often_they_are_joined() -> None:
    draw, stretches, spans = (
        random.Random(0),
        list[Stretch](),
        dict.fromkeys(("compute", "optimizer", "evaluation"), 0.0),
    )
    for step in range(3000):
        spans[draw.choice(list(spans))] += draw.uniform(0, 2)
        if draw.random() < 0.3:  # a meter gives seconds to another span after they were written
            moved = min(0.5, spans["compute"])
            spans["compute"] -= moved
            spans["optimizer"] += moved
        stretches = note(stretches, step, 10 * step, step // 100, spans)
        assert len(stretches) <= 32
    assert sums_of(stretches) == pytest.approx(spans, abs=0.01)
    assert [stretch[0] for stretch in stretches] == sorted(stretch[0] for stretch in stretches)
    assert sum(stretch[2] for stretch in stretches) == 29
    lengths = [sum(stretch[3].values()) for stretch in stretches]
    assert max(lengths) < sum(spans.values()) / 8, "no stretch hides the rest"
    assert all(seconds >= 0 for stretch in stretches for seconds in stretch[3].values())


def test_a_ledger_keeps_the_stretches_of_each_attempt(tmp_path: Path) -> None:
    for attempt in range(2):
        clock = Clock()
        ledger = Ledger(tmp_path / "l", Meter(clock=clock), 3.6)
        ledger.begin_at(10 * attempt)
        for step in range(1, 101):
            with ledger._meter.span("compute" if step <= 50 else "evaluation"):
                clock.now += 1
            ledger.at_step(10 * attempt + step, {"tokens": 7 * step})
        ledger.close("finished")
    for account in read_ledger(tmp_path / "l").ordered:
        spent = {name: seconds for name, seconds in account.spans.items() if seconds}
        assert sums_of(account.stretches) == pytest.approx(spent, abs=0.01)
        assert account.stretches[-1][:2] == [account.step, 700]
        assert "evaluation" not in account.stretches[0][3]
        assert account.stretches[-1][3].keys() == {"evaluation"}


def test_what_are_no_stretches_is_passed_over() -> None:
    good: Stretch = [1, 2, 0, {"compute": 1.0}]
    bad = [
        [1, 2, 0],
        [1, 2, 0, {"compute": -1}],
        [1, 2, "3", {}],
        {"a": 1},
        [1, 2, 0, {"compute": float("nan")}],
    ]
    assert read([*bad, good]) == [good]
    assert read("no list") == []
