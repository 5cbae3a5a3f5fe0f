"""The bench for GPUs, as far as a CPU can follow: its arithmetic, tables and budget, and all of it
at toy sizes.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from farthing.train.optim import state_bytes
from on_gpu import table, work
from on_gpu.work import SMALL
from workshop import read_json

ROOT = Path(__file__).parent.parent


def test_everyone_takes_the_examples_that_farthing_draws(tmp_path):
    work.prepare(tmp_path, "toy", SMALL)
    from farthing.train.loop import take_step
    from peers.assignment import Examples

    drawn = Examples.load(tmp_path / "toy-chat" / "train.npz")
    order = read_json(tmp_path / "toy-chat" / "facts.json")["order"][:5]
    assert [len(step) for step in order] == [8] * 5
    assert len({index for step in order for index in step}) == 40
    values = work.job_values(tmp_path / "toy-chat", tmp_path / "out", "lora", SMALL, 5, 3.0)
    with work.opened(values, drawn) as run:
        assert [run.feed.batches.examples_of(step).tolist() for step in range(5)] == order
        assert (run.train_examples.tokens.lengths == drawn.lengths).all()
        take_step(run)
        run.log.settle()
        assert run.progress.n_tokens == drawn.lengths[order[0]].sum()


# ---- the whole program ----


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
        command = ["bash", ROOT / "bench/gpu.sh", words[0], tmp_path, "--smoke", *words[1:]]
        environment = {**os.environ, "PYTHON": sys.executable}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    rows = table.read_rows(tmp_path / "rows.jsonl")
    ours = [one for one in rows if one.get("who") == "farthing"]
    assert len(ours) == 6
    assert all(one["tokens_per_s"] > 0 for one in ours)
    varied = [one for one in rows if one["kind"] == "variant"]
    assert np.isfinite([one["tokens_per_s"] for one in varied]).all(), "none failed"
    assert "Promised and happened" in (tmp_path / "tables.txt").read_text()
