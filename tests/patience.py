"""Waiting for what a test means: as long as a machine may take that others use, and no longer than
it takes here.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def until(what: Callable[[], T], seconds: float = 120.0) -> T:
    """The first answer of `what` that is true; the test fails where none comes within so many
    seconds.
    """
    give_up_at = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < give_up_at, f"it had not come to be after {seconds:.0f} s"
        time.sleep(0.005)
    return found


def titles_of_processes() -> list[bytes]:
    """The command lines of all processes on this machine, as anybody may read them; some end
    meanwhile.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return found
