"""`farthing doctor`: checks of this machine, and of a job before it starts. Changes nothing;
with --try it trains a few examples, in a folder of their own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from farthing.cli.console import print_json, rich_console
from farthing.cli.parser import add_options, add_set_argument, as_json
from farthing.errors import EXIT_FINISHED, EXIT_MISTAKE, InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", help="job file (YAML)")
    add_set_argument(parser)
    options = {
        "--target TARGET": "check what `farthing launch --on TARGET` needs here",
        "--data FILE": "show the format of a data file; a job's columns apply",
        "--model NAME": "with --data and no job: use this model's tokenizer and template",
        "--try N": "train, save, kill, resume and export N examples in a separate folder",
        **as_json("the checks"),
    }
    add_options(parser, options)


def run(arguments: argparse.Namespace) -> int:
    """Print every check; 2 when one has failed."""
    if arguments.data:
        return _look_at_data(arguments)
    if arguments.model:
        raise InputError(
            "only for a data file",
            where="--model",
            to_do="farthing doctor --data FILE --model NAME",
        )
    if arguments.set and not arguments.job:
        raise InputError(
            "there is no job to override", where="--set", to_do="name the job file as well"
        )
    trial = getattr(arguments, "try")
    if trial is not None and (trial < 2 or not arguments.job):
        raise InputError(
            "a trial needs a job and 2 examples or more",
            where="--try",
            to_do="farthing doctor JOB --try 16",
        )
    from farthing.doctor import check_before, check_job, check_machine, check_trial

    if arguments.target:
        from farthing.launch.check import check_target

        return _show(list(check_target(arguments.target)), arguments, next_step="")
    faults = check_before(Path(arguments.job), arguments.set) if arguments.job else []
    checks = list(check_machine(Path.cwd(), with_device=not faults)) + faults
    if arguments.job and not any(check.state == "failed" for check in checks):
        checks += check_job(Path(arguments.job), arguments.set)
    if trial and not any(check.state == "failed" for check in checks):
        checks += check_trial(Path(arguments.job), arguments.set, trial)
    return _show(
        checks, arguments, next_step=f"farthing train {arguments.job}" if arguments.job else ""
    )


def _show(checks: list[Any], arguments: argparse.Namespace, *, next_step: str) -> int:
    failed = [check for check in checks if check.state == "failed"]
    if arguments.json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
    else:
        from farthing.report.safe import escape, escape_lines
        from farthing.units import plural

        console = rich_console()
        colours = {"ok": "green", "warning": "yellow", "failed": "red"}
        for check in checks:
            console.print(
                f"[{colours[check.state]}]{check.state:8}[/] [bold]{escape(check.name)}[/]:"
                f" {escape_lines(check.found)}",
                soft_wrap=True,
            )
            if check.to_do and (check.state != "ok"):
                console.print(f"         to do: {escape_lines(check.to_do)}", soft_wrap=True)
        n_warnings = sum(check.state == "warning" for check in checks)
        also = f", {plural(n_warnings, 'warning')}" if n_warnings else ""
        if failed:
            console.print(f"\n[red]{plural(len(failed), 'check')} failed[/]{also}")
        else:
            ready = f"\nnext: {escape(next_step)}" if next_step else ""
            console.print(f"\n[green]nothing failed[/]{also}{ready}", soft_wrap=True)
    return EXIT_MISTAKE if failed else EXIT_FINISHED


def _look_at_data(arguments: argparse.Namespace) -> int:
    """What a file holds; 2 where none of its rows can be trained on."""
    from farthing.doctor import look_at_data
    from farthing.report.data_view import as_json, data_lines

    if arguments.model and arguments.job:
        raise InputError(
            "the job names its model", where="--model", to_do="leave it out, or --set model=NAME"
        )
    job = Path(arguments.job) if arguments.job else None
    found = look_at_data(Path(arguments.data), job, arguments.set, arguments.model)
    if arguments.json:
        print_json(as_json(found))
    else:
        console = rich_console()
        for line in data_lines(found):
            console.print(line, soft_wrap=True)
    return EXIT_FINISHED if found.n_usable and not found.foreign else EXIT_MISTAKE
