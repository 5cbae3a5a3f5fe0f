"""Append-only logs whose every line carries a checksum of its own, so that a damaged line is found
and the others are kept. A line without a checksum is a damaged one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from farthing.storage.files import Json, open_own, parse_json, write_text

_TAIL = re.compile(rb', "crc32": "([0-9a-f]{8})"\}')
_TAIL_BYTES = len(b', "crc32": "01234567"}')


def line_of(row: Json, *, ensure_ascii: bool = False) -> str:
    """Without its end, with the CRC-32 of its own content, eight hex digits, as its last value."""
    text = json.dumps(row, allow_nan=False, ensure_ascii=ensure_ascii)
    return f'{text[:-1]}, "crc32": "{zlib.crc32(text.encode()):08x}"}}'


def read_line(line: bytes) -> Json | None:
    """The row of a line without its checksum; None where it is damaged."""
    text = checked(line)
    with contextlib.suppress(ValueError):
        row = None if text is None else parse_json(text.decode("utf-8"))
        return row if isinstance(row, dict) else None
    return None


def newest_lines(path: Path, most_bytes: int) -> list[bytes]:
    """The last lines of a file, `most_bytes` of them, oldest first; none where it can't be read."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, 2) - most_bytes)
            file.seek(start)
            return file.read().split(b"\n")[bool(start) :]  # the first is the end of a line
    except OSError:
        return []


def checked(line: bytes) -> bytes | None:
    """A line's text without its checksum, not taken apart; None where it is damaged."""
    line = line.rstrip(b"\n")
    whole = line[: line.rfind(b"}") + 1]
    if len(line) > len(whole) + 1:  # one byte is an end of the line that was damaged
        return None
    found = _TAIL.fullmatch(whole[-_TAIL_BYTES:])  # a line may be long: only its end is looked at
    text = whole[:-_TAIL_BYTES] + b"}"
    return text if found and zlib.crc32(text) == int(found[1], 16) else None


def append_line(path: Path, row: Json) -> None:
    """Add a line to a file that may be a link, and force it to the disk. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.closing(SummedLines(path.resolve())) as lines:
        lines.append(row)
        lines.sync()


class SummedLines:
    """An append-only log, a JSON object with its checksum a line. Damaged ones are left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: list[int] = []
        """Numbers, from 1, of the lines that were damaged when the log was last read through."""
        self._file: IO[bytes] | None = None

    def append(self, row: Json) -> None:
        """Hand one line to the operating system: it survives the death of this process. Raises
        `OSError`.

        It is one write: processes that do so together don't tear each other's lines. After a torn
        one a new one is begun.
        """
        if self._file is None:
            self._file = open_own(self.path, "ab+")
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, end - 1))
        is_torn = self._file.read(1) not in (b"", b"\n")
        data = (("\n" if is_torn else "") + line_of(row) + "\n").encode()
        if self._file.write(data) != len(data):
            self._file.truncate(end)  # a half would be a damaged line as soon as one follows
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

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
        """Every whole line, in order. The last one may be torn by a kill: it is not counted."""
        self.damaged = []
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if (row := read_line(line)) is not None:
                    yield row
                elif line.strip() and line.endswith(b"\n"):
                    self.damaged.append(number)

    def keep(self, wanted: Callable[[Json], bool]) -> None:
        """Drop the lines that are not wanted, in one step."""
        self.close()
        if self.path.exists():
            write_text(self.path, (line_of(row) + "\n" for row in self.rows() if wanted(row)))
