"""`farthing probe`: real steps for a minute, to find the cheapest settings on this machine. Saves
no weights.
"""

from __future__ import annotations

import argparse
from typing import Any

from farthing.cli.console import rich_console
from farthing.cli.leaving import measure
from farthing.cli.parser import JOB, in_range
from farthing.errors import EXIT_FINISHED

GOES_ON_UNREAD = True
"""What is measured is kept for later runs, whether it is read or not."""


ARGUMENTS = {
    **JOB,
    "--seconds S:=60.0": "time to spend",
    "--json": "print every trial as JSON; progress goes to stderr",
}


def run(arguments: argparse.Namespace) -> int:
    from farthing.config.preflight import load_job_or_tell_all

    in_range("--seconds", arguments.seconds, 5, 3600)
    job = load_job_or_tell_all(arguments.job, arguments.set)

    def work(terminal: Any) -> Any:
        from farthing.train.probe import probe

        return probe(job, terminal, arguments.seconds)

    if found := measure(job, work, as_json=arguments.json, goes_on=True):
        from farthing.report.draw import draw
        from farthing.report.receipt_report import probe_report

        draw(rich_console(goes_on=True), probe_report(found))
    return EXIT_FINISHED
