"""`farthing report`: the receipt of a run folder, or two side by side. Writes nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from farthing.cli.console import complain, print_json, rich_console, write
from farthing.errors import EXIT_FINISHED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `farthing report`."""
    parser.add_argument("folder", help="run folder (output_dir)")
    parser.add_argument("baseline", nargs="?", help="run folder to compare with")
    parser.add_argument("--json", action="store_true", help="print the receipt or the comparison as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the receipt or the comparison; a damaged exported model is named on stderr."""
    from farthing.durability.exported import damage_of
    from farthing.report.receipt import build_receipt, compare

    receipt = build_receipt(Path(arguments.folder))
    damage = {str(folder): damage_of(Path(folder)) for folder in (arguments.folder, arguments.baseline) if folder}
    for folder, words in damage.items():
        if words:
            complain(f"{folder}: the exported model is damaged: {words}")
            write("  to do: run `farthing train` with its job again: it writes the model again")
    comparison = compare(receipt, build_receipt(Path(arguments.baseline))) if arguments.baseline else None
    if arguments.json:
        model = {"model_damage": damage[arguments.folder]}
        print_json(receipt.to_json() | model if comparison is None else comparison.to_json())
        return EXIT_FINISHED
    from farthing.report.receipt_table import draw_comparison, draw_receipt

    if comparison is None:
        draw_receipt(rich_console(), receipt)
    else:
        draw_comparison(rich_console(), comparison)
    return EXIT_FINISHED
