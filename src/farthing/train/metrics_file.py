"""The last figures of a run as `metrics.prom` in its folder, for node_exporter or an agent."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from farthing.config.job import Job
from farthing.events import Emit, Evaluated, Event, StepTaken, figures_of
from farthing.storage.files import write_text

METRICS_FILE = "metrics.prom"


@contextlib.contextmanager
def metrics_file(emit: Emit, job: Job) -> Iterator[Emit]:
    """Within the block `emit`, which also keeps the file up to date: every `logging_steps` and
    after each evaluation. It is whole at any moment; a disk that refuses it stops nothing.
    """
    path, last = Path(job.output_dir) / METRICS_FILE, dict[type[Event], StepTaken | Evaluated]()

    def write(*, is_running: bool) -> None:
        with contextlib.suppress(OSError):
            write_text(path, metrics_text(job, last.values(), is_running=is_running))

    def emit_and_write(event: Event) -> None:
        emit(event)
        if isinstance(event, StepTaken | Evaluated):
            last[type(event)] = event
            if isinstance(event, Evaluated) or event.step % job.train.logging_steps == 0:
                write(is_running=True)

    try:
        yield emit_and_write
    finally:
        if last:
            write(is_running=False)


def metrics_text(job: Job, last: Iterable[StepTaken | Evaluated], *, is_running: bool) -> str:
    """In the text format of OpenMetrics 1.0: gauges alone, without timestamps, which the textfile
    collector of node_exporter refuses.
    """
    run, model = Path(job.output_dir).name, job.model.model_name_or_path
    about = _labels(run=run, model=model, task=job.task, method=job.method.name)
    samples: dict[str, float] = {f"run_info{about}": 1, "running": int(is_running)}
    for event in last:
        _, step, figures = figures_of(event)
        if isinstance(event, StepTaken):
            samples |= {"step": step, "n_steps": event.n_steps, **figures}
        else:
            samples["evaluation_step"] = step
            samples |= {"evaluation" + _labels(metric=each): figures[each] for each in figures}
    lines = []
    for name, of_name in itertools.groupby(samples, key=lambda each: each.partition("{")[0]):
        lines.append(f"# TYPE farthing_{name} gauge")
        lines += [f"farthing_{each} {samples[each]:g}" for each in of_name]
    return "\n".join([*lines, "# EOF", ""])


def _labels(**values: str) -> str:
    """As `{name="value"}`: JSON escapes what the format wants escaped."""
    quoted = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
    return "{" + ",".join(quoted) + "}"
