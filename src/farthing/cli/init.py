"""`farthing init`: a starter job, the demo, or the JSON Schema. Overwrites nothing."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from farthing.cli.parser import new_file
from farthing.errors import EXIT_FINISHED, InputError
from farthing.objectives.registry import objective_names
from farthing.printable import printable

ARGUMENTS = {
    "[path]": "where to write (default: job.yaml; with --demo: demo/)",
    f"--task TASK{{{','.join(objective_names())}}}:={objective_names()[0]}": (
        f"objective of the starter: {', '.join(objective_names())}"
    ),
    "--demo": "a small model, data and job that run offline in a minute",
    "--schema": "print the JSON Schema of the job file, for editors",
    "--json": "print the written files as JSON",
}


def run(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        from farthing.config.load import job_schema

        print(json.dumps(job_schema(), indent=1))
        return EXIT_FINISHED
    if arguments.demo:
        from farthing.tiny import write_demo

        folder = Path(arguments.path or "demo")
        if folder.exists() and any(folder.iterdir()):
            raise InputError("the folder is not empty", where=str(folder), to_do="name a new one")
        written = write_demo(folder)
    else:
        from farthing.config.starter import starter

        written = new_file(arguments.path or "job.yaml")
        written.write_text(starter(arguments.task), encoding="utf-8")
    next_step = f"farthing {'train' if arguments.demo else 'doctor'} {shlex.quote(str(written))}"
    if arguments.json:
        print(json.dumps({"written": str(written), "next": next_step}))
    else:
        print(f"wrote {printable(written)}\nnext: {printable(next_step)}")
    return EXIT_FINISHED
