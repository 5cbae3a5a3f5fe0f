"""How long capacity lasts and stays away: spells read from traces, and the laws behind them.

Two laws with the same questions: `Weibull` (shape 1 is exponential) and `Measured`, the spells as
they were seen. Both know their survival, the mean and mean square of spells cut at a time, and how
to draw new spells and the rest of one under way. Refuses to know what a spell costs: that is
`spot`.

Sources: Kaplan and Meier, JASA 53, 1958, and Efron, Fifth Berkeley Symposium, 1967, for spells cut
short by the end of a trace; Cohen, Technometrics 7, 1965, for the Weibull fit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_FEW = 3  # spells that say nothing of longer ones


def _share_of_gamma(a: float, x: Floats) -> Floats:
    """Regularized lower incomplete gamma function P(a, x), by its series (Abramowitz and Stegun
    6.5.29).
    """
    x = np.atleast_1d(
        np.minimum(x, 80.0)
    )  # P(a, 80) is 1 to the last digit for the a of this room (0.2 to 10)
    term = np.full_like(x, 1 / math.gamma(a + 1))
    total = term.copy()
    for n in range(1, 300):
        term *= x
        term /= a + n
        total += term
        if n % 10 == 0 and term.max(initial=0.0) < 1e-16 * total.max(initial=1.0):
            break
    return np.minimum(1.0, total * x**a * np.exp(-x))


@dataclass(frozen=True)
class Weibull:
    """Spells with P(longer than t) = exp(-(t/scale)^shape): below shape 1 the young ones are at
    risk, 1 is exponential.
    """

    scale_s: float
    shape: float = 1.0

    @property
    def mean_s(self) -> float:
        """Mean length."""
        return self.scale_s * math.gamma(1 + 1 / self.shape)

    @property
    def mean_square_s2(self) -> float:
        """Mean of the squared length."""
        return self.scale_s**2 * math.gamma(1 + 2 / self.shape)

    def survival(self, t_s: ArrayLike) -> Floats:
        """Chance that a spell lasts `t_s` or longer."""
        return np.exp(-((np.asarray(t_s, float) / self.scale_s) ** self.shape))

    def lived(self, t_s: ArrayLike) -> Floats:
        """Mean length of spells cut at `t_s`: the integral of the survival up to there."""
        t = np.asarray(t_s, float)
        return self.mean_s * _share_of_gamma(
            1 / self.shape, (t / self.scale_s) ** self.shape
        ).reshape(t.shape)

    def lived_square(self, t_s: ArrayLike) -> Floats:
        """Mean square length of spells cut at `t_s`."""
        t = np.asarray(t_s, float)
        x = (t / self.scale_s) ** self.shape
        return self.mean_square_s2 * _share_of_gamma(2 / self.shape, x).reshape(t.shape)

    def draw(self, chance: np.random.Generator, n: int) -> Floats:
        """Lengths of new spells."""
        return self.scale_s * chance.weibull(self.shape, n)

    def draw_rest(self, chance: np.random.Generator, n: int) -> Floats:
        """What is left of the spell under way at a random moment: long spells are met more often,
        at any age.
        """
        return (
            self.scale_s
            * chance.gamma(1 + 1 / self.shape, 1.0, n) ** (1 / self.shape)
            * chance.random(n)
        )

    def draw_after(self, chance: np.random.Generator, n: int, age_s: float) -> Floats:
        """What is left of a spell that has lasted `age_s`."""
        passed = (age_s / self.scale_s) ** self.shape
        return np.asarray(
            self.scale_s * (passed + chance.exponential(1.0, n)) ** (1 / self.shape) - age_s
        )

    def stretched(self, factor: float) -> Weibull:
        """The same law with every spell `factor` times as long."""
        return replace(self, scale_s=self.scale_s * factor)


@dataclass(frozen=True, eq=False)
class Measured:
    """Spells as they were seen: lengths in ascending order, each with its share of all spells."""

    lengths_s: Floats
    shares: Floats

    @property
    def mean_s(self) -> float:
        """Mean length."""
        return float(self.lengths_s @ self.shares)

    @property
    def mean_square_s2(self) -> float:
        """Mean of the squared length."""
        return float(self.lengths_s**2 @ self.shares)

    @functools.cached_property
    def _sums(self) -> tuple[Floats, Floats, Floats]:
        """Sums of share, share x length, share x length^2 over the first 0, 1, 2... lengths."""
        share, length = self.shares, self.lengths_s
        first, second, third = (np.r_[0.0, np.cumsum(share * length**power)] for power in (0, 1, 2))
        return first, second, third

    def _cut(self, t_s: ArrayLike, power: int) -> Floats:
        t = np.asarray(t_s, float)
        n_shorter = np.searchsorted(self.lengths_s, t)
        longer = 1.0 - self._sums[0][n_shorter]
        return np.asarray(
            self._sums[power][n_shorter] * (power > 0) + np.maximum(longer, 0.0) * t**power
        )

    def survival(self, t_s: ArrayLike) -> Floats:
        """Chance that a spell lasts `t_s` or longer."""
        n_shorter = np.searchsorted(self.lengths_s, np.asarray(t_s, float))
        return np.where(
            n_shorter < len(self.lengths_s), np.maximum(1.0 - self._sums[0][n_shorter], 0.0), 0.0
        )

    def lived(self, t_s: ArrayLike) -> Floats:
        """Mean length of spells cut at `t_s`."""
        return self._cut(t_s, 1)

    def lived_square(self, t_s: ArrayLike) -> Floats:
        """Mean square length of spells cut at `t_s`."""
        return self._cut(t_s, 2)

    def draw(self, chance: np.random.Generator, n: int) -> Floats:
        """Lengths of new spells."""
        return chance.choice(self.lengths_s, n, p=self.shares)

    def draw_rest(self, chance: np.random.Generator, n: int) -> Floats:
        """What is left of the spell under way at a random moment: long spells are met more often,
        at any age.
        """
        return chance.choice(
            self.lengths_s, n, p=self.shares * self.lengths_s / self.mean_s
        ) * chance.random(n)

    def draw_after(self, chance: np.random.Generator, n: int, age_s: float) -> Floats:
        """What is left of a spell that has lasted `age_s`: as of those that were longer; where
        hardly any was, about as long again, half of them shorter (the law of what has no scale)."""
        longer = self.lengths_s > age_s
        if longer.sum() < _FEW:
            return (
                np.asarray(age_s * (1 / (1 - chance.random(n)) - 1))
                if age_s
                else self.draw(chance, n)
            )
        shares = self.shares[longer] / self.shares[longer].sum()
        return np.asarray(chance.choice(self.lengths_s[longer], n, p=shares) - age_s)

    def stretched(self, factor: float) -> Measured:
        """The same law with every spell `factor` times as long."""
        return Measured(self.lengths_s * factor, self.shares)


class Spell(NamedTuple):
    """One stretch of a trace. A censored one was still going on when the trace ended."""

    length_s: float
    ended_at_s: float
    is_censored: bool = False


def spells_of(
    available: Sequence[int], gap_s: float, nodes: int = 1
) -> tuple[list[Spell], list[Spell]]:
    """Up and down spells of a trace of available instances, one number per `gap_s`; up means
    `nodes` or more.

    The spell that was under way when the trace began is dropped, because its age is unknown, unless
    it is the only one of its kind; the last is censored. Spells shorter than `gap_s` are not seen.
    """
    is_up = np.asarray(available) >= nodes
    edges = np.r_[0, np.flatnonzero(np.diff(is_up)) + 1, len(is_up)]
    found: dict[bool, list[Spell]] = {True: [], False: []}
    for begin, end in itertools.pairwise(edges):
        found[bool(is_up[begin])].append(
            Spell((end - begin) * gap_s, end * gap_s, end == len(is_up))
        )
    for spells in found.values():
        if len(spells) > 1 and spells[0].length_s == spells[0].ended_at_s:
            del spells[0]
    return found[True], found[False]


def fit_law(
    spells: Sequence[Spell], law: str = "measured", half_life_s: float = math.inf
) -> Weibull | Measured:
    """The law behind spells: `measured` (Kaplan-Meier), `weibull` or `exponential` (most likely,
    censoring counted).

    A spell that ended `half_life_s` before another counts half as much, since capacity drifts over
    the weeks. Censored spells count as "at least this long"; when the longest is censored, it is
    taken to end there (Efron's rule), which makes spells too short rather than too long.
    """
    ordered = sorted(spells, key=lambda spell: (spell.length_s, spell.is_censored))
    length = np.array([spell.length_s for spell in ordered], float)
    has_ended = np.array([not spell.is_censored for spell in ordered])
    weight = recency(ordered, half_life_s)
    if law == "measured":
        has_ended[-1] = True
        at_risk = np.cumsum(weight[::-1])[::-1]
        stays = np.where(has_ended, 1 - weight / at_risk, 1.0)
        stays[-1] = 0.0
        share = np.r_[1.0, np.cumprod(stays)[:-1]] * (1 - stays)
        return Measured(length[has_ended], share[has_ended] / share.sum())
    n_ends = max(
        float(weight @ has_ended), float(weight.min())
    )  # nothing ended yet: as if one had, just now
    shape = 1.0 if law == "exponential" else _weibull_shape(length, has_ended, weight)
    return Weibull((float(weight @ length**shape) / n_ends) ** (1 / shape), shape)


def recency(spells: Sequence[Spell], half_life_s: float) -> Floats:
    """What each spell counts: half as much for every `half_life_s` that it ended before the last
    one.
    """
    ended_at = np.array([spell.ended_at_s for spell in spells])
    return np.asarray(0.5 ** ((ended_at.max() - ended_at) / half_life_s))


def _weibull_shape(length: Floats, has_ended: NDArray[np.bool_], weight: Floats) -> float:
    """Root of the likelihood equation in the shape (Cohen, Technometrics 7, 1965), between 0.2 and
    5, by halving.
    """
    if weight @ has_ended <= 0 or np.ptp(length) == 0:
        return 1.0
    unit, low, high = length / length.max(), 0.2, 5.0
    mean_log = float((weight * has_ended) @ np.log(unit) / (weight @ has_ended))
    for _ in range(60):
        shape = (low + high) / 2
        power = weight * unit**shape
        low, high = (
            (shape, high)
            if power @ np.log(unit) / power.sum() - 1 / shape < mean_log
            else (low, shape)
        )
    return shape
