"""What each attempt of a run has cost, as lines of `ledger.jsonl`: written with checksums, read
with suspicion.

A line is the whole account of one attempt so far: its last state, its seconds by span, and what
earlier attempts had cost in sum when it began. Earlier farthings appended a line a second instead;
those are read as they are. A line whose checksum is wrong is not believed, and what it held is made
good from what later lines and checkpoints know of the sum: money is counted twice rather than
forgotten, and never without a warning. Refuses to keep more in memory than a line an attempt.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from farthing.run.stretches import Stretch, note, thinned
from farthing.run.stretches import read as read_stretches
from farthing.storage.files import DamagedFileError, Json, read_manifest
from farthing.storage.logs import line_of, read_line

MAX_LINE_BYTES = 1 << 20
N_MARKS, N_SAVED, N_NOTICES = 64, 16, 50
NO_LOSS_S, NO_LOSS_USD = 0.01, 1e-6  # rounding
WORK = ("compile", "data_wait", "host_to_device", "compute", "optimizer")
LOST = 0
"""The number of the attempt that stands for all whose lines are lost."""
_OPEN_STATES = ("starting", "started", "running")
_DETAIL = ("began", "marks", "saved", "utilisation", "stretches", "notices", "out_of_memory")
_KEPT = ("tokens_per_s", "padded_tokens_per_s", "mfu", "takes", "tokens", "padded_tokens", "work")


@dataclass
class Account:
    """One attempt: how it stands, what it has cost, and what happened in it."""

    number: int
    id: str = ""
    """Made up when the attempt begins; empty in ledgers of earlier farthings."""
    line: int = 0
    """How often it was written."""
    state: str = "starting"
    at: float = 0.0
    started_at: float = 0.0
    usd_per_hour: float = 0.0
    first_step: int = 0
    step: int = 0
    began: bool = False
    spans: dict[str, float] = field(default_factory=dict)
    past_s: float = 0.0
    past_usd: float = 0.0
    """What earlier attempts had cost when this one began."""
    n_saves: int = 0
    held_up_s: float = 0.0
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
    marks: list[list[float]] = field(default_factory=list)
    """[step, seconds of work when it was done], thinned."""
    saved: list[list[float]] = field(default_factory=list)
    """The same for the newest steps that were saved, exactly."""
    utilisation: list[list[float]] = field(default_factory=list)
    """[last step, mean percent, lines] of stretches."""
    stretches: list[Stretch] = field(default_factory=list)
    """Where its seconds went over time, see `stretches.py`."""
    redone_s: float = 0.0
    """Of its work, see `with_redone`."""

    @property
    def wall_s(self) -> float:
        """Seconds of this attempt."""
        return sum(self.spans.values())

    @property
    def usd(self) -> float:
        """Dollars of this attempt."""
        return self.wall_s / 3600 * self.usd_per_hour

    @property
    def ended(self) -> str:
        """How it ended; `killed` where it has not said so."""
        return "killed" if self.state in _OPEN_STATES else self.state

    def note(self, facts: Mapping[str, Any]) -> None:
        """Take in what a line says beside seconds and state."""
        if isinstance(facts.get("committed"), int):
            self.committed = max(self.committed, facts["committed"])
        if isinstance(facts.get("exported"), int):
            self.exported = facts["exported"]
        if isinstance(facts.get("peak_bytes"), int | float):
            self.peak_bytes = max(self.peak_bytes or 0, facts["peak_bytes"]) or None
        if isinstance(facts.get("forecast"), dict):
            self.forecast = self.forecast or facts["forecast"]
        if isinstance(facts.get("notice"), dict):
            self.notices = [*self.notices, {"step": self.step, "notice": facts["notice"]}][
                -N_NOTICES:
            ]
        if isinstance(facts.get("out_of_memory"), dict):
            self.out_of_memory.append(facts["out_of_memory"])
        if isinstance(facts.get("utilisation_percent"), int | float):
            self.utilisation.append([self.step, facts["utilisation_percent"], 1])
            self.utilisation = thinned(self.utilisation, 2 * N_MARKS, _mean)
        self.facts |= {name: facts[name] for name in _KEPT if facts.get(name)}

    def mark(self) -> None:
        """Note how much work it took to come to the step where the attempt is; the first word on a
        step counts.
        """
        if not self.marks or self.marks[-1][0] < self.step:
            self.marks.append([self.step, round(self.work_s, 4)])
            if len(self.marks) > N_MARKS:
                self.marks = [*self.marks[:-16:2], *self.marks[-16:]]

    def note_time(self) -> None:
        """Note where the seconds since the last line went."""
        tokens = self.facts.get("tokens", 0)
        self.stretches = note(self.stretches, self.step, tokens, self.n_saves, self.spans)

    def mark_save(self) -> None:
        """Note the same of a step that is saved: an attempt that goes on from there redoes what
        came after.
        """
        self.saved = [*self.saved, [self.step, round(self.work_s, 4)]][-N_SAVED:]

    def shorten(self) -> None:
        """Leave out detail that hardly anybody will ask for: of an attempt long past."""
        self.marks, self.saved, self.stretches = (
            self.marks[-2:],
            self.saved[-4:],
            thinned(self.stretches, 2),
        )
        self.utilisation = thinned(self.utilisation, 4, _mean)

    @property
    def work_s(self) -> float:
        """Seconds of training, without start, saves and evaluations."""
        return sum(self.spans.get(name, 0.0) for name in WORK)

    def as_row(self) -> Json:
        """The account as a line has it."""
        row: Json = {
            "attempt": self.number,
            **{
                name: getattr(self, name)
                for name in ("id", "line", "state", "usd_per_hour", "first_step", "step")
            },
            "at": round(self.at, 3),
            "spans": {name: round(seconds, 4) for name, seconds in self.spans.items()},
            "past": {"s": self.past_s, "usd": self.past_usd},
            "saves": {"n": self.n_saves, "held_up_s": round(self.held_up_s, 5)},
            "account": {
                "started_at": round(self.started_at, 3),
                **{name: getattr(self, name) for name in _DETAIL},
            },
            **self.facts,
        }
        if self.committed >= 0:
            row["committed"] = self.committed
        once = {"exported": self.exported, "peak_bytes": self.peak_bytes, "forecast": self.forecast}
        return row | {name: value for name, value in once.items() if value is not None}


class Witness(NamedTuple):
    """What something other than the ledger knows to have been spent by all attempts up to one."""

    attempt: int
    step: int
    s: float | None
    usd: float | None


@dataclass
class Found:
    """What is in a ledger."""

    accounts: dict[int, Account] = field(default_factory=dict)
    n_broken: int = 0
    """Lines that can't be read or have another checksum, other than one that a kill has torn."""
    lost_s: float = 0.0
    lost_usd: float = 0.0
    """What is known to have been spent, and is on no line: made good as an attempt with the number
    `LOST`.
    """

    @property
    def is_damaged(self) -> bool:
        """Whether something has to be said."""
        return self.n_broken > 0 or self.lost_s > NO_LOSS_S or self.lost_usd > NO_LOSS_USD

    @property
    def ordered(self) -> list[Account]:
        """By number."""
        return [self.accounts[number] for number in sorted(self.accounts)]


