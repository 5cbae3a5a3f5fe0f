"""A few steps under the profiler: parts by our own names that add up to the step, and a trace."""

from pathlib import Path

import pytest

from farthing.config.load import load_job
from farthing.events import ignore
from farthing.train.profiling import profile_job
from workshop import job_file, read_json


@pytest.mark.slow
def test_a_step_is_named_forward_and_backward_in_parts_and_in_a_trace(tmp_path):
    path = job_file(
        tmp_path,
        "llama",
        method="lora",
        pretrained=True,
        micro_batch_tokens=64,
        gradient_checkpointing=True,
    )
    found = profile_job(load_job(path), ignore, tmp_path / "out", 2)
    assert not (tmp_path / "run").exists(), "the job's own folder is not touched"
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
    trace = read_json(Path(found["trace"]))
    assert Path(found["trace"]).name.endswith(".pt.trace.json"), (
        "the name that TensorBoard looks for"
    )
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"farthing: attention", "farthing: head", "farthing: optimizer"} <= names


def test_what_can_not_be_profiled_is_refused(tmp_path, cli):
    path = str(job_file(tmp_path))
    assert "1 to 100" in cli.err("profile", path, "--steps", "0")
    cli("profile", path, "--output", path, code=2)
