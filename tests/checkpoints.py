"""A folder of checkpoints, and what is restored of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farthing.run.checkpoint import Checkpoints


class Weights:
    """A part with some tensors and values that follow from a step."""

    def __init__(self, step: int = 0):
        self.become(step)

    def become(self, step: int):
        generator = torch.Generator().manual_seed(step)
        self.tensors = {"a": torch.randn(300, 7, generator=generator), "b": torch.arange(step + 1)}
        self.values = {"step": step}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.tensors, self.values

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]):
        self.tensors, self.values = tensors, values

    def is_of(self, step: int) -> bool:
        other = Weights(step)
        same = self.tensors.keys() == other.tensors.keys()
        return (
            same
            and self.values == other.values
            and all(torch.equal(v, other.tensors[k]) for k, v in self.tensors.items())
        )


@pytest.fixture
def said():
    return []


@pytest.fixture
def checkpoints(tmp_path, said):
    return Checkpoints(tmp_path / "checkpoints", "run-1", 3, warn=said.append)


def save(checkpoints: Checkpoints, *steps: int, best: int | None = None):
    for step in steps:
        checkpoints.save(step, {"model": Weights(step), "optimizer": Weights(step + 100)}, best)
        checkpoints.wait()


def restored(folder: Path, said: list[str] | None = None) -> int | None:
    """The step a fresh process would go on from; its content is checked to be of that step."""
    fresh = Checkpoints(folder, "run-1", 3, warn=(said if said is not None else []).append)
    step = fresh.newest_valid()
    if step is not None:
        model, optimizer = Weights(), Weights()
        fresh.restore(fresh.folder_of(step), {"model": model, "optimizer": optimizer})
        assert model.is_of(step)
        assert optimizer.is_of(step + 100)
    return step


def newest(folder: Path) -> Path:
    return max(
        path for path in folder.iterdir() if path.name.startswith("step-") and "." not in path.name
    )