def as_line(account: Account) -> str:
    """A line of the ledger, without its end, with the checksum of what stands before."""
    return line_of(account.as_row(), "crc", ensure_ascii=True)


def as_lines(accounts: Iterable[Account]) -> str:
    """A ledger that nobody is writing to."""
    return "".join(as_line(account) + "\n" for account in accounts)


def row_of(line: bytes) -> Json | None:
    """The row of a line; None where it is broken."""
    row, is_summed = read_line(line.strip(), "crc")
    return row if row is not None and (is_summed or "line" not in row) else None


def read_ledger(path: Path, witnesses: Iterable[Witness] = ()) -> Found:
    """The accounts in a ledger, one line in memory at a time; empty where there is none."""
    found, is_whole = Found(), True
    last: deque[tuple[bytes, bool]] = deque(maxlen=2)
    if path.exists():
        with open(path, "rb") as file:
            while raw := file.readline(MAX_LINE_BYTES):
                if raw.strip():
                    row = row_of(raw)
                    is_whole = row is not None and take_in(found.accounts, row)
                    found.n_broken += not is_whole
                    last.append((raw, is_whole))
    found.n_broken -= _is_torn(list(last))
    _make_good(found, list(witnesses))
    return found


def _is_torn(last: list[tuple[bytes, bool]]) -> bool:
    """Whether one of the last two lines (each with whether it is whole) is one that a kill has
    torn: the very last, without its end, or one of the two places that a running attempt is written
    to in turn, while the other is whole."""
    if last and not last[-1][1] and not last[-1][0].endswith(b"\n"):
        return True
    if len(last) < 2 or last[0][1] == last[1][1]:
        return False
    whole = last[0][0] if last[0][1] else last[1][0]
    return whole.endswith(b" \n") and len(last[0][0]) == len(last[1][0])


