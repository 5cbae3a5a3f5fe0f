"""Figures of a run for other programs to draw: TensorBoard, Weights & Biases, MLflow and Trackio,
by their own libraries.

Each has a thread of its own. A tracker that fails is dropped with a warning, one that is slow is
not waited for: training goes on. A run that goes on after a kill goes on in the same run of the
tracker, and no step is in it twice. Where a tracker sends figures, and whether it does, is for its
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from farthing.errors import InputError
from farthing.events import Emit, Evaluated, Event, StepTaken, Warned
from farthing.run.folder import JOB, PLAN, kept, run_id_of
from farthing.storage.files import DamagedFileError, make_private

MOST_WAITING = 10_000  # events
PATIENCE_S = 5.0
PROJECT = "farthing"
TRACKERS = "trackers"  # in the run folder: what each has been told
STEP_FIGURES = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "padded_tokens_per_s",
    "mfu",
    "utilisation_percent",
    "usd",
    "run_tokens",
    "usd_to_go",
    "s_to_go",
    "peak_bytes",
)
_EXTRAS = {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
Log = Callable[[int, dict[str, float]], None]
"""Tells a tracker figures by name, of one step."""


class _Tracker:
    """A tracker in a thread of its own, until it fails or falls behind.

    It can't take anything back: of steps that are taken again, which have the same figures to the
    bit, it is told once. What it was told is noted before it is told, in a few bytes that outlive a
    kill of the process.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.trouble: list[str] = []
        self.job: dict[str, Any] = {}
        self._told = {"train": 0, "eval": 0}
        self._marks: int | None = None
        self._log: Log = lambda step, figures: None
        self._end: Callable[[], Any] = lambda: None
        self._events: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self._is_off = threading.Event()
        self._thread = threading.Thread(target=self._hear, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        try:
            while (event := self._events.get()) is not None and not self._is_off.is_set():
                if found := figures_of(event):
                    self._take(*found)
            self._end()
            if self._marks is not None:
                os.close(self._marks)
        except Exception as error:  # a disk, a server, a library: none of it is worth a run
            self.trouble.append(f"failed ({error})")
            self._is_off.set()

    def _take(self, prefix: str, step: int, figures: dict[str, float]) -> None:
        if self._marks is None:
            self._begin()
        if step > self._told[prefix]:
            self._told[prefix] = step
            assert self._marks is not None
            os.pwrite(
                self._marks, f"{self._told['train']:012d} {self._told['eval']:012d}\n".encode(), 0
            )
            self._log(step, {f"{prefix}/{key}": value for key, value in figures.items()})

    def _begin(self) -> None:
        """Begin the tracker's run, or go on with it."""
        self.run_id = run_id_of(self.folder) or "unknown"
        path = make_private(self.folder / TRACKERS) / f"{self.name}-{self.run_id[:12]}"
        self._marks = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        words = os.pread(self._marks, 64, 0).split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            self._told = {"train": int(words[0]), "eval": int(words[1])}
        with contextlib.suppress(OSError, ValueError):
            self.job = json.loads((self.folder / JOB).read_text(encoding="utf-8"))
        self._log, self._end = _OPEN[self.name](self)

    @property
    def n_told(self) -> int:
        """Steps that it was told of by earlier attempts, and by this one so far."""
        return self._told["train"]

    @property
    def estimate(self) -> dict[str, float]:
        """What the plan said of the whole run: dollars, seconds and bytes."""
        with contextlib.suppress(DamagedFileError):
            plan = kept(self.folder / PLAN) or {}
            return _numbers(
                {f"estimate/{name}": plan.get(name) for name in ("usd", "wall_s", "peak_bytes")}
            )
        return {}

    def tell(self, event: Event) -> None:
        """Hand an event over, without waiting."""
        if not self._is_off.is_set():
            try:
                self._events.put_nowait(event)
            except queue.Full:
                self.trouble.append(f"is {MOST_WAITING:,} events behind")
                self._is_off.set()

    def end(self) -> None:
        """Say that no more will come."""
        with contextlib.suppress(queue.Full):
            self._events.put_nowait(None)

    def wait(self, seconds: float) -> None:
        """Until it has written everything, so many seconds at most."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive() and not self.trouble:
            self.trouble.append(f"has not written everything within {PATIENCE_S:g} s")
            self._is_off.set()


@contextlib.contextmanager
def tracked(emit: Emit, names: tuple[str, ...], folder: Path) -> Iterator[Emit]:
    """Within the block `emit`, and the trackers of `train.report_to` with it.

    At its end they are waited for, `PATIENCE_S` at most for all. Raises `InputError` when one is
    not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            to_do = f"pip install 'farthing[{_EXTRAS[name]}]'"
            raise InputError(f"{name} is not installed", where="train.report_to", to_do=to_do)
    trackers = [_Tracker(name, folder) for name in dict.fromkeys(names)]

    def emit_to_all(event: Event) -> None:
        emit(event)
        for tracker in trackers:
            tracker.tell(event)
        say()

    def say() -> None:
        for tracker in trackers:
            while tracker.trouble:
                emit(
                    Warned(
                        f"report_to: {tracker.name} {tracker.trouble.pop(0)} and is off from"
                        " here on"
                    )
                )

    try:
        yield emit_to_all if trackers else emit
    finally:
        for tracker in trackers:
            tracker.end()
        until = time.monotonic() + PATIENCE_S
        for tracker in trackers:
            tracker.wait(until - time.monotonic())
        say()


def figures_of(event: Event) -> tuple[str, int, dict[str, float]] | None:
    """(train or eval, step, numbers) of an event that has any."""
    if isinstance(event, StepTaken):
        return "train", event.step, _numbers({name: getattr(event, name) for name in STEP_FIGURES})
    return ("eval", event.step, _numbers(event.metrics)) if isinstance(event, Evaluated) else None


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _open_tensorboard(run: _Tracker) -> tuple[Log, Callable[[], Any]]:
    """Event files in the run's folder, whole after each step. What earlier versions have told of
    steps to come is purged.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.n_told + 1)

    def log(step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    log(run.n_told, run.estimate)
    return log, writer.close


def _open_wandb(run: _Tracker) -> tuple[Log, Callable[[], Any]]:
    """A run of wandb, whose id is that of ours. Neither code nor what is printed is sent."""
    import wandb

    its = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=run.run_id,
        name=run.folder.name,
        dir=str(run.folder),
        resume="allow",
        config=run.job,
        settings=wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True),
    )
    its.define_metric("*", step_metric="step")
    its.summary.update(run.estimate)
    return lambda step, figures: its.log({**figures, "step": step}), its.finish


def _open_mlflow(run: _Tracker) -> tuple[Log, Callable[[], Any]]:
    """A run of MLflow; without MLFLOW_TRACKING_URI in `mlflow.db` of the run's folder."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client = MlflowClient(
        os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder / 'mlflow.db'}"
    )
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)
    same = client.search_runs([experiment], f"tags.farthing_run = '{run.run_id}'", max_results=1)
    tags = {"farthing_run": run.run_id}
    its = (
        same[0] if same else client.create_run(experiment, run_name=run.folder.name, tags=tags)
    ).info.run_id

    def log(step: int, figures: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        client.log_batch(
            its, metrics=[Metric(key, value, now_ms, step) for key, value in figures.items()]
        )

    if same:
        client.update_run(its, status="RUNNING")
    else:
        client.log_batch(
            its, params=[Param(key, str(value)[:500]) for key, value in _flat(run.job)][:100]
        )
        log(0, run.estimate)
    return log, lambda: client.set_terminated(its)


def _open_trackio(run: _Tracker) -> tuple[Log, Callable[[], Any]]:
    """A run of Trackio, in its own database."""
    import trackio

    name = f"{run.folder.name}-{run.run_id[:8]}"
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    its: Any = trackio.init(project=project, name=name, resume="allow", config=run.job, embed=False)
    if run.n_told == 0 and run.estimate:
        its.log(run.estimate, step=0)
    return lambda step, figures: its.log(figures, step=step), its.finish


def _flat(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


_OPEN = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "trackio": _open_trackio,
}
