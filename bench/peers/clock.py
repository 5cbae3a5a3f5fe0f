"""Seconds, memory and tokens of a run, read by the harness at the end of every optimizer step.

A framework's own figures are not used: they count padding, labels or positions, each its own way.
On a GPU (where this was never run) the marks are events in its queue, so that a loop that runs
ahead of it may do so.
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def cpu_seconds() -> float:
    """CPU-seconds of this process, all threads, and of its children, those that still run included."""  # noqa: E501
    own = psutil.Process()
    total = time.process_time() + sum(own.cpu_times()[2:4])  # those of children that have ended
    for child in own.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended, and is among those already counted
            total += sum(child.cpu_times()[:2])
    return total


def peak_bytes() -> int:
    """Most memory this process had. Linux: of this program alone; `ru_maxrss` would count what its
    parent had.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text(errors="replace").partition("VmHWM:")[2].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Clock:
    """Marks at the beginning and at the end of every step, and the tokens that were counted in
    between.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self.begin()

    @property
    def n_steps(self) -> int:
        """Steps done so far."""
        return len(self._wall) - 1

    def begin(self) -> None:
        """The first step begins now."""
        self._wall: list[Any] = []
        self._cpu: list[float] = []
        self._counted: list[list[tuple[Any, Any]]] = []
        self.step_done()

    def count(self, useful: Any, computed: Any) -> None:
        """Tokens of the data, and tokens that the model was given, in the step at hand: numbers, or
        tensors read later.
        """
        self._counted[-1].append((useful, computed))

    def step_done(self) -> None:
        """An optimizer step has ended."""
        self._wall.append(_event() if self._on_gpu else time.perf_counter())
        self._cpu.append(cpu_seconds())
        self._counted.append([])

    def facts(self) -> dict[str, Any]:
        """Marks [steps + 1] and tokens [steps], and the peak of memory until now. Call it when the
        last step is done.
        """
        facts: dict[str, Any] = {"peak_bytes": peak_bytes(), "on_gpu": self._on_gpu}
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
            facts["peak_bytes"] = int(torch.cuda.max_memory_allocated())
            wall = [self._wall[0].elapsed_time(event) / 1000 for event in self._wall]
        else:
            wall = [mark - self._wall[0] for mark in self._wall]
        for place, name in enumerate(("useful", "computed")):
            steps = self._counted[: self.n_steps]
            facts[name] = [int(sum(float(each[place]) for each in step)) for step in steps]
        return facts | {"wall": wall, "cpu": [mark - self._cpu[0] for mark in self._cpu]}


def _event() -> Any:
    """A moment in the GPU's own queue: nothing waits for it."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
