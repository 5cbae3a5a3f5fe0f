"""The figures of a run as `metrics.prom` in its folder, for node_exporter or a cloud's agent.

The text format of OpenMetrics 1.0, gauges alone, without timestamps, which node_exporter's textfile
collector refuses. The file is whole at any moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from farthing.config.job import Job
from farthing.events import Emit, Evaluated, Event, StepTaken
from farthing.storage.files import write_text

METRICS_FILE = "metrics.prom"
_OF_STEP = {
    "step": ("step", "Optimizer steps taken."),
    "n_steps": ("steps", "Optimizer steps of the whole run."),
    "epoch": ("epoch", "Passes over the data."),
    "loss": ("loss", "Mean training loss of the last step, a target."),
    "grad_norm": ("grad_norm", "Norm of the gradient before clipping."),
    "lr": ("learning_rate", "Learning rate of the last step."),
    "tokens_per_s": ("tokens_per_second", "Tokens trained a second, without padding."),
    "mfu": ("mfu_ratio", "Share of the device's peak FLOPs."),
    "utilisation_percent": ("gpu_utilisation_percent", "Utilisation of the GPU."),
    "peak_bytes": ("peak_memory_bytes", "Peak memory of the device."),
    "run_tokens": ("tokens", "Tokens trained in the whole run."),
    "usd": ("usd", "Dollars that the run has cost."),
    "usd_to_go": ("usd_to_go", "Dollars that the run will still cost."),
    "s_to_go": ("seconds_to_go", "Seconds until the run ends."),
}


@contextlib.contextmanager
def metrics_file(emit: Emit, job: Job) -> Iterator[Emit]:
    """Within the block `emit`, which also keeps the file up to date: every `logging_steps` and
    after each evaluation. A disk that refuses it stops nothing.
    """
    path, every = Path(job.output_dir) / METRICS_FILE, job.train.logging_steps
    step: StepTaken | None = None
    evaluated: Evaluated | None = None

    def write(*, is_running: bool) -> None:
        with contextlib.suppress(OSError):
            write_text(path, metrics_text(job, step, evaluated, is_running=is_running))

    def emit_and_write(event: Event) -> None:
        nonlocal step, evaluated
        emit(event)
        if isinstance(event, StepTaken):
            step = event
            if event.step % every == 0 or event.step == event.n_steps:
                write(is_running=True)
        elif isinstance(event, Evaluated):
            evaluated = event
            write(is_running=True)

    try:
        yield emit_and_write
    finally:
        if step is not None or evaluated is not None:
            write(is_running=False)


def metrics_text(
    job: Job, step: StepTaken | None, evaluated: Evaluated | None, *, is_running: bool
) -> str:
    """The file's content."""
    lines: list[str] = []

    def gauge(name: str, what: str, samples: dict[str, float]) -> None:
        lines.extend((f"# TYPE farthing_{name} gauge", f"# HELP farthing_{name} {what}"))
        lines.extend(f"farthing_{name}{labels} {value:g}" for labels, value in samples.items())

    about = {
        "run": Path(job.output_dir).name,
        "model": job.model.model_name_or_path,
        "task": job.task,
        "method": job.method.name,
    }
    gauge("run_info", "What is trained.", {_labels(about): 1})
    gauge("running", "1 while an attempt trains.", {"": int(is_running)})
    for field, (name, what) in _OF_STEP.items():
        value = getattr(step, field, None)
        if isinstance(value, int | float):
            gauge(name, what, {"": value})
    if evaluated is not None:
        gauge("evaluation_step", "Step of the last evaluation.", {"": evaluated.step})
        found = {
            _labels({"metric": name}): float(value)
            for name, value in evaluated.metrics.items()
            if isinstance(value, int | float)
        }
        gauge("evaluation", "Figures of the last evaluation.", found)
    return "\n".join([*lines, "# EOF", ""])


def _labels(values: dict[str, str]) -> str:
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, value in values.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
