"""What more data, or another epoch, should add: a power law through measured scores.

error(n) = floor + scale * n^-rate, the form that learning curves follow over orders of magnitude
(Hestness et al. 2017). The interval is that of curves fitted to scores drawn from their own noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing.errors import InputError

RATES = np.linspace(0.05, 2.0, 40)
N_DRAWN = 400
Points = Sequence[tuple[float, float]]
"""(examples or epochs, score)"""


@dataclass(frozen=True)
class Gain:
    """What a score should gain from `at` to `to`, better is above 0."""

    at: float
    to: float
    likely: float
    low: float
    high: float
    """The 95 % interval."""


def gain(points: Points, to: float, noise: Sequence[float], *, greater_is_better: bool) -> Gain:
    """The gain from the last point on. `noise` has the standard error of each score, 0: not known,
    where the curve's own residuals stand in. Raises `InputError`."""
    at = max(n for n, _ in points)
    if to > 2 * at:
        raise InputError(
            f"{to:g} is more than twice the {at:g} that were measured",
            where="search.data_fraction",
            to_do="measure with more data first",
        )
    if len({n for n, _ in points}) < 3:
        raise InputError(
            "a learning curve needs three points", where="search.data_fraction", to_do="add shares"
        )
    n = np.array([point[0] for point in points], dtype=float)
    sign = -1.0 if greater_is_better else 1.0
    errors = sign * np.array([point[1] for point in points])
    fitted = _curve(n, errors)
    residual = float(np.sqrt(np.mean((fitted(n) - errors) ** 2) * len(n) / max(1, len(n) - 2)))
    sigma = np.maximum(np.array(noise, dtype=float), residual)
    chance = np.random.default_rng(0)

    def gained(values: NDArray[np.float64]) -> float:
        curve = _curve(n, values)
        return float(curve(np.array([at]))[0] - curve(np.array([to]))[0])

    drawn = [gained(errors + sigma * chance.standard_normal(len(n))) for _ in range(N_DRAWN)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    likely = gained(errors)
    return Gain(at, to, likely, min(float(low), likely), max(float(high), likely))


class _Curve:
    def __init__(self, floor: float, scale: float, rate: float, unit: float) -> None:
        self._floor, self._scale, self._rate, self._unit = floor, scale, rate, unit

    def __call__(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._floor + self._scale * (n / self._unit) ** -self._rate


def _curve(n: NDArray[np.float64], errors: NDArray[np.float64]) -> _Curve:
    """The least squares fit: the rate from a grid, the others exactly; data never harms."""
    unit, best = float(n.max()), None
    for rate in RATES:
        basis = np.stack([np.ones_like(n), (n / unit) ** -rate], axis=1)
        floor, scale = np.linalg.lstsq(basis, errors, rcond=None)[0]
        if scale < 0:
            floor, scale = errors.mean(), 0.0
        curve = _Curve(float(floor), float(scale), float(rate), unit)
        loss = float(((curve(n) - errors) ** 2).sum())
        if best is None or loss < best[0] - 1e-15:
            best = loss, curve
    assert best is not None
    return best[1]
