"""Whether a folder is a bucket that was mounted as a file system.

Such a folder looks like a disk and is none: renaming a folder there copies its objects one by one,
and a lock holds on one machine only.
"""

from __future__ import annotations

from pathlib import Path

TABLE = Path("/proc/self/mountinfo")
_OF_BUCKETS = (
    "gcsfuse",
    "s3fs",
    "mountpoint-s3",
    "mount-s3",
    "goofys",
    "geesefs",
    "tigrisfs",
    "rclone",
    "blobfuse",
    "ossfs",
    "obsfs",
    "cosfs",
)
"""Each as type (`fuse.gcsfuse`) or source of its mount."""


def bucket_mount_of(folder: Path) -> str | None:
    """The program that shows a bucket at `folder` or above; None on a disk, or if unknown."""
    try:
        lines = TABLE.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    place, found = folder.resolve(), None
    longest = -1
    for line in lines:
        mount, _, about = line.partition(" - ")
        if len(fields := mount.split(" ")) < 5 or len(kinds := about.split(" ")) < 2:
            continue
        point = Path(fields[4].encode().decode("unicode_escape"))
        if (
            place.is_relative_to(point) and len(point.parts) >= longest
        ):  # later ones cover earlier ones
            longest, found = len(point.parts), _program(kinds[0], kinds[1])
    return found


def _program(kind: str, source: str) -> str | None:
    family, _, name = kind.partition(".")
    if family not in ("fuse", "fuseblk"):
        return None
    return next(
        (each for each in _OF_BUCKETS if name.startswith(each) or source.startswith(each)), None
    )
