"""How fast a run goes, and what its steps consist of, for the person and for a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.model.hardware import Numerics, Utilisation, peak_flops
from farthing.run.ledger import Meter
from farthing.train.step_result import Sums

LONG_QUANTILE = 0.95


@dataclass
class Pace:
    """The steps of this attempt in sum. The first step is warm-up and is left out."""

    numerics: Numerics
    flops_per_token: float
    meter: Meter
    known: dict[str, Any] = field(default_factory=dict)
    """Of a step, before any was taken: plain numbers for the ledger."""

    def __post_init__(self) -> None:
        self._utilisation = Utilisation(self.numerics.device)
        self._percent: float | None = None
        self._sampled_at_s = -10.0
        self._peak_flops = peak_flops(self.numerics.device, self.numerics.name)
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the steps so far: they were warm-up."""
        self.n_steps = self._tokens = self._padded = self._n_micro_batches = self._n_computed = 0
        self.most_tokens = 0
        self._seconds = self.longest_step_s = self.longest_rest_s = self._last_s = 0.0

    @property
    def step_s(self) -> float | None:
        return self._seconds / (self.n_steps - 1) if self.n_steps > 1 else None

    def step_done(self, n_tokens: int, seconds: float, sums: Sums) -> None:
        """Count a step of `n_tokens` without padding."""
        self.n_steps += 1
        self.longest_step_s = max(seconds, self.longest_step_s * 0.98)
        self._last_s = seconds
        self.most_tokens = max(n_tokens, self.most_tokens)
        if self.n_steps > 1:
            self._tokens += n_tokens
            self._padded += sums.n_computed
            self._seconds += seconds
            self._n_micro_batches += len(sums.computed)
            self._n_computed += sum(sums.computed)

    def turn_done(self, seconds: float) -> None:
        """Count a turn of the loop: what a step takes beside its own seconds, as telling trackers
        of it.
        """
        self.longest_rest_s = max(seconds - self._last_s, self.longest_rest_s * 0.98)

    def figures(self) -> dict[str, float | None]:
        """Useful and padded tokens/s, model FLOPs utilisation (None without a known peak), device
        utilisation.
        """
        if self.meter.wall_s - self._sampled_at_s >= 1:
            self._percent, self._sampled_at_s = self._utilisation.percent(), self.meter.wall_s
        useful = self._tokens / self._seconds if self._seconds else None
        mfu = None
        if useful and self._peak_flops:
            mfu = useful * self.flops_per_token / self._peak_flops
        return {
            "tokens_per_s": useful,
            "padded_tokens_per_s": self._padded / self._seconds if self._seconds else None,
            "mfu": mfu,
            "utilisation_percent": self._percent,
        }

    def facts(self, **now: Any) -> dict[str, Any]:
        """What a step consists of, as far as it is known, `now` with it."""
        n = self.n_steps - 1
        found = {**self.known, **now, "n_measured_steps": max(0, n)}
        if n > 0:
            found["micro_batches_per_step"] = round(self._n_micro_batches / n, 3)
            found["computed_tokens_per_step"] = round(self._n_computed / n, 1)
        return found


def facts_of_lengths(lengths: NDArray[np.int64]) -> dict[str, Any]:
    """How long examples are, and what share of their tokens lies beyond the 95th percentile of
    their lengths.
    """
    if not len(lengths):
        return {}
    long = int(np.quantile(lengths, LONG_QUANTILE))
    total = int(lengths.sum())
    return {
        "n_examples": len(lengths),
        "n_tokens": total,
        "longest": int(lengths.max()),
        "long": long,
        "share_beyond_long": round(float(np.maximum(lengths - long, 0).sum()) / max(1, total), 4),
    }
