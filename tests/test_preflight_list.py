"""The pre-flight list of a job."""

from pathlib import Path
from typing import Any

from farthing.doctor import check_choices
from workshop import make_job


def choices(folder: Path, **keys) -> dict[str, Any]:
    return {check.name: check for check in check_choices(make_job(folder, **keys))}


def test_the_list_answers_by_name_what_was_chosen_and_what_is_missing(tmp_path):
    plain = choices(tmp_path)
    names = [
        "GPU choice",
        "spot",
        "method",
        "precision",
        "activation checkpointing",
        "micro-batch",
        "save interval",
    ]
    assert list(plain) == [*names, "store", "cap"]
    assert plain["cap"].state == "warning", "there is a price and no limit"
    assert plain["store"].state == "ok"
    keys = {
        "method": "lora",
        "limits": {"max_usd": 5, "max_hours": 2},
        "save_steps": 7,
        "bf16": True,
    }
    found = choices(
        tmp_path,
        **keys,
        where={"spot": True, "gpu": ["L4"]},
        micro_batch_tokens=512,
        gradient_checkpointing=2,
    )
    assert "cap" not in found, "there is one"
    assert found["store"].state == "warning", "a spot machine and nothing that outlives it"
    assert "512 tokens at once" in found["micro-batch"].found
    assert "every 7 steps" in found["save interval"].found
    assert "every 2 layers" in found["activation checkpointing"].found
    assert found["GPU choice"].found.startswith("L4")
    assert "r 16" in found["method"].found
    assert found["precision"].found == "bf16"
