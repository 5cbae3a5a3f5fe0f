"""Figures of a run for TensorBoard, Weights & Biases, MLflow and Trackio, by their own libraries,
and as `metrics.prom` in its folder, for node_exporter or a cloud's agent.

Each tracker has a thread, so that one that fails or is slow never holds up training. A resumed run
continues the tracker's run, and no step is in it twice. Where figures are sent is for the tracker's
own environment variables to say (WANDB_MODE, MLFLOW_TRACKING_URI ...).

The file is the text format of OpenMetrics 1.0, gauges alone, without timestamps, which
node_exporter's textfile collector refuses. It is whole at any moment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from farthing.config.job import Job
from farthing.errors import InputError
from farthing.events import Emit, Evaluated, Event, StepTaken, Warned
from farthing.run.folder import JOB, run_id_of
from farthing.storage.files import make_private, write_text

MOST_WAITING, PATIENCE_S = 10_000, 5.0
PROJECT = "farthing"
TRACKERS = "trackers"  # in the run folder: the last step that each was told
METRICS_FILE = "metrics.prom"
STEP_FIGURES = {
    "step": ("step", "Optimizer steps taken."),
    "n_steps": ("steps", "Optimizer steps of the whole run."),
    "epoch": ("epoch", "Passes over the data."),
    "loss": ("loss", "Mean training loss of the last step, a target."),
    "grad_norm": ("grad_norm", "Norm of the gradient before clipping."),
    "lr": ("learning_rate", "Learning rate of the last step."),
    "tokens_per_s": ("tokens_per_second", "Tokens trained a second, without padding."),
    "padded_tokens_per_s": ("padded_tokens_per_second", "Tokens computed a second."),
    "mfu": ("mfu_ratio", "Share of the device's peak FLOPs."),
    "utilisation_percent": ("gpu_utilisation_percent", "Utilisation of the GPU."),
    "peak_bytes": ("peak_memory_bytes", "Peak memory of the device."),
    "run_tokens": ("tokens", "Tokens trained in the whole run."),
    "usd": ("usd", "Dollars that the run has cost."),
    "usd_to_go": ("usd_to_go", "Dollars that the run will still cost."),
    "s_to_go": ("seconds_to_go", "Seconds until the run ends."),
}
"""Of a step, by the name of the field: the name and the help in the file."""
_EXTRAS = {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
Figures = dict[str, float]
Log = Callable[[int, Figures], Any]


class _Tracker(threading.Thread):
    """Hears events until it fails. Steps that are taken again are told once: what it was told is
    noted first, in a file that outlives the process.
    """

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self.kind, self.folder, self.trouble = name, folder, list[str]()
        self.events: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self.start()

    def tell(self, event: Event | None) -> None:
        """Hand over an event, or None where no more will come, without waiting."""
        try:
            self.events.put_nowait(event)
        except queue.Full:
            if not self.trouble:
                self.trouble.append(f"is {MOST_WAITING:,} events behind")

    def run(self) -> None:
        opened: tuple[Log, Callable[[], Any]] | None = None
        told, mark = {"train": 0, "eval": 0}, Path()
        try:
            while (event := self.events.get()) is not None:
                prefix, step, figures = figures_of(event)
                if opened is None and figures:
                    run_id = run_id_of(self.folder) or "unknown"
                    mark = make_private(self.folder / TRACKERS) / f"{self.kind}-{run_id[:12]}.json"
                    with contextlib.suppress(OSError, ValueError, TypeError):
                        told |= json.loads(mark.read_text(encoding="utf-8"))
                    opened = OPENERS[self.kind](self.folder, run_id, told["train"])
                if opened and figures and step > told[prefix]:
                    told[prefix] = step
                    draft = mark.with_suffix(".draft")
                    draft.write_text(json.dumps(told), encoding="utf-8")
                    draft.replace(mark)
                    opened[0](step, {f"{prefix}/{key}": value for key, value in figures.items()})
            if opened:
                opened[1]()
        except Exception as error:  # a disk, a server, a library: none of it is worth a run
            self.trouble.append(f"failed ({error})")


@contextlib.contextmanager
def tracked(emit: Emit, names: tuple[str, ...], folder: Path) -> Iterator[Emit]:
    """Within the block `emit` also tells the trackers of `train.report_to`. At its end they have
    `PATIENCE_S` together to finish. Raises `InputError` when one is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            to_do = f"pip install 'farthing[{_EXTRAS[name]}]'"
            raise InputError(f"{name} is not installed", where="train.report_to", to_do=to_do)
    trackers = [_Tracker(name, folder) for name in dict.fromkeys(names)]

    off: list[_Tracker] = []

    def warn() -> None:
        for tracker in trackers:
            if tracker.trouble and tracker not in off:
                off.append(tracker)
                what = f"{tracker.kind} {tracker.trouble.pop()}"
                emit(Warned(f"report_to: {what} and is off from here on"))

    def emit_to_all(event: Event) -> None:
        emit(event)
        for tracker in trackers:
            tracker.tell(event)
        warn()

    try:
        yield emit_to_all if trackers else emit
    finally:
        for tracker in trackers:
            tracker.tell(None)
        until = time.monotonic() + PATIENCE_S
        for tracker in trackers:
            tracker.join(max(0.0, until - time.monotonic()))
            if tracker.is_alive():
                tracker.trouble.append(f"has not written everything within {PATIENCE_S:g} s")
        warn()


