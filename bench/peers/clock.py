"""Seconds, memory and tokens of a run, read by the harness at the end of every optimizer step.

A framework's own figures are not used: they count padding, labels or positions, each its own way.
On a GPU (where this was never run) the marks are events in its queue, so that a loop that runs
ahead of it may do so.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def cpu_seconds() -> float:
    """CPU-seconds of this process, all threads, and of its children, those that still run included."""  # noqa: E501
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:  # it has just ended, and is among the children already counted
            continue
        total += times.user + times.system
    return total


def peak_bytes() -> int:
    """Most memory this process had. Linux: of this program alone; `ru_maxrss` would count what its
    parent had.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


class Clock:
    """Marks at the beginning and at the end of every step, and the tokens that were counted in
    between.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._wall: list[Any] = []
        self._cpu: list[float] = []
        self._counted: list[list[tuple[Any, Any]]] = []

    @property
    def n_steps(self) -> int:
        """Steps done so far."""
        return max(0, len(self._wall) - 1)

    def begin(self) -> None:
        """The first step begins now."""
        self._wall, self._cpu, self._counted = [], [], []
        self._mark()

    def count(self, useful: Any, computed: Any) -> None:
        """Tokens of the data, and tokens that the model was given, in the step at hand: numbers, or
        tensors read later.
        """
        self._counted[-1].append((useful, computed))

    def step_done(self) -> None:
        """An optimizer step has ended."""
        self._mark()

    def _mark(self) -> None:
        self._wall.append(_event() if self._on_gpu else time.perf_counter())
        self._cpu.append(cpu_seconds())
        self._counted.append([])

    def facts(self) -> dict[str, Any]:
        """Marks [steps + 1] and tokens [steps], and the peak of memory until now. Call it when the
        last step is done.
        """
        facts: dict[str, Any] = {"peak_bytes": peak_bytes()}
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
            facts["gpu_peak_bytes"] = int(torch.cuda.max_memory_allocated())
            wall = [self._wall[0].elapsed_time(event) / 1000 for event in self._wall]
        else:
            wall = [mark - self._wall[0] for mark in self._wall]
        counted = self._counted[: self.n_steps]
        return facts | {
            "wall": wall,
            "cpu": [mark - self._cpu[0] for mark in self._cpu],
            "useful": [int(sum(float(useful) for useful, _ in step)) for step in counted],
            "computed": [int(sum(float(computed) for _, computed in step)) for step in counted],
            "on_gpu": self._on_gpu,
        }


def _event() -> Any:
    """A moment in the GPU's own queue: nothing waits for it."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
