"""What is asked of a GPU before anything runs on it: that torch has kernels for it, and kernels
whose bits repeat.

There is no GPU: torch's answers about one are made up here.
"""

import json
import os
import warnings

import pytest
import torch

from farthing.after.predict import numerics_of_run
from farthing.doctor import check_machine
from farthing.errors import HardwareError
from farthing.model.hardware import (
    choose_numerics,
    free_bytes,
    must_be_built_for,
    not_deterministic,
    why_not_deterministic,
)
from farthing.train.resolve import check_extras
from workshop import make_job, train, with_gpu

CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.fixture
def gpu(monkeypatch):
    """A machine with the GPU that this says, and every setting of this process as it was
    afterwards.
    """
    about = {"name": "NVIDIA H100", "capability": (9, 0), "built_for": CU130}
    with_gpu(monkeypatch, is_available=True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: about["name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: about["capability"])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: about["built_for"])
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    before = (
        cuda.matmul.allow_tf32,
        cudnn.allow_tf32,
        cuda.cudnn_sdp_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
    )
    yield about
    torch.use_deterministic_algorithms(False)
    cuda.matmul.allow_tf32, cudnn.allow_tf32 = before[:2]
    cuda.enable_cudnn_sdp(before[2])
    cudnn.deterministic, cudnn.benchmark = before[3:]


# ---- kernels for this GPU ----


def test_the_doctor_says_of_each_gpu_whether_it_can_be_used(gpu, monkeypatch, tmp_path):
    with_gpu(monkeypatch, device_count=1, mem_get_info=(79 << 30, 79 << 30))

    def found():
        return next(
            (one.state, one.found) for one in check_machine(tmp_path) if one.name == "gpu 0"
        )

    gpu["name"] = "NVIDIA H100 80GB HBM3"
    assert found() == ("ok", "NVIDIA H100 80GB HBM3, compute 9.0, 79.0 GiB of 79.0 GiB free, bf16")
    gpu["name"] = "NVIDIA H100 80GB HBM3 MIG 7g.80gb"
    assert found()[0] == "ok"
    assert "no estimate before a run" in found()[1]
    gpu |= {"name": "Tesla V100-SXM2-16GB", "capability": (7, 0)}
    state, words = found()
    assert state == "failed"
    assert "no kernels for Tesla V100-SXM2-16GB (sm_70)" in words


def test_a_v100_is_refused_without_torchs_own_warning_and_taken_by_a_torch_for_it(gpu, monkeypatch):
    def name(*_):
        warnings.warn(
            "Found GPU0 Tesla V100 which is of compute capability (CC) 7.0.", stacklevel=1
        )
        return "Tesla V100"

    gpu["capability"] = (7, 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HardwareError, match="no kernels for Tesla V100"):
            choose_numerics("auto", None, None)
        gpu["built_for"] = CU126
        assert choose_numerics("auto", None, None).name == "fp16"


@pytest.mark.parametrize(
    ("capability", "built_for"),
    [
        ((7, 0), CU126),
        ((7, 5), CU130),
        ((8, 9), CU130),
        ((12, 1), CU130),
        ((13, 0), CU130),
        ((8, 0), ["compute_70"]),
        ((9, 0), ["sm_90a"]),
        ((8, 0), []),
    ],
)
def test_a_gpu_is_taken_that_torch_has_kernels_for(capability, built_for):
    must_be_built_for("it", capability, built_for)


@pytest.mark.parametrize(
    ("capability", "built_for", "to_do"),
    [
        (
            (7, 0),
            CU130,
            "pip install 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126",
        ),
        ((6, 1), CU130, "whl/cu126"),
        ((12, 0), CU126, "pip install --upgrade torch"),
        ((8, 0), ["sm_86"], "pip install --upgrade torch"),
        ((9, 1), ["sm_90a"], "pip install --upgrade torch"),
    ],
)
def test_a_gpu_that_torch_has_no_kernels_for_is_refused_with_what_to_install(
    capability, built_for, to_do
):
    with pytest.raises(HardwareError) as caught:
        must_be_built_for("Tesla V100", capability, built_for)
    assert to_do in str(caught.value)
    assert f"no kernels for Tesla V100 (sm_{capability[0]}{capability[1]})" in str(caught.value)


# ---- the allocator ----


def test_the_allocator_is_told_before_anyone_starts_the_gpu(gpu, monkeypatch):
    """In a notebook, where torch was imported before: once the GPU was started its allocator is
    told no more.
    """
    told = []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu["is_started"])
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda *_: gpu.update(is_started=True) or gpu["name"]
    )
    gpu["is_started"] = False
    choose_numerics("auto", None, None)
    assert told == ["expandable_segments:True"]
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"

    def refuse(*_, **__):
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(torch, "empty", refuse)
    choose_numerics("auto", None, None)
    assert told[1:] == ["expandable_segments:False"]
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"


