"""Figures of a run for other programs to draw. A tracker that fails is dropped with a warning: training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from farthing.errors import UserMistake

Tell = Callable[[str, dict[str, Any]], None]
STEP_FIGURES = ("loss", "lr", "grad_norm", "tokens_per_s", "padded_tokens_per_s", "mfu", "utilisation_percent", "usd")


def with_trackers(tell: Tell, names: tuple[str, ...], folder: Path) -> Tell:
    """`tell`, and the trackers of `train.report_to` with it. Raises `UserMistake` when one is not installed."""
    if not names:
        return tell
    tracker: TensorBoard | None = TensorBoard(folder / "tensorboard")

    def tell_all(kind: str, facts: dict[str, Any]) -> None:
        nonlocal tracker
        tell(kind, facts)
        try:
            if tracker is not None:
                tracker(kind, facts)
        except Exception as error:  # a disk, a server, a library: none of it is worth a run
            tracker = None
            tell("warning", {"text": f"report_to: tensorboard failed ({error}) and is off from here on"})

    return tell_all


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

    def __call__(self, kind: str, facts: dict[str, Any]) -> None:
        """One event of the run."""
        if kind == "restored":
            self._writer = self._make(str(self._folder), purge_step=facts["step"] + 1)
        if kind not in ("step", "evaluation"):
            return
        if self._writer is None:
            self._writer = self._make(str(self._folder))
        prefix = "train" if kind == "step" else "eval"
        figures = {name: facts[name] for name in STEP_FIGURES} if kind == "step" else facts["metrics"]
        for name, value in figures.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{prefix}/{name}", value, facts["step"])
        self._writer.flush()
