"""Figures of a run for TensorBoard, Weights & Biases, MLflow and Trackio, by their own libraries.

Each tracker has a thread, so that one that fails or is slow never holds up training. A resumed run
continues the tracker's run, and no step is in it twice. Where figures are sent is for the tracker's
own environment variables to say (WANDB_MODE, MLFLOW_TRACKING_URI ...).
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
PROJECT = "farthing"
TRACKERS = "trackers"  # in the run folder: the last step that each was told
Figures = dict[str, float]
Tracker = tuple[Callable[[int, Figures], Any], Callable[[], Any]]
"""(log the figures of a step, close)"""


class _Thread(threading.Thread):
    """Hears events until it fails. Steps that are taken again are told once: what it was told is
    noted first, in a file that outlives the process.
    """

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name=name, daemon=True)
        self.folder, self.trouble = folder, ""
        self.events: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self.start()

    def tell(self, event: Event | None) -> None:
        """Hand over an event, or None where no more will come, without waiting."""
        try:
            self.events.put_nowait(event)
        except queue.Full:
            self.trouble = self.trouble or f"is {MOST_WAITING:,} events behind"

    def run(self) -> None:
        try:
            self._hear()
        except Exception as error:  # a disk, a server, a library: none of it is worth a run
            self.trouble = f"failed ({error})"

    def _hear(self) -> None:
        opened: Tracker | None = None
        told = {"train": 0, "eval": 0}
        while (event := self.events.get()) is not None:
            prefix, step, figures = figures_of(event)
            if not figures:
                continue
            run_id = run_id_of(self.folder) or "unknown"
            mark = make_private(self.folder / TRACKERS) / f"{self.name}-{run_id[:12]}.json"
            if opened is None:
                with contextlib.suppress(OSError, ValueError, TypeError):
                    told |= json.loads(mark.read_text(encoding="utf-8"))
                opened = OPENERS[self.name](self.folder, run_id, told["train"])
            if step > told[prefix]:
                told[prefix] = step
                write_text(mark, json.dumps(told))
                opened[0](step, {f"{prefix}/{key}": value for key, value in figures.items()})
        if opened:
            opened[1]()


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

    def drop_failed() -> None:
        for tracker in [each for each in trackers if each.trouble]:
            trackers.remove(tracker)
            what = f"{tracker.name} {tracker.trouble}"
            emit(Warned(f"report_to: {what} and is off from here on"))

    def emit_to_all(event: Event) -> None:
        emit(event)
        for tracker in trackers:
            tracker.tell(event)
        drop_failed()

    try:
        yield emit_to_all if trackers else emit
    finally:
        for tracker in trackers:
            tracker.tell(None)
        until = time.monotonic() + PATIENCE_S
        for tracker in trackers:
            tracker.join(max(0.0, until - time.monotonic()))
            if tracker.is_alive():
                tracker.trouble = f"has not written everything within {PATIENCE_S:g} s"
        drop_failed()


def figures_of(event: Event) -> tuple[str, int, Figures]:
    """("train" or "eval", step, numbers), no numbers for an event that has none."""
    found: dict[str, Any] = {}
    if isinstance(event, StepTaken):
        names = [each.name for each in fields(event) if "step" not in each.name]
        found = {name: getattr(event, name) for name in names} | dict(event.metrics)
    elif isinstance(event, Evaluated):
        found = dict(event.metrics)
    numbers = {key: value for key, value in found.items() if isinstance(value, int | float)}
    return "train" if isinstance(event, StepTaken) else "eval", getattr(event, "step", 0), numbers


# ---- each tracker: what opens it in a run's folder, for a run that has told `step` steps ----


def _job(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / JOB).read_text(encoding="utf-8"))
        return found
    return {}


def _open_tensorboard(folder: Path, run_id: str, step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(step: int, figures: Figures) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _open_wandb(folder: Path, run_id: str, step: int) -> Tracker:
    """Neither code nor what is printed is sent."""
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=run_id,
        name=folder.name,
        dir=str(folder),
        resume="allow",
        config=_job(folder),
        settings=wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True),
    )
    run.define_metric("*", step_metric="step")
    return lambda step, figures: run.log({**figures, "step": step}), run.finish


def _open_mlflow(folder: Path, run_id: str, step: int) -> Tracker:
    """Without MLFLOW_TRACKING_URI in `mlflow.db` of the run's folder."""
    import mlflow

    here = f"sqlite:///{folder}/mlflow.db"
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or here)
    experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    tag = f"tags.farthing_run = '{run_id}'"
    same = mlflow.search_runs([experiment.experiment_id], tag, output_format="list")
    if same:
        mlflow.start_run(run_id=same[0].info.run_id)
    else:
        mlflow.start_run(run_name=folder.name, tags={"farthing_run": run_id})
        for section, values in _job(folder).items():
            for key, value in values.items() if isinstance(values, dict) else [("", values)]:
                mlflow.log_param(f"{section}.{key}".rstrip("."), str(value)[:500])
    return lambda step, figures: mlflow.log_metrics(figures, step), mlflow.end_run


def _open_trackio(folder: Path, run_id: str, step: int) -> Tracker:
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
