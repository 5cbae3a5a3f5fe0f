"""The bench of the planner: the published measurements it is judged by, and the ranges that come of
them.
"""

import csv
import os
from datetime import date
from pathlib import Path

import pytest

import plan_accuracy
from farthing.planner.ranges import error_classes
from plan_accuracy import error_table, judge

# ---- the published rows ----


def rows_of(path: Path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def given():
    data = os.environ.get("FARTHING_DATA")
    path = Path(data or ".").parent / "measured" / "published_finetune_measurements.csv"
    if not data or not path.is_file():
        pytest.skip("needs a folder `measured` beside the folder named by FARTHING_DATA")
    return rows_of(path)


@pytest.fixture(scope="module")
def others():
    return rows_of(Path(plan_accuracy.__file__).parent / "published_rows.csv")


@pytest.mark.slow
def test_rows_that_are_given_are_met(given):
    found = judge(given)
    memory, speed = (found[name][0] for name in ("memory", "speed"))
    assert (memory["n"], speed["n"]) == (253, 435)
    assert memory["median_percent"] <= 3
    assert speed["median_percent"] <= 6
    assert abs(memory["bias_percent"]) <= 2
    assert abs(speed["bias_percent"]) <= 2
    judged = len(found["rows"]) + len(found["boundaries"]) + len(found["not_expressed"])
    assert judged == len(given)
    assert all(row["why"] for row in found["not_expressed"])


@pytest.mark.slow
def test_rows_of_others_are_of_sources_without_a_say_and_held_by_the_ranges(others):
    assert all(row["use"] == "judges only" and date.fromisoformat(row["read_on"]) for row in others)
    had_a_say = ("fms-acceleration", "huggingface/peft", "torchtune", "llm-foundry")
    assert not [row for row in others if any(name in row["source"] for name in had_a_say)]
    found = judge(others)
    assert len(found["rows"]) + len(found["boundaries"]) >= 290
    for quantity in ("memory", "speed"):
        assert found["ranges"][quantity][0]["share"] >= 0.75
        large = [one["share"] for one in found["ranges"][quantity] if one["n"] >= 10]
        assert min(large) >= 0.75


@pytest.mark.slow
def test_the_table_of_errors_is_what_its_command_makes(given, others):
    made = error_table(judge([*given, *others], strangers=True)["rows"], date(2026, 11, 23))
    known = {row[:4]: (row.low, row.high) for row in error_classes()}
    assert len(made) == 4
    for row in made:
        assert known[tuple(row[:4])] == (float(row[4]), float(row[5]))
