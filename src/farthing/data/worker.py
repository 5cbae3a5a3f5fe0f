"""A process that makes every n-th part of a token set: `python -m farthing.data.worker FOLDER K N`.

It reads what to do from the folder and leaves parts there. What it can't do, its parent does again
and reports. It ends when its parent does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from farthing.data.encode import PlainTokenizer
from farthing.data.formats import Understood
from farthing.data.parts import PartMaker, path_of_part, places
from farthing.data.read import Source
from farthing.data.token_set import TokenRecipe
from farthing.errors import InputError
from farthing.storage.files import Json, write_text

SPEC = "spec.json"


class Spec(NamedTuple):
    """What parts are made of."""

    sources: list[Source]
    understood: list[Understood | None]
    tokenizer: Json
    """As `PlainTokenizer.state` has it."""
    recipe: TokenRecipe

    def write(self, folder: Path) -> None:
        """Raises `OSError`."""
        write_text(folder / SPEC, TypeAdapter(Spec).dump_json(self).decode())


def main() -> None:
    """Make the parts."""
    folder, (own, n_workers), parent = Path(sys.argv[1]), map(int, sys.argv[2:4]), os.getppid()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    spec = TypeAdapter(Spec).validate_json((folder / SPEC).read_bytes())
    tokenizer = PlainTokenizer.from_state(spec.tokenizer)
    maker = PartMaker(spec.sources, spec.understood, tokenizer, spec.recipe)
    with contextlib.suppress(InputError, OSError):
        for number, place in enumerate(places(spec.sources)):
            path = path_of_part(folder, number)
            if number % n_workers == own and not path.exists():
                maker.make(place).write(path)
            if os.getppid() != parent:
                break


if __name__ == "__main__":
    main()
