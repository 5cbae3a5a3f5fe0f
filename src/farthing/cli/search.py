"""`farthing search`: the settings of a job that score best within its limits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from farthing.cli.console import print_json, rich_console
from farthing.cli.leaving import n_processes_of, say_end
from farthing.cli.parser import JOB
from farthing.run.guard import forget_done, tell

GOES_ON_UNREAD = True
"""A search does not end because nobody reads what it prints."""


ARGUMENTS = {**JOB, "--json": "print the receipt as JSON; progress goes to stderr"}


def run(arguments: argparse.Namespace) -> int:
    from farthing.config.preflight import load_job_or_tell_all, look_over
    from farthing.search.run import check, search

    job = load_job_or_tell_all(arguments.job, arguments.set)
    tell(folder=job.output_dir, when_done=job.when_done)
    check(job)
    look_over(job)
    forget_done(Path(job.output_dir))
    console = rich_console(stderr=arguments.json, goes_on=True)
    outcome = search(
        job,
        Path(arguments.job),
        _Progress(console).show,
        n_at_a_time=n_processes_of(job, on_cpu=False),
    )
    if arguments.json:
        print_json(outcome.receipt)
    else:
        from farthing.report.draw import draw
        from farthing.search.report import search_report

        draw(console, search_report(outcome.receipt))
    say_end(console, outcome.state, outcome.reason)
    return outcome.exit_code


class _Progress:
    """Lines for what happens. A warning is told once a trial."""

    def __init__(self, console: Any) -> None:
        self._console, self._told = console, set[tuple[int | None, str]]()

    def show(self, row: Any) -> None:
        """Print the line of something that happened, where it is worth one."""
        from farthing.report.safe import escape
        from farthing.units import say_usd

        if "warning" in row and (row["trial"], row["warning"]) not in self._told:
            self._told.add((row["trial"], row["warning"]))
            whose = "" if row["trial"] is None else f"trial {row['trial']}: "
            self._say(f"{whose}{escape(row['warning'])}")
        elif "done" in row:
            score = "no score" if row["score"] is None else f"{row['score']:.4g}"
            reason = f" ({escape(row['reason'])})" if row["state"] in ("failed", "diverged") else ""
            self._say(
                f"trial {row['done']}: {row['state']}{reason}, {score} after"
                f" {100 * row['fraction']:.0f} % of its steps, {say_usd(row['usd'])}"
            )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
