"""Figures of a run for other programs to draw: TensorBoard, Weights & Biases, MLflow and Trackio, by their own libraries.

Each has a thread of its own. A tracker that fails is dropped with a warning, one that is slow is not waited for: training goes
on. A run that goes on after a kill goes on in the same run of the tracker, and no step is in it twice. Where a tracker sends
figures, and whether it does, is for its own environment variables to say (WANDB_MODE, MLFLOW_TRACKING_URI ...).
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
from typing import Any, Protocol

from farthing.durability.files import Damaged, make_private
from farthing.durability.run_folder import JOB, PLAN, kept, run_id_of
from farthing.errors import UserMistake
from farthing.events import Emit, Evaluated, Event, Restored, StepTaken, Warned

MOST_WAITING = 10_000  # events
PATIENCE_S = 5.0
PROJECT = "farthing"
TRACKERS = "trackers"  # in the run folder: what each has been told
STEP_FIGURES = ("loss", "lr", "grad_norm", "tokens_per_s", "padded_tokens_per_s", "mfu", "utilisation_percent", "usd",
                "run_tokens", "usd_to_go", "s_to_go", "peak_bytes")  # fmt: skip
_EXTRAS = {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


class Tracker(Protocol):
    """Takes the events of a run, in its own thread."""

    def __call__(self, event: Event) -> None:
        """One event."""

    def close(self) -> None:
        """No more will come."""


class _Listener:
    """A tracker in a thread of its own, until it fails or falls behind."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self._tracker = name, tracker
        self._events: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self._is_off = threading.Event()
        self.trouble: list[str] = []
        self._thread = threading.Thread(target=self._hear, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        try:
            while (event := self._events.get()) is not None and not self._is_off.is_set():
                self._tracker(event)
            self._tracker.close()
        except Exception as error:  # a disk, a server, a library: none of it is worth a run
            self.trouble.append(f"failed ({error})")
            self._is_off.set()

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

    At its end they are waited for, `PATIENCE_S` at most for all. Raises `UserMistake` when one is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            to_do = f"pip install 'farthing[{_EXTRAS[name]}]'"
            raise UserMistake(f"{name} is not installed", where="train.report_to", to_do=to_do)
    listeners = [_Listener(name, _MAKE[name](folder)) for name in dict.fromkeys(names)]

    def emit_to_all(event: Event) -> None:
        emit(event)
        for listener in listeners:
            listener.tell(event)
        say()

    def say() -> None:
        for listener in listeners:
            while listener.trouble:
                emit(Warned(f"report_to: {listener.name} {listener.trouble.pop(0)} and is off from here on"))

    try:
        yield emit_to_all if listeners else emit
    finally:
        for listener in listeners:
            listener.end()
        until = time.monotonic() + PATIENCE_S
        for listener in listeners:
            listener.wait(until - time.monotonic())
        say()


def figures_of(event: Event) -> tuple[str, int, dict[str, float]] | None:
    """(train or eval, step, numbers) of an event that has any."""
    if isinstance(event, StepTaken):
        return "train", event.step, _numbers({name: getattr(event, name) for name in STEP_FIGURES})
    return ("eval", event.step, _numbers(event.metrics)) if isinstance(event, Evaluated) else None


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _estimate(folder: Path) -> dict[str, float]:
    """What the plan said of the whole run: dollars, seconds and bytes."""
    with contextlib.suppress(Damaged):
        plan = kept(folder / PLAN) or {}
        return _numbers({f"estimate/{name}": plan.get(name) for name in ("usd", "wall_s", "peak_bytes")})
    return {}


class TensorBoard:
    """Event files in the run's folder; what a resume takes back is purged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def _open(self, **how: Any) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder / "tensorboard"), **how)
        for name, value in _estimate(self._folder).items():
            self._writer.add_scalar(name, value, how.get("purge_step", 0))
        return self._writer

    def __call__(self, event: Event) -> None:
        """One event of the run."""
        if isinstance(event, Restored):
            self._open(purge_step=event.step + 1)
        if found := figures_of(event):
            prefix, step, figures = found
            writer = self._writer or self._open()
            for name, value in figures.items():
                writer.add_scalar(f"{prefix}/{name}", value, step)
            writer.flush()

    def close(self) -> None:
        """The files are whole after each event."""
        if self._writer is not None:
            self._writer.close()


class _Remembering:
    """A tracker that can't take anything back: of steps that are taken again, which have the same figures to the bit, it is
    told once. What it was told is noted before it is told, in a few bytes that outlive a kill of the process."""

    name = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._marks: int | None = None
        self._told = {"train": 0, "eval": 0}

    def __call__(self, event: Event) -> None:
        """One event of the run."""
        found = figures_of(event)
        if found is None:
            return
        prefix, step, figures = found
        if self._marks is None:
            self._begin()
        if step > self._told[prefix]:
            self._told[prefix] = step
            assert self._marks is not None
            os.pwrite(self._marks, f"{self._told['train']:012d} {self._told['eval']:012d}\n".encode(), 0)
            self.log(step, {f"{prefix}/{key}": value for key, value in figures.items()})

    def _begin(self) -> None:
        self.run_id = run_id_of(self.folder) or "unknown"
        path = make_private(self.folder / TRACKERS) / f"{self.name}-{self.run_id[:12]}"
        self._marks = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        words = os.pread(self._marks, 64, 0).split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            self._told = {"train": int(words[0]), "eval": int(words[1])}
        with contextlib.suppress(OSError, ValueError):
            self.job: dict[str, Any] = json.loads((self.folder / JOB).read_text(encoding="utf-8"))
        self.open(is_first=self._told["train"] == 0)

    def open(self, *, is_first: bool) -> None:
        """Begin the tracker's run, or go on with it."""
        raise NotImplementedError

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Figures by name, of one step."""
        raise NotImplementedError

    def end(self) -> None:
        """End the tracker's part, where it was opened."""

    def close(self) -> None:
        """No more will come."""
        if self._marks is not None:
            self.end()
            os.close(self._marks)


class WeightsAndBiases(_Remembering):
    """A run of wandb, whose id is that of ours. Neither code nor what is printed is sent."""

    name = "wandb"

    def open(self, *, is_first: bool) -> None:
        """See `_Remembering`."""
        import wandb

        settings = wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.run_id,
            name=self.folder.name,
            dir=str(self.folder),
            resume="allow",
            config=self.job,
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")
        self._run.summary.update(_estimate(self.folder))

    def log(self, step: int, figures: dict[str, float]) -> None:
        """See `_Remembering`."""
        self._run.log({**figures, "step": step})

    def end(self) -> None:
        """See `_Remembering`."""
        self._run.finish()


class MLflow(_Remembering):
    """A run of MLflow; without MLFLOW_TRACKING_URI in `mlruns` of the run's folder."""

    name = "mlflow"

    def open(self, *, is_first: bool) -> None:
        """See `_Remembering`."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder / 'mlflow.db'}"
        self._client = MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        same = self._client.search_runs([experiment], f"tags.farthing_run = '{self.run_id}'", max_results=1)
        if same:
            self._run = same[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {"farthing_run": self.run_id}
        self._run = self._client.create_run(experiment, run_name=self.folder.name, tags=tags).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in _flat(self.job)][:100]
        self._client.log_batch(self._run, params=params)
        self.log(0, _estimate(self.folder))

    def log(self, step: int, figures: dict[str, float]) -> None:
        """See `_Remembering`."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(key, value, now_ms, step) for key, value in figures.items()])

    def end(self) -> None:
        """See `_Remembering`."""
        self._client.set_terminated(self._run)


class Trackio(_Remembering):
    """A run of Trackio, in its own database."""

    name = "trackio"

    def open(self, *, is_first: bool) -> None:
        """See `_Remembering`."""
        import trackio

        name = f"{self.folder.name}-{self.run_id[:8]}"
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = trackio.init(project=project, name=name, resume="allow", config=self.job, embed=False)
        if is_first and (estimate := _estimate(self.folder)):
            self._run.log(estimate, step=0)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """See `_Remembering`."""
        self._run.log(figures, step=step)

    def end(self) -> None:
        """See `_Remembering`."""
        self._run.finish()


def _flat(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


_MAKE: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip
