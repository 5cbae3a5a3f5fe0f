"""How busy the device is, what it does at best (a copy and a matrix product), and what it is. On
a CPU the host's clock stands in.
"""

from __future__ import annotations

import gc
import platform
import sys
from typing import Any

import torch
from torch.utils.benchmark import Timer

from on_gpu.work import Scale


def busy_s(step: Any, n: int) -> float | None:
    """Seconds in which something ran or was copied on the GPU over `n` calls, by CUPTI's records.

    The host is slower while CUPTI looks on, the kernels are not: idle time is what other steps,
    that nobody looks at, take longer. None without a GPU, or where CUPTI records nothing.
    """
    if not torch.cuda.is_available():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(n):
            step()
        torch.cuda.synchronize()
    kineto = profile.profiler.kineto_results if profile.profiler is not None else None
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in (kineto.events() if kineto is not None else [])
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    )
    if not spans:
        return None
    busy_ns, until = 0, spans[0][0]
    for start, stop in spans:
        busy_ns += max(0, stop - max(start, until))
        until = max(until, stop)
    return busy_ns / 1e9


def clean() -> None:
    """Give back what the last model had, and begin to look for a peak."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def ceilings(scale: Scale) -> dict[str, Any]:
    """What this device does at best: bytes/s of a copy (read and written), FLOP/s of a bf16 product
    of random numbers, as one of zeros is quicker.
    """
    here, n = torch.device("cuda" if torch.cuda.is_available() else "cpu"), scale.matmul

    def seconds(statement: str, **given: Any) -> float:
        timer = Timer(statement, globals=given)
        timer.timeit(3)
        return float(timer.timeit(20).mean)

    source = torch.randint(0, 255, (scale.copy_bytes,), dtype=torch.uint8, device=here)
    copy_s = seconds("a.copy_(b)", a=torch.empty_like(source), b=source)
    one, other = (torch.randn(n, n, device=here, dtype=torch.bfloat16) for _ in range(2))
    product_s = seconds("a.mm(b)", a=one, b=other)
    return {
        "copy_bytes_per_s": 2 * scale.copy_bytes / copy_s,
        "matmul_flops": 2 * n**3 / product_s,
        "matmul_size": n,
    }


def machine() -> dict[str, Any]:
    """What it runs on."""
    from farthing.prices.gpus import gpu_of_device
    from peers.contestant import versions

    found = {"versions": versions(), "platform": platform.platform(), "device": "CPU"}
    if not torch.cuda.is_available():
        return found
    properties = torch.cuda.get_device_properties(0)
    gpu = gpu_of_device(properties.name, properties.total_memory)
    return found | {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability()),
        "peak_flops": None if gpu is None else gpu.flops.get("bf16"),
    }
