"""What each attempt of a run has cost: one line an attempt in `ledger.jsonl`.

    {"attempt": 1, "state": "running", "spans": {...}, ...}                     killed
    {"attempt": 2, "state": "limit", "spans": {...}, "past_usd": 0.31, ...}
    {"attempt": 3, "state": "running", "spans": {...}, "past_usd": 0.52, ...}   running: written
    {"attempt": 3, "state": "running", "spans": {...}, "past_usd": 0.52, ...}   twice, see `Ledger`

    a line is damaged    its twin has the same; else `past_*` of a later line, or the sums in the
                         manifests of checkpoints, know what it held: attempt `LOST` makes it good
    a machine is lost    the newest lines ride on its lease in the store
    two ledgers meet     `merge`: of two accounts of one attempt the longer one stands

Money is counted twice rather than forgotten, and never without a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from farthing.storage.files import Json
from farthing.storage.logs import line_of, read_line

MAX_LINE_BYTES = 1 << 20
N_MARKS, N_SHORT_MARKS, N_NOTICES = 32, 2, 50
NO_LOSS_S, NO_LOSS_USD = 0.01, 1e-6  # rounding
WORK = ("compile", "data_wait", "host_to_device", "compute", "optimizer")
LOST = 0
"""The number of the attempt that stands for all whose lines are lost."""
RUNNING = "running"
"""The state of an attempt that has not said how it ended."""
_KEPT = ("tokens_per_s", "padded_tokens_per_s", "mfu", "takes", "tokens", "padded_tokens", "work")
Amount = Annotated[float, Field(ge=0, lt=1e15)]


class AttemptMark(NamedTuple):
    """Where an attempt stood at some moment: sums from its beginning on."""

    step: int
    tokens: int
    n_saves: int
    busy: Amount
    """Percents of utilisation, one from each of `n_busy` steps."""
    n_busy: int
    spans: dict[str, Amount]


@dataclass
class Account:
    """One attempt: how it stands, what it has cost, and what happened in it."""

    number: Annotated[int, Field(ge=0, alias="attempt")]
    id: str = ""
    """Made up when the attempt begins."""
    line: int = 0
    """How often it was written."""
    state: str = RUNNING
    at: Amount = 0.0
    started_at: Amount = 0.0
    machine: str = ""
    """The rented machine that it runs on."""
    usd_per_hour: Amount = 0.0
    n_gpus: Annotated[int, Field(ge=1)] = 1
    """That share it."""
    first_step: int = 0
    step: int = 0
    began: bool = False
    spans: dict[str, Amount] = field(default_factory=dict)
    past_s: Amount = 0.0
    past_usd: Amount = 0.0
    """What earlier attempts had cost when this one began."""
    n_saves: int = 0
    held_up_s: Amount = 0.0
    """For how long saving has held the loop up; what a thread writes meanwhile does not."""
    committed: int = -1
    """The newest step whose checkpoint is safe."""
    exported: int | None = None
    peak_bytes: int | None = None
    forecast: Json | None = None
    facts: Json = field(default_factory=dict)
    """The newest figures of the loop: tokens_per_s, mfu, takes ..."""
    notices: list[Json] = field(default_factory=list)
    out_of_memory: list[Json] = field(default_factory=list)
    busy: Amount = 0.0
    n_busy: int = 0
    marks: list[AttemptMark] = field(default_factory=list)
    """At most `N_MARKS`, none far from the next in time; the last one is the newest."""
    redone_s: float = 0.0
    """Of its work, see `with_redone`; not on its line."""

    @property
    def wall_s(self) -> float:
        return sum(self.spans.values())

    @property
    def usd(self) -> float:
        return self.wall_s / 3600 * self.usd_per_hour

    @property
    def gpu_s(self) -> float:
        return self.wall_s * self.n_gpus

    @property
    def ended(self) -> str:
        """How it ended; `killed` where its line does not tell."""
        return "killed" if self.state == RUNNING else self.state

    @property
    def stretches(self) -> list[AttemptMark]:
        """What happened between marks, `step` and `tokens` at the end of each; the spans add up to
        those of the attempt.
        """
        found, later = list[AttemptMark](), self._mark()
        for mark in [*reversed(self.marks[:-1]), AttemptMark(0, 0, 0, 0.0, 0, {})]:
            # no more than later: seconds may have been given to another span since
            spans = {name: min(mark.spans.get(name, 0.0), s) for name, s in later.spans.items()}
            between = later._replace(
                n_saves=later.n_saves - mark.n_saves,
                busy=later.busy - mark.busy,
                n_busy=later.n_busy - mark.n_busy,
                spans={name: s - spans[name] for name, s in later.spans.items() if s > spans[name]},
            )
            found.insert(0, between)
            later = mark._replace(spans=spans)
        return found

    def note(self, facts: Mapping[str, Any]) -> None:
        """Take in what the loop, the saver and the watchers say."""
        self.committed = max(self.committed, facts.get("committed", -1))
        self.exported = facts.get("exported", self.exported)
        self.peak_bytes = max(self.peak_bytes or 0, facts.get("peak_bytes") or 0) or None
        self.forecast = self.forecast or facts.get("forecast")
        if notice := facts.get("notice"):
            self.notices = [*self.notices, {"step": self.step, "notice": notice}][-N_NOTICES:]
        if event := facts.get("out_of_memory"):
            self.out_of_memory.append(event)
        if (percent := facts.get("utilisation_percent")) is not None:
            self.busy, self.n_busy = self.busy + percent, self.n_busy + 1
        self.facts |= {name: facts[name] for name in _KEPT if facts.get(name)}

    def mark(self) -> None:
        """Note where the attempt stands."""
        self.marks = [*self.marks, self._mark()]
        self.thin(N_MARKS)

    def thin(self, most: int) -> None:
        """Join the two shortest neighbouring stretches until there are at most so many marks."""
        while len(self.marks) > most:
            ends = [0.0, *(sum(mark.spans.values()) for mark in self.marks)]
            joined_s = [later - before for before, later in zip(ends, ends[2:], strict=False)]
            del self.marks[joined_s.index(min(joined_s))]

    def _mark(self) -> AttemptMark:
        spans = {name: round(s, 3) for name, s in self.spans.items() if s > 0}
        tokens = max(0, int(self.facts.get("tokens", 0)))
        return AttemptMark(max(self.step, 0), tokens, self.n_saves, self.busy, self.n_busy, spans)

    def work_until(self, step: float) -> float:
        """Seconds of work when `step` was done, on the straight line between the nearest marks."""
        marks = [(mark.step, _work_s(mark.spans)) for mark in self.marks]
        points = sorted([(self.first_step, 0.0), *marks])
        before = [point for point in points if point < (step, 0.0)]
        after = points[len(before) :]
        if not (before and after):
            return (before[-1:] or after)[0][1]
        (known, work_s), (later, later_work_s) = before[-1], after[0]
        return work_s + (step - known) / (later - known) * (later_work_s - work_s)

    def as_row(self) -> Json:
        return dict(
            _rows().dump_python(self, by_alias=True, exclude_defaults=True, exclude={"redone_s"})
        )


@cache
def _rows() -> TypeAdapter[Account]:
    return TypeAdapter(Account)


def _work_s(spans: Mapping[str, float]) -> float:
    return sum(spans.get(name, 0.0) for name in WORK)


class Witness(NamedTuple):
    """What something other than the ledger knows to have been spent by all attempts up to one."""

    attempt: int
    step: int
    s: Amount
    usd: Amount
    id: str | None = None
    """Of the attempt, whose number may have changed since, see `merge`."""


@dataclass
class Found:
    """What is in a ledger."""

    accounts: list[Account] = field(default_factory=list)
    """In the order of their numbers."""
    n_broken: int = 0
    """Lines that can't be read or have another checksum."""
    lost_s: float = 0.0
    lost_usd: float = 0.0
    """Known to be spent, and on no line: made good as the attempt `LOST`."""

    @property
    def is_damaged(self) -> bool:
        """Whether something has to be said."""
        return self.n_broken > 0 or self.lost_s > 0 or self.lost_usd > 0


