"""Figures of a run for TensorBoard, Weights & Biases, MLflow and Trackio, by their own libraries.

Each tracker has a thread, so that one that fails or is slow never holds up training. A resumed run
continues the tracker's run, and no step is in it twice. The tracker's own environment variables
say where figures are sent (WANDB_MODE, MLFLOW_TRACKING_URI ...).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from farthing.config.values import flat
from farthing.errors import InputError
from farthing.events import Emit, Evaluated, Event, Figures, StepTaken, Warned, figures_of
from farthing.run.folder import kept_job, run_id_of
from farthing.storage.files import make_private, write_text

MOST_WAITING, PATIENCE_S = 10_000, 5.0
TRACKERS = "trackers"  # in the run folder: the last step that each was told
Numbers = dict[str, float]
Tracker = tuple[Callable[[Numbers, int], Any], Callable[[], Any]]


@contextlib.contextmanager
def tracked(emit: Emit, names: tuple[str, ...], folder: Path) -> Iterator[Emit]:
    """Within the block `emit` also tells the trackers of `train.report_to`. At its end they have
    `PATIENCE_S` together to finish. Raises `InputError` when one is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            to_do = f"pip install 'farthing[{'track' if name == 'tensorboard' else name}]'"
            raise InputError(f"{name} is not installed", where="train.report_to", to_do=to_do)
    trackers = [_Tracker(name, folder) for name in dict.fromkeys(names)]

    def drop_failed() -> None:
        for tracker in [each for each in trackers if each.trouble]:
            trackers.remove(tracker)
            emit(Warned(f"report_to: {tracker.name} {tracker.trouble} and is off from here on"))

    def emit_and_tell(event: Event) -> None:
        emit(event)
        if isinstance(event, StepTaken | Evaluated):
            for tracker in trackers:
                tracker.tell(figures_of(event))
        drop_failed()

    try:
        yield emit_and_tell
    finally:
        until = time.monotonic() + PATIENCE_S
        for tracker in trackers:
            tracker.tell(None)
        for tracker in trackers:
            tracker.join(max(0.0, until - time.monotonic()))
            if tracker.is_alive():
                tracker.trouble = f"has not written everything within {PATIENCE_S:g} s"
        drop_failed()


class _Tracker(threading.Thread):
    """Hears figures until None. What was told is noted first, in a file that outlives the process:
    a step that is taken again is told once.
    """

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name=name, daemon=True)
        self.folder, self.trouble = folder, ""
        self.waiting: queue.SimpleQueue[Figures | None] = queue.SimpleQueue()
        self.start()

    def tell(self, figures: Figures | None) -> None:
        self.waiting.put(figures)
        if self.waiting.qsize() > MOST_WAITING:
            self.trouble = self.trouble or f"is {MOST_WAITING:,} events behind"

    def run(self) -> None:
        figures = iter(self.waiting.get, None)
        try:
            for first in figures:  # nothing is opened for a run without figures
                self._follow(itertools.chain([first], figures))
        except Exception as error:  # a disk, a server, a library: none of it is worth a run
            self.trouble = f"failed ({error})"

    def _follow(self, figures: Iterator[Figures]) -> None:
        run_id, told = run_id_of(self.folder) or "unknown", {"train": 0, "eval": 0}
        mark = make_private(self.folder / TRACKERS) / f"{self.name}-{run_id[:12]}.json"
        with contextlib.suppress(OSError, ValueError, TypeError):
            told |= json.loads(mark.read_text(encoding="utf-8"))
        log, close = OPENERS[self.name](self.folder, run_id, told["train"])
        for of, step, numbers in figures:
            if step > told[of]:
                told[of] = step
                write_text(mark, json.dumps(told))
                log({f"{of}/{name}": value for name, value in numbers.items()}, step)
        close()


# ---- (log the figures of a step, close) of each, for a run that has told `step` steps ----


def _tensorboard(folder: Path, run_id: str, step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(figures: Numbers, step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(folder: Path, run_id: str, step: int) -> Tracker:
    """Neither code nor what is printed is sent."""
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "farthing"),
        dir=str(folder),
        id=run_id,
        name=folder.name,
        config=kept_job(folder),
        settings=wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True),
        resume="allow",
    )
    run.define_metric("*", step_metric="step")
    return lambda figures, step: run.log({**figures, "step": step}), run.finish


def _mlflow(folder: Path, run_id: str, step: int) -> Tracker:
    """Without MLFLOW_TRACKING_URI in `mlflow.db` of the run's folder."""
    import mlflow

    here = f"sqlite:///{folder}/mlflow.db"
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or here)
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "farthing"))
    same = mlflow.search_runs(filter_string=f"tags.farthing_run = '{run_id}'", output_format="list")
    if same:
        mlflow.start_run(same[0].info.run_id)
    else:
        mlflow.start_run(run_name=folder.name, tags={"farthing_run": run_id})
        mlflow.log_params({name: str(value)[:500] for name, value in flat(kept_job(folder))})
    return mlflow.log_metrics, mlflow.end_run


def _trackio(folder: Path, run_id: str, step: int) -> Tracker:
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", "farthing")
    name, config = f"{folder.name}-{run_id[:8]}", kept_job(folder)
    run: Any = trackio.init(project, name, config=config, resume="allow", embed=False)
    return run.log, run.finish


OPENERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
