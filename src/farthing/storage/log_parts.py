"""A log that only grows, as pieces that end with a line: all but the last are written once and
never change.

A store is sent the last piece with every commit, and each other one once. Refuses to know what a
line says.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from farthing.storage.files import make_private, sha256_of

PART_BYTES = 1 << 20


class LogParts:
    """The pieces of the log at `path`, kept in `folder`, which is made when there are any."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder
        self.digests: dict[str, str] = {}
        """sha256 of the pieces that are whole, by name."""
        self._cut_bytes = 0

    def bring_up(self) -> Path | None:
        """Cut off what is whole; returns a new copy of the rest, named as the last piece, or None
        where nothing is left.

        A log that has become shorter, as after a restore, is cut anew. Raises `OSError`.
        """
        if not self.path.exists():
            return None
        make_private(self.folder)
        if self.path.stat().st_size < self._cut_bytes:
            shutil.rmtree(self.folder)
            make_private(self.folder)
            self.digests, self._cut_bytes = {}, 0
        with open(self.path, "rb") as log:
            log.seek(self._cut_bytes)
            while len(piece := log.read(PART_BYTES)) == PART_BYTES:
                piece += log.readline()
                if not piece.endswith(b"\n"):
                    break
                name = self._next_name()
                (self.folder / name).write_bytes(piece)
                self.digests[name] = sha256_of(self.folder / name)
                self._cut_bytes += len(piece)
        if not piece:
            return None
        rest = self.folder / self._next_name()
        rest.unlink(missing_ok=True)  # of the commit before, which may still be linked elsewhere
        rest.write_bytes(piece)
        return rest

    def _next_name(self) -> str:
        return f"{len(self.digests):06d}"
