"""The bench of the planner: the published measurements it is judged by, and the ranges that come of
them.
"""

from __future__ import annotations

import csv
import os
from datetime import date
from pathlib import Path

import pytest

import plan_accuracy
from farthing.planner.ranges import error_classes
from plan_accuracy import error_table, held_out, judge, width
from plan_rows import NotExpressed, read_case

COLUMNS = (
    *(
        "source",
        "model",
        "params_b",
        "method",
        "precision",
        "quant",
        "optimizer",
        "seq_len",
        "micro_batch",
        "grad_ckpt",
    ),
    *("gpu", "n_gpu", "peak_gb", "tokens_per_s", "hours", "notes"),
)
QWEN = "https://github.com/QwenLM/Qwen/blob/1/README.md"
SWIFT = "https://github.com/modelscope/ms-swift/blob/1/docs/Benchmark.md"
LITGPT = "https://github.com/Lightning-AI/litgpt/blob/1/tutorials/resource-tables.md"


def row_of(source: str, model: str, **cells: str) -> dict[str, str]:
    """A row of a source, made up: its figures mean nothing."""
    usual = dict.fromkeys(COLUMNS, "") | {
        "source": source,
        "model": model,
        "n_gpu": "1",
        "gpu": "A100-80GB",
    }
    usual |= {
        "method": "lora",
        "precision": "bf16",
        "seq_len": "1024",
        "micro_batch": "1",
        "peak_gb": "20",
    }
    return usual | cells


# ---- the published rows ----


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def given() -> list[dict[str, str]]:
    data = os.environ.get("FARTHING_DATA")
    path = Path(data or ".").parent / "measured" / "published_finetune_measurements.csv"
    if not data or not path.is_file():
        pytest.skip("needs a folder `measured` beside the folder named by FARTHING_DATA")
    return rows_of(path)


@pytest.fixture(scope="module")
def others() -> list[dict[str, str]]:
    return rows_of(Path(plan_accuracy.__file__).parent / "published_rows.csv")


def test_rows_that_are_given_are_met(given: list[dict[str, str]]) -> None:
    found = judge(given)
    memory, speed = (found[name][0] for name in ("memory", "speed"))
    assert (memory["n"], speed["n"]) == (257, 439)
    assert memory["median_percent"] <= 3
    assert speed["median_percent"] <= 6
    assert abs(memory["bias_percent"]) <= 2
    assert abs(speed["bias_percent"]) <= 2
    judged = len(found["rows"]) + len(found["boundaries"]) + len(found["not_expressed"])
    assert judged == len(given)
    assert all(row["why"] for row in found["not_expressed"])


def test_rows_of_others_are_of_sources_without_a_say_and_held_by_the_ranges(
    others: list[dict[str, str]],
) -> None:
    assert all(row["use"] == "judges only" and date.fromisoformat(row["read_on"]) for row in others)
    had_a_say = ("fms-acceleration", "huggingface/peft", "torchtune", "llm-foundry")
    assert not [row for row in others if any(name in row["source"] for name in had_a_say)]
    found = judge(others)
    assert len(found["rows"]) + len(found["boundaries"]) >= 290
    for quantity in ("memory", "speed"):
        assert found["ranges"][quantity][0]["share"] >= 0.75


def test_the_table_of_errors_is_what_its_command_makes(
    given: list[dict[str, str]], others: list[dict[str, str]]
) -> None:
    made = error_table(judge([*given, *others], strangers=True)["rows"], date(2026, 11, 23))
    known = {row[:4]: (row.low, row.high) for row in error_classes()}
    assert len(made) == 4
    for row in made:
        assert known[tuple(row[:4])] == (float(row[4]), float(row[5]))


def test_a_range_holds_its_share_of_each_source_that_has_no_say_in_it() -> None:
    alike = {name: [x / 10 for x in range(-10, 11)] for name in "abcd"}
    low, high = width(alike)
    assert low == pytest.approx(-high, abs=0.11)
    assert 0.75 <= held_out(alike, 1.0) <= 0.95
    one_apart = alike | {"e": [3.0] * 21}
    assert held_out(one_apart, 1.0) < held_out(alike, 1.0)


# ---- what rows say ----


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"quant": "hqq-3bit", "method": "qlora"}, "hqq-3bit weights"),
        ({"n_gpu": "16", "gpu": "L40S"}, "network between them"),
        ({"precision": "fp8"}, "fp8"),
        ({"seq_len": ""}, "no length"),
        ({"micro_batch": ""}, "no length"),
        ({"peak_gb": "", "tokens_per_s": ""}, "nothing measured"),
        ({"method": "ia3"}, "method ia3"),
        ({"notes": "CPU offload"}, "off-load"),
        ({"notes": "GB; HSDP", "n_gpu": "8"}, "copied between machines"),
        (
            {"notes": "GB; DeepSpeed (stage not stated)", "n_gpu": "8", "method": "full"},
            "DeepSpeed",
        ),
        ({"notes": "GB; gradient checkpointing not stated"}, "recomputed"),
    ],
)
def test_what_can_not_be_expressed_says_why(cells: dict[str, str], why: str) -> None:
    with pytest.raises(NotExpressed, match=why):
        read_case(row_of(QWEN, "Qwen-7B", **cells))


def test_cells_that_are_empty_odd_or_missing_stop_nothing() -> None:
    rows = [row_of(QWEN, "Qwen-7B", tokens_per_s="1,234.5"), row_of(LITGPT, "tiiuae/falcon-180b")]
    for name in COLUMNS:
        for value in ("", "None", "?", "n/a", "yes"):
            rows.append(row_of(SWIFT, "qwen-7b-chat") | {name: value})
    rows.append(
        {
            name: value
            for name, value in row_of(QWEN, "Qwen-7B").items()
            if name not in ("hours", "params_b")
        }
    )
    result = judge(rows)
    assert len(result["rows"]) + len(result["not_expressed"]) == len(rows)
    assert result["rows"][0]["measured_tokens_per_s"] == 1234.5
