"""A job measured instead of trained, and signals that arrive before a run listens to them
itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from farthing.cli.console import print_json, rich_console
from farthing.errors import EXIT_INTERRUPTED
from farthing.run.signals import handled


def measure(job: Any, work: Callable[[Any], Any], *, as_json: bool, goes_on: bool = False) -> Any:
    """What `work(terminal)` finds of a job, with torch, which it imports.

    Printed as JSON, while progress goes to stderr; else returned to be drawn.
    """
    from farthing.config.preflight import look_over
    from farthing.events import Working
    from farthing.report.terminal import Terminal

    look_over(job)
    terminal = Terminal(rich_console(stderr=as_json, goes_on=goes_on), job.train.logging_steps)
    terminal(Working("loading torch and transformers"))
    try:
        with handled(leave_before_the_start):
            found = work(terminal)
    finally:
        terminal.close()
    if as_json:
        print_json(found)
    return None if as_json else found


def leave_before_the_start(number: int, frame: Any) -> None:
    """The handler of such a signal: says so and ends the process."""
    os.write(
        2, b"farthing: asked to leave before the run had begun; run the same command to start it\n"
    )
    os._exit(EXIT_INTERRUPTED)
