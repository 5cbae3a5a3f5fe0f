"""How fast a run goes: useful and padded tokens a second, utilisation, seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass

from farthing.durability.ledger import Meter
from farthing.model.hardware import Numerics, Utilisation, peak_flops


@dataclass
class Pace:
    """How fast it goes, over this attempt. The first step is warm-up and is left out."""

    numerics: Numerics
    flops_per_token: float
    meter: Meter

    def __post_init__(self) -> None:
        self.n_steps = 0
        self.longest_step_s = 0.0
        self._tokens = self._padded = 0
        self._seconds = 0.0
        self._utilisation = Utilisation(self.numerics.device)
        self._percent: float | None = None
        self._sampled_at_s = -10.0
        self._peak_flops = peak_flops(self.numerics.device, self.numerics.name)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step."""
        return self._seconds / (self.n_steps - 1) if self.n_steps > 1 else None

    def begin_again(self) -> None:
        """Forget the steps so far: they were warm-up."""
        self.n_steps = self._tokens = self._padded = 0
        self._seconds = self.longest_step_s = 0.0

    def step_done(self, n_tokens: int, n_padded: int, seconds: float) -> None:
        """Count a step."""
        self.n_steps += 1
        self.longest_step_s = max(seconds, self.longest_step_s * 0.98)
        if self.n_steps > 1:
            self._tokens, self._padded, self._seconds = (
                self._tokens + n_tokens,
                self._padded + n_padded,
                self._seconds + seconds,
            )

    def figures(self) -> dict[str, float | None]:
        """Useful and padded tokens/s, model FLOPs utilisation (None without a known peak), device utilisation."""
        if self.meter.wall_s - self._sampled_at_s >= 1:
            self._percent, self._sampled_at_s = self._utilisation.percent(), self.meter.wall_s
        useful = self._tokens / self._seconds if self._seconds else None
        return {
            "tokens_per_s": useful,
            "padded_tokens_per_s": self._padded / self._seconds if self._seconds else None,
            "mfu": useful * self.flops_per_token / self._peak_flops if useful and self._peak_flops else None,
            "utilisation_percent": self._percent,
        }
