"""What stands beside a plan: services, own machines, years and runs, savings, serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from farthing.planner import serving
from farthing.planner.managed import Fee
from farthing.planner.ownership import (
    Owned,
    Saving,
    Way,
    break_even_months,
    run_on_own,
    saving,
    yearly_usd,
)
from farthing.planner.types import HERE, OWN
from farthing.prices.offers import HOURS_PER_MONTH
from farthing.report.plan_types import RENTED, Choice, machine_name, view_of
from farthing.report.plan_words import say_cost, say_saving
from farthing.report.words import lines, say
from farthing.units import say_seconds

if TYPE_CHECKING:
    from farthing.planner.inputs import Study

PAID = "what you paid"
_AT = {OWN: " of your own", HERE: f" of {HERE}"}


# ---- services ----


def fees(managed: Sequence[Fee]) -> dict[str, float]:
    """Dollars at services that take the model: of a price file, and the cheapest known one."""
    taking = [one for one in managed if one.takes_the_model]
    known = sorted((one for one in taking if one.is_known), key=lambda one: one.usd)[:1]
    return {one.name: one.usd for one in [*(o for o in taking if not o.is_known), *known]}


def elsewhere(managed: Sequence[Fee], paid_usd: float | None) -> dict[str, float]:
    """Dollars of a run that others train: at services, and as somebody paid."""
    return fees(managed) | ({} if paid_usd is None else {PAID: paid_usd})


@dataclass(frozen=True)
class Paid:
    usd: float
    here_usd: float | None
    saved_usd: float | None
    ratio: float | None
    words: str


def paid_of(usd: float, best: Choice | None) -> Paid:
    here = best.total_usd if best else None
    saved, ratio = (usd - here, usd / here) if here else (None, None)
    return Paid(usd, here, saved, ratio, say("plan.txt", "paid", usd, here))


# ---- machines of one's own ----


@dataclass(frozen=True)
class PaysBack:
    """When an owned machine pays back against another way."""

    name: str
    rank: int | None
    is_equal: bool
    usd_per_own_hour: float  # what an hour of the machine's work costs elsewhere
    break_even_hours: float | None
    break_even_months: float | None
    hours_per_month: float
    words: str = ""


@dataclass(frozen=True)
class OwnMachine:
    """A machine of one's own: what this run costs on it, and when buying it pays back."""

    name: str
    price_usd: float
    power_kw: float
    usd_per_kwh: float
    running_usd_per_h: float
    wear_usd_per_h: float
    hours_per_month: float
    rank: int | None = None
    hours: float | None = None
    usd: Mapping[str, float] = field(default_factory=dict)
    total_usd: float | None = None
    against: tuple[PaysBack, ...] = ()
    words: str = ""


def own_machine(
    owned: Owned, rows: Sequence[Choice], study: Study, runs_per_month: float | None
) -> OwnMachine:
    alike = [row for row in rows if (row.gpu, row.n_gpus) == (owned.gpu, owned.n_gpus)]
    row = next((row for row in alike if row.kind == "own"), None)
    name = f"{owned.n_gpus}x {owned.gpu}"
    if row is None:
        offered = ((one, one.offer) for one in study.answer.rejected)
        refused = {(o.provider, o.gpu, o.n_gpus): one for one, o in offered}
        why = refused.get((OWN, owned.gpu, owned.n_gpus))
        words = f"{why.reason}; {why.change}" if why else "not among the offers"
        return view_of(OwnMachine, owned, name=name, words=words)
    usd = {name: value for name, value in run_on_own(owned, row.hours).items() if value}
    hours = runs_per_month * row.hours if runs_per_month else owned.hours_per_month
    at = min(hours, HOURS_PER_MONTH)
    on_demand = (one for one in alike if one.kind == "on-demand")
    equal = min(on_demand, key=lambda one: (one.usd_per_hour or 0, one.provider), default=None)
    rented = next((one for one in rows if one.is_rented), None)
    against: list[PaysBack] = []
    if equal is not None:
        usd_per_h = equal.usd_per_hour or 0.0
        against.append(_pays_back(owned, equal.name, usd_per_h, at, equal.rank, True))
    if rented is not None and rented is not equal:
        usd_per_h = rented.total_usd / row.hours  # for what the machine does in an hour
        against.append(_pays_back(owned, rented.name, usd_per_h, at, rented.rank))
    for service, fee in fees(study.managed).items() if runs_per_month else ():
        against.append(_pays_back(owned, service, fee / row.hours, hours))
    total, found = sum(usd.values()), {"name": name, "usd": usd, "against": tuple(against)}
    words = f"{say_cost(total)} and {say_seconds(row.wall_s)} for this run"
    return view_of(OwnMachine, owned, row, total_usd=total, words=words, **found)