def figures_of(event: Event) -> tuple[str, int, Figures]:
    """("train" or "eval", step, numbers), no numbers for an event that has none."""
    if isinstance(event, StepTaken):
        found = {name: getattr(event, name) for name in STEP_FIGURES if "step" not in name}
        found |= event.metrics
    else:
        found = event.metrics if isinstance(event, Evaluated) else {}
    prefix = "train" if isinstance(event, StepTaken) else "eval"
    numbers = {key: value for key, value in found.items() if isinstance(value, int | float)}
    return prefix, getattr(event, "step", 0), numbers


def _job(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / JOB).read_text(encoding="utf-8"))
        return found
    return {}


def _open_tensorboard(folder: Path, run_id: str, step: int) -> tuple[Log, Callable[[], Any]]:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(step: int, figures: Figures) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _open_wandb(folder: Path, run_id: str, step: int) -> tuple[Log, Callable[[], Any]]:
    """Neither code nor what is printed is sent."""
    import wandb

    settings = wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=run_id,
        name=folder.name,
        dir=str(folder),
        resume="allow",
        config=_job(folder),
        settings=settings,
    )
    run.define_metric("*", step_metric="step")
    return lambda step, figures: run.log({**figures, "step": step}), run.finish


def _open_mlflow(folder: Path, run_id: str, step: int) -> tuple[Log, Callable[[], Any]]:
    """Without MLFLOW_TRACKING_URI in `mlflow.db` of the run's folder."""
    import mlflow

    mlflow.set_tracking_uri(
        os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
    )
    experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    client, tag = mlflow.MlflowClient(), f"tags.farthing_run = '{run_id}'"
    same = client.search_runs([experiment.experiment_id], tag, max_results=1)
    its = mlflow.start_run(
        run_id=same[0].info.run_id if same else None,
        run_name=None if same else folder.name,
        tags={"farthing_run": run_id},
    )
    if not same:
        for section, values in _job(folder).items():
            for key, value in values.items() if isinstance(values, dict) else [("", values)]:
                name = f"{section}.{key}".rstrip(".")
                client.log_param(its.info.run_id, name, str(value)[:500])
    return lambda step, figures: mlflow.log_metrics(figures, step), mlflow.end_run


def _open_trackio(folder: Path, run_id: str, step: int) -> tuple[Log, Callable[[], Any]]:
    import trackio

    project, name = os.environ.get("TRACKIO_PROJECT", PROJECT), f"{folder.name}-{run_id[:8]}"
    job = _job(folder)
    run: Any = trackio.init(project=project, name=name, resume="allow", config=job, embed=False)
    return lambda step, figures: run.log(figures, step=step), run.finish


OPENERS = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "trackio": _open_trackio,
}


# ---- the file ----


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
    for field, (name, what) in STEP_FIGURES.items():
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
