"""Which kernels a run launches, by their names, and what a stranger reads: what only a GPU decides,
and no CPU shows.
"""

from pathlib import Path

import pytest

import farthing.train.profiling
from farthing.errors import HardwareError
from farthing.model.load import quiet_libraries
from launches import launched
from workshop import Heard, make_job, rows_of, train


def launched_by_a_run(tmp_path: Path, family: str, **keys) -> str:
    """The names of what a run of three steps launches, with its evaluation."""
    before = launched(tmp_path)
    rows = rows_of(family, 8, 5)
    keys = {
        "where": {"device": "cuda"},
        "max_steps": 3,
        "eval_rows": rows,
        "predict_with_generate": False,
    } | keys
    assert train(make_job(tmp_path / "run", family, **keys)).state == "finished"
    return "\n".join(name for name, n in launched(tmp_path).items() if n > before[name])


@pytest.fixture(autouse=True)
def no_answers(monkeypatch):
    """What a classifier answers is whatever lay there, and may be no class: read as zeros."""
    monkeypatch.setenv("HOLLOW_ZERO_BYTES", "65536")


LIGER = ("_rms_norm_backward_kernel", "_triton_rope", "_swiglu_backward_kernel")
CASES = {
    "bf16": (
        "llama",
        {},
        (*LIGER, "_cross_entropy", "flash_fwd_kernel", "flash_bwd_dq_dk_dv", "FusedOptimizer"),
        ("fmha", "flex"),
    ),
    "fp16": (
        "llama",
        {"fp16": True},
        ("flash_fwd_kernel", "flash_bwd_dq_dk_dv", "amp"),
        ("fmha", "flex"),
    ),
    "fp32": (
        "llama",
        {"bf16": False},
        ("flex_attention", "flex_attention_backward"),
        ("flash_fwd", "fmha"),
    ),
    "without Liger": ("llama", {"use_liger_kernel": False}, ("flash_fwd_kernel",), LIGER),
    "compiled": (
        "llama",
        {"torch_compile": True, "use_liger_kernel": False},
        ("flash_bwd_dq_dk_dv", "triton_"),
        (*LIGER, "flex"),
    ),
    "both ways": ("bert", {}, ("flash_fwd_kernel", "flash_bwd_dq_dk_dv"), ("fmha", "flex")),
    "dropout": ("bert", {"size": {"dropout": 0.1}}, ("flash_bwd_dq_dk_dv",), ("flex",)),
    "biases": ("t5", {}, ("flash_bwd_dq_dk_dv", "fmha"), ("flex", "softmax_warp_backward")),
    "lora": ("llama", {"method": "lora"}, (*LIGER, "flash_bwd_dq_dk_dv"), ("flex",)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_launches_the_kernels_that_were_chosen_for_it(name, tmp_path):
    family, keys, wanted, unwanted = CASES[name]
    names = launched_by_a_run(tmp_path, family, **keys)
    assert [each for each in wanted if each not in names] == []
    assert [each for each in unwanted if each in names] == []


def test_libraries_say_nothing_beside_a_run(tmp_path, capfd):
    quiet_libraries()
    train(make_job(tmp_path, where={"device": "cuda"}, max_steps=2))
    assert "could not be imported" not in capfd.readouterr().err


def test_a_profile_without_kernels_is_refused(tmp_path):
    job = make_job(tmp_path, where={"device": "cuda"}, max_steps=6)
    with pytest.raises(HardwareError, match="sees no kernels"):
        farthing.train.profiling.profile_job(job, Heard(), tmp_path / "profile", 2)
