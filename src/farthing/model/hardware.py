"""What this machine is and which numbers it computes in. The only place that asks torch about devices."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from farthing.device_memory import ALLOCATOR_SETTING, ALLOCATOR_VARIABLES, set_allocator
from farthing.errors import HardwareError
from farthing.planner.machine import hardware_key as hardware_name
from farthing.planner.machine import local_cpu
from farthing.prices.catalog import gpu_of_device
from farthing.units import plural


@dataclass(frozen=True)
class Numerics:
    """Where and in which precision a run computes.

    `autocast` is the dtype of the forward pass (None: fp32 throughout); `needs_scaler` is for fp16, whose gradients
    would vanish without one.
    """

    device: torch.device
    autocast: torch.dtype | None
    needs_scaler: bool = False

    @property
    def name(self) -> str:
        """bf16, fp16 or fp32."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16", None: "fp32"}[self.autocast]

    @property
    def base_dtype(self) -> torch.dtype:
        """What frozen weights are kept in; trained weights are fp32 always."""
        return self.autocast or torch.float32

    def autocasting(self) -> Any:
        """The context of a forward pass."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def choose_numerics(
    device: str, bf16: bool | None, fp16: bool | None, tf32: bool = True, full_determinism: bool = False
) -> Numerics:
    """The device and precision of a run: bf16 on GPUs that have it natively, fp16 on older ones, fp32 on a CPU.

    Raises `HardwareError` when the job asks for what is not here.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise HardwareError(
            "no CUDA GPU can be used here", where="where.device", to_do="set where.device: auto, or check the driver"
        )
    where = torch.device("cuda" if has_cuda and device != "cpu" else "cpu")
    if where.type == "cpu":
        if fp16:
            raise HardwareError(
                "fp16 on a CPU is hundreds of times slower than fp32",
                where="train.fp16",
                to_do="leave it out to use fp32, or set train.bf16: true",
            )
        return Numerics(where, torch.bfloat16 if bf16 else None)
    _tell_allocator()
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    native = torch.cuda.get_device_capability()[0] >= 8
    if bf16 and not native:
        raise HardwareError(
            f"{torch.cuda.get_device_name()} has no native bf16 (Ampere and later do)",
            where="train.bf16",
            to_do="leave it out: fp16 with a gradient scaler is used",
        )
    if bf16 or (bf16 is None and fp16 is None and native):
        return Numerics(where, torch.bfloat16)
    if fp16 or (fp16 is None and bf16 is None):
        return Numerics(where, torch.float16, needs_scaler=True)
    return Numerics(where, None)


def _tell_allocator() -> None:
    """Set torch's allocator where the command line has not done so before torch was imported, e.g. in a notebook."""
    had_been_set = any(os.environ.get(name) for name in ALLOCATOR_VARIABLES)
    set_allocator(os.environ)
    if not had_been_set and not torch.cuda.is_initialized():
        with contextlib.suppress(AttributeError, RuntimeError):  # the variable alone is read where this is not there
            torch._C._accelerator_setAllocatorSettings(ALLOCATOR_SETTING)


def device_name(device: torch.device) -> str:
    """The marketing name of the GPU, or of the CPU with its core count."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {plural(torch.get_num_threads(), 'thread')}"


def hardware_key(device: torch.device) -> str:
    """The name that measurements on this device are kept under."""
    name = str(torch.cuda.get_device_name(device)) if device.type == "cuda" else local_cpu().name
    return hardware_name(device.type, name, torch.get_num_threads())


def free_cached(device: torch.device) -> None:
    """Give back what nothing needs any more: cycles of references, and blocks that the allocator of a GPU keeps."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def peak_bytes(device: torch.device) -> int:
    """Most memory taken so far: by torch on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # Linux keeps the parent's peak in ru_maxrss when a process begins another
    own = window_peak_bytes(device)
    return own or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_bytes(device: torch.device) -> None:
    """Begin a window for `window_peak_bytes`. On Linux the kernel forgets the process's own peak, where it allows that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def window_peak_bytes(device: torch.device) -> int:
    """Most memory taken since `reset_peak_bytes`; 0 where nobody can say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def taken_bytes(device: torch.device) -> int:
    """Memory taken now."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense peak of the GPU in FLOP/s from `facts/gpus.csv`; None where it is not known."""
    if device.type != "cuda":
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device))
    return gpu.flops.get(precision) if gpu else None


class Utilisation:
    """How busy the device is, in percent: the GPU by NVML (needs `nvidia-ml-py`), else this process on its CPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._process.cpu_percent()

    def percent(self) -> float | None:
        """Since the last call (CPU), or now (GPU); None where it can't be read."""
        if self._device.type == "cuda":
            try:
                return float(torch.cuda.utilization(self._device))
            except Exception:  # no NVML bindings, no driver library, no permission
                return None
        return min(100.0, self._process.cpu_percent() / max(1, torch.get_num_threads()))
