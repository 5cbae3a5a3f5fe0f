"""`farthing search`: the settings of a job that score best within its limits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from farthing.cli.console import print_json, rich_console
from farthing.cli.leaving import n_processes_of
from farthing.cli.parser import add_job_arguments, as_json
from farthing.run.guard import forget_done, tell

GOES_ON_UNREAD = True
"""A search does not end because nobody reads what it prints."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser, as_json("the receipt", progress=True))


def run(arguments: argparse.Namespace) -> int:
    from farthing.config.preflight import load_job_or_tell_all, look_over
    from farthing.search.run import check, search

    job = load_job_or_tell_all(arguments.job, arguments.set)
    check(job)
    look_over(job)
    tell(folder=job.output_dir, when_done=job.when_done)
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
        draw(console, outcome.receipt)
    to_do = {
        "limit": "; raise the limit and run the same command to continue",
        "interrupted": "; run the same command to continue",
    }
    console.print(
        f"{outcome.state}: {outcome.reason}{to_do.get(outcome.state, '')}", highlight=False
    )
    return outcome.exit_code


def draw_bill(console: Any, bill: Any) -> None:
    """What a search will cost, below the plan of one of its trials in full."""
    from farthing.report.safe import escape, table_of
    from farthing.search.words import bill_in_words
    from farthing.units import say_seconds, say_usd

    rows = [
        (
            escape(each["name"]),
            say_usd(each["usd"]),
            f"{say_usd(each['usd_range'][0])} to {say_usd(each['usd_range'][-1])}",
            say_seconds(each["hours"] * 3600),
        )
        for each in bill["machines"][:5]
    ]
    console.print()
    for line in bill_in_words(bill):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print(table_of("the search on", "#dollars", "range", "#time", rows=rows))


def draw(console: Any, receipt: Any) -> None:
    """The receipt of a search for the terminal."""
    from farthing.report.safe import escape, table_of
    from farthing.search.words import (
        dollars_in_words,
        in_words,
        score_in_words,
        setting_in_words,
        state_in_words,
    )
    from farthing.units import plural, say_usd

    winner = receipt["winner"]
    order = [winner["trial"]] if winner else []
    order += [each["trial"] for each in receipt["trials"] if each["trial"] not in order]
    by_number = {each["trial"]: each for each in receipt["trials"]}
    rows = [
        (
            str(trial),
            *(escape(setting_in_words(each, key)) for key in receipt["varied"]),
            f"{100 * each['fraction']:.0f} %",
            score_in_words(each),
            say_usd(each["usd"]),
            escape(state_in_words(each)[:120]),
        )
        for trial in order
        if (each := by_number[trial])
    ]
    heads = ("#trial", *receipt["varied"], "#trained", f"={receipt['metric']}", "#dollars", "state")
    console.print(table_of(*heads, rows=rows))
    for each in receipt["rungs"]:
        console.print(
            f"  {100 * each['fraction']:.0f} % of the steps: {plural(each['n_trials'], 'trial')},"
            f" {say_usd(each['usd'])}",
            highlight=False,
        )
    for line in (*in_words(receipt), dollars_in_words(receipt)):
        console.print(escape(line), highlight=False, soft_wrap=True)
    for command in receipt["next"]:
        console.print(f"  {escape(command)}", highlight=False, soft_wrap=True)


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
