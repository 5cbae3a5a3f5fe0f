"""All runs in a folder: state, dollars, best metric, truth of the estimate, and the month's cost.

Every folder below with a ledger or a run.json is a run. Unreadable folders are listed.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farthing.errors import FarthingError
from farthing.report.live import progress_of
from farthing.report.receipt import build_receipt
from farthing.report.words import lines
from farthing.run.folder import CHECKPOINTS, LEDGER, MODEL, RUN, SEARCH_LOG

_NOT_LOOKED_INTO = {CHECKPOINTS, MODEL, "tensorboard", ".git", "node_modules", "__pycache__"}


@dataclass(frozen=True)
class RunRow:
    run: str
    state: str  # as in `Progress`, or unreadable
    began: str | None = None  # UTC, ISO
    model: str | None = None
    method: str | None = None
    steps: int = 0
    wall_s: float = 0.0
    usd: float | None = None
    metric: str | None = None  # the name of `best`
    best: float | None = None
    ratio: float | None = None  # happened/estimated, None before the end
    usd_by_month: dict[str, float] = field(default_factory=dict)
    """Dollars of attempts and machines that began in a month (2026-11), UTC."""
    problem: str = ""


def runs_in(folder: Path, now: float) -> tuple[list[RunRow], list[str]]:
    """(the runs in and below a folder, the newest first, and what can't be read; the stores, which
    are not looked into). `now` in seconds since 1970.
    """
    closed: list[OSError] = []
    found = sorted(_found(folder, closed.append))
    rows = [row_of(path, now, name=str(path)) for path, is_store in found if not is_store]
    rows.sort(key=lambda row: row.began or "", reverse=True)
    rows += [RunRow(one.filename, "unreadable", problem=f"{one.strerror}") for one in closed]
    return rows, [str(path) for path, is_store in found if is_store]


def _found(folder: Path, note: Callable[[OSError], None]) -> Iterator[tuple[Path, bool]]:
    """(a run folder or a store, whether it is a store)."""
    for where, folders, files in os.walk(folder, onerror=note):
        if "data" in folders and ("commits" in folders or "writers" in folders):
            yield Path(where), True
            folders.clear()  # its data/ has copies of a run's files
            continue
        if LEDGER in files or RUN in files:
            yield Path(where), False
        if SEARCH_LOG in files and "trials" in folders:
            folders.remove("trials")  # its ledger has their seconds
        folders[:] = [name for name in folders if name not in _NOT_LOOKED_INTO]


def row_of(folder: Path, now: float, *, name: str) -> RunRow:
    try:
        receipt = build_receipt(folder)
    except (FarthingError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return RunRow(name, "unreadable", problem=f"{error}")
    rented = {machine["name"] for machine in receipt.machines}
    own = (each for each in receipt.attempts if each["machine"] not in rented)
    spent = [(attempt["started_at"], attempt["usd"]) for attempt in own]
    for machine in receipt.machines:  # at the price that was charged
        asked_at = datetime.fromtimestamp(machine["asked_at"], UTC).isoformat()
        spent.append((asked_at, machine["usd"]))
    months: dict[str, float] = {}
    for at, usd in spent if receipt.usd_is_known else ():
        months[at[:7]] = months.get(at[:7], 0.0) + usd
    best = next(
        (
            row[receipt.metric]
            for row in receipt.curves.evaluation
            if row["step"] == receipt.best_step and receipt.metric in row
        ),
        None,
    )
    pair = receipt.against_estimate
    return RunRow(
        name,
        progress_of(receipt, now).state,
        receipt.attempts[0]["started_at"] if receipt.attempts else None,
        receipt.asked("model", "model_name_or_path"),
        receipt.asked("method", "name"),
        receipt.steps,
        receipt.wall_s,
        sum(months.values()) if receipt.usd_is_known else None,
        None if best is None else receipt.metric,
        best,
        None if pair is None else pair.ratio,
        months,
        "; ".join(lines("receipt.txt", "damage", receipt)),
    )


def totals(rows: Sequence[RunRow], now: float) -> dict[str, Any]:
    readable = [row for row in rows if row.state != "unreadable"]
    month = datetime.fromtimestamp(now, UTC).strftime("%Y-%m")
    months = sorted({name for row in rows for name in row.usd_by_month})
    by_month = {name: sum(row.usd_by_month.get(name, 0.0) for row in rows) for name in months}
    return {
        "n_runs": len(readable),
        "usd": sum(by_month.values()),
        "wall_s": sum(row.wall_s for row in rows),
        "month": month,
        "month_usd": by_month.get(month, 0.0),
        "usd_by_month": by_month,
        "n_without_price": sum(row.usd is None for row in readable),
    }


def as_csv(rows: Sequence[RunRow]) -> str:
    out = io.StringIO()
    names = [name for name in RunRow.__dataclass_fields__ if name != "usd_by_month"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _inert(getattr(row, name)) for name in names})
    return out.getvalue()


def _inert(value: Any) -> Any:
    """A text that a spreadsheet would compute gets a quote before it."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t"))
    return f"'{value}" if is_formula else value
