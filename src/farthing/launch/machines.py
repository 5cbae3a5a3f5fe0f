"""The machines a run has rented: lines of `machines.jsonl`, one before and after each thing that is
done to one.

A line stands before each request to create a machine, so that one whose answer was lost is looked
for by its name. Money is counted from that request to the confirmed deletion.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farthing.run.accounts import Account
from farthing.storage.files import Json, fsync_path, make_private
from farthing.storage.logs import SummedLines
from farthing.units import plural, say_seconds, say_usd

MACHINES = "machines.jsonl"
EVENTS = ("asked", "sought", "created", "refused", "priced", "began", "booted", "left", "gone")
_BILLED = (
    *("name", "target", "provider", "instance", "gpu", "is_spot", "id", "usd_per_hour"),
    *("state", "why", "asked_at", "gone_at", "price_from"),
)


@dataclass
class RentedMachine:
    """One machine, as far as is known. Times are seconds since 1970."""

    name: str
    number: int = 0
    target: str = ""
    on: str = ""
    """The target with what stands behind its colon, as in ssh:host."""
    provider: str = ""
    instance: str = ""
    gpu: str = ""
    is_spot: bool = False
    usd_per_hour: float = 0.0
    """The newest price that is known: the provider's own, else the planned one."""
    price_source: str = ""
    """Where the planned price is from, with its date."""
    left_usd: float | None = None
    """What of the cap was left when it was asked for; None without a cap in dollars."""
    is_paid_in_queue: bool = True
    """Whether money is counted from the request on; of queues from the start of the job."""
    most_s: float = 0.0
    """Seconds from the request after which the provider ends it by itself."""
    committed: int = 0
    """The newest step that was saved when it was asked for."""
    id: str = ""
    asked_at: float = 0.0
    sought: list[float] = field(default_factory=list)
    """When it was looked for after a request that was not answered."""
    created_at: float | None = None
    began_at: float | None = None
    """When a queue had let it begin."""
    booted_at: float | None = None
    left_at: float | None = None
    gone_at: float | None = None
    charged: list[tuple[float, float]] = field(default_factory=list)
    """What the provider charges: (from when, dollars an hour), the oldest first."""
    is_refused: bool = False
    """Nothing was made."""
    code: int | None = None
    why: str = ""
    acknowledged_at: float | None = None
    """When the provider first acknowledged its deletion; this and what follows are on no line."""
    alive_at: float = 0.0
    """When the provider last showed it."""
    is_missed: bool = False
    """It was gone when it was missed, and is billed no longer than until then."""

    @property
    def state(self) -> str:
        """The last thing known: asked, created, refused, booted, left or gone."""
        if self.is_refused:
            return "refused"
        known = {
            "gone": self.gone_at,
            "left": self.left_at,
            "booted": self.booted_at,
            "created": self.created_at,
        }
        return next((name for name, at in known.items() if at is not None), "asked")

    @property
    def is_open(self) -> bool:
        """Whether it may still cost money."""
        return not self.is_refused and self.gone_at is None

    def billed_s(self, now: float) -> float:
        """Seconds that are paid for, up to `now` while it is not known to be gone."""
        start = self.asked_at or self.created_at
        if not self.is_paid_in_queue:
            start = self.began_at or self.booted_at
        if self.is_refused or start is None:
            return 0.0
        return max(0.0, self.end(now) - start)

    def end(self, now: float) -> float:
        """When it was gone, `now` while it is not known to be."""
        return now if self.gone_at is None else self.gone_at

    def usd(self, now: float) -> float:
        """Dollars up to `now`, at the prices charged; at the planned one where none is told."""
        end = until = self.end(now)
        start, total = end - self.billed_s(now), 0.0
        for since, price in reversed(self.charged[1:]):
            since = max(start, since)
            total += max(0.0, until - since) / 3600 * price
            until = min(until, since)
        first = self.charged[0][1] if self.charged else self.usd_per_hour
        return total + max(0.0, until - start) / 3600 * first

    @property
    def price_from(self) -> str:
        if self.charged:
            return "the provider"
        return f"assumed: {self.price_source}" if self.price_source else "assumed"


_OF_ROWS = {
    *("number", "target", "on", "provider", "instance", "gpu", "is_spot", "usd_per_hour"),
    *("price_source", "left_usd", "most_s", "is_paid_in_queue", "committed", "id", "code", "why"),
}


