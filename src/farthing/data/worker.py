"""A process that makes every n-th part of a token set: `python -m farthing.data.worker FOLDER K N`.

It reads what to do from `spec.json`, leaves parts, and prints how it ended: how many parts there
are, or what is wrong with which. It ends when its parent does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from farthing.data.encode import PlainTokenizer
from farthing.data.formats import Understood
from farthing.data.parts import PartMaker
from farthing.data.read import Source
from farthing.data.rows import Layout
from farthing.data.token_set import Recipe
from farthing.errors import DataError, InputError
from farthing.storage.files import Json, read_json, write_json

SPEC = "spec.json"


def error_of(kind: str, *said: Any) -> Exception:
    """The error with which a worker ended."""
    if kind == "os":
        return OSError(*said)
    what, where, to_do = said
    return {"data": DataError, "input": InputError}[kind](what, where=where, to_do=to_do)


def write_spec(
    folder: Path,
    sources: Sequence[Source],
    understood: Sequence[Understood | None],
    tokenizer: PlainTokenizer,
    recipe: Recipe,
) -> None:
    """Say what workers are to make. Raises `OSError`."""
    spec = {
        "sources": [asdict(each) | {"paths": list(map(str, each.paths))} for each in sources],
        "understood": understood,
        "tokenizer": tokenizer.state(),
        "recipe": asdict(recipe),
    }
    write_json(folder / SPEC, spec)


def _maker(folder: Path) -> PartMaker:
    spec = read_json(folder / SPEC)
    sources = [
        Source(
            **each | {"paths": tuple(map(Path, each["paths"])), "layout": Layout(**each["layout"])}
        )
        for each in spec["sources"]
    ]
    understood = [each and Understood(*each) for each in spec["understood"]]
    return PartMaker(
        sources, understood, PlainTokenizer.from_state(spec["tokenizer"]), Recipe(**spec["recipe"])
    )


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Make the parts."""
    folder, (number, n_workers) = Path(sys.argv[1]), map(int, sys.argv[2:4])
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    end: Json = {"n_parts": 0, "error": None}
    try:
        for _ in _maker(folder).make_all(folder, number, n_workers):
            end["n_parts"] += 1
    except InputError as error:
        kind = "data" if isinstance(error, DataError) else "input"
        end["error"] = [kind, error.what, error.where, error.to_do]
    except OSError as error:
        end["error"] = ["os", error.errno, error.strerror or str(error)]
    sys.stdout.write(json.dumps(end))


if __name__ == "__main__":
    main()
