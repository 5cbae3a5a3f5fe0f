"""Rungs, survivors and the noise of a score: arithmetic on plain values.

Successive halving (Jamieson and Talwalkar 2016), with the rungs and the 1/eta rule of ASHA (Li et
al. 2020). A rung is complete before the next one begins, so that who survives does not depend on
which machine was faster, and the bill is known before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.metrics import classification_metrics, stderr_of_mean

Z_95, N_DRAWN = 1.959964, 1000
SHARES = {
    *("accuracy", "f1", "precision", "recall", "exact_match", "rouge1", "rouge2", "rougeL"),
    "rewards/accuracies",
}
"""Metrics that are means of values from 0 to 1, or nearly so."""


@dataclass(frozen=True)
class Rungs:
    """Where trials are compared. Rung r is at `fractions[r]` of a trial's steps; the last is 1."""

    factor: int
    fractions: tuple[float, ...]

    def n_trials(self, n: int) -> list[int]:
        """Trials at each rung of a bracket that begins with `n`."""
        return [max(1, n // self.factor**rung) for rung in range(len(self.fractions))]

    def full_runs(self, n: int) -> float:
        """Training of a bracket of `n` trials, in full trainings of one."""
        counts, at_rungs = self.n_trials(n), pairwise((0.0, *self.fractions))
        return sum(
            count * (to - before) for count, (before, to) in zip(counts, at_rungs, strict=True)
        )


def rungs_of(factor: int, min_fraction: float, n_trials: int) -> Rungs:
    """As many rungs as `min_fraction` allows and `n_trials` fill."""
    most = math.floor(math.log(1 / min_fraction) / math.log(factor) + 1e-9)
    filled = math.floor(math.log(n_trials) / math.log(factor) + 1e-9)
    n = max(0, min(most, filled))
    return Rungs(factor, tuple(float(factor) ** -(n - rung) for rung in range(n + 1)))


def shares_of(n: int, parts: int) -> list[int]:
    """`n` trials in parts as equal as can be, none of them empty."""
    return [max(1, n // parts + (number < n % parts)) for number in range(parts)]


def ranked(scores: Mapping[int, float | None], *, greater_is_better: bool) -> list[int]:
    """Trials from the best score to the worst; those without a score are left out. Of equal ones
    the earlier is first.
    """
    sign = -1 if greater_is_better else 1
    there = [
        (sign * score, trial)
        for trial, score in scores.items()
        if score is not None and math.isfinite(score)
    ]
    return [trial for _, trial in sorted(there)]


def best_score(
    rows: Sequence[Mapping[str, float]], metric: str, *, greater_is_better: bool, best: bool
) -> float | None:
    """The score of a trial's evaluations up to now: of the best one, or of the last."""
    values = [row.get(metric) for row in rows]
    there = [value for value in values if value is not None and math.isfinite(value)]
    if not there or (values and values[-1] is None):  # what is not a number loses
        return None
    if not best:
        return there[-1]
    return max(there) if greater_is_better else min(there)


def interval(metric: str, row: Mapping[str, Any]) -> tuple[float, float] | None:
    """95 % interval of a metric in a row of an evaluation, from what its examples vary by; None
    where that is not known.

    A loss: normal, by its standard error. Precision, recall and F1: percentiles of 1,000 bootstrap
    samples of the confusion. Other shares: Wilson (1927); a mean of values within 0 and 1 varies at
    most as much as a share does.
    """
    score, n = row.get(metric), row.get("n_examples") or 0
    if score is None or n < 1:
        return None
    if (stderr := row.get(f"{metric}_stderr")) is not None:
        return None if n < 2 else (score - Z_95 * stderr, score + Z_95 * stderr)
    if metric in ("f1", "precision", "recall") and "confusion" in row:
        return _bootstrapped(metric, np.array(row["confusion"]))
    if metric not in SHARES:
        return None
    z2 = Z_95**2 / n
    middle = (score + z2 / 2) / (1 + z2)
    half = math.sqrt(max(0.0, score * (1 - score)) * z2 + z2**2 / 4) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def _bootstrapped(metric: str, confusion: NDArray[np.int64]) -> tuple[float, float]:
    n, names = int(confusion.sum()), ("",) * len(confusion)
    drawn = np.random.default_rng(0).multinomial(n, confusion.ravel() / n, N_DRAWN)
    values = [
        classification_metrics(each.reshape(confusion.shape), names)[metric] for each in drawn
    ]
    low, high = np.quantile(np.array(values, dtype=float), [0.025, 0.975])
    return float(low), float(high)


Each = Sequence[Sequence[float]]
"""(what each example adds to a mean, its weight), in the order of the examples."""


def paired(one: Each, other: Each) -> tuple[float, float] | None:
    """95 % interval of the difference between two means over the same examples; None where they
    are others, or a single one.
    """
    (sums, weights), (sums_of_other, weights_of_other) = one, other
    if weights != weights_of_other or len(weights) < 2:
        return None
    differences, of_all = np.array(sums) - np.array(sums_of_other), np.array(weights)
    mean = float(differences.sum() / of_all.sum())
    half = Z_95 * stderr_of_mean(differences, of_all)
    return mean - half, mean + half


def least_difference(n_examples: int, score: float = 0.8) -> float:
    """How far apart two scores must be to differ at 95 %, each on `n_examples`."""
    return Z_95 * math.sqrt(2 * score * (1 - score) / max(1, n_examples))
