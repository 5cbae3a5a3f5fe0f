"""Where the command line writes: stdout for results, stderr for everything else, also when nobody
reads any more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farthing.errors import InputError, JobError
from farthing.printable import printable_lines


def discard(stream: Any) -> None:
    """From now on what is written to a stream whose reader is gone goes nowhere, also at the end of
    the process.
    """
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # a stream of a test has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def complain(what: object) -> None:
    """A message, which may quote names and texts of others, to stderr. Of several problems each has
    lines of its own.
    """
    problems = what.problems if isinstance(what, JobError) else [what]
    write("farthing: " + "\n".join(printable_lines(problem) for problem in problems))


def write(text: str) -> None:
    """To stderr; that nobody reads it changes no exit code. A closed terminal is an `OSError`."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def is_full(error: BaseException) -> bool:
    """Whether a disk, or a quota or limit of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def print_json(value: Any) -> None:
    """A JSON document on stdout."""
    put(json.dumps(value, indent=1, allow_nan=False) + "\n")


def put(text: str) -> None:
    """To stdout; the exit code stays what it is, whether it is read or not."""
    try:
        with _closed_is_broken():
            print(text, end="", flush=True)
    except BrokenPipeError:
        discard(sys.stdout)


def write_page(path: Path, text: str) -> None:
    """A page for a browser. Raises `InputError` where no file can be written there."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if is_full(error):
            raise
        what = f"the page can't be written: {error.strerror}"
        raise InputError(what, where=str(path), to_do="name another file") from error


class _Terminal:
    """A stream. One whose terminal was closed (EIO) is a pipe that nobody reads."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _closed_is_broken():
            return int(self._stream.write(text))

    def flush(self) -> None:
        with _closed_is_broken():
            self._stream.flush()


@contextlib.contextmanager
def _closed_is_broken() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EIO:
            raise BrokenPipeError from error
        raise


def rich_console(*, stderr: bool = False, goes_on: bool = False) -> Any:
    """A console for people; a log has no edge at column 80. With `goes_on` it is no error when its
    reader is gone.
    """
    from farthing.report.safe import SafeConsole

    class Door(SafeConsole):
        @property
        def file(self) -> Any:
            return _Terminal(super().file)

        @file.setter
        def file(self, new_file: Any) -> None:
            self._file = new_file

        def on_broken_pipe(self) -> None:
            if not goes_on:
                raise BrokenPipeError
            discard(self.file)

    console = Door(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    return console
