"""Append-only logs whose every line carries a checksum of its own, so that a damaged line is found and the others are kept.

Lines from before there were checksums are taken as they are, as long as they stand before the first line with one. Refuses
to know what a line says.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from farthing.durability.files import Json, open_own, parse_json, write_text

SUM = "crc32"
_TAIL = re.compile(rb', "crc32": "([0-9a-f]{8})"\}')
_TAIL_BYTES = len(', "crc32": "01234567"}')


def with_sum(row: Json) -> Json:
    """A row with the CRC-32 of its own content, eight hex digits, as its last value."""
    content = {key: value for key, value in row.items() if key != SUM}
    return {**content, SUM: f"{zlib.crc32(_as_text(content).encode()):08x}"}


def read_line(line: bytes) -> tuple[Json | None, bool]:
    """(the row of a line without its checksum, whether it had one); None in place of a row that is damaged."""
    text, is_summed = checked(line)
    row = None
    with contextlib.suppress(ValueError):
        row = None if text is None else parse_json(text.decode("utf-8"))
    if not isinstance(row, dict) or SUM in row:
        return None, False
    return row, is_summed


def newest_lines(path: Path, most_bytes: int) -> list[bytes]:
    """The last lines of a file, `most_bytes` of them, oldest first; none where it can't be read."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, 2) - most_bytes)
            file.seek(start)
            return file.read().split(b"\n")[1 if start else 0 :]  # the first is from the middle of a line
    except OSError:
        return []


def checked(line: bytes) -> tuple[bytes | None, bool]:
    """(a line's text without its checksum, whether it had one), not taken apart; None in place of text that is damaged."""
    whole = line.rstrip(b"\n")
    end = whole[-_TAIL_BYTES:]  # a line may be long: only its end is looked at
    found = _TAIL.fullmatch(end)
    if found is None:
        return whole, False
    text = whole[:-_TAIL_BYTES] + b"}"
    return (text, True) if zlib.crc32(text) == int(found[1], 16) else (None, False)


def _as_text(row: Json) -> str:
    return json.dumps(row, allow_nan=False, ensure_ascii=False)


class SummedLines:
    """An append-only log of one JSON object a line, each with its checksum. Damaged lines are left out when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: list[int] = []
        """Numbers, from 1, of the lines that were damaged when the log was last read through."""
        self._file: IO[str] | None = None

    def append(self, row: Json) -> None:
        """Write one line and hand it to the operating system: it survives the death of this process."""
        if self._file is None:
            torn = self.path.exists() and self.path.stat().st_size > 0 and not self._ends_a_line()
            self._file = open_own(self.path, "a")
            if torn:
                self._file.write("\n")
        self._file.write(_as_text(with_sum(row)) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Force the lines to the disk: they survive the death of the machine."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def rows(self) -> Iterator[Json]:
        """Every whole line without its checksum, in order. The last one may have been torn by a kill: it is not counted."""
        self.damaged, has_sums = [], False
        if not self.path.exists():
            return
        torn = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                row, is_summed = read_line(line)
                has_sums |= is_summed
                if row is not None and (is_summed or not has_sums):
                    yield row
                elif line.strip():
                    self.damaged.append(number)
                    torn = number if not line.endswith(b"\n") else 0
        self.damaged = [number for number in self.damaged if number != torn]

    def keep(self, wanted: Callable[[Json], bool]) -> None:
        """Drop the lines that are not wanted, in one step."""
        self.close()
        if self.path.exists():
            write_text(self.path, (_as_text(with_sum(row)) + "\n" for row in self.rows() if wanted(row)))

    def _ends_a_line(self) -> bool:
        with open(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
