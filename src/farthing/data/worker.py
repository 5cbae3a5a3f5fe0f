"""A process that makes every n-th part of a token set: `python -m farthing.data.worker FOLDER K N`.

It reads what to do from `spec.json` and leaves parts, then `end-K.json`: how many parts there
are in all, or what is wrong. It ends when its parent does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

from farthing.data.encode import TokenizerState
from farthing.data.formats import Understood
from farthing.data.parts import PartMaker, places
from farthing.data.read import Source
from farthing.data.rows import Layout
from farthing.data.token_set import Recipe
from farthing.errors import DataError, InputError
from farthing.storage.files import Json, read_json, write_json

SPEC = "spec.json"


def part_path(folder: Path, number: int) -> Path:
    """The file of a part that waits to be taken into the set."""
    return folder / f"part-{number:06d}.npz"


def end_path(folder: Path, number: int) -> Path:
    """The file in which a worker says how it ended."""
    return folder / f"end-{number}.json"


def error_of(end: Json) -> Exception:
    """The error with which a worker ended."""
    kind, *said = end["error"]
    if kind == "os":
        return OSError(*said)
    what, where, to_do = said
    return {"data": DataError, "input": InputError}[kind](what, where=where, to_do=to_do)


def write_spec(
    folder: Path,
    sources: list[Source],
    understood: list[Understood | None],
    tokenizer: TokenizerState,
    recipe: Recipe,
    first: int,
) -> None:
    """Say what workers are to make, from part `first` on. Raises `OSError`."""
    write_json(
        folder / SPEC,
        {
            "sources": [
                [each.name, each.kind, list(map(str, each.paths)), vars(each.layout), each.columns]
                for each in sources
            ],
            "understood": understood,
            "tokenizer": {each.name: getattr(tokenizer, each.name) for each in fields(tokenizer)},
            "recipe": recipe.settings(),
            "first": first,
        },
    )


def _tuples(value: Any) -> Any:
    """Lists of JSON as the tuples that were written."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _maker(spec: Json) -> tuple[list[Source], PartMaker]:
    sources = [
        Source(name, "", kind, tuple(Path(each) for each in paths), Layout(**layout), columns)
        for name, kind, paths, layout, columns in spec["sources"]
    ]
    understood = [
        None
        if each is None
        else Understood(
            each[0], {name: _tuples(own) for name, own in each[1].items()}, tuple(each[2])
        )
        for each in spec["understood"]
    ]
    chosen: Json = {
        name: {key: _tuples(own) for key, own in value.items()}
        if isinstance(value, dict)
        else _tuples(value)
        for name, value in spec["recipe"].items()
    }
    tokenizer = TokenizerState(**spec["tokenizer"])
    return sources, PartMaker(sources, understood, tokenizer, Recipe(**chosen))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Make the parts."""
    folder, (number, n_workers) = Path(sys.argv[1]), map(int, sys.argv[2:4])
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    spec = read_json(folder / SPEC)
    found: Json = {}
    n_parts = 0
    try:
        sources, maker = _maker(spec)
        for n_parts, place in enumerate(places(sources), start=1):
            at = n_parts - 1
            path = part_path(folder, at)
            if at >= spec["first"] and at % n_workers == number and not path.exists():
                maker.make(place).write(path)
        found = {"n_parts": n_parts}
    except InputError as error:
        kind = "data" if isinstance(error, DataError) else "input"
        found = {"error": [kind, error.what, error.where, error.to_do], "part": n_parts}
    except OSError as error:
        why = ["os", error.errno, error.strerror or str(error)]
        found = {"error": why, "part": n_parts}
    write_json(end_path(folder, number), found)


if __name__ == "__main__":
    main()
