"""Capacity that can be taken away: how long it lasts, what that costs, and the chance to be in
time.

A zone is up (an instance can be had) or down. Both kinds of spell are as they were measured: most
are short, and whoever has lasted an hour will probably last the next, which no exponential says.
Runs of a job are followed through spells drawn from them with a fixed seed.

All times are seconds. An interruption takes what was done since the last checkpoint; the restart
comes after an interruption, not at the first start; the last stretch of work ends with a
checkpoint.

Sources: Kaplan and Meier, JASA 53, 1958, and Efron, Fifth Berkeley Symposium, 1967, for spells cut
short by the end of a trace; Young, CACM 17(9), 1974; Wu et al., "Can't Be Late", NSDI 2024, for the
mixture with on demand, the traces behind the prior and the format of traces.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from farthing.arrays import Floats
from farthing.errors import InputError
from farthing.prices.gpus import gpu_named
from farthing.prices.offers import Offer
from farthing.tables import numbers
from farthing.units import plural

N_PATHS, MOST_SPELLS = 256, 160
N_QUANTILES = 512  # of a law that is known by its formula
Z80 = 1.2816  # standard deviations on either side of the middle that hold 80 % of a normal law
KNOWN_SPREAD = 0.75  # of the spread, that the scenarios of a zone lie apart: the least error
HALF_LIFE_S = 2 * 86400.0  # capacity drifts: what is two days older counts half


@dataclass(frozen=True, eq=False)
class Spells:
    """Lengths in ascending order, each with its share of all spells."""

    lengths_s: Floats
    shares: Floats

    @functools.cached_property
    def mean_s(self) -> float:
        return float(self.lengths_s @ self.shares)

    def at(self, u: Floats) -> Floats:
        edges = np.cumsum(self.shares)
        return self.lengths_s[np.minimum(np.searchsorted(edges / edges[-1], u), len(edges) - 1)]

    @property
    def met(self) -> Spells:
        """Those under way at a random moment: of long ones more."""
        return Spells(self.lengths_s, self.shares * self.lengths_s)

    def stretched(self, factor: float) -> Spells:
        return Spells(self.lengths_s * factor, self.shares)


def weibull(mean_s: float, shape: float = 1.0) -> Spells:
    """Quantiles of P(longer than t) = exp(-(t/scale)^shape), with this mean; 1 is exponential."""
    u = (np.arange(N_QUANTILES) + 0.5) / N_QUANTILES
    lengths = (-np.log1p(-u)) ** (1 / shape)
    return Spells(lengths * mean_s / lengths.mean(), np.full(N_QUANTILES, 1 / N_QUANTILES))


class _Drawn(NamedTuple):
    """Spells of many runs [path, spell], and the wait before the first."""

    up: Floats
    down: Floats
    wait: Floats


@dataclass(frozen=True, eq=False)
class Interruptions:
    """Up and down spells of a zone and node size, and how well they are known."""

    up: Spells
    down: Spells | None = None  # none: capacity is back at once
    n_spells: float = math.inf
    """Up spells behind it, each counted by its weight (Kish's effective sample size)."""
    drift: float = 0.0
    """Standard deviation of the logarithm of the mean spell from one period of days to the next."""

    @functools.cached_property
    def spread(self) -> float:
        """Factor by which the mean spell may be off either way, in 80 % of cases."""
        up = self.up
        variation = float(up.lengths_s**2 @ up.shares) / up.mean_s**2 - 1
        return math.exp(Z80 * math.sqrt(variation / self.n_spells + self.drift**2))

    def shifted(self, factor: float) -> Interruptions:
        """Up spells `factor` times as long, and down spells as many times shorter."""
        down = self.down and self.down.stretched(1 / factor)
        return replace(self, up=self.up.stretched(factor), down=down)

    @functools.cached_property
    def good_and_bad(self) -> tuple[Interruptions, Interruptions]:
        return self.shifted(self.spread), self.shifted(1 / self.spread)

    @functools.cached_property
    def scenarios(self) -> tuple[tuple[Interruptions, float], ...]:
        """This zone and what it may be instead, each with its weight: three points with the mean,
        variance and kurtosis of a normal law.
        """
        step = KNOWN_SPREAD * math.sqrt(3) * math.log(self.spread) / Z80
        if not step:
            return ((self, 1.0),)
        good, bad = (self.shifted(math.exp(sign * step)) for sign in (1, -1))
        return (self, 2 / 3), (good, 1 / 6), (bad, 1 / 6)

    def for_node(self, n_gpus: int, measured_n_gpus: int = 1) -> Interruptions:
        """The same zone for nodes of another size, whose spells are shorter by a power of it."""
        known, size = _facts(), math.log(n_gpus / measured_n_gpus)
        up = self.up.stretched(math.exp(-known["node_power"] * size))
        return replace(self, up=up, drift=math.hypot(self.drift, known["node_spread"] * size))

    @functools.cached_property
    def drawn(self) -> _Drawn:
        """Each column has one draw from each of as many equal parts of the law."""
        chance = np.random.default_rng(0)

        def even(*shape: int) -> Floats:
            ranks = np.argsort(chance.random(shape), axis=0)
            return np.asarray((ranks + chance.random(shape)) / shape[0])

        u, v, n = even(N_PATHS, MOST_SPELLS), even(N_PATHS, MOST_SPELLS), N_PATHS
        down_s = self.down.mean_s if self.down else 0.0
        is_up = even(n) < self.up.mean_s / (self.up.mean_s + down_s)
        up, down, wait = self.up.at(u), np.zeros_like(u), np.zeros(n)
        up[:, 0] = np.where(is_up, self.up.met.at(u[:, 0]) * v[:, 0], up[:, 0])
        if self.down:
            down = self.down.at(v)
            wait = np.where(is_up, 0.0, self.down.met.at(even(n)) * even(n))
        return _Drawn(up, down, wait)


def _facts() -> dict[str, float]:
    return numbers("spot_spells", "name", "value")


@functools.cache
def prior(n_gpus: int = 1) -> Interruptions:
    """For GPUs without traces: the middle of the zones that were measured, with their range."""
    known = _facts()
    up, down = (weibull(known[f"mean_{x}"] * 3600, known[f"shape_{x}"]) for x in ("up", "down"))
    zone = Interruptions(up, down, drift=known["zone_spread"])
    return zone.for_node(n_gpus)


# ---- a job on spot ----


class SaveSchedule(NamedTuple):
    """How a job saves: `save_s` every `interval_s` of work, and `restart_s` before work resumes."""

    interval_s: float
    save_s: float
    restart_s: float

    def needed_s(self, work_s: Floats) -> Floats:
        """Time for work with its checkpoints, when nothing comes between."""
        return np.asarray(work_s + np.ceil(work_s / self.interval_s - 1e-9) * self.save_s)

    def kept_s(self, spell_s: Floats, restart_s: Floats | float) -> Floats:
        """Work that is safe after a spell that ends too early."""
        n = np.floor((spell_s - restart_s) / (self.interval_s + self.save_s) + 1e-9)
        return np.asarray(np.maximum(0.0, n) * self.interval_s)


class Expected(NamedTuple):
    work_s: float
    checkpoint_s: float
    restart_s: float
    lost_s: float
    waiting_s: float
    n_interruptions: float

    @property
    def billed_s(self) -> float:
        """With an instance, which is paid for."""
        return self.work_s + self.checkpoint_s + self.restart_s + self.lost_s

    @property
    def wall_s(self) -> float:
        return self.billed_s + self.waiting_s


def expect(work_s: float, saves: SaveSchedule, zone: Interruptions) -> Expected:
    """Mean times of a job wanted at a random moment."""
    runs = _followed(WorkRange(work_s).each_s, saves, zone)
    each = runs.wall, runs.spot, runs.restarting, runs.n_interruptions
    wall, billed, restart, n = (float(values.mean()) for values in each)
    saving = math.ceil(work_s / saves.interval_s - 1e-9) * saves.save_s
    if not math.isfinite(wall):
        return Expected(work_s, saving, math.inf, math.inf, math.inf, math.inf)
    lost = max(0.0, billed - work_s - saving - restart)
    return Expected(work_s, saving, restart, lost, wall - billed, n)


class WorkRange(NamedTuple):
    """Seconds of work, which in 80 % of cases takes `low` to `high` times as long."""

    likely_s: float
    low: float = 1.0
    high: float = 1.0

    @property
    def each_s(self) -> Floats:
        """Of each run that is followed."""
        z = _normal()
        spread = np.where(z < 0, 1 - self.low, self.high - 1) / Z80
        return self.likely_s * np.maximum(0.1, 1 + spread * z)


@functools.cache
def _normal() -> Floats:
    """Quantiles of a normal law, in no order."""
    quantiles = [NormalDist().inv_cdf((i + 0.5) / N_PATHS) for i in range(N_PATHS)]
    return np.random.default_rng(1).permutation(quantiles)


def chance_by(
    deadline_s: float, work: WorkRange, saves: SaveSchedule, zone: Interruptions
) -> float:
    """Share of runs that end in time, whatever the zone may be."""
    found = ((_followed(work.each_s, saves, one).wall, weight) for one, weight in zone.scenarios)
    return sum(weight * float(np.mean(wall <= deadline_s)) for wall, weight in found)


def young_interval_s(save_s: float, mean_between_s: float) -> float:
    """Young's interval for exponential spells: sqrt(2 d M)."""
    return math.sqrt(2 * save_s * mean_between_s)


def best_interval_s(save_s: float, restart_s: float, zone: Interruptions) -> float:
    """The interval that keeps most work per billed second in the long run (renewal-reward theorem).

    From a twentieth of Young's to twenty times it; each is judged with its neighbours, so that the
    steps of measured lengths don't decide.
    """
    tried = young_interval_s(save_s, zone.up.mean_s) * np.geomspace(1 / 20, 20, 201)
    n = np.floor((zone.up.lengths_s - restart_s) / (tried[:, None] + save_s) + 1e-9)
    kept = tried * (np.maximum(0.0, n) @ zone.up.shares)
    smooth = np.convolve(np.pad(kept, 4, mode="edge"), np.full(9, 1 / 9), mode="valid")
    return float(tried[int(np.argmax(smooth))])


class Mixture(NamedTuple):
    """Spot, with the same machine on demand whenever it falls behind the deadline: mean seconds."""

    spot_s: float
    on_demand_s: float
    wall_s: float
    chance: float


def mixture(
    deadline_s: float, work: WorkRange, saves: SaveSchedule, zone: Interruptions
) -> Mixture:
    """Without spot capacity the job resumes on demand as soon as it is behind linear progress
    towards the deadline ("Uniform Progress"), and when the time that is left is only enough to
    finish on demand, it does. Unlike the paper's rule it goes back to spot with the next capacity.
    On demand pays the restart before, and a checkpoint after.
    """
    found = np.zeros(4)
    for one, weight in zone.scenarios:
        runs = _followed(work.each_s, saves, one, deadline_s)
        each = runs.spot, runs.own, np.minimum(runs.wall, 2 * deadline_s), runs.wall <= deadline_s
        found += [weight * values.mean() for values in each]
    return Mixture(*found.tolist())


class _Runs(NamedTuple):
    """Runs that are followed together: seconds, infinite where nothing is ever saved."""

    wall: Floats
    spot: Floats
    own: Floats
    restarting: Floats
    n_interruptions: Floats


def _followed(
    work_s: Floats, saves: SaveSchedule, zone: Interruptions, deadline_s: float = math.inf
) -> _Runs:
    """Runs through the drawn spells of a zone until their work is done, and beyond these at their
    mean pace. With a deadline on demand steps in.
    """
    drawn, steps_in = zone.drawn, deadline_s < math.inf
    left, active = work_s.copy(), np.ones(N_PATHS, bool)
    runs = wall, spot, own, restarting, n_interruptions = _Runs(*np.zeros((5, N_PATHS)))
    restart = np.zeros(N_PATHS)
    margin_s = saves.interval_s + 2 * saves.save_s + 2 * saves.restart_s
    for number, down in enumerate(np.c_[drawn.wait, drawn.down].T):  # without spot capacity
        idle, own_s = down, np.zeros(N_PATHS)
        if steps_in:
            # until on demand alone could not finish any more, after one more interruption
            slack = deadline_s - wall - left - margin_s
            ahead = (work_s - left) / work_s * deadline_s - wall
            idle = np.clip(np.minimum(ahead, slack), 0.0, down)
            finish = restart + left + saves.save_s
            ends = active & ((slack <= idle) | (idle + finish <= down))
            own_s = np.where(ends, finish, down - idle) * active
            left = np.where(ends, 0.0, left - np.maximum(0.0, own_s - restart - saves.save_s))
            active &= ~ends
            own += own_s
            restart = np.where(own_s > 0, saves.restart_s, restart)
        wall += np.where(active | (own_s > 0), idle, 0.0) + own_s
        if number == MOST_SPELLS:
            break
        spell = drawn.up[:, number]
        if steps_in:
            # every checkpoint takes from the slack: leave before an interruption could make it late
            slack = deadline_s - wall - left - margin_s
            n_saves = np.floor(np.maximum(slack, 0.0) / max(saves.save_s, 1e-9))
            most = (restart + n_saves * (saves.interval_s + saves.save_s)) * (n_saves > 0)
            spell = np.minimum(spell, most)
        needed = restart + saves.needed_s(left)
        ends, used = active & (spell >= needed), np.minimum(spell, needed) * active
        for sums, more in ((spot, used), (wall, used), (restarting, np.minimum(restart, used))):
            sums += more
        left = np.where(ends, 0.0, left - saves.kept_s(spell, restart) * active)
        restart = np.where(used > 0, saves.restart_s, restart)
        active &= ~ends
        n_interruptions += active
        if not active.any():
            return runs
    if steps_in:
        wall[active] = math.inf
        return runs
    pace = float(saves.kept_s(drawn.up, saves.restart_s).mean())
    more = np.where(active, left / pace if pace > 0 else math.inf, 0.0)
    wall += more * (drawn.up.mean() + drawn.down.mean())
    spot += more * drawn.up.mean()
    restarting += more * np.minimum(drawn.up, saves.restart_s).mean()
    n_interruptions += more
    return runs


# ---- traces ----


class Spell(NamedTuple):
    """One stretch of a trace. A censored one was under way when the trace ended."""

    length_s: float
    ended_at_s: float
    is_censored: bool = False


def spells_of(available: Sequence[int], gap_s: float) -> tuple[list[Spell], list[Spell]]:
    """Up and down spells of a trace, one number per `gap_s`; up means one or more.

    The spell that was under way when the trace began is dropped, because its age is unknown, unless
    it is the only one of its kind; the last is censored.
    """
    found: dict[bool, list[Spell]] = {True: [], False: []}
    end = 0
    for is_up, group in itertools.groupby(available, lambda n: n > 0):
        n = sum(1 for _ in group)
        end += n
        found[is_up].append(Spell(n * gap_s, end * gap_s, end == len(available)))
    for spells in found.values():
        if len(spells) > 1 and spells[0].length_s == spells[0].ended_at_s:
            del spells[0]
    return found[True], found[False]


def fit_spells(spells: Sequence[Spell], half_life_s: float = math.inf) -> tuple[Spells, float]:
    """The law of spells (Kaplan-Meier) and how many it rests on.

    A spell that ended `half_life_s` before another counts half as much. When the longest is
    censored, it is taken to end there (Efron's rule), which makes spells too short, not too long.
    """
    ordered = sorted(spells, key=lambda spell: (spell.length_s, spell.is_censored))
    length, at, is_censored = (np.array(column) for column in zip(*ordered, strict=True))
    ended, weight = ~is_censored, 0.5 ** ((at.max() - at) / half_life_s)
    seen = weight * ended
    n = float(seen.sum() ** 2 / (seen @ seen)) if seen.any() else 1.0
    ended[-1] = True
    stays = np.where(ended, 1 - weight / np.cumsum(weight[::-1])[::-1], 1.0)
    stays[-1] = 0.0
    share = np.r_[1.0, np.cumprod(stays)[:-1]] * (1 - stays)
    return Spells(length[ended].astype(float), share[ended] / share.sum()), max(1.0, n)


def fit(up: Sequence[Spell], down: Sequence[Spell], half_life_s: float = math.inf) -> Interruptions:
    if not up:
        raise InputError("the trace has no capacity at all", to_do="use another zone")
    law, n_spells = fit_spells(up, half_life_s)
    below = fit_spells(down, half_life_s)[0] if down else None
    return Interruptions(law, below, n_spells, _facts()["drift"])


@dataclass(frozen=True)
class Trace:
    """Instances available in one zone, one number per `gap_s`. Its name says zone and GPU, and ends
    in the GPUs of an instance: `us-east-1a_v100_1`.
    """

    name: str
    gap_s: int
    available: tuple[int, ...]

    @property
    def kind(self) -> tuple[str, str, int]:
        """Zone, GPU by the catalog (empty where none is named), and GPUs of an instance."""
        zone, *words = Path(self.name).name.split("_")
        gpu = gpu_named(words[0]) if words else None
        n_gpus = int(words[-1]) if words and words[-1].isdecimal() else 1
        return zone.lower(), _plain(gpu.name) if gpu else "", max(1, n_gpus)


def _plain(gpu: str) -> str:
    """V100-16GB and V100-32GB are taken away alike."""
    return gpu.split("-")[0]


class _Metadata(BaseModel):
    gap_seconds: Annotated[float, Field(gt=0)]


class _File(BaseModel):
    metadata: _Metadata
    data: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def read_traces(folder: Path) -> list[Trace]:
    """Every trace under a folder: JSON, {"metadata": {"gap_seconds": g}, "data": [1, 0, ...]}."""
    shape = 'each is {"metadata": {"gap_seconds": 60}, "data": [1, 0, ...]}'
    traces = []
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise InputError("not a trace: no JSON", where=str(path), to_do=shape) from error
        if not isinstance(content, dict) or not {"metadata", "data"} <= content.keys():
            continue
        try:
            found = _File.model_validate(content, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            what = f"a trace that can't be read: {'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise InputError(what, where=str(path), to_do=shape) from None
        name = str(path.relative_to(folder).with_suffix(""))
        traces.append(Trace(name, int(found.metadata.gap_seconds), tuple(found.data)))
    if not traces:
        raise InputError("no traces there", where=str(folder), to_do=shape)
    return traces


def hazards(traces: list[Trace]) -> tuple[Callable[[Offer], Interruptions], str]:
    """The law of an offer's spot capacity, and words on it: its zone's or region's where traced,
    scaled by node size; else the prior.
    """
    spells: dict[tuple[str, str, int], tuple[list[Spell], list[Spell]]] = {}
    for trace in traces:  # of one zone there may be several
        if trace.kind[1] and max(trace.available) > 0:
            up, down = spells.setdefault(trace.kind, ([], []))
            more_up, more_down = spells_of(trace.available, trace.gap_s)
            up += more_up
            down += more_down
    known = {kind: fit(*both, HALF_LIFE_S) for kind, both in spells.items()}

    @functools.cache
    def of(gpu: str, n_gpus: int, region: str, zone: str) -> Interruptions:
        sizes = sorted({n for _, kind, n in known if kind == gpu}, key=lambda n: abs(n - n_gpus))
        for n in sizes:
            law = known.get((zone, gpu, n)) or known.get((region, gpu, n))
            if law is None and region and not zone:  # any zone of it will do: the middle one
                alike = [place for place in known if place[1:] == (gpu, n)]
                laws = [known[place] for place in alike if place[0].startswith(region)]
                laws.sort(key=lambda one: one.up.mean_s)
                law = laws[len(laws) // 2] if laws else None
            if law is not None:
                return law if n == n_gpus else law.for_node(n_gpus, n)
        return prior(n_gpus)

    words = f"spot capacity by traces of {plural(len(known), 'zone')}, elsewhere by the prior"
    return lambda o: of(_plain(o.gpu), o.n_gpus, o.region.lower(), o.zone.lower()), words
