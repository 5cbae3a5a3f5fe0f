"""Names of a job that stand for files: absolute by the folder that their key stands in.

What reads a job gives a function from a key to that folder as the context of pydantic's validation.
Without it names stay as they are.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from pathlib import Path

from pydantic import AfterValidator, ValidationInfo

from farthing.addresses import is_remote

MOST_NAME_BYTES = 255  # of ext4, XFS, APFS and NTFS
_IS_GLOB = re.compile(r"[*?[]")
_OF_FILES = re.compile(
    r"\.(jsonl|ndjson|json|csv|tsv|parquet|gz|txt|zip|zst|arrow|xlsx)$", re.IGNORECASE
)


def placed(resolve: Callable[[str, Path], str]) -> AfterValidator:
    """A validator that makes a name absolute."""

    def place(name: str, info: ValidationInfo) -> str:
        return resolve(name, info.context(info.field_name)) if info.context else name

    return AfterValidator(place)


def folder(path: str, base: Path) -> str:
    """A path as it is from a folder. Links stay: whose a run folder is will be looked at. Raises
    `ValueError` for a name that no file can have.
    """
    if "\0" in path:
        raise ValueError("a NUL character in a path; write it without")
    longest = max((len(os.fsencode(part)) for part in Path(path).parts), default=0)
    if longest > MOST_NAME_BYTES:
        raise ValueError(
            f"a name of {longest} bytes in a path; file systems take {MOST_NAME_BYTES}; give a"
            " shorter one"
        )
    try:
        return os.path.abspath(base / Path(path).expanduser())
    except RuntimeError:
        raise ValueError(f"{path[:60]} is in the home of an unknown user; write it out") from None


def absolute(path: str, base: Path) -> str:
    """A file. Raises `ValueError` as `folder`."""
    whole = folder(path, base)
    return str((base / path).resolve()) if not path.startswith(("/", "~")) else whole


def local(name: str, base: Path) -> str:
    """An absolute path, or a Hub name or address as it is. A Hub name has at most one slash and no
    leading dot; whatever exists, or looks like a path, is a path.
    """
    if is_remote(name):
        return name
    path = absolute(name, base)
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(path).exists()
    return path if is_path or _OF_FILES.search(name) or _IS_GLOB.search(name) else name


def spelled_out(name: str, base: Path) -> list[str]:
    """The files of a pattern, in order; any other name alone."""
    path = local(name, base)
    is_glob = _IS_GLOB.search(path) and not is_remote(path)
    return (sorted(glob.glob(path)) if is_glob else []) or [path]


def store(name: str, base: Path) -> str:
    return name if is_remote(name) else absolute(name, base)


def run_and_step(name: str, base: Path) -> str:
    """`RUN` or `RUN:STEP`."""
    found = re.fullmatch(r"(.+?)(:\d+)?", name, re.DOTALL)
    assert found is not None
    return absolute(found[1], base) + (found[2] or "")