def take_in(accounts: dict[int, Account], row: Json) -> bool:
    """Add what a line says to the accounts, unless something newer is known. False: it is the
    account of no attempt.
    """
    if not _is_whole(row):
        return False
    number = int(row["attempt"])
    known = accounts.get(number)
    if isinstance(row.get("account"), dict):
        new = _account_of(row)
        if known is None or known.id != new.id or new.line >= known.line:
            accounts[number] = new
        return True
    if known is None:
        known = accounts[number] = Account(
            number, started_at=row["at"] - sum(row["spans"].values())
        )
    _set_last(known, row)
    known.began |= row["state"] == "started"
    known.note(row)
    known.mark()
    return True


def accounts_of(rows: Iterable[Json]) -> dict[int, Account]:
    """What rows say together."""
    accounts: dict[int, Account] = {}
    for row in rows:
        take_in(accounts, row)
    return accounts


def _account_of(row: Json) -> Account:
    account, more = Account(int(row["attempt"])), row["account"]
    _set_last(account, row)
    account.id, account.line = (
        str(row.get("id", "")),
        int(row["line"]) if isinstance(row.get("line"), int) else 0,
    )
    past = row.get("past")
    if isinstance(past, dict) and _are_amounts([past.get("s"), past.get("usd")]):
        account.past_s, account.past_usd = float(past["s"]), float(past["usd"])
    if _are_amounts([more.get("started_at")]):
        account.started_at = more["started_at"]
    account.began = more.get("began") is True
    account.note(
        {name: value for name, value in row.items() if name not in ("notice", "out_of_memory")}
    )
    account.notices = [
        each
        for each in _dicts(more.get("notices"))
        if isinstance(each.get("notice"), dict) and "step" in each
    ]
    account.out_of_memory = _dicts(more.get("out_of_memory"))
    account.stretches = read_stretches(more.get("stretches"))
    for name, n in (("marks", 2), ("saved", 2), ("utilisation", 3)):
        setattr(account, name, [list(each) for each in _points(more.get(name), n)])
    return account


def _set_last(account: Account, row: Json) -> None:
    account.state, account.at, account.usd_per_hour = row["state"], row["at"], row["usd_per_hour"]
    account.first_step, account.step, account.spans = (
        int(row["first_step"]),
        int(row["step"]),
        dict(row["spans"]),
    )
    saves = row.get("saves")
    if isinstance(saves, dict) and _are_amounts([saves.get("n"), saves.get("held_up_s")]):
        account.n_saves, account.held_up_s = int(saves["n"]), saves["held_up_s"]


def _is_whole(row: Json) -> bool:
    """Whether a row is the account of an attempt: it may have come from a store."""
    spans, number = row.get("spans"), row.get("attempt")
    return (
        isinstance(spans, dict)
        and isinstance(row.get("state"), str)
        and isinstance(number, int)
        and number >= 0
        and _are_amounts(
            [
                *(row.get(name) for name in ("at", "usd_per_hour", "first_step", "step")),
                *spans.values(),
            ]
        )
    )


def _are_amounts(values: Iterable[Any]) -> bool:
    """Whether all are numbers that can be added up: finite, and not below zero."""
    return all(isinstance(value, int | float) and 0 <= value < 1e15 for value in values)