def test_what_the_allocator_keeps_can_be_taken(monkeypatch):
    with_gpu(monkeypatch, mem_get_info=(5, 9), memory_reserved=3, memory_allocated=1)
    assert free_bytes(torch.device("cuda")) == 7


# ---- answers after a run ----


@pytest.mark.parametrize(
    ("capability", "config", "precision"),
    [((9, 0), {}, "bf16"), ((7, 5), {}, "fp16"), ((7, 5), {"dtype": "bfloat16"}, "fp32")],
)
def test_a_model_answers_on_a_gpu_in_what_that_has(capability, config, precision, gpu, tmp_path):
    gpu["capability"] = capability
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config), encoding="utf-8")
    numerics = numerics_of_run(tmp_path)
    assert (numerics.name, numerics.device.type) == (precision, "cuda")


# ---- cuDNN attention ----


def test_cudnn_attention_is_off_on_every_gpu(gpu):
    """It builds a graph for each new shape."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert choose_numerics("cuda", None, None).name == "bf16"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


# ---- bits that repeat ----


def test_determinism_is_strict(gpu):
    choose_numerics("cuda", None, None, full_determinism=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"


def test_a_workspace_with_which_cublas_is_not_deterministic_is_refused(gpu, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(HardwareError, match="CUBLAS_WORKSPACE_CONFIG=:0:0"):
        choose_numerics("cuda", None, None, full_determinism=True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    choose_numerics("cuda", None, None, full_determinism=True)


def test_what_can_not_be_deterministic_is_named():
    for attention in (None, "sdpa", "eager", "flash_attention_2"):
        assert why_not_deterministic(attention, False) is None
    assert "torch_compile" in str(why_not_deterministic(None, True))
    for attention in ("flex_attention", "flash_attention_3", "someone/kernels"):
        assert attention in str(why_not_deterministic(attention, False))


def test_a_job_that_asks_for_it_and_for_compiled_layers_is_refused_on_cuda(tmp_path):
    job = make_job(tmp_path, full_determinism=True, torch_compile=True)
    with pytest.raises(
        HardwareError, match=r"full_determinism can't be kept with train\.torch_compile"
    ):
        check_extras(job, "cuda")
    check_extras(job, "cpu")
    check_extras(make_job(tmp_path / "plain", full_determinism=True), "cuda")


def test_an_operation_without_deterministic_kernels_ends_a_run_in_words(tmp_path, monkeypatch):
    text = (
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set"
        " 'torch.use_deterministic_..."
    )

    def refuses(*_, **__):
        raise RuntimeError(text)

    monkeypatch.setattr("farthing.model.forward.Forward.loss", refuses)
    with pytest.raises(
        HardwareError, match="cumsum_cuda_kernel, which is not deterministic on CUDA"
    ):
        train(make_job(tmp_path))
    assert not_deterministic(RuntimeError("something else")) is None
