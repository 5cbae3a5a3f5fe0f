"""Figures of a run for TensorBoard, Weights & Biases, MLflow and Trackio, by their own libraries.

Each tracker has a thread, so that one that fails or is slow never holds up training. A resumed run
continues the tracker's run, and no step is in it twice. The tracker's own environment variables
say where figures are sent (WANDB_MODE, MLFLOW_TRACKING_URI ...).
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
from dataclasses import fields
from pathlib import Path
from typing import Any

from farthing.errors import InputError
from farthing.events import Emit, Evaluated, Event, StepTaken, Warned
from farthing.run.folder import JOB, run_id_of
from farthing.storage.files import make_private, write_text

MOST_WAITING, PATIENCE_S = 10_000, 5.0
TRACKERS = "trackers"  # in the run folder: the last step that each was told
Figures = dict[str, float]
Tracker = tuple[Callable[[int, Figures], Any], Callable[[], Any]]
"""(log the figures of a step, close)"""


class _Thread(threading.Thread):
    """Hears events until it fails, or hears None. A step that is taken again is told once: what was
    told is noted first, in a file that outlives the process.
    """

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name=name, daemon=True)
        self.folder, self.trouble = folder, ""
        self.events: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self.start()

    def tell(self, event: Event | None) -> None:
        try:
            self.events.put_nowait(event)
        except queue.Full:
            self.trouble = self.trouble or f"is {MOST_WAITING:,} events behind"

    def run(self) -> None:
        close: Callable[[], Any] | None = None
        told = {"train": 0, "eval": 0}
        try:
            while (event := self.events.get()) is not None:
                prefix, step, figures = figures_of(event)
                if not figures:
                    continue
                if close is None:
                    run_id = run_id_of(self.folder) or "unknown"
                    mark = make_private(self.folder / TRACKERS) / f"{self.name}-{run_id[:12]}.json"
                    with contextlib.suppress(OSError, ValueError, TypeError):
                        told |= json.loads(mark.read_text(encoding="utf-8"))
                    log, close = OPENERS[self.name](self.folder, run_id, told["train"])
                if step > told[prefix]:
                    told[prefix] = step
                    write_text(mark, json.dumps(told))
                    log(step, {f"{prefix}/{key}": value for key, value in figures.items()})
            if close is not None:
                close()
        except Exception as error:  # a disk, a server, a library: none of it is worth a run
            self.trouble = f"failed ({error})"


@contextlib.contextmanager
def tracked(emit: Emit, names: tuple[str, ...], folder: Path) -> Iterator[Emit]:
    """Within the block `emit` also tells the trackers of `train.report_to`. At its end they have
    `PATIENCE_S` together to finish. Raises `InputError` when one is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            extra = "track" if name == "tensorboard" else name
            to_do = f"pip install 'farthing[{extra}]'"
            raise InputError(f"{name} is not installed", where="train.report_to", to_do=to_do)
    trackers = [_Thread(name, folder) for name in dict.fromkeys(names)]

    def tell(event: Event | None) -> None:
        for tracker in trackers:
            tracker.tell(event)

    def drop_failed() -> None:
        for tracker in [each for each in trackers if each.trouble]:
            trackers.remove(tracker)
            what = f"{tracker.name} {tracker.trouble}"
            emit(Warned(f"report_to: {what} and is off from here on"))

    def emit_to_all(event: Event) -> None:
        emit(event)
        tell(event)
        drop_failed()

    try:
        yield emit_to_all
    finally:
        tell(None)
        until = time.monotonic() + PATIENCE_S
        for tracker in trackers:
            tracker.join(max(0.0, until - time.monotonic()))
            if tracker.is_alive():
                tracker.trouble = f"has not written everything within {PATIENCE_S:g} s"
        drop_failed()


def figures_of(event: Event) -> tuple[str, int, Figures]:
    """("train" or "eval", step, numbers), no numbers for an event that has none."""
    if isinstance(event, StepTaken):
        found: dict[str, Any] = {each.name: getattr(event, each.name) for each in fields(event)}
        found = {name: found[name] for name in found if "step" not in name} | dict(event.metrics)
    elif isinstance(event, Evaluated):
        found = dict(event.metrics)
    else:
        return "eval", 0, {}
    numbers = {key: value for key, value in found.items() if isinstance(value, int | float)}
    return "train" if isinstance(event, StepTaken) else "eval", event.step, numbers


# ---- what opens each in a run's folder, for a run that has told `step` steps ----


def _tensorboard(folder: Path, run_id: str, step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(step: int, figures: Figures) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(folder: Path, run_id: str, step: int) -> Tracker:
    """Neither code nor what is printed is sent."""
    import wandb

    run = wandb.init(
        project=_project("WANDB_PROJECT"),
        id=run_id,
        name=folder.name,
        dir=str(folder),
        resume="allow",
        config=_job(folder),
        settings=wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True),
    )
    run.define_metric("*", step_metric="step")
    return lambda step, figures: run.log({**figures, "step": step}), run.finish


def _mlflow(folder: Path, run_id: str, step: int) -> Tracker:
    """Without MLFLOW_TRACKING_URI in `mlflow.db` of the run's folder."""
    import mlflow

    here = f"sqlite:///{folder}/mlflow.db"
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or here)
    mlflow.set_experiment(_project("MLFLOW_EXPERIMENT_NAME"))
    same = mlflow.search_runs(filter_string=f"tags.farthing_run = '{run_id}'", output_format="list")
    if same:
        mlflow.start_run(run_id=same[0].info.run_id)
    else:
        mlflow.start_run(run_name=folder.name, tags={"farthing_run": run_id})
        for section, values in _job(folder).items():
            for key, value in values.items() if isinstance(values, dict) else [("", values)]:
                mlflow.log_param(f"{section}.{key}".rstrip("."), str(value)[:500])
    return lambda step, figures: mlflow.log_metrics(figures, step), mlflow.end_run


def _trackio(folder: Path, run_id: str, step: int) -> Tracker:
    import trackio

    name, project = f"{folder.name}-{run_id[:8]}", _project("TRACKIO_PROJECT")
    job = _job(folder)
    run: Any = trackio.init(project=project, name=name, resume="allow", config=job, embed=False)
    return lambda step, figures: run.log(figures, step=step), run.finish


OPENERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


def _project(variable: str) -> str:
    return os.environ.get(variable, "farthing")


def _job(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / JOB).read_text(encoding="utf-8"))
        return found
    return {}
