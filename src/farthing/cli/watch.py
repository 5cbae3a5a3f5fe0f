"""`farthing watch`: a run as it goes, from another terminal or, where it has a store, from another machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farthing.cli.console import rich_console
from farthing.errors import EXIT_FINISHED, UserMistake

LOCAL_S, STORE_S = 2.0, 20.0
SILENT_STORE_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `farthing watch`."""
    parser.add_argument("run", help="run folder (output_dir), or the address of its output_store")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="between two looks (default: 2; 20 for a store)")
    parser.add_argument("--once", action="store_true", help="look once and leave")
    parser.add_argument("--json", action="store_true", help="print a JSON object on a line for each look")


def run(arguments: argparse.Namespace) -> int:
    """Look again and again until the run has ended; Ctrl-C ends the looking, not the run."""
    from farthing.addresses import is_remote
    from farthing.report.live import SILENT_S, progress_of
    from farthing.report.receipt import build_receipt
    from farthing.report.watch_view import Watcher

    if arguments.every is not None and arguments.every <= 0:
        raise UserMistake(f"{arguments.every:g} seconds", where="--every", to_do="give more than 0")
    is_store = is_remote(arguments.run) or (Path(arguments.run) / "commits").is_dir()
    every_s = arguments.every or (STORE_S if is_store else LOCAL_S)
    watcher = Watcher(rich_console())
    with (
        _folder_of(arguments.run, is_store) as look,
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(watcher),
    ):
        while True:
            receipt = build_receipt(look())
            progress = progress_of(receipt, time.time(), silent_s=SILENT_STORE_S if is_store else SILENT_S)
            if arguments.json:
                print(json.dumps(_as_json(receipt, progress), allow_nan=False), flush=True)
            else:
                watcher.show(receipt, progress, is_last=arguments.once or progress.is_over)
            if arguments.once or progress.is_over:
                return EXIT_FINISHED
            time.sleep(every_s)
    return EXIT_FINISHED


@contextlib.contextmanager
def _folder_of(address: str, is_store: bool) -> Iterator[Any]:
    """Within the block a function that gives the folder to read, brought up to what a store has now."""
    if not is_store:
        yield lambda: Path(address)
        return
    from farthing.durability.commits import take_small
    from farthing.durability.lease import newest_words
    from farthing.durability.object_store import StoreFault, open_store

    store = open_store(address)
    with tempfile.TemporaryDirectory(prefix="farthing-watch-") as scratch:

        def look() -> Path:
            try:
                if not take_small(store, Path(scratch), newest_words(store)):
                    raise UserMistake("no run is in this store", where=store.name, to_do="name the job's output_store")
            except StoreFault as error:
                raise UserMistake(
                    f"the store can't be read: {error}", where=store.name, to_do="check the address and the credentials"
                ) from error
            return Path(scratch)

        yield look


def _as_json(receipt: Any, progress: Any) -> dict[str, Any]:
    """One look, for programs."""
    found = receipt.to_json()
    kept = ("run", "usd", "wall_s", "final_loss", "metrics", "tokens_per_s", "mfu", "peak_bytes", "interruptions")
    return {**progress.to_json(), **{name: found[name] for name in kept}, "diagnosis": found["diagnosis"]}
