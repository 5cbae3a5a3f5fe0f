"""What a step asks of a GPU: the one wait that docs/explanation/gpu.md names, no copy that is
waited for, kernels by name.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from farthing.config.load import load_job
from farthing.tiny import write_jsonl
from farthing.train.loop import take_step
from farthing.train.opened_run import opened_run
from hollow_gpu import counted
from launches import launched
from small_models import make_model_folder
from workshop import TASK, rows_of

N_LAYERS, N_STEPS = 3, 3


def steps_of(
    folder: Path, family: str, method="full", *, dropout: float = 0.0, **train
) -> dict[str, Any]:
    """What a step counts of a small job, by name, once it is under way; with its micro-batches and
    launches by kernel.
    """
    rows = rows_of(family, 64)
    make_model_folder(
        folder / "model",
        [json.dumps(row) for row in rows],
        family,
        layers=N_LAYERS,
        dropout=dropout,
    )
    write_jsonl(folder / "train.jsonl", rows)
    train = {"global_batch_size": 16, "micro_batch_tokens": 100, "learning_rate": 1e-4} | train
    values = {
        "task": TASK[family],
        "model": {"model_name_or_path": str(folder / "model"), "init": "random"},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 512},
        "method": method,
        "train": {"max_steps": 100, "probe": False, "eval_strategy": "no", **train},
        "where": {"usd_per_hour": 1.0},
        "output_dir": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
    }
    (folder / "run").mkdir()
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    n = 0
    with opened_run(load_job(path), lambda _: None) as run:
        for _ in range(2):
            take_step(run)
        before, earlier = counted(), launched(folder)
        for step in range(2, 2 + N_STEPS):
            take_step(run)
            n += len(run.feed.table(step))
        after, now = counted(), launched(folder)
        run.log.settle()
    now.subtract(earlier)
    each = {name: (after[name] - before[name]) / N_STEPS for name in after}
    return {
        **each,
        "micro_batches": n,
        "kernels": {name: count / n for name, count in now.items() if count},
    }


def times(found: dict[str, Any], *words: str) -> float:
    """Launches a micro-batch of the kernels that have all these words in their names."""
    return sum(
        count for name, count in found["kernels"].items() if all(word in name for word in words)
    )


LORA = {"name": "lora", "lora_r": 4}


@pytest.mark.parametrize(
    ("family", "method", "how"),
    [
        ("llama", "full", {}),
        ("llama", LORA, {"fp16": True}),
        ("llama", LORA | {"lora_dropout": 0.1}, {"dropout": 0.1}),
        ("llama", "full", {"bf16": False, "neftune_noise_alpha": 5.0}),
        ("bert", "full", {"dropout": 0.1}),
        ("t5", "full", {"label_smoothing_factor": 0.1}),
    ],
)
def test_the_host_waits_for_the_step_before_and_for_nothing_else(family, method, how, tmp_path):
    found = steps_of(tmp_path, family, method, **how)
    assert found["micro_batches"] > N_STEPS
    # its losses and norm, whose copy was begun a step ago
    assert (found["waits"], found["copies_down"], found["waits_for_copies"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("optim", "more"), [("adamw_torch", 1), ("adamw_8bit", 1), ("paged_adamw_8bit", 2)]
)
def test_other_optimizers_wait_for_the_norm(optim, more, tmp_path):
    """And paged state, which the host may read, once more; never for each weight."""
    if optim != "adamw_torch":
        pytest.importorskip("bitsandbytes")
    found = steps_of(tmp_path, "llama", optim=optim)
    assert found["waits"] == 1 + more


def test_attention_is_one_kernel_a_layer_and_direction(tmp_path):
    for family in ("llama", "bert"):
        (tmp_path / family).mkdir()
        found = steps_of(tmp_path / family, family)
        assert times(found, "flash_fwd") == times(found, "flash_bwd_dq_dk_dv") == N_LAYERS
        assert times(found, "fmha") == 0
        assert times(found, "softmax_warp") <= 2  # a classifier's loss, forward and backward


def test_weights_and_gradients_are_not_cast_in_every_micro_batch(tmp_path):
    """Adapters, of which each was cast in every micro-batch, as was its gradient, and added by
    itself.
    """
    found = steps_of(tmp_path, "llama", LORA)
    assert times(found, "bfloat16_copy") < 3 * N_LAYERS
    assert found["launches"] * N_STEPS / found["micro_batches"] < 400
