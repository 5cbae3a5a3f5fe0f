"""A run over its paid time: what each stretch of it was spent on, and what happened when.

Attempts are laid end to end; the unpaid pauses between them are left out.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from farthing.run.accounts import Account

T = TypeVar("T")
N_COLUMNS, N_EVENTS = 96, 120
REST = "everything else"
OF_SPAN = {
    "start_up": ("start-up", "start-up"),
    "tokenize": ("start-up", "tokenizing"),
    "load_model": ("start-up", "start-up"),
    "restore": ("start-up", "start-up"),
    "reference": ("reference pass", "reference"),
    "probe": ("start-up", "start-up"),
    "compile": ("start-up", "training"),
    "data_wait": ("waiting for data", "training"),
    "host_to_device": ("copies", "training"),
    "compute": ("forward and backward", "training"),
    "optimizer": ("optimizer", "training"),
    "ranks": ("other ranks", "training"),
    "evaluation": ("evaluation", "evaluation"),
    "checkpoint": ("checkpoints", "checkpoints"),
    "export": ("checkpoints", "export"),
    "idle": (REST, "training"),
    "lost": (REST, ""),
}
"""Of each span: the group that a page tells apart, and the part of an estimate."""
_BEFORE_STEPS = ("start_up", "tokenize", "load_model", "restore", "probe")
_OTHER = (REST, "")  # a span of another version of farthing


def group_of(span: str) -> str:
    return OF_SPAN.get(span, _OTHER)[0]


@dataclass(frozen=True)
class Column:
    begin_s: float
    end_s: float
    step: int  # at its end
    tokens: int  # useful ones of the whole run, at its end
    usd: float
    seconds: dict[str, float]  # by the groups of `OF_SPAN`


@dataclass(frozen=True)
class Mark:
    at_s: float
    kind: str  # checkpoint, evaluation, interruption or out of memory
    step: int


@dataclass(frozen=True)
class Timeline:
    columns: list[Column]
    marks: list[Mark]


def grouped(spans: Mapping[str, float]) -> dict[str, float]:
    """Seconds by the groups of `OF_SPAN`, those that took any."""
    return _summed((group_of(span), seconds) for span, seconds in spans.items() if seconds > 0)


def foretold(spans: Mapping[str, float]) -> dict[str, float]:
    """Seconds by the parts of an estimate that foretell them."""
    return _summed((OF_SPAN.get(span, _OTHER)[1], seconds) for span, seconds in spans.items())


def _summed(found: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, value in found:
        sums[name] = sums.get(name, 0.0) + value
    return sums


def timeline_of(accounts: Sequence[Account], evaluated: Iterable[int]) -> Timeline:
    """The timeline of a run's attempts, which was evaluated after these steps."""
    columns, marks, begin_s, tokens = list[Column](), list[Mark](), 0.0, 0
    steps_at: list[tuple[int, float]] = []
    began = False
    for account in accounts:
        if account.began:
            if began:
                marks.append(Mark(begin_s, "interruption", account.first_step))
            began = True
            steps_at = [point for point in steps_at if point[0] <= account.first_step]
        began_s = sum(s for span, s in account.spans.items() if span in _BEFORE_STEPS)
        steps_at.append((account.first_step, begin_s + began_s))
        for stretch in account.stretches:
            seconds, step = grouped(stretch.spans), stretch.step
            end_s, tokens = begin_s + sum(seconds.values()), max(tokens, stretch.tokens)
            usd = sum(seconds.values()) / 3600 * account.usd_per_hour
            columns.append(Column(begin_s, end_s, step, tokens, usd, seconds))
            steps_at.append((step, end_s))
            if stretch.n_saves > 0:
                marks.append(Mark(end_s, "checkpoint", step))
            begin_s = end_s
        steps = [event["step"] for event in account.out_of_memory if "step" in event]
        marks += [Mark(_when(steps_at, step), "out of memory", step) for step in steps]
    marks += [
        Mark(_when(steps_at, step), "evaluation", step)
        for step in evenly(list(evaluated), N_EVENTS)
    ]
    kept: list[Mark] = []
    for kind in sorted({mark.kind for mark in marks}):
        kept += evenly([mark for mark in marks if mark.kind == kind], N_EVENTS)
    return Timeline(_thinned(columns), sorted(kept, key=lambda mark: mark.at_s))


def _when(steps_at: list[tuple[int, float]], step: int) -> float:
    """When a step was done, on the straight line between the nearest moments that are known."""
    earlier = [point for point in steps_at if point[0] <= step]
    later = [point for point in steps_at if point[0] >= step]
    before = max(earlier, default=(0, 0.0), key=lambda point: point[1])
    after = min(later, default=before, key=lambda point: point[1])
    share = (step - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
    return before[1] + share * (after[1] - before[1])


def evenly(items: Sequence[T], most: int) -> list[T]:
    """All, or so many of them evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _thinned(columns: list[Column]) -> list[Column]:
    """At most `N_COLUMNS`: those that end in the same part of the time are joined."""
    end_s = columns[-1].end_s if columns else 0.0

    def part(column: Column) -> int:
        return math.ceil(column.end_s / end_s * N_COLUMNS) if end_s else 0

    return [functools.reduce(_joined, each) for _, each in itertools.groupby(columns, part)]


def _joined(one: Column, other: Column) -> Column:
    seconds = _summed([*one.seconds.items(), *other.seconds.items()])
    tokens, usd = max(one.tokens, other.tokens), one.usd + other.usd
    return Column(one.begin_s, other.end_s, other.step, tokens, usd, seconds)
