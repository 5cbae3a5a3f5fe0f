"""`farthing report`: the receipt of a run folder, two side by side, or a page of one or several."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from farthing.cli.console import complain, print_json, rich_console, write, write_page
from farthing.errors import EXIT_FINISHED, InputError

ARGUMENTS = {
    "folder": "run folder (output_dir)",
    "[baseline]...": "run folder to compare with (several with --html)",
    "--json": "print the receipt or the comparison as JSON",
    "--html FILE": "write one self-contained page",
}


def run(arguments: argparse.Namespace) -> int:
    """Print the receipt or the comparison; a damaged exported model is named on stderr."""
    from farthing.run.folder import SEARCH_LOG

    if (Path(arguments.folder) / SEARCH_LOG).is_file() and not arguments.baseline:
        return _show_search(arguments)
    from farthing.report.receipt import build_receipt, compare
    from farthing.run.exported import damage_of

    if len(arguments.baseline) > 1 and not arguments.html:
        what = f"{1 + len(arguments.baseline)} runs side by side don't fit a terminal"
        raise InputError(what, where="farthing report", to_do="add --html FILE, or compare two")
    folders = [arguments.folder, *arguments.baseline]
    receipts = [build_receipt(Path(folder)) for folder in folders]
    damage = {folder: damage_of(Path(folder)) for folder in folders}
    for folder, words in damage.items():
        if words:
            complain(f"{folder}: the exported model is damaged: {words}")
            write("  to do: run `farthing train` with its job again: it writes the model again")
    comparisons = [compare(receipts[0], other) for other in receipts[1:]]
    if arguments.html:
        from farthing.report.run_page import compared_page, run_page

        write_page(
            Path(arguments.html),
            compared_page(receipts, comparisons) if comparisons else run_page(receipts[0]),
        )
        write(f"wrote {arguments.html}")
    if arguments.json:
        model = {"model_damage": damage[arguments.folder]}
        compared = [{"kind": "farthing comparison", **asdict(one)} for one in comparisons[:1]]
        print_json(compared[0] if compared else receipts[0].to_json() | model)
        return EXIT_FINISHED
    if not arguments.html:
        from farthing.report.draw import draw
        from farthing.report.receipt_report import comparison_report, receipt_report

        one = comparison_report(comparisons[0]) if comparisons else receipt_report(receipts[0])
        draw(rich_console(), one)
    return EXIT_FINISHED


def _show_search(arguments: argparse.Namespace) -> int:
    from farthing.report.draw import draw
    from farthing.search.receipt import read_receipt
    from farthing.search.report import search_page, search_report

    receipt = read_receipt(Path(arguments.folder))
    if arguments.html:
        write_page(Path(arguments.html), search_page(receipt))
        write(f"wrote {arguments.html}")
    if arguments.json:
        print_json(receipt)
    elif not arguments.html:
        draw(rich_console(), search_report(receipt))
    return EXIT_FINISHED
