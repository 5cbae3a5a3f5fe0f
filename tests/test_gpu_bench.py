"""The bench for GPUs, as far as a CPU can follow: its arithmetic, tables and budget, and all of it
at toy sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farthing.train.optim import state_bytes
from on_gpu import table, verdict, work
from on_gpu.work import SMALL

ROOT = Path(__file__).parent.parent


def test_everyone_takes_the_examples_that_farthing_draws(tmp_path):
    work.prepare(tmp_path, "toy", SMALL)
    from farthing.train.loop import take_step
    from peers.assignment import Examples

    drawn = Examples.load(tmp_path / "toy-chat" / "train.npz")
    order = json.loads((tmp_path / "toy-chat" / "facts.json").read_text())["order"][:5]
    assert [len(step) for step in order] == [8] * 5
    assert len({index for step in order for index in step}) == 40
    values = work.job_values(tmp_path / "toy-chat", tmp_path / "out", "lora", SMALL, 5, 3.0)
    with work.opened(values, drawn) as run:
        assert [run.feed.batches.examples_of(step).tolist() for step in range(5)] == order
        assert (run.train_examples.tokens.lengths == drawn.lengths).all()
        take_step(run)
        run.log.settle()
        assert run.progress.n_tokens == drawn.lengths[order[0]].sum()


# ---- tables ----


def row(who: str, speed: float, **more: Any) -> dict[str, Any]:
    """A row of the 1B shape."""
    asked = {"kind": "row", "who": who, "shape": "1B", "method": "lora", "lengths": "chat"}
    figures = {"step_s": 0.5, "useful_share": 1.0, "peak_bytes": 20 << 30}
    return {**asked, "tokens_per_s": speed, **figures, **more}


FACTS: list[dict[str, Any]] = [
    {"kind": "facts", "device": "A GPU", "peak_flops": 989e12, "matmul_flops": 790e12}
    | {"matmul_size": 8192, "copy_bytes_per_s": 4e12},
    {"kind": "work", "shape": "1B", "lengths": "chat"}
    | {"flops_per_token": {"lora": {"needed": 5e9, "usual": 6e9}}},
]


def test_every_target_has_a_line_that_says_what_was_measured_and_whether_it_is_met():
    flops = {"lora": {"needed": 5e9, "usual": 6e9}, "full": {"needed": 8e9, "usual": 9e9}}
    given = [
        FACTS[0],
        *({**FACTS[1], "lengths": name, "flops_per_token": flops} for name in ("chat", "full")),
    ]
    given += [
        row("farthing", 62_000.0, method="full", idle_percent=4.0),
        row("trl-tuned", 40_000.0, method="full"),
    ]
    given += [
        row("farthing", 66_000.0, method="full", lengths="full", idle_percent=0.4),
        row("hf", 40_000.0, method="full"),
    ]
    said = {line.target: line[1:] for line in verdict.lines_of(given)}
    unmeasured = said["8B lora, chat lengths: 65% of the bf16 product here"]
    assert unmeasured == ("not measured", None)
    assert said["1B full, chat lengths: 62% of the bf16 product here"] == ("62.8%", True)
    assert said["1B full: chats within 10 % of full rows in tokens/s"] == ("0.94", True)
    assert said["the GPU idle for less than 3 % of a step: 1B full chat"] == ("4.0 %", False)
    assert said["1B full chat: 1.3 times TRL, tuned"] == ("1.55", True)
    assert said["1B full chat: 2 times Trainer as it comes"] == ("1.55", False)
    way = row("", 50_000.0, kind="variant", group="compile", way="default", failed="no room")
    drawn = table.draw([*given, way], 3.0)
    assert "failed: no room" in drawn
    assert "could not be drawn" not in drawn
    assert drawn.index("Targets") > drawn.index("Left out")
    assert "NOT MET" in drawn


# ---- the whole program ----


def call(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`bench/gpu.sh` with this Python."""
    environment = {**os.environ, "PYTHON": sys.executable, **more}
    command = ["bash", str(ROOT / "bench" / "gpu.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_state_of_the_optimizer_is_counted_on_a_device_with_a_number_and_without():
    model = torch.nn.Linear(100, 100, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    moments = torch.zeros_like(model.weight)
    optimizer.state[model.weight] = {"step": torch.zeros(()), "exp_avg": moments}
    for device in (torch.device("meta", 0), torch.device("meta")):
        assert state_bytes(optimizer, device) == 40_000


@pytest.mark.slow
def test_the_bench_runs_from_end_to_end_at_toy_sizes(tmp_path):
    for words in (["fast"], ["vary", "--shapes", "toy"]):
        done = call(words[0], str(tmp_path), "--smoke", *words[1:])
        assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    rows = table.read_rows(tmp_path / "rows.jsonl")
    ours = [one for one in rows if one.get("who") == "farthing"]
    assert len(ours) == 6
    assert all(one["tokens_per_s"] > 0 for one in ours)
    measured = [one for one in ours if one["promised"]["calibration"] != "formulas only"]
    assert {(one["shape"], one["method"], one["lengths"]) for one in measured} == {
        ("toy", "lora", "full"),
        ("toy", "full", "full"),
    }
    of_others = [one for one in rows if one["kind"] == "row" and one["who"] != "farthing"]
    assert len(of_others) == 6  # two on the toy by both methods, one on the others
    for one in of_others:
        assert "tokens_per_s" in one or "not installed" in one["failed"], one
    varied = [one for one in rows if one["kind"] == "variant"]
    groups = {one["group"] for one in varied}
    assert groups >= {"as planned", "attention", "adapters", "optimizer", "compile"}
    assert np.isfinite([one["tokens_per_s"] for one in varied]).all(), "none failed"
    assert not [one for one in rows if one["kind"] == "left out"]
    assert "Promised and happened" in (tmp_path / "tables.txt").read_text()
