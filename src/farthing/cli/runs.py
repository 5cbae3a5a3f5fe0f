"""`farthing runs`: all runs below a folder, or the one of a store: state, dollars, best metric, and
the month's total.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from farthing.cli.console import print_json, rich_console
from farthing.cli.looking import looked_at, names_a_store
from farthing.errors import EXIT_FINISHED, InputError

ARGUMENTS = {
    "[where:=.]...": "folders, or addresses of stores (default: this folder)",
    "--json": "print the runs and the totals as JSON",
    "--csv": "print a table for spreadsheets",
}


def run(arguments: argparse.Namespace) -> int:
    from farthing.report.runs import as_csv, totals

    now = time.time()
    found = [_found_in(where, now) for where in arguments.where]
    rows = [row for runs, _ in found for row in runs]
    stores = [store for _, stores in found for store in stores]
    if arguments.json:
        print_json(
            {
                "runs": [asdict(row) for row in rows],
                "totals": totals(rows, now),
                "stores": stores,
            }
        )
    elif arguments.csv:
        sys.stdout.write(as_csv(rows))
    else:
        _draw(rows, totals(rows, now), stores)
    return EXIT_FINISHED


def _found_in(where: str, now: float) -> tuple[list[Any], list[str]]:
    """(runs, stores that are not looked into)."""
    from farthing.addresses import without_secrets
    from farthing.report.runs import row_of, runs_in

    if names_a_store(where):
        with looked_at(where) as look:
            return [row_of(look(), now, name=without_secrets(where))], []
    if not Path(where).is_dir():
        raise InputError(
            "no such folder",
            where=where,
            to_do="name a folder with runs, or the address of a store",
        )
    return runs_in(Path(where), now)


def _draw(rows: list[Any], total: dict[str, Any], stores: list[str]) -> None:
    from farthing.report.safe import escape
    from farthing.units import plural, say_seconds, say_usd

    console = rich_console()
    if stores:
        console.print(
            f"stores are not looked into: {escape(', '.join(stores))}; `farthing runs STORE` shows"
            " the run of one",
            soft_wrap=True,
        )
    if not rows:
        console.print("no runs here")
        return
    for row in rows:
        usd = "" if row.problem else "no price"
        usd = usd if row.usd is None else say_usd(row.usd)
        began = "" if row.began is None else f", began {row.began.replace('T', ' ')[:16]}"
        best = "" if row.best is None else f"{row.metric} {row.best:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.0%} of the estimate"
        steps = plural(row.steps, "step") if row.steps else ""  # a search has trials
        facts = (steps, say_seconds(row.wall_s), usd, best, ratio)
        console.print(
            f"[bold]{escape(row.run)}[/]: {row.state}{began}", highlight=False, soft_wrap=True
        )
        console.print(f"  {escape(' · '.join(fact for fact in facts if fact))}", highlight=False)
    for row in rows:
        if row.problem:
            console.print(f"[yellow]{escape(row.run)}[/]: {escape(row.problem)}", soft_wrap=True)
    this_month = f"this month ({total['month']}) {say_usd(total['month_usd'])}"
    words = f"{plural(total['n_runs'], 'run')}, {say_usd(total['usd'])}; {this_month}"
    if total["n_without_price"]:
        words += f"; {plural(total['n_without_price'], 'run')} without a price"
    if n_unreadable := len(rows) - total["n_runs"]:
        words += f"; {n_unreadable} could not be read and are not counted"
    console.print(words, soft_wrap=True)
