"""A hollow GPU whose memory runs out anywhere, or that breaks: no update twice, no hang, words, and
a run that goes on.

Allocations, products and launches are made to fail by the hollow GPU (`hollow_fault` in
`bench/hollow/cudart.c`). Nothing is computed, so that what is compared is which steps were taken
and how often weights were updated, never a value.
"""

import contextlib
import ctypes
import gc
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import farthing.train.build  # noqa: E402
from farthing.errors import DeviceError, OutOfMemoryError  # noqa: E402
from farthing.export.folders import export_run  # noqa: E402
from farthing.run.accounts import read_ledger  # noqa: E402
from launches import launched  # noqa: E402
from workshop import log_of, make_job, rows_of, train  # noqa: E402

MEMORY, PINNED, PRODUCT, LAUNCH, BREAK = range(5)
ALWAYS = 1 << 30
KEYS = {
    "max_steps": 3,
    "save_steps": 1,
    "n_rows": 16,
    "global_batch_size": 4,
    "use_liger_kernel": False,
    "size": {"layers": 1, "hidden": 32},
    "eval_strategy": "steps",
    "eval_steps": 2,
    "where": {"device": "cuda"},
}


@cache
def hollow():
    """The library that stands in for CUDA's runtime."""
    return ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])


@contextlib.contextmanager
def fault(which: int, at: int, count: int = 1) -> Iterator[None]:
    """Within the block the at-th, counted from here, and the next ones fail."""
    hollow().hollow_fault(which, at, count)
    try:
        yield
    finally:
        hollow().hollow_fault(which, 0, 0)


def asked(which: int) -> int:
    """How many there were since the fault was set."""
    return int(hollow().hollow_asked(which))


@pytest.fixture(autouse=True)
def every_tensor_is_an_allocation():
    """torch keeps no blocks: what it asks for is asked of CUDA."""
    torch.cuda.init()
    torch.cuda.memory.caching_allocator_enable(False)
    torch._C._host_emptyCache()
    yield
    torch.cuda.memory.caching_allocator_enable(True)
    gc.collect()


def n_updates(folder: Path) -> int:
    """Kernels of AdamW that this process has launched."""
    return sum(n for name, n in launched(folder).items() if re.search("[aA]dam", name))


def job_of(folder: Path, **keys):
    return make_job(folder, eval_rows=rows_of("llama", 3, 5), **{**KEYS, **keys})


def steps_of(job) -> list[int]:
    return [row["step"] for row in log_of(job) if "examples" in row]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """How often a whole run asks for memory, products and launches; and its updates, at -1."""
    folder = tmp_path_factory.mktemp("untouched")
    torch.cuda.init()  # which would turn the cache on again
    torch.cuda.memory.caching_allocator_enable(False)
    before = n_updates(folder)
    for which in (MEMORY, PRODUCT, LAUNCH):
        hollow().hollow_fault(which, 0, 0)
    train(job_of(folder))
    found = {which: asked(which) for which in (MEMORY, PRODUCT, LAUNCH)}
    return found | {-1: n_updates(folder) - before}


PLACES = [(MEMORY, share) for share in (0.004, 0.07, 0.15, 0.3, 0.44, 0.58, 0.73, 0.87, 0.99)]
PLACES += [(PRODUCT, share) for share in (0.2, 0.5, 0.8)] + [
    (LAUNCH, share) for share in (0.15, 0.4, 0.65, 0.9)
]


@pytest.mark.parametrize(("which", "share"), PLACES)
def test_memory_that_is_missing_once_is_survived_or_said(which, share, untouched, tmp_path):
    job, before = job_of(tmp_path), n_updates(tmp_path)
    ended = "said"
    with fault(which, 1 + int(share * untouched[which])):
        with contextlib.suppress(OutOfMemoryError):
            ended = train(job).state
        assert asked(which) > share * untouched[which]
    if ended == "said":
        assert (which, share) in PLACES[:2] or share <= 0.15, (
            "only what comes before the first step ends a run"
        )
        train(job)
    else:
        assert n_updates(tmp_path) - before == untouched[-1], (
            "an update was made twice, or left out"
        )
    assert steps_of(job) == [1, 2, 3]


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_memory_that_stays_away_ends_in_words_and_the_run_goes_on_later(share, untouched, tmp_path):
    job = job_of(tmp_path)
    with (
        fault(MEMORY, 1 + int(share * untouched[MEMORY]), ALWAYS),
        pytest.raises(OutOfMemoryError, match="out of memory"),
    ):
        train(job)
    accounts = read_ledger(Path(job.output_dir) / "ledger.jsonl").accounts
    assert accounts[-1].state == "failed"
    assert train(job).state == "finished"
    assert steps_of(job) == [1, 2, 3]


@pytest.mark.parametrize(
    ("share", "error", "words"),
    [
        (0.1, 700, "illegal memory access"),
        (0.5, 719, "unspecified launch failure"),
        (0.7, 214, "uncorrectable ECC error"),
        (0.95, 710, "device-side assert"),
    ],
)
def test_a_gpu_that_breaks_ends_in_words_and_the_run_goes_on_later(
    share, error, words, untouched, tmp_path
):
    job = job_of(tmp_path)
    with fault(BREAK, int(share * untouched[LAUNCH]), error):
        try:
            train(job)
            said = ""
        except DeviceError as failed:
            said = str(failed)
            hollow().hollow_fault(BREAK, 0, 0)  # while nothing of the attempt has been freed
    assert words in said or "CUBLAS_STATUS_EXECUTION_FAILED" in said
    assert read_ledger(Path(job.output_dir) / "ledger.jsonl").accounts[-1].state == "failed"
    assert train(job).state == "finished"
    assert steps_of(job) == [1, 2, 3]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch_offload"])
def test_memory_that_cannot_be_pinned_costs_time_or_is_said(optim, tmp_path, monkeypatch):
    """Arrays go without; torch itself pins a little for every number that it reads, and can't."""
    job, state = (
        job_of(tmp_path, optim=optim, save_steps=10, eval_strategy="no"),
        farthing.train.build.allocate_state,
    )

    def scarce(optimizer):
        hollow().hollow_fault(PINNED, 1, 6)
        state(optimizer)

    monkeypatch.setattr(farthing.train.build, "allocate_state", scarce)
    with fault(PINNED, 0):
        if optim == "adamw_torch_fused":
            assert train(job).state == "finished"
            assert asked(PINNED) > 6
        else:
            with pytest.raises(OutOfMemoryError, match="of main memory can't be pinned"):
                train(job)


@pytest.mark.parametrize("at", [6, 15, 30])
def test_a_quantized_model_that_does_not_fit_is_not_called_damaged(at, tmp_path):
    pytest.importorskip("bitsandbytes")
    job = job_of(tmp_path, method="qlora", pretrained=True)
    with fault(MEMORY, at), pytest.raises(OutOfMemoryError, match="out of memory") as caught:
        train(job)
    assert caught.value.where == "model.model_name_or_path"


def test_an_export_leaves_the_gpu_alone(tmp_path):
    job = job_of(tmp_path, method="lora", pretrained=True, max_steps=1)
    train(job)
    with fault(MEMORY, 1, ALWAYS):
        export_run(Path(job.output_dir), tmp_path / "merged", "merged")
        assert asked(MEMORY) == 0