def _pays_back(
    owned: Owned, name: str, usd: float, hours: float, rank: int | None = None, equal: bool = False
) -> PaysBack:
    months = break_even_months(owned, usd * hours, hours)
    found = PaysBack(name, rank, equal, usd, months and months * hours, months, hours)
    return replace(found, words=say("plan.txt", "pays_back", found, owned.price_usd))


# ---- years and runs ----


@dataclass(frozen=True)
class Years:
    runs_per_month: float
    one_year_usd: dict[str, float]
    three_years_usd: dict[str, float]
    saved_in_a_year: dict[str, Saving]  # against the dearest way
    notes: tuple[str, ...]


def years_of(
    rows: Sequence[Choice],
    own: Sequence[OwnMachine],
    owned: Sequence[Owned],
    runs_per_month: float,
    others: dict[str, float],
) -> Years:
    """`own`: what a run comes to on the machines `owned`; `others`: where others train it."""
    ways: dict[str, Way] = {}
    notes: list[str] = []
    for kind in RENTED:
        if row := next((row for row in rows if row.kind == kind), None):
            ways[f"rent {row.name}"] = Way(row.total_usd)
    for one, found in zip(owned, own, strict=True):
        if found.hours is None:
            continue
        name = f"{'buy' if one.price_usd else 'own'} {found.name}"
        ways[name] = Way(found.hours * one.running_usd_per_h, one.lost_usd)
        busy, rent = found.hours * runs_per_month, others.get(PAID, 0.0) * runs_per_month
        months = break_even_months(one, rent, busy)
        is_full, is_bought = busy > HOURS_PER_MONTH, bool(rent and one.price_usd)
        notes += lines("plan.txt", "years_notes", name, busy, is_full, rent, is_bought, months)
    ways |= {name: Way(usd) for name, usd in others.items()}
    yearly = yearly_usd(ways, runs_per_month)
    dearest = max(yearly.values(), default=0.0)
    saved = {name: saving(usd, dearest) for name, usd in yearly.items()}
    return Years(runs_per_month, yearly, yearly_usd(ways, runs_per_month, 3), saved, tuple(notes))


@dataclass(frozen=True)
class Runs:
    n_runs: int
    usd: dict[str, float]
    words: tuple[str, ...]


def runs_of(n: int, best: Choice | None, savings: Savings | None, others: dict[str, float]) -> Runs:
    each = {best.name: best.total_usd} if best else {}
    if savings is not None:
        each["the plain way"] = savings.plain_usd
    ways = {name: n * usd for name, usd in (each | others).items()}
    mine, dearest = ways[best.name] if best else 0.0, max(ways.values(), default=0.0)
    less = say_saving(saving(mine, dearest)) if best and len(ways) > 1 else ""
    return Runs(n, ways, tuple(lines("plan.txt", "runs", ways, dearest - mine, less)))


# ---- what choices save ----


@dataclass(frozen=True)
class SavingsRow:
    choice: str
    what: str
    usd: float | None
    hours: float | None
    saved_share: float | None
    words: str


@dataclass(frozen=True)
class Savings:
    rungs: tuple[SavingsRow, ...]
    plain_usd: float
    usd: float
    saved_usd: float
    saved_share: float | None
    words: str