class MachineLedger:
    """The machines of the run in a folder. Raises `OSError`: then nothing may be rented."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines = SummedLines(folder / MACHINES)
        self.machines: dict[str, RentedMachine] = {}
        self.rows: dict[str, list[Json]] = {}
        """The lines of each machine."""
        self.trouble = ""
        """Why the newest line is not on the disk."""
        for row in self._lines.rows():
            self._take_in(row)
        self._sort()

    def note(self, name: str, event: str, at: float, **facts: Any) -> RentedMachine:
        """Write a line and force it to the disk; what it is about, with it taken in.

        Only the line before a request has to be there: what was made is watched and given back
        without, see `trouble`.
        """
        return self._write({"machine": name, "event": event, "at": round(at, 3), **facts})

    def take_over(self, elsewhere: Mapping[str, list[Json]], *, to_disk: bool = True) -> None:
        """Take in lines of the same run that another folder has written, by machine; those that are
        known are passed over.

        A machine here that was never made gives its name to the other one.
        """
        for name, rows in elsewhere.items():
            for row in rows:
                if row not in self.rows.get(name, []):
                    self._write(row) if to_disk else self._take_in(row)
        self._sort()

    def _sort(self) -> None:
        self.machines = dict(sorted(self.machines.items(), key=lambda item: item[1].number))

    def _write(self, row: Json) -> RentedMachine:
        try:
            make_private(self.folder)
            is_new = not self._lines.path.exists()
            self._lines.append(row)
            self._lines.sync()
            if is_new:
                fsync_path(self.folder)
            self.trouble = ""
        except OSError as error:
            if row.get("event") == "asked":
                raise
            self.trouble = str(error)
        return self._take_in(row)

    def _take_in(self, row: Json) -> RentedMachine:
        name, event, at = str(row.get("machine")), row.get("event"), float(row.get("at") or 0.0)
        machine = self.machines.setdefault(name, RentedMachine(name))
        if event == "asked" and machine.created_at is None:  # see `take_over`
            machine = self.machines[name] = RentedMachine(name)
            self.rows[name] = []
        elif event == "asked" and machine.asked_at:
            at = min(at, machine.asked_at)
        self.rows.setdefault(name, []).append(row)
        for key in row.keys() & _OF_ROWS:
            setattr(machine, key, row[key])
        if event in ("created", "priced") and "usd_per_hour" in row:
            # what comes from elsewhere is not in order
            bisect.insort(machine.charged, (at, float(row["usd_per_hour"])))
            machine.usd_per_hour = machine.charged[-1][1]
        if event == "sought":
            machine.sought.append(at)
        elif event == "refused":
            machine.is_refused = True
        elif event in EVENTS and event != "priced":
            setattr(machine, f"{event}_at", at)
        return machine

    @property
    def next_number(self) -> int:
        """Of the next machine, from 1."""
        return 1 + max((machine.number for machine in self.machines.values()), default=0)

    @property
    def open(self) -> list[RentedMachine]:
        """Those that may still cost money, the oldest first."""
        return [machine for machine in self.machines.values() if machine.is_open]

    def open_in_words(self, end_by_themselves: bool, now: float) -> list[str]:
        """Each machine that may still cost money, with its price and its latest end."""
        return [
            f"{machine.name}, {say_usd(machine.usd_per_hour)} an hour, "
            + (
                f"{say_seconds(max(0.0, machine.asked_at + machine.most_s - now))} more at the most"
                if end_by_themselves and machine.most_s
                else "until somebody ends it"
            )
            for machine in self.open
        ]

    def damaged_in_words(self) -> str:
        """What is known of lines that can't be read; empty where there are none."""
        n = len(self._lines.damaged)
        return f"{MACHINES} has {plural(n, 'damaged line')}: machines may cost more" if n else ""

    def usd(self, now: float) -> float:
        return sum(machine.usd(now) for machine in self.machines.values())

    def spent_usd(self, accounts: Sequence[Account], now: float) -> float:
        """What the run has cost: machines, and attempts on none of them. A machine costs at least
        what its attempts know of: nobody may have seen a queued job begin.
        """
        known = defaultdict[str, float](float)
        for account in accounts:
            known[account.machine] += account.usd
        for name, machine in self.machines.items():
            if not machine.is_refused:
                known[name] = max(known[name], machine.usd(now))
        return sum(known.values())

    def close(self) -> None:
        self._lines.close()


def bill_by_machine(
    machines: Sequence[RentedMachine], accounts: Sequence[Account], now: float
) -> list[Json]:
    """What each machine has cost: seconds and dollars of boot, train, idle and teardown, which add
    up to the machine's.

    `accounts` are the attempts of the run, of which each machine's own are its training.
    """
    rows = []
    for machine in machines:
        if machine.is_refused:
            continue
        own = [account for account in accounts if account.machine == machine.name]
        end, total_s, usd = machine.end(now), machine.billed_s(now), machine.usd(now)
        if not machine.is_paid_in_queue:  # see `spent_usd`
            total_s = max(total_s, sum(a.wall_s for a in own))
            usd = max(usd, sum(a.usd for a in own))
        first = min(
            [a.started_at for a in own], default=machine.booted_at or machine.left_at or end
        )
        parts = {
            "train": sum(a.wall_s for a in own),
            "boot": max(0.0, first - (end - total_s)),
            "teardown": 0.0 if machine.left_at is None else max(0.0, end - machine.left_at),
        }
        seconds, left_s = dict[str, float](), total_s
        for part, s in parts.items():  # clocks of two machines differ: none is longer than the rest
            seconds[part] = min(s, left_s)
            left_s -= seconds[part]
        seconds["idle"] = left_s
        rows.append(
            {
                **{name: getattr(machine, name) for name in _BILLED},
                "wall_s": total_s,
                "usd": usd,
                "seconds": seconds,
                "usd_of": {part: usd * s / max(total_s, 1e-9) for part, s in seconds.items()},
            }
        )
    return rows


def bill_of(
    folder: Path, accounts: Sequence[Account], now: float, damaged: list[str]
) -> list[Json]:
    """The same for the run in a folder; empty where no machine was rented for it. Adds to `damaged`
    what can't be read."""
    ledger = MachineLedger(folder)
    if words := ledger.damaged_in_words():
        damaged.append(words)
    return bill_by_machine(list(ledger.machines.values()), accounts, now)
