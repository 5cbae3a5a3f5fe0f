"""The verb `profile`: a few real steps under torch.profiler, by our own names.

Operations are named after the part of the model that they belong to, forward and backward alike:
what autograd computes for an operation has its sequence number. The job's own run folder is not
touched.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function

from farthing.config.job import Job
from farthing.errors import HardwareError
from farthing.events import Emit, Working
from farthing.model.hardware import device_name
from farthing.train.built import Run
from farthing.train.loop import take_step
from farthing.train.opened_run import opened_run, short_job

WARM_UP_STEPS = 3
_MARK = "farthing: "
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC")
_MODULES = {
    "layers with LoRA": "^LoRA$",
    "attention": "Attention",
    "norms": "Norm",
    "embeddings": "Embedding",
    "feed-forward": "(MLP|DenseReluDense|DenseGatedActDense|Intermediate|FFN)$",
}
"""Name of a part -> what the class of its modules is called, as a pattern."""


def profile_job(job: Job, emit: Emit, folder: Path, n_steps: int) -> dict[str, Any]:
    """Profile `n_steps` steps of a job and write their trace into `folder`; returns the table and
    what goes with it.
    """
    with tempfile.TemporaryDirectory(prefix="farthing-profile-") as scratch:
        job = short_job(job, scratch, max_steps=WARM_UP_STEPS + n_steps, probe=False)
        with opened_run(job, emit) as run:
            for _ in range(min(WARM_UP_STEPS, run.schedule.n_steps - 1)):
                take_step(run)
            run.log.settle()
            emit(Working("profiling"))
            return _profiled(run, folder, run.schedule.n_steps - run.progress.step)


def _profiled(run: Run, folder: Path, n_steps: int) -> dict[str, Any]:
    numerics, spans = run.spec.numerics, run.context.meter.spans
    waited_s = spans.get("data_wait", 0.0)
    with _named(run), profile() as profiler:
        began = time.perf_counter()
        for _ in range(n_steps):
            take_step(run)
        run.log.settle()
        wall_s = time.perf_counter() - began
    folder.mkdir(parents=True, exist_ok=True)
    trace = str(folder / "farthing.pt.trace.json")
    profiler.export_chrome_trace(trace)
    rows = _seconds_by_name(profiler.events(), numerics.device.type)
    if numerics.device.type == "cuda" and not rows.keys() - {"launches"}:
        raise HardwareError(
            "torch.profiler sees no kernels of this GPU: its driver may show them to administrators"
            " alone",
            where="farthing profile",
            to_do="run it as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
        )
    rows["data"] += spans.get("data_wait", 0.0) - waited_s
    rows["between operations"] = max(0.0, wall_s - sum(rows.values()))
    return {
        "device": device_name(numerics.device),
        "precision": numerics.name,
        "n_steps": n_steps,
        "step_s": wall_s / n_steps,
        "parts": [
            {"name": name, "step_s": seconds / n_steps, "share": seconds / wall_s}
            for name, seconds in sorted(rows.items(), key=lambda item: -item[1])
        ],
        "trace": trace,
    }


@contextmanager
def _named(run: Run) -> Iterator[None]:
    """Within the block the parts of a step are ranges of the profiler."""
    step = run.steps.step
    named: list[tuple[Any, str, str]] = [
        (run.forward, "loss", "head"),
        (run.forward, "to_device", "copies"),
        (step, "clip", "optimizer"),
        (step.update, "apply", "optimizer"),
    ]
    for module in run.model.modules():
        kind = "LoRA" if hasattr(module, "lora_A") else type(module).__name__
        names = [name for name, pattern in _MODULES.items() if re.search(pattern, kind)]
        named += [(module, "forward", name) for name in names[:1]]
    before = [vars(owner).copy() for owner, *_ in named]
    for owner, method, name in named:
        setattr(owner, method, record_function(_MARK + name)(getattr(owner, method)))
    try:
        yield
    finally:
        for (owner, method, _), own in zip(named, before, strict=True):
            delattr(owner, method)
            vars(owner).update({method: own[method]} if method in own else {})


def _seconds_by_name(events: Any, device: str) -> defaultdict[str, float]:
    """Seconds of the device by our names; on a GPU the launches of its kernels, which the host
    pays, besides.
    """
    of_sequence: dict[int, str] = {}

    def name_of(event: Any) -> str | None:
        """The innermost of our ranges that an event lies in, or that of the forward operation whose
        gradient is computed here.
        """
        while event is not None:
            if event.name.startswith(_MARK):
                return str(event.name.removeprefix(_MARK))
            if event.sequence_nr in of_sequence:
                return of_sequence[event.sequence_nr]
            event = event.cpu_parent
        return None

    for event in events:
        if event.sequence_nr >= 0 and (name := name_of(event)) is not None:
            of_sequence.setdefault(event.sequence_nr, name)
    found = defaultdict[str, float](float)
    for event in events:
        own_us = event.self_cpu_time_total if device == "cpu" else event.self_device_time_total
        if event.name.startswith(_MARK) or event.name == "[memory]":
            continue
        if device == "cuda" and event.name in _LAUNCHES:
            found["launches"] += event.self_cpu_time_total / 1e6
        elif own_us:
            found[name_of(event) or "other layers"] += own_us / 1e6
    return found
