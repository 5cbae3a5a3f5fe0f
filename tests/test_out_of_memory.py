"""Memory that runs out: which errors say so, what survives it anywhere in a run, and what ends in words."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farthing.durability.checkpoint
import farthing.train.evaluate
import farthing.train.run
import farthing.train.step
import workshop
from farthing.device_memory import ALLOCATOR_SETTING, is_out_of_memory, is_out_of_resources, set_allocator
from farthing.errors import HardwareError, OutOfMemory
from farthing.train.optim import allocate_state, load_state, make_optimizer, state_bytes, state_tensors
from farthing.train.run import opened_run
from workshop import Heard, make_job

FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
OTHERS = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("CUDA out of memory"),
    OutOfMemory("said already"),
]


class OutOfResources(Exception):
    """Triton's, by its name."""


@pytest.mark.parametrize("error", FULL, ids=str)
def test_memory_that_ran_out_is_recognised_in_anyones_words(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_resources(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_a_kernel_that_does_not_fit_on_the_gpu_is_said_and_not_tried_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_triton = OutOfResources("out of resource: shared memory, Required: 180224, Hardware limit: 101376")
    of_inductor = RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: triton_tem_fused_0")
    for error in (of_triton, of_inductor):
        assert is_out_of_resources(error)
        assert not is_out_of_memory(error)
    calls: list[int] = []

    def failing(*_: Any) -> Any:
        calls.append(1)
        raise of_triton

    job = make_job(tmp_path, max_steps=2)
    monkeypatch.setattr(farthing.train.step.Steps, "accumulate", failing)
    with pytest.raises(HardwareError, match="a kernel does not fit on this GPU"):
        workshop.train(job)
    assert len(calls) == 1


# ---- the allocator ----


def test_the_allocator_is_asked_for_segments_that_grow_unless_someone_has_set_it() -> None:
    environment: dict[str, str] = {}
    assert set_allocator(environment) == f"{ALLOCATOR_SETTING} (PYTORCH_ALLOC_CONF)"
    assert environment == {"PYTORCH_ALLOC_CONF": ALLOCATOR_SETTING}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = {name: "max_split_size_mb:512"}
        assert set_allocator(environment) == f"max_split_size_mb:512 ({name})"
        assert environment == {name: "max_split_size_mb:512"}


def test_the_command_line_sets_it_before_torch_is_there_and_children_have_it_too() -> None:
    code = (
        "import os, subprocess, sys, farthing.cli\n"
        "farthing.cli.main(['init', '--schema'])\n"
        "assert 'torch' not in sys.modules\n"
        "command = [sys.executable, '-c', 'import os; print(os.environ[\"PYTORCH_ALLOC_CONF\"])']\n"
        "print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-2:] == [ALLOCATOR_SETTING, ""]


# ---- the optimizer's state is there before the first step ----


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 3))


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"learning_rate": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.99), "epsilon": 1e-8}
    return make_optimizer(model, name, **settings)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    model(torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


OPTIMIZERS = ["adamw_torch_fused", "adamw_torch", "adamw_torch_offload", "sgd"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_is_made_beforehand_is_what_the_first_step_makes(name: str) -> None:
    models = [small_model(), small_model()]
    early, late = (optimizer_of(model, name) for model in models)
    allocate_state(early)
    places = {key: value.data_ptr() for state in early.state.values() for key, value in state.items()}
    made = [
        [(key, value.dtype, value.shape, value.device) for key, value in early.state[p].items()]
        for p in models[0].parameters()
    ]
    for seed in range(3):
        step_of(models[0], early, seed)
        step_of(models[1], late, seed)
    found = [
        [(key, value.dtype, value.shape, value.device) for key, value in late.state[p].items()]
        for p in models[1].parameters()
    ]
    assert made == found
    assert {key: value.data_ptr() for state in early.state.values() for key, value in state.items()} == places
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(value, late.state[other][key]) for key, value in early.state[one].items())


@pytest.mark.parametrize("name", OPTIMIZERS[:3])
def test_saved_state_goes_into_the_memory_that_is_there(name: str) -> None:
    model, other = small_model(), small_model(1)
    optimizer, second = optimizer_of(model, name), optimizer_of(other, name)
    step_of(model, optimizer)
    tensors, values = state_tensors(optimizer, {id(p): name for name, p in model.named_parameters()})
    allocate_state(second)
    before = {id(value) for state in second.state.values() for value in state.values()}
    load_state(second, other.named_parameters(), tensors, values)
    assert {id(value) for state in second.state.values() for value in state.values()} == before
    names = {id(p): name for name, p in other.named_parameters()}
    assert all(torch.equal(value, tensors[place]) for place, value in state_tensors(second, names)[0].items())


def test_a_weight_that_was_saved_without_state_begins_again() -> None:
    """Checkpoints of earlier versions have no state of a weight that never had a gradient."""
    model = small_model()
    optimizer = optimizer_of(model, "adamw_torch_fused")
    step_of(model, optimizer)
    tensors, _ = state_tensors(optimizer, {id(p): name for name, p in model.named_parameters()})
    tensors = {place: value.clone() for place, value in tensors.items() if not place.startswith("3.bias")}
    step_of(model, optimizer, 1)
    load_state(optimizer, model.named_parameters(), tensors, {})
    assert not optimizer.state[model[3].bias]["exp_avg"].any()
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], tensors["0.weight|exp_avg"])


def test_a_run_has_its_state_before_memory_is_judged_and_probed(tmp_path: Path) -> None:
    job = make_job(tmp_path, max_steps=2)
    Path(job.output_dir).mkdir(parents=True)
    with opened_run(job, Heard()) as (run, _):
        trained = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
        assert run.memory.optimizer_bytes == state_bytes(run.optimizer, run.numerics.device)
        assert run.memory.optimizer_bytes == pytest.approx(2 * trained, rel=1e-3)


def test_an_optimizer_without_room_for_its_state_says_so_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(farthing.train.loop, "allocate_state", failing)
    with pytest.raises(OutOfMemory, match="CUDA error: out of memory") as caught:
        workshop.train(make_job(tmp_path, max_steps=2))
    assert "adamw_torch_offload" in caught.value.to_do
