"""`farthing export`: the trained model of a run as an adapter or merged. Changes nothing in the run folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from farthing.cli.console import print_json
from farthing.errors import EXIT_FINISHED, UserMistake
from farthing.printable import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `farthing export`."""
    parser.add_argument("folder", help="run folder (output_dir)")
    parser.add_argument("--output", required=True, help="new folder for the model")
    parser.add_argument("--format", choices=("adapter", "merged"), default="merged")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the merged weights")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that comes with the base model, as the job does"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Write the model into a new folder."""
    run = Path(arguments.folder)
    if not run.is_dir():
        raise UserMistake("no such run folder", where=str(run), to_do="name the output_dir of a job")
    from farthing.export import export_run

    written = export_run(
        run,
        Path(arguments.output),
        arguments.format,
        arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )
    if arguments.json:
        print_json(written)
    else:
        from farthing.units import say_bytes

        print(f"wrote {printable(written['folder'])} ({written['format']}, {say_bytes(written['bytes'])})")
    return EXIT_FINISHED
