"""What a run expects of memory before its first step, held against what torch's allocator then
gives out, to the byte.
"""

import gc

import pytest

torch = pytest.importorskip("torch")

from farthing.train.loop import take_step  # noqa: E402
from farthing.train.memory import rehearse  # noqa: E402
from workshop import make_job, opened, rows_of  # noqa: E402

WORKSPACES = 72 << 20  # of cuBLAS, one for each thread that multiplies: nobody counts them


@pytest.mark.parametrize("budget", [16_384, 3000], ids=["one micro-batch", "several"])
@pytest.mark.parametrize(
    ("method", "every", "more"),
    [
        ("full", False, {}),
        ("full", True, {}),
        ("lora", 2, {}),
        ("full", True, {"optim": "adamw_bf16_stochastic_round"}),
    ],
)
def test_what_is_expected_is_the_peak(method, every, more, budget, tmp_path):
    rows = [
        {**row, "prompt": row["prompt"] * (1 + i % 5)} for i, row in enumerate(rows_of("llama", 64))
    ]
    keys = {
        "size": {"hidden": 1024, "layers": 6},
        "method": method,
        "gradient_checkpointing": every,
    }
    keys |= {
        "bf16": True,
        "probe": False,
        "torch_compile": False,
        "where": {"device": "cuda"},
    } | more
    job = make_job(
        tmp_path, rows=rows, max_steps=2, global_batch_size=64, micro_batch_tokens=budget, **keys
    )
    gc.collect()  # the model of the test before is a circle of references
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated()
    with opened(job) as run:
        rehearse(run, run.steps, run.forecast)
        take_step(run)
        run.log.settle()
        peak = torch.cuda.max_memory_allocated() - resting
        assert run.memory.n_tokens <= budget
        assert run.memory.accumulates == (budget == 3000)
        assert run.log.expected_bytes - resting == pytest.approx(peak, rel=0.05, abs=WORKSPACES), (
            run.memory.moments()
        )
