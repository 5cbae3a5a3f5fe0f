"""What probes found, for later runs on the same hardware: one line of JSON a probe, in the cache.

Refuses to import torch and to probe: `probe` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farthing.durability.files import append_line
from farthing.durability.summed_lines import read_line, with_sum

PROBES = "probes.jsonl"  # in the cache
_MOST_BYTES = 1 << 20  # of the newest lines that are read
ALIKE = 0.2  # lengths that differ by less ask for the same setting


@dataclass(frozen=True)
class Setting:
    """How micro-batches are computed: nothing of it changes the result beyond rounding."""

    most_tokens: int
    """Computed tokens of a micro-batch; a longer example goes alone."""
    every_n_layers: int = 0
    """Activation checkpointing: 0 none, 1 every layer, k every k-th."""
    tile_tokens: int | None = None
    """Labelled positions of a tile of the head; None: by the size of the head."""


@dataclass(frozen=True)
class Subject:
    """What a setting was found for."""

    hardware: str
    model_type: str
    hidden: int
    n_layers: int
    vocab: int
    task: str
    method: str
    lora_r: int
    precision: str
    optim: str
    global_batch_size: int
    mean_tokens: float
    longest: int

    def is_like(self, other: Subject) -> bool:
        """Whether what was found for one holds for the other: the same but for lengths that differ a little."""
        mine, its = dataclasses.asdict(self), dataclasses.asdict(other)
        for name in ("mean_tokens", "longest"):
            a, b = mine.pop(name), its.pop(name)
            if abs(a - b) > ALIKE * max(a, b):
                return False
        return mine == its


def leave_probe(path: Path, subject: Subject, setting: Setting, when: str, trials: list[dict[str, Any]]) -> None:
    """Add what a probe has found. Raises `OSError`."""
    row = {
        "when": when,
        "subject": dataclasses.asdict(subject),
        "setting": dataclasses.asdict(setting),
        "trials": trials,
    }
    append_line(path, with_sum(row))


def known_setting(path: Path, subject: Subject) -> Setting | None:
    """The newest setting that was found for the like of `subject`; lines that are torn or foreign are passed over."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _MOST_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            row = read_line(line)[0] or {}
            if Subject(**row["subject"]).is_like(subject):
                return _checked(Setting(**row["setting"]))
    return None


def _checked(setting: Setting) -> Setting:
    """Refuses what no probe writes. Raises `ValueError`."""
    numbers = [setting.most_tokens, setting.every_n_layers, setting.tile_tokens or 1]
    if not all(isinstance(n, int) for n in numbers) or min(numbers[0], numbers[2]) < 1 or setting.every_n_layers < 0:
        raise ValueError("not a setting")
    return setting
