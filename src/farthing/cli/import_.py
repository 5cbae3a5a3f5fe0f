"""`farthing import`: the job that another tool's settings ask for, with every key mapped or named.
Runs nothing it reads.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from farthing.cli.console import print_json, rich_console
from farthing.errors import EXIT_FINISHED, EXIT_MISTAKE, InputError

SOURCES = "openai,together,fireworks,axolotl,llama-factory,trl,unsloth,hf-trainer"
ARGUMENTS = {
    "file": "settings, script or notebook of another tool (.yaml .json .py .ipynb .sh)",
    f"--from TOOL{{{SOURCES}}}": (f"{SOURCES.replace(',', ', ')} (default: recognised by content)"),
    "-o --output JOB": "where to write the job (default: print it)",
    "--json": "print the fate of each key as JSON",
}


def run(arguments: argparse.Namespace) -> int:
    """Write or print the job; 2 where the file asks for a training that farthing can't do."""
    from farthing.config.importers.job_text import job_text
    from farthing.config.importers.recognise import import_file
    from farthing.config.importers.tables import say
    from farthing.objectives.registry import objective_names

    path = Path(arguments.file)
    found = import_file(path, arguments.from_)
    text = "" if found.blockers else job_text(found, path.name)
    written: list[str] = []
    if arguments.output and text:
        written = _write(Path(arguments.output), text, found.files)
    if arguments.json:
        print_json(_as_json(found, text, written))
    elif found.blockers:
        whys = [
            f"{line.key}{'' if line.value is None else f': {say(line.value)}'} ({line.why})"
            for line in found.blockers
        ]
        raise InputError(
            f"no job can be made of it: {'; '.join(whys)}",
            where=str(path),
            to_do=(
                f"farthing trains {', '.join(objective_names())}, on text: import a configuration"
                " of such a training"
            ),
        )
    elif written:
        _say(found, written)
    else:
        print(text, end="")
        if found.files:
            beside = ", ".join(found.files)
            print(f"note: this job needs {beside} beside it: -o writes both", file=sys.stderr)
    return EXIT_MISTAKE if found.blockers else EXIT_FINISHED


def _write(output: Path, text: str, files: dict[str, str]) -> list[str]:
    """The job and the files that belong to it; overwrites nothing. A file whose name another one
    has is named after the job.
    """
    if not output.parent.is_dir():
        raise InputError("no such folder", where=str(output.parent), to_do="make it first")
    wanted = {}
    for name, content in files.items():
        path = output.parent / name
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != content:
            path = output.parent / f"{output.stem}-{name}"
            text = text.replace(name, path.name)
        wanted[path] = content
    for path in (output, *wanted):
        if path.exists() and (path == output or path.read_text(encoding="utf-8") != wanted[path]):
            what = "this file exists already"
            raise InputError(what, where=str(path), to_do="name a new one with -o")
    wanted = {output: text, **wanted}
    for path, content in wanted.items():
        path.write_text(content, encoding="utf-8")
    return [str(path) for path in wanted]


def _as_json(found: Any, text: str, written: list[str]) -> dict[str, object]:
    return {
        "source": found.source,
        "mapped": [
            {"key": line.key, "value": str(line.value), "to": line.became} for line in found.mapped
        ],
        "named": [
            {"key": line.key, "value": str(line.value), "reason": line.why, "effect": line.effect}
            for line in found.named
        ],
        "notes": found.notes,
        "written": written,
        "job": text,
    }


def _say(found: Any, written: list[str]) -> None:
    from farthing.report.safe import escape
    from farthing.units import plural

    console = rich_console()
    differs = [line for line in found.named if line.effect == "differs"]
    console.print(f"wrote {escape(', '.join(written))} from {found.source}", soft_wrap=True)
    console.print(
        f"{plural(len(found.mapped), 'key')} mapped, {plural(len(found.named), 'key')} named with"
        " the reason in the job"
    )
    for line in differs:
        console.print(f"[yellow]differs[/]  {escape(line.key)}: {escape(line.why)}", soft_wrap=True)
    for note in found.notes:
        console.print(f"[cyan]note[/]     {escape(note)}", soft_wrap=True)
    console.print(f"next: farthing plan {escape(shlex.quote(written[0]))}", soft_wrap=True)
