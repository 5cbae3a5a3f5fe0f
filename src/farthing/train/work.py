"""What a step of this run consists of, as it is measured while it goes: what a diagnosis is made from.

Seconds of micro-batches are split into what each one takes whatever its size, and what each token takes, by least squares over
all of them. Refuses to time anything itself, and to judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONG_QUANTILE = 0.95
_LEAST_SPREAD = 1e-3  # of sizes, as the share of variance that tells the two terms apart


@dataclass
class Split:
    """Seconds = `n` times a + tokens times b, by least squares through the origin."""

    nn: float = 0.0
    nt: float = 0.0
    tt: float = 0.0
    ns: float = 0.0
    ts: float = 0.0

    def add(self, n: int, tokens: int, seconds: float) -> None:
        """So many micro-batches with so many computed tokens in all have taken so long."""
        self.nn += n * n
        self.nt += n * tokens
        self.tt += tokens * tokens
        self.ns += n * seconds
        self.ts += tokens * seconds

    def solved(self) -> tuple[float, float] | None:
        """(seconds of a micro-batch of no size, seconds of a token); None where sizes differ too little to tell."""
        determinant = self.nn * self.tt - self.nt**2
        if determinant <= _LEAST_SPREAD * self.nn * self.tt:
            return None
        each = (self.ns * self.tt - self.ts * self.nt) / determinant
        token = (self.ts * self.nn - self.ns * self.nt) / determinant
        if token < 0:
            return None
        return (each, token) if each >= 0 else (0.0, self.ts / self.tt)


class Work:
    """The steps of an attempt in sum; the first one warms up and is left out. `facts` are plain numbers for the ledger."""

    def __init__(self, lengths: NDArray[np.int64], facts: dict[str, Any]) -> None:
        self._facts = facts | _lengths(lengths)
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the steps so far: they were warm-up."""
        self._split, self._n_steps, self._n_micro_batches, self._n_computed = Split(), 0, 0, 0

    def step_done(self, computed: list[int], seconds: list[float], step_s: float) -> None:
        """A step of micro-batches with so many computed tokens each, which have taken so long each where the host waits for
        them, else all together."""
        self._n_steps += 1
        if self._n_steps == 1:
            return
        self._n_micro_batches += len(computed)
        self._n_computed += sum(computed)
        if seconds:
            for tokens, took_s in zip(computed, seconds, strict=True):
                self._split.add(1, tokens, took_s)
        else:
            self._split.add(len(computed), sum(computed), step_s)

    def facts(self, **now: Any) -> dict[str, Any]:
        """What is known, `now` with it."""
        found = {**self._facts, **now, "n_measured_steps": max(0, self._n_steps - 1)}
        if self._n_steps > 1:
            found["micro_batches_per_step"] = round(self._n_micro_batches / (self._n_steps - 1), 3)
            found["computed_tokens_per_step"] = round(self._n_computed / (self._n_steps - 1), 1)
            if solved := self._split.solved():
                found["micro_batch_s"], found["token_s"] = (float(f"{value:.4g}") for value in solved)
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
