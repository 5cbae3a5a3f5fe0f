"""What a step of this run consists of, as it is measured while it goes: what a diagnosis is made from.

Refuses to time anything itself, and to judge.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LONG_QUANTILE = 0.95


class Work:
    """The steps of an attempt in sum; the first one warms up and is left out. `facts` are plain numbers for the ledger."""

    def __init__(self, lengths: NDArray[np.int64], facts: dict[str, Any]) -> None:
        self._facts = facts | _lengths(lengths)
        self.fixed_share: float | None = None
        """Of the seconds of a micro-batch, those that it takes whatever its size."""
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the steps so far: they were warm-up."""
        self.n_steps, self._n_micro_batches, self._n_computed = 0, 0, 0
        self._forward_s = self._compute_s = 0.0

    def step_done(self, computed: list[int], forward_s: float, compute_s: float) -> None:
        """A step of micro-batches with so many computed tokens each; seconds as in `Sums`."""
        self.n_steps += 1
        if self.n_steps == 1:
            return
        self._n_micro_batches += len(computed)
        self._n_computed += sum(computed)
        self._forward_s += forward_s
        self._compute_s += compute_s

    def facts(self, **now: Any) -> dict[str, Any]:
        """What is known, `now` with it."""
        found = {**self._facts, **now, "n_measured_steps": max(0, self.n_steps - 1)}
        if self.n_steps > 1:
            found["micro_batches_per_step"] = round(self._n_micro_batches / (self.n_steps - 1), 3)
            found["computed_tokens_per_step"] = round(self._n_computed / (self.n_steps - 1), 1)
        if self._compute_s:
            found["forward_share"] = round(self._forward_s / self._compute_s, 4)
        if self.fixed_share is not None:
            found["fixed_share"] = round(self.fixed_share, 4)
        return found


def _lengths(lengths: NDArray[np.int64]) -> dict[str, Any]:
    """How long examples are, and what share of their tokens lies beyond the 95th percentile of their lengths."""
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