def as_line(account: Account) -> str:
    return line_of(account.as_row(), ensure_ascii=True) + "\n"


def read_ledger(path: Path, witnesses: Iterable[Witness] = ()) -> Found:
    """The accounts in a ledger; empty where there is none."""
    found = Found()
    if path.exists():
        with open(path, "rb") as file:
            lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
            read = [_account_of(read_line(raw)) for raw in lines if raw.strip()]
        found.n_broken = read.count(None)
        found.accounts = merge([], filter(None, read))
    _make_good(found, list(witnesses))
    return found


def accounts_of(rows: Iterable[Json]) -> list[Account]:
    """What rows say together: they may have come from a store."""
    return merge([], filter(None, map(_account_of, rows)))


def _account_of(row: Json | None) -> Account | None:
    """None where it is none."""
    try:
        return _rows().validate_python(row)
    except ValidationError:
        return None


def _make_good(found: Found, witnesses: list[Witness]) -> None:
    """Add what is known to have been spent and is on no line."""
    accounts = found.accounts
    number_of: dict[str | None, int] = {account.id: account.number for account in accounts}
    costs = [(account.number, account.wall_s, account.usd) for account in accounts]
    for witness in [Witness(a.number - 1, -1, a.past_s, a.past_usd) for a in accounts] + witnesses:
        attempt = number_of.get(witness.id, witness.attempt)
        known_s = sum(seconds for number, seconds, _ in costs if number <= attempt)
        known_usd = sum(usd for number, _, usd in costs if number <= attempt)
        found.lost_s = max(found.lost_s, witness.s - known_s)
        found.lost_usd = max(found.lost_usd, witness.usd - known_usd)
    if found.lost_s <= NO_LOSS_S and found.lost_usd <= NO_LOSS_USD:
        found.lost_s = found.lost_usd = 0.0
        return
    known = [account for account in accounts if account.number != LOST]
    earlier = accounts[0] if len(known) < len(accounts) else Account(LOST, state="lost")
    seconds, usd = earlier.wall_s + max(found.lost_s, 0.001), earlier.usd + found.lost_usd
    steps = [witness.step for witness in witnesses]
    made_good = replace(
        earlier,
        line=earlier.line + 1,
        spans={"lost": seconds},
        usd_per_hour=usd / seconds * 3600,
        n_gpus=max((account.n_gpus for account in accounts), default=1),
        committed=max([earlier.committed, *steps]),
        step=max([earlier.step, *steps]),
    )
    found.accounts = [made_good, *known]


