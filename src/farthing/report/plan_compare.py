"""Finding the choice that a rank or a name means, and two ways side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farthing.errors import InputError
from farthing.planner.managed import Fee
from farthing.planner.ownership import saving
from farthing.planner.types import HERE
from farthing.prices.gpus import gpu_named
from farthing.report.plan_types import Choice, Refused
from farthing.report.plan_view import Compared, PlanView, plan_view
from farthing.report.plan_words import say_cost, say_saving, say_short
from farthing.units import parse_hours, plural, say_bytes, say_count, say_seconds, say_usd


@dataclass(frozen=True)
class OwnTerms:
    """Hours and a price that the user brings: `2x RTX 4090 at $0.50 for 7h`, `managed: $250`."""

    name: str
    n_gpus: int
    usd_per_gpu_hour: float | None
    hours: float | None
    total_usd: float


Side = Choice | Fee | OwnTerms
Say = Callable[[float], str]


def find_in_study(study: Any, text: str) -> Choice:
    return find_plan(plan_view(study), text)


def find_plan(view: PlanView, text: str) -> Choice:
    """The choice that a rank or a name means: `3`, `H100`, `2x RTX 4090 spot`, `verda/A100-80GB`,
    `own`: the first that answers to it. Raises `InputError`, with the reason where all that answer
    were rejected.
    """
    wanted = text.strip()
    if rank := re.fullmatch(r"#?(\d+)", wanted):
        if 1 <= int(rank[1]) <= len(view.plans):
            return view.plans[int(rank[1]) - 1]
        to_do = f"give a rank from 1 to {len(view.plans)}"
        raise InputError(f"there is no plan {int(rank[1])}", where="plan", to_do=to_do)
    ways: list[Choice | Refused] = [*view.plans, *view.rejected]
    found = next((one for one in ways if _answers(one, wanted)), None)
    if isinstance(found, Choice):
        return found
    what = f"no plan is called `{wanted}`"
    to_do = 'give a rank, or a name such as "H100", "2x RTX 4090 spot" or "RunPod/L40S"'
    if found is not None:
        what, to_do = f"`{wanted}` was rejected: {found.reason}", found.change
    raise InputError(what, where="plan", to_do=to_do)


def find_side(view: PlanView, text: str) -> Side:
    """A choice, a service (`Together`; its machines are `Together/H100`), or the user's terms."""
    hourly = re.fullmatch(
        r"(?:(\d+)\s*x\s*)?(.+?)\s+at\s+\$?(\d*\.?\d+)(?:\s*/\s*h)?\s+for\s+(\d*\.?\d+\s*\w+)", text
    )
    if hourly is not None:
        try:
            hours = parse_hours(hourly[4])
        except ValueError as error:
            raise InputError(str(error), where="--compare", to_do="e.g. 10h") from None
        n, usd = int(hourly[1] or 1), float(hourly[3])
        return OwnTerms(f"{n}x {hourly[2]}", n, usd, hours, n * usd * hours)
    if fee := re.fullmatch(r"(.+?)\s*:\s*\$(\d*\.?\d+)", text):
        return OwnTerms(fee[1], 1, None, None, float(fee[2]))
    for one in view.managed:
        if _key(text).startswith(_key(one.provider)) and _key(text) in _key(one.name):
            return one
    return find_plan(view, text)


def _answers(row: Choice | Refused, text: str) -> bool:
    provider, _, machine = text.lower().rpartition("/")
    asked = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.*?)\s*(on[- ]demand|spot)?", machine.strip())
    if asked is None or _key(provider) not in _key(row.provider):
        return False
    count, name, kind = asked.groups()
    if (kind and kind.replace(" ", "-") != row.kind) or (count and int(count) != row.n_gpus):
        return False
    if name in ("own", "here", HERE):
        return name in (row.kind, row.provider)
    named = gpu_named(name)
    if named is not None and _key(named.name) == _key(name):  # an L4 is no L40S
        return named.name == row.gpu
    if not name or _key(name) == _key(row.provider) or _key(row.gpu).startswith(_key(name)):
        return True
    return named is not None and named.name == row.gpu


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _say_hours(hours: float) -> str:
    return say_seconds(hours * 3600)


