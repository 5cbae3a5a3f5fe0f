"""The exported model of a run, and whether it is still what was written.

`manifest.json` in its folder names every other file with size and sha256, but for the card: that is
written again with the receipt.
"""

from __future__ import annotations

from pathlib import Path

from farthing.run.folder import CHECKPOINTS, MODEL, saves_in
from farthing.storage.files import (
    MANIFEST,
    DamagedFileError,
    seal,
    seal_file,
    verify_folder,
)

CARD = "README.md"


def seal_export(draft: Path) -> None:
    """Write the manifest of an exported model that is about to be put in place."""
    paths = [
        path
        for path in sorted(draft.iterdir())
        if path.is_file() and path.name not in (CARD, MANIFEST)
    ]
    files = [seal_file(path) for path in paths]
    (draft / MANIFEST).write_text(
        seal({"kind": "farthing export", "schema": 1, "files": files}), encoding="utf-8"
    )


def damaged_checkpoints(run: Path) -> list[str]:
    """What is wrong with the checkpoints of a finished run, a sentence each. Every byte is read."""
    said = []
    for save in saves_in(run / CHECKPOINTS):
        try:
            verify_folder(save.folder)
        except DamagedFileError as error:
            said.append(
                f"the checkpoint of step {save.step} is damaged ({error}); the model is whole"
            )
    return said


def damage_of(run: Path) -> str | None:
    """In what way the exported model of a run is not what was written; None where it is whole, or
    there is none.

    Every byte is read.
    """
    folder = run / MODEL
    if not folder.is_dir():
        return None
    try:
        verify_folder(folder, besides=[CARD])
    except DamagedFileError as error:
        return str(error)
    return None
