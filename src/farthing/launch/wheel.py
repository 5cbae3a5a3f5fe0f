"""farthing itself on its way to a machine: a wheel of the very code that runs here.

A rented machine that installed farthing by its name would run whatever an index has under that
name, beside the keys of the store. So the wheel travels by checksum, as data and models do.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import sys
import zipfile
from collections.abc import Sequence
from email import message_from_string
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import farthing
from farthing.errors import EXIT_FINISHED, EXIT_MISTAKE, InputError
from farthing.storage.files import files_below

FETCHER = "obstore==0.12.1"
"""The library by which a machine without farthing reads the store."""


class Wheel(NamedTuple):
    """A built wheel."""

    name: str
    content: bytes
    sha256: str


@cache
def wheel_of_this() -> Wheel:
    """Of the running package. Raises `InputError` where nothing tells what it needs."""
    info = f"farthing-{farthing.__version__}.dist-info"
    root = Path(farthing.__file__).parent
    files = {
        f"farthing/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in files_below(root)
        if "__pycache__" not in path.parts
    }
    files[f"{info}/METADATA"] = _metadata().encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: farthing\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nfarthing = farthing.cli:entry\n"
    rows = [f"{name},{_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)  # of no time: the same files make the same wheel
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    content = packed.getvalue()
    name = f"farthing-{farthing.__version__}-py3-none-any.whl"
    return Wheel(name, content, hashlib.sha256(content).hexdigest())


def _metadata() -> str:
    """What farthing needs, as noted when it was installed. Raises `InputError`."""
    try:
        found = metadata.distribution("farthing")
        return found.read_text("METADATA") or found.read_text("PKG-INFO") or ""  # of an egg
    except metadata.PackageNotFoundError:
        raise InputError(
            "farthing runs from a folder without its metadata, so it can't be packed",
            where=str(Path(farthing.__file__).parents[2]),
            to_do="pip install -e . there, or name an image with farthing in it: --image",
        ) from None


def refuse_without_extras(names: Sequence[str]) -> None:
    """Raise `InputError` for extras unknown here: pip would leave them out with a warning."""
    known = message_from_string(_metadata()).get_all("Provides-Extra") or []
    if absent := [name for name in names if name not in known]:
        raise InputError(
            f"the farthing that is installed here knows no extra {', '.join(absent)}",
            where=str(Path(farthing.__file__).parent),
            to_do="install it again",
        )


def lacking(modules: Sequence[str]) -> list[str]:
    """Those that can't be imported here."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def say_lacking(version: str, modules: Sequence[str]) -> int:
    """2, and what is missing to stderr, for another version (but "any") or lacking modules."""
    lacks = [f"`{name}`" for name in lacking(modules)]
    if version not in ("any", farthing.__version__):
        lacks.append(f"version {version} of farthing, this is {farthing.__version__}")
    for each in lacks:
        sys.stderr.write(f"farthing: {each} is not installed here\n")
    return EXIT_MISTAKE if lacks else EXIT_FINISHED


def _digest(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


def fetch_script(wheel: Wheel, store: str, key: str) -> str:
    """A script that brings the wheel from the store; it fails where the bytes are others."""
    address = store if "://" in store else Path(store).as_uri()
    return f"""import hashlib, pathlib
import obstore, obstore.store
store, key = obstore.store.from_url({address!r}), {key!r}
data = bytes(obstore.get(store, key).bytes())
if hashlib.sha256(data).hexdigest() != {wheel.sha256!r}:
    obstore.delete(store, key)  # the next launch sends it again
    raise SystemExit("the wheel in the store is not the one that was sent")
pathlib.Path({wheel.name!r}).write_bytes(data)
"""
