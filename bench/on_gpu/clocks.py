"""Seconds, memory and how busy the device is, for everyone alike; and the ceilings: a copy and a
matrix product.

Seconds are between events in the queue of the GPU. Never run on a GPU so far; on a CPU the host's
clock stands in.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import sys
import threading
import time
from typing import Any

import torch

from on_gpu.work import Scale

SAMPLE_S = 0.05


class Busy:
    """The share of time in which a kernel ran, in percent, by NVML, while `is_on`; None where it
    can't be read.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._found: list[int] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Busy:
        if torch.cuda.is_available():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def percent(self) -> float | None:
        """The mean of what was seen."""
        return sum(self._found) / len(self._found) if self._found else None

    def _watch(self) -> None:
        while not self._closed.wait(SAMPLE_S):
            try:
                percent = torch.cuda.utilization()
            except Exception:  # no NVML, or no permission
                return
            if self.is_on:
                self._found.append(percent)


def idle_percent(step: Any, n: int) -> float | None:
    """The share of time in which nothing ran or was copied on the GPU, in percent, over `n` calls,
    by CUPTI's records.

    From the first kernel's begin to the last one's end. None without a GPU, or where CUPTI records
    nothing.
    """
    if not torch.cuda.is_available():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(n):
            step()
        torch.cuda.synchronize()
    kineto = profile.profiler.kineto_results if profile.profiler is not None else None
    events = kineto.events() if kineto is not None else []
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    )
    if not spans:
        return None
    busy_ns, until = 0, spans[0][0]
    for start, stop in spans:
        busy_ns += max(0, stop - max(start, until))
        until = max(until, stop)
    return 100 * (1 - busy_ns / max(1, until - spans[0][0]))


def clean() -> None:
    """Give back what the last model had, and begin to look for a peak."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds_of(function: Any, n: int) -> float:
    """Mean seconds of a call, after three that warm up."""
    on_gpu = torch.cuda.is_available()
    for _ in range(3):
        function()
    if not on_gpu:
        began = time.perf_counter()
        for _ in range(n):
            function()
        return (time.perf_counter() - began) / n
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(n):
        function()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1000 / n


def ceilings(scale: Scale) -> dict[str, Any]:
    """What this device does at best: bytes/s of a copy (read and written), FLOP/s of a bf16 product
    of random numbers.
    """
    found = {
        "copy_bytes_per_s": copy_bytes_per_s(scale.copy_bytes),
        "matmul_flops": matmul_flops(scale.matmul),
        "matmul_size": scale.matmul,
    }
    clean()
    return found


def copy_bytes_per_s(n_bytes: int) -> float:
    """Read and written, within the device."""
    source = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8, device=here())
    target = torch.empty_like(source)
    return 2 * n_bytes / seconds_of(lambda: target.copy_(source), 10)


def matmul_flops(n: int) -> float:
    """FLOP/s of an n x n x n product in bf16: of random numbers, as one of zeros is quicker."""
    one, other = (torch.randn(n, n, device=here(), dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(one)
    return 2 * n**3 / seconds_of(lambda: torch.mm(one, other, out=product), 20)


def here() -> torch.device:
    """Where everything is computed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> dict[str, Any]:
    """What it runs on."""
    from farthing.prices.gpus import gpu_of_device
    from peers.contestant import versions

    found: dict[str, Any] = {
        "versions": versions(),
        "platform": platform.platform(),
        "device": platform.processor() or "CPU",
    }
    if not torch.cuda.is_available():
        return found
    properties = torch.cuda.get_device_properties(0)
    gpu = gpu_of_device(properties.name, properties.total_memory)
    found |= {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }
    found |= {
        "capability": list(torch.cuda.get_device_capability()),
        "multiprocessors": properties.multi_processor_count,
    }
    if gpu is not None:
        found |= {
            "peak_flops": gpu.flops.get("bf16"),
            "peak_bytes_per_s": gpu.bandwidth_bytes_per_s,
        }
    with contextlib.suppress(ImportError):
        import inspect

        from torch.nn.attention.varlen import varlen_attn

        found["varlen_attn"] = str(inspect.signature(varlen_attn))
    return found
