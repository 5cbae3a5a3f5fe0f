"""Whether a folder is a bucket that was mounted as a file system.

Such a folder looks like a disk and is none: renaming a folder there copies its objects one by one,
and a lock holds on one machine only.
"""

from __future__ import annotations

from pathlib import Path

import psutil

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
    place, found, longest = folder.resolve(), None, 0
    for mount in psutil.disk_partitions(all=True):
        length = len(Path(mount.mountpoint).parts)
        if place.is_relative_to(mount.mountpoint) and length >= longest:  # later ones cover others
            longest, found = length, mount
    if found is None or not found.fstype.startswith("fuse"):
        return None
    names = found.fstype.rpartition(".")[2], found.device
    return next((each for each in _OF_BUCKETS if any(n.startswith(each) for n in names)), None)
