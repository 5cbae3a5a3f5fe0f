"""`farthing doctor`: checks of this machine, and of a job before it starts. Changes nothing."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from farthing.cli.console import print_json, rich_console
from farthing.cli.parser import SET
from farthing.errors import EXIT_FINISHED, EXIT_MISTAKE, Check, InputError

ARGUMENTS = {
    "[job]": "job file (YAML)",
    **SET,
    "--target TARGET": "check what `farthing launch --on TARGET` needs here",
    "--data FILE": "show the format of a data file; a job's columns apply",
    "--model NAME": "with --data and no job: use this model's tokenizer and template",
    "--json": "print the checks as JSON",
}
COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def run(arguments: argparse.Namespace) -> int:
    """Print every check; 2 when one has failed."""
    job = Path(arguments.job) if arguments.job else None
    if arguments.set and job is None:
        raise InputError("it needs a job", where="--set", to_do="name the job file as well")
    if arguments.model and (job or not arguments.data):
        raise InputError(
            "only for a data file without a job",
            where="--model",
            to_do="farthing doctor --data FILE --model NAME, or JOB --set model=NAME",
        )
    if arguments.data:
        return _look_at_data(arguments, job)
    from farthing.doctor import check_before, check_job, check_machine

    if arguments.target:
        from farthing.launch.check import check_target

        return _show(list(check_target(arguments.target)), arguments)
    faults = check_before(job, arguments.set) if job else []
    checks = [*check_machine(Path.cwd(), with_device=not faults), *faults]
    if job and not _failed(checks):
        checks += check_job(job, arguments.set)
    return _show(checks, arguments)


def _failed(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.state == "failed"]


def _show(checks: list[Check], arguments: argparse.Namespace) -> int:
    failed = _failed(checks)
    code = EXIT_MISTAKE if failed else EXIT_FINISHED
    if arguments.json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
        return code
    from farthing.report.safe import escape, escape_lines
    from farthing.units import plural

    console = rich_console()
    for check in checks:
        state = f"[{COLOURS[check.state]}]{check.state:8}[/]"
        line = f"{state} [bold]{escape(check.name)}[/]: {escape_lines(check.found)}"
        console.print(line, soft_wrap=True)
        if check.to_do and check.state != "ok":
            console.print(f"         to do: {escape_lines(check.to_do)}", soft_wrap=True)
    n_warnings = sum(check.state == "warning" for check in checks)
    also = f", {plural(n_warnings, 'warning')}" if n_warnings else ""
    if arguments.job and not (failed or arguments.target):
        also += f"\nnext: farthing train {escape(shlex.quote(arguments.job))}"
    result = (
        f"[red]{plural(len(failed), 'check')} failed[/]" if failed else "[green]nothing failed[/]"
    )
    console.print(f"\n{result}{also}", soft_wrap=True)
    return code


def _look_at_data(arguments: argparse.Namespace, job: Path | None) -> int:
    """What a file holds; 2 where none of its rows can be trained on."""
    from farthing.doctor import look_at_data
    from farthing.report.data_view import as_json, data_lines

    found = look_at_data(Path(arguments.data), job, arguments.set, arguments.model)
    if arguments.json:
        print_json(as_json(found))
    else:
        console = rich_console()
        for line in data_lines(found):
            console.print(line, soft_wrap=True)
    return EXIT_FINISHED if found.n_usable and not found.foreign else EXIT_MISTAKE
