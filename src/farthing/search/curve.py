"""What more data, or another epoch, should add: a power law through measured scores.

error(n) = floor + scale * n^-rate, the form that learning curves follow over orders of magnitude
(Hestness et al. 2017). The interval is that of curves fitted to scores drawn from their own noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RATES = np.linspace(0.05, 2.0, 40)
N_DRAWN = 400


class Gain(NamedTuple):
    """What a score should gain; better is above 0."""

    likely: float
    low: float
    high: float
    """The 95 % interval."""


def gain(
    points: Sequence[tuple[float, float]],
    to: float,
    noise: Sequence[float],
    *,
    greater_is_better: bool,
) -> Gain | None:
    """The gain from the last of the points (examples or epochs, score) on.

    `noise` has the standard error of each score; 0: not known, where the curve's own residuals
    stand in. None for fewer than three points, and past twice the last.
    """
    n, scores = np.array(points, dtype=float).T
    at, errors = n.max(), -scores if greater_is_better else scores
    if to > 2 * at or len(set(n)) < 3:
        return None
    residuals = _fitted(n, errors, n) - errors
    residual = np.sqrt(np.mean(residuals**2) * len(n) / max(1, len(n) - 2))
    sigma = np.maximum(np.array(noise, dtype=float), residual)
    chance = np.random.default_rng(0)

    def gained(values: NDArray[np.float64]) -> float:
        now, then = _fitted(n, values, np.array([at, to]))
        return float(now - then)

    drawn = [gained(errors + sigma * chance.standard_normal(len(n))) for _ in range(N_DRAWN)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    likely = gained(errors)
    return Gain(likely, min(float(low), likely), max(float(high), likely))


def _fitted(
    n: NDArray[np.float64], errors: NDArray[np.float64], at: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The curve of the least squares, at some places: the rate from a grid, floor and scale
    exactly; more data never harms.
    """
    least, best = np.inf, at
    for rate in RATES:
        powers = (n / n.max()) ** -rate
        floor, scale = np.linalg.lstsq(np.stack([np.ones_like(n), powers], axis=1), errors)[0]
        if scale < 0:
            floor, scale = errors.mean(), 0.0
        loss = ((floor + scale * powers - errors) ** 2).sum()
        if loss < least - 1e-15:
            least, best = loss, floor + scale * (at / n.max()) ** -rate
    return best
