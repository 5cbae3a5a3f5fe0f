"""`farthing probe`: real steps for a minute, to find the cheapest settings on this machine. Saves
no weights.
"""

from __future__ import annotations

import argparse
from typing import Any

from farthing.cli.console import rich_console
from farthing.cli.leaving import measure
from farthing.cli.parser import add_job_arguments
from farthing.errors import EXIT_FINISHED, InputError

GOES_ON_UNREAD = True
"""What is measured is kept for later runs, whether it is read or not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `farthing probe`."""
    add_job_arguments(parser)
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="time to spend (default: 60)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print every trial as JSON; progress goes to stderr"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, then print every trial."""
    from farthing.config.preflight import load_job_or_tell_all

    if not 5 <= arguments.seconds <= 3600:
        raise InputError(
            f"{arguments.seconds:g} seconds", where="--seconds", to_do="give 5 to 3600"
        )
    job = load_job_or_tell_all(arguments.job, arguments.set)

    def work(terminal: Any) -> Any:
        from farthing.train.probe import probe

        return probe(job, terminal, arguments.seconds)

    if found := measure(job, work, as_json=arguments.json, goes_on=True):
        from farthing.report.draw import draw
        from farthing.report.receipt_report import probe_report

        draw(rich_console(goes_on=True), probe_report(found))
    return EXIT_FINISHED
