"""`farthing watch`: a run as it goes, from another terminal or, where it has a store, from another
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import asdict, replace
from typing import Any

from farthing.addresses import without_secrets
from farthing.cli.console import rich_console
from farthing.cli.looking import looked_at, names_a_store
from farthing.errors import EXIT_FINISHED, InputError

LOCAL_S, STORE_S = 2.0, 20.0
SILENT_STORE_S = 300.0


ARGUMENTS = {
    "run": "run folder (output_dir), or the address of its output_store",
    "--every SECONDS:float": "seconds between updates (default: 2; 20 for a store)",
    "--once": "print one update and exit",
    "--json": "print a JSON line for each update",
}


def run(arguments: argparse.Namespace) -> int:
    """Look again and again until the run has ended; Ctrl-C ends the looking, not the run."""
    from farthing.report.live import SILENT_S, Watcher, progress_of
    from farthing.report.receipt import build_receipt

    if arguments.every is not None and arguments.every <= 0:
        raise InputError(f"{arguments.every:g} seconds", where="--every", to_do="give more than 0")
    is_store = names_a_store(arguments.run)
    every_s = arguments.every or (STORE_S if is_store else LOCAL_S)
    watcher = Watcher(rich_console())
    with (
        looked_at(arguments.run) as look,
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(watcher),
    ):
        while True:
            receipt = replace(build_receipt(look()), run=without_secrets(arguments.run))
            progress = progress_of(
                receipt, time.time(), silent_s=SILENT_STORE_S if is_store else SILENT_S
            )
            if arguments.json:
                print(json.dumps(_as_json(receipt, progress), allow_nan=False), flush=True)
            else:
                watcher.show(receipt, progress, is_last=arguments.once or progress.is_over)
            if arguments.once or progress.is_over:
                return EXIT_FINISHED
            time.sleep(every_s)
    return EXIT_FINISHED


def _as_json(receipt: Any, progress: Any) -> dict[str, object]:
    """One look, for programs."""
    from farthing.report.words import lines

    found = receipt.to_json()
    kept = "run usd wall_s final_loss metrics tokens_per_s mfu peak_bytes interruptions diagnosis"
    damage = lines("receipt.txt", "damage", receipt)
    return {**asdict(progress), **{name: found[name] for name in kept.split()}, "damage": damage}
