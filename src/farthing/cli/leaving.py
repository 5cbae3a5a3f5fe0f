"""A job measured instead of trained, and signals that arrive before a run listens to them
itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from farthing.cli.console import print_json, rich_console
from farthing.errors import EXIT_INTERRUPTED, InputError
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


def say_end(console: Any, state: str, reason: str) -> None:
    """How a run or a search ended."""
    from farthing.report.safe import escape

    again = "run the same command to continue"
    words = {
        "finished": "[green]finished[/]: {}",
        "limit": f"[yellow]stopped[/] by {{}}; raise the limit and {again}",
        "interrupted": f"[yellow]interrupted[/] ({{}}); {again}",
    }
    console.print(words[state].format(escape(reason)), highlight=False, soft_wrap=True)


def n_processes_of(job: Any, *, on_cpu: bool) -> int:
    """One for each GPU that the job may use; as many as it names without a GPU where `on_cpu`.
    Raises `InputError` where this machine has fewer.
    """
    wanted, device = job.where.gpus, job.where.device
    if wanted in (None, 1) or (device == "cpu" and wanted != "all"):
        return int(wanted or 1)
    from farthing.local.machine import local_machine

    n_gpus = 0 if device == "cpu" else local_machine().n_gpus
    if wanted == "all":
        return max(1, n_gpus)
    if wanted > max(1, n_gpus) and (n_gpus or device == "cuda" or not on_cpu):
        raise InputError(
            f"the job wants {wanted} GPUs, this machine has {n_gpus}",
            where="where.gpus",
            to_do=f"set it to {max(1, n_gpus)}, or to all",
        )
    return int(wanted)


def leave_before_the_start(number: int, frame: Any) -> None:
    """The handler of such a signal: prints one line and ends the process."""
    os.write(
        2, b"farthing: asked to leave before the run had begun; run the same command to start it\n"
    )
    os._exit(EXIT_INTERRUPTED)
