"""What a plan says of a run before it begins: seconds, dollars and memory, and the settings that
they hold for.

Made once, before the first attempt, kept as plan.json and never written again: the receipt holds
what happened against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from farthing.settings import Settings


@dataclass(frozen=True)
class Estimate:
    """What is expected of a run. A range is [low, likely, high], of which 80 % of runs are in."""

    wall_s: float
    wall_range_s: list[float]
    usd: float
    peak_bytes: int
    """As a run measures it: what torch allocates on a GPU, the whole process on a CPU."""
    seconds: dict[str, float]  # by what they go to; they add up to `wall_s`
    memory: dict[str, int]  # bytes by component
    step_s: float
    interval_s: float  # between checkpoints
    calibration: str  # what it rests on: earlier runs here, or formulas only
    settings: Settings = field(default_factory=Settings)
    first_layer: int = 0  # the lowest layer with anything trained in or below it

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Estimate | None:
        """What plan.json says; None where it says that there was no estimate, or is no plan.

        Raises `ValueError`, `TypeError`, `KeyError` for damaged settings.
        """
        if not isinstance(values, Mapping) or "wall_range_s" not in values:
            return None
        return cls(**{**values, "settings": Settings.from_json(values["settings"])})