def merge(first: Iterable[Account], second: Iterable[Account]) -> list[Account]:
    """All attempts that either knows, in order: none is lost, and none counted twice.

    Two attempts of one number are two where the store was away when the other machine's began:
    those of `second` get new numbers.
    """
    merged = {account.number: replace(account) for account in first}
    by_id = {account.id or account.number: account for account in merged.values()}
    for account in sorted(second, key=lambda each: each.number):
        twin = by_id.get(account.id or account.number, account)
        number = twin.number
        if twin is account and number in merged:
            number = max(merged) + 1
        longer = max(twin, account, key=lambda each: (each.wall_s, each.line))
        committed = max(account.committed, twin.committed)
        merged[number] = replace(longer, number=number, committed=committed)
        by_id[account.id or account.number] = merged[number]
    return [merged[number] for number in sorted(merged)]


def with_redone(accounts: list[Account]) -> list[Account]:
    """The attempts, in order, with the seconds of work that a later one had to redo."""
    found, kept_step = list[Account](), math.inf
    for account in reversed(accounts):
        redone_s = 0.0
        if account.began:
            kept = min(kept_step, account.step)
            redone_s = max(0.0, account.work_until(account.step) - account.work_until(kept))
            kept_step = min(kept_step, account.first_step)
        found.insert(0, replace(account, redone_s=redone_s))
    return found