def _dicts(values: Any) -> list[Json]:
    return (
        [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
    )


def _points(values: Any, n: int) -> Iterator[list[float]]:
    for value in values if isinstance(values, list) else ():
        if isinstance(value, list) and len(value) == n and _are_amounts(value):
            yield value


def _mean(one: list[float], other: list[float]) -> list[float]:
    """Two neighbours of `utilisation` as one."""
    n = one[2] + other[2]
    return [other[0], round((one[1] * one[2] + other[1] * other[2]) / n, 2), n]


# ---- what is lost, and made good ----


def _make_good(found: Found, witnesses: list[Witness]) -> None:
    """Add what is known to have been spent and is on no line, as an attempt with the number `LOST`."""  # noqa: E501
    accounts = found.ordered
    numbers = [account.number for account in accounts]
    s_until = [0.0, *itertools.accumulate(account.wall_s for account in accounts)]
    usd_until = [0.0, *itertools.accumulate(account.usd for account in accounts)]
    for witness in [Witness(a.number - 1, -1, a.past_s, a.past_usd) for a in accounts] + witnesses:
        n_known = bisect.bisect_right(numbers, witness.attempt)
        found.lost_s = max(found.lost_s, (witness.s or 0.0) - s_until[n_known])
        found.lost_usd = max(found.lost_usd, (witness.usd or 0.0) - usd_until[n_known])
    if found.lost_s <= NO_LOSS_S and found.lost_usd <= NO_LOSS_USD:
        found.lost_s = found.lost_usd = 0.0
        return
    earlier = found.accounts.get(LOST, Account(LOST, state="lost"))
    seconds, usd = earlier.wall_s + max(found.lost_s, 0.001), earlier.usd + found.lost_usd
    steps = [witness.step for witness in witnesses]
    found.accounts[LOST] = replace(
        earlier,
        line=earlier.line + 1,
        spans={"lost": seconds},
        usd_per_hour=usd / seconds * 3600,
        committed=max([earlier.committed, *steps]),
        step=max([earlier.step, *steps, 0]),
    )


def witnesses_in(checkpoints: Path, run_id: str | None) -> list[Witness]:
    """What the manifests of a run's checkpoints say of the money spent when they were written.

    `run_id` None: nobody knows any more whose they are, and all count. Those of earlier farthings
    know no sums.
    """
    found = []
    for folder in sorted(checkpoints.glob("step-*")) if checkpoints.is_dir() else ():
        try:
            manifest = read_manifest(folder)
        except (DamagedFileError, OSError):
            continue
        attempt, step = manifest.get("attempt"), manifest.get("step")
        if (
            isinstance(attempt, int)
            and isinstance(step, int)
            and run_id in (None, manifest.get("run_id"))
        ):
            s, usd = manifest.get("spent_s"), manifest.get("spent_usd")
            sums = (s, usd) if _are_amounts([s, usd]) else (None, None)
            found.append(Witness(attempt, step, *sums))
    return found


# ---- two ledgers of one run ----


def merge(first: dict[int, Account], second: dict[int, Account]) -> dict[int, Account]:
    """All attempts that either knows: none is lost, and none counted twice, as of two accounts the
    longer one stands.

    Two of the same number that began at different times are two (the store was away when the other
    machine's began): those of `second` get new numbers.
    """
    merged = {number: replace(account) for number, account in first.items()}
    for number, account in sorted(second.items()):
        twin = next((other for other in merged.values() if _is_same(account, other)), None)
        if twin is not None:
            longer = account if account.wall_s > twin.wall_s else twin
            merged[twin.number] = replace(
                longer,
                number=twin.number,
                committed=max(account.committed, twin.committed),
                # a lease's last word of an earlier version has not all that happened before it
                out_of_memory=max(twin.out_of_memory, account.out_of_memory, key=len),
                notices=max(twin.notices, account.notices, key=len),
            )
        else:
            new = number if number not in merged else max(merged) + 1
            merged[new] = replace(account, number=new)
    return merged


def _is_same(one: Account, other: Account) -> bool:
    if one.id and other.id:
        return one.id == other.id
    if LOST in (one.number, other.number):
        return one.number == other.number
    return abs(one.started_at - other.started_at) < (60 if one.number == other.number else 0.01)


# ---- what readers want ----


def with_redone(accounts: list[Account]) -> list[Account]:
    """The attempts, in order, with the seconds that work had taken which a later one had to redo."""  # noqa: E501
    found, kept_step = [], math.inf
    for account in reversed(accounts):
        redone_s = 0.0
        work_s = {
            int(step): seconds for step, seconds in reversed([*account.marks, *account.saved])
        }
        if account.began and account.step > kept_step and work_s:
            redone_s = max(
                0.0, work_s.get(account.step, account.work_s) - _between(work_s, int(kept_step))
            )
        if account.began:
            kept_step = min(kept_step, account.first_step)
        found.append(replace(account, redone_s=redone_s))
    return found[::-1]


def _between(work_s: dict[int, float], step: int) -> float:
    """Seconds of work at `step`, on the straight line between the nearest steps that are known."""
    before = max((known for known in work_s if known <= step), default=min(work_s))
    after = min((known for known in work_s if known >= step), default=max(work_s))
    share = (step - before) / (after - before) if after > before else 0.0
    return work_s[before] + share * (work_s[after] - work_s[before])
