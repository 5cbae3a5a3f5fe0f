"""A few steps under the profiler: parts by our own names that add up to the step, and a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farthing.config.load import load_job
from farthing.events import ignore
from farthing.train.profiling import profile_job
from workshop import job_file


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a profile of a small LoRA job says."""
    folder = tmp_path_factory.mktemp("profile")
    path = job_file(
        folder,
        "llama",
        method="lora",
        pretrained=True,
        micro_batch_tokens=64,
        gradient_checkpointing=True,
    )
    profiled = profile_job(load_job(path), ignore, folder / "out", 2)
    assert not (folder / "run").exists(), "the job's own folder is not touched"
    return profiled


@pytest.mark.slow
def test_a_step_is_named_forward_and_backward(found):
    parts = {part["name"]: part["step_s"] for part in found["parts"]}
    assert {
        "attention",
        "layers with LoRA",
        "feed-forward",
        "head",
        "optimizer",
        "norms",
        "copies",
        "data",
    } <= set(parts)
    assert sum(parts.values()) == pytest.approx(found["step_s"], rel=0.05)
    assert parts["attention"] > 0


@pytest.mark.slow
def test_the_trace_can_be_opened_and_has_our_names(found):
    trace = json.loads(Path(found["trace"]).read_text())
    assert Path(found["trace"]).name.endswith(".pt.trace.json"), (
        "the name that TensorBoard looks for"
    )
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"farthing: attention", "farthing: head", "farthing: optimizer"} <= names


def test_what_can_not_be_profiled_is_refused(tmp_path, cli):
    path = str(job_file(tmp_path, "llama"))
    assert "1 to 100" in cli.err("profile", path, "--steps", "0")
    cli("profile", path, "--output", path, code=2)
