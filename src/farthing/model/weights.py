"""What weight files hold, as hashes: of every byte once, and from a note of it as long as the file
is the same on the disk.

Reading them takes about a second a gigabyte, and is not lost: the system keeps what was read for
the loading that follows.
"""

from __future__ import annotations

import contextlib
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from farthing.storage.files import is_own, own_folder, parse_json, sha256_of, write_json

N_THREADS = 4


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, by name."""
    return sorted(folder.glob("*.safetensors"))


def weights_sha256(folder: Path, cache_dir: Path | None = None) -> list[tuple[str, str]]:
    """(name, sha256) of every weight file; with a cache directory a file is read once, until its
    size, time or place change. Raises `OSError`."""
    files = weight_files(folder)
    with ThreadPoolExecutor(N_THREADS) as threads:
        sums = threads.map(lambda path: _noted(path, cache_dir), files)
        return [(path.name, found) for path, found in zip(files, sums, strict=True)]


def _noted(path: Path, cache_dir: Path | None) -> str:
    """The sha256 of a file. What can't be noted is read again the next time."""
    if cache_dir is None:
        return sha256_of(path)
    status, note = path.stat(), None
    now = [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        folder = own_folder(cache_dir / "weights", lambda text: None)
        note = folder / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
        before = parse_json(note.read_text(encoding="utf-8")) if is_own(folder) else {}
        if before["of"] == now and len(before["sha256"]) == 64:
            return str(before["sha256"])
    found = sha256_of(path)
    if note is not None and path.stat().st_mtime_ns == status.st_mtime_ns:
        with contextlib.suppress(OSError):
            write_json(note, {"of": now, "sha256": found})
    return found
