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
from plan_rows import NotExpressed, gpu_of, n_micro_batches_of, read_case, shape_of
from plan_stacks import GIB, meter_of

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
FSDP_QLORA = "https://github.com/AnswerDotAI/fsdp_qlora/blob/1/benchmarks.md"


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
    ("model", "n_parameters"),
    [
        ("Qwen-1.8B", 1_836_828_672),
        ("Qwen-7B", 7_721_324_544),
        ("Qwen/Qwen-7B-Chat", 7_721_324_544),
        ("qwen-7b-chat", 7_721_324_544),
        ("qwen1half-7b-chat", 7_721_324_544),
        ("Qwen1.5-7B-Chat", 7_721_324_544),
        ("Qwen-14B", 14_167_290_880),
        ("Qwen-72B", 72_287_920_128),
        ("qwen1half-0_5b-chat", 463_987_712),
        ("Qwen1.5-4B", 3_950_369_280),
        ("stabilityai/stablelm-base-alpha-3b", 3_637_321_728),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("llama2-7b-chat", 6_738_415_616),
        ("LLaMA 7B", 6_738_415_616),
        ("Llama-2-70B", 68_976_648_192),
        ("mistral-7b-instruct-v0.1", 7_241_732_096),
        ("unsloth/mistral-7b-bnb-4bit", 7_241_732_096),
        ("Meta-Llama-3-8B", 8_030_261_248),
        ("llama3-8b-instruct", 8_030_261_248),
        ("Llama 3.1 8B", 8_030_261_248),
        ("gemma-7b", 8_537_680_896),
        ("codellama-34b", 33_743_970_304),
    ],
)
def test_models_by_the_names_that_tables_give_them(model: str, n_parameters: int) -> None:
    assert shape_of(model).n_parameters == n_parameters


@pytest.mark.parametrize(
    "model", ["tiiuae/falcon-180b", "glm-10b", "baichuan-m1", "qwen-vl-chat", "no-such-model"]
)
def test_models_without_shapes_are_named(model: str) -> None:
    with pytest.raises(NotExpressed, match=r"no (shapes|config)"):
        shape_of(model)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-80GB", "A100-80GB"),
        ("A100 80G", "A100-80GB"),
        ("NVIDIA A100 (80GB)", "A100-80GB"),
        ("A100-SXM4-80GB", "A100-80GB"),
        ("A100-40GB", "A100-40GB"),
        ("1x A100 40GB", "A100-40GB"),
        ("RTX 3090", "RTX 3090"),
        ("4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("H100-80GB", "H100-80GB"),
        ("H100", "H100-80GB"),
        ("T4", "T4"),
        ("L40S", "L40S"),
        ("RTX A5000", "A5000"),
        ("RTX6000Ada", "RTX 6000 Ada"),
        ("A100-80GB (SXM4, NVLink)", "A100-80GB"),
        ("H100-80GB (node of 8)", "H100-80GB"),
        ("H100 SXM5 80GB", "H100-80GB"),
        ("H100 PCIe", "H100-PCIe"),
        ("H100 94GB", "H100-NVL"),
        ("H100-96GB", "H100-80GB"),
        ("A10G", "A10G"),
        ("1x A10G", "A10G"),
    ],
)
def test_gpus_by_the_names_that_tables_give_them(text: str, name: str) -> None:
    assert gpu_of(text).name == name


def test_an_a100_that_held_more_than_40_gb_is_the_larger_one() -> None:
    assert gpu_of("A100", 12.0).name == "A100-40GB"
    assert gpu_of("A100", 62.5).name == "A100-80GB"


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


@pytest.mark.parametrize(
    ("words", "n"),
    [
        ("gradient accumulation 8", 8),
        ("gradient_accumulation_steps=16", 16),
        ("accumulation steps 4", 4),
        ("grad_accum: 2", 2),
        ("effective batch 32", 8),
        ("effective batch size of 4", 1),
        ("no accumulation", 1),
        ("batch of 4", 1),
    ],
)
def test_accumulation_in_words(words: str, n: int) -> None:
    assert n_micro_batches_of(words, 4) == n


@pytest.mark.parametrize(
    ("words", "meter", "unit"),
    [
        ("gib, torch max_memory_allocated; nvidia-smi peak=3", "allocated", GIB),
        ("gb, nvidia-smi; packed", "nvidia-smi", 1e9),
        ("gb reserved", "reserved", 1e9),
        ("", "allocated", GIB),
    ],
)
def test_meters_and_units_in_words(words: str, meter: str, unit: float) -> None:
    assert meter_of(words) == (meter, unit)


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