def savings_of(study: Study) -> Savings | None:
    steps: list[SavingsRow] = []
    known: list[float] = []
    for choice, what, plan in study.savings:
        usd = hours = share = None
        words = "no machine with A100s holds it"
        if plan is not None:
            usd, hours = plan.total_usd, plan.wall_s / 3600
            words = f"{say_cost(usd)} in {say_seconds(plan.wall_s)}"
            if known:
                saved = saving(usd, known[-1])
                share, words = saved.share, f"{words}, {say_saving(saved)}"
            known.append(usd)
        steps.append(SavingsRow(choice, what, usd, hours, share, f"{choice}: {what}: {words}"))
    if not known:
        return None
    plain, last = known[0], known[-1]
    whole = saving(last, plain)
    words = f"{say_cost(last)} instead of {say_cost(plain)}: {say_saving(whole)}"
    return Savings(tuple(steps), plain, last, whole.usd, whole.share, words)


# ---- serving ----


@dataclass(frozen=True)
class ServingRow:
    """A machine in a precision that answers the traffic."""

    machine: str
    gpu: str
    n_gpus: int
    precision: str
    provider: str
    usd_per_hour: float
    price_date: str
    weights_bytes: float
    cache_bytes_per_token: float
    room_bytes: float
    most_tokens: float
    n_streams: int
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    one_stream_tokens_per_s: float
    first_token_s: float
    answer_s: float
    load: float
    n_machines: int
    always_on_usd_per_month: float
    to_zero_usd_per_month: float
    to_zero_first_token_s: float
    break_even_requests_per_hour: float
    usd_per_million: Mapping[str, float]


@dataclass(frozen=True)
class ServingView:
    """The traffic on every kind of machine that was asked for."""

    traffic: serving.Traffic
    answer: str
    rows: tuple[ServingRow, ...]
    refused: tuple[serving.NotServed, ...]
    assumptions: tuple[str, ...]

    @property
    def shown(self) -> list[ServingRow]:
        """The cheapest machine in each of its precisions, then the others in their cheapest."""
        of_best = [row for row in self.rows if row.machine == self.rows[0].machine]
        others = {row.machine: row for row in reversed(self.rows) if row not in of_best}
        return [*of_best, *sorted(others.values(), key=self.rows.index)][:8]


def serving_of(study: Study, traffic: serving.Traffic) -> ServingView:
    """Raises `InputError` where serving is not known."""
    offers = [p.offer for p in study.answer.plans] + [r.offer for r in study.answer.rejected]
    found, refused = serving.serve(study.wanted.shape, traffic, offers)
    rows = tuple(_serving_row(one) for one in found)
    best = rows[0] if rows else None
    at = "" if best is None else _AT.get(best.provider, f" at {best.provider}")
    answer = say("plan.txt", "serving", best, traffic, at)
    known = serving.ERROR, serving.ERROR_UNSEEN, serving.SERVERLESS_TIMES, serving.WARM_S
    assumed = tuple(lines("plan.txt", "serving_assumed", *known))
    return ServingView(traffic, answer, rows, tuple(refused), assumed)


def _serving_row(one: serving.Served) -> ServingRow:
    server, traffic = one.server, one.traffic
    error = serving.ERROR if server.gpu.name in serving.SEEN else serving.ERROR_UNSEEN
    speed, first_token_s = one.capacity_tokens_per_s, server.prefill_s(traffic)
    usd = one.usd_per_million(min(1.0, one.load / one.n_machines))
    return view_of(
        ServingRow,
        *(one, server, one.offer),
        machine=machine_name(server.n_gpus, server.gpu.name),
        gpu=server.gpu.name,
        price_date=one.offer.date.isoformat(),
        most_tokens=server.room_bytes / server.cache_bytes_per_token,
        tokens_per_s=speed,
        tokens_per_s_range=(speed * (1 - error), speed * (1 + error)),
        one_stream_tokens_per_s=1 / server.decode_s(traffic, 1),
        first_token_s=first_token_s,
        answer_s=one.alone_s,
        always_on_usd_per_month=one.always_on_usd,
        to_zero_usd_per_month=one.to_zero_usd(),
        to_zero_first_token_s=one.cold_start_s + first_token_s,
        usd_per_million=dict(zip(("input", "output"), usd, strict=True)),
    )
