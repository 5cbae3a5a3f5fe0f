"""Figures of a run for other programs to draw. A tracker that fails is dropped with a warning, one that is slow is not
waited for: training goes on."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from farthing.errors import UserMistake
from farthing.events import Emit, Evaluated, Event, Restored, StepTaken, Warned

MOST_WAITING = 10_000  # events
PATIENCE_S = 5.0
STEP_FIGURES = ("loss", "lr", "grad_norm", "tokens_per_s", "padded_tokens_per_s", "mfu", "utilisation_percent", "usd")


@contextlib.contextmanager
def tracked(emit: Emit, names: tuple[str, ...], folder: Path) -> Iterator[Emit]:
    """Within the block `emit`, and the trackers of `train.report_to` with it, in a thread of their own.

    At its end they are waited for, `PATIENCE_S` at most. Raises `UserMistake` when one is not installed.
    """
    if not names:
        yield emit
        return
    tracker = TensorBoard(folder / "tensorboard")
    events: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
    trouble: list[str] = []
    is_off = threading.Event()

    def hear() -> None:
        while (event := events.get()) is not None and not is_off.is_set():
            try:
                tracker(event)
            except Exception as error:  # a disk, a server, a library: none of it is worth a run
                trouble.append(f"failed ({error})")
                is_off.set()

    def emit_to_all(event: Event) -> None:
        emit(event)
        if not is_off.is_set():
            try:
                events.put_nowait(event)
            except queue.Full:
                trouble.append(f"is {MOST_WAITING:,} events behind")
                is_off.set()
        say()

    def say() -> None:
        while trouble:
            emit(Warned(f"report_to: tensorboard {trouble.pop(0)} and is off from here on"))

    thread = threading.Thread(target=hear, name="tracker", daemon=True)
    thread.start()
    try:
        yield emit_to_all
    finally:
        with contextlib.suppress(queue.Full):
            events.put_nowait(None)
        thread.join(PATIENCE_S)
        say()


class TensorBoard:
    """Loss, speed, dollars and evaluation metrics by step; what a resume takes back is purged."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserMistake(
                "TensorBoard is not installed", where="train.report_to", to_do="pip install 'farthing[track]'"
            ) from error
        self._make = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        """One event of the run."""
        if isinstance(event, Restored):
            self._writer = self._make(str(self._folder), purge_step=event.step + 1)
        if isinstance(event, StepTaken):
            self._draw("train", {name: getattr(event, name) for name in STEP_FIGURES}, event.step)
        elif isinstance(event, Evaluated):
            self._draw("eval", event.metrics, event.step)

    def _draw(self, prefix: str, figures: Mapping[str, object], step: int) -> None:
        if self._writer is None:
            self._writer = self._make(str(self._folder))
        for name, value in figures.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{prefix}/{name}", value, step)
        self._writer.flush()
