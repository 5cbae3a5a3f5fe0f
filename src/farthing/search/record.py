"""What a search knows: `search.jsonl` in its folder, a line for each decision and each result.

A search that is begun again reads it and repeats nothing. The file is on the disk before anything
follows from a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farthing.errors import RunChangedError, RunDamagedError
from farthing.run.folder import SEARCH_LOG
from farthing.storage.files import Json
from farthing.storage.logs import SummedLines

TRIALS = "trials"


class SearchRecord:
    """The lines of a search, by what they are about."""

    def __init__(self, folder: Path) -> None:
        self._lines = SummedLines(folder / SEARCH_LOG)
        self.header: Json = {}
        self.settings: dict[int, Json] = {}
        self.counts: Json = {}
        self.parts: dict[int, int] = {}
        """Trials on a part of the data, and whose settings they have."""
        self.results: dict[tuple[int, int], Json] = {}
        """By (trial, rung)."""
        self.confirmed: dict[int, Json] = {}
        self.ended: Json = {}
        for row in self._lines.rows():
            self._take(row)
        if self._lines.damaged:
            raise RunDamagedError(
                f"lines {self._lines.damaged} of the search are damaged",
                where=str(self._lines.path),
                to_do="restore the file from a copy, or give the search another output_dir",
            )

    def add(self, kind: str, /, **values: Any) -> Json:
        """Write a line, and force it to the disk. Raises `OSError`."""
        row = {**values, "kind": kind}
        self._lines.append(row)
        self._lines.sync()
        self._take(row)
        return row

    def close(self) -> None:
        self._lines.close()

    def _take(self, row: Json) -> None:
        match row["kind"]:
            case "search":
                self.header = row
            case "counts":
                self.counts = row
            case "trial":
                self.settings[row["trial"]] = row["settings"]
                if "part_of" in row:
                    self.parts[row["trial"]] = row["part_of"]
            case "rung":
                self.results[row["trial"], row["rung"]] = row
            case "confirmed":
                self.confirmed[row["trial"]] = row
            case "ended":
                self.ended = row

    def must_be(self, asked: Mapping[str, Any]) -> None:
        """Raises `RunChangedError` where the folder holds another search."""
        before = self.header.get("asked", asked)
        if keys := sorted(k for k in {*before, *asked} if before.get(k) != asked.get(k)):
            raise RunChangedError(
                f"this folder holds a search of another job ({', '.join(keys)} differ)",
                where=str(self._lines.path.parent),
                to_do="give the search another output_dir, or set the keys as they were",
            )

    def newest(self, trial: int) -> Json:
        """The result of a trial at the highest rung it has reached; empty before the first."""
        rungs = [rung for number, rung in self.results if number == trial]
        return self.results[trial, max(rungs)] if rungs else {}


def folder_of(search: Path, trial: int) -> Path:
    """The run folder of a trial."""
    return search / TRIALS / f"{trial:03d}"


def store_of(search: str, trial: int) -> str:
    """The store of a trial's run, below that of the search."""
    return f"{search.rstrip('/')}/{TRIALS}/{trial:03d}"