_FIGURES: dict[str, tuple[str, Callable[[Choice], float], Say]] = {
    "usd_per_hour": ("an hour", lambda row: row.usd_per_hour or 0.0, say_usd),
    "tokens_per_s": ("tokens/s", lambda row: row.step.tokens_per_s, say_count),
    "step_s": ("a step", lambda row: row.step.seconds, say_short),
    "memory_bytes": ("memory", lambda row: row.memory.needed_bytes, say_bytes),
    "capacity_bytes": ("of", lambda row: row.memory.capacity_bytes, say_bytes),
}
_WORDS: dict[str, Callable[[Choice], str]] = {
    "dollar range": lambda row: f"{say_cost(row.usd_range.low)} to {say_cost(row.usd_range.high)}",
    "time range": lambda row: " to ".join(map(_say_hours, row.hours_range[::2])),
    "at a time": lambda row: f"{row.recipe.micro_batch_tokens:,} tokens",
    "checkpointing": lambda row: row.recipe.checkpointing,
    "precision": lambda row: row.recipe.precision,
    "sharding": lambda row: row.recipe.sharding,
    "interruptions": lambda row: "none" if row.spot is None else f"{row.spot.n_interruptions:.2g}",
    "price of": lambda row: row.price_date,
    "you get": lambda row: "the weights",
}


def compare(
    a: Side, b: Side, n_runs: int | None = None, per_month: float | None = None
) -> Compared:
    """Two ways side by side, and what so many runs, or a year of them, come to."""
    usd, sides = (a.total_usd, b.total_usd), (a, b)
    choices = [one if isinstance(one, Choice) else None for one in sides]
    rows = {"total_usd": _row(*usd), "hours": _row(a.hours, b.hours)}
    table = [
        _line("dollars", rows["total_usd"], say_cost),
        _line("time", rows["hours"], _say_hours),
    ]
    for name, (words, figure, say) in _FIGURES.items():
        rows[name] = _row(*(None if one is None else figure(one) for one in choices))
        table.append(_line(words, rows[name], say))
    if any(choices):
        for words, tell in _WORDS.items():
            cells = [tell(x) if isinstance(x, Choice) else _of_service(x, words) for x in sides]
            table.append((words, *cells, ""))
        run = [one.seconds if one else {} for one in choices]
        step = [one.step.parts if one else {} for one in choices]
        for title, parts, say in (("whole run", run, say_seconds), ("one step", step, say_short)):
            table.append((title, "", "", ""))
            for name in dict.fromkeys([*parts[0], *parts[1]]):
                table.append(_line(f"  {name}", _row(*(one.get(name) for one in parts)), say))
    saved, dear, cheap = saving(usd[1], usd[0]), max(usd), min(usd)
    words = f"{_sum_of(a)}; {_sum_of(b)}: {say_saving(saved)}"
    for n, what in ((n_runs, ""), (12 * per_month if per_month else None, " in a year")):
        if n:
            of_runs = plural(int(n), "run") if n == int(n) else f"{n:g} runs"
            words += f"; {of_runs}{what}: {say_cost(n * dear)} against {say_cost(n * cheap)}, "
            words += f"{say_cost(n * (dear - cheap))} saved"
    left, right = (f"{x.rank}: {x.name}" if isinstance(x, Choice) else x.name for x in sides)
    return Compared(left, right, rows, tuple(table), saved.usd, saved.share, words)


def _of_service(one: Fee | OwnTerms, words: str) -> str:
    if isinstance(one, OwnTerms):
        return "-"
    usd = f"{say_cost(one.usd)} to {say_cost(one.usd_high)}"
    known = {"dollar range": usd, "price of": one.price_date, "you get": one.you_get or "the model"}
    return known.get(words, "-")


def _row(a: float | None, b: float | None) -> dict[str, float | None]:
    return {"a": a, "b": b, "ratio": b / a if a and b is not None else None}


def _line(words: str, row: dict[str, float | None], say: Say) -> tuple[str, ...]:
    texts = ["-" if x is None else say(x) for x in (row["a"], row["b"])]
    return words, *texts, f"{row['ratio']:.2f}" if row["ratio"] else ""


def _sum_of(one: Side) -> str:
    """`2x RTX 4090 at $0.50 each for 7 h = $7.00`."""
    name, total = one.name, say_cost(one.total_usd)
    if isinstance(one, Choice):
        name = f"{one.n_gpus}x {one.gpu}" + (" spot" if one.kind == "spot" else "")
    if isinstance(one, Fee) or one.usd_per_gpu_hour is None or one.hours is None:
        return f"{name} = {total}"
    each = " each" if one.n_gpus > 1 else ""
    return f"{name} at {say_usd(one.usd_per_gpu_hour)}{each} for {_say_hours(one.hours)} = {total}"
