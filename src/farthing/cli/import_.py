"""`farthing import`: the job that another tool's settings ask for, with every key mapped or named.
Runs nothing it reads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from farthing.cli.console import print_json, rich_console
from farthing.cli.parser import add_options, as_json
from farthing.errors import EXIT_FINISHED, EXIT_MISTAKE, InputError

SOURCES = (
    "openai",
    "together",
    "fireworks",
    "axolotl",
    "llama-factory",
    "trl",
    "unsloth",
    "hf-trainer",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "settings, script or notebook of another tool (.yaml .json .py .ipynb .sh)"
    parser.add_argument("file", help=words)
    words = f"{', '.join(SOURCES)} (default: recognised by content)"
    parser.add_argument("--from", dest="source", metavar="TOOL", choices=SOURCES, help=words)
    output = {"-o --output JOB": "where to write the job (default: print it)"}
    add_options(parser, {**output, **as_json("the fate of each key")})


def run(arguments: argparse.Namespace) -> int:
    """Write or print the job; 2 where the file asks for a training that farthing can't do."""
    from farthing.config.importers.job_text import job_text
    from farthing.config.importers.recognise import import_file
    from farthing.config.importers.tables import say
    from farthing.objectives.registry import objective_names

    path = Path(arguments.file)
    found = import_file(path, arguments.source)
    text = "" if found.blockers else job_text(found, path.name)
    written: list[str] = []
    if arguments.output and text:
        written = _write(Path(arguments.output), text, found.files)
    if arguments.json:
        print_json(_as_json(found, text, written))
    elif found.blockers:
        raise InputError(
            "no job can be made of it: "
            + "; ".join(f"{line.key}: {say(line.value)} ({line.why})" for line in found.blockers),
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
            print(
                f"note: this job needs {', '.join(found.files)} beside it: -o writes both",
                file=sys.stderr,
            )
    return EXIT_MISTAKE if found.blockers else EXIT_FINISHED


def _write(output: Path, text: str, files: dict[str, str]) -> list[str]:
    """The job and the files that belong to it; overwrites nothing."""
    named = {name: _free_name(output, name, content) for name, content in files.items()}
    for name, to in named.items():
        text = text.replace(name, to)
    wanted = {output: text} | {
        output.parent / named[name]: content for name, content in files.items()
    }
    if not output.parent.is_dir():
        raise InputError("no such folder", where=str(output.parent), to_do="make it first")
    for path, content in wanted.items():
        if path.exists() and (path == output or path.read_text(encoding="utf-8") != content):
            raise InputError(
                "this file exists already", where=str(path), to_do="name a new one with -o"
            )
    for path, content in wanted.items():
        path.write_text(content, encoding="utf-8")
    return [str(path) for path in wanted]


def _free_name(output: Path, name: str, content: str) -> str:
    """A name for a file beside the job: its own, or one with the job's where another job has it."""
    path = output.parent / name
    if not path.exists() or path.read_text(encoding="utf-8", errors="replace") == content:
        return name
    return f"{output.stem}-{name}"


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
    console.print(f"next: farthing plan {escape(written[0])}", soft_wrap=True)
