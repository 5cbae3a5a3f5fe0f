"""Capacity that can be taken away: how long it lasts, what that costs, and whether to use it.

A zone is up (an instance can be had) or down. `Interruptions` holds the law of either kind of
spell: measured, Weibull or exponential. Measured spells are not exponential: most are short, and
whoever has lasted an hour will probably last the next. Expected hours come from renewal equations
solved exactly, chances from paths drawn with a given seed.

All times are seconds. An interruption takes whatever was done since the last checkpoint; the
restart comes after an interruption, not at the first start; the last stretch of work ends with a
checkpoint too, as in Daly's formula. Refuses to look up prices, jobs or clocks: it gets numbers and
gives back numbers and reasons.

Sources: Young, CACM 17(9), 1974; Daly, Future Generation Computer Systems 22, 2006; Wu et al.,
"Can't Be Late", NSDI 2024, for the mixture with on demand and for the traces behind the prior.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing.errors import InputError
from farthing.planner.uptime import Floats, Measured, Spell, Weibull, fit_law, recency
from farthing.prices.gpus import facts
from farthing.units import say_usd

_MAX_STRETCHES = (
    2000  # beyond it expected times grow by the same amount with each stretch (renewal theorem)
)
_PATHS = 2000
_KNOWN_SPREAD = 0.75
# standard deviations on either side of the middle that hold 80 % of a normal distribution
_80_PERCENT = 1.2816


class Now(NamedTuple):
    """What a zone is like at the moment, where that is known."""

    is_up: bool
    age_s: float
    """Since that began."""


@dataclass(frozen=True)
class Interruptions:
    """Up and down spells of a zone and node size, and how well they are known. `down` None:
    capacity is back at once.
    """

    up: Weibull | Measured
    down: Weibull | Measured | None = None
    n_spells: float = math.inf
    """Up spells behind it, each counted by its weight (Kish's effective sample size)."""
    drift: float = 0.0
    """Standard deviation of the logarithm of the mean spell from one period of days to the next."""
    is_prior: bool = False
    now: Now | None = None

    @property
    def mean_between_s(self) -> float:
        """Mean time between interruptions, waiting not counted."""
        return self.up.mean_s

    @property
    def availability(self) -> float:
        """Share of time with capacity."""
        return self.up.mean_s / (self.up.mean_s + self.down.mean_s) if self.down else 1.0

    def survival(self, t_s: ArrayLike) -> Floats:
        """Chance that an instance is kept for `t_s` or longer, from the moment capacity came."""
        return self.up.survival(t_s)

    @property
    def spread(self) -> float:
        """Factor by which the mean spell may be off either way, in 80 % of cases: few spells, wide
        range.
        """
        relative = (
            self.up.mean_square_s2 / self.up.mean_s**2 - 1
        )  # squared coefficient of variation
        return math.exp(_80_PERCENT * math.sqrt(relative / self.n_spells + self.drift**2))

    def shifted(self, factor: float) -> Interruptions:
        """The same zone with up spells `factor` times as long and down spells as many times
        shorter.
        """
        return replace(
            self, up=self.up.stretched(factor), down=self.down and self.down.stretched(1 / factor)
        )

    def perhaps(self) -> tuple[tuple[Interruptions, float], ...]:
        """This zone and what it may be instead, each with its weight: three points that have a
        normal distribution's mean, variance and kurtosis, three quarters as wide as the spread (the
        least error of chances, docs/log.md)."""
        step = _KNOWN_SPREAD * math.sqrt(3) * math.log(self.spread) / _80_PERCENT
        if not step:
            return ((self, 1.0),)
        return (
            (self, 2 / 3),
            (self.shifted(math.exp(step)), 1 / 6),
            (self.shifted(math.exp(-step)), 1 / 6),
        )

    def for_node(self, n_gpus: int, measured_n_gpus: int = 1) -> Interruptions:
        """The same zone for nodes of another size, whose spells are shorter by the power of the
        facts' `node_power`.
        """
        size = math.log(n_gpus / measured_n_gpus)
        factor = math.exp(-_facts()["node_power"] * size)
        return replace(
            self,
            up=self.up.stretched(factor),
            drift=math.hypot(self.drift, _facts()["node_spread"] * size),
        )


def fit(
    up: Sequence[Spell], down: Sequence[Spell], law: str = "measured", half_life_s: float = math.inf
) -> Interruptions:
    """The model of a zone from its spells. Says what to do when there are none."""
    if not up:
        raise InputError(
            "the trace has no capacity at all",
            to_do="use another zone, or `prior` for a wide guess",
        )
    weight = recency(up, half_life_s) * [not spell.is_censored for spell in up]
    n_spells = max(1.0, float(weight.sum() ** 2 / (weight @ weight))) if weight.any() else 1.0
    down_law = fit_law(down, law, half_life_s) if down else None
    return Interruptions(fit_law(up, law, half_life_s), down_law, n_spells, _facts()["drift"])


def drawn_together(zones: Sequence[Interruptions], share: float) -> list[Interruptions]:
    """Zones of one kind of node, each with its mean spells moved `share` of the way, in logarithms,
    to those of all.

    What a zone was lately is part chance: the far ones come back (shrinkage, James and Stein,
    1961).
    """
    up = [math.log(zone.up.mean_s) for zone in zones]
    down = [math.log(zone.down.mean_s) for zone in zones if zone.down]
    drawn = []
    for zone in zones:
        longer = math.exp(share * (sum(up) / len(up) - math.log(zone.up.mean_s)))
        wait = zone.down
        if wait:
            wait = wait.stretched(math.exp(share * (sum(down) / len(down) - math.log(wait.mean_s))))
        drawn.append(replace(zone, up=zone.up.stretched(longer), down=wait))
    return drawn


@functools.cache
def prior(n_gpus: int = 1) -> Interruptions:
    """For GPUs without traces: the middle of the zones that were measured, and a range as wide as
    between them.
    """
    facts = _facts()
    up = Weibull(facts["mean_up"] * 3600 / math.gamma(1 + 1 / facts["shape_up"]), facts["shape_up"])
    down = Weibull(
        facts["mean_down"] * 3600 / math.gamma(1 + 1 / facts["shape_down"]), facts["shape_down"]
    )
    return Interruptions(up, down, drift=facts["zone_spread"], is_prior=True).for_node(n_gpus)


@functools.cache
def _facts() -> dict[str, float]:
    return {row["name"]: float(row["value"]) for row in facts("spot_spells")}


@dataclass(frozen=True)
class SaveSchedule:
    """How a job saves: `save_s` every `interval_s` of work, and `restart_s` before work goes on
    after an interruption.
    """

    interval_s: float
    save_s: float
    restart_s: float

    def needed_s(self, work_s: ArrayLike) -> Floats:
        """Time for work with its checkpoints, when nothing comes between."""
        work = np.asarray(work_s, float)
        return np.asarray(work + np.ceil(work / self.interval_s - 1e-9) * self.save_s)

    def spend(
        self, spell_s: Floats, work_s: Floats, restart_s: Floats
    ) -> tuple[NDArray[np.bool_], Floats, Floats]:
        """Jobs with `work_s` to do meet a spell: which finish, the time each uses, the work that is
        safe after it.
        """
        needed = restart_s + self.needed_s(work_s)
        finishes = spell_s >= needed
        n_saved = np.maximum(
            0.0, np.floor((spell_s - restart_s) / (self.interval_s + self.save_s) + 1e-9)
        )
        return (
            finishes,
            np.minimum(spell_s, needed),
            np.where(finishes, work_s, n_saved * self.interval_s),
        )


@dataclass(frozen=True)
class Expected:
    """What a job on spot comes to, on average. billed = work + checkpoints + restarts + lost; wall
    = billed + waiting.
    """

    work_s: float
    checkpoint_s: float
    restart_s: float
    lost_s: float
    waiting_s: float
    n_interruptions: float

    @property
    def billed_s(self) -> float:
        """Seconds with an instance, which are paid for."""
        return self.work_s + self.checkpoint_s + self.restart_s + self.lost_s

    @property
    def wall_s(self) -> float:
        """Seconds from the moment the job is wanted to its end."""
        return self.billed_s + self.waiting_s


def expect(work_s: float, saves: SaveSchedule, zone: Interruptions) -> Expected:
    """Expected times of a job wanted at a random moment, when the zone may be down or in the middle
    of an up spell.

    With m stretches of work left at the start of a spell, E(m) = b(m) + sum over j of P(j stretches
    are saved, then an interruption) E(m - j), where b(m) is what this spell adds; so E is solved
    from m = 1 upwards. The first spell is the rest of one under way, with the zone's availability,
    or else a fresh one after the rest of a down spell. For exponential spells this is Daly's M
    e^(R/M) (e^((tau+d)/M) - 1) W/tau.
    """
    up, restart, step = zone.up, saves.restart_s, saves.interval_s + saves.save_s
    n_all = max(1, math.ceil(work_s / saves.interval_s - 1e-9))
    n = min(n_all, _MAX_STRETCHES)
    last = work_s - (n_all - 1) * saves.interval_s + saves.save_s
    begin = (
        np.arange(n, dtype=np.float64) * step
    )  # begin[m - 1] + last: the time that m stretches need
    alive, at_end = up.survival(restart + begin), up.survival(restart + begin + last)
    if at_end[0] <= 0 or (n > 1 and alive[1] <= 0):
        return Expected(work_s, n_all * saves.save_s, math.inf, math.inf, math.inf, math.inf)
    # per spell: seconds billed, interruptions, seconds of restart
    adds = np.stack(
        [up.lived(restart + begin + last), 1 - at_end, np.full(n, up.lived(restart))], axis=1
    )
    saved = (
        np.r_[0.0, alive[1:-1] - alive[2:]] if n > 2 else np.zeros(1)
    )  # P(exactly j saved), j = 0, 1, ...
    mean = np.zeros((n, 3))  # mean[n - m] is E(m): the last comes first
    mean[-1] = adds[0] / at_end[0]
    if (
        n > 1
    ):  # E(m) (1 - P(none is saved)) - sum over j of P(j) E(m - j) = what is known, for all m > 1 at once  # noqa: E501
        known = adds[1:] + np.outer(alive[1:] - at_end[1:], mean[-1])
        mean[-2::-1] = _solved(np.r_[alive[1], -saved[1 : n - 1]], known)
    share, rest_mean = zone.availability, up.mean_s

    def first_survival(t: ArrayLike) -> Floats:
        return np.asarray(share * (1 - up.lived(t) / rest_mean) + (1 - share) * up.survival(t))

    end = begin[-1] + last
    rest_lived = end - (end * up.lived(end) - up.lived_square(end) / 2) / rest_mean
    total = np.array(
        [share * rest_lived + (1 - share) * up.lived(end), 1 - first_survival(end), 0.0]
    )
    edges = np.r_[first_survival(begin), first_survival(end)]
    total = total + (edges[:-1] - edges[1:]) @ mean
    if n_all > n:
        spell = np.array([up.mean_s, 1.0, float(up.lived(restart))])
        per_stretch = spell / _stretches_kept(saves.interval_s, saves.save_s, restart, zone)
        total = total + (n_all - n) * per_stretch
    billed, n_interruptions, restart_s = (float(value) for value in total)
    lost = billed - work_s - n_all * saves.save_s - restart_s
    waiting = 0.0
    if zone.down:
        waiting = (1 - share) * zone.down.mean_square_s2 / (
            2 * zone.down.mean_s
        ) + n_interruptions * zone.down.mean_s
    return Expected(
        work_s, n_all * saves.save_s, restart_s, max(lost, 0.0), waiting, n_interruptions
    )


def _solved(first_column: Floats, right: Floats) -> Floats:
    """x with T x = right, where T is lower triangular with this first column along its diagonals
    (Toeplitz).

    Such matrices multiply as power series do: 1 / T is found by Newton's method, g -> g (2 - T g),
    which doubles its right terms with each turn; products are taken by Fourier transform.
    """
    n = len(first_column)
    inverse = np.array([1 / first_column[0]])
    while len(inverse) < n:
        size = min(2 * len(inverse), n)
        wide = 1 << (2 * size - 1).bit_length()
        g, series = np.fft.rfft(inverse, wide), np.fft.rfft(first_column[:size], wide)
        off = -np.fft.irfft(series * g, wide)[:size]
        off[0] += 2
        inverse = np.fft.irfft(np.fft.rfft(off, wide) * g, wide)[:size]
    wide = 1 << (2 * n - 1).bit_length()
    found = np.fft.irfft(
        np.fft.rfft(right, wide, axis=0) * np.fft.rfft(inverse, wide)[:, None], wide, axis=0
    )
    return np.asarray(found[:n])


class SpotRange(NamedTuple):
    """What interruptions do to a job: with capacity that lasts longer, on average, and with such
    that is taken sooner.
    """

    good: Expected
    likely: Expected
    bad: Expected


def expect_range(work_s: float, saves: SaveSchedule, zone: Interruptions) -> SpotRange:
    """Good, likely and bad case: mean spells longer and shorter by the zone's spread."""
    good, bad = zone.shifted(zone.spread), zone.shifted(1 / zone.spread)
    return SpotRange(
        expect(work_s, saves, good), expect(work_s, saves, zone), expect(work_s, saves, bad)
    )


def _stretches_kept(
    interval_s: ArrayLike, save_s: float, restart_s: float, zone: Interruptions
) -> Floats:
    """Stretches of work that a fresh spell saves on average, without end of the job: the sum of the
    survivals at each save. Beyond 512 the sum is the integral."""
    step = np.asarray(interval_s, float)[..., None] + save_s
    kept = zone.up.survival(restart_s + step * np.arange(1, 513)).sum(axis=-1)
    rest = zone.up.mean_s - zone.up.lived(restart_s + 512.5 * step[..., 0])
    return np.asarray(kept + np.maximum(0.0, rest) / step[..., 0])


def young_interval_s(save_s: float, mean_between_s: float) -> float:
    """Young's interval for exponential spells: sqrt(2 d M)."""
    return math.sqrt(2 * save_s * mean_between_s)


def best_interval_s(save_s: float, restart_s: float, zone: Interruptions) -> float:
    """The interval that keeps most work per billed second in the long run, for any law
    (renewal-reward theorem).

    Intervals from a twentieth of Young's to twenty times it, 1.5 % apart; each is judged with its
    neighbours within 10 %, so that the steps of measured lengths don't decide.
    """
    intervals = young_interval_s(save_s, zone.mean_between_s) * np.geomspace(1 / 20, 20, 401)
    kept = intervals * _stretches_kept(intervals, save_s, restart_s, zone)
    smooth = np.convolve(np.pad(kept, 6, mode="edge"), np.full(13, 1 / 13), mode="valid")
    return float(intervals[int(np.argmax(smooth))])


@dataclass(frozen=True, eq=False)
class Paths:
    """Drawn runs of one job: wall, spot and on-demand seconds of each; a wall time of infinity is
    past the deadline.
    """

    wall_s: Floats
    spot_s: Floats
    on_demand_s: Floats

    def chance_by(self, deadline_s: float) -> float:
        """Share of runs that end by the deadline."""
        return float(np.mean(self.wall_s <= deadline_s))


def draw_paths(
    work_s: float,
    saves: SaveSchedule,
    zone: Interruptions,
    *,
    deadline_s: float,
    falls_back: bool = False,
    seed: int = 0,
    n_paths: int = _PATHS,
) -> Paths:
    """Runs wanted at random moments, or now where it is known what the zone is like, each followed
    until it ends or the deadline has passed. The zone is what it was measured to be, or by its
    spread another.

    `falls_back`: without spot capacity the job goes on on demand as soon as it is behind linear
    progress towards the deadline ("Uniform Progress"); when the time that is left is only enough to
    finish on demand, it does. Unlike the paper's rule it goes back to spot with the next capacity,
    not when it is ahead, and not to idling before that. On demand pays the restart before, and a
    checkpoint after.
    """
    drawn = [
        _draw_paths(
            work_s,
            saves,
            one,
            deadline_s,
            falls_back,
            seed + number,
            max(1, round(weight * n_paths)),
        )
        for number, (one, weight) in enumerate(zone.perhaps())
    ]
    names = "wall_s", "spot_s", "on_demand_s"
    return Paths(*(np.concatenate([getattr(one, name) for one in drawn]) for name in names))


def _draw_paths(
    work_s: float,
    saves: SaveSchedule,
    zone: Interruptions,
    deadline_s: float,
    falls_back: bool,
    seed: int,
    n_paths: int,
) -> Paths:
    """The same for a zone that is known for certain."""
    chance, over = np.random.default_rng(seed), np.zeros(n_paths)
    runs = _Runs(work_s, saves, deadline_s, falls_back, n_paths)
    who, is_up = np.arange(n_paths), chance.random(n_paths) < zone.availability

    def rest(law: Weibull | Measured, n: int) -> Floats:
        return (
            law.draw_rest(chance, n)
            if zone.now is None
            else law.draw_after(chance, n, zone.now.age_s)
        )

    if zone.now is not None:
        is_up = np.full(n_paths, zone.now.is_up or zone.down is None)
    spell = np.where(is_up, rest(zone.up, n_paths), zone.up.draw(chance, n_paths))
    if zone.down:
        waits = who[~is_up]
        who = np.sort(np.r_[who[is_up], runs.without_capacity(waits, rest(zone.down, len(waits)))])
        spell = spell[who]
    while who.size:
        who = runs.with_capacity(who, spell)
        who = runs.without_capacity(
            who, zone.down.draw(chance, len(who)) if zone.down else np.zeros(len(who))
        )
        over[who[runs.wall[who] > deadline_s]] = math.inf
        who = who[runs.wall[who] <= deadline_s]
        spell = zone.up.draw(chance, len(who))
    return Paths(runs.wall + over, runs.spot, runs.own)


class _Runs:
    """Runs of one job that are followed together: seconds so far, and of work that is left, of each
    by its number.
    """

    def __init__(
        self, work_s: float, saves: SaveSchedule, deadline_s: float, falls_back: bool, n_runs: int
    ) -> None:
        self.work_s, self.saves, self.deadline_s, self.falls_back = (
            work_s,
            saves,
            deadline_s,
            falls_back,
        )
        self.left = np.full(n_runs, float(work_s))
        self.wall, self.spot, self.own, self.restart = np.zeros((4, n_runs))

    def slack_s(self, who: NDArray[np.intp]) -> Floats:
        """Until on demand alone could not finish any more, after one more interruption."""
        margin = self.saves.interval_s + 2 * self.saves.save_s + 2 * self.saves.restart_s
        return np.asarray(self.deadline_s - self.wall[who] - self.left[who] - margin)

    def with_capacity(self, who: NDArray[np.intp], spell: Floats) -> NDArray[np.intp]:
        """A spell of spot capacity for each of these runs; returns those that have not ended."""
        saves = self.saves
        if (
            self.falls_back
        ):  # every checkpoint takes from the slack: leave before an interruption could make it late
            n_saves = np.floor(np.maximum(self.slack_s(who), 0.0) / max(saves.save_s, 1e-9))
            most = (self.restart[who] + n_saves * (saves.interval_s + saves.save_s)) * (n_saves > 0)
            spell = np.minimum(spell, most)
        ends, used, kept = saves.spend(spell, self.left[who], self.restart[who])
        self.spot[who] += used
        self.wall[who] += used
        self.left[who] -= kept
        self.restart[who] = np.where(used > 0, saves.restart_s, self.restart[who])
        return who[~ends]

    def without_capacity(self, who: NDArray[np.intp], down_s: Floats) -> NDArray[np.intp]:
        """So long without spot capacity; returns those that have not ended on demand."""
        if not self.falls_back:
            self.wall[who] += down_s
            return who
        ahead = (self.work_s - self.left[who]) / self.work_s * self.deadline_s - self.wall[who]
        last_call, restart_s, save_s = self.slack_s(who), self.restart[who], self.saves.save_s
        idle = np.clip(np.minimum(ahead, last_call), 0.0, down_s)
        finish = restart_s + self.left[who] + save_s
        ends = (last_call <= idle) | (idle + finish <= down_s)
        own_s = np.where(ends, finish, down_s - idle)
        self.left[who] = np.where(
            ends, 0.0, self.left[who] - np.maximum(0.0, own_s - restart_s - save_s)
        )
        self.own[who] += own_s
        self.wall[who] += idle + own_s
        self.restart[who] = np.where(own_s > 0, self.saves.restart_s, restart_s)
        return who[~ends]


@dataclass(frozen=True)
class Way:
    """One way to buy the hours: `spot`, `on demand` or `mixture`; mean dollars and hours, chance to
    meet the deadline.
    """

    kind: str
    usd: float
    wall_s: float
    chance: float


@dataclass(frozen=True)
class Choice:
    """The way to take, why, and all ways."""

    best: Way
    why: str
    ways: tuple[Way, ...]


def choose(
    work_s: float,
    saves: SaveSchedule,
    zone: Interruptions,
    *,
    spot_usd_per_h: float,
    on_demand_usd_per_h: float,
    deadline_s: float = math.inf,
    confidence: float = 0.95,
    seed: int = 0,
) -> Choice:
    """The cheapest way whose chance to meet the deadline is at least `confidence`. On demand is
    counted without checkpoints.

    Without a deadline there is no mixture: nothing says how long to wait. When no way is sure, the
    likeliest is taken.
    """
    likely = expect(work_s, saves, zone)
    spot_usd, own_usd = likely.billed_s / 3600 * spot_usd_per_h, work_s / 3600 * on_demand_usd_per_h
    ways = [Way("on demand", own_usd, work_s, float(work_s <= deadline_s))]
    if math.isinf(deadline_s):
        ways.append(Way("spot", spot_usd, likely.wall_s, float(math.isfinite(likely.billed_s))))
    else:
        drawn = _drawn(work_s, saves, zone, deadline_s, seed)
        usd = (drawn.spot_s * spot_usd_per_h + drawn.on_demand_s * on_demand_usd_per_h) / 3600
        ways.append(Way("spot", spot_usd, likely.wall_s, drawn.chance_alone))
        ways.append(Way("mixture", usd, drawn.wall_s, drawn.chance))
    sure_ways = [way for way in ways if way.chance >= confidence]
    best = (
        min(sure_ways, key=lambda way: way.usd)
        if sure_ways
        else max(ways, key=lambda way: (way.chance, -way.usd))
    )
    return Choice(best, _why(best, ways, confidence, bool(sure_ways)), tuple(ways))


class _Drawn(NamedTuple):
    """Means of drawn paths that fall back on demand, and chances to meet the deadline."""

    chance_alone: float
    """Of spot that does not fall back."""
    chance: float
    spot_s: float
    on_demand_s: float
    wall_s: float


@functools.lru_cache(maxsize=4096)
def _drawn(
    work_s: float, saves: SaveSchedule, zone: Interruptions, deadline_s: float, seed: int
) -> _Drawn:
    """Hangs on no price, so that offers of one machine share it."""
    alone = draw_paths(work_s, saves, zone, deadline_s=deadline_s, seed=seed)
    mixed = draw_paths(work_s, saves, zone, deadline_s=deadline_s, seed=seed, falls_back=True)
    return _Drawn(
        alone.chance_by(deadline_s),
        mixed.chance_by(deadline_s),
        float(mixed.spot_s.mean()),
        float(mixed.on_demand_s.mean()),
        float(mixed.wall_s.mean()),
    )


def _why(best: Way, ways: Sequence[Way], confidence: float, is_sure: bool) -> str:
    own, spot = ways[0], ways[1]
    if not is_sure:
        return (
            f"no way meets the deadline with {confidence:.0%}; {best.kind} is likeliest, with"
            f" {best.chance:.0%}"
        )
    if best is own:
        if spot.usd >= own.usd:
            return (
                f"spot costs {say_usd(spot.usd)} with what it loses, on demand {say_usd(own.usd)}"
            )
        return (
            f"spot meets the deadline only with {spot.chance:.0%}, and nothing cheaper with"
            f" {confidence:.0%}"
        )
    saved = f"saves {1 - best.usd / own.usd:.0%} of {say_usd(own.usd)} on demand"
    if best is spot:
        return f"spot {saved}, interruptions counted"
    return (
        f"spot alone meets the deadline with {spot.chance:.0%}; with on demand when it falls behind"
        f" it {saved}"
    )
