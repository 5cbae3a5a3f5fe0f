"""`farthing profile`: a few real steps of a job under torch.profiler, by names of ours. Saves no
weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from farthing.cli.console import rich_console
from farthing.cli.leaving import measure
from farthing.cli.parser import JOB, in_range
from farthing.errors import EXIT_FINISHED, InputError

ARGUMENTS = {
    **JOB,
    "--steps N:=5": "steps to profile after 3 warm-up steps",
    "--output FOLDER:=profile": "folder for the trace (default: ./profile)",
    "--json": "print the table as JSON; progress goes to stderr",
}


def run(arguments: argparse.Namespace) -> int:
    from farthing.config.load import load_job

    in_range("--steps", arguments.steps, 1, 100)
    if Path(arguments.output).is_file():
        raise InputError("is a file", where=f"--output {arguments.output}", to_do="name a folder")
    job = load_job(arguments.job, arguments.set)

    def work(terminal: Any) -> Any:
        from farthing.train.profiling import profile_job

        return profile_job(job, terminal, Path(arguments.output), arguments.steps)

    if found := measure(job, work, as_json=arguments.json):
        _draw(rich_console(), found)
    return EXIT_FINISHED


def _draw(console: Any, found: dict[str, Any]) -> None:
    from farthing.report.blocks import Table
    from farthing.report.draw import draw_block
    from farthing.report.safe import escape

    rows = [
        (part["name"], f"{1000 * part['step_s']:,.2f}", f"{part['share']:.1%}")
        for part in found["parts"]
    ]
    rows.append(("a step", f"{1000 * found['step_s']:,.2f}", ""))
    draw_block(console, Table(("where a step goes", "#ms", "#share"), tuple(rows)))
    console.print(f"on {escape(found['device'])}, {found['precision']}", soft_wrap=True)
    console.print(
        f"trace: {escape(found['trace'])} (chrome://tracing, ui.perfetto.dev, or tensorboard"
        " --logdir)",
        soft_wrap=True,
    )
